"""What the inference script of each app is told; it loads no torch, so that --help answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class InferConfig:
    """What inference is told.

    Args:
        model: folder of a training run.
        input: a .nii.gz or .nii file, or a folder of them.
        output: folder for the label maps; must not be the input's.
        backend: tensorrt, onnxruntime, torch, or auto (an engine that fits this GPU, else the fastest that is here).
        precision: fp32, fp16, bf16 (torch only), or auto (the run's own with torch, else fp32).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a picture of each scan.
    """

    model: Path
    input: Path
    output: Path
    backend: Literal["auto", "tensorrt", "onnxruntime", "torch"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: str = "auto"
    overlays: bool = True

    def __post_init__(self) -> None:
        """Check the folders.

        Raises:
            ValueError: the output would overwrite the input.
        """
        folder = self.input if self.input.is_dir() else self.input.parent
        if self.output.resolve() == folder.resolve():
            raise ValueError(f"output {self.output}: must not be the folder of the input, whose files it would replace")
