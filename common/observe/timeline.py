"""Who does what when in a pipeline that reads, computes and writes at once, and the picture of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from medspeed.common.clock import synchronise
from medspeed.common.observe.plots import save_png

_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#0072B2", "#F0E442", "#999999")  # Okabe and Ito
_MOST_CASES = 40  # in the picture


class Span(NamedTuple):
    """A stage of a case in a pipeline, done by a lane ("read" or "write"); times are seconds since it began."""

    case: str
    lane: str
    stage: str
    begin: float
    end: float


class Timeline:
    """Collects the spans of all threads, from when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.spans: list[Span] = []  # in the order in which they ended; appended to by all threads, which is safe

    @contextmanager
    def stage(self, case: str, lane: str, name: str, waits: bool = False) -> Iterator[None]:
        """Time a block as a stage of a case in a lane; `waits` waits for the CUDA device at its end."""
        begin = self.now()
        try:
            yield
        finally:
            if waits:
                synchronise()
            self.spans.append(Span(case, lane, name, begin, self.now()))

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._began

    def seconds(self, case: str) -> dict[str, float]:
        """Return the seconds of each stage of a case so far."""
        found: dict[str, float] = {}
        for span in list(self.spans):
            if span.case == case:
                found[span.stage] = round(found.get(span.stage, 0.0) + span.end - span.begin, 4)
        return found


def draw_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Draw as a PNG the lanes of the first 40 cases, each stage in its colour, each case with its number; one at least.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    cases = list(dict.fromkeys(span.case for span in sorted(spans, key=lambda span: span.begin)))[:_MOST_CASES]
    shown = sorted((span for span in spans if span.case in cases), key=lambda span: span.begin)
    lanes, stages = (list(dict.fromkeys(names)) for names in zip(*((s.lane, s.stage) for s in shown), strict=True))
    figure = Figure(figsize=(11, 1.4 + 0.55 * len(lanes)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, stage in enumerate(stages):
        parts = [(lanes.index(s.lane), s.end - s.begin, s.begin) for s in shown if s.stage == stage]
        rows, widths, lefts = zip(*parts, strict=True)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.barh(rows, widths, 0.8, lefts, color=colour, label=stage, edgecolor="white", linewidth=0.4)
    for case, lane in dict.fromkeys((span.case, span.lane) for span in shown):
        times = [each for span in shown if (span.case, span.lane) == (case, lane) for each in (span.begin, span.end)]
        middle = (min(times) + max(times)) / 2
        axes.text(middle, lanes.index(lane), str(cases.index(case) + 1), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_xlim(left=shown[0].begin)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(stages), frameon=False, fontsize=8)
    save_png(path, figure)
