"""What inference must know of a trained patch classifier, how a run decides it, and how the network is built."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from medspeed.apps.pathology.config import DEFAULTS, JITTER, PathologyConfig
from medspeed.common.inference import Precision
from medspeed.common.inference.model import initialise, load_weights
from medspeed.common.inference.runs import read_model
from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.training.config import decided
from medspeed.common.training.setup import choose_precision
from medspeed.models.resnet18_fcn import STRIDE, resnet18_fcn

HALO = 224
"""Pixels around a tile whose logits are discarded: half the receptive field (218), rounded up to the stride."""
_VALIDATIONS = 8
_TILE_BATCH = {"cuda": 4, "cpu": 1}


@dataclass(frozen=True)
class PathologyModel:
    """The content of `model.json`."""

    patch_size: int  # side of the patches that the network was trained on, in pixels
    mpp: float | None  # um per pixel of those patches; None where the data did not say
    tile_size: int  # side of the tiles of a dense scan in pixels, halo included; `tile_batch` are in one call
    tile_batch: int
    precision: Precision  # of the training steps

    def __post_init__(self) -> None:
        if self.patch_size < STRIDE or self.patch_size % STRIDE:
            raise ValueError(f"patch_size {self.patch_size}: must be a multiple of {STRIDE}, above 0")
        if self.mpp is not None and not 0.05 <= self.mpp <= 100:
            raise ValueError(f"mpp {self.mpp}: must be between 0.05 and 100 um")
        if self.core <= 0 or self.tile_size % STRIDE:
            least, why = self.tile_size - self.core, f"logits of the outer {HALO} pixels on each side are discarded"
            bound = f"a multiple of {STRIDE}, above {least} for patches of {self.patch_size} pixels"
            raise ValueError(f"tile_size {self.tile_size}: must be {bound}; {why}")

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, with the weights of a safetensors file where one is given."""
        network = resnet18_fcn(self.patch_size)
        if weights is not None:
            initialise(network, weights)
        return network

    @property
    def core(self) -> int:
        """Side, in pixels, of the square of patch corners whose logits one tile gives exactly; a multiple of 32."""
        return self.tile_size - 2 * HALO - self.patch_size + STRIDE


def load_model(run: Path) -> PathologyModel:
    """Read `model.json` of a run; see `read_model` for what it raises."""
    return read_model(run, PathologyConfig.APP, PathologyModel)


def normalised(patches: torch.Tensor) -> torch.Tensor:
    """Return images [N, 3, Y, X] uint8 as float32 in [-1, 1], as the guide scales them."""
    return patches.float().div_(127.5).sub_(1.0)


def choose(config: PathologyConfig, count: int, device: torch.device, ranks: int = 1) -> PathologyConfig:
    """Return a configuration with every field decided, of `count` patches of decided size; what the user gave wins.

    A ValueError says that what was asked for does not fit the data or the device.
    """
    usual, margin = DEFAULTS[device.type], 2 * HALO + decided(config.patch_size) - STRIDE  # around a tile's core
    tile_size = config.tile_size or usual["core"] + margin
    PathologyModel(decided(config.patch_size), config.mpp, tile_size, 1, "fp32")  # checks them
    partitions = config.parallel.partitions or ranks
    smallest = partitions * config.parallel.accumulate
    batch_size = config.batch_size or max(1, min(usual["batch_size"], count) // smallest) * smallest
    usually = usual.get("epoch") if (config.source, config.epochs) == ("resident", None) else None
    per_epoch = min(count, max(config.patches_per_epoch or usually or count, batch_size))
    epochs, validate_every = config.plan_epochs(usual["steps"], max(1, per_epoch // batch_size), _VALIDATIONS)
    config = replace(config, patches_per_epoch=per_epoch if config.source == "resident" else None)
    config = replace(config, optimizer=config.optimizer or ("muon" if device.type == "cpu" else None))
    jitter = config.augmentation.jitter or (JITTER if device.type == "cuda" else (0.0, 0.0, 0.0, 0.0))
    config = replace(config.optimized(), tile_size=tile_size, parallel=replace(config.parallel, partitions=partitions))
    config = replace(config, augmentation=replace(config.augmentation, jitter=jitter))
    precision = choose_precision(config.precision, device, config.recipe)
    return replace(config, batch_size=batch_size, epochs=epochs, validate_every=validate_every, precision=precision)


def model_of(config: PathologyConfig, device: torch.device) -> PathologyModel:
    """Return what a decided configuration trains."""
    assert config.precision != "auto", "the configuration is not decided"
    sizes = decided(config.patch_size), config.mpp, decided(config.tile_size)
    return PathologyModel(*sizes, _TILE_BATCH[device.type], config.precision)


def initialise_from(network: nn.Module, path: Path) -> str:
    """Load weights into a `resnet18_fcn`, in place, and say in a line which.

    They are a .safetensors of ours, which must fit whole, or a .pth of TorchVision's ResNet-18, whose last layer has no
    place here; a ValueError says that they are others.
    """
    if path.suffix == ".safetensors":
        initialise(network, path)
        return f"weights: all from {path}"
    features = network.get_submodule("features")
    given = {name: value for name, value in load_weights(path).items() if not name.startswith("fc.")}
    try:
        features.load_state_dict(given)  # a plain dict may lack the counters of batches, as old files do
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: not the weights of TorchVision's ResNet-18 ({problem})") from error
    return f"weights: features from {path}, head initialized randomly"


def binary_cross_entropy(
    logits: torch.Tensor, label: torch.Tensor, smoothing: float = 0.0, ranks: Ranks = SINGLE
) -> torch.Tensor:
    """Return the ranks' mean binary cross-entropy of logits [B, 1, 1, 1] and smoothed labels [B] float, 0 or 1."""
    targets = label * (1 - 2 * smoothing) + smoothing
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float().flatten(), targets)
    return loss if ranks.world == 1 else ranks.sum(loss / ranks.world)  # no kernel that divides by one
