"""Train a segmentation network on multi-channel MRI: from raw volumes to a verified TensorRT engine."""

from medspeed.apps.brats.config import BratsConfig, parse

if __name__ == "__main__":
    CONFIG = parse()  # before torch is loaded, so that --help and a mistyped flag answer at once

import math
from dataclasses import replace

import torch

from medspeed.apps.brats import guide
from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.inference.model import VolumeModel
from medspeed.common.kernels import norms, trust
from medspeed.common.run import Run, one_line_errors
from medspeed.common.training.config import decided
from medspeed.common.training.evaluate import RunSummary, evaluate, export_best, finish
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.resolve import Build, Defaults, choose_volumes, keep_plan, volume_model
from medspeed.common.training.setup import dtype_of, start_run
from medspeed.common.training.sources import Data, read_volumes, volume_setup
from medspeed.models import find_network

# The guide's crop on a GPU, and its 388 cases for 80 epochs, when it has reached its target; small ones on
# a CPU (trained in less than a minute on two cores). The two halves of a brain are alike.
DEFAULTS = {
    "cuda": Defaults(
        {"crops.per_case": 1, "crops.flips": "xyz"},
        crop=(224, 224, 144), window=(160, 160, 160), window_batch=2, batch_size=1, steps=31_040, validations=5,
    ),
    "cpu": Defaults(
        {"crops.per_case": 1, "crops.flips": "x", "optimizer": "muon"},
        crop=(32, 32, 32), window=(96, 64, 64), window_batch=1, batch_size=4, steps=112, validations=5,
    ),
}  # fmt: skip


def main(config: BratsConfig) -> RunSummary | None:
    """Go the whole way, with the processes that torchrun started; the leader alone exports and returns the summary."""
    with start_run(config) as run:
        data = read_data(config, run)  # dataset.json, split, fingerprint
        config, model = resolve(config, data, run)  # every open field decided, said, and kept as plan.json
        fitted = fit(setup(config, data, model, run), config, run)
        quality = evaluate(model, fitted, data, config, run)  # on the grid of the files
        if not run.ranks.leader:
            return None
        exported = export_best(model, fitted, data, config, run)  # ONNX, the gate, TensorRT
        return finish(config, data.about(), fitted, quality, exported, run)  # summary.json, the report


def read_data(config: BratsConfig, run: Run) -> Data:
    """Read the scans, or make phantoms."""
    return read_volumes(config, run, "mri-small-2", "Task01_BrainTumour")


def resolve(config: BratsConfig, data: Data, run: Run) -> tuple[BratsConfig, VolumeModel]:
    """Decide what the configuration leaves open, and what it trains."""
    labelling = choose_labelling(data.dataset, config.regions)
    parts = ", ".join(f"{each.name} = labels {'+'.join(map(str, each.members))}" for each in labelling.regions)
    run.say(f"regions: {parts}")
    network = find_network(config.network_name)
    config = keep_plan(config, lambda: choose(config, data, network, run), run)
    as_guide = config.recipe != "fast" and run.device.type == "cuda"
    window_batch = 4 if as_guide else DEFAULTS[run.device.type].window_batch
    return config, volume_model(config, data, network, labelling, window_batch, run)


def choose(config: BratsConfig, data: Data, network: Build, run: Run) -> BratsConfig:
    """Decide every field that the configuration leaves open."""
    usual = DEFAULTS[run.device.type]
    if not config.ours:
        usual = replace(usual, batch_size=1)  # the guide's, on each rank

    def window(shape: list[int], extent: list[int]) -> list[int]:
        pairs = zip(extent, usual.window, strict=True)
        return [window_side(side, most, config.windows.overlap) for side, most in pairs]

    chosen = choose_volumes(config, data, usual, network, run, window)
    # With few filters a step in bf16 takes 0.8 times as long as in fp32 with AMX, 1.3 times without (on an EPYC).
    few = (chosen.network.filters or 16) < 16 and not torch.cpu._is_amx_tile_supported()
    if config.precision == "auto" and run.device.type == "cpu" and few:
        chosen = replace(chosen, precision="fp32")
    if chosen.channels_last is not None:
        return chosen
    # On a CPU channels innermost are faster but in bf16, where the gradient of torch's group normalisation takes ten
    # times as long (172 ms, not 16, for [2, 16, 64, 64, 64]; torch 2.13 on an EPYC with AVX-512 BF16). On a GPU torch's
    # gives contiguous memory back, so that all that follows is turned: only with the fused one.
    if run.device.type == "cpu":
        return replace(chosen, channels_last=chosen.precision != "bf16")
    norm = norms.GroupNormReLU(8, decided(chosen.network.filters))
    trial = norm.kernel_trial(dtype_of(chosen.precision), run.device)
    return replace(chosen, channels_last=bool(trust.choose([trial], config.kernels, config.store, run.say)))


def window_side(extent: int, limit: int, overlap: float) -> int:
    """Return the side of the fewest equal windows, none above the limit, that cover an extent with their overlap."""
    count = 1
    while (side := extent / (count - (count - 1) * overlap)) > limit:
        count += 1
    return math.ceil(side)


def setup(config: BratsConfig, data: Data, model: VolumeModel, run: Run) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    return volume_setup(config, data, model, guide.transforms, run)


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
