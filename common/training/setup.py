"""What stands before the first step: the run, precision and schedule, a compiled network, and the fast dev run."""

import json
import math
import shlex
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from medspeed.common.config import config_to_yaml
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.data.dataset import Split
from medspeed.common.files import release
from medspeed.common.flags import flag_of
from medspeed.common.host_memory import keep_freed_memory
from medspeed.common.inference import Precision
from medspeed.common.inference.labels import mean_dice
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predictors import computes_bf16, torch_predictor
from medspeed.common.kernels import moments, norms, trust
from medspeed.common.ranks import Ranks
from medspeed.common.run import STOP_SIGNALS, Run, exit_by_signal, how_to_go_on, join_ranks, open_run, take_signals
from medspeed.common.trackers import Trackers, check_installed
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.volume_config import SegmentationConfig

DEV_RUN = "FAST DEV RUN: two steps on a few cases; the results of this run are meaningless"
_DEV_TRAINING, _DEV_VALIDATION = 2, 1  # cases, or as many as there are parts to deal them to
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

ScheduleName = Literal["constant", "linear", "cosine"]
SCHEDULES: dict[ScheduleName, Callable[[float], float]] = {  # from the part of the run that is done, 0 to 1
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


@contextmanager
def start_run(config: TrainingConfig) -> Iterator[Run]:
    """Join the processes that torchrun started, make the run's folder or open the one to resume, and say what runs.

    A new run that the user's mistake ends before its plan is kept leaves no folder, unless it holds what is not the
    run's own. Whatever else ends it, it says where checkpoint and weights are, and how to go on (errors: `open_run`).
    """
    with join_ranks(config.device) as ranks, take_signals(STOP_SIGNALS, exit_by_signal):
        root = Path("runs") / config.APP
        ranks.once(lambda: check_installed(config.log))
        run = open_run(root, config.run, config.resume, config.device, config_to_yaml(config), config.seed, ranks)
        run = replace(run, trackers=Trackers(config.log, config.APP, run.directory, run.say))
        if run.device.type == "cpu":
            keep_freed_memory()
        else:  # while the data are looked through and read
            threading.Thread(target=wake, args=(run.device,), name="wake", daemon=True).start()
        run.say(f"run {run.directory}: recipe {config.recipe} on {run.device}, ranks {ranks.world}, seed {config.seed}")
        try:
            yield run
            run.trackers.close(failed=False)
        except BaseException as error:
            mistake, begun = isinstance(error, (ValueError, OSError)), (run.directory / "plan.json").exists()
            if run.leader and mistake and not run.resumed and not begun:
                for path in run.directory.iterdir():  # never a folder: a user may keep the store in it
                    if (path.suffix or path.name) in (".yaml", ".json", ".log", ".lock") and path.is_file():
                        path.unlink()
                with suppress(OSError):
                    run.directory.rmdir()
            elif not isinstance(error, Exception) or (run.directory / "checkpoints" / "last").is_symlink():
                with suppress(OSError):
                    run.say(how_to_go_on(run.directory), "warning")
            run.trackers.close(failed=True)
            raise
        finally:
            release(run.directory / ".lock")


def wake(device: torch.device) -> None:
    """Let a device load what its first convolution and its first product of matrices ask for, by doing small ones."""
    with suppress(RuntimeError):  # whoever computes in earnest will meet and say it
        image, kernel = torch.zeros(1, 8, 8, 8, 8, device=device), torch.zeros(8, 8, 3, 3, 3, device=device)
        torch.nn.functional.conv3d(image, kernel)
        torch.mm(kernel[0, 0, 0], kernel[0, 0, 0])


def lr_factor(schedule: ScheduleName, step: int, total_steps: int) -> float:
    """Return what the base learning rate is multiplied by at a step of a run of `total_steps` steps.

    Args:
        schedule: "constant" stays 1; "linear" and "cosine" fall from 1 at step 0 to 0 after the last step.
        step: steps done before this one, 0 to `total_steps`.
        total_steps: steps in the whole run, at least 1.
    """
    assert 0 <= step <= total_steps, f"step {step} of {total_steps}"
    return SCHEDULES[schedule](step / total_steps)


def learning_rates(config: TrainingConfig, total_steps: int) -> list[float]:
    """Return the learning rate of each step of a run."""
    rate = decided(config.learning_rate)
    return [rate * lr_factor(config.schedule, step, total_steps) for step in range(total_steps)]


def choose_precision(wish: Literal["auto", Precision], device: torch.device, deepest: Sequence[int] = ()) -> Precision:
    """Return the precision to train in; "auto" is bf16 where the device computes it in hardware, and rightly.

    Args:
        wish: what was asked for.
        device: where the network trains.
        deepest: sides X, Y, Z of a training crop at the coarsest level of a network of volumes; X alone will do.

    Raises:
        ValueError: fp16 on a CPU, whose convolutions have no half-precision gradients; or bf16 on a CPU with crops of
            which the network leaves two planes.
    """
    if wish == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16: needs a CUDA device; use bf16 or fp32 on this CPU")
    # torch 2.13's oneDNN (AVX-512 BF16) takes the weights' gradients of conv3d from memory that nobody wrote where the
    # first axis has exactly two planes, whatever the others; tests/common/training/test_setup.py has the check.
    wrong = device.type == "cpu" and any(side <= 2 for side in deepest[:1])
    if wish == "bf16" and wrong:
        raise ValueError(
            f"precision bf16: the network reduces a crop to {deepest[0]} planes, with wrong bf16 gradients on a CPU; "
            "use fp32, or crops that are longer along the first axis"
        )
    if wish != "auto":
        return wish
    if computes_bf16(device) and not wrong:
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def check_partitions(config: TrainingConfig, ranks: int) -> None:
    """Check that the partitions of a decided configuration can be shared by so many ranks, and its batch divided.

    Raises:
        ValueError: names the numbers that do not divide each other, and what would.
    """
    partitions, batch_size = decided(config.parallel.partitions), decided(config.batch_size)
    accumulate = config.parallel.accumulate
    if not config.alike() and partitions != ranks:
        raise ValueError(
            f"parallel.partitions {partitions}: {ranks} ranks would not compute the same with MONAI's sources or "
            f"losses, which work per rank, so the run cannot resume exactly; use {partitions} ranks, or start a new run"
        )
    if partitions % ranks:
        fitting = ", ".join(str(n) for n in range(1, partitions + 1) if partitions % n == 0)
        raise ValueError(
            f"parallel.partitions {partitions}: {ranks} ranks cannot share them evenly, so this run cannot resume "
            f"exactly; use {fitting} ranks, or start a new run with --parallel.partitions {ranks}"
        )
    if batch_size % (partitions * accumulate):
        raise ValueError(
            f"batch_size {batch_size}: must be a multiple of {partitions * accumulate} ({partitions} partitions, each "
            f"split into {accumulate} micro-batches)"
        )


def dtype_of(precision: Literal["auto", Precision]) -> torch.dtype:
    """Return what a network of a decided precision computes in."""
    return _DTYPES.get(precision, torch.float32)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the forward pass and the loss run."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision, torch.bfloat16), enabled=precision != "fp32")


def volume_network(config: SegmentationConfig, model: VolumeModel, run: Run) -> nn.Module:
    """Return the network of a decided run as it starts: on its device, laid out as the config says.

    With the weights of --init, unless a checkpoint is there, whose weights `fit` takes.
    """
    trained = (run.directory / "checkpoints" / "last").exists()
    network = model.build(None if trained else config.init).to(run.device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    trust_kernels(network_trials(network, config, run), config, run)
    return network


def network_trials(network: nn.Module, config: TrainingConfig, run: Run) -> list[trust.Trial]:
    """Return the trials of the fused kernels that a network and its optimizer have."""
    return [*norms.trials(network, dtype_of(config.precision), run.device), moments.trial(run.device)]


def trust_kernels(trials: Sequence[trust.Trial], config: TrainingConfig, run: Run) -> frozenset[str]:
    """Choose, on a GPU, among fused variants and their twins (see `trust.choose`), the same on all ranks."""
    if run.device.type != "cuda":
        return frozenset()
    names = run.ranks.once(lambda: trust.choose(trials, config.kernels, config.store, run.say))
    trust.take(names)
    return names


def compile_if_asked(
    network: nn.Module, batches: Batches, windows: Sequence[int], config: TrainingConfig, run: Run
) -> None:
    """Compile a network in place, if a decided config says so: once to train, and once to validate.

    This pays for torch.compile before the clock of training starts; the network's state is left as it is. It is
    compiled for what it will get: dtypes and strides are those of the first batch.

    Args:
        network: in training mode on the run's device.
        batches: that it trains on.
        windows: shape [B, C, *sides] of what a validation gives it at once.
        config: says so, and in how many parts a batch comes.
        run: whose clock has a stage for it.
    """
    with run.clock.stage("compile"):
        if not config.compile:
            return
        assert config.precision != "auto", "the configuration is not decided"
        before = {name: value.clone() for name, value in network.state_dict().items()}
        network.compile(dynamic=False)
        with closing(batches.epoch(0)) as epoch:
            image = next(epoch).image.chunk(config.parallel.accumulate)[0]
        with autocast(config.precision, run.device):
            output = network(image)
        torch.autograd.backward(output.float().sum())
        network.zero_grad(set_to_none=True)
        torch_predictor(network.eval(), config.precision)(torch.zeros(*windows, device=run.device))
        network.train().load_state_dict(before)


def one_step(batches: Batches) -> Batches:
    """Return the first batch of each epoch alone, for a fast dev run; what prepares the others ends then."""

    def first(number: int, first_step: int) -> Generator[Batch, None, None]:
        with closing(batches.epoch(number, first_step)) as made:
            yield from islice(made, 1 - first_step)

    return replace(batches, open=first, steps_per_epoch=1)


def shared_validation(
    counts: Callable[..., list[torch.Tensor]], ranks: Ranks
) -> Callable[[nn.Module, Callable[[], None]], float]:
    """Return the validation whose cases are shared by the ranks: counted on the device, read once."""

    def validate(network: nn.Module, check: Callable[[], None]) -> float:
        mine = counts(network=network, check=check)
        return mean_dice(ranks.gather(torch.stack(mine).cpu().unbind() if mine else []))

    return validate


def nan_as_zero(validate: Callable[[nn.Module, Callable[[], None]], float]) -> Callable[..., float]:
    """Return a validation that gives 0 where there is nothing to find: a few cases may well hold nothing."""

    def value(network: nn.Module, check: Callable[[], None]) -> float:
        found = validate(network, check)
        return 0.0 if math.isnan(found) else found

    return value


def few_cases(split: Split, parts: int, run: Run) -> Split:
    """Return the split with a few of its cases, and say that no figure means anything."""
    run.say(DEV_RUN, "warning")
    training, validation = split.training[: max(_DEV_TRAINING, parts)], split.validation[: max(_DEV_VALIDATION, parts)]
    return replace(split, training=training, validation=validation, description=f"{split.description}; shortened")


def say_defaults(made: Mapping[str, object], run: Run) -> None:
    """Say what was chosen for this device, by field, as flags in one line; with `--verbose` line by line."""
    device, flags = "CPU" if run.device.type == "cpu" else "GPU", [_as_flag(*each) for each in made.items()]
    for flag in flags:
        run.say(f"default for this {device}: {flag}", "detail")
    if flags:
        run.say(f"defaults for this {device} (override any with its flag): {' '.join(flags)}")


def _as_flag(name: str, value: object) -> str:
    words = value if isinstance(value, tuple) else (value,)
    typed = (word if isinstance(word, str) else json.dumps(word) for word in words)
    return shlex.join([flag_of(name), *typed])
