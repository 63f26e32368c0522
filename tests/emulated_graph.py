"""A CUDA graph without a GPU: the operators of a step, run again on the same memory with the same numbers beside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medspeed.common.kernels import trust
from medspeed.common.kernels.trust import Trial, difference
from medspeed.common.training import steps


class Trace(TorchDispatchMode):
    """What a graph would hold: each operator that runs inside, with its arguments and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        only_a_view = func.is_view and not func._schema.is_mutable
        if not only_a_view and not func._schema.name.startswith(("prim::", "profiler::")):
            self.operators.append((func, args, kwargs or {}, out))
        return out

    def frozen(self) -> list[tuple[Any, ...]]:
        """Return what a graph repeats whatever the tensors hold: operators, numbers, shapes and strides."""
        leaves = [(func._schema.name, tree_leaves((args, kwargs))) for func, args, kwargs, _ in self.operators]
        return [
            (
                name,
                tuple(each for each in found if isinstance(each, Number | torch.dtype)),
                tuple((each.shape, each.stride()) for each in found if isinstance(each, Tensor)),
            )
            for name, found in leaves
        ]

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again; what they give lands where it landed the first time."""
        for func, args, kwargs, out in self.operators:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(body: Callable[[], object]) -> Callable[[], object]:
    """Stand for `medspeed.common.kernels.trust.record`."""
    body()
    trace = Trace()
    with trace:
        body()
    return trace.replay


def tried(trials: Sequence[Trial], *_: Any) -> list[str]:
    """Stand for `medspeed.common.kernels.trust.choose`: what is right is taken, and nothing is timed or kept."""
    return [each.name for each in trials if not difference(each.fused(), each.work(), each.tolerance)]


@contextmanager
def emulated(monkeypatch: Any) -> Iterator[Any]:
    """Let `fit` capture its steps on a CPU; yield what may patch more until then."""
    with monkeypatch.context() as patch:
        patch.setattr(steps, "why_eager", lambda *_: None)
        patch.setattr(trust, "record", record)
        patch.setattr(trust, "choose", tried)
        yield patch
