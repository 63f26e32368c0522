"""What tests of several modules share: watching the operators that a piece of code launches."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from medspeed.common.data.preparation import Preparation
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import NOTE
from medspeed.common.inference.predict import predict_logits
from medspeed.common.inference.predictors import Predictor
from medspeed.common.inference.runs import RunModel
from medspeed.common.training.state import load_checkpoint
from medspeed.models.unet3d import unet3d

# Operators whose result reaches Python, or whose output size depends on values: on a GPU the host waits for them.
SYNCHRONISING = {
    "aten::_local_scalar_dense",  # item(), float(), bool(), tolist(), a tensor in an `if` or as a slice bound
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
}


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last checkpoint."""
    found = load_checkpoint(run / "checkpoints")
    assert found is not None, run
    return found[0]


def unet_model(
    spacing: tuple[float, float, float],
    channels: tuple[int, ...],
    window_size: tuple[int, int, int],
    labels: tuple[str, ...] = ("background", "spleen"),
    window_batch: int = 1,
    residual_units: int = 1,
) -> RunModel:
    """Return the model of a U-Net for CT, as the spleen app has it."""
    preparation = Preparation(spacing, "window", (-57.0, 164.0))
    arguments = {"channels": channels, "residual_units": residual_units}
    labelling = one_region_per_label(labels)
    return RunModel(unet3d, arguments, labelling, preparation, window_size, window_batch, 0.25, "fp32")


def note_of(weights: Path) -> dict[str, Any]:
    """Return the metadata that `save_weights` wrote with the weights."""
    with safe_open(weights, framework="pt") as stream:
        found: dict[str, Any] = json.loads(stream.metadata()[NOTE])
    return found


def sliding_windows(
    image: torch.Tensor,
    predictor: Predictor,
    roi: tuple[int, int, int],
    overlap: float = 0.25,
    batch_size: int = 4,
    difference: bool = True,
) -> torch.Tensor:
    """Return `predict_logits` of a model that has such windows, with exclusive labels if the `difference` is wanted."""
    model = unet_model((1.0, 1.0, 1.0), (4, 8), roi, window_batch=batch_size)
    labelling = replace(model.labelling, exclusive=difference)
    return predict_logits(image, predictor, replace(model, overlap=overlap, labelling=labelling))


class _Watch(TorchDispatchMode):
    def __init__(self, refused: frozenset[str]) -> None:
        super().__init__()
        self.refused = refused
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        self.launched[name] += 1
        if name in self.refused or (self.refused and _gathers_by_mask(name, args)):
            raise AssertionError(f"{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


def _gathers_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether this is x[mask] (or x[mask] = several values), which calls nonzero within the operator."""
    if name not in {"aten::index", "aten::index_put", "aten::index_put_"}:
        return False
    has_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return has_mask and (name == "aten::index" or args[2].ndim > 0)


@contextmanager
def refuse_host_sync() -> Iterator[None]:
    """Raise AssertionError when an operator runs that would make the host wait for a GPU; works without one.

    Copies to the CPU are not seen: on a machine without a GPU they are no operator of their own.
    """
    with _Watch(frozenset(SYNCHRONISING)):
        yield


@contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Yield a counter of the ATen operators that run inside, by name; a foreach operator counts once."""
    watch = _Watch(frozenset())
    with watch:
        yield watch.launched
