"""Novograd's second moments: in plain torch ten operators on small tensors, on a GPU one kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medspeed.common.kernels.trust import Trial, trusts

FUSED = "second_moments"
"""The name that `trusts` knows the kernel by."""
DECAY, EPSILON = 0.98, 1e-8  # the defaults of MONAI's Novograd


def divisors(
    norms: Tensor, blocks: Sequence[int], owner: Tensor, second: Tensor, scale: Tensor | None, skip: Tensor | None
) -> Tensor:
    """Update the second moments; return what each block's gradient is divided by, [B].

    Args:
        norms: [B] of the blocks' gradients, one parameter's blocks after the other's.
        blocks: how many each of the P parameters takes.
        owner: [B] int64: the parameter a block belongs to.
        second: [P] float32: the moment of each parameter, 0 before its first step.
        scale: of the gradients, a scalar.
        skip: a scalar that is not 0 where the step does not count.
    """
    if trusts(FUSED, norms):
        from medspeed.common.kernels.moments_triton import second_moments

        fused: Tensor = second_moments(norms, owner, second, scale, skip)
        return fused
    # Over the blocks in float64: in float32, as the CPU sums it, the norm of millions would be off by up to 1e-3.
    whole = torch.stack(torch._foreach_norm(norms.split_with_sizes(list(blocks)), 2, torch.float64))
    squares = torch.square(whole if scale is None else whole / scale, out=torch.empty_like(second))
    averaged = torch.lerp(second, squares, 1 - DECAY)
    if skip is not None:
        squares, averaged = (torch.where(skip == 0, each, second) for each in (squares, averaged))
    torch.where(second == 0, squares, averaged, out=second)
    divisor = second.sqrt() + EPSILON
    return (divisor if scale is None else divisor * scale).index_select(0, owner)


def trial(device: torch.device) -> Trial:
    """Return a trial with parameters of few and of many blocks, over a first and a second step."""

    def work() -> list[Tensor]:
        blocks, second = (1, 3, 2500), torch.zeros(3, device=device)
        norms = torch.arange(sum(blocks), device=device).sin().abs()
        owner = torch.arange(3, device=device).repeat_interleave(torch.tensor(blocks, device=device))
        return [*(divisors(part * norms, blocks, owner, second, None, None) for part in (1, 2)), second]

    return Trial(FUSED, work, 1e-5)
