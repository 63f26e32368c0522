"""Hand a trained run over: ONNX models behind the gate, TensorRT engines, a Triton repository, or a MONAI bundle."""

from apps.brats.config import BratsExport
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(BratsExport, {}, description=__doc__)  # before torch: --help answers at once

import tempfile
from pathlib import Path

from apps.brats.model import BratsModel, load_model
from apps.brats.regions import choose_labelling
from common.data.cases import Dataset
from common.data.preparation import Preparation
from common.export.bundle_files import NetworkConfig
from common.export.handover import hand_over, say_where
from common.observe.run import one_line_errors
from common.training.imported import import_weights
from data_scripts.make_phantoms import make_mri_phantoms

_MSD_LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")  # of Task01, by number


def main(config: BratsExport) -> Path:
    """Import the weights where there is no run yet, and hand it over; return where it lies."""
    if config.init is not None:
        import_weights(config.model, "brats", imported_model(config), config.init)
    model = load_model(config.model)
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        return hand_over("brats", config, model, network_config(model), _phantoms, Path(scratch))


def imported_model(config: BratsExport) -> BratsModel:
    """Return what the weights of --init belong to: regions TC, WT, ET painted with the numbers of MSD's labels."""
    preparation = Preparation(config.spacing, "zscore", None, channels=4)
    named = Dataset(Path(), "imported", ("",) * 4, _MSD_LABELS, (), (), synthetic=False)
    labelling = choose_labelling(named, "names")
    size, overlap = config.window_size, config.overlap
    return BratsModel(labelling, preparation, config.filters, config.blocks_down, 0.0, size, 1, overlap, "fp32")


def network_config(model: BratsModel) -> NetworkConfig:
    """Return the network of `models.segresnet3d` as MONAI's own class and arguments."""
    return {
        "_target_": "SegResNet",
        "spatial_dims": 3,
        "init_filters": model.filters,
        "in_channels": model.preparation.channels,
        "out_channels": model.labelling.channels,
        "dropout_prob": model.dropout or None,
        "blocks_down": list(model.blocks_down),
        "blocks_up": [1] * (len(model.blocks_down) - 1),
    }


def _phantoms(folder: Path, cases: int) -> Path:
    return make_mri_phantoms(folder / "phantoms", cases, progress=False)


if __name__ == "__main__":
    with one_line_errors():
        say_where(main(CONFIG))
