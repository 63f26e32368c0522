"""Max pooling in plain torch, and on a GPU in a kernel forward and one back, between which a byte a window is kept."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from medspeed.common.kernels.trust import Trial, trusts

NAME = "max_pool"
_SHAPE = (64, 64, 112, 112)  # of a trial


class MaxPool(nn.MaxPool2d):
    """Maxima of the 3 x 3 pixels around every second one along Y and X; fused in training, where that is trusted."""

    def __init__(self) -> None:
        super().__init__(3, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return [B, C, (Y + 1) // 2, (X + 1) // 2] for [B, C, Y, X]."""
        apply: Any = super().forward
        if self.training and trusts(NAME, image) and image.is_contiguous(memory_format=torch.channels_last):
            from medspeed.common.kernels.pooling_triton import FusedMaxPool

            apply = FusedMaxPool.apply
        maxima: Tensor = apply(image)
        return maxima

    def kernel_trial(self, dtype: torch.dtype, device: torch.device) -> Trial:
        """Return the trial on a large image in disorder, in which no two pixels of a window are equal."""

        @cache
        def given() -> Tensor:
            y, x = (torch.arange(side, device=device) % 3 for side in _SHAPE[2:])
            places = torch.arange(math.prod(_SHAPE), device=device).remainder(9973).view(_SHAPE)
            image = places.mul(12.9898).sin().mul(8).floor() * 9 + 3 * y[:, None] + x
            return image.to(dtype, memory_format=torch.channels_last).requires_grad_()

        def work() -> list[Tensor]:
            found = self(given())
            return [found.detach(), *torch.autograd.grad(found, given(), found.detach())]

        return Trial(NAME, work, 4 * torch.finfo(dtype).eps, f"{list(_SHAPE)} {dtype}", given.cache_clear)
