"""Export a trained run: ONNX models that match PyTorch, TensorRT engines, a Triton repository or a MONAI bundle."""

from medspeed.apps.spleen.config import SpleenConfig, SpleenExport
from medspeed.common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(SpleenExport, {}, description=__doc__)  # before torch: --help answers at once

from pathlib import Path

from medspeed.common.console import say
from medspeed.common.data.preparation import Preparation
from medspeed.common.export.deploy import export_run
from medspeed.common.inference.ensemble import load_models
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import VolumeModel, import_weights
from medspeed.common.run import one_line_errors
from medspeed.common.training.networks import arguments_of
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
    preparation = Preparation(config.spacing, "window", config.window)
    return VolumeModel(
        network=network,
        arguments=arguments_of(network, {"channels": config.channels}),
        labelling=one_region_per_label(config.labels),
        preparation=preparation,
        window_size=config.window_size,
        window_batch=1,
        overlap=config.overlap,
        precision="fp32",
    )


if __name__ == "__main__":
    with one_line_errors():
        say(f"written: {main(CONFIG)}", "result")
