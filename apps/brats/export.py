"""Export a trained run: ONNX models that match PyTorch, TensorRT engines, a Triton repository or a MONAI bundle."""

from medspeed.apps.brats.config import BratsExport
from medspeed.common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(BratsExport, {}, description=__doc__)  # before torch: --help answers at once

from pathlib import Path

from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.console import say
from medspeed.common.data.dataset import Dataset
from medspeed.common.data.preparation import Preparation
from medspeed.common.export.bundle import NetworkConfig
from medspeed.common.export.deploy import export_run
from medspeed.common.inference.ensemble import load_models
from medspeed.common.inference.model import VolumeModel, import_weights
from medspeed.common.run import one_line_errors
from medspeed.models.segresnet3d import segresnet3d

TASK = "Segmentation of overlapping regions in MRI volumes of several channels by sliding windows"
_MSD_LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")  # of Task01, by number


def main(config: BratsExport) -> Path:
    """Import weights if there is no run yet, export it, and return the path of the result."""
    if config.init is not None:
        import_weights(config.run, "brats", imported_model(config), config.init)
    model = load_models(config.model, "brats", segresnet3d)
    return export_run("brats", TASK, config, model, network_config(model), "mri")


def imported_model(config: BratsExport) -> VolumeModel:
    """Return what the weights of --init belong to: regions TC, WT, ET painted with the numbers of MSD's labels."""
    preparation = Preparation(config.spacing, "zscore", None, channels=4)
    named = Dataset(Path(), "imported", ("",) * 4, _MSD_LABELS, (), (), synthetic=False)
    labelling = choose_labelling(named, "names")
    return VolumeModel(
        network=segresnet3d,
        arguments={"filters": config.filters, "blocks_down": config.blocks_down, "dropout": 0.0},
        labelling=labelling,
        preparation=preparation,
        window_size=config.window_size,
        window_batch=1,
        overlap=config.overlap,
        precision="fp32",
    )


def network_config(model: VolumeModel) -> NetworkConfig:
    """Return the network of `medspeed.models.segresnet3d` as MONAI's own class and arguments."""
    return {
        "_target_": "SegResNet",
        "spatial_dims": 3,
        "init_filters": model.arguments["filters"],
        "in_channels": model.preparation.channels,
        "out_channels": model.labelling.channels,
        "dropout_prob": model.arguments["dropout"] or None,
        "blocks_down": list(model.arguments["blocks_down"]),
        "blocks_up": [1] * (len(model.arguments["blocks_down"]) - 1),
    }


if __name__ == "__main__":
    with one_line_errors():
        say(f"written: {main(CONFIG)}", "result")
