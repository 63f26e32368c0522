"""What the user sees while training: the bar, the records, the curves, and what watches the machine."""

import json
import os
import time
from contextlib import ExitStack
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.files import append_json_line, read_json_lines, write_text
from common.observe.monitor import Monitor
from common.observe.plots import draw_progress
from common.observe.profiler import StepProfiler
from common.run import Run
from common.training.config import TrainingConfig

_DRAW_SECONDS = 30.0


class Log:
    """What `fit` reports to, as it is on all ranks but the leader: silent."""

    def __enter__(self) -> None:
        """Nothing to do: what there is to open is open."""

    def __exit__(self, *_: object) -> None:
        """Close what is open."""

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Note one epoch's record; `losses` of its steps, and the metric where it was validated."""


class FileLog(Log):
    """What the user sees while training: the bar, `metrics.jsonl`, TensorBoard and `progress.png`."""

    def __init__(self, run: Run, config: TrainingConfig, total: int, done: int, epochs: int) -> None:
        """Open the files and the bar.

        Args:
            run: whose folder gets them.
            config: names the metric, and what is recorded.
            total: steps of the whole training.
            done: steps that earlier starts of the run have done.
            epochs: whole epochs that they have done; records of later ones are done again, and dropped.
        """
        self._metric = config.METRIC
        self._path, self._picture = run.directory / "metrics.jsonl", run.directory / "progress.png"
        self._keep_until(epochs)
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done)
        self._bar = tqdm(total=total, initial=done, unit="step", desc="train")
        self._shown: dict[str, str] = {}
        self._run, self._config, self._left = run, config, total - done
        self._steps, self._forecast = 0, False
        self._samples, self._drawn = 0, time.monotonic()
        self._watching = ExitStack()
        self._profiler: StepProfiler | None = None

    def __enter__(self) -> None:
        """Begin to watch."""
        run, config = self._run, self._config
        if seconds := float(os.environ.get("MEDSPEED_MONITOR_SECONDS", "1")):  # tests and benchmarks do without
            self._watching.enter_context(Monitor(run.directory, run.device, seconds))
        if config.profile == "torch":
            self._profiler = self._watching.enter_context(StepProfiler(run.directory / "profile", run.device))

    def __exit__(self, *_: object) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._watching.close()
        self._bar.close()
        self._writer.close()
        draw_progress(self._picture, read_json_lines(self._path), self._metric)

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._steps += 1
        self._bar.update()
        if self._profiler is not None:
            self._profiler.step()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and the metric where it was validated."""
        losses = record["losses"]
        rate = self._samples / seconds
        left = self._left - self._steps
        if not self._forecast and left > 0 and self._steps:  # a resumed run may do a part of its first epoch, or none
            each, self._forecast = seconds / self._steps, True
            self._run.say(f"forecast: {left} more steps of {each:.3g} s: about {left * each / 60:.1f} min")
        self._samples = 0
        record |= {
            "loss": sum(losses) / len(losses),
            "seconds": round(seconds, 4),
            "samples_per_second": round(rate, 2),
        }
        append_json_line(self._path, record)
        for name in ("loss", self._metric.lower(), "samples_per_second"):
            if name in record:
                self._writer.add_scalar(name, record[name], record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in ("loss", self._metric.lower()) if name in record}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            draw_progress(self._picture, read_json_lines(self._path), self._metric)
            self._drawn = time.monotonic()

    def _keep_until(self, epochs: int) -> None:
        """Drop the records of what a resumed run does again."""
        if not self._path.is_file():
            return
        kept = [record for record in read_json_lines(self._path) if record["epoch"] <= epochs]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
