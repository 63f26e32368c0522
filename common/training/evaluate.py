"""The end of a training run: evaluation, exports and summary."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from medspeed.common.data.dataset import Case, Split
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.volumes import Volume, read_volume
from medspeed.common.export.export import GATE_CASES, GATE_WINDOWS, Exports, export, summary_of, volume_gate
from medspeed.common.files import plural, printable, write_json
from medspeed.common.inference import TOLERANCE
from medspeed.common.inference import postprocessing as post
from medspeed.common.inference.labels import Region, case_dice, dice_of_counts, learned_nothing, mean_dice
from medspeed.common.inference.model import Trained, VolumeModel, write_model
from medspeed.common.inference.predict import predict_logits, read_truth, restore_labels
from medspeed.common.inference.predictors import Predictor, torch_predictor, with_room
from medspeed.common.run import Run
from medspeed.common.training.config import VALIDATIONS_HELD, TrainingConfig
from medspeed.common.training.fit import Fitted
from medspeed.common.training.sources import Data, stored_cases
from medspeed.common.training.volume_config import SegmentationConfig


@dataclass(frozen=True)
class Quality:
    """Result of the evaluation of a run."""

    name: str  # the metric and the grid it is computed on
    value: float  # mean over the cases that have something to find, or where something was found
    per_case: dict[str, float]  # 1 for the others
    selected_on: str  # "validation" if the best weights were chosen on cases that none were trained on, else "training"
    per_region: dict[str, float | None]  # mean Dice; null for a region absent from all cases
    metrics: dict[str, Any] = field(default_factory=dict)  # of each region: see `Evaluation.summary`
    postprocessing: dict[str, Any] = field(default_factory=dict)  # what was chosen, and the Dice before and after it
    without_learning: dict[str, Any] = field(default_factory=dict)  # "value" of simple rules on the cases, and "how"


_TRACKED = ("summary.json", "report.html", "best.safetensors", "model.json", "config.yaml", "plan.json")  # by trackers
RunSummary = dict[str, Any]  # the content of summary.json
Parts = dict[post.Steps, post.CaseParts]  # of a validation case, by the steps that are tried
_RULE_CASES = 16  # of the training that simple rules are made from
_SIDE = 40  # voxels of a case that are looked at, along each axis, evenly spread
_LEVELS = 64  # of intensities, and of the share of cases


def best_network(model: Trained, fitted: Fitted, run: Run) -> nn.Module:
    """Return the network with the best weights, on the run's device, in evaluation mode."""
    best: nn.Module = model.build().to(run.device).eval()
    best.load_state_dict(fitted.weights)
    return best


def evaluate(model: VolumeModel, fitted: Fitted, data: Data, config: SegmentationConfig, run: Run) -> Quality:
    """Return the Dice of the best weights on the native grid of the validation cases, and draw each for the report.

    The ranks share the cases. Post-processing that helps on them is written into `model.json`.
    """
    from medspeed.common.inference import scores as measured  # here: training needs none of it

    split, ranks, labelling = data.split, run.ranks, model.labelling
    cases, refusal = ranks.shard(split.validation), no_choice(config, split)
    judged, tried = [], [] if refusal else post.thresholds(labelling)
    with run.clock.stage("prepare"):
        prepared = stored_cases(cases, model, config)
    with run.clock.stage("validate"):
        predictor = torch_predictor(best_network(model, fitted, run))
        draws = run.directory.is_dir()  # another host's ranks draw nothing
        for case, voxels in zip(cases, prepared, strict=True):
            true = Volume(read_truth(case).numpy(), np.array(voxels.grid.native_affine), case.image)
            found, parts = with_room(partial(_judged, voxels, true, model, tried), predictor, run.device)
            try:
                scores: list[dict[str, Any]] | str = measured.score(found, true, labelling.structures, TOLERANCE)
            except MemoryError:  # the run must not end before its export
                scores = measured.OUT_OF_MEMORY
            judged.append((parts, scores))
            if draws:
                _draw(case_dice(parts[()].counts), case, found.voxels, true.voxels, model, run, len(split.validation))
        judged = ranks.gather(judged)
    named = {case.name: each for case, each in zip(split.validation, judged, strict=True)}
    counts = torch.stack([parts[()].counts for parts, _ in judged])
    dice = {name: case_dice(each) for name, each in zip(named, counts, strict=True)}
    mean = max(0.0, mean_dice([*counts]))  # 0 for a NaN, as a dry run's few cases may have
    means = zip(labelling.regions, dice_of_counts(counts).nanmean(dim=0).tolist(), strict=True)
    by_region = {region.name: None if math.isnan(value) else value for region, value in means}
    rows = {name: scores for name, (_, scores) in named.items() if not isinstance(scores, str)}
    refused = {name: scores for name, (_, scores) in named.items() if isinstance(scores, str)}
    evaluation = measured.Evaluation(TOLERANCE, rows, refused=refused)
    for name, why in refused.items():
        run.say(f"{printable(name)}: not in evaluation.csv: {why}", "warning")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in by_region.items() if value is not None)
    worst = min(dice, key=dice.__getitem__)
    run.say(f"Dice on the native grid: {mean:.4f} ({shown}), worst {dice[worst]:.4f} ({printable(worst)})", "result")
    if run.ranks.leader:
        evaluation.write(run.directory)
    for doubt in doubts(mean, split.held_out):
        run.say(doubt, "warning")
    chosen = choose_postprocessing([parts for parts, _ in judged], refusal, model, config, run)
    trivial = _without_learning(model, data, config, run) if run.ranks.leader else {}
    name, selected = "foreground Dice, native grid, best weights", "validation" if split.held_out else "training"
    return Quality(name, mean, dice, selected, by_region, evaluation.summary, chosen, trivial)


def _judged(
    case: PreparedCase,
    true: Volume,
    model: VolumeModel,
    tried: Sequence[post.Steps],
    device: torch.device,
    predictor: Predictor,
) -> tuple[Volume, Parts]:
    """Return the label map of a case on its file's grid, and its parts without and with steps that are tried."""
    logits, scheme = predict_logits(case.image.to(device, torch.float32), predictor, model), model.labelling
    parts = Parts()
    for steps in (*tried, ()):
        labels = restore_labels(logits, case.grid, scheme, steps)
        parts[steps] = post.case_parts(labels, true.voxels, scheme, true.voxel_ml)
    return replace(true, voxels=labels), parts  # the last labels are those without steps


def _without_learning(model: VolumeModel, data: Data, config: SegmentationConfig, run: Run) -> dict[str, Any]:
    """Return the Dice of simple rules on the validation cases, and say it; nothing where no cases are in the store."""
    if config.caching().mode in ("none", "monai", "uncached"):
        return {}
    found: dict[str, Any] = {}
    with _said(run, "the Dice without learning could not be computed"), run.clock.stage("validate"):
        some = data.split.training[:: -(-len(data.split.training) // _RULE_CASES)]
        training, judged = (stored_cases(each, model, config) for each in (some, data.split.validation))
        found = without_learning(training, judged, model.labelling.regions)
        run.say(f"without learning: Dice {found['value']:.4f} ({found['how']})")
    return found


def no_choice(config: SegmentationConfig, split: Split) -> str:
    """Return why no post-processing can be chosen; "" where it can."""
    if config.fast_dev_run:
        return "this is a fast dev run"
    if not split.held_out:
        return "validation cases were trained on"
    said = f"{plural(len(split.validation), 'validation case')}; a choice needs {post.FEWEST_CASES}"
    return said if len(split.validation) < post.FEWEST_CASES else ""


def choose_postprocessing(
    cases: Sequence[Parts], refusal: str, model: VolumeModel, config: SegmentationConfig, run: Run
) -> dict[str, Any]:
    """Choose what gains Dice on validation cases; write it into `model.json`, say it, and return it for the summary."""
    before = [case_dice(case[()].counts) for case in cases]
    steps, after = ((), before) if refusal else post.choose(cases, model.labelling)
    means = {"before": sum(before) / len(before), "after": sum(after) / len(after)}
    words = f"none: {refusal or f'nothing gains more than {post.BOUND} Dice, its best case left out'}"
    run.ranks.once(lambda: write_model(run.directory, config.APP, replace(model, postprocessing=steps)))
    if steps:
        dice = "Dice {before:.4f} before, {after:.4f} after; a case rightly found empty counts as 1".format(**means)
        words = f"{'; '.join(map(str, steps))} ({dice})"
    run.say(f"post-processing: {words}", "result" if steps else "note")
    return {"words": words, "steps": [asdict(step) for step in steps], **means}


def doubts(value: float, held_out: bool, name: str = "Dice") -> list[str]:
    """Return warnings about a quality on the validation cases; `held_out` tells that none of them was trained on."""
    found = [] if held_out else [f"NOT HELD OUT: trained on validation cases; their {name} says little about the model"]
    remedy = "train longer (--epochs), try another --seed, check the labels"
    return found + [f"NOTHING LEARNED: the {name} is that of chance; {remedy}"] * learned_nothing(name, value)


def _draw(dice: float, case: Case, found: np.ndarray, truth: np.ndarray, model: VolumeModel, run: Run, of: int) -> None:
    """Draw the labels of one `of` so many cases, [X, Y, Z] uint8 on its file's grid; keep it for the viewer."""
    from medspeed.common.observe.overlays import draw_overlay, oriented_scan  # here: the start of a run need not wait
    from medspeed.common.observe.report import write_report_case

    channels, names = model.preparation.channels, model.labelling.labels
    volume = read_volume(case.image, channels, first_only=channels > 1)
    image = volume.voxels.reshape(volume.voxels.shape[:3], order="F")
    scan = oriented_scan(image, found, volume.affine, truth, model.preparation.window)
    draw_overlay(run.directory / "overlays" / f"{case.name}.png", scan, names, f"Dice {dice:.3f}: {case.name}")
    with _said(run, f"{printable(case.name)} is missing in the report's viewer"):
        write_report_case(run.directory, case.name, scan, names, of)


def export_best(model: VolumeModel, fitted: Fitted, data: Data, config: SegmentationConfig, run: Run) -> Exports:
    """Export the best weights behind the gate, on some validation cases; for the arguments see `evaluate`."""
    cases = data.split.validation[:GATE_CASES]
    with run.clock.stage("prepare"):
        prepared = stored_cases(cases, model, config)
    voxels = accumulate(case.image[0].numel() for case in prepared)
    few = max(1, sum(total <= GATE_WINDOWS * math.prod(model.window_size) for total in voxels))
    gate = volume_gate(cases[:few], prepared[:few], model, config.APP, run, "of the validation set")
    return export(best_network(model, fitted, run), gate, run, config.engine)


def finish(
    config: TrainingConfig, about: dict[str, Any], fitted: Fitted, quality: Quality, exported: Exports, run: Run
) -> RunSummary:
    """Write `summary.json` and the report, and print where they are; for `about` see `Data.about`."""
    summary: RunSummary = {
        "app": config.APP,
        "run": str(run.directory),
        "recipe": config.recipe,
        **about,
        "held_out": quality.selected_on != "training",
        "device": str(run.device),
        "ranks": run.ranks.world,
        "precision": config.precision,
        "seed": config.seed,
        "steps": fitted.steps,
        "target": _target(config, fitted, quality, run),
        "limit": fitted.limit,  # how far a training step is from what the device can do
        "quality": asdict(quality),
        "working_grid": {"best": fitted.best, "last": fitted.last, "best_epoch": fitted.best_epoch},
        "seconds": run.clock.seconds(),
        **summary_of(exported),
    }
    write_json(run.directory / "summary.json", summary)
    if not fitted.best_epoch:
        run.say("no epoch was better than the weights of --init, which are kept: lower --learning-rate", "warning")
    run.say(f"seconds: {', '.join(f'{name} {value:.1f}' for name, value in summary['seconds'].items())}")
    run.say(f"summary: {run.directory / 'summary.json'}", "result")
    from medspeed.common.observe.report import write_report  # here: a training needs none of it

    with _said(run, "no report"):
        run.say(f"report: {write_report(run.directory, summary)}", "result")
    run.trackers.scalars({"quality": quality.value}, fitted.steps)
    run.trackers.files([run.directory / name for name in _TRACKED])
    return summary


@contextmanager
def _said(run: Run, loss: str) -> Iterator[None]:
    """Say an error of a block instead of raising it: a picture of a run, or a further figure, must not cost the run."""
    try:
        yield
    except (OSError, ValueError, MemoryError, RuntimeError) as error:  # the last: torch has no memory
        run.say(f"{loss}: {error}", "warning")


def _target(config: TrainingConfig, fitted: Fitted, quality: Quality, run: Run) -> dict[str, Any] | None:
    """Return what became of the target that the run was to reach, and say it; None where there was none."""
    wanted = config.target()
    if wanted is None:
        return None
    holds = quality.value >= wanted
    how = f"held for {VALIDATIONS_HELD} consecutive validations" if fitted.held else "NOT reached"
    when, judged = f"{fitted.steps} steps, {fitted.seconds:.1f} s after the start", "holds" if holds else "BELOW it"
    run.say(f"target {config.until}: {how} after {when}; {quality.name}: {quality.value:.4f}, {judged}", "result")
    found = {"until": config.until, "held": fitted.held, "validations_held": VALIDATIONS_HELD}
    return found | {"quality_holds": holds, "seconds": fitted.seconds}


def without_learning(
    training: Sequence[PreparedCase], validation: Sequence[PreparedCase], regions: Sequence[Region]
) -> dict[str, Any]:
    """Return under "value" the mean Dice of simple rules on the validation cases, on their working grid; and "how".

    By its rule, a region is where one channel lies in a range of intensities, or where a share in a range of the other
    training cases have it (the box of each case being a unit cube): what has the highest Dice on the training cases.
    """
    count, sampled = len(training), [_sampled(case, regions) for case in (*training, *validation)]
    image, mask = (torch.stack(part) for part in zip(*sampled, strict=True))  # [N, C, V] and [N, R, V]
    low, high = image[:count].amin((0, 2))[:, None], image[:count].amax((0, 2))[:, None]
    share = mask[:count].float().mean(0).expand(mask.shape).clone()
    share[:count] = (count * share[:count] - mask[:count].float()) / max(count - 1, 1)  # of the others
    features = torch.cat([(image - low) / (high - low).clamp(min=1e-6), share], dim=1)
    levels, channels = (features * _LEVELS).clamp(0, _LEVELS - 1).byte().transpose(0, 1), image.shape[1]
    found, how, true = torch.zeros_like(mask[count:]), [], mask[count:]
    for number, region in enumerate(regions):
        rows = levels[[*range(channels), channels + number]]
        row, first, last = _best_range(rows[:, :count], mask[:count, number])
        found[:, number] = (rows[row, count:] >= first) & (rows[row, count:] <= last)
        how.append(f"{region.name} by {'position' if row == channels else 'intensity'}")
    counts = torch.stack([(found & true).sum(2), found.sum(2) + true.sum(2)], dim=2)
    return {"value": max(0.0, mean_dice([*counts])), "how": ", ".join(how)}


def _sampled(case: PreparedCase, regions: Sequence[Region]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return voxels of a case, image [C, V] float32 and masks [R, V] bool, at the same places of every case's box."""
    assert case.label is not None
    x, y, z = ((torch.arange(_SIDE) * side + side // 2) // _SIDE for side in case.label.shape)
    places = x[:, None, None], y[:, None], z
    label, image = case.label[places].flatten(), case.image[:, *places].flatten(1)
    return image.float(), torch.stack([region.mask(label) for region in regions])


def _best_range(rows: torch.Tensor, mask: torch.Tensor) -> tuple[int, int, int]:
    """Return the row of levels [F, N, V] uint8, and the first and last level, where the Dice with [N, V] is highest."""
    pairs = [(row[mask], row.flatten()) for row in rows]
    inside, size = (torch.stack([row.bincount(minlength=_LEVELS) for row in part]) for part in zip(*pairs, strict=True))
    before, total = (nn.functional.pad(each.cumsum(1), (1, 0)) for each in (inside, size))
    hits, sizes = (each[:, None, 1:] - each[:, :-1, None] for each in (before, total))  # of all [F, first, last]
    dice = (2 * hits / (sizes + mask.sum()).clamp(min=1)).triu()
    row, place = divmod(int(dice.argmax()), _LEVELS**2)
    return row, *divmod(place, _LEVELS)
