"""Export a trained run: ONNX models that match PyTorch, TensorRT engines, a Triton repository or a MONAI bundle."""

from dataclasses import dataclass

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.common.config import parse_config
from medspeed.common.export.options import ExportConfig


@dataclass(frozen=True)
class PathologyExport(ExportConfig):
    """The configuration of an export.

    Args:
        model: run folder; with --init, the run folder to create.
        patch_size: side of the patches in pixels.
        mpp: pixel size in um of the slides that the weights were trained on; unknown by default.
        tile_size: side of the tiles of a dense scan in pixels, a multiple of 32.
    """

    patch_size: int = 224
    mpp: float | None = None
    tile_size: int = 1152


if __name__ == "__main__":
    CONFIG = parse_config(PathologyExport, {}, description=__doc__)  # before torch: --help answers at once

import re
from dataclasses import replace
from pathlib import Path

import torch

from medspeed.apps.pathology.model import PathologyModel, load_model
from medspeed.apps.pathology.patches.store import decoded
from medspeed.apps.pathology.patches.tables import find_tables
from medspeed.apps.pathology.quality import patch_gate, tiles
from medspeed.common.console import say
from medspeed.common.export.bundle import NetworkConfig, write_bundle
from medspeed.common.export.deploy import hand_over
from medspeed.common.export.export import Gate
from medspeed.common.files import read_as
from medspeed.common.inference.runs import import_weights
from medspeed.common.run import Run, one_line_errors

TASK = "Classification of patches of whole-slide images as tumour or normal"
_CALIBRATION_TILES = 4
# Places of the parts of TorchVision's ResNet in MONAI's `TorchVisionFCModel.features`.
_NUMBERED = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
# MONAI's network and arguments that compute on one patch what `resnet18_fcn` does.
_TWIN: NetworkConfig = {
    "_target_": "resnet18",
    "spatial_dims": 2,
    "n_input_channels": 3,
    "conv1_t_stride": 2,
    "num_classes": 1,
    "bias_downsample": False,
}


def main(config: PathologyExport) -> Path:
    """Import the weights where there is no run yet, and hand it over; return where it lies."""
    if len(config.model) > 1:
        raise ValueError(f"model {' '.join(map(str, config.model))}: expected one run; only volumes take several")
    if config.init is not None:
        model = PathologyModel(config.patch_size, config.mpp, config.tile_size, 1, "fp32")
        import_weights(config.run, PathologyConfig.APP, model, config.init, our_name)
    model = load_model(config.run)
    if config.to == "bundle":
        return write_patch_bundle(config.destination, config.run, model)

    def open_gate(run: Run, scratch: Path, int8: bool) -> tuple[Gate, torch.Tensor | None]:
        """Judge on the patches that validated the run, or on synthetic ones."""
        own, synthetic = run.directory / "plan.json", PathologyConfig(patch_size=model.patch_size, store=scratch)
        trained = replace(read_as(own, PathologyConfig), init=None) if own.is_file() else synthetic
        if config.data:  # which is divided anew
            trained = replace(trained, data=config.data, mpp=None, patches_per_slide=None)
            trained = replace(trained, lists=None, fold=None, folds=None, groups=None)
        elif trained.data and not trained.data.exists():
            trained = synthetic
        # Imported weights have no plan: how this divides patches says nothing of what trained them.
        tables = find_tables(trained, run if own.is_file() else replace(run, directory=scratch))
        if (size := tables.parts["validation"].size) != model.patch_size:
            raise ValueError(f"{tables.folder}: patches of {size} pixels; the model takes {model.patch_size}")
        validation = decoded(tables.parts["validation"], trained, run)
        training = decoded(tables.parts["training"], trained, run) if int8 else None
        windows = None if training is None else tiles(training, model, _CALIBRATION_TILES)
        return patch_gate(validation, model, run, tables.name), windows

    return hand_over(PathologyConfig.APP, TASK, config, model, open_gate)


def write_patch_bundle(folder: Path, run: Path, model: PathologyModel) -> Path:
    """Write a MONAI bundle that scores a folder of PNG files into probabilities.csv (see `write_bundle`)."""
    network = model.build(run / "best.safetensors").eval()
    values = {"network": _TWIN, "patch_size": model.patch_size, "task": "Classification of patches as tumour or normal"}
    templates, shape = Path(__file__).with_name("bundle"), (1, 3, model.patch_size, model.patch_size)
    ours = network.state_dict()
    weights = {name.removeprefix("features.").replace("head.", "fc."): value for name, value in ours.items()}
    weights["fc.weight"] = weights["fc.weight"].flatten(1)  # MONAI's last layer is linear
    return write_bundle(folder, run, TASK, templates, values, network, shape, weights)


def our_name(name: str) -> str:
    """Return our name of a weight of MONAI's `TorchVisionFCModel`, whose features are numbered; others stay."""
    name = re.sub(r"^fc\.", "head.", name)
    return re.sub(r"^features\.(\d)\.", lambda found: f"features.{_NUMBERED.get(found[1], found[1])}.", name)


if __name__ == "__main__":
    with one_line_errors():
        say(f"written: {main(CONFIG)}", "result")
