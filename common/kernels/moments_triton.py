# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The second moments of `medspeed.common.kernels.moments` in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from medspeed.common.kernels.moments import DECAY, EPSILON


@torch.library.custom_op("medspeed::second_moments", mutates_args=("second",))
def second_moments(norms: Tensor, owner: Tensor, second: Tensor, scale: Tensor | None, skip: Tensor | None) -> Tensor:
    """Do what `divisors` does."""
    found = torch.empty_like(norms)
    given = norms if scale is None else scale, norms if skip is None else skip, found, len(norms), 1 - DECAY, EPSILON
    switches = {"SCALE": scale is not None, "SKIP": skip is not None, "BLOCK": 4096, "num_warps": 8}
    moments_kernel[len(second),](norms, owner, second, *given, **switches)
    return found


second_moments.register_fake(lambda norms, *_: torch.empty_like(norms))


@triton.jit
def moments_kernel(
    norms, owner, second, scale, skip, divisors, count, share, epsilon,
    SCALE: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p updates the moment of parameter p, and writes what its blocks are divided by."""
    number, total = tl.program_id(0), tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        place = block + tl.arange(0, BLOCK)
        mine = tl.load(owner + place, mask=place < count, other=-1) == number
        norm = tl.load(norms + place, mask=mine, other=0.0).to(tl.float64)
        total += norm * norm
    square, before, scaled = tl.sum(total), tl.load(second + number), 1.0
    if SCALE:
        scaled = tl.load(scale)
        square /= scaled.to(tl.float64) * scaled
    square = square.to(tl.float32)
    now = tl.where(before == 0, square, before + share * (square - before))
    if SKIP:
        now = tl.where(tl.load(skip) == 0, now, before)
    tl.store(second + number, now)
    divisor = (tl.sqrt(now) + epsilon) * scaled + tl.zeros((BLOCK,), tl.float32)
    for block in range(0, count, BLOCK):
        place = block + tl.arange(0, BLOCK)
        mine = tl.load(owner + place, mask=place < count, other=-1) == number
        tl.store(divisors + place, divisor, mask=mine)
