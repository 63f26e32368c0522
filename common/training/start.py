"""The beginning of a training run."""

from pathlib import Path

from common.config import config_to_yaml
from common.observe.host_memory import keep_freed_memory
from common.observe.run import Run, start_run
from common.training.config import TrainingConfig
from common.training.distributed import Ranks


def begin(config: TrainingConfig, runs: Path, ranks: Ranks) -> Run:
    """Make the run's folder, or open the one to resume, and say what runs (see `start_run`).

    Args:
        config: of the run.
        runs: folder below which an unnamed run gets one.
        ranks: the processes that train together.
    """
    run = start_run(runs, config.run, config.resume, config.device, config_to_yaml(config), config.seed, ranks)
    if run.device.type == "cpu":
        keep_freed_memory()
    run.say(
        f"run {run.directory}: recipe {config.recipe}, device {run.device}, ranks {ranks.world}, seed {config.seed}"
    )
    return run
