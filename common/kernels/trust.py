"""Which fused variants are used: each is compared with its plain twin, and timed, on the device that will run it.

`choose` tries a variant (kernel, layout, captured graph) once per machine; where `trusts` does not, its twin runs.
"""

import hashlib
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from medspeed.common.clock import repeated, synchronise
from medspeed.common.files import locked, read_object, write_json

Kernels = Literal["auto", "torch", "fused"]
Work = Callable[[], Sequence[Tensor]]
_ROUNDS = 5
_FASTER = 0.97  # of the twin's seconds: what is less is noise
_WARM_UP = 3  # runs before a capture. Source: torch's notes on CUDA graphs
_OURS = "medspeed."  # begins the modules of our kernels
_trusted: set[str] = set()
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # x * y + z in one instruction: Triton 3.10 asks for it


@dataclass(frozen=True)
class Trial:
    """A piece of work on inputs of its own making that stand for the run's, done by a variant and by its twin."""

    name: str  # as `trusts` asks for it
    work: Work  # takes the variant where `trusts` says so; returns outputs, then gradients, alike in shapes and dtypes
    tolerance: float  # of each tensor: the largest difference over the twin's largest absolute value
    about: str = ""  # what the verdict holds for besides the machine: shapes, precision
    forget: Callable[[], object] = lambda: None  # gives the memory of its inputs back
    launched: Callable[[], object] | None = None  # of a captured graph: what it captures

    def key(self, machine: str) -> str:
        """Return the name of its verdict on a machine."""
        return f"{machine}: {self.name} {self.about}"

    def fused(self) -> Sequence[Tensor]:
        """Return what the variant computes."""
        with trusting(self.name):
            return self.work()


def trusts(name: str, tensor: Tensor | None = None) -> bool:
    """Return whether a variant was chosen, or is being tried; and a tensor that it would take lies on a CUDA device."""
    return name in _trusted and (tensor is None or tensor.is_cuda)


@contextmanager
def trusting(*names: str) -> Iterator[None]:
    """Trust variants untried inside."""
    before = set(_trusted)
    _trusted.update(names)
    try:
        yield
    finally:
        _trusted.clear()
        _trusted.update(before)


def take(names: Iterable[str]) -> None:
    """Trust what another rank's `choose` has returned."""
    _trusted.update(names)


def choose(trials: Sequence[Trial], wish: Kernels, store: Path, say: Callable[[str], None]) -> frozenset[str]:
    """Try variants, trust those that are right and pay, say it in a line, and return their names.

    Of what is right, "auto" wishes what is faster, "fused" all; "torch" tries nothing. Verdicts are kept in the file
    kernels.json of `store`; a trial that brought the program down counts as wrong when the next finds its mark there.
    """
    names = {trial.name for trial in trials}
    _trusted.difference_update(names)
    if wish == "torch":
        return frozenset()
    path, machine, taken, passed = store / "kernels.json", machine_key(), [], []
    with ExitStack() as alone:  # of programs that start together, the others wait for the verdicts of one
        with suppress(OSError):
            alone.enter_context(locked(path.with_name(".kernels.lock")))
        _compile_ahead([trial for trial in trials if not _kept(path).get(trial.key(machine))], path, machine)
        verdicts = [_verdict(trial, path, trial.key(machine)) for trial in trials]
    for trial, (problem, speed) in zip(trials, verdicts, strict=True):
        if problem:
            say(f"kernels: {trial.name} is not used because it failed: {problem}")
        elif wish == "fused" or speed * _FASTER > 1:
            taken.append(f"{trial.name} ({speed:.2f} times as fast)")
            _trusted.add(trial.name)
        else:
            passed.append(f"{trial.name} ({speed:.2f})")
    for title, found in (("used", taken), ("not used (plain torch is as fast)", passed)):
        if found:
            say(f"kernels {title}: {', '.join(found)}")
    return frozenset(_trusted & names)


def machine_key() -> str:
    """Return what a verdict depends on besides its trial: device, driver, torch, triton, and the kernels' source."""
    device, driver = "cpu", 0
    if torch.cuda.is_available():
        device, driver = torch.cuda.get_device_name(), getattr(torch._C, "_cuda_getDriverVersion", int)()
    triton = "".join(each.version for each in distributions(name="triton"))
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    source = hashlib.sha256(sources).hexdigest()[:12]
    return f"{device}, driver {driver}, torch {torch.__version__}, triton {triton}, kernels {source}"


def _compile_ahead(trials: Sequence[Trial], path: Path, machine: str) -> None:
    """Compile at once what trials will launch; not again where the program ended meanwhile."""
    key = f"{machine}: compiled ahead"
    if not trials or _kept(path).get(key):
        return
    with _marked(path, key), _compiling():
        for trial in trials:
            with suppress(Exception):  # what is wrong, the trial finds
                (trial.launched or trial.fused)()
            trial.forget()


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile our kernels that this thread launches inside, all of them at once in threads, instead of launching them.

    Those that were compiled before are launched. Results are whatever lay in memory, perhaps NaN, so all that is
    computed inside must be undone. An error of the compiler comes when the kernel is launched outside.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:  # nothing is compiled then
        yield
        return
    launch = JITFunction.run

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:  # noqa: ANN401
        ours = kernel.module.startswith(_OURS) and active_mode.get() is not None  # torch has such kernels, too
        made = launch(kernel, *given, grid=grid, warmup=warmup or ours, **named)
        if ours and not (warmup or isinstance(made, FutureKernel)):
            return launch(kernel, *given, grid=grid, warmup=False, **named)
        return made

    here = torch.autograd.set_multithreading_enabled(False)  # the mode holds in this thread, so backward runs in it too
    JITFunction.run = run
    try:
        with here, ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = launch
        active_mode.set(None)  # the mode itself does not where Ctrl-C ends it


def _verdict(trial: Trial, path: Path, key: str) -> tuple[str, float]:
    """Return why a variant is not right, "" where it is, and the twin's seconds over its own; as kept, or found now."""
    match _kept(path).get(key):
        case [str(problem), float(speed)]:
            return problem, speed
    with _marked(path, key):
        try:
            problem = difference(trial.fused(), trial.work(), trial.tolerance)
            found = problem, 0.0 if problem else _seconds(trial.work) / max(_seconds(trial.fused), 1e-9)
        except Exception as error:  # whatever it is, the twin is there; a lack of memory or of a compiler may pass
            return " ".join(f"{type(error).__name__} {error}".split())[:200], 0.0
        finally:
            trial.forget()
    _keep(path, key, found)
    return found


@contextmanager
def _marked(path: Path, key: str) -> Iterator[None]:
    """Keep a verdict that stands where the program dies in the block, and not where an exception ends it."""
    _keep(path, key, ("the program ended during its trial", 0.0))
    try:
        yield
    finally:
        synchronise()  # raises for good behind an illegal access, which ends the program soon: the mark stays
        _keep(path, key, None)


def _seconds(work: Work) -> float:
    return statistics.median(repeated(work, _ROUNDS))


def _kept(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):  # a damaged file is made again
        return read_object(path)
    return {}


def _keep(path: Path, key: str, verdict: tuple[str, float] | None) -> None:
    with suppress(OSError, ValueError):  # a store that cannot be written costs the next start its trials
        write_json(path, {**_kept(path), key: verdict}, flush=False)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """Return in a few words how tensors differ by more than the tolerance (see `Trial`); nothing where they do not."""
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"tensor {number} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        this, that = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (one, other))
        off, bound = (float(each.abs().max()) if each.numel() else 0.0 for each in (this - that, tolerance * that))
        if not off <= bound:  # also where it is no number
            return f"tensor {number} is off by {off:.2g}, bound {bound:.2g}"
    return ""


def record(body: Callable[[], object]) -> Callable[[], object]:
    """Capture what `body` launches as a CUDA graph, and return what launches that as a whole.

    It runs a few times before, on a stream of its own, as torch asks: libraries choose and allocate then. Other threads
    may load cases meanwhile: only this thread's calls can break the capture.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.stream(torch.cuda.current_stream())  # a capture that breaks leaves its own stream current
    with here, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # torch's is of one device
        body()
    return graph.replay
