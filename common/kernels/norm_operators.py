"""The operators of `norms`: each launches one kernel of `norms_triton`; and what they compute together.

Images lie with their channels innermost. Sums are kept per program, and added in a fixed order by the next kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medspeed.common.kernels import norms_triton as kernels

TILE, PROGRAMS = 4096, 512  # elements of a tile, programs of a launch; both fix the order of sums


class FusedNorm(torch.autograd.Function):
    """See `medspeed.common.kernels.norms.fused_norm`."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return the result and the image."""
        weight, bias, slope, residual, residual_bias, (*sizes, epsilon, kind, running, shift, momentum) = given
        added = None if residual is None else rows_of(residual)
        tensors = image, norm_sums(image, *sizes), weight, bias, slope, added, residual_bias, running, shift
        y, statistics = norm_apply(*tensors, *sizes, epsilon, momentum, kind)
        ctx.save_for_backward(image, statistics, weight, bias, slope, residual_bias, y if kind == "sum_relu" else None)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.residual = (*sizes, kind), None if residual is None else residual.dtype
        return y, image

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, beside: Tensor | None) -> Any:  # noqa: ANN401
        """Return the gradients; those of further uses of the result (see `norms.fork`) are `ctx.more`."""
        image, *given, residual_bias, y = ctx.saved_tensors
        gradients = [rows_of(each) for each in (gradient, *getattr(ctx, "more", ()))]
        ctx.more = ()
        joined = y is not None or len(gradients) > 1 or not gradients[0].is_contiguous()
        sums, *found = norm_gradient_sums(gradients, image, y, *given, *ctx.sizes, joined)
        gradient = found[0] if joined else gradient
        laid = gradient if joined else gradients[0]
        beside = None if beside is None else rows_of(beside).contiguous()
        dx, dweight, dbias, dslope, *dresidual_bias = norm_gradient(
            laid, image, *given, residual_bias, sums, beside, *ctx.sizes
        )
        dresidual = None if ctx.residual is None else gradient.to(ctx.residual)
        return dx, dweight, dbias, None if given[-1] is None else dslope, dresidual, *(dresidual_bias or [None]), None


def geometry(image: Tensor, groups: int, samples: int) -> tuple[tuple[int, int], int, int, dict[str, int]]:
    """Return programs and samples of a launch, rows of a sample, tiles of a program, and a kernel's constants."""
    channels = image.shape[1]
    rows = image.numel() // (channels * samples)
    count, size = (1 << (number - 1).bit_length() for number in (groups, channels // groups))  # powers of two
    block = max(1, TILE // (count * size))
    tiles = max(1, -(-rows * samples // (block * PROGRAMS)))
    constants = {"C": channels, "GS": channels // groups, "BG": count, "BS": size, "BLOCK": block, "num_warps": 8}
    constants["ROW"] = rows_of(image).stride(0)
    return (-(-rows // (tiles * block)), samples), rows, tiles, constants


def _parts(constants: dict[str, int]) -> int:
    """Return how many programs' sums are added at once."""
    return max(1, 2048 // (constants["BG"] * constants["BS"]))


def _sums_like(image: Tensor, groups: int, samples: int, kinds: int = 2) -> Tensor:
    (programs, _), _, _, constants = geometry(image, groups, samples)
    return image.new_empty(samples * programs, kinds, constants["BG"] * constants["BS"], dtype=torch.float32)


@torch.library.custom_op("medspeed::norm_sums", mutates_args=())
def norm_sums(image: Tensor, groups: int, samples: int) -> Tensor:
    """Return means and squared deviations [samples x programs, 2, channels] of each program's rows."""
    (grid, rows, tiles, constants), sums = geometry(image, groups, samples), _sums_like(image, groups, samples)
    kernels.sums_kernel[grid](image, sums, rows, tiles, **constants)
    return sums


norm_sums.register_fake(_sums_like)


@torch.library.custom_op("medspeed::norm_apply", mutates_args=("running",))
def norm_apply(
    image: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, slope: Tensor | None, residual: Tensor | None,
    residual_bias: Tensor | None, running: Sequence[Tensor], shift: Tensor | None,
    groups: int, samples: int, epsilon: float, momentum: float, kind: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and means and inverse deviations [samples, 2, groups]; for the arguments see `fused_norm`.

    The residual is given as `rows_of` has it.
    """
    grid, rows, tiles, constants = geometry(image, groups, samples)
    y, statistics = _apply_like(image, sums, groups, samples, epsilon, momentum, kind)
    tensors = image, sums, weight, bias, slope, residual, residual_bias, y, statistics
    moved = *(running or (None, None, None)), shift
    sizes = rows, tiles, grid[0], tiles * constants["BLOCK"], epsilon, momentum
    switches = {"KIND": kind, "RESIDUAL": _stride(residual), "PARTS": _parts(constants)}
    kernels.apply_kernel[grid](*tensors, *moved, *sizes, **switches, **constants)
    return y, statistics


@norm_apply.register_fake
def _apply_like(image: Tensor, sums: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    groups, samples, *_ = given[-5:]
    return torch.empty_like(image), sums.new_empty(samples, 2, groups)


@torch.library.custom_op("medspeed::norm_gradient_sums", mutates_args=())
def norm_gradient_sums(
    gradients: Sequence[Tensor], image: Tensor, y: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor,
    slope: Tensor | None, groups: int, samples: int, kind: str, join: bool,
) -> list[Tensor]:  # fmt: skip
    """Return sums [samples x programs, 4, channels] for the gradients of bias, weight, slope, a residual's bias.

    And, to `join` them, the sum of the gradients, at most three as `rows_of` has them, where y of a sum is above 0.
    """
    assert len(gradients) <= 3, f"{len(gradients)} branches of one normalisation"
    grid, rows, tiles, constants = geometry(image, groups, samples)
    found: list[Tensor] = _gradient_sums_like(gradients, image, groups, samples, kind, join)
    three = [*gradients, None, None][:3]
    strides = dict(zip(("FIRST", "SECOND", "THIRD"), map(_stride, three), strict=True))
    tensors = *three, image, y, statistics, weight, bias, slope, *(*found, None)[:2]
    kernels.gradient_sums_kernel[grid](*tensors, rows, tiles, **strides, KIND=kind, **constants)
    return found


@norm_gradient_sums.register_fake
def _gradient_sums_like(gradients: Sequence[Tensor], image: Tensor, *given: Any) -> list[Tensor]:  # noqa: ANN401
    groups, samples, _, join = given[-4:]
    return [_sums_like(image, groups, samples, 4), *([torch.empty_like(image)] if join else [])]


@torch.library.custom_op("medspeed::norm_gradient", mutates_args=())
def norm_gradient(
    gradient: Tensor, image: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, slope: Tensor | None,
    residual_bias: Tensor | None, sums: Tensor, beside: Tensor | None, groups: int, samples: int, kind: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the image, `beside` added; of weight, bias, slope and, where there is one, that bias."""
    grid, rows, tiles, constants = geometry(image, groups, samples)
    found: list[Tensor] = _gradient_like(gradient, image, statistics, weight, bias, slope, residual_bias)
    tensors = gradient, image, statistics, weight, bias, slope, sums, beside, *(*found, None)[:5]
    kernels.gradient_kernel[grid](*tensors, rows, tiles, grid[0], KIND=kind, PARTS=_parts(constants), **constants)
    return found


@norm_gradient.register_fake
def _gradient_like(gradient: Tensor, image: Tensor, *given: Any) -> list[Tensor]:  # noqa: ANN401
    _, weight, _, _, residual_bias, *_ = given
    learned = [weight, weight, weight[:1], *([] if residual_bias is None else [residual_bias])]
    return [torch.empty_like(each) for each in (image, *learned)]


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor [B, C, *sides] as rows [N, C], each in one piece; a copy only where they do not lie evenly."""
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)
