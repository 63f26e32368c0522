"""A CUDA device without memory or numbers: what runs on it is written down, operator by operator.

Tensors on the CPU stay real, so that data are read, prepared and drawn from as ever. Those on cuda:0 have shape,
strides and dtype alone. What the host reads from the device are zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from numbers import Number
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ITEM, _EQUAL, _COPY = (getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "equal", "copy_"))
_NOT_OPERATORS = ("prim::", "profiler::")


class Layout(NamedTuple):
    """A tensor: its shape, strides, dtype ("bfloat16") and device ("cuda" or "cpu")."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    @property
    def size(self) -> int:
        """Bytes that are touched of it: those of an axis that is expanded once."""
        touched = prod(side for side, stride in zip(self.shape, self.strides, strict=True) if stride)
        return touched * int(getattr(torch, self.dtype).itemsize)


class Operator(NamedTuple):
    """An operator that ran with tensors of the device, and what of it crossed the bus or made the host wait.

    That is "upload" (from pinned memory, nothing waits), "pageable upload", "host scalar" (a number from a tensor of
    the CPU), "download" (the host waits), "wait", or "".
    """

    name: str  # in ATen with its overload, "add_.Tensor"; another library's with its namespace
    stage: str  # in which it ran
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    scalars: tuple[Any, ...]  # numbers among its arguments, which a captured graph would keep
    crossing: str
    flops: int  # of convolutions and matrix products


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which cuda:0 is there; it keeps what ran as `operators`, each under the present `stage`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.stage = ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operator: for real where all of it lies on the CPU."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        inputs = [each for each in leaves if isinstance(each, Tensor)]
        to = next((each.type for each in leaves if isinstance(each, torch.device)), None)
        if to != "cuda" and not any(isinstance(each, FakeTensor) for each in inputs):
            pinned = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            return made.pin_memory() if pinned else made
        known = tuple(map(_layout, inputs))  # before an operator that changes them
        crossing = _crossing(func, inputs, to, bool(kwargs.get("non_blocking")))
        result = self._run(func, args, kwargs, crossing)
        if not func._schema.name.startswith(_NOT_OPERATORS) and not (func.is_view and not func._schema.is_mutable):
            outputs = tuple(_layout(each) for each in tree_leaves(result) if isinstance(each, Tensor))
            scalars = tuple(each for each in leaves if isinstance(each, Number))
            count = flop_registry.get(func._overloadpacket)
            flops = int(count(*args, **kwargs, out_val=result)) if count else 0
            name = f"{func._schema.name}.{func._overloadname}".removeprefix("aten::").removesuffix(".default")
            self.operators.append(Operator(name, self.stage, known, outputs, scalars, crossing, flops))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, crossing: str) -> Any:  # noqa: ANN401
        if crossing == "wait":
            return args[0].dtype == torch.bool or func is _EQUAL or torch.zeros((), dtype=args[0].dtype).item()
        if func._schema.name == "aten::_fused_sgd_":  # for which torch has no fake; it gives nothing
            return None
        if crossing != "download":
            with self._fake:
                return func(*args, **kwargs)
        if func is _COPY:
            return args[0].zero_()
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


def _crossing(func: Any, inputs: list[Tensor], to: str | None, non_blocking: bool) -> str:  # noqa: ANN401
    """Return what an operator moves between host and device (see `Operator`)."""
    if func in (_ITEM, _EQUAL):
        return "wait"
    hosts = [each for each in inputs if each.device.type == "cpu"]
    target = inputs[0] if func is _COPY else None
    if to == "cpu" or (target is not None and target.device.type == "cpu"):
        return "download"
    if not hosts:
        return ""
    if target is None and to is None:
        return "host scalar"
    return "upload" if non_blocking and all(map(_is_pinned, hosts)) else "pageable upload"


def _layout(tensor: Tensor) -> Layout:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.device.type)


def _pin(tensor: Tensor, *_: Any) -> Tensor:  # noqa: ANN401
    tensor._medspeed_pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor, *_: Any) -> bool:  # noqa: ANN401
    return any(hasattr(each, "_medspeed_pinned") for each in (tensor, tensor._base))


def _take_over(tensor: Tensor, changed: Tensor) -> None:  # torch's own way refuses what a fake mode has looked at
    tensor.data = changed.data


_STAND_INS: dict[str, Any] = {
    "is_available": lambda: True,
    "_lazy_init": lambda: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "get_device_name": lambda device=None: "fake H200",
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (141 * 10**9,) * 2,  # bytes of an H200
    "Event": lambda **_: SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 1.0),  # no time passes
}


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Have the device for as long as the block runs; `shim.load` must have come before torch."""
    device = patch.multiple(torch.cuda, **_STAND_INS)
    pins = patch.multiple(Tensor, pin_memory=_pin, is_pinned=_is_pinned)
    swaps = patch.multiple(torch.utils, swap_tensors=_take_over)
    lists = patch.multiple(FakeTensor, tolist=lambda tensor: tensor.cpu().tolist())
    begins = patch.multiple(FakeTensorMode, avoid_device_init=property(lambda self: True))
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with device, pins, swaps, lists, begins, FakeCuda() as mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
