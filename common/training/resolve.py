"""What a run decides before it starts: every field that its configuration left open, and what its network takes."""

import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from medspeed.common.config import config_content, flat, read_yaml, replaced
from medspeed.common.data.fingerprint import plan_preparation
from medspeed.common.data.geometry import triple
from medspeed.common.data.preparation import Preparation
from medspeed.common.files import from_json, read_as, read_object, write_json
from medspeed.common.flags import flag_of
from medspeed.common.host_memory import free_memory
from medspeed.common.inference.labels import LabelScheme
from medspeed.common.inference.model import BROKEN, VolumeModel, arguments_of, first_line, model_content, write_model
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.setup import choose_precision
from medspeed.common.training.sources import Data
from medspeed.common.training.volume_config import SegmentationConfig, Size

C = TypeVar("C", bound=TrainingConfig)
S = TypeVar("S", bound=SegmentationConfig)
Build = Callable[..., nn.Module]
# By flag, where the user says nothing: those of MONAI's guides on a GPU, small ones on a CPU. Not of a user's network.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"channels": (16, 32, 64, 128, 256), "network.filters": 16, "network.blocks_down": (1, 2, 2, 4)},
    "cpu": {"channels": (8, 16, 32, 64), "network.filters": 8, "network.blocks_down": (1, 2, 2)},
}
_FIELDS = {"channels": "channels"} | {name: f"network.{name}" for name in ("filters", "blocks_down", "dropout")}
_DIVISORS = (1, 2, 4, 8, 16, 32, 64)
_ODD = 5  # times a divisor: a side that no larger one divides
_MEANING = ("labelling", "modality", "preparation")  # what weights to start from expect of their images and labels
_TOLD = ("spacing", "window", "patch_size", "mpp", "init")  # fields whose choice other lines say


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
    crops_per_scan: float = math.inf  # at most: the spacing is coarser where it would take more, unless it is given


def keep_plan(config: C, choose: Callable[[], C], run: Run) -> C:
    """Return the configuration with every field decided by `choose`, each choice said with its flag.

    The leader decides for all ranks, and keeps it as `plan.json`. A resumed run finds it, but for `RESUMABLE` fields.
    """
    path, given = run.directory / "plan.json", flat(config)

    def make() -> C:
        if run.planned:
            if lacking := sorted(read_yaml(run.directory / "config.yaml").keys() - read_object(path).keys()):
                raise ValueError(f"{path}: lacks {', '.join(lacking)}; restore it, or start a new run")
            began = read_as(path, type(config))
            planned = replaced(began, {name: given[name] for name in config.RESUMABLE})
            planned.check_resumed(began)
            choose_precision(planned.precision, run.device)  # which may be of another kind now
            check_partitions(planned, run.ranks.world)  # these ranks must be able to share it
            return planned
        chosen = replaced(choose(), {"init": config.init and config.init.resolve()})  # `latest` is about to move
        check_partitions(chosen, run.ranks.world)
        device = "CPU" if run.device.type == "cpu" else "GPU"
        flags = []
        for name, value in flat(chosen).items():
            if value != given[name] and name not in _TOLD:
                words = value if isinstance(value, tuple) else (value,)
                typed = (word if isinstance(word, str) else json.dumps(word) for word in words)
                flags.append(shlex.join([flag_of(name), *typed]))
                run.say(f"default for this {device}: {flags[-1]}", "detail")
        if flags:
            run.say(f"defaults for this {device} (override any with its flag): {' '.join(flags)}")
        write_json(path, config_content(chosen))
        return chosen

    return run.ranks.once(make)


def check_partitions(config: TrainingConfig, ranks: int) -> None:
    """Check that so many ranks can share the partitions, and that the batch divides; a ValueError says what would."""
    partitions, batch_size = decided(config.parallel.partitions), decided(config.batch_size)
    accumulate, alike = config.parallel.accumulate, config.alike()
    fitting = [n for n in range(1, partitions + 1) if partitions % n == 0] if alike else [partitions]
    if ranks not in fitting:
        per_rank = "would not compute the same with MONAI's sources or losses, which work per rank"
        said = f"{ranks} ranks {'cannot share them evenly' if alike else per_rank}"
        remedy = f"use {', '.join(map(str, fitting))} ranks, or start a new run with --parallel.partitions {ranks}"
        raise ValueError(f"parallel.partitions {partitions}: {said}; {remedy}")
    if batch_size % (divisor := partitions * accumulate):
        why = f"partitions: {partitions}, micro-batches of each: {accumulate}"
        raise ValueError(f"batch_size {batch_size}: must be a multiple of {divisor} ({why})")


def choose_volumes(
    config: S,
    data: Data,
    usual: Defaults,
    build: Build,
    run: Run,
    window_sides: Callable[[list[int], list[int]], list[int]] = lambda shape, extent: shape,
) -> S:
    """Decide what the configuration of a segmentation leaves open; what the user gave always wins.

    From the median shape X, Y, Z, and that of the box of nonzero voxels, both on the working grid, `window_sides` says
    what a window covers, before it is cut to the largest. What does not fit the data or the device is a ValueError.
    """
    fields = {**usual.fields, **choose_sizes(config, build, run.device.type)}
    words = {each.lower() for each in re.findall("[A-Z]?[a-z]+|[A-Z]+", " ".join(data.dataset.labels))}
    if {"left", "right", "lh", "rh"} & words or {"l", "r"} <= words:  # a mirror swaps them
        fields["crops.flips"] = fields["crops.flips"].replace("x", "")
    config = replaced(config, {name: each for name, each in fields.items() if flat(config)[name] is None}).optimized()
    coarsens = config.ours and config.init is None  # not MONAI's recipe, nor weights, which are made for a spacing
    voxels = math.prod(config.crop_size or usual.crop) * (usual.crops_per_scan if coarsens else math.inf)
    finest = round((math.prod(data.figures.shape) * math.prod(data.figures.spacing) / voxels) ** (1 / 3), 1)  # mm
    was = _model_of(config.init).get("preparation")
    known = data.known if was is None else from_json(Preparation, was)
    preparation, lines = plan_preparation(data.dataset, data.figures, config.spacing, config.window, known, finest)
    for line in lines:
        run.say(line)
    config = replace(config, spacing=preparation.spacing, window=preparation.window)
    channels, partitions = len(data.dataset.modality), config.parallel.partitions or run.ranks.world
    smallest = partitions * config.parallel.accumulate
    divisor, network = choose_divisor(config, build, channels)
    sizes, both = (data.figures.shape, data.figures.extent), (data.figures.spacing, preparation.spacing)
    shape, extent = ([round(n * native / mm) for n, native, mm in zip(each, *both, strict=True)] for each in sizes)
    crop = config.crop_size or _within(shape, usual.crop, divisor)
    batch = config.batch_size or -(-usual.batch_size // smallest) * smallest
    if network:
        check_size(network, channels, crop, f"batch_size {batch}, crop_size", 1 + (batch > smallest))
    chosen = {
        "crop_size": crop,
        "windows.size": config.windows.size or _within(window_sides(shape, extent), usual.window, divisor),
        "precision": choose_precision(config.precision, run.device, config.recipe),
        "parallel.partitions": partitions,
        "batch_size": batch,
    }
    config = replaced(config, chosen)
    if config.precision == "fp32" and run.device.type == "cuda":
        run.say("precision fp32: training convolutions use TensorFloat-32 on this GPU; final evaluation uses full fp32")
    _check_memory(config, channels, run)
    held = config.caching().cases  # of each partition, in an epoch of a smart cache
    cases = len(data.split.training) if held is None else held * partitions
    per_epoch = -(-cases * decided(config.crops.per_case) // decided(config.batch_size))
    epochs, validate_every = config.plan_epochs(usual.steps, per_epoch, usual.validations)
    return replaced(config, {"epochs": epochs, "validate_every": validate_every})


def _model_of(weights: Path | None) -> dict[str, Any]:
    """Return what tells how weights to start from were trained, the `model.json` of their run; else nothing."""
    paths = [each.with_name("model.json") for each in (weights, weights.resolve())] if weights else []  # of a link, too
    found = next((read_object(path) for path in paths if path.is_file()), {})
    return found if {"labelling", "preparation"} <= found.keys() else {}


def volume_model(
    config: SegmentationConfig, data: Data, network: Build, labelling: LabelScheme, window_batch: int, run: Run
) -> VolumeModel:
    """Return what a decided configuration trains, and keep it as `model.json`; `window_batch` windows go at once."""
    assert config.precision != "auto", "the configuration is not decided"
    model = VolumeModel(
        network=network,
        arguments=network_arguments(config, network),
        labelling=labelling,
        preparation=plan_preparation(data.dataset, data.figures, config.spacing, config.window)[0],
        window_size=decided(config.windows.size),
        window_batch=window_batch,
        overlap=config.windows.overlap,
        precision=config.precision,
        modality=data.dataset.modality if len(data.dataset.modality) > 1 else (),
    )
    if labelling.exclusive and (unused := labelling.channels - len(labelling.numbers)) > len(labelling.numbers):
        said = f"labels: {unused} of {labelling.channels} numbers are not used, and each takes a channel of the network"
        run.say(f"{said}: renumber the labels with medspeed data to-msd --values", "warning")
    kept, own = run.directory / "model.json", json.loads(json.dumps(model_content(model)))
    old = read_object(kept) if run.resumed and kept.is_file() else own
    for name in [name for name in _MEANING if name in old and old[name] != own.get(name)]:
        said = f"{kept}: the run began with {name} {old[name]}, and its plan and {data.dataset.folder} give"
        raise ValueError(f"{said} {own.get(name)}: it cannot resume; restore what has changed")
    was = _model_of(config.init)
    for name in [name for name in _MEANING if was and was.get(name) != own.get(name)]:
        run.say(f"{config.init}: {name}: {was.get(name)}, but this run has {own.get(name)}: is that meant?", "warning")
    if not run.ranks.once(kept.is_file):  # with the post-processing that an earlier end has chosen
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
    return triple(-(-min(side, most) // divisor) * divisor for side, most in zip(shape, limit, strict=True))


def network_arguments(config: SegmentationConfig, build: Build) -> dict[str, Any]:
    """Return the arguments of a configuration's network; see `arguments_of`."""
    return arguments_of(build, {name: flat(config)[field] for name, field in _FIELDS.items()})


def choose_sizes(config: SegmentationConfig, build: Build, device: str) -> dict[str, Any]:
    """Return, by flag, what a network gets on a kind of device where the user says nothing: of `models`, its sizes."""
    takes = [] if ":" in build.__name__ else [_FIELDS.get(name) for name in inspect.signature(build).parameters]
    chosen = {"network.name": build.__name__} | {name: each for name, each in SIZES[device].items() if name in takes}
    return chosen if build.__name__ == config.NETWORK else {**chosen, "channels_last": False}


def choose_divisor(config: SegmentationConfig, build: Build, channels: int) -> tuple[int, nn.Module | None]:
    """Return the power of 2 that must divide the sides of crops and windows; if found by trial, the network on "meta".

    A ValueError says that it takes no images of `channels`, or what crop or window is no multiple.
    """
    arguments = network_arguments(config, build)  # of all: what it does not take is found before the plan is kept
    if (levels := config.halvings()) is not None:
        return 2**levels, None  # the configuration has checked them
    try:
        with torch.random.fork_rng(devices=[]):
            network = build(channels, 2, **arguments).to("meta")
    except BROKEN as error:
        raise ValueError(f"network {build.__name__}: invalid arguments {arguments} ({first_line(error)})") from error
    for divisor in _DIVISORS:
        with suppress(*([ValueError] if divisor < _DIVISORS[-1] else [])):
            check_size(network, channels, (_ODD * divisor,) * 3, f"network {build.__name__}: an image of")
            break
    config.check_sides(divisor, f"for the network {build.__name__}")
    return divisor, network


def check_size(network: nn.Module, channels: int, size: Size, told: str, count: int = 2) -> None:
    """Check that a network on "meta" takes so many images of a size X, Y, Z.

    A ValueError says that it does not, does not return logits of their size, or does not use a weight.
    """
    try:
        logits = network(torch.empty(count, channels, *size, device="meta"))
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        if found != (count, 2, *size):
            raise ValueError(f"{found} is returned instead of logits {(count, 2, *size)}")
        torch.autograd.backward(logits.sum())
        if idle := [name for name, each in network.named_parameters() if each.requires_grad and each.grad is None]:
            raise ValueError(f"the logits do not depend on the weight {idle[0]}: freeze it (requires_grad = False)")
    except BROKEN as error:
        raise ValueError(f"{told} {size}: {type(network).__name__} does not take it ({first_line(error)})") from error
