"""PReLU with one slope, whose backward pass on a CPU takes less than half of torch's time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class FastPReLU(nn.PReLU):
    """A `torch.nn.PReLU` with one slope; same parameter, same results.

    torch's CPU kernel for the gradients works on one element at a time; plain vectorised operators are faster.
    Elsewhere, and where no gradient is asked for (inference, export), torch's own runs.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0) + slope * min(x, 0) for any shape."""
        if input.is_cuda or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.prelu(input, self.weight)
        output: torch.Tensor = _PReLU.apply(input, self.weight.to(input.dtype))  # type: ignore[no-untyped-call]
        return output


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's context
        ctx.save_for_backward(x, slope)
        return F.prelu(x, slope)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        x, slope = ctx.saved_tensors
        (gradient,) = gradients
        above = torch.ops.aten.threshold_backward(gradient, x, 0)  # the gradient where x > 0, else 0
        below = gradient - above
        return above.addcmul_(below, slope), (below.mul_(x)).sum().reshape(1)


def use_fast_prelu(network: nn.Module) -> nn.Module:
    """Let every one-slope PReLU of a network run as `FastPReLU`; parameters and their names stay."""
    for module in network.modules():
        if type(module) is nn.PReLU and module.num_parameters == 1:
            module.__class__ = FastPReLU
    return network
