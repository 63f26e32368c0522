"""Train a segmentation network on CT (or any dataset in MSD layout): from raw volumes to a checked TensorRT engine."""

from apps.spleen.config import RUNS, SpleenConfig, parse_spleen_config

if __name__ == "__main__":
    CONFIG = parse_spleen_config()  # before torch is loaded, so that --help and a mistyped flag answer at once


import torch

from apps.spleen.data import find_dataset, keeping, make_source
from apps.spleen.plan import SpleenPlan, plan_run
from common.data.cases import Dataset, Split, read_dataset, split_cases
from common.export.best import GATE_CASES, export_best
from common.observe.run import Run, one_line_errors
from common.observe.summary import RunSummary
from common.training.compiling import compile_network
from common.training.decide import decide
from common.training.distributed import Ranks, join_ranks
from common.training.finish import finish, judge
from common.training.fit import Setup, fit
from common.training.losses import build_loss, say_inexact
from common.training.optimizers import build_optimizer
from common.training.source import stored_cases
from common.training.start import begin
from models.prelu import use_fast_prelu


def main(config: SpleenConfig) -> RunSummary | None:
    """Train on the processes that torchrun started, or on this one; the leader alone returns the summary."""
    with join_ranks(config.device) as ranks:
        return train(config, ranks)


def train(config: SpleenConfig, ranks: Ranks) -> RunSummary | None:
    """Go the whole way: dataset, plan, batches, training, quality on the native grid, export, summary."""
    if config.data is not None and config.resume is None:
        split_cases(read_dataset(config.data), config.split)  # a wrong one ends before a run folder is made
    run = begin(config, RUNS, ranks)
    dataset, split, plan = read_and_plan(config, run, ranks)
    model = plan.model
    fitted = fit(set_up(split, plan, config, run, ranks), config, run, ranks)
    best = model.build().to(run.device).eval()
    best.load_state_dict(fitted.weights)
    cases = ranks.shard(split.validation)
    with run.clock.stage("prepare"):  # already there, unless MONAI prepared for the training
        prepared = stored_cases(cases, model, keeping(config), run)
    quality = judge(best, split, cases, prepared, model, run, ranks)
    if not ranks.leader:
        return None
    gate = split.validation[:GATE_CASES]
    with run.clock.stage("prepare"):
        prepared = stored_cases(gate, model, keeping(config), run)
    exported = export_best(best, gate, prepared, model, "spleen", config.engine, run)
    return finish("spleen", config, split, dataset, model, fitted, quality, exported, run, ranks)


def read_and_plan(config: SpleenConfig, run: Run, ranks: Ranks) -> tuple[Dataset, Split, SpleenPlan]:
    """Read the data, split them, and decide what the configuration leaves open."""
    with run.clock.stage("prepare"):
        dataset = find_dataset(config, run, ranks)
        split, plan = decide(
            "spleen",
            dataset,
            config,
            lambda chosen, figures: plan_run(config, dataset, figures, len(chosen.training), run.device, ranks.world),
            SpleenPlan.from_json,
            run,
            ranks,
        )
    return dataset, split, plan


def set_up(split: Split, plan: SpleenPlan, config: SpleenConfig, run: Run, ranks: Ranks) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    model = plan.model
    trained = (run.directory / "checkpoints" / "last").exists()
    network = model.build(None if trained else config.init).to(run.device)
    if config.fast_prelu:
        use_fast_prelu(network)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    source = make_source(split, plan, config, run, ranks)
    with run.clock.stage("compile"):
        if config.compile:
            crops = plan.batch_size // ranks.world // config.accumulate
            example = torch.zeros(crops, model.preparation.channels, *plan.crop_size, device=run.device)
            compile_network(network, example, model.precision)
    say_inexact(config.loss, ranks, config.accumulate, run)
    return Setup(
        network=network,
        batches=source.batches,
        loss_function=build_loss(config.loss, ranks),
        optimizer=build_optimizer(config.optimizer, network.parameters(), config.learning_rate),
        epochs=plan.epochs,
        precision=model.precision,
        validate=source.validate,
        validate_every=plan.validate_every,
    )


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
