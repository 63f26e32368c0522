"""The end of a training run: the figure it is judged by, and its summary."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common.data.cases import Case, Dataset, Split
from common.data.preparation import PreparedCase
from common.export.best import by_precision
from common.export.export import ExportRecord
from common.inference.predictors import Precision, torch_predictor
from common.inference.quality import dice_of_counts
from common.inference.segmentation import SegmentationModel, case_dice, keep_case, native_counts
from common.observe.report import write_report
from common.observe.run import Run
from common.observe.summary import Quality, RunSummary, write_summary
from common.training.config import TrainingConfig
from common.training.distributed import SINGLE, Ranks
from common.training.fit import Fitted
from common.training.state import VALIDATIONS_HELD


def judge(
    best: nn.Module,
    split: Split,
    cases: Sequence[Case],
    prepared: Sequence[PreparedCase],
    model: SegmentationModel,
    run: Run,
    ranks: Ranks = SINGLE,
) -> Quality:
    """Return the Dice of the best weights on the native grid of the validation cases, and draw each case.

    Args:
        best: the network with the best weights, on the run's device.
        split: whose validation cases are judged.
        cases: this rank's share of them.
        prepared: the same cases, prepared.
        model: the network's.
        run: where the pictures go, and what computes.
        ranks: those who share the cases.
    """
    with run.clock.stage("validate"):
        predictor = torch_predictor(best)
        overlays = run.directory / "overlays" if run.directory.is_dir() else None  # another host's ranks draw none
        counts = ranks.gather(
            [each.cpu() for each in native_counts(cases, prepared, predictor, model, run.device, overlays)]
        )
    dice = {case.name: case_dice(each) for case, each in zip(split.validation, counts, strict=True)}
    mean = sum(dice.values()) / len(dice)
    means = dice_of_counts(torch.stack(counts)).nanmean(dim=0).tolist()
    by_region = {
        region.name: None if math.isnan(value) else value
        for region, value in zip(model.labelling.regions, means, strict=True)
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in by_region.items() if value is not None)
    worst = min(dice, key=dice.__getitem__)
    run.say(f"Dice on the native grid: {mean:.4f} ({shown}), worst {dice[worst]:.4f} ({worst})")
    for case, voxels in zip(cases, prepared, strict=True):
        if case.name == worst and run.directory.is_dir():  # of the ranks the one that has it
            with run.clock.stage("validate"), _said(run, "the report goes without its viewer"):
                keep_case(run.directory, case, voxels, predictor, model, run.device)
    if not split.held_out:
        run.say(
            "NOT HELD OUT: these cases were trained on; the Dice says that the run works, not how good the model is"
        )
    selected = "validation" if split.held_out else "training"
    return Quality("foreground Dice, native grid, best weights", mean, dice, selected_on=selected, per_region=by_region)


def finish(
    app: str,
    config: TrainingConfig,
    split: Split,
    dataset: Dataset,
    model: SegmentationModel,
    fitted: Fitted,
    quality: Quality,
    exported: ExportRecord,
    run: Run,
    ranks: Ranks = SINGLE,
) -> RunSummary:
    """Write the summary of a run on a dataset's cases; see `summarise`."""
    data: dict[str, str | bool] = {"folder": str(dataset.folder), "name": dataset.name, "synthetic": dataset.synthetic}
    cases = {"training": len(split.training), "validation": len(split.validation)}
    return summarise(app, config, data, cases, split.held_out, model.precision, fitted, quality, exported, run, ranks)


def summarise(
    app: str,
    config: TrainingConfig,
    data: dict[str, str | bool],
    cases: dict[str, int],
    held_out: bool,
    precision: Precision,
    fitted: Fitted,
    quality: Quality,
    exported: ExportRecord,
    run: Run,
    ranks: Ranks = SINGLE,
) -> RunSummary:
    """Write `summary.json` and say where everything lies."""
    summary = RunSummary(
        app=app,
        recipe=config.recipe,
        data=data,
        held_out=held_out,
        device=str(run.device),
        ranks=ranks.world,
        precision=precision,
        seed=config.seed,
        cases=cases,
        steps=fitted.steps,
        target=_target(config, fitted, quality, run),
        limit=fitted.limit,
        quality=quality,
        working_grid={"best": fitted.best, "last": fitted.last, "best_epoch": fitted.best_epoch},
        seconds=run.clock.seconds(),
        onnx=by_precision(exported.onnx),
        engine=by_precision(exported.engines) if exported.engines else {"ran": False, "reason": exported.no_engine},
    )
    write_summary(run.directory, summary)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in summary.seconds.items())
    run.say(f"seconds: {seconds}\nsummary: {run.directory / 'summary.json'}")
    with _said(run, "no report"):
        run.say(f"report: {write_report(run.directory)}")
    return summary


@contextmanager
def _said(run: Run, loss: str) -> Iterator[None]:
    """Say an error of a block instead of raising it: a picture of a run must not cost the run."""
    try:
        yield
    except (OSError, ValueError) as error:
        run.say(f"{loss}: {error}")


def _target(config: TrainingConfig, fitted: Fitted, quality: Quality, run: Run) -> dict[str, Any] | None:
    """Return what became of the target that the run was to reach, and say it; None where there was none."""
    wanted = config.target()
    if wanted is None:
        return None
    found = {
        "until": config.until,
        "held": fitted.held,
        "validations_held": VALIDATIONS_HELD,
        "quality_holds": quality.value >= wanted,
        "seconds": fitted.seconds,
    }
    how = f"held in {VALIDATIONS_HELD} validations in a row" if fitted.held else "NOT reached"
    run.say(
        f"target {config.until}: {how} after {fitted.steps} steps and {fitted.seconds:.1f} s since the start; "
        f"{quality.name}: {quality.value:.4f}, {'holds' if found['quality_holds'] else 'BELOW it'}"
    )
    return found
