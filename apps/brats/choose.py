"""What the brats app takes where the user says nothing."""

import math
from dataclasses import replace

import torch

from medspeed.apps.brats.config import BratsConfig
from medspeed.common.kernels import norms, trust
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.networks import Build
from medspeed.common.training.resolve import Data, Defaults, choose_volumes
from medspeed.common.training.setup import dtype_of

# The guide's crop on a GPU, and its 388 cases for 80 epochs, when it has reached its target; small ones on
# a CPU (trained in less than a minute on two cores). The two halves of a brain are alike.
DEFAULTS = {
    "cuda": Defaults(
        {"crops.per_case": 1, "crops.flips": "xyz"},
        crop=(224, 224, 144), window=(160, 160, 160), window_batch=2, batch_size=1, steps=31_040, validations=5,
    ),
    "cpu": Defaults(
        {"crops.per_case": 4, "crops.flips": "x", "optimizer": "muon"},
        crop=(32, 32, 32), window=(96, 64, 64), window_batch=1, batch_size=4, steps=112, validations=5,
    ),
}  # fmt: skip


def choose(config: BratsConfig, data: Data, network: Build, run: Run) -> BratsConfig:
    """Decide every field that the configuration leaves open."""
    usual, limit = DEFAULTS[run.device.type], DEFAULTS[run.device.type].window
    if not config.ours:
        usual = replace(usual, batch_size=1)  # the guide's, on each rank

    def window(shape: list[int], extent: list[int]) -> list[int]:
        overlap = config.windows.overlap
        return [window_side(side, most, overlap) for side, most in zip(extent, limit, strict=True)]

    chosen = choose_volumes(config, data, usual, network, run, window)
    if chosen.channels_last is not None:
        return chosen
    trusted: frozenset[str] = frozenset()
    if run.device.type == "cuda":
        norm = norms.GroupNormReLU(8, decided(chosen.network.filters))
        trials = norms.trials(norm, dtype_of(chosen.precision), run.device)
        trusted = trust.choose(trials, config.kernels, config.store, run.say)
    inner = faster_channels_last(chosen.precision, run.device, norms.GROUP in trusted)
    return replace(chosen, channels_last=inner)


def window_side(extent: int, limit: int, overlap: float) -> int:
    """Return the side of the fewest equal windows, none above the limit, that cover an extent with their overlap."""
    count = 1
    while (side := extent / (count - (count - 1) * overlap)) > limit:
        count += 1
    return math.ceil(side)


def faster_channels_last(precision: str, device: torch.device, fused: bool = False) -> bool:
    """Return whether a SegResNet is to be trained with its channels innermost.

    On a CPU it is faster so, except in bf16: there the gradient of torch's group normalisation takes ten times as long
    (172 ms against 16 ms for [2, 16, 64, 64, 64], torch 2.13 on an EPYC with AVX-512 BF16). On a GPU torch's group
    normalisation gives contiguous memory back, so that all that follows is turned: only with the `fused` one.
    """
    return fused if device.type == "cuda" else precision != "bf16"
