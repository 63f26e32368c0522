"""The end of a training run: the figures it is judged by, its exports, its summary."""

import numpy as np
import torch
from torch import nn

from apps.pathology.config import PathologyConfig
from apps.pathology.data import all_scores, figures, patch_scores
from apps.pathology.froc import auc
from apps.pathology.model import PathologyModel, normalised
from apps.pathology.patch_store import Patches
from apps.pathology.tables import Tables
from common.export.best import say_exported
from common.export.export import EngineChoice, ExportRecord, export_model
from common.export.tensorrt_engine import Batches
from common.files import sha256_of
from common.inference.predictors import Predictor, torch_predictor
from common.observe.run import Run
from common.observe.summary import Quality, RunSummary
from common.training.distributed import Ranks
from common.training.finish import summarise
from common.training.fit import Fitted

_GATE_PATCHES = 1024  # the gate scores so many validation patches with each export
_GATE_TILES = 1
_TILES = 4


def judge(best: nn.Module, validation: Patches, testing: Patches | None, run: Run, ranks: Ranks) -> Quality:
    """Return the patch AUC of the best weights: on the patches for testing where there are some."""
    found: dict[str, float] = {}
    with run.clock.stage("validate"):
        for name, patches in (("validation", validation), ("testing", testing)):
            if patches is not None:
                scores = all_scores(patches, torch_predictor(best), ranks, run.device)
                found |= {f"{name} {figure}": value for figure, value in figures(patches, scores).items()}
    judged = "validation" if testing is None else "testing"
    run.say("patches: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    name = f"patch AUC, {judged} patches, best weights"
    return Quality(name, found[f"{judged} AUC"], found, selected_on="validation", per_region={})


def export_best(
    best: nn.Module,
    validation: Patches,
    model: PathologyModel,
    engine: EngineChoice,
    run: Run,
    calibration: torch.Tensor | None = None,
) -> ExportRecord:
    """Export the best weights behind the gate (logits of tiles, AUC of validation patches), and say what came of it.

    The models take images of any size from a patch to a tile; INT8 is made where there are tiles to calibrate it on.
    """
    rows = _alternating(validation.label)[:_GATE_PATCHES]
    run.say(f"gate: each export is judged on {len(rows)} validation patches")

    def evaluate(predictor: Predictor) -> float:
        scores = [patch_scores(validation, predictor, run.device, row[None]) for row in rows]
        return auc(validation.label[rows], torch.cat(scores).cpu().numpy())

    with run.clock.stage("export"):
        record = export_model(
            best,
            windows=tiles(validation, model)[:_GATE_TILES],
            evaluate=evaluate,
            folder=run.directory / "exports",
            batch=engine_batch(model),
            metadata={
                "name": "medspeed pathology",
                "labels": "normal tumour",
                "weights_sha256": sha256_of(run.directory / "best.safetensors"),
            },
            engine=engine,
            smallest=(3, model.patch_size, model.patch_size),
            calibration=calibration,
        )
    say_exported(record, run)
    return record


def finish(
    config: PathologyConfig,
    tables: Tables,
    model: PathologyModel,
    fitted: Fitted,
    quality: Quality,
    exported: ExportRecord,
    run: Run,
    ranks: Ranks,
) -> RunSummary:
    """Write the summary of the run; see `summarise`."""
    data: dict[str, str | bool] = {"folder": str(tables.folder), "name": tables.name, "synthetic": tables.synthetic}
    cases = {"training": len(tables.training), "validation": len(tables.validation)}
    return summarise("pathology", config, data, cases, True, model.precision, fitted, quality, exported, run, ranks)


def _alternating(label: np.ndarray) -> np.ndarray:
    """Return all row numbers, tumour and normal in turn while both last."""
    places = np.concatenate([np.arange(np.count_nonzero(label == value)) for value in (0, 1)])
    rows = np.concatenate([np.flatnonzero(label == value) for value in (0, 1)])
    return rows[np.argsort(places, kind="stable")]


def engine_batch(model: PathologyModel) -> Batches:
    """Return how many tiles an engine takes in one call: the fewest, the number it is tuned for, the most."""
    return 1, model.tile_batch, max(4, model.tile_batch)


def tiles(patches: Patches, model: PathologyModel) -> torch.Tensor:
    """Return a few tiles [N, 3, T, T] float32 of real patches side by side."""
    side = -(-model.tile_size // model.patch_size)
    rows = np.resize(_alternating(patches.label), _TILES * side * side)
    images = normalised(torch.from_numpy(patches.pixels[rows]).permute(0, 2, 3, 1))
    grid = images.reshape(_TILES, side, side, 3, model.patch_size, model.patch_size)
    whole = grid.permute(0, 3, 1, 4, 2, 5).reshape(_TILES, 3, side * model.patch_size, side * model.patch_size)
    return whole[:, :, : model.tile_size, : model.tile_size].contiguous()
