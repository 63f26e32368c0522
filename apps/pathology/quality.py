"""How well a network tells patches apart: the figure of a run, and what the gate judges its exports on."""

import json
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from medspeed.apps.pathology.model import PathologyModel, normalised
from medspeed.apps.pathology.patches.store import Patches, rank_rows
from medspeed.apps.pathology.patches.table import AT_ONCE, of_each_kind
from medspeed.apps.pathology.patches.tables import Tables
from medspeed.apps.pathology.scan.froc import auc
from medspeed.common.data.folds import trained_before
from medspeed.common.data.threads import prefetch
from medspeed.common.export.export import Gate
from medspeed.common.files import read_object
from medspeed.common.inference import Precision
from medspeed.common.inference.predictors import Predictor, torch_predictor
from medspeed.common.run import Run
from medspeed.common.training.evaluate import Quality, doubts

_BINS = 16  # of each channel's histogram
_MOST = 4096  # training patches whose colours are looked at, evenly spread
_GATE_PATCHES = 512  # of each kind: those for validation that the gate scores with each export


def patch_scores(
    patches: Patches, predictor: Predictor, rows: np.ndarray, device: torch.device, at_once: int = AT_ONCE
) -> list[float]:
    """Return the tumour probability of the patches of some rows ([M] int), computed so many at once.

    Those that do not lie on the device are read one call ahead. Every call has as many, the last one some twice.
    """
    size = call_size(len(rows), at_once)
    filled = np.resize(rows, -(-len(rows) // size) * size)
    taken = (patches.take(filled[start : start + size], device) for start in range(0, len(filled), size))
    with closing(taken if isinstance(patches.pixels, torch.Tensor) else prefetch(taken, device)) as parts:
        scores = torch.cat([torch.sigmoid(predictor(normalised(part))).flatten() for part in parts])
        return scores[: len(rows)].tolist()


def call_size(count: int, at_once: int = AT_ONCE) -> int:
    """Return how many of `count` patches, at least 1, are computed in each of the fewest calls of at most so many."""
    return -(-count // -(-count // at_once))


def all_scores(patches: Patches, network: nn.Module, precision: Precision, run: Run, tf32: bool = False) -> np.ndarray:
    """Return the tumour probability of all patches, [N] float32, of which each rank computes its share."""
    predictor = torch_predictor(network.eval(), precision, tf32)
    rows = rank_rows(patches, run)  # of few patches, none for some ranks
    mine = patch_scores(patches, predictor, rows, run.device) if len(rows) else []
    return np.array(run.ranks.gather(mine), np.float32)


def evaluate(parts: dict[str, Patches], best: nn.Module, precision: Precision, run: Run) -> Quality:
    """Return the patch AUC of the best weights in the run's precision: on those for testing where there are some.

    With training patches it is told what colours alone would reach.
    """
    found: dict[str, float] = {}
    with run.clock.stage("validate"):
        for part in (each for each in ("validation", "testing") if each in parts):
            label, scores = parts[part].table.label, all_scores(parts[part], best, precision, run)
            found[f"{part} AUC"] = auc(label, scores)
            found[f"{part} accuracy"] = float(np.mean((scores >= 0.5) == label.astype(bool)))
    judged = "testing" if "testing" in parts else "validation"
    unseen = held_out(run) or judged == "testing"
    run.say("patches: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()), "result")
    for doubt in doubts(found[f"{judged} AUC"], unseen, "AUC"):
        run.say(doubt, "warning")
    trivial: dict[str, Any] = {}
    if "training" in parts and run.ranks.leader:
        value = colour_auc(parts["training"], parts[judged])
        trivial = {"value": value, "how": "logistic regression on color histograms"}
        run.say(f"without learning: AUC {value:.4f} ({trivial['how']})")
    figure = f"patch AUC, {judged} patches, best weights"
    selected = "validation" if unseen else "training"
    return Quality(figure, found[f"{judged} AUC"], found, selected, per_region={}, without_learning=trivial)


def held_out(run: Run) -> bool:
    """Return whether none of the patches for validation trained the weights of --init, as far as is known."""
    path = run.directory / "split.json"
    return run.ranks.once(lambda: not path.is_file() or bool(read_object(path).get("held_out", True)))


def warn_of_seen_tests(tables: Tables, init: Path, run: Run) -> None:
    """Say which slides or patches for testing trained the weights of --init, as far as is known."""
    files = tables.parts["testing"].files if "testing" in tables.parts else ()
    names = [*(file.stem for file in files), *(os.path.relpath(file, tables.folder) for file in files)]
    if "HELD" in (said := trained_before(init, None, names)[1]):
        run.say(f"testing: {said}", "warning")


def patch_gate(validation: Patches, model: PathologyModel, run: Run, name: str) -> Gate:
    """Return what exports are judged on: the logits of a tile, and the AUC of validation patches of a named set.

    The gate takes the first patches, as many with tumour as without, and scores them one by one; the models take images
    of any size from a patch to a tile.
    """
    label = validation.table.label
    rows = of_each_kind(label, _GATE_PATCHES)
    scores = partial(patch_scores, validation, rows=rows, device=run.device, at_once=1)
    judge = lambda predictor: auc(label[rows], np.array(scores(predictor), np.float32))  # noqa: E731
    origin, smallest = f"patch AUC on {len(rows)} validation patches of {name}", (3, model.patch_size, model.patch_size)
    about = {"name": "medspeed pathology", "labels": json.dumps(["normal", "tumour"])}
    windows = tiles(validation, model, 2)
    windows[1] = windows[1].flip(-1)  # of few patches both are the same, and would hide a mixed batch
    return Gate(windows, judge, origin, batch=model.tile_batch, smallest=smallest, metadata=about)


def tiles(patches: Patches, model: PathologyModel, count: int) -> torch.Tensor:
    """Return tiles [N, 3, T, T] float32 of real patches side by side."""
    size, side = model.patch_size, -(-model.tile_size // model.patch_size)
    needed = count * side * side
    rows = np.resize(of_each_kind(patches.table.label, -(-needed // 2)), needed)
    grid = normalised(patches.take(rows, torch.device("cpu"))).reshape(count, side, side, 3, size, size)
    whole = grid.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, side * size, side * size)
    return whole[:, :, : model.tile_size, : model.tile_size].contiguous()


def colour_auc(training: Patches, judged: Patches) -> float:
    """Return the AUC of a logistic regression on the colour histograms of patches, fitted to the training patches.

    The features are square roots of shares, standardised; the penalty on their squared weights is 1.
    """
    rows = np.linspace(0, len(training.table) - 1, min(len(training.table), _MOST)).astype(np.int64)
    fitted, label = histograms(training, rows), training.table.label[rows]
    centre, spread = fitted.mean(0), fitted.std(0) + 1e-6
    inputs = np.insert((fitted - centre) / spread, 0, 1.0, axis=1)
    weights, penalty = np.zeros(inputs.shape[1]), np.eye(inputs.shape[1])
    penalty[0, 0] = 1e-6  # of the bias
    for _ in range(25):  # steps of Newton's method, far more than it takes
        found = 1 / (1 + np.exp(-(inputs @ weights).clip(-30, 30)))
        bend = (inputs * (found * (1 - found))[:, None]).T @ inputs + penalty
        weights -= np.linalg.solve(bend, inputs.T @ (found - label) + penalty @ weights)
    return auc(judged.table.label, (histograms(judged, np.arange(len(judged.table))) - centre) / spread @ weights[1:])


def histograms(patches: Patches, rows: np.ndarray) -> np.ndarray:
    """Return the square roots of the shares of red's, green's and blue's levels in some patches, [M, 48]."""
    counted = []
    for row in rows:
        levels = np.asarray(patches.pixels[row])[:, ::2, ::2].reshape(3, -1) // (256 // _BINS)
        counted.append(np.bincount((levels + np.arange(0, 3 * _BINS, _BINS)[:, None]).ravel(), minlength=3 * _BINS))
    return np.sqrt(np.array(counted) / levels.shape[1])
