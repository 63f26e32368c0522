"""Faults, each of which one of the guards must find: what they change is put back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from medspeed.common.kernels.norms import BatchNormPReLU
from medspeed.common.training.fit import Setup

Plant = Callable[[Setup], AbstractContextManager[object]]


@contextmanager
def _loss(setup: Setup, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Add to the loss what `change` makes of logits and loss."""
    own = setup.loss_function

    def changed(logits: Tensor, label: Tensor) -> Tensor:
        return change(logits, own(logits, label))

    object.__setattr__(setup, "loss_function", changed)
    try:
        yield
    finally:
        object.__setattr__(setup, "loss_function", own)


def _in_loss(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    return lambda setup: _loss(setup, change)


def _at_convolutions(hook: Callable[..., Any]) -> Plant:
    """Change what the convolutions give."""

    @contextmanager
    def plant(setup: Setup) -> Iterator[None]:
        with ExitStack() as stack:
            for module in setup.network.modules():
                if isinstance(module, nn.Conv3d):
                    stack.callback(module.register_forward_hook(hook).remove)
            yield

    return plant


@contextmanager
def _image_in_other_strides(setup: Setup) -> Iterator[None]:
    """Hand every second image over with its last two axes swapped in memory."""
    numbers = count()

    def turned(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (image,) = inputs
        return (image.mT.contiguous().mT,) if next(numbers) % 2 else (image,)

    handle = setup.network.register_forward_pre_hook(turned)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _float32(setup: Setup, kinds: tuple[type[nn.Module], ...]) -> Iterator[None]:
    """Take some modules out of autocast."""
    with ExitStack() as stack:
        for module in setup.network.modules():
            if isinstance(module, kinds):

                def forward(image: Tensor, *others: Any, own: Callable[..., Tensor] = module.forward) -> Tensor:
                    with torch.autocast("cuda", enabled=False):
                        return own(image.float(), *others)

                stack.enter_context(patch.object(module, "forward", forward))
        yield


def _unpinned(setup: Setup) -> AbstractContextManager[object]:
    return patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor)


def _many(loss: Tensor, launches: int) -> Tensor:
    for _ in range(launches):
        loss = loss + 0.0
    return loss


def _counted(change: Callable[[Tensor, Tensor, int], Tensor]) -> Plant:
    """Change the loss by a number that is another one in each step: 2, 3, 4."""
    numbers = count(2)
    return _in_loss(lambda logits, loss: change(logits, loss, next(numbers)))


def _waits(read: Callable[[Tensor], object]) -> Plant:
    def change(logits: Tensor, loss: Tensor) -> Tensor:
        read(loss)
        return loss

    return _in_loss(change)


@contextmanager
def _rate_of_the_host(setup: Setup) -> Iterator[None]:
    """Give the optimizer its learning rates as numbers."""
    numbers, step = count(1), setup.optimizer.step

    def stepped() -> None:
        setup.optimizer.param_groups[0]["lr"] = 0.1 / next(numbers)
        step()

    with patch.object(setup.optimizer, "step", stepped):
        yield


PLANTS: dict[str, tuple[str, str, Plant]] = {  # name: the guard that finds it, a word of what it says, the fault
    "a tensor of the CPU in the loss": ("raised", "same device", _in_loss(lambda _, loss: loss * torch.ones(1))),
    "a mask as an index": ("raised", "nonzero", _in_loss(lambda logits, loss: loss + logits[logits > 0].sum())),
    "a scalar of the CPU in the loss": ("bus", "host scalar", _in_loss(lambda _, loss: loss * torch.tensor(2.0))),
    "item() in the step": ("bus", "wait", _waits(Tensor.item)),
    "a tensor in an if": ("bus", "wait", _waits(bool)),
    "cpu() in the step": ("bus", "download", _waits(lambda loss: loss.detach().cpu())),
    "a table made in the step": (
        "bus", "pageable upload", _in_loss(lambda _, loss: loss * torch.tensor([1.0, 1.0], device=loss.device).sum()),
    ),
    "tables from pageable memory": ("bus", "pageable upload", _unpinned),
    "normalisation in float32": ("precision", "norm", lambda setup: _float32(setup, (BatchNormPReLU,))),
    "convolutions in float32": ("precision", "convolution", lambda setup: _float32(setup, (type(setup.network),))),
    "contiguous copies": ("layouts", "clone", _at_convolutions(lambda _, __, output: output.contiguous())),
    "more passes": ("costs", "bytes", _at_convolutions(lambda _, __, output: output.clone().clone().clone())),
    "small launches": ("costs", "kernels", _in_loss(lambda _, loss: _many(loss, 60))),
    "one more table": (
        "costs", "uploads", _in_loss(lambda _, loss: loss + torch.zeros(()).pin_memory().to("cuda", non_blocking=True)),
    ),
    "launches that grow": ("steady", "operators", _counted(lambda _, loss, number: _many(loss, number))),
    "strides that change": ("steady", "then", _image_in_other_strides),
    "shapes that change": ("steady", "then", _counted(lambda logits, loss, n: loss + logits[..., :n].sum())),
    "a number that changes": ("capturable", "mul", _counted(lambda _, loss, number: loss * (1 / number))),
    "a learning rate of the host's": ("capturable", "_fused_sgd_", _rate_of_the_host),
}  # fmt: skip
