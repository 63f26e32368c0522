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
    """The configuration of inference.

    Args:
        model: run folder, trained or imported (`export.py --init`).
        input: a .nii.gz or .nii file, a folder of them, or a folder of DICOM series (single-channel CT or MR).
        output: folder for the label maps, other than the input's.
        backend: tensorrt, onnxruntime, torch or auto (an engine that fits this GPU, else the fastest one available).
        precision: fp32, fp16, bf16 (torch only), int8 (exported models only) or auto (as trained with torch, else
            fp32).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a picture of each scan.
        flips: test-time augmentation: axes (of x, y, z = R, A, S) to flip; logits are averaged. xyz takes 8 times as
            long.
        fit_windows: fit the windows to each scan (torch only): never more windows, but smaller ones with less overlap;
            up to twice as fast, with slightly different label maps.
        largest_component: keep only the largest connected component of each structure.
        smallest_ml: remove connected components smaller than this volume in ml.
        keep_patient: copy patient data from DICOM into the DICOM-SEG, as a PACS needs; blank by default.
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
