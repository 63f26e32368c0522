"""What a run decides before it starts: its cases, and every field that its configuration left open."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from medspeed.common.config import config_content, flat, read_yaml, replaced
from medspeed.common.data.dataset import Dataset, Split, make_synthetic, read_dataset, read_split, split_cases
from medspeed.common.data.fingerprint import Fingerprint, fingerprint, is_ct, plan_preparation
from medspeed.common.data.folds import split_fold
from medspeed.common.data.preparation import Preparation
from medspeed.common.data.store import store_folder
from medspeed.common.files import plural, read_as, read_object, write_json
from medspeed.common.flags import flag_of
from medspeed.common.host_memory import free_memory
from medspeed.common.inference.labels import LabelScheme
from medspeed.common.inference.model import VolumeModel, write_model
from medspeed.common.run import Run, point_latest
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.networks import Build, choose_divisor, choose_sizes, coarsest_planes, network_arguments
from medspeed.common.training.setup import DEV_RUN, choose_precision
from medspeed.common.training.volume_config import SegmentationConfig, Size

C = TypeVar("C", bound=TrainingConfig)
S = TypeVar("S", bound=SegmentationConfig)
_TOLD = ("spacing", "window", "patch_size", "mpp")  # fields whose choice the lines on the data say


@dataclass(frozen=True)
class Data:
    """The scans of a run."""

    dataset: Dataset  # all there are
    split: Split  # which of them train, and which validate
    figures: Fingerprint  # of those that train; of a fold, of all
    known: Preparation | None = None  # that the app knows for this dataset

    def about(self) -> dict[str, Any]:
        """Return what the summary of a run says of its data, and how many cases trained and validated it."""
        data = {"folder": str(self.dataset.folder), "name": self.dataset.name, "synthetic": self.dataset.synthetic}
        counts = {"training": len(self.split.training), "validation": len(self.split.validation)}
        return {"data": data, "cases": counts}


@dataclass(frozen=True)
class Defaults:
    """What an app takes on one kind of device where the user says nothing."""

    fields: Mapping[str, Any]  # values by the names of `medspeed.common.config.flat`
    crop: Size  # the largest
    window: Size  # the largest
    window_batch: int  # windows computed at once
    batch_size: int
    steps: int  # of the whole training, about, so that small and large datasets train equally long
    validations: int = 10  # in it, about


def read_volumes(
    config: SegmentationConfig,
    run: Run,
    phantoms: str | None = None,
    real: str = "",
    known: Mapping[str, Preparation] | None = None,
) -> Data:
    """Read the dataset of --data, or small phantoms, which it says loudly; split it and take its fingerprint.

    The leader decides for all ranks. A resumed run finds the split and the fingerprint of its first start.

    Args:
        config: of the run.
        run: whose folder keeps them.
        phantoms: kind, size and version of those of `make_phantoms.py`: "ct-small-2"; None for an app without any.
        real: name of the folder of the real scans that `fetch_msd.py` downloads.
        known: preparations of CT datasets by the name that a dataset gives itself, which spare reading its voxels.

    Raises:
        FileNotFoundError, ValueError: the dataset or the split cannot be used.
    """
    with run.clock.stage("prepare"):
        folder = config.data
        if folder is None:
            if phantoms is None:
                raise ValueError("data null: this app has no synthetic phantoms; pass a dataset folder with --data")
            made, words = config.store / "phantoms" / phantoms, (phantoms.split("-")[0], "--cases", "20")
            folder = run.ranks.once(lambda: make_synthetic(made, "make_phantoms", *words))  # 16 train, 4 validate
        dataset = read_dataset(folder)
        run.say(f"data: {dataset.folder} ({dataset.name}, {plural(len(dataset.cases), 'labelled case')})")
        if dataset.synthetic:
            remedy = f"medspeed data fetch-msd {config.APP} --to data && medspeed train {config.APP} --data data/{real}"
            said = "SYNTHETIC DATA: these are phantoms; a Dice on them says nothing about patients. For real scans:"
            run.say(f"{said}\n  {remedy}", "warning")
        preparation = (known or {}).get(dataset.name) if is_ct(dataset) else None
        split, figures = run.ranks.once(lambda: _divided(dataset, preparation, config, run))
    return Data(dataset, split, figures, preparation)


def _divided(
    dataset: Dataset, known: Preparation | None, config: SegmentationConfig, run: Run
) -> tuple[Split, Fingerprint]:
    kept, measured = run.directory / "split.json", run.directory / "fingerprint.json"
    if run.resumed and (run.directory / "plan.json").is_file():
        return read_split(dataset, kept), read_as(measured, Fingerprint)
    split = split_cases(dataset, config.split)
    if config.fold is not None:
        split = split_fold(dataset, config.fold, decided(config.folds), config.groups, config.seed, config.workers)
    if config.fast_dev_run:
        parts = config.parallel.partitions or run.ranks.world
        run.say(DEV_RUN, "warning")
        training, validation = split.training[: max(2, parts)], split.validation[:parts]
        split = replace(split, training=training, validation=validation, description=f"{split.description}; shortened")
    store = store_folder(config.store / "fingerprints", dataset.folder)
    cases = split.training if config.fold is None or config.fast_dev_run else dataset.cases  # folds prepare alike
    figures = fingerprint(cases, dataset, store, known, config.workers)
    run.say(split.description)
    write_json(kept, split.to_json())
    write_json(measured, asdict(figures))
    return split, figures


def keep_plan(config: C, choose: Callable[[], C], run: Run) -> C:
    """Return the configuration with every field decided by `choose`, each choice said with its flag.

    The leader decides for all ranks, and keeps it as `plan.json`. A resumed run finds the decisions of its first start,
    but for the fields that may differ.
    """
    path, given = run.directory / "plan.json", flat(config)

    def make() -> C:
        if run.resumed and path.is_file():
            if lacking := sorted(read_yaml(run.directory / "config.yaml").keys() - read_object(path).keys()):
                raise ValueError(f"{path}: lacks {', '.join(lacking)}; restore it, or start a new run")
            return replaced(read_as(path, type(config)), {name: given[name] for name in config.RESUMABLE})
        chosen, device = choose(), "CPU" if run.device.type == "cpu" else "GPU"
        made = [each for each in flat(chosen).items() if each[1] != given[each[0]] and each[0] not in _TOLD]
        flags = [_as_flag(*each) for each in made]
        for flag in flags:
            run.say(f"default for this {device}: {flag}", "detail")
        if flags:
            run.say(f"defaults for this {device} (override any with its flag): {' '.join(flags)}")
        write_json(path, config_content(chosen))
        if config.run is None:
            point_latest(run.directory)  # a run that got no further leaves the link as it was
        return chosen

    plan = run.ranks.once(make)
    check_partitions(plan, run.ranks.world)  # also of a resumed run: these ranks must be able to share it
    return plan


def check_partitions(config: TrainingConfig, ranks: int) -> None:
    """Check that so many ranks can share the partitions, and that the batch divides; a ValueError says what would."""
    partitions, batch_size = decided(config.parallel.partitions), decided(config.batch_size)
    accumulate, problem = config.parallel.accumulate, ""
    if not config.alike() and partitions != ranks:
        problem = "would not compute the same with MONAI's sources or losses, which work per rank"
        remedy = f"use {partitions} ranks, or start a new run"
    elif partitions % ranks:
        fitting = ", ".join(str(n) for n in range(1, partitions + 1) if partitions % n == 0)
        problem = "cannot share them evenly"
        remedy = f"use {fitting} ranks, or start a new run with --parallel.partitions {ranks}"
    if problem:
        said = f"{ranks} ranks {problem}, so this run cannot resume exactly"
        raise ValueError(f"parallel.partitions {partitions}: {said}; {remedy}")
    if batch_size % (divisor := partitions * accumulate):
        why = f"{partitions} partitions, each split into {accumulate} micro-batches"
        raise ValueError(f"batch_size {batch_size}: must be a multiple of {divisor} ({why})")


def _as_flag(name: str, value: object) -> str:
    words = value if isinstance(value, tuple) else (value,)
    typed = (word if isinstance(word, str) else json.dumps(word) for word in words)
    return shlex.join([flag_of(name), *typed])


def choose_volumes(
    config: S,
    data: Data,
    usual: Defaults,
    build: Build,
    run: Run,
    window_sides: Callable[[list[int], list[int]], list[int]] = lambda shape, extent: shape,
) -> S:
    """Decide what the configuration of a segmentation leaves open; what the user gave always wins.

    From the median shape X, Y, Z and the median extent of the heads, in voxels of the working grid, `window_sides` says
    what a window covers, before it is cut to the largest.

    Raises:
        ValueError: what was asked for does not fit the data or the device.
    """
    fields = {**usual.fields, **choose_sizes(config, build, run.device.type)}
    config = replaced(config, {name: each for name, each in fields.items() if flat(config)[name] is None}).optimized()
    preparation, lines = _preparation(config, data)
    for line in lines:
        run.say(line)
    prepared = {"spacing": preparation.spacing, "window": preparation.window}
    config = replaced(config, {name: value for name, value in prepared.items() if hasattr(config, name)})
    channels, partitions = len(data.dataset.modality), config.parallel.partitions or run.ranks.world
    divisor, network = choose_divisor(config, build, channels)
    sizes, both = (data.figures.shape, data.figures.extent), (data.figures.spacing, preparation.spacing)
    shape, extent = ([round(n * native / mm) for n, native, mm in zip(each, *both, strict=True)] for each in sizes)
    crop = config.crop_size or _within(shape, usual.crop, divisor)
    planes = coarsest_planes(network, channels, crop) if network else crop[0] // divisor
    wish = config.precision
    if config.recipe == "guide" and wish == "auto":
        wish = "fp16" if run.device.type == "cuda" else "fp32"  # what the guide's autocast("cuda") does
    chosen = {
        "crop_size": crop,
        "windows.size": config.windows.size or _within(window_sides(shape, extent), usual.window, divisor),
        "precision": choose_precision(wish, run.device, [planes]),
        "parallel.partitions": partitions,
        "batch_size": config.batch_size or -(-usual.batch_size // partitions) * partitions,
    }
    config = replaced(config, chosen)
    if config.precision == "fp32" and run.device.type == "cuda":
        run.say("precision fp32: training convolutions use TensorFloat-32 on this GPU; final evaluation uses full fp32")
    check_partitions(config, run.ranks.world)
    _check_memory(config, channels, run)
    per_epoch = -(-len(data.split.training) * decided(config.crops.per_case) // decided(config.batch_size))
    epochs, validate_every = config.plan_epochs(usual.steps, per_epoch, usual.validations)
    return replaced(config, {"epochs": epochs, "validate_every": validate_every})


def _preparation(config: SegmentationConfig, data: Data) -> tuple[Preparation, tuple[str, ...]]:
    window = getattr(config, "window", None)
    return plan_preparation(data.dataset, data.figures, config.spacing, window, data.known)


def volume_model(
    config: SegmentationConfig, data: Data, network: Build, labelling: LabelScheme, window_batch: int, run: Run
) -> VolumeModel:
    """Return what a decided configuration trains, and keep it as `model.json`; `window_batch` windows go at once."""
    assert config.precision != "auto", "the configuration is not decided"
    modality, arguments = data.dataset.modality, network_arguments(config, network)
    windows = decided(config.windows.size), window_batch, config.windows.overlap
    model = VolumeModel(network, arguments, labelling, _preparation(config, data)[0], *windows, config.precision)
    model = replace(model, modality=modality if len(modality) > 1 else ())
    run.ranks.once(lambda: write_model(run.directory, config.APP, model))
    return model


def _check_memory(config: SegmentationConfig, channels: int, run: Run) -> None:
    """Check, before anything is allocated, that what goes into the network fits into the memory that is free."""
    crop, window, batch = decided(config.crop_size), decided(config.windows.size), decided(config.batch_size)
    at_once = batch // (run.ranks.world * config.parallel.accumulate)
    free = torch.cuda.mem_get_info(run.device)[0] if run.device.type == "cuda" else free_memory()
    for name, value, size, count in (
        ("crop_size", crop, crop, 1), ("windows.size", window, window, 1), ("batch_size", batch, crop, at_once),
    ):  # fmt: skip
        if (needed := 4 * channels * math.prod(size) * count) > free:
            said = f"{name} {value}: takes {needed / 2**30:.1f} GiB for the network's input alone"
            raise ValueError(f"{said}; only {free / 2**30:.1f} GiB are free; choose a smaller value")


def _within(shape: Sequence[int], limit: Sequence[int], divisor: int) -> Size:
    """Return, per axis, the smaller of the two, rounded up to what the network's levels divide."""
    x, y, z = (-(-min(side, most) // divisor) * divisor for side, most in zip(shape, limit, strict=True))
    return x, y, z
