"""The progress picture: what is in it, for few and many records and for missing values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.observe.curves import draw_progress, smoothed

NAN = float("nan")


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
    for name, rows in {"none": records(20, every=99), "absent": [{**r} for r in records(20)]}.items():
        if name == "absent":
            for row in rows:
                del row["dice"]
        assert not orange(drawn(tmp_path / f"{name}.png", rows)).any()


def test_the_best_validation_has_the_star(tmp_path: Path):
    rows = records(21, every=1)
    for row in rows:
        row["dice"] = 0.9 if row["epoch"] == 6 else 0.1
    high = orange(drawn(tmp_path / "a.png", rows))[60:200, 110:880]  # Dice 0.1 lies far below
    columns = np.flatnonzero(high.sum(axis=0) > 8)
    assert 0.15 < columns.mean() / high.shape[1] < 0.4  # epoch 6 of 21


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


def test_smoothing():
    assert smoothed(np.array([])).size == 0
    assert smoothed(np.array([3.0])).tolist() == [3.0]
    flat = smoothed(np.array([2.0, 2.0, NAN, 2.0, 2.0]))
    np.testing.assert_allclose(flat, [2, 2, NAN, 2, 2])
    weights = np.exp(-0.5 * np.arange(4) ** 2)
    step = smoothed(np.array([0.0, 0.0, 0.0, 1.0]))  # at the first point: reach 3, sigma 1
    assert step[0] == pytest.approx(weights[3] / weights.sum())
    line = smoothed(np.linspace(0, 1, 400))
    np.testing.assert_allclose(line[30:-30], np.linspace(0, 1, 400)[30:-30])  # no lag
    noise = np.random.default_rng(0).normal(size=400)
    assert smoothed(noise).std() < 0.3
