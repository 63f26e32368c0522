"""A run's folder from weights that were trained elsewhere, so that inference and export take them."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import nn

from common.files import sha256_of
from common.inference.model_file import write_model
from common.training.checkpoints import initialise, save_weights


class Buildable(Protocol):
    """The content of a `model.json`."""

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network."""
        ...


def import_weights(
    run: Path, app: str, model: Buildable, weights: Path, rename: Callable[[str], str] = lambda name: name
) -> None:
    """Make the folder of a run that has weights and model alone.

    Args:
        run: folder to be made; it must be empty or not exist.
        app: whose run it is.
        model: what the weights belong to; every name and shape must fit.
        weights: a .safetensors, or a .pt / .pth state dict such as a MONAI bundle's, read without executing anything.
        rename: from the weights' names to the network's.

    Raises:
        FileExistsError: the folder holds something.
        FileNotFoundError: there are no such weights.
        ValueError: the weights are damaged or do not fit; nothing is left behind.
    """
    if run.exists() and any(run.iterdir()):
        raise FileExistsError(f"{run}: holds files; --init makes a new run, so name a folder that does not exist")
    network = model.build()
    initialise(network, weights, rename)
    save_weights(run / "best.safetensors", network.state_dict(), {"imported_sha256": sha256_of(weights)})
    write_model(run, app, model)
