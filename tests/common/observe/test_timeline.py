import numpy as np
import pytest
from PIL import Image

from common.observe.timeline import Span, Timeline, draw_timeline, overlap


def test_stages_of_a_case_are_added_up(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0, 5.5, 7.0, 8.0])
    monkeypatch.setattr("common.observe.timeline.time.perf_counter", lambda: next(clock))
    timeline = Timeline()
    stages = timeline.of("a", "compute")
    with stages.stage("windows"):
        pass
    with stages.stage("windows"):
        pass
    with timeline.of("b", "write").stage("write"):
        pass
    assert timeline.seconds("a") == {"windows": 2.5}
    assert timeline.seconds("b") == {"write": 1.0}
    assert timeline.spans()[0] == Span("a", "compute", "windows", 1.0, 3.0)


def test_a_stage_that_fails_is_noted_too():
    timeline = Timeline()
    with pytest.raises(ValueError, match="no"), timeline.of("a", "read").stage("decode"):
        raise ValueError("no")
    assert [span.stage for span in timeline.spans()] == ["decode"]


def test_overlap_counts_lanes_at_work():
    one = [Span("a", "read", "decode", 0, 1), Span("a", "compute", "windows", 1, 3)]
    assert overlap(one) == 1.0
    assert overlap([*one, Span("b", "read", "decode", 1, 3)]) == pytest.approx(5 / 3)
    assert overlap([Span("a", "read", "decode", 0, 1), Span("b", "read", "decode", 9, 10)]) == 1.0  # gaps do not count
    assert overlap([]) == 1.0


def test_the_picture_shows_each_lane(tmp_path):
    spans = [
        Span(f"case <{n}> $x$", lane, stage, n + start, n + start + 0.8)
        for n in range(3)
        for lane, stage, start in (("read", "decode", 0), ("compute", "windows", 1), ("write", "write", 2))
    ]
    draw_timeline(tmp_path / "timeline.png", spans)
    pixels = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).reshape(-1, 3)
    for colour in ((0x56, 0xB4, 0xE9), (0x00, 0x9E, 0x73), (0xE6, 0x9F, 0x00)):
        assert (np.abs(pixels.astype(int) - colour).max(axis=1) < 12).sum() > 500
