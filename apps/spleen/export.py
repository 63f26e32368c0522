"""Hand a trained run over: ONNX models behind the gate, TensorRT engines, a Triton repository, or a MONAI bundle."""

from apps.spleen.config import SpleenExport
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(SpleenExport, {}, description=__doc__)  # before torch: --help answers at once

import tempfile
from pathlib import Path

from apps.spleen.model import SpleenModel, load_model
from common.data.preparation import Preparation
from common.export.bundle_files import NetworkConfig
from common.export.handover import hand_over, say_where
from common.observe.run import one_line_errors
from common.training.imported import import_weights
from data_scripts.make_phantoms import make_ct_phantoms


def main(config: SpleenExport) -> Path:
    """Import the weights where there is no run yet, and hand it over; return where it lies."""
    if config.init is not None:
        import_weights(config.model, "spleen", imported_model(config), config.init)
    model = load_model(config.model)
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        return hand_over("spleen", config, model, network_config(model), _phantoms, Path(scratch))


def imported_model(config: SpleenExport) -> SpleenModel:
    """Return what the weights of --init belong to."""
    preparation = Preparation(config.spacing, "window", config.window)
    size = config.window_size
    return SpleenModel(
        config.labels, preparation, config.channels, config.residual_units, size, 1, "fp32", config.overlap
    )


def network_config(model: SpleenModel) -> NetworkConfig:
    """Return the network of `models.unet3d` as MONAI's own class and arguments."""
    return {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": model.preparation.channels,
        "out_channels": len(model.labels),
        "channels": list(model.channels),
        "strides": [2] * (len(model.channels) - 1),
        "num_res_units": model.residual_units,
        "norm": "batch",
    }


def _phantoms(folder: Path, cases: int) -> Path:
    return make_ct_phantoms(folder / "phantoms", cases, progress=False)


if __name__ == "__main__":
    with one_line_errors():
        say_where(main(CONFIG))
