"""Export a trained run: ONNX models that match PyTorch, TensorRT engines, a Triton repository or a MONAI bundle."""

from dataclasses import dataclass

from medspeed.apps.brats.config import BratsConfig
from medspeed.common.config import parse_config
from medspeed.common.export.options import ExportConfig


@dataclass(frozen=True)
class BratsExport(ExportConfig):
    """The configuration of an export; imported weights' defaults are brats_mri_segmentation's, but for the overlap.

    Args:
        filters: channels of the first level; 16 by default.
        blocks_down: blocks per level; 1 2 2 4 by default.
        network: segresnet, or another as in training; a run with a network of your own needs it, too: its code runs.
        spacing: voxel spacing R, A, S in mm that the weights were trained at.
        window_size: sliding window X, Y, Z in voxels. Scans must have the channels in the order of the weights
            (MONAI's bundle: T1c, T1, T2, FLAIR).
        overlap: fraction of a window that its neighbor also covers.
    """

    filters: int | None = None
    blocks_down: tuple[int, ...] | None = None
    network: str | None = None
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)
    window_size: tuple[int, int, int] = (240, 240, 160)
    overlap: float = 0.25


if __name__ == "__main__":
    CONFIG = parse_config(BratsExport, {}, description=__doc__)  # before torch: --help answers at once

from pathlib import Path

from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.console import say
from medspeed.common.data.dataset import Dataset
from medspeed.common.data.preparation import Preparation
from medspeed.common.export.deploy import export_run
from medspeed.common.inference.model import VolumeModel, arguments_of
from medspeed.common.inference.runs import import_weights, load_models
from medspeed.common.run import one_line_errors
from medspeed.models import find_network

TASK = "Segmentation of overlapping regions in MRI volumes of several channels by sliding windows"
_MSD_LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")  # of Task01, by number


def main(config: BratsExport) -> Path:
    """Import weights if there is no run yet, export it, and return the path of the result."""
    if config.init is not None:
        import_weights(config.run, "brats", imported_model(config), config.init)
    model = load_models(config.model, "brats", find_network, config.network)
    return export_run("brats", TASK, config, model, "mri")


def imported_model(config: BratsExport) -> VolumeModel:
    """Return what the weights of --init belong to: regions TC, WT, ET painted with the numbers of MSD's labels."""
    network = find_network(config.network or BratsConfig.NETWORK)
    arguments = arguments_of(network, {"filters": config.filters, "blocks_down": config.blocks_down})
    named = Dataset(Path(), "imported", ("",) * 4, _MSD_LABELS, (), (), synthetic=False)
    preparation = Preparation(config.spacing, "zscore", None, channels=4)
    scheme = choose_labelling(named, "names")
    return VolumeModel(network, arguments, scheme, preparation, config.window_size, 1, config.overlap, "fp32")


if __name__ == "__main__":
    with one_line_errors():
        say(f"written: {main(CONFIG)}", "result")
