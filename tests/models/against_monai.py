"""Our networks beside MONAI's: the same weights of the same seed, the same outputs and gradients."""

from collections.abc import Callable

import torch
from torch import nn

Build = Callable[[], nn.Module]


def both(ours: Build, theirs: Build) -> tuple[nn.Module, nn.Module]:
    """Return two networks of one seed; their names, shapes and weights must be equal, and in one order."""
    torch.manual_seed(5)
    mine, drawn = ours(), torch.get_rng_state()
    torch.manual_seed(5)
    other = theirs()
    assert torch.equal(drawn, torch.get_rng_state())  # as many numbers were drawn
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in other.named_parameters()]
    state, expected = mine.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
    return mine, other


def train_both(mine: nn.Module, other: nn.Module, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a training step of each, whose gradients are left in the parameters."""
    logits = []
    for network in (mine.train(), other.train()):
        torch.manual_seed(6)  # of dropout
        logits.append(network(image).flatten(1))
        logits[-1].square().sum().backward()
    return logits[0], logits[1]


def check_to_the_bit(mine: nn.Module, other: nn.Module, image: torch.Tensor, layout: torch.memory_format) -> None:
    """Check that logits and gradients of a training step are equal, and the logits of an evaluation after it."""
    image = image.contiguous(memory_format=layout)
    for network in (mine, other):
        network.to(memory_format=layout)  # type: ignore[call-overload]
    assert torch.equal(*train_both(mine, other, image))
    for (name, value), expected in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value.grad, expected.grad), name  # type: ignore[arg-type]
    assert torch.equal(mine.eval()(image), other.eval()(image))
