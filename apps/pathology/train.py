"""Train a detector of metastases on patches of whole-slide images: from slides to a checked TensorRT engine."""

from apps.pathology.config import RUNS, PathologyConfig, parse_pathology_config

if __name__ == "__main__":
    CONFIG = parse_pathology_config()  # before torch is loaded, so that --help and a mistyped flag answer at once


import torch

from apps.pathology.data import decoded, shared_validation, training_batches
from apps.pathology.finish import export_best, finish, judge
from apps.pathology.patch_store import Patches
from apps.pathology.plan import PathologyPlan, decide, plan_run
from apps.pathology.tables import Tables, find_tables
from apps.pathology.weights import initialise_from
from common.data.slide_pool import SlidePool
from common.observe.run import Run, one_line_errors
from common.observe.summary import RunSummary
from common.training.compiling import compile_network
from common.training.distributed import Ranks, join_ranks
from common.training.fit import Setup, fit
from common.training.losses import binary_cross_entropy
from common.training.optimizers import build_optimizer
from common.training.start import begin


def main(config: PathologyConfig) -> RunSummary | None:
    """Train on the processes that torchrun started, or on this one; the leader alone returns the summary."""
    with join_ranks(config.device) as ranks:
        pool = SlidePool(reader=config.reader)
        try:
            return train(config, ranks, pool)
        finally:
            pool.close()


def train(config: PathologyConfig, ranks: Ranks, pool: SlidePool) -> RunSummary | None:
    """Go the whole way: patches, plan, batches, training, quality, export, summary."""
    run = begin(config, RUNS, ranks)
    tables, plan, validation = read_and_plan(config, run, ranks, pool)
    fitted = fit(set_up(tables, validation, plan, config, run, ranks, pool), config, run, ranks)
    best = plan.model.build().to(run.device).eval()
    best.load_state_dict(fitted.weights)
    testing = decoded(tables.testing, config, run, ranks, pool) if tables.testing is not None else None
    quality = judge(best, validation, testing, run, ranks)
    if not ranks.leader:
        return None
    exported = export_best(best, validation, plan.model, config.engine, run)
    return finish(config, tables, plan.model, fitted, quality, exported, run, ranks)


def read_and_plan(
    config: PathologyConfig, run: Run, ranks: Ranks, pool: SlidePool
) -> tuple[Tables, PathologyPlan, Patches]:
    """Draw the patches, decide what the configuration leaves open, and decode the patches that validate."""
    with run.clock.stage("prepare"):
        tables = find_tables(config, run, ranks, pool)
    digests = (tables.training.digest(), tables.validation.digest())
    count = len(tables.training)
    chosen = plan_run(config, tables.training.size, tables.mpp, count, digests, run.device, ranks.world)
    plan = decide(chosen, config, run, ranks)

    validation = decoded(tables.validation, config, run, ranks, pool)
    return tables, plan, validation


def set_up(
    tables: Tables,
    validation: Patches,
    plan: PathologyPlan,
    config: PathologyConfig,
    run: Run,
    ranks: Ranks,
    pool: SlidePool,
) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    model = plan.model
    network = model.build()
    if config.init is not None and not (run.directory / "checkpoints" / "last").exists():
        run.say(initialise_from(network, config.init))
    network = network.to(run.device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batches = training_batches(tables, plan, config, run, ranks, pool)
    with run.clock.stage("compile"):
        if config.compile:
            patches = plan.batch_size // ranks.world // config.accumulate
            example = torch.zeros(patches, 3, model.patch_size, model.patch_size, device=run.device)
            compile_network(network, example, model.precision)
    if ranks.world > 1 or config.accumulate > 1:
        run.say("batch normalisation: over each rank's own part of a batch, so that the parts do not add up exactly")
    return Setup(
        network=network,
        batches=batches,
        loss_function=binary_cross_entropy(config.label_smoothing),
        optimizer=build_optimizer(config.optimizer, network.parameters(), config.learning_rate),
        epochs=plan.epochs,
        precision=model.precision,
        validate=shared_validation(validation, ranks, run.device),
        validate_every=plan.validate_every,
    )


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
