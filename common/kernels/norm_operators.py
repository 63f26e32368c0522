"""The operators of `norms`, a forward and a backward one: each launches two kernels of `norms_triton`.

Images lie with their channels innermost. Sums are kept per program, and added in a fixed order by the second kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medspeed.common.kernels import norms_triton as kernels

TILE, PROGRAMS = 4096, 264  # elements of a tile, programs of a launch; both fix the order of sums
WIDE, WARPS, STAGES = 128, 8, 3  # of more channels there are fewer programs, as each reads the sums of all


class FusedNorm(torch.autograd.Function):
    """See `medspeed.common.kernels.norms.fused_norm`."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return the result and the image."""
        weight, bias, slope, residual, residual_bias, (*sizes, epsilon, kind, running, shift, momentum) = given
        added = None if residual is None else rows_of(residual)
        tensors = image, weight, bias, slope, added, residual_bias, running, shift
        y, statistics = norm_forward(*tensors, *sizes, epsilon, momentum, kind)
        ctx.save_for_backward(image, y if kind == "sum_relu" else None, statistics, weight, bias, slope, residual_bias)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.residual = (*sizes, kind), None if residual is None else residual.dtype
        return y, image

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, beside: Tensor | None) -> Any:  # noqa: ANN401
        """Return the gradients; those of further uses of the result (see `norms.fork`) are `ctx.more`."""
        gradients = [rows_of(each) for each in (gradient, *getattr(ctx, "more", ()))]
        ctx.more = ()
        image, y, *given = ctx.saved_tensors
        join = y is not None or len(gradients) > 1 or not gradients[0].is_contiguous()
        beside = None if beside is None else rows_of(beside).contiguous()
        found = norm_backward(gradients, image, y, beside, *given, *ctx.sizes, join)
        dx, dweight, dbias, dslope, *others = found
        gradient = others.pop(0) if join else gradient
        dresidual, (*_, slope, _) = None if ctx.residual is None else gradient.to(ctx.residual), given
        return dx, dweight, dbias, None if slope is None else dslope, dresidual, *(others or [None]), None


def geometry(image: Tensor, groups: int, samples: int) -> tuple[tuple[int, int], int, int, dict[str, int]]:
    """Return programs and samples of a launch, rows of a sample, tiles of a program, and a kernel's constants."""
    channels = image.shape[1]
    rows = image.numel() // (channels * samples)
    count, size = (1 << (number - 1).bit_length() for number in (groups, channels // groups))  # powers of two
    block = max(1, TILE // (count * size))
    programs = max(1, PROGRAMS * WIDE // max(WIDE, count * size))
    tiles = max(1, -(-rows * samples // (block * programs)))
    constants = {"C": channels, "GS": channels // groups, "BG": count, "BS": size, "BLOCK": block, "num_warps": WARPS}
    stages = STAGES if image.element_size() < 4 else 2  # more of float32 does not fit into 99 KiB
    constants |= {"ROW": rows_of(image).stride(0), "STAGES": stages}
    return (-(-rows // (tiles * block)), samples), rows, tiles, constants


def _sums(kinds: int, image: Tensor, grid: tuple[int, int], constants: dict[str, int]) -> tuple[Tensor, int]:
    """Return room for the sums [samples x programs, kinds, channels], and how many programs' are added at once."""
    wide = constants["BG"] * constants["BS"]
    return image.new_empty(grid[0] * grid[1], kinds, wide, dtype=torch.float32), max(1, TILE // wide)


@torch.library.custom_op("medspeed::norm_forward", mutates_args=("running",))
def norm_forward(
    image: Tensor, weight: Tensor, bias: Tensor, slope: Tensor | None, residual: Tensor | None,
    residual_bias: Tensor | None, running: Sequence[Tensor], shift: Tensor | None,
    groups: int, samples: int, epsilon: float, momentum: float, kind: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and means and inverse deviations [samples, 2, groups]; for the arguments see `fused_norm`.

    The residual is given as `rows_of` has it.
    """
    assert residual_bias is None or kind == "prelu", f"a residual's bias behind {kind} has no gradient"
    grid, rows, tiles, constants = geometry(image, groups, samples)
    sums, parts = _sums(2, image, grid, constants)
    kernels.sums_kernel[grid](image, sums, rows, tiles, **constants)
    y, statistics = _forward_like(image, groups, samples, epsilon, momentum, kind)
    tensors = image, sums, weight, bias, slope, residual, residual_bias, y, statistics
    moved = *(running or (None, None, None)), shift
    sizes = rows, tiles, grid[0], tiles * constants["BLOCK"], epsilon, momentum
    switches = {"KIND": kind, "RESIDUAL": _stride(residual), "PARTS": parts}
    kernels.apply_kernel[grid](*tensors, *moved, *sizes, **switches, **constants)
    return y, statistics


@norm_forward.register_fake
def _forward_like(image: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    groups, samples, *_ = given[-5:]
    return torch.empty_like(image), image.new_empty(samples, 2, groups, dtype=torch.float32)


@torch.library.custom_op("medspeed::norm_backward", mutates_args=())
def norm_backward(
    gradients: Sequence[Tensor], image: Tensor, y: Tensor | None, beside: Tensor | None, statistics: Tensor,
    weight: Tensor, bias: Tensor, slope: Tensor | None, residual_bias: Tensor | None,
    groups: int, samples: int, kind: str, join: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the image, `beside` added, of weight, bias and slope, and of a residual and its bias.

    Those given are at most three, as `rows_of` has them; to `join` is to return their sum, where y of a sum is above 0.
    """
    assert len(gradients) <= 3, f"{len(gradients)} branches of one normalisation"
    grid, rows, tiles, constants = geometry(image, groups, samples)
    sums, parts = _sums(4, image, grid, constants)
    learned = weight, bias, slope, residual_bias
    found: list[Tensor] = _backward_like(gradients, image, *learned, groups, samples, kind, join)
    dx, dweight, dbias, dslope, *others = found
    joined, dresidual_bias = others[0] if join else None, None if residual_bias is None else others[-1]
    three = [*gradients, None, None][:3]
    strides = dict(zip(("FIRST", "SECOND", "THIRD"), map(_stride, three), strict=True))
    known = statistics, weight, bias, slope, sums
    kernels.gradient_sums_kernel[grid](*three, image, y, *known, joined, rows, tiles, **strides, KIND=kind, **constants)
    laid, made = gradients[0] if joined is None else joined, (dx, dweight, dbias, dslope, dresidual_bias)
    sizes = rows, tiles, grid[0]
    kernels.gradient_kernel[grid](laid, image, *known, beside, *made, *sizes, KIND=kind, PARTS=parts, **constants)
    return found


@norm_backward.register_fake
def _backward_like(gradients: Sequence[Tensor], image: Tensor, *given: Any) -> list[Tensor]:  # noqa: ANN401
    weight, _, _, residual_bias, *_, join = given[-8:]
    others = [*([image] if join else []), *([] if residual_bias is None else [residual_bias])]
    return [torch.empty_like(each) for each in (image, weight, weight, weight[:1], *others)]


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor [B, C, *sides] as rows [N, C], each in one piece; a copy only where they do not lie evenly."""
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    return rows if rows.stride(1) == 1 and rows.stride(0) else rows.contiguous()  # a stride of 0 says: no tensor


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)
