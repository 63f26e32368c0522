"""Who does what when in a pipeline that reads, computes and writes at once, and the picture of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
    """Draw as a PNG the lanes of the first 40 cases, each stage in its colour, each case with its number."""
    cases = list(dict.fromkeys(span.case for span in sorted(spans, key=lambda span: span.begin)))[:_MOST_CASES]
    shown = sorted((span for span in spans if span.case in cases), key=lambda span: span.begin)
    rows = list(dict.fromkeys(span.lane for span in shown))
    colours = dict(zip(dict.fromkeys(span.stage for span in shown), cycle(_COLOURS)))
    figure = Figure(figsize=(11, 1.4 + 0.55 * len(rows)), dpi=120, layout="constrained")
    axes, ends = figure.subplots(), dict[tuple[str, int], list[float]]()
    for span in shown:
        row, colour = rows.index(span.lane), colours[span.stage]
        axes.barh(row, span.end - span.begin, 0.8, span.begin, color=colour, edgecolor="white", linewidth=0.4)
        ends.setdefault((span.case, row), []).extend((span.begin, span.end))
    for (case, row), times in ends.items():
        middle = (min(times) + max(times)) / 2
        axes.text(middle, row, str(cases.index(case) + 1), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_xlim(left=shown[0].begin)
    keys = [Patch(color=colour, label=stage) for stage, colour in colours.items()]
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(keys), frameon=False, fontsize=8)
    save_png(path, figure)
