"""The guides as plain MONAI scripts that import nothing of ours, and the training step that all of them do."""

from collections.abc import Callable

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and labels
Step = Callable[[torch.Tensor, torch.Tensor], float]  # of images and labels; returns the loss


def make_step(network: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, amp_dtype: torch.dtype | None) -> Step:
    """Return what does a step as the guides do, with their read of the loss."""
    scaler = torch.amp.GradScaler(enabled=amp_dtype == torch.float16)

    def step(image: torch.Tensor, label: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast(image.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            value = loss(network(image), label)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return float(value.item())

    return step
