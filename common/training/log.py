"""What the user sees of a training: the bar, lines, curves, and what a tracker is told."""

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from medspeed.common.config import flat
from medspeed.common.console import hides_bar
from medspeed.common.files import read_json_lines, write_text
from medspeed.common.observe.monitor import monitored
from medspeed.common.observe.profiler import profiled_steps
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.setup import learning_rates
from medspeed.common.training.state import TrainingState

_DRAW_SECONDS = 30.0
_LOG_LINES = 30  # about; each epoch has a line where there are no more epochs
_PLAIN = (bool, int, float, str, type(None))


class Log:
    """What is seen of a training of `total` steps: the bar, `metrics.jsonl`, trackers, curves, the machine's load."""

    def __init__(self, run: Run, config: TrainingConfig, total: int, state: TrainingState) -> None:
        self._run, self._metric, folder = run, config.METRIC, run.directory
        self._path, self._picture = folder / "metrics.jsonl", folder / "progress.png"
        if records := read_json_lines(self._path):  # those of epochs that are done again are dropped
            kept = [record for record in records if record["epoch"] <= state.epoch]
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        plain = {name: each if isinstance(each, _PLAIN) else str(each) for name, each in flat(config).items()}
        run.trackers.begin(plain, state.steps_done)
        self._rates = learning_rates(config, total)
        self._bar = tqdm(total=total, initial=state.steps_done, unit="step", desc="train", disable=hides_bar())
        self._epochs, self._first = decided(config.epochs), state.epoch
        self._shown, self._samples = dict[str, str](), 0
        self._drawn = self._began = time.monotonic()
        self._watching, self._profiler = ExitStack(), None
        if seconds := float(os.environ.get("MEDSPEED_MONITOR_SECONDS", 1)):  # tests and benchmarks do without
            self._watching.enter_context(monitored(run.directory, run.device, seconds))
        if config.profile == "torch":
            self._profiler = self._watching.enter_context(profiled_steps(run.directory / "profile", run.device))

    def close(self) -> None:
        """Close the bar and the files, and draw the curves a last time."""
        self._watching.close()
        self._bar.close()
        self._draw()

    def step(self, samples: int) -> None:
        """Count one step of so many crops."""
        self._samples += samples
        self._bar.update()
        if self._profiler is not None:
            self._profiler()

    def epoch(self, record: dict[str, Any], seconds: float) -> None:
        """Write one epoch's record; `losses` of its steps, and the metric where it was validated."""
        rate, loss, self._samples = self._samples / seconds, sum(record["losses"]) / len(record["losses"]), 0
        record |= {"loss": loss, "seconds": round(seconds, 4), "samples_per_second": round(rate, 2)}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")
        shown = [name for name in ("loss", self._metric.lower()) if name in record]
        values = {name: record[name] for name in (*shown, "samples_per_second")}
        self._run.trackers.scalars(values | {"learning_rate": self._rates[record["step"] - 1]}, record["step"])
        self._shown |= {name: f"{record[name]:.4f}" for name in shown}
        self._bar.set_postfix({**self._shown, "samples/s": f"{rate:.1f}"}, refresh=False)
        if (epoch := record["epoch"]) % -(-self._epochs // _LOG_LINES) == 0 or len(shown) > 1:
            left = (time.monotonic() - self._began) / (epoch - self._first) * (self._epochs - epoch)
            figures = ", ".join(f"{name} {self._shown[name]}" for name in shown)
            line = f"epoch {epoch}/{self._epochs}: {figures}, {seconds:.1f} s, {tqdm.format_interval(left)} left"
            self._run.say(line, "note" if self._bar.disable or not sys.stdout.isatty() else "detail")
        if time.monotonic() - self._drawn > _DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        from medspeed.common.observe.plots import draw_progress

        draw_progress(self._picture, read_json_lines(self._path), self._metric)
        self._drawn = time.monotonic()
