"""The operators of `norms`: each launches one kernel of `norms_triton`, and tells compilers and counters what it gives.

Images lie with their channels innermost. Sums are kept per program, and added in a fixed order by the next kernel.
"""

from typing import Any

import torch
from torch import Tensor

TILE, PROGRAMS = 4096, 512  # elements of a tile, programs of a launch; both fix the order of sums


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


def _sums(image: Tensor, groups: int, samples: int, kinds: int) -> Tensor:
    (programs, _), _, _, constants = geometry(image, groups, samples)
    return image.new_empty(samples * programs, kinds, constants["BG"] * constants["BS"], dtype=torch.float32)


@torch.library.custom_op("medspeed::norm_sums", mutates_args=())
def norm_sums(image: Tensor, groups: int, samples: int) -> Tensor:
    """Return means and squared deviations [samples x programs, 2, channels] of each program's rows."""
    from medspeed.common.kernels.norms_triton import sums_kernel

    (grid, rows, tiles, constants), sums = geometry(image, groups, samples), _sums(image, groups, samples, 2)
    sums_kernel[grid](image, sums, rows, tiles, **constants)
    return sums


norm_sums.register_fake(lambda image, groups, samples: _sums(image, groups, samples, 2))

_NORM = "Tensor weight, Tensor bias, Tensor? slope"
_SIZES = "int groups, int samples"


@torch.library.custom_op(
    "medspeed::norm_apply",
    mutates_args=("running",),
    schema=f"(Tensor image, Tensor sums, {_NORM}, Tensor? residual, Tensor? residual_bias, Tensor(a!)[] running, "
    f"Tensor? shift, {_SIZES}, float epsilon, float momentum, str kind) -> (Tensor, Tensor)",
)
def norm_apply(image: Tensor, sums: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return the result, and means and inverse deviations [samples, 2, groups]; for the arguments see `fused_norm`.

    The residual is given as `rows_of` has it.
    """
    from medspeed.common.kernels.norms_triton import apply_kernel

    bias, slope, residual, residual_bias, running, shift, groups, samples, epsilon, momentum, kind = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    y, statistics = _applied(image, sums, weight, *given)
    tensors = image, sums, weight, bias, _or(slope, weight), _or(residual, image), _or(residual_bias, weight)
    moved = *(running or (sums,) * 3), _or(shift, sums)
    sizes = rows, tiles, grid[0], tiles * constants["BLOCK"], epsilon, momentum
    optional = {"RESIDUAL": _stride(residual), "BIASED": residual_bias is not None, "SHIFT": shift is not None}
    switches = {**optional, "KIND": kind, "RUNNING": bool(running), "PARTS": _parts(constants)}
    apply_kernel[grid](*tensors, y, statistics, *moved, *sizes, **switches, **constants)
    return y, statistics


@norm_apply.register_fake
def _applied(image: Tensor, sums: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return torch.empty_like(image), sums.new_empty(given[-4], 2, given[-5])


@torch.library.custom_op(
    "medspeed::norm_gradient_sums",
    mutates_args=(),
    schema=f"(Tensor[] gradients, Tensor image, Tensor? y, Tensor statistics, {_NORM}, {_SIZES}, str kind, bool biased,"
    " bool join) -> Tensor[]",
)
def norm_gradient_sums(gradients: list[Tensor], image: Tensor, *given: Any) -> list[Tensor]:  # noqa: ANN401
    """Return sums [samples x programs, 3 or 4, channels] for the gradients of bias, weight, slope, a residual's bias.

    And, to `join` them, the sum of the gradients, at most three as `rows_of` has them, where y of a sum is above 0.
    """
    from medspeed.common.kernels.norms_triton import gradient_sums_kernel

    y, statistics, weight, bias, slope, groups, samples, kind, _, join = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    found: list[Tensor] = _gradient_sums(gradients, image, *given)
    assert len(gradients) <= 3, f"{len(gradients)} branches of one normalisation"
    first, second, third = (*gradients, None, None)[:3]
    tensors = first, _or(second, image), _or(third, image), image, _or(y, image), statistics, weight, bias
    strides = {"FIRST": _stride(first), "SECOND": _stride(second), "THIRD": _stride(third)}
    switches = {**strides, "KIND": kind, "JOIN": join, "SUMS": found[0].shape[1]}
    gradient_sums_kernel[grid](*tensors, _or(slope, weight), found[0], found[-1], rows, tiles, **switches, **constants)
    return found


@norm_gradient_sums.register_fake
def _gradient_sums(gradients: list[Tensor], image: Tensor, *given: Any) -> list[Tensor]:  # noqa: ANN401
    groups, samples, _, biased, join = given[-5:]
    return [_sums(image, groups, samples, 4 if biased else 3), *([torch.empty_like(image)] if join else [])]


@torch.library.custom_op(
    "medspeed::norm_gradient",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor image, Tensor statistics, {_NORM}, Tensor? residual_bias, Tensor sums, "
    f"Tensor? beside, {_SIZES}, str kind) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def norm_gradient(gradient: Tensor, image: Tensor, statistics: Tensor, *given: Any) -> Any:  # noqa: ANN401
    """Return the gradients of the image, that `beside` it added, of weight, bias, slope and the residual's bias."""
    from medspeed.common.kernels.norms_triton import gradient_kernel

    weight, bias, slope, _, sums, beside, groups, samples, kind = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    found = _gradients(gradient, image, statistics, *given)
    tensors = gradient, image, statistics, weight, bias, _or(slope, weight), sums, _or(beside, image), *found
    switches = {"KIND": kind, "BESIDE": beside is not None, "SUMS": sums.shape[1], "PARTS": _parts(constants)}
    gradient_kernel[grid](*tensors, rows, tiles, grid[0], **switches, **constants)
    return found


@norm_gradient.register_fake
def _gradients(gradient: Tensor, image: Tensor, statistics: Tensor, *given: Any) -> Any:  # noqa: ANN401
    weight, _, _, residual_bias, *_ = given
    like = torch.empty_like
    return like(image), like(weight), like(weight), weight.new_empty(1), like(_or(residual_bias, weight))


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor [B, C, *sides] as rows [N, C], each in one piece; a copy only where they do not lie evenly."""
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    return unread if tensor is None else tensor
