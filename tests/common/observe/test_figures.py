"""Figures as files."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from common.observe.figures import one_line, save_png


def test_a_figure_keeps_its_size_and_few_colours(tmp_path: Path):
    figure = Figure(figsize=(3, 2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(np.random.default_rng(0).random((20, 30, 3)), interpolation="bilinear")
    save_png(tmp_path / "new" / "figure.png", figure)
    with Image.open(tmp_path / "new" / "figure.png") as picture:
        assert picture.size == (300, 200)
        colours = picture.convert("RGB").getcolors(maxcolors=300)
    assert colours is not None
    assert 100 < len(colours) <= 192
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["figure.png"]


def test_one_line():
    assert one_line("  a\tb\n\x00c  ", 10) == "a b c"
    assert one_line("0123456789", 10) == "0123456789"
    assert one_line("0123456789a", 10) == "012345678…"
