"""What the scan of slides is told; it loads no torch, so that --help answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.export.options import ExportConfig


@dataclass(frozen=True)
class ScanConfig:
    """What a scan is told.

    Args:
        model: folder of a training run.
        input: a slide, or a folder of slides.
        output: folder that gets a folder for each slide.
        mode: dense (tiles of the fully convolutional network, a probability every 32 pixels) or patches (MONAI's way,
            one call of the network for each, every `stride` pixels).
        stride: pixels, as the network sees them, between two patches; a multiple of 32.
        backend: tensorrt, onnxruntime, torch, or auto (an engine that fits this GPU, else the fastest that is here).
        precision: fp32, fp16, bf16 (torch only), int8 (exported ones only), or auto (the run's own with torch, else
            fp32).
        reader: cucim, openslide, tifffile, or auto (the first of them that reads all levels).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw each slide with its probabilities.
    """

    model: Path
    input: Path
    output: Path
    mode: Literal["dense", "patches"] = "dense"
    stride: int = 64
    backend: Literal["auto", "tensorrt", "onnxruntime", "torch"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    reader: Literal["auto", "cucim", "openslide", "tifffile"] = "auto"
    device: str = "auto"
    overlays: bool = True

    def __post_init__(self) -> None:
        """Check the stride.

        Raises:
            ValueError: it is not a multiple of 32 above 0.
        """
        if self.stride < 1 or self.stride % 32:
            raise ValueError(f"stride {self.stride}: must be a multiple of 32 above 0")


@dataclass(frozen=True)
class EvaluateConfig:
    """What the evaluation of scans is told.

    Args:
        scans: folder that a scan wrote.
        data: set of slides with a reference, the training set's or another.
    """

    scans: Path
    data: Path


@dataclass(frozen=True)
class PathologyExport(ExportConfig):
    """What the hand-over of a run is told.

    Args:
        patch_size: with --init only, as all that follow: side of the patches, pixels.
        mpp: um per pixel of the slides that the weights were trained on; null leaves it open.
        tile_size: side of the tiles of a dense scan, pixels; a multiple of 32.
    """

    patch_size: int = 224
    mpp: float | None = None
    tile_size: int = 1152
