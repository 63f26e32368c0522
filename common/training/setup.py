"""What stands before the first step: the run, precision and schedule, trusted kernels, a compiled network."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from medspeed.common.clock import check_nvtx
from medspeed.common.config import config_to_yaml
from medspeed.common.data import crops
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.files import release
from medspeed.common.host_memory import keep_freed_memory
from medspeed.common.inference import Precision
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.predictors import DTYPES, autocast, computes_bf16, torch_predictor
from medspeed.common.kernels import trust
from medspeed.common.ranks import Ranks
from medspeed.common.run import STOP_SIGNALS, Run, exit_by_signal, how_to_go_on, join_ranks, open_run, take_signals
from medspeed.common.trackers import Trackers, check_installed
from medspeed.common.training import losses
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.volume_config import SegmentationConfig

SCHEDULES: dict[str, Callable[[float], float]] = {  # from the part of the run that is done to a factor, both 0 to 1
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


@contextmanager
def start_run(config: TrainingConfig) -> Iterator[Run]:
    """Join the processes that torchrun started, make the run's folder or open the one to resume, and say what runs.

    A new run that the user's mistake, found by the leader, ends before its plan is kept (with --run: before it trains)
    leaves no folder, unless it holds more. Whatever else ends it, it says how to go on (errors: `open_run`).
    """
    with join_ranks(config.device) as ranks, take_signals(STOP_SIGNALS, exit_by_signal):
        root = Path("runs") / config.APP
        ranks.once(lambda: check_installed(config.log))
        ranks.once(lambda: _check_init(config))
        if config.profile == "nvtx":
            ranks.once(check_nvtx)
        run = open_run(root, config.run, config.resume, config.device, config_to_yaml(config), config.seed, ranks)
        run = replace(run, trackers=Trackers(config.log, config.APP, run.directory, run.say))
        last = run.directory / "checkpoints" / "last"
        began = last.is_symlink() and last.readlink()
        try:
            run.say(f"{run.directory}: recipe {config.recipe}, {run.device}, ranks {ranks.world}, seed {config.seed}")
            if run.device.type == "cpu":
                keep_freed_memory()
            else:  # while the data are read; a daemon thread could crash the interpreter's exit
                threading.Thread(target=wake, args=(run.device,), name="wake").start()
            if ranks.world == 1 and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
                said = "srun started several processes, and each trains alone: use torchrun, see apps/brats/slurm.sh"
                run.say(said, "warning")
            yield run
            run.trackers.close(failed=False)
        except BaseException as error:
            mistake, paths = isinstance(error, (ValueError, OSError)), [*run.directory.glob("*")]
            own = [each for each in paths if (each.suffix or each.name) in (".yaml", ".json", ".log", ".lock")]
            keeps = config.run is None or len(own) < len(paths) or isinstance(error, OSError)
            planned = (run.directory / "plan.json").exists()
            if run.ranks.leader and mistake and not run.resumed and not (planned and keeps):
                for path in filter(Path.is_file, own):  # never a folder: a user may keep the store in it
                    path.unlink()
                with suppress(OSError):
                    run.directory.rmdir()
            elif not isinstance(error, Exception) or (
                last.is_symlink() and not (isinstance(error, ValueError) and last.readlink() == began)  # it was refused
            ):
                with suppress(OSError):
                    run.say(how_to_go_on(run.directory), "warning")
            run.trackers.close(failed=True)
            raise
        finally:
            release(run.directory / ".lock")


def _check_init(config: TrainingConfig) -> None:
    if config.init is not None and config.resume is None and not config.init.is_file():
        raise FileNotFoundError(f"init {config.init}: no such weights file")  # before there is a folder that keeps it


class GracefulStop:
    """Until it is closed, a stop signal is a wish to stop after the step; after Ctrl-C the next one acts as usual.

    With several ranks the signal reaches each at another step, or only one of them. They then agree: what one was told
    counts for all at the step after, and further signals change nothing, so that the leader can save in peace
    (torchrun kills what has not ended 30 seconds later). `save` is done before a validation is broken off.
    """

    def __init__(self, ranks: Ranks, save: Callable[[], None]) -> None:
        self._ranks, self._save = ranks, save
        self.requested = 0  # the signal that has come; with several ranks, that all know of
        self._number = 0  # the one that came to this process
        self._asked: tuple[Tensor, dist.Work] | None = None
        self._taken = ExitStack()  # a signal may come before the next line has ended
        self._taken = take_signals((*STOP_SIGNALS, signal.SIGINT), self._note)

    def close(self) -> None:
        """Give the signals back."""
        self._taken.close()

    def after_step(self) -> None:
        """Hear what the ranks knew a step ago, and tell them what this one knows now: that travels during a step."""
        if self._ranks.world > 1:
            self._hear()
            known = torch.tensor(self._number, dtype=torch.int32)
            work = dist.all_reduce(known, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
            assert work is not None  # as only without `async_op`
            self._asked = known, work

    def agree(self) -> None:
        """Hear what the ranks know now; waits for them."""
        self.after_step()
        self._hear()

    def exit_if_requested(self) -> None:
        """End the program, if a signal has come, with the status that says which: 143 for SIGTERM."""
        if self.requested:
            self._ranks.leave()
            raise SystemExit(128 + self.requested)

    def check(self) -> None:
        """Save and end the program, if a signal has come, in the midst of work: a rank that is alone may."""
        if self.requested and self._ranks.world == 1:
            self._save()
            self.exit_if_requested()

    def _hear(self) -> None:
        if self._asked is not None:
            known, work = self._asked
            work.wait()
            self.requested, self._asked = max(self.requested, int(known)), None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._ranks.world == 1:
            self.requested = self._number
            if number == signal.SIGINT:  # a shutdown sends SIGTERM and SIGHUP together, a wrapper SIGTERM twice
                self.close()


def wake(device: torch.device) -> None:
    """Warm a GPU up: a small convolution and matrix product load cuDNN and cuBLAS before the first step."""
    with suppress(RuntimeError):  # whoever computes in earnest will meet and say it
        image, kernel = torch.zeros(1, 8, 8, 8, 8, device=device), torch.zeros(8, 8, 3, 3, 3, device=device)
        torch.nn.functional.conv3d(image, kernel)
        torch.mm(kernel[0, 0, 0], kernel[0, 0, 0])


def learning_rates(config: TrainingConfig, total_steps: int) -> list[float]:
    """Return the learning rate of each step of a run; it would be 0 after the last one, but for "constant"."""
    rate, factor = decided(config.learning_rate), SCHEDULES[config.schedule]
    return [rate * factor(step / total_steps) for step in range(total_steps)]


def choose_precision(wish: Literal["auto", Precision], device: torch.device, recipe: str = "") -> Precision:
    """Return the precision to train in; "auto" is bf16 where the device computes it in hardware, but in the guides.

    Raises:
        ValueError: fp16 on a CPU, whose convolutions have no half-precision gradients.
    """
    if wish == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16: needs a CUDA device; use bf16 or fp32 on this CPU")
    if wish != "auto":
        return wish
    if recipe == "guide":
        return "fp16" if device.type == "cuda" else "fp32"  # what their autocast("cuda") does
    return "bf16" if computes_bf16(device) else "fp16" if device.type == "cuda" else "fp32"


def dtype_of(precision: Literal["auto", Precision]) -> torch.dtype:
    """Return what a network of a decided precision computes in."""
    return DTYPES.get(precision, torch.float32)


def network_trials(network: nn.Module, config: TrainingConfig, run: Run) -> list[trust.Trial]:
    """Return a trial of each kind of module: of the first, whose images are the largest."""
    modules: list[Any] = [each for each in network.modules() if hasattr(each, "kernel_trial")]
    kinds = {getattr(each, "kind", type(each)): each for each in reversed(modules) if getattr(each, "count", 2) > 1}
    given, first = (dtype_of(config.precision), run.device), [each for each in modules if hasattr(each, "count")][:1]
    return [each.kernel_trial(*given, *[True for other in first if other is each]) for each in kinds.values()]


def volume_trials(config: SegmentationConfig, model: VolumeModel, batches: Batches, run: Run) -> list[trust.Trial]:
    """Return the trials of a decided run: of its loss, and of what makes its batches where they lie on the device."""
    dtype, scheme, device = dtype_of(config.precision), model.labelling, run.device
    layout = torch.channels_last_3d if config.channels_last else torch.contiguous_format
    n, _, *sides = shape = [decided(config.batch_size) // run.ranks.world, scheme.channels, *decided(config.crop_size)]
    about = f"{n} x {scheme.channels} x {sides}, {config.loss}, {dtype}, {layout}"
    loss = losses.build_loss(config.loss, regions=() if scheme.exclusive else scheme.regions)

    @cache
    def example() -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(shape, generator=generator, device=device).to(dtype)
        label = torch.randint(len(scheme.labels), (n, 1, *sides), generator=generator, device=device)
        return logits.contiguous(memory_format=layout).requires_grad_(), label.to(torch.uint8)

    def work() -> list[Tensor]:
        logits, label = example()
        value = loss(logits, label)
        (gradient,) = torch.autograd.grad(value * label.numel(), logits)  # in fp16 else too small to be compared
        return [value.detach(), gradient]

    found = [] if config.loss.startswith("monai_") else [trust.Trial(losses.FUSED, work, _tolerance(dtype), about)]
    apart = config.caching().mode == "smart" or config.caching().reshuffle  # cases not in one tensor
    return found if apart else [*found, *batch_trials(crops.FUSED, batches, dtype, about)]


def batch_trials(name: str, batches: Batches, dtype: torch.dtype, about: str) -> list[trust.Trial]:
    """Return the trial of a kernel that makes batches of this dtype, if all they need is on the device."""
    if not batches.made_on_device:
        return []
    streams: dict[bool, Iterator[Batch]] = {}  # of the kernel and of its twin: the same batches

    def work() -> list[Tensor]:
        batch = next(streams.setdefault(trust.trusts(name), chain.from_iterable(map(batches.epoch, count()))))
        return [batch.image.to(dtype), batch.label]

    return [trust.Trial(name, work, _tolerance(dtype), about, streams.clear)]


def _tolerance(dtype: torch.dtype) -> float:
    return max(1e-4, 2 * torch.finfo(dtype).eps)


def trust_kernels(trials: Sequence[trust.Trial], config: TrainingConfig, run: Run) -> None:
    """Choose, on a GPU, among fused variants and their twins (see `trust.choose`), the same on all ranks."""
    if run.device.type == "cuda":
        with run.clock.stage("compile"):
            trust.take(run.ranks.once(lambda: trust.choose(trials, config.kernels, config.store, run.say)))


def compile_if_asked(
    network: nn.Module, batches: Batches, windows: Sequence[int], config: TrainingConfig, run: Run
) -> None:
    """Compile a network in place, if a decided config says so: for its first batch, and to validate.

    The network, in training mode on the run's device, keeps its state; a validation gives it `windows` [B, C, *sides].
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
        torch_predictor(network.eval(), config.precision, tf32=True)(torch.zeros(*windows, device=run.device))
        network.train().load_state_dict(before)
