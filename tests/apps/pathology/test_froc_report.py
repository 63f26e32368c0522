import csv

import numpy as np
import pytest
from PIL import Image

from apps.pathology.froc import Detections, LesionMap, froc
from apps.pathology.froc_report import draw_froc, write_froc_csv


@pytest.fixture
def result():
    rng = np.random.default_rng(0)
    slides = []
    for _ in range(12):
        labels = np.zeros((60, 60), np.int32)
        labels[5:25, 5:25], labels[30:50, 30:50] = 1, 2
        x, y = rng.integers(0, 60, (2, 12))
        scores = np.clip(0.3 * rng.random(12) + 0.5 * (labels[y, x] > 0) + 0.2, 0, 1)
        slides.append((LesionMap(labels, ()), Detections(x, y, scores.astype(np.float32))))
    return froc(slides)


def test_the_table_is_the_curve(tmp_path, result):
    write_froc_csv(tmp_path / "froc.csv", result)
    with (tmp_path / "froc.csv").open() as stream:
        header, *rows = csv.reader(stream)
    assert header == ["false_positives_per_slide", "sensitivity"]
    assert [float(row[0]) for row in rows] == result.false_positives.tolist()
    assert [float(row[1]) for row in rows] == result.sensitivities.tolist()


def test_the_picture_shows_curve_and_score(tmp_path, result):
    draw_froc(tmp_path / "froc.png", result)
    with Image.open(tmp_path / "froc.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == (600, 840, 3)
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
        assert (np.abs(pixels - colour).max(axis=2) < 12).sum() > 200
