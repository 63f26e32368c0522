"""The timeline of a pipeline, and its picture."""

import numpy as np
import pytest
from PIL import Image

from medspeed.common.observe.timeline import Span, Timeline, draw_timeline


def test_stages_of_a_case_are_added_up(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0, 5.5, 7.0, 8.0])
    monkeypatch.setattr("medspeed.common.observe.timeline.time.perf_counter", lambda: next(clock))
    timeline = Timeline()
    for _ in range(2):
        with timeline.stage("a", "compute", "windows"):
            pass
    with timeline.stage("b", "write", "write"):
        pass
    assert timeline.seconds("a") == {"windows": 2.5}
    assert timeline.seconds("b") == {"write": 1.0}
    assert timeline.spans[0] == Span("a", "compute", "windows", 1.0, 3.0)


def test_a_stage_that_fails_is_noted_too():
    timeline = Timeline()
    with pytest.raises(ValueError, match="no"), timeline.stage("a", "read", "decode"):
        raise ValueError("no")
    assert [span.stage for span in timeline.spans] == ["decode"]


def test_the_picture_of_a_pipeline_shows_each_lane(tmp_path):
    spans = [
        Span(f"case <{n}> $x$", lane, stage, n + start, n + start + 0.8)
        for n in range(3)
        for lane, stage, start in (("read", "decode", 0), ("compute", "windows", 1), ("write", "write", 2))
    ]
    draw_timeline(tmp_path / "timeline.png", spans)
    with Image.open(tmp_path / "timeline.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    found = [np.abs(pixels - colour).max(axis=2) < 12 for colour in ((86, 180, 233), (0, 158, 115), (230, 159, 0))]
    lines = [np.flatnonzero(mask[60:].sum(axis=1) > 100) for mask in found]  # below the legend
    assert lines[0].max() < lines[1].min() < lines[1].max() < lines[2].min()  # read, compute, write from the top
