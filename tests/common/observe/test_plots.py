"""Pictures of curves: what is in them, for few and many records and for missing values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from medspeed.common.observe import plots
from medspeed.common.observe.plots import draw_progress, save_png

NAN = float("nan")


def test_a_figure_keeps_its_size(tmp_path: Path):
    save_png(tmp_path / "new" / "figure.png", Figure(figsize=(3, 2), dpi=100))
    with Image.open(tmp_path / "new" / "figure.png") as picture:
        assert picture.size == (300, 200)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["figure.png"]


def records(count: int, every: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch,
            "step": 8 * epoch,
            "loss": 1 / epoch + 0.05 * (epoch % 3),
            "dice": 1 - 0.8 / epoch if epoch % every == 0 else None,
            "seconds": 2.0 + epoch % 2,
        }
        for epoch in range(1, count + 1)
    ]


def drawn(path: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    draw_progress(path, rows)
    assert path.stat().st_size < 100_000
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == (960, 720)
        return np.asarray(picture.convert("RGB")).astype(int)


def orange(pixels: np.ndarray) -> np.ndarray:
    mask: np.ndarray = (pixels[..., 0] - pixels[..., 2] > 100) & (pixels[..., 0] > 150)
    return mask


def blue(pixels: np.ndarray) -> np.ndarray:
    mask: np.ndarray = pixels[..., 2] - pixels[..., 0] > 100
    return mask


@pytest.mark.parametrize("count", [1, 2, 30, 1000])
def test_loss_and_dice_are_drawn(tmp_path: Path, count: int):
    pixels = drawn(tmp_path / "progress.png", records(count, every=1))
    inside = pixels[50:480, 110:880]
    assert blue(inside).sum() > (10 if count == 1 else 300)
    assert orange(inside).sum() > (40 if count == 1 else 300)
    empty = drawn(tmp_path / "empty.png", [])
    assert not blue(empty[50:480, 110:880]).any()
    assert not orange(empty).any()


def test_without_dice_there_is_no_second_axis(tmp_path: Path):
    absent = [{name: value for name, value in row.items() if name != "dice"} for row in records(20)]
    for name, rows in {"none": records(20, every=99), "absent": absent}.items():
        assert not orange(drawn(tmp_path / f"{name}.png", rows)).any()


def test_the_best_validation_has_the_star(tmp_path: Path):
    rows = records(21, every=1)
    for row in rows:
        row["dice"] = 0.9 if row["epoch"] == 6 else 0.1
    high = orange(drawn(tmp_path / "a.png", rows))[60:260, 110:880]  # Dice 0.1 lies far below
    columns = np.flatnonzero(high.sum(axis=0) > 8)
    assert 0.15 < columns.mean() / high.shape[1] < 0.4  # epoch 6 of 21


def progress_axes(rows: list[dict[str, Any]], monkeypatch) -> list[Any]:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_png", lambda path, figure: figures.append(figure))
    draw_progress(Path("unused.png"), rows)
    figures[0].canvas.draw()
    return list(figures[0].axes)


def test_the_last_epochs_of_a_good_run_can_be_told_apart(monkeypatch):
    rows = [{"epoch": n, "loss": 1.0, "dice": dice, "seconds": 1.0} for n, dice in enumerate((0.0, 0.93, 0.95), 1)]
    right = next(axes for axes in progress_axes(rows, monkeypatch) if "Dice" in axes.get_ylabel())
    heights = [right.transData.transform((1, dice))[1] for dice in (0.0, 0.93, 0.95, 1.0)]
    whole = heights[3] - heights[0]
    assert heights[2] - heights[1] > 2.5 * 0.02 * whole  # on a plain axis it would be 0.02 of it
    assert heights == sorted(heights)
    assert [tick.get_text() for tick in right.get_yticklabels()][-3:] == ["0.90", "0.95", "1.00"]


@pytest.mark.parametrize(("seconds", "unit", "shown"), [(2.0, "seconds", "10\n20"), (120.0, "minutes", "10\n20")])
def test_the_axis_of_epochs_has_the_time_beside(monkeypatch, seconds: float, unit: str, shown: str):
    rows = [{"epoch": n, "loss": 1.0, "seconds": seconds} for n in range(1, 21)]
    lower = progress_axes(rows, monkeypatch)[1]
    assert unit in lower.get_xlabel()
    assert shown in [tick.get_text() for tick in lower.get_xticklabels()]


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path):
    rows = records(30, every=1)
    rows[3] |= {"loss": NAN, "dice": NAN, "seconds": NAN}
    rows[4] |= {"loss": float("inf"), "dice": None}
    del rows[5]["loss"]
    assert blue(drawn(tmp_path / "a.png", rows)).any()
    nothing = [{"epoch": 1, "step": 1, "loss": NAN, "dice": NAN, "seconds": NAN}]
    assert not orange(drawn(tmp_path / "b.png", nothing)).any()


def test_more_records_give_another_picture_and_the_same_ones_the_same_bytes(tmp_path: Path):
    path = tmp_path / "progress.png"
    drawn(path, records(10))
    first = path.read_bytes()
    drawn(path, records(10))
    assert path.read_bytes() == first
    drawn(path, records(11))
    assert path.read_bytes() != first
    assert list(tmp_path.iterdir()) == [path]
