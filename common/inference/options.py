"""What the inference script of each app is told; it loads no torch, so that --help answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
"""What torch trains and computes in."""
ModelPrecision = Literal["fp32", "fp16", "int8"]
"""What an ONNX model or an engine may be in: INT8 is made from the export in fp32."""
AnyPrecision = Literal[Precision, ModelPrecision]
Backend = Literal["tensorrt", "onnxruntime", "torch"]


@dataclass(frozen=True)
class InferConfig:
    """What inference is told.

    Args:
        model: folder of a training run, or of an imported one (`export.py --init`).
        input: a .nii.gz or .nii file, a folder of them, or a folder of DICOM series (CT or MR of one channel).
        output: folder for the label maps; must not be the input's.
        backend: tensorrt, onnxruntime, torch, or auto (an engine that fits this GPU, else the fastest that is here).
        precision: fp32, fp16, bf16 (torch only), int8 (exported ones only), or auto (the run's own with torch, else
            fp32).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a picture of each scan.
        flips: test-time augmentation: axes of R, A, S (x, y, z) whose mirror images are segmented too, the logits
            averaged; "xyz" takes eight times as long.
        fit_windows: size the windows to each scan (torch only): no more of them, but smaller, so that less is computed
            twice; up to twice as fast, and label maps differ a little.
        largest_component: keep only the largest connected part of each structure.
        smallest_ml: drop connected parts that are smaller, in ml.
        keep_patient: copy the patient's name and the like from DICOM into the DICOM-SEG, for a PACS; by default they
            are left blank.
    """

    model: Path
    input: Path
    output: Path
    backend: Literal["auto", Backend] = "auto"
    precision: Literal["auto", AnyPrecision] = "auto"
    device: str = "auto"
    overlays: bool = True
    flips: str = ""
    fit_windows: bool = False
    largest_component: bool = False
    smallest_ml: float = 0.0
    keep_patient: bool = False

    def __post_init__(self) -> None:
        """Check the folders and bounds.

        Raises:
            ValueError: the output would overwrite the input; another field is out of its bounds.
        """
        folder = self.input if self.input.is_dir() else self.input.parent
        if self.output.resolve() == folder.resolve():
            raise ValueError(f"output {self.output}: must not be the folder of the input, whose files it would replace")
        if set(self.flips) - set("xyz") or len(set(self.flips)) != len(self.flips):
            raise ValueError(f"flips {self.flips!r}: must be some of the letters x, y and z, each once")
        if not 0 <= self.smallest_ml < float("inf"):
            raise ValueError(f"smallest_ml {self.smallest_ml}: must be a volume in ml, 0 to keep all")
