"""Spans: named ranges around stages, so that a timeline shows what the code calls things."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, cast

import torch
from torch.profiler import record_function

Mode = Literal["nothing", "nvtx", "profiler"]


def span(name: str) -> AbstractContextManager[None]:
    """Return a context that is one named range of the present mode; by default nothing, at 0.2 microseconds.

    Spans nest, also in themselves, and each thread has its own; `spans_to` says what becomes of them.
    """
    return _NOTHING if _make is None else _make(name)


@contextmanager
def spans_to(mode: Mode) -> Iterator[None]:
    """Set what the spans of all threads become within a block; afterwards they are again what they were.

    Blocks nest; blocks of several threads at once would set each other's mode.

    Args:
        mode: "nothing"; "nvtx", ranges that NVIDIA's tools show (Nsight Systems); or "profiler", ranges of
            torch.profiler.

    Raises:
        ValueError: this torch has no NVTX.
    """
    global _make
    made = _MAKERS[mode]
    if mode == "nvtx":
        _check_nvtx()
    before, _make = _make, made
    try:
        yield
    finally:
        _make = before


def _check_nvtx() -> None:
    try:
        with _nvtx_range("check"):
            pass
    except RuntimeError as error:  # here rather than in the middle of a step
        raise ValueError(
            f"spans nvtx: torch {torch.__version__} is built without NVTX; use the profiler, or a torch built for CUDA"
        ) from error


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    # Not nvtx.range, which takes braces in a name as a format.
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _profiler_range(name: str) -> AbstractContextManager[None]:
    return cast(AbstractContextManager[None], record_function(name))


_Make = Callable[[str], AbstractContextManager[None]]

_NOTHING = nullcontext()  # keeps nothing, so one serves all spans of all threads
_MAKERS: dict[Mode, _Make | None] = {"nothing": None, "nvtx": _nvtx_range, "profiler": _profiler_range}
_make: _Make | None = None  # of the present mode
