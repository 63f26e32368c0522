"""Who did what when in a pipeline: seconds of each stage of each case, and a picture in which overlap can be seen."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.observe.figures import one_line, save_png
from common.observe.timing import synchronise

_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#0072B2", "#F0E442", "#999999")  # Okabe and Ito
_MOST_CASES = 40  # in the picture
_NAMED = 12  # cases, at most, whose names are written


@dataclass(frozen=True)
class Span:
    """A stage of a case.

    Attributes:
        case: its name.
        lane: who did it, "read" or "write".
        stage: what was done.
        begin: seconds since the timeline began.
        end: the same.
    """

    case: str
    lane: str
    stage: str
    begin: float
    end: float


class Timeline:
    """Collects the spans of all threads."""

    def __init__(self) -> None:
        """Begin now."""
        self._began = time.perf_counter()
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def of(self, case: str, lane: str, waits: bool = False) -> "CaseStages":
        """Return what times the stages of a case in a lane; `waits` waits for the CUDA device at the end of each."""
        return CaseStages(self, case, lane, waits)

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._began

    def note(self, span: Span) -> None:
        """Keep a span."""
        with self._lock:
            self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans so far, in the order in which they ended."""
        with self._lock:
            return tuple(self._spans)

    def seconds(self, case: str) -> dict[str, float]:
        """Return the seconds of each stage of a case so far."""
        found: dict[str, float] = {}
        for span in self.spans():
            if span.case == case:
                found[span.stage] = round(found.get(span.stage, 0.0) + span.end - span.begin, 4)
        return found


@dataclass(frozen=True)
class CaseStages:
    """Times the stages of one case in one lane."""

    timeline: Timeline
    case: str
    lane: str
    waits: bool

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block as a stage."""
        begin = self.timeline.now()
        try:
            yield
        finally:
            if self.waits:
                synchronise()
            self.timeline.note(Span(self.case, self.lane, name, begin, self.timeline.now()))


def overlap(spans: Sequence[Span]) -> float:
    """Return how many lanes were busy at once, on average, while any was: 1.0 is one after the other."""
    busy = sum(span.end - span.begin for span in spans)
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda each: each.begin):
        covered += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return busy / covered if covered else 1.0


def draw_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Draw the lanes of the first 40 cases over time, each stage in its colour, each case with its number.

    Args:
        path: PNG file to write.
        spans: at least one.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    cases = list(dict.fromkeys(span.case for span in sorted(spans, key=lambda each: each.begin)))[:_MOST_CASES]
    shown = [span for span in spans if span.case in set(cases)]
    lanes = list(dict.fromkeys(span.lane for span in sorted(shown, key=lambda each: each.begin)))
    stages = list(dict.fromkeys(span.stage for span in sorted(shown, key=lambda each: each.begin)))
    colours = {stage: _COLOURS[number % len(_COLOURS)] for number, stage in enumerate(stages)}
    names = [f"{number}: {one_line(case, 40)}" for number, case in enumerate(cases, 1)] if len(cases) <= _NAMED else []
    figure = Figure(figsize=(11, 1.4 + 0.55 * len(lanes) + 0.16 * -(-len(names) // 2)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for span in shown:
        row, number = len(lanes) - 1 - lanes.index(span.lane), cases.index(span.case) + 1
        axes.barh(
            row, span.end - span.begin, 0.8, span.begin, color=colours[span.stage], edgecolor="white", linewidth=0.4
        )
        whole = [each for each in shown if (each.case, each.lane) == (span.case, span.lane)]
        if span is whole[0]:
            middle = (min(each.begin for each in whole) + max(each.end for each in whole)) / 2
            axes.text(middle, row, str(number), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set_xlabel(f"seconds; on average {overlap(shown):.2f} lanes at work")
    axes.set_xlim(left=min(span.begin for span in shown))
    handles = [Patch(color=colours[stage], label=stage) for stage in stages]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False, fontsize=8)
    if names:
        half = -(-len(names) // 2)
        for column, part in enumerate((names[:half], names[half:])):
            text = figure.text(0.02 + 0.5 * column, -0.02, "\n".join(part), va="top", fontsize=7)
            text.set_parse_math(False)
    save_png(path, figure)
