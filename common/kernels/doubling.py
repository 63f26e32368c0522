"""Trilinear upsampling by two with a shortcut added: in plain torch, or by the kernels of `doubling_triton`."""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from medspeed.common.kernels.trust import Trial, trusts

DOUBLING = "trilinear_doubling"
_SIDES = (48, 48, 48)  # of a trial's image
_doubled = partial(F.interpolate, scale_factor=(2.0, 2.0, 2.0), mode="trilinear", align_corners=False)


class HalfDoubling(torch.autograd.Function):
    """Trilinear upsampling in half precision whose gradient is summed in float32."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Return [B, C, 2 X, 2 Y, 2 Z] for [B, C, X, Y, Z]."""
        ctx.shape = image.shape
        with torch.autocast(image.device.type, enabled=False):
            return _doubled(image)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Return the gradient of the image, in its dtype."""
        wide, sides = gradient.float(), gradient.shape[2:]
        summed = torch.ops.aten.upsample_trilinear3d_backward(wide, sides, ctx.shape, False, 2.0, 2.0, 2.0)
        return summed.to(gradient.dtype)  # type: ignore[no-any-return]


class Doubling(nn.Module):
    """Trilinear upsampling by two, and a shortcut added; a trial takes so many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, image: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Return what has the shape and dtype of the shortcut [B, C, 2 X, 2 Y, 2 Z], for an image [B, C, X, Y, Z]."""
        last = shortcut.is_contiguous(memory_format=torch.channels_last_3d)
        twice = shortcut.shape == (*image.shape[:2], *(2 * side for side in image.shape[2:]))
        if trusts(DOUBLING, image) and image.dtype == shortcut.dtype and last and twice:
            from medspeed.common.kernels.doubling_triton import Doubled

            return Doubled.apply(image, shortcut)  # type: ignore[no-any-return, no-untyped-call]
        half = image.is_cuda and image.dtype != torch.float32  # in which autocast would not double
        x = HalfDoubling.apply(image) if half else _doubled(image)  # type: ignore[no-untyped-call]
        return x.to(shortcut.dtype) + shortcut

    def kernel_trial(self, dtype: torch.dtype, device: torch.device) -> Trial:
        """Return the trial on an image and a shortcut of a dtype."""

        @cache
        def given() -> list[torch.Tensor]:
            generator = torch.Generator(device).manual_seed(0)
            shapes = ((2, self.channels, *(scale * side for side in _SIDES)) for scale in (1, 2, 2))
            drawn = (torch.rand(shape, generator=generator, device=device) for shape in shapes)
            return [each.to(dtype, memory_format=torch.channels_last_3d) for each in drawn]

        def work() -> list[torch.Tensor]:
            *inputs, gradient = given()
            found = self(*(each.requires_grad_() for each in inputs))
            return [found.detach(), *torch.autograd.grad(found, inputs, gradient)]

        about, tolerance = f"{self.channels} x {_SIDES} {dtype}", max(1e-5, 2 * torch.finfo(dtype).eps)
        return Trial(DOUBLING, work, tolerance, about, given.cache_clear)
