# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Novograd's second moments in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("medspeed::second_moments", mutates_args=("second",))
def second_moments(
    norms: Tensor, owner: Tensor, second: Tensor, scale: Tensor | None, skip: Tensor | None, share: float, least: float
) -> Tensor:
    """Update the moments `second`, [P] float32; return what each block of gradients is divided by, [B].

    It is given the blocks' norms [B] and parameters [B] int64; `Novograd._divisors` says what two scalars do.
    A new square has a `share` of a moment, and `least` is added to its root.
    """
    found = torch.empty_like(norms)
    given = norms, owner, second, scale, skip, found, len(norms), share, least
    moments_kernel[len(second),](*given, BLOCK=4096, num_warps=8)
    return found


second_moments.register_fake(lambda norms, *_: torch.empty_like(norms))


@triton.jit
def moments_kernel(norms, owner, second, scale, skip, divisors, count, share, least, BLOCK: tl.constexpr):
    """Program p updates the moment of parameter p, and writes what its blocks are divided by."""
    number, total = tl.program_id(0), tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        place = block + tl.arange(0, BLOCK)
        mine = tl.load(owner + place, mask=place < count, other=-1) == number
        norm = tl.load(norms + place, mask=mine, other=0.0).to(tl.float64)
        total += norm * norm
    square, before = tl.sum(total), tl.load(second + number)
    scaled = 1.0 if scale is None else tl.load(scale)
    square = (square / (scaled * scaled)).to(tl.float32)
    now = tl.where(before == 0, square, before + share * (square - before))
    if skip is not None:
        now = tl.where(tl.load(skip) == 0, now, before)
    tl.store(second + number, now)
    divisor = (tl.sqrt(now) + least) * scaled + tl.zeros((BLOCK,), tl.float32)
    for block in range(0, count, BLOCK):
        place = block + tl.arange(0, BLOCK)
        mine = tl.load(owner + place, mask=place < count, other=-1) == number
        tl.store(divisors + place, divisor, mask=mine)
