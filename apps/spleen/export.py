"""Export a trained run: ONNX models that match PyTorch, TensorRT engines, a Triton repository or a MONAI bundle."""

from dataclasses import dataclass

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.common.config import parse_config
from medspeed.common.export.options import ExportConfig


@dataclass(frozen=True)
class SpleenExport(ExportConfig):
    """The configuration of an export; imported weights' defaults are spleen_ct_segmentation's, but for the overlap.

    Args:
        labels: class names, background first.
        channels: channels of each level; 16 32 64 128 256 by default.
        network: unet3d, or another as in training; a run with a network of your own needs it, too: its code runs.
        spacing: voxel spacing R, A, S in mm that the weights were trained at.
        window: CT intensity window, lower and upper HU.
        window_size: sliding window X, Y, Z in voxels.
        overlap: fraction of a window that its neighbor also covers.
    """

    labels: tuple[str, ...] = ("background", "spleen")
    channels: tuple[int, ...] | None = None
    network: str | None = None
    spacing: tuple[float, float, float] = (1.5, 1.5, 2.0)
    window: tuple[float, float] = (-57.0, 164.0)
    window_size: tuple[int, int, int] = (96, 96, 96)
    overlap: float = 0.25


if __name__ == "__main__":
    CONFIG = parse_config(SpleenExport, {}, description=__doc__)  # before torch: --help answers at once

from pathlib import Path

from medspeed.common.console import say
from medspeed.common.data.preparation import Preparation
from medspeed.common.export.deploy import export_run
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import VolumeModel, arguments_of
from medspeed.common.inference.runs import import_weights, load_models
from medspeed.common.run import one_line_errors
from medspeed.models import find_network

TASK = "Segmentation of structures in CT volumes (or one other channel) by sliding windows"


def main(config: SpleenExport) -> Path:
    """Import weights if there is no run yet, export it, and return the path of the result."""
    if config.init is not None:
        import_weights(config.run, "spleen", imported_model(config), config.init)
    model = load_models(config.model, "spleen", find_network, config.network)
    return export_run("spleen", TASK, config, model, "ct")


def imported_model(config: SpleenExport) -> VolumeModel:
    """Return the model description for the weights of --init."""
    network = find_network(config.network or SpleenConfig.NETWORK)
    arguments, scheme = arguments_of(network, {"channels": config.channels}), one_region_per_label(config.labels)
    preparation = Preparation(config.spacing, "window", config.window)
    return VolumeModel(network, arguments, scheme, preparation, config.window_size, 1, config.overlap, "fp32")


if __name__ == "__main__":
    with one_line_errors():
        say(f"written: {main(CONFIG)}", "result")
