"""Train a segmentation network on multi-channel MRI: from raw volumes to a verified TensorRT engine."""

from medspeed.apps.brats.config import BratsConfig, parse

if __name__ == "__main__":
    CONFIG = parse()  # before torch is loaded, so that --help and a mistyped flag answer at once

from medspeed.apps.brats.choose import DEFAULTS, choose
from medspeed.apps.brats.regions import choose_labelling
from medspeed.common.inference.model import VolumeModel
from medspeed.common.run import Run, one_line_errors
from medspeed.common.training.evaluate import RunSummary, evaluate, export_best, finish
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.resolve import Data, keep_plan, read_volumes, volume_model
from medspeed.common.training.setup import start_run
from medspeed.common.training.sources import volume_setup
from medspeed.models import find_network


def main(config: BratsConfig) -> RunSummary | None:
    """Go the whole way, with the processes that torchrun started; the leader alone exports and returns the summary."""
    with start_run(config) as run:
        data = read_data(config, run)  # dataset.json, split, fingerprint
        config, model = resolve(config, data, run)  # every open field decided, said, and kept as plan.json
        fitted = fit(setup(config, data, model, run), config, run)
        quality = evaluate(model, fitted, data, config, run)  # on the grid of the files
        if not run.leader:
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


def setup(config: BratsConfig, data: Data, model: VolumeModel, run: Run) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    if config.ours:
        return volume_setup(config, data, model, None, run)
    from medspeed.apps.brats.guide import transforms  # here: MONAI takes longer to load than all the rest

    return volume_setup(config, data, model, transforms(config, model.preparation, run.device), run)


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
