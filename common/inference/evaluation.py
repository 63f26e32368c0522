"""The evaluation of label maps in folders, or of a trained run on a dataset: every case in parallel, on all cores."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from medspeed.common.console import say
from medspeed.common.data.dataset import SUFFIXES, Dataset, Split, read_dataset, read_split
from medspeed.common.data.dicom_slices import sequence_of
from medspeed.common.data.threads import map_in_threads, usable_cores
from medspeed.common.data.volumes import read_header, read_volume
from medspeed.common.files import plural, printable, read_object
from medspeed.common.host_memory import free_memory
from medspeed.common.inference import TOLERANCE
from medspeed.common.inference.folder_job import BAD_INPUT
from medspeed.common.inference.labels import LabelScheme
from medspeed.common.inference.options import EvaluateConfig, InferConfig
from medspeed.common.inference.runs import Find, RunModel, load_models
from medspeed.common.inference.scan_files import volume_files
from medspeed.common.inference.scans import segment_scans
from medspeed.common.inference.scores import OUT_OF_MEMORY, Evaluation, Labels, Scores, score, score_masks

Labelling = Callable[[Dataset], LabelScheme]  # of an app, from the names of labels
_VOXEL = 18  # bytes to compare one, at most: two files of float64
_MEAN, _SHOWN = "{mean:.3f} [{low:.3f}, {high:.3f}]", ("dice", "nsd", "hd95_mm", "error_percent")


def evaluate_folders(
    predictions: Path, references: Path, labels: Labels | LabelScheme | None = None, *, tolerance: float = TOLERANCE
) -> Evaluation:
    """Compare the label maps of two folders, matched by name; the NSD has a tolerance in mm.

    The structures are `labels`, such as {"WT": (1, 2, 3)}, or those of a scheme, which lists all numbers that a file
    may hold, or every label number.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: no case can be compared, or two files have one name.
    """
    for folder in (predictions, references):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
    found, true = volume_files(predictions), volume_files(references)
    pairs = {name: (found.get(name, predictions / name), file) for name, file in true.items()}
    return replace(evaluate_files(pairs, labels, tolerance), extra=sorted(found.keys() - true.keys()))


def evaluate_files(
    pairs: Mapping[str, tuple[Path, Path]], labels: Labels | LabelScheme | None, tolerance: float
) -> Evaluation:
    """Compare the prediction with the reference of each case, by its name; see `evaluate_folders`."""
    named = labels.structures if isinstance(labels, LabelScheme) else labels
    allowed = labels.numbers if isinstance(labels, LabelScheme) else range(256)
    if wrong := {number for members in (named or {}).values() for number in members} - {*range(1, 256)}:
        raise ValueError(f"labels {sorted(wrong)}: must be from 1 to 255")
    seen = set[int]()

    def compare(name: str) -> list[Scores] | str:
        try:
            prediction, reference = map(read_volume, pairs[name])
            rows = score(prediction, reference, named, tolerance, allowed)
            for each in (prediction, reference) if named else ():
                seen.update(np.unique(each.voxels[each.voxels != 0]).astype(int).tolist())
            return rows
        except BAD_INPUT as error:
            return str(error)
        except MemoryError:
            return OUT_OF_MEMORY

    names = [name for name, (prediction, _) in pairs.items() if prediction.is_file()]
    results = dict(zip(names, map_in_threads(compare, names, "evaluate", _workers(pairs)), strict=True))
    refused = {name: found for name, found in results.items() if isinstance(found, str)}
    cases = {name: found for name, found in results.items() if not isinstance(found, str)}
    if unnamed := ", ".join(map(str, sorted(seen.difference(*named.values())) if named else ())):
        said = f"labels {unnamed} of the files belong to no structure and count as background"
        say(f"{said}; if one marks voxels that nobody annotated, the scores are wrong")
    if not cases:
        why = next(iter(refused.values()), "no prediction has the name of a reference")
        raise ValueError(f"none of {plural(len(pairs), 'reference')} ({', '.join(SUFFIXES)}) can be evaluated: {why}")
    return Evaluation(tolerance, _completed(cases, tolerance), sorted(pairs.keys() - {*names}), refused)


def _completed(cases: Mapping[str, list[Scores]], tolerance: float) -> dict[str, list[Scores]]:
    """Return the rows of cases with one for every structure of any case, as of empty masks where it has none."""
    names = dict.fromkeys(row["label"] for rows in cases.values() for row in rows)
    empty = np.zeros((1, 1, 1), bool)
    nothing = score_masks(empty, empty, np.eye(3), 0.0, tolerance)
    own = {case: {row["label"]: row for row in rows} for case, rows in cases.items()}
    return {case: [rows.get(name, {"label": name, **nothing}) for name in names] for case, rows in own.items()}


def _workers(pairs: Mapping[str, tuple[Path, Path]]) -> int:
    """Return how many cases may be compared at a time: as many as half of the free memory holds, of the largest."""
    largest = 1
    for _, file in pairs.values():
        with suppress(*BAD_INPUT):  # told when it is read
            largest = max(largest, prod(read_header(file).shape))
    return max(1, min(usable_cores(), free_memory() // 2 // (_VOXEL * largest)))


def run_evaluation(config: EvaluateConfig, app: str, find: Find, labelling: Labelling) -> Evaluation:
    """Evaluate two folders, or a run of an app whose network `find` finds; write the tables, and print the means."""
    given = (each.rpartition("=") for each in config.labels)
    labels: Labels | LabelScheme = {name: [*map(int, numbers.split("+"))] for name, _, numbers in given}
    if config.model and config.data:
        if len(config.model) > 1 and config.output is None:
            raise ValueError(f"output: must be given to evaluate the mean of {len(config.model)} models")
        model, dataset = load_models(config.model, app, find, config.network), read_dataset(config.data)
        output = config.output or config.model[0] / "evaluation"
        pairs = _segmented(config.model, dataset, output, model, None if labels else labelling)
        found = evaluate_files(pairs, labels or model.labelling, config.tolerance)
    else:
        predictions, references = config.predictions or Path(), config.references or Path()
        output = config.output or predictions
        dataset_folder = references.absolute().parent  # of "." too
        if not labels and (dataset_folder / "dataset.json").is_file():  # else every number is a structure
            try:
                labels = labelling(read_dataset(dataset_folder))
            except BAD_INPUT as error:
                raise ValueError(f"{error}; or name the structures, such as --labels liver=1") from error
        found = evaluate_folders(predictions, references, labels or None, tolerance=config.tolerance)
    for name, why in {**found.refused, **dict.fromkeys(found.missing, "MISSING prediction")}.items():
        say(printable(f"{name}: left out of the means: {why}"), "warning")
    if extra := printable(", ".join(found.extra)):
        say(f"{plural(len(found.extra), 'prediction')} without a reference, not evaluated: {extra}", "warning")
    say(f"means with 95 percent intervals, nsd at {config.tolerance:g} mm; all of it: {output / 'evaluation.csv'}")
    say_means(found)
    found.write(output)
    return found


def say_means(found: Evaluation) -> None:
    """Print the means of each structure in a line."""
    for label, each in found.summary.items():
        shown = {name: each[name] for name in _SHOWN if name in each} or each
        means = (f"{name} {_MEAN.format(**figures)}" for name, figures in shown.items() if figures["cases"])
        count, text = next(iter(each.values()))["cases"], "  ".join(means) or "no file contains it"
        say(printable(f"{label:12} {count:4} cases  {text}"), "result")


def _check_channels(dataset: Dataset, model: RunModel) -> None:
    """Refuse a dataset whose channels are others than a model's, or in another order; warn where it names none."""
    if not model.modality and len(dataset.modality) > 1:
        said = f"the model does not name its channels; it gets them in this order: {', '.join(dataset.modality)}"
        say(printable(f"{dataset.folder}: {said}"), "warning")
    found, due = ([sequence_of(name) or name.lower() for name in each.modality] for each in (dataset, model))
    if min(len({*each}) - len(each) for each in (found, due)) < 0:  # T2 twice, for instance
        found, due = ([name.lower() for name in each.modality] for each in (dataset, model))
    if model.modality and found != due:
        said = f"its channels are {', '.join(dataset.modality)}, the model's {', '.join(model.modality)}"
        raise ValueError(f"{dataset.folder}: {said}: reorder them, or correct dataset.json")


def _check_labels(dataset: Dataset, model: RunModel, labelling: Labelling) -> None:
    """Refuse a dataset whose label numbers stand for something else than a model's; warn where nothing tells."""
    given = dataset.labels, model.labelling.labels
    both = [[re.sub(r"[\W_]+", " ", name.lower()).strip() for name in each] for each in given]
    numbers = [[number for number, name in enumerate(each) if number and name] for each in both]
    found: Labels
    due: Labels
    try:
        found, due = (labelling(replace(dataset, labels=tuple(each))).structures for each in both)
    except BAD_INPUT:  # names that an app does not know
        found, due = ({each[number]: (number,) for number in used} for each, used in zip(both, numbers, strict=True))
    said = f"{dataset.folder}: its labels are {', '.join(both[0])}, the model's {', '.join(both[1])}"
    if numbers[0] != numbers[1] or any(found[name] != due[name] for name in found.keys() & due.keys()):
        remedy = "renumber them (medspeed data to-msd --values), or, where equal numbers mean the same, pass --labels"
        raise ValueError(f"{said}: {remedy}")
    if found.keys() != due.keys():
        say(printable(f"{said}: equal numbers are taken for equal structures"), "warning")


def _segmented(
    runs: Sequence[Path], dataset: Dataset, output: Path, model: RunModel, labelling: Labelling | None
) -> dict[str, tuple[Path, Path]]:
    """Segment the labeled cases of a dataset; of the one that runs were trained on, the validation cases."""
    _check_channels(dataset, model)
    cases, data, splits, own = dataset.cases, dataset.folder, [], False
    for run in runs:
        path, summary = run / "split.json", run / "summary.json"
        names = read_object(path) if path.is_file() else {"training": []}  # an imported run has none
        if not path.is_file():
            say(
                printable(f"no split.json tells which cases trained {run}: those of {data} may be among them"),
                "warning",
            )
        trained, before = names.get("training"), names.get("trained_before", [])
        about = read_object(summary).get("data") if summary.is_file() else None
        named, folder = (about.get(key) if isinstance(about, dict) else None for key in ("name", "folder"))
        own = own or (isinstance(folder, str) and Path(folder).resolve() == data.resolve())
        shared = {case.name for case in cases} & {*map(str, trained)} if isinstance(trained, list) else None
        if shared is None or (shared and named in (None, dataset.name)):
            splits.append(read_split(dataset, path))
        elif shared or {case.name for case in cases} & {*map(str, before)}:
            same = f"cases of {data} have names of cases that trained {run} (on the dataset {named}) or its --init"
            say(printable(f"{same}: where they are the same scans, they are NOT HELD OUT"), "warning")
    if labelling and not own:  # which may go by the numbers of a challenge
        _check_labels(dataset, model, labelling)
    if splits:
        split = merged_split(splits)
        cases, held_out = split.validation, "" if split.held_out else ", NOT HELD OUT: some or all were trained on"
        said = f"evaluating the {len(cases)} validation cases of the run: it was trained on cases of {data}{held_out}"
        say(said, "warning" if held_out else "note")
    segment_scans(InferConfig(tuple(runs), data, output, overlays=False), model, [case.image for case in cases])
    return {case.name: (output / case.image.name, case.label) for case in cases if case.label}


def merged_split(splits: Sequence[Split]) -> Split:
    """Return the split of several models together: what any was trained on, and the validation cases that none was.

    Where each trained one of them, as in a cross-validation, all validation cases remain, not held out.
    """
    if len(splits) == 1:
        return splits[0]
    training = {case for split in splits for case in split.training}
    validation = {case for split in splits for case in split.validation}
    unseen = validation - training if all(split.held_out for split in splits) else set()
    description = f"{len(training)} cases trained at least one of {len(splits)} models, {len(unseen)} none of them"
    return Split(tuple(sorted(training)), tuple(sorted(unseen or validation)), bool(unseen), description)
