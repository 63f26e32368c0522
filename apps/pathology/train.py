"""Train a metastasis detector on patches of whole-slide images: from slides to a verified TensorRT engine."""

from medspeed.apps.pathology.config import PathologyConfig, parse

if __name__ == "__main__":
    CONFIG = parse()  # before torch is loaded, so that --help and a mistyped flag answer at once

from dataclasses import replace
from functools import partial

import torch

from medspeed.apps.pathology.model import PathologyModel, binary_cross_entropy, choose, initialise_from, model_of
from medspeed.apps.pathology.patches.store import decoded, hold, rank_rows, resident_batches
from medspeed.apps.pathology.patches.tables import Tables, find_tables, keep_digests
from medspeed.apps.pathology.quality import all_scores, call_size, evaluate, held_out, patch_gate, warn_of_seen_tests
from medspeed.apps.pathology.scan.froc import auc
from medspeed.common.data.batches import Batches
from medspeed.common.export.export import export
from medspeed.common.files import read_object
from medspeed.common.inference.model import write_model
from medspeed.common.run import Run, one_line_errors
from medspeed.common.training.config import decided
from medspeed.common.training.evaluate import RunSummary, best_network, finish
from medspeed.common.training.fit import Setup, fit
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.resolve import keep_plan
from medspeed.common.training.setup import compile_if_asked, network_trials, start_run, trust_kernels


def main(config: PathologyConfig) -> RunSummary | None:
    """Go the whole way, with the processes that torchrun started; the leader alone exports and returns the summary."""
    with start_run(config) as run:
        data = read_data(config, run)  # which patches train, validate and test
        config, model = resolve(config, data, run)  # every open field decided, said, and kept as plan.json
        fitted = fit(setup(config, data, model, run), config, run)
        best = best_network(model, fitted, run)
        held = [name for name in data.parts if name != "training" or config.source == "resident"]  # MONAI reads its own
        parts = {name: decoded(data.parts[name], config, run) for name in held}
        quality = evaluate(parts, best, model.precision, run)  # AUC of the patches
        if not run.ranks.leader:
            return None
        gate = patch_gate(parts["validation"], model, run, data.name)
        exported = export(best, gate, run, config.engine)  # ONNX, the gate, TensorRT
        return finish(config, data.about(), fitted, quality, exported, run)


def read_data(config: PathologyConfig, run: Run) -> Tables:
    """Find out which patches there are; a resumed run must find those that it began with."""
    # A resumed run draws as many patches on another device, too.
    kept = run.ranks.once(lambda: read_object(run.directory / "plan.json") if run.planned else {})
    drawn = {name: kept.get(name, getattr(config, name)) for name in ("patch_size", "patches_per_slide")}
    tables = find_tables(replace(config, **drawn), run)
    run.ranks.once(lambda: keep_digests(tables, run))
    if (init := config.init) is not None and not run.planned:
        run.ranks.once(lambda: warn_of_seen_tests(tables, init, run))
    return tables


def resolve(config: PathologyConfig, data: Tables, run: Run) -> tuple[PathologyConfig, PathologyModel]:
    """Decide what the configuration leaves open, and what it trains."""
    known = replace(config, patch_size=data.parts["training"].size, mpp=data.mpp, patches_per_slide=data.per_slide)
    count = len(data.parts["training"])
    config = keep_plan(config, lambda: choose(known, count, run.device, run.ranks.world), run)
    model = model_of(config, run.device)
    if (times := (model.tile_size / model.core) ** 2) > 16:
        said = f"--tile-size {model.tile_size}: dense scans compute each pixel {times:.0f} times; use a larger one"
        run.say(said, "warning")
    run.ranks.once(lambda: write_model(run.directory, config.APP, model))
    return config, model


def setup(config: PathologyConfig, data: Tables, model: PathologyModel, run: Run) -> Setup:
    """Build the network, the source of its batches, the loss and the optimizer."""
    training, validation = data.parts["training"], decoded(data.parts["validation"], config, run)
    validation = hold(validation, rank_rows(validation, run), len(training) // run.ranks.world, config, run)
    network = model.build()
    if config.init is not None and not (run.directory / "checkpoints" / "last").exists():
        run.say(initialise_from(network, config.init))
    network = network.to(run.device)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trust_kernels(network_trials(network, config, run), config, run)
    if config.source == "resident":
        batches: Batches = resident_batches(training, config, run)
    else:
        from medspeed.apps.pathology.patches import guide  # here: MONAI takes longer to load than all the rest

        batches = guide.monai_patches(training, config, run)
    patches = call_size(max(1, len(rank_rows(validation, run))))
    compile_if_asked(network, batches, (patches, 3, model.patch_size, model.patch_size), config, run)
    if run.ranks.world > 1 or config.parallel.accumulate > 1:
        run.say("batch normalization: per rank, so results depend on the number of ranks")
    return Setup(
        network=network,
        batches=batches,
        loss_function=partial(binary_cross_entropy, smoothing=config.augmentation.label_smoothing, ranks=run.ranks),
        optimizer=build_optimizer(decided(config.optimizer), network.parameters(), decided(config.learning_rate)),
        precision=model.precision,
        validate=lambda net, _: auc(
            validation.table.label, all_scores(validation, net, model.precision, run, tf32=True)
        ),
        judges_init=held_out(run),
    )


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
