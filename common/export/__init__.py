"""From weights to ONNX and TensorRT, through the parity gate.

Here is what the export script of each app is told: without torch, so that --help answers at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medspeed.common.inference.options import ModelPrecision


@dataclass(frozen=True)
class ExportConfig:
    """What is handed over, and how.

    Args:
        model: folder of a training run; with --init one that is made.
        to: onnx (models behind the gate), engine (those, and TensorRT engines), triton (a model repository), or bundle
            (MONAI's).
        output: folder of the repository or bundle; null takes `triton` or `bundle` in the run's. ONNX models and
            engines always go to `exports` of the run, where inference looks for them.
        precision: of the ONNX model that a Triton repository serves.
        int8: also make INT8 models, calibrated on cases that the network was trained on.
        data: dataset for the gate and the calibration; null takes the run's own. Without either, exports must agree
            with torch on synthetic data.
        init: weights to make the run of, without training: a .safetensors of ours, or the .pt of a MONAI bundle.
        engine: which TensorRT builds engines.
        device: auto, cpu, cuda or cuda:N.
    """

    model: Path
    to: Literal["onnx", "engine", "triton", "bundle"]
    output: Path | None = None
    precision: ModelPrecision = "fp32"
    int8: bool = False
    data: Path | None = None
    init: Path | None = None
    engine: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        """Check that the fields fit each other.

        Raises:
            ValueError: names the field and the bound.
        """
        if self.output is not None and self.to in ("onnx", "engine"):
            raise ValueError(f"output {self.output}: of --to triton and bundle only; models go to the run's `exports`")
        if self.precision != "fp32" and self.to != "triton":
            raise ValueError(f"precision {self.precision}: of --to triton only; models are made in fp32 and fp16")
        if self.int8 and self.to == "bundle":
            raise ValueError("int8 true: a bundle holds torch's weights; use --to onnx, engine or triton")

    def makes_int8(self) -> bool:
        """Return whether INT8 models are wanted."""
        return self.int8 or self.precision == "int8"

    def destination(self) -> Path:
        """Return the folder of the repository or bundle."""
        return self.output or self.model / self.to

    def served(self) -> Path:
        """Return the ONNX model of a run that a Triton repository serves."""
        return self.model / "exports" / f"model_{self.precision}.onnx"
