"""What an operator costs on a GPU in eager mode: the kernels it launches, the bytes they move, their FLOPs.

Counted from shapes, strides and dtypes. Of torch 2.13's CUDA kernels it knows how often the normalisations read their
input, that a convolution adds its bias and sums its gradient in passes of their own, and that cuDNN turns tensors whose
layout is not that of the others. What stays in a cache is counted as moved.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

from medspeed.benchmarks.fake_cuda.device import Layout, Operator

TABLE = Path(__file__).with_name("budget.json")

Kind = Literal["convolution", "layout", "norm", "reduce", "gather", "sample", "foreach", "pointwise", "upload", "fused"]
# Those that allocate or look at what is there, and launch nothing.
_NOTHING = {
    "_assert_async.msg", "as_strided", "detach", "empty.memory_format", "empty_like", "empty_permuted", "empty_strided",
    "lift_fresh", "new_empty", "new_empty_strided", "promote_types", "set_.source_Storage",
}  # fmt: skip
_LISTS = ("_foreach", "_fused")
_COPIES = {"clone", "_to_copy", "copy_", "contiguous"}
_REDUCTIONS = ("sum", "mean", "linalg_vector_norm", "amax", "amin", "aminmax", "count_nonzero", "argmax")
# Passes over the input of each kernel of a normalisation: statistics, then what is applied.
_NORMS: dict[str, tuple[int, ...]] = {
    "batch_norm": (1, 0, 2), "batch_norm_backward": (2, 3),
    "group_norm": (1, 0, 2), "group_norm_backward": (2, 0, 0, 3),
}  # fmt: skip
# This project's operators that launch a kernel for sums before the one that needs them: tensors that both read.
_SUMS_FIRST = {"medspeed::norm_forward": 1, "medspeed::norm_backward": 2, "medspeed::augmented": 1}


class Kernel(NamedTuple):
    """A kernel: its kind, the bytes it moves, its floating-point operations (of products alone), and of what channels.

    That is the product of a convolution's input and output channels, on which its speed depends.
    """

    kind: Kind
    bytes: int
    flops: int = 0
    channels: int = 0


def total(operators: Iterable[Operator]) -> dict[str, int]:
    """Return what the operators of a step or a validation cost together, by name."""
    known = list(operators)
    launched = [kernel for each in known for kernel in kernels(each)]
    listed = [one for one in known if one.name not in _NOTHING and not one.name.startswith(_LISTS)]
    tensors = [each for one in listed for each in (*one.inputs, *one.outputs)]
    wide = (each for each in tensors if each.dtype == "float32" and len(each.shape) >= 4)
    return {
        "kernels": len(launched),
        "bytes": sum(kernel.bytes for kernel in launched),
        "float32_bytes": _bytes(wide),  # of tensors of four axes or more, outside of lists of weights
        "layout_copies": sum(kernel.kind == "layout" for kernel in launched),  # they turn axes in memory, no more
        "uploads": sum("upload" in one.crossing for one in known),
        "waits": sum(one.crossing in ("wait", "download") for one in known),  # of the host for the device
        "flops": sum(kernel.flops for kernel in launched),  # of convolutions and matrix products
    }


def kernels(one: Operator) -> list[Kernel]:
    """Return the kernels that an operator launches."""
    if one.name in _NOTHING or one.crossing in ("wait", "download"):
        return []
    if "upload" in one.crossing:
        return [Kernel("upload", _bytes(one.outputs))]
    if one.name == "convolution":
        return _convolution(one)
    if one.name == "convolution_backward":
        return _convolution_backward(one)
    if passes := _NORMS.get(one.name.removeprefix("native_").removeprefix("cudnn_")):
        largest = max(each.size for each in (*one.inputs, *one.outputs))
        return [Kernel("norm", count * largest) for count in passes]
    read, written = (sum(each.size for each in some if each.device == "cuda") for some in (one.inputs, one.outputs))
    if one.name == "medspeed::crops":  # from images and labels of all the cases
        return [Kernel("gather", 2 * written + _bytes(one.inputs[2:]))]
    if again := _SUMS_FIRST.get(one.name):
        return [Kernel("fused", again * one.inputs[0].size), Kernel("fused", read + written)]
    if "::" in one.name:  # of this project, whose other operators launch one kernel each
        return [Kernel("fused", read + written, one.flops)]
    return [_plain(one, read, written)]


def _plain(one: Operator, read: int, written: int) -> Kernel:
    base = one.name.partition(".")[0]
    if base.startswith(_LISTS):
        return Kernel("foreach", read + written)
    if base in _COPIES:
        source, target = one.inputs[-1] if base == "copy_" else one.inputs[0], one.outputs[0]
        turned = (_last(target) and _first(source)) or (_first(target) and _last(source))
        return Kernel("layout" if turned else "pointwise", source.size + target.size)
    if base.startswith(_REDUCTIONS):
        return Kernel("reduce", read + written)
    if base.startswith("index_copy"):
        return Kernel("gather", 2 * one.inputs[-1].size)
    if base.startswith("index") or "gather" in base:
        return Kernel("gather", 2 * written + _bytes(one.inputs[1:]))
    sampled = "upsample" in base or "grid_sampler" in base or "pool" in base
    return Kernel("sample" if sampled else "pointwise", read + written, one.flops)


def _convolution(one: Operator) -> list[Kernel]:
    (image, weight, *bias), (result,) = one.inputs, one.outputs
    moved, channels = _bytes((image, weight, result)), prod(weight.shape[:2])
    found = [*_turned(result, image), Kernel("convolution", moved, one.flops, channels)]
    return [*found, Kernel("pointwise", 2 * result.size)] if bias else found


def _convolution_backward(one: Operator) -> list[Kernel]:
    gradient, image, weight = one.inputs[:3]
    found = [*_turned(image, gradient), *_turned(weight, image), *([] if _last(image) else _turned(weight, gradient))]
    moved = _bytes((gradient, image, weight))
    parts = [each for each in one.outputs if len(each.shape) >= 4]  # of the image, where it is wanted, and the weight
    found += [Kernel("convolution", moved, one.flops // len(parts), prod(weight.shape[:2]))] * len(parts)
    return [*found, Kernel("reduce", gradient.size)] if any(len(each.shape) == 1 for each in one.outputs) else found


def _turned(like: Layout, other: Layout) -> list[Kernel]:
    """Return the kernel that lays a tensor out with its channels last, as another is; none where it is so."""
    return [Kernel("layout", 2 * other.size)] if _last(like) and _first(other) else []


def _last(one: Layout) -> bool:
    """Return whether the channels, more than one, lie innermost."""
    return len(one.shape) in (4, 5) and one.shape[1] > 1 and one.strides[1] == 1


def _first(one: Layout) -> bool:
    inner = prod(one.shape[2:])
    return len(one.shape) in (4, 5) and one.shape[1] > 1 and one.strides[-1] == 1 and one.strides[1] == inner > 1


def _bytes(some: Iterable[Layout]) -> int:
    return sum(each.size for each in some)
