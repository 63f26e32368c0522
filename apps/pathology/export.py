"""Hand a trained run over: ONNX models behind the gate, TensorRT engines, a Triton repository, or a MONAI bundle."""

from apps.pathology.options import PathologyExport
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(PathologyExport, {}, description=__doc__)  # before torch: --help answers at once

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from apps.pathology.config import PathologyConfig
from apps.pathology.data import decoded
from apps.pathology.finish import engine_batch, export_best, tiles
from apps.pathology.model import APP, PathologyModel, load_model
from apps.pathology.tables import find_tables
from apps.pathology.weights import TWIN, import_run, resnet_weights
from common.config import config_from_yaml
from common.data.slide_pool import SlidePool
from common.export.bundle import write_patch_bundle
from common.export.handover import conclude, must_export, say_where, serve
from common.observe.run import Run, choose_device, one_line_errors
from common.observe.timing import Clock
from common.training.distributed import SINGLE


def main(config: PathologyExport) -> Path:
    """Import the weights where there is no run yet, and hand it over; return where it lies.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        FileNotFoundError, ValueError: the run, the data or the weights cannot be used.
    """
    if config.init is not None:
        model = PathologyModel(config.patch_size, config.mpp, config.tile_size, 1, "fp32")
        import_run(config.model, model, config.init)
    model = load_model(config.model)
    run = Run(config.model, choose_device(config.device), Clock(), resumed=True)
    if config.to == "bundle":
        network = model.build(run.directory / "best.safetensors").eval()
        return write_patch_bundle(
            config.destination(), config.model, network, TWIN, resnet_weights(network), patch_size=model.patch_size
        )
    if must_export(config):
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            _export(config, model, run, Path(scratch))
    if config.to != "triton":
        return config.model / "exports"
    return serve(APP, config, engine_batch(model))


def _export(config: PathologyExport, model: PathologyModel, run: Run, scratch: Path) -> None:
    """Export behind the gate, on the patches that validated the run, or on synthetic ones."""
    own = run.directory / "config.yaml"
    trained = config_from_yaml(PathologyConfig, own) if own.is_file() else PathologyConfig(patch_size=model.patch_size)
    trained = replace(trained, data=config.data or trained.data, init=None)
    if not own.is_file():
        trained = replace(trained, store=scratch)
    with closing(SlidePool(reader=trained.reader)) as pool:
        tables = find_tables(trained, run, SINGLE, pool)
        validation = decoded(tables.validation, trained, run, SINGLE, pool)
        calibration = None
        if config.makes_int8():
            calibration = tiles(decoded(tables.training, trained, run, SINGLE, pool), model)
    best = model.build(run.directory / "best.safetensors").to(run.device).eval()
    engine = config.engine if config.to == "engine" else "none"
    record = export_best(best, validation, model, engine, run, calibration)
    conclude(record, f"patch AUC on {tables.name}", tiles(validation, model)[:1], run)


if __name__ == "__main__":
    with one_line_errors():
        say_where(main(CONFIG))
