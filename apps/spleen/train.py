"""Train a segmentation network on CT (or any dataset in MSD layout): from raw volumes to a checked TensorRT engine."""

from apps.spleen.config import RUNS, SpleenConfig, parse_spleen_config

if __name__ == "__main__":
    CONFIG = parse_spleen_config()  # before torch is loaded, so that --help and a mistyped flag answer at once


import torch

from apps.spleen.data import find_dataset, make_source
from apps.spleen.evaluate import judge
from apps.spleen.export import by_precision, export_best
from apps.spleen.plan import SpleenPlan, decide
from common.config import config_to_yaml
from common.data.cases import Dataset, Split, read_dataset, split_cases
from common.export.export import ExportRecord
from common.observe.run import Run, one_line_errors, start_run
from common.observe.summary import Quality, RunSummary, write_summary
from common.training.compiling import compile_network
from common.training.fit import Fitted, fit
from common.training.losses import LOSSES
from common.training.optimizers import build_optimizer
from models.prelu import use_fast_prelu


def main(config: SpleenConfig) -> RunSummary:
    """Go the whole way: dataset, plan, batches, training, quality on the native grid, export, summary."""
    if config.data is not None and config.resume is None:
        split_cases(read_dataset(config.data), config.split)  # a wrong folder or split ends before a run folder is made
    run = start_run(RUNS, config.run, config.resume, config.device, config_to_yaml(config), config.seed)
    run.say(f"run {run.directory}: recipe {config.recipe}, device {run.device}, seed {config.seed}")
    with run.clock.stage("prepare"):
        dataset = find_dataset(config, run)
        split, plan = decide(dataset, config, run)

    trained = (run.directory / "checkpoints" / "last").exists()
    network = plan.model.build(None if trained else config.init).to(run.device)
    if config.fast_prelu:
        use_fast_prelu(network)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    source = make_source(split, plan, config, run)
    with run.clock.stage("compile"):
        if config.compile:
            example = torch.zeros(plan.batch_size, plan.model.preparation.channels, *plan.crop_size, device=run.device)
            compile_network(network, example, plan.model.precision)
    fitted = fit(
        network,
        source.batches,
        run=run,
        loss_function=LOSSES[config.loss],
        optimizer=build_optimizer(config.optimizer, network.parameters(), config.learning_rate),
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        epochs=plan.epochs,
        precision=plan.model.precision,
        validate=source.validate,
        validate_every=plan.validate_every,
        checkpoint_seconds=config.checkpoint_seconds,
    )
    best = plan.model.build(run.directory / "best.safetensors").to(run.device).eval()
    quality = judge(best, split, plan, config, run)
    exported = export_best(best, split, plan, config, run)
    return finish(config, split, dataset, plan, fitted, quality, exported, run)


def finish(
    config: SpleenConfig,
    split: Split,
    dataset: Dataset,
    plan: SpleenPlan,
    fitted: Fitted,
    quality: Quality,
    exported: ExportRecord,
    run: Run,
) -> RunSummary:
    """Write `summary.json` and say where everything lies."""
    summary = RunSummary(
        app="spleen",
        recipe=config.recipe,
        data={"folder": str(dataset.folder), "name": dataset.name, "synthetic": dataset.synthetic},
        held_out=split.held_out,
        device=str(run.device),
        precision=plan.model.precision,
        seed=config.seed,
        cases={"training": len(split.training), "validation": len(split.validation)},
        steps=fitted.steps,
        quality=quality,
        working_grid={"best": fitted.best_dice, "last": fitted.last_dice, "best_epoch": fitted.best_epoch},
        seconds=run.clock.seconds(),
        onnx=by_precision(exported.onnx),
        engine=by_precision(exported.engines) if exported.engines else {"ran": False, "reason": exported.no_engine},
    )
    write_summary(run.directory, summary)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in summary.seconds.items())
    run.say(f"seconds: {seconds}\nsummary: {run.directory / 'summary.json'}")
    return summary


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
