"""Which fused variants are used: each is compared with its plain twin, and timed, on the device that will run it.

A variant (a kernel, a memory layout, a captured graph) is described by a `Trial`; `choose` tries it once per machine
and keeps the verdict; `trusts` then says, wherever the variant could stand in for its twin, whether it does. On a CPU,
and before `choose` has run, nothing is trusted, so that the twin in plain torch runs.
"""

import hashlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from medspeed.common.clock import repeated
from medspeed.common.files import read_object, write_json

Kernels = Literal["auto", "torch", "fused"]
Work = Callable[[], Sequence[Tensor]]
_ROUNDS = 5
_FASTER = 0.97  # of the twin's seconds: what is less is noise
_trusted: set[str] = set()


@dataclass(frozen=True)
class Trial:
    """A variant and its twin, each with inputs of its own making that stand for the run's.

    Args:
        name: of the variant, as `trusts` asks for it.
        fused: returns what the variant computes: outputs, then gradients where there are any.
        twin: returns the same from plain torch, in the same order, shapes and dtypes.
        tolerance: of each tensor: the largest difference over the twin's largest absolute value.
        about: what the verdict holds for besides the machine: shapes, precision.
    """

    name: str
    fused: Work
    twin: Work
    tolerance: float
    about: str = ""


class Verdict(NamedTuple):
    """What a trial showed.

    Args:
        problem: why the variant is not right, in a few words; empty where it is.
        speed: the twin's seconds over the variant's; 0 where it is not right.
    """

    problem: str
    speed: float = 0.0


def trusts(name: str, tensor: Tensor) -> bool:
    """Return whether a variant may take a tensor: it lies on a CUDA device, and the variant was chosen."""
    return tensor.is_cuda and name in _trusted


@contextmanager
def trusting(*names: str) -> Iterator[None]:
    """Trust variants untried inside; for tests, and for counting what they launch on tensors without values."""
    before = set(_trusted)
    _trusted.update(names)
    try:
        yield
    finally:
        _trusted.clear()
        _trusted.update(before)


def choose(
    trials: Sequence[Trial],
    wish: Kernels,
    store: Path,
    say: Callable[[str], None],
    seconds: Callable[[Callable[[], object]], float] | None = None,
) -> frozenset[str]:
    """Try variants, trust those that are right and pay, say it in a line, and return their names.

    Verdicts are kept in `store`/kernels.json per device, driver, versions of torch and triton, and source of the
    kernels. A trial that brought the program down counts as wrong when the next program finds its mark there.

    Args:
        trials: none on a CPU, whose path is the twin's.
        wish: auto takes what is right and faster, fused what is right, torch nothing (and tries nothing).
        store: the cache folder of the user.
        say: gets a line for what is used, one for what is not, and one for each variant that failed.
        seconds: times a piece of work; None takes the median of some rounds by the clock.
    """
    names = {trial.name for trial in trials}
    _trusted.difference_update(names)
    if wish == "torch":
        return frozenset()
    path, machine = store / "kernels.json", machine_key()
    taken, passed = [], []
    for trial in trials:
        verdict = _kept(path, machine, trial)
        if verdict is None:
            _keep(path, machine, trial, Verdict("the program ended during its trial"))
            verdict = _try(trial, seconds or _median)
            _keep(path, machine, trial, verdict)
        if verdict.problem:
            say(f"kernels: {trial.name} is not used because it failed: {verdict.problem}")
        elif wish == "fused" or verdict.speed * _FASTER > 1:
            taken.append(f"{trial.name} ({verdict.speed:.2f} times as fast)")
            _trusted.add(trial.name)
        else:
            passed.append(f"{trial.name} ({verdict.speed:.2f})")
    for title, found in (("used", taken), ("not used (plain torch is as fast)", passed)):
        if found:
            say(f"kernels {title}: {', '.join(found)}")
    return frozenset(_trusted & names)


def take(names: Iterable[str]) -> None:
    """Trust what another rank's `choose` has returned."""
    _trusted.update(names)


def machine_key() -> str:
    """Return what a verdict depends on besides its trial: device, driver, torch, triton, and the kernels' source."""
    device, driver = "cpu", 0
    if torch.cuda.is_available():
        device, driver = torch.cuda.get_device_name(), getattr(torch._C, "_cuda_getDriverVersion", int)()
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    source = hashlib.sha256(sources).hexdigest()[:12]
    return f"{device}, driver {driver}, torch {torch.__version__}, triton {triton}, kernels {source}"


def _try(trial: Trial, seconds: Callable[[Callable[[], object]], float]) -> Verdict:
    try:
        problem = difference(trial.fused(), trial.twin(), trial.tolerance)
        if problem:
            return Verdict(problem)
        return Verdict("", seconds(trial.twin) / max(seconds(trial.fused), 1e-9))
    except Exception as error:  # whatever it is, the twin is there
        return Verdict(" ".join(f"{type(error).__name__} {error}".split())[:200])


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """Return in a few words how tensors differ by more than the tolerance (see `Trial`); nothing where they do not."""
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"tensor {number} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        off = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
        bound = tolerance * float(other.double().abs().max()) if one.numel() else 0.0
        if not off <= bound:  # also where it is no number
            return f"tensor {number} is off by {off:.2g}, bound {bound:.2g}"
    return ""


def _median(work: Callable[[], object]) -> float:
    return statistics.median(repeated(work, _ROUNDS))


def _kept(path: Path, machine: str, trial: Trial) -> Verdict | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file is made again
        problem, speed = read_object(path)[machine][f"{trial.name} {trial.about}"]
        return Verdict(str(problem), float(speed))
    return None


def _keep(path: Path, machine: str, trial: Trial, verdict: Verdict) -> None:
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = read_object(path)
    before = content.get(machine)
    content[machine] = {**(before if isinstance(before, dict) else {}), f"{trial.name} {trial.about}": verdict}
    with suppress(OSError, ValueError):  # a store that cannot be written costs the next start its trials
        write_json(path, content, flush=False)
