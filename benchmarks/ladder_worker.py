"""One rung of the ladder, in a process of its own.

Run: python -m benchmarks.ladder_worker APP CONFIG.yaml EPOCHS VALIDATE_EVERY OUT.json
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apps.opening import APPS
from common.config import config_from_yaml
from common.files import write_json
from common.observe.host_memory import peak_memory
from common.observe.run import read_json_lines
from common.training.distributed import SINGLE
from common.training.fit import fit
from common.training.start import begin


def climb_rung(app: str, path: Path, epochs: int, every: int) -> dict[str, Any]:
    """Train for so many epochs, and return what it took and what came of it.

    Args:
        app: name of the app.
        path: its configuration.
        epochs: each is timed; the first, which may compile and fill caches, apart.
        every: epochs between validations.
    """
    app_config = type(APPS[app].parse([]))
    config = config_from_yaml(app_config, path)
    with tempfile.TemporaryDirectory(prefix="rung-") as folder:
        run = begin(replace(config, run=Path(folder) / "run"), Path(folder), SINGLE)
        with APPS[app].open(config, run) as opened:
            fitted = fit(replace(opened.setup, epochs=epochs, validate_every=every), config, run)
            per_epoch = opened.setup.batches.steps_per_epoch
        records = read_json_lines(run.directory / "metrics.jsonl")
        seconds = run.clock.seconds()
    later = records[1:] or records
    metric = config.METRIC.lower()
    before = sum(seconds.get(name, 0.0) for name in ("prepare", "cache", "compile"))
    ends = (before + np.cumsum([record["seconds"] for record in records])).round(3).tolist()
    curve = [[end, record[metric]] for end, record in zip(ends, records, strict=True) if metric in record]
    whole = sum(record["seconds"] for record in later)
    return {
        "first epoch, s": records[0]["seconds"],
        "s per step": round(statistics.median(record["seconds"] for record in later) / per_epoch, 5),
        "samples per s": statistics.median(record["samples_per_second"] for record in later),
        "waited, percent": round(100 * sum(record["waited"] for record in later) / whole, 1),
        "s per validation": round(seconds.get("validate", 0.0) / max(1, len(curve)), 4),
        "prepare and cache, s": round(seconds.get("prepare", 0.0) + seconds.get("cache", 0.0), 3),
        "compile, s": seconds.get("compile", 0.0),
        "peak memory, MiB": round(peak_memory() / 2**20),
        config.METRIC: fitted.last,
        "steps": fitted.steps,
        "precision": opened.setup.precision,
        "curve": curve,
    }


def main() -> None:
    """Run the rung that the command line names."""
    app, path, epochs, every, output = sys.argv[1:]
    began = time.perf_counter()
    found = climb_rung(app, Path(path), int(epochs), int(every))
    write_json(Path(output), found | {"in all, s": round(time.perf_counter() - began, 2)})


if __name__ == "__main__":
    main()
