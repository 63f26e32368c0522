"""Train a segmentation network on CT (or any dataset in MSD layout): from raw volumes to ONNX and TensorRT."""

from medspeed.apps.spleen.config import SpleenConfig, parse

if __name__ == "__main__":
    CONFIG = parse()  # before torch is loaded, so that --help and a mistyped flag answer at once

from dataclasses import replace

from torch.backends import cpu

from medspeed.apps.spleen import guide
from medspeed.common.data.preparation import Preparation
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import VolumeModel
from medspeed.common.run import Run, one_line_errors
from medspeed.common.training.evaluate import RunSummary, evaluate, export_best, finish
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.resolve import Defaults, choose_volumes, keep_plan, volume_model
from medspeed.common.training.setup import start_run
from medspeed.common.training.sources import Data, read_volumes, volume_setup
from medspeed.models import find_network

# On a GPU the guide's batches, and (by default) Novograd, the only optimizer whose steps CUDA graphs can capture here.
# On a CPU small batches, Muon, which needs the fewest steps, and no flips: half a minute is too short to learn them.
DEFAULTS = {
    "cuda": Defaults(
        {"channels_last": True, "crops.per_case": 4, "crops.flips": "xyz"},
        crop=(96, 96, 96), window=(160, 160, 160), window_batch=4, batch_size=16, steps=480,
    ),
    "cpu": Defaults(
        {"crops.per_case": 1, "crops.flips": "", "optimizer": "muon"},
        crop=(48, 48, 32), window=(160, 160, 160), window_batch=1, batch_size=4, steps=96, crops_per_scan=12,
    ),
}  # fmt: skip
# MONAI tutorials, acceleration/fast_training_tutorial, by name and labels of MSD's Task09.
KNOWN = {"Spleen: spleen": Preparation(spacing=(1.5, 1.5, 2.0), normalisation="window", window=(-57.0, 164.0))}


def main(config: SpleenConfig) -> RunSummary | None:
    """Run everything on all processes that torchrun started; only the leader exports and returns the summary."""
    with start_run(config) as run:
        data = read_data(config, run)  # dataset.json, split, fingerprint
        config, model = resolve(config, data, run)  # every open field decided, said, and kept as plan.json
        fitted = fit(setup(config, data, model, run), config, run)
        quality = evaluate(model, fitted, data, config, run)  # on the grid of the files
        if not run.ranks.leader:
            return None
        exported = export_best(model, fitted, data, config, run)  # ONNX, the gate, TensorRT
        return finish(config, data.about(), fitted, quality, exported, run)  # summary.json, the report


def read_data(config: SpleenConfig, run: Run) -> Data:
    """Read the scans, or make phantoms."""
    return read_volumes(config, run, "ct-small-2", "Task09_Spleen", KNOWN)


def resolve(config: SpleenConfig, data: Data, run: Run) -> tuple[SpleenConfig, VolumeModel]:
    """Decide what the configuration leaves open, and what it trains."""
    usual, network = DEFAULTS[run.device.type], find_network(config.network_name)

    def choose() -> SpleenConfig:
        chosen = choose_volumes(config, data, usual, network, run)
        fast = chosen.precision == "bf16" or cpu.get_cpu_capability() == "AVX512"  # slower with AVX2
        return replace(chosen, channels_last=fast) if chosen.channels_last is None else chosen

    config = keep_plan(config, choose, run)
    scheme = one_region_per_label(data.dataset.labels)
    return config, volume_model(config, data, network, scheme, usual.window_batch, run)


def setup(config: SpleenConfig, data: Data, model: VolumeModel, run: Run) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    return volume_setup(config, data, model, guide.transforms, run)


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
