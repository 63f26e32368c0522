"""torch.compile, paid for before the clock of training starts."""

import torch
from torch import nn

from common.inference.predictors import Precision
from common.training.precision import autocast


def compile_network(network: nn.Module, image: torch.Tensor, precision: Precision) -> None:
    """Compile a network in place for training batches of one shape, forward and backward; its state is left as it is.

    Args:
        network: in training mode on the image's device.
        image: [B, C, X, Y, Z] float32, of the shape of every batch.
        precision: of the training steps.
    """
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.compile(dynamic=False)
    with autocast(precision, image.device):
        output = network(image)
    torch.autograd.backward(output.float().sum())
    network.zero_grad(set_to_none=True)
    network.load_state_dict(before)
