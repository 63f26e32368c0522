"""What the export script of each app is told; without torch, so that --help answers at once."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from medspeed.common.inference import ModelPrecision
from medspeed.common.inference.options import model_folders


@dataclass(frozen=True)
class ExportConfig:
    """The configuration of an export.

    Args:
        model: run folder (demo: small CT weights trained on phantoms only); with --init, the run folder to create.
            Several, or a folder of folds, become one model, an ensemble; --output is its new run folder.
        to: onnx (verified models), engine (also TensorRT engines), triton (a model repository) or bundle (MONAI's).
        output: folder for the repository or bundle; triton or bundle in the run folder by default. ONNX models and
            engines of one run always go to exports in the run folder, where inference looks for them.
        precision: precision of the ONNX model in a Triton repository.
        int8: also make INT8 models, calibrated on training cases.
        data: dataset to verify and calibrate with; the run's own by default. Without any, exports are compared with
            PyTorch on synthetic data.
        init: weights to import instead of training: a .safetensors file of this project, or the .pt of a MONAI bundle.
        engine: TensorRT to build engines with.
        device: auto, cpu, cuda or cuda:N.
    """

    model: tuple[Path, ...]
    to: Literal["onnx", "engine", "triton", "bundle"]
    output: Path | None = None
    precision: ModelPrecision = "fp32"
    int8: bool = False
    data: Path | None = None
    init: Path | None = None
    engine: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    device: str = "auto"

    GROUPS: ClassVar[dict[str, str]] = {  # of the help
        "export": "model network to output precision int8 data init engine device",
        "imported weights (with --init only)": "*",
    }

    def __post_init__(self) -> None:
        """Raise a ValueError where the fields do not fit each other, naming field and bound."""
        object.__setattr__(self, "model", model_folders(self.model))
        several, exports = len(self.model) > 1, self.to in ("onnx", "engine")
        if several and (self.output is None or not exports or self.init is not None):
            said = f"model {' '.join(map(str, self.model))}: several become one with --to onnx or engine and --output"
            raise ValueError(f"{said}, the run folder to create; then export that one in other forms")
        if self.output is not None and exports and not several:
            raise ValueError(f"output {self.output}: only for --to triton and bundle; others go to RUN/exports")
        if self.precision != "fp32" and self.to != "triton":
            raise ValueError(f"precision {self.precision}: only for --to triton; others are made in fp32 and fp16")
        if self.engine != "auto" and self.to != "engine":
            raise ValueError(f"engine {self.engine}: only for --to engine")
        if self.int8 and self.to == "bundle":
            raise ValueError("int8 true: a bundle contains PyTorch weights; use --to onnx, engine or triton")
        if self.data is not None and self.to == "bundle":
            raise ValueError(f"data {self.data}: a bundle is not judged on data; drop it, or use --to onnx")
        own = self.GROUPS["export"].split()
        others = [
            each.name for each in fields(self) if each.name not in own and getattr(self, each.name) != each.default
        ]
        if others and self.init is None:
            raise ValueError(f"{others[0]} {getattr(self, others[0])}: only with --init; a run keeps its own")

    @property
    def run(self) -> Path:
        """The run folder that is exported: of an ensemble the new one."""
        return self.model[0] if len(self.model) == 1 or self.output is None else self.output

    @property
    def destination(self) -> Path:
        """The folder of the repository or bundle."""
        return self.output or self.run / self.to
