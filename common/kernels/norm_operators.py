"""The operators of `norms`: each launches one kernel of `norms_triton`, and tells compilers and counters what it gives.

Images lie with their channels innermost. Sums are kept per program, and added in a fixed order by the next kernel.
"""

from typing import Any

import torch
from torch import Tensor

TILE, PROGRAMS = 4096, 512  # elements of a tile, programs of a launch; both fix the order of sums


def geometry(image: Tensor, groups: int, samples: int) -> tuple[tuple[int, int], int, int, dict[str, int]]:
    """Return programs and samples of a launch, rows of a sample, tiles of a program, and the constants of a kernel."""
    channels = image.shape[1]
    rows = image.numel() // (channels * samples)
    count, size = (1 << (number - 1).bit_length() for number in (groups, channels // groups))  # powers of two
    block = max(1, TILE // (count * size))
    tiles = max(1, -(-rows * samples // (block * PROGRAMS)))
    constants = {"C": channels, "GS": channels // groups, "BG": count, "BS": size, "BLOCK": block, "num_warps": 8}
    return (-(-rows // (tiles * block)), samples), rows, tiles, constants


def _parts(constants: dict[str, int]) -> int:
    """Return how many programs' sums are added at once."""
    return max(1, 2048 // (constants["BG"] * constants["BS"]))


def _sums(image: Tensor, groups: int, samples: int, kinds: int) -> Tensor:
    (programs, _), _, _, constants = geometry(image, groups, samples)
    return image.new_empty(samples, programs, kinds, constants["BG"] * constants["BS"], dtype=torch.float32)


@torch.library.custom_op("medspeed::norm_sums", mutates_args=())
def norm_sums(image: Tensor, groups: int, samples: int) -> Tensor:
    """Return means and squared deviations [samples, programs, 2, channels] of each program's rows."""
    from medspeed.common.kernels.norms_triton import sums_kernel

    grid, rows, tiles, constants = geometry(image, groups, samples)
    sums = _sums(image, groups, samples, 2)
    sums_kernel[grid](image, sums, rows, tiles, **constants)
    return sums


norm_sums.register_fake(lambda image, groups, samples: _sums(image, groups, samples, 2))

_NORM = "Tensor weight, Tensor bias, Tensor? slope"
_SIZES = "int groups, int samples"


@torch.library.custom_op(
    "medspeed::norm_apply",
    mutates_args=("running",),
    schema=f"(Tensor image, Tensor sums, {_NORM}, Tensor? residual, Tensor(a!)[] running, Tensor? shift, {_SIZES}, "
    "float epsilon, float momentum) -> (Tensor, Tensor)",
)
def norm_apply(image: Tensor, sums: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return the result, and means and inverse deviations [samples, 2, groups]; for the arguments see `fused_norm`."""
    from medspeed.common.kernels.norms_triton import apply_kernel

    bias, slope, residual, running, shift, groups, samples, epsilon, momentum = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    y, statistics = _applied(image, sums, weight, *given)
    optional = {"SLOPE": slope is not None, "RESIDUAL": residual is not None, "SHIFT": shift is not None}
    tensors = image, sums, weight, bias, _or(slope, weight), _or(residual, image), y, statistics
    moved = *(running or (sums,) * 3), _or(shift, sums)
    sizes = rows, tiles, sums.shape[1], tiles * constants["BLOCK"], epsilon, momentum
    switches = {**optional, "RUNNING": bool(running), "PARTS": _parts(constants)}
    apply_kernel[grid](*tensors, *moved, *sizes, **switches, **constants)
    return y, statistics


@norm_apply.register_fake
def _applied(image: Tensor, sums: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return torch.empty_like(image), sums.new_empty(given[-3], 2, given[-4])


@torch.library.custom_op(
    "medspeed::norm_gradient_sums",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor image, Tensor statistics, {_NORM}, {_SIZES}) -> Tensor",
)
def norm_gradient_sums(gradient: Tensor, image: Tensor, *given: Any) -> Tensor:  # noqa: ANN401
    """Return sums [samples, programs, 3, channels] for the gradients of bias, weight and slope."""
    from medspeed.common.kernels.norms_triton import gradient_sums_kernel

    statistics, weight, bias, slope, groups, samples = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    sums = _sums(image, groups, samples, 3)
    tensors = gradient, image, statistics, weight, bias, _or(slope, weight), sums
    gradient_sums_kernel[grid](*tensors, rows, tiles, SLOPE=slope is not None, **constants)
    return sums


norm_gradient_sums.register_fake(lambda gradient, image, *given: _sums(image, given[-2], given[-1], 3))


@torch.library.custom_op(
    "medspeed::norm_gradient",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor image, Tensor statistics, {_NORM}, Tensor sums, Tensor? beside, {_SIZES}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def norm_gradient(gradient: Tensor, image: Tensor, statistics: Tensor, *given: Any) -> Any:  # noqa: ANN401
    """Return the gradients of the image, that `beside` it added, of weight, bias and slope."""
    from medspeed.common.kernels.norms_triton import gradient_kernel

    weight, bias, slope, sums, beside, groups, samples = given
    grid, rows, tiles, constants = geometry(image, groups, samples)
    found = _gradients(gradient, image, statistics, weight)
    tensors = gradient, image, statistics, weight, bias, _or(slope, weight), sums, _or(beside, image), *found
    switches = {"SLOPE": slope is not None, "BESIDE": beside is not None, "PARTS": _parts(constants)}
    gradient_kernel[grid](*tensors, rows, tiles, grid[0], **switches, **constants)
    return found


@norm_gradient.register_fake
def _gradients(gradient: Tensor, image: Tensor, statistics: Tensor, weight: Tensor, *_: Any) -> Any:  # noqa: ANN401
    return torch.empty_like(image), torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(1)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return what a kernel is given for a tensor that it will not look at, where there is none."""
    return other if tensor is None else tensor
