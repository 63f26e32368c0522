import csv
import math

import numpy as np
import pytest
from PIL import Image
from scipy.stats import mannwhitneyu

from medspeed.apps.pathology.scan.froc import (
    FALSE_POSITIVE_RATES,
    auc,
    detect,
    find_lesions,
    froc,
    write_froc,
)


def detections(*found):
    """Build detections from (x, y, score)."""
    return np.array([(score, x, y) for x, y, score in found], np.float64).reshape(-1, 3)


def blobs(rng, size=80):
    mask = np.zeros((size, size + 7), bool)
    for _ in range(rng.integers(1, 7)):
        y, x = rng.integers(0, size, 2)
        height, width = rng.integers(1, 22, 2)
        mask[y : y + height, x : x + width] = rng.random(mask[y : y + height, x : x + width].shape) < 0.8
    mask[40, 40] = True
    return mask


@pytest.mark.filterwarnings("ignore:.*major_axis_length.* is deprecated")
def test_lesions_equal_monais():
    from monai.apps.pathology.utils import compute_isolated_tumor_cells, compute_multi_instance_mask

    rng, isolated = np.random.default_rng(0), 0
    for _ in range(20):
        mask, mpp = blobs(rng), rng.uniform(8, 30)
        lesions = find_lesions(mask, mpp)
        expected = compute_multi_instance_mask(mask.astype(np.uint8), 75 / (2 * mpp))
        assert np.array_equal(np.abs(lesions), expected)
        itc = compute_isolated_tumor_cells(expected, 275 / mpp)
        assert sorted(-np.unique(lesions[lesions < 0])) == sorted(itc)
        isolated += len(itc)
    assert isolated > 5


def test_detections_equal_monais_ties_included():
    from monai.apps.pathology.utils import PathologyProbNMS

    rng = np.random.default_rng(1)
    for box in (1, 4, 7, 48):
        for steps in (3, 20, 10**6):  # few steps: many ties
            probability = np.floor(rng.random((40, 61)) * steps).astype(np.float32) / np.float32(steps)
            expected = PathologyProbNMS(prob_threshold=0.5, box_size=box)(probability.copy())
            found = detect(probability, box)
            assert found.tolist() == [[float(score), x, y] for score, y, x in expected]


def test_scores_equal_monais():
    from monai.metrics.froc import compute_fp_tp_probs, compute_froc_curve_data, compute_froc_score

    rng = np.random.default_rng(2)
    for _ in range(20):
        slides: list[tuple[np.ndarray | None, np.ndarray]] = []
        false, found, targets = [], [], 0
        for _ in range(6):
            lesions = find_lesions(blobs(rng), 20.0)
            many = rng.integers(0, 40)
            x, y = rng.integers(0, 87, many), rng.integers(0, 80, many)
            scores = np.round(rng.random(many), 2).astype(np.float32)
            slides.append((lesions, np.stack([scores, x, y], 1)))
            isolated = [-number for number in np.unique(lesions) if number < 0]
            scored = compute_fp_tp_probs(scores, y, x, np.abs(lesions), isolated)
            false.extend(scored[0])
            found.extend(scored[1])
            targets += scored[2]
        slides.append((None, detections((3, 4, np.float32(0.7)))))
        false.append(np.float32(0.7))
        if not targets:
            continue
        rates, shares = compute_froc_curve_data(np.array(false), np.array(found), targets, len(slides))
        result = froc(slides)
        assert result is not None
        more = int(min(*false, *found) > 0)  # MONAI leaves out the lowest score even then
        assert np.array_equal(result.false_positives[more:], rates)
        assert np.array_equal(result.sensitivities[more:], shares)
        assert result.score == compute_froc_score(rates, shares)


def test_two_lesions_by_hand():
    labels = np.zeros((10, 10), np.int32)
    labels[0:3, 0:3], labels[5:8, 5:8] = 1, 2
    # Lesion 1 is hit twice and counts once, at 0.9; lesion 2 is missed; a false positive at 0.8, one elsewhere at 0.95.
    first = detections((0, 0, 0.9), (2, 1, 0.6), (9, 0, 0.8))
    result = froc([(labels, first), (None, detections((4, 4, 0.95)))])
    assert result is not None
    assert result.false_positives.tolist() == [1.0, 0.5, 0.5, 0]  # at 0.8, 0.9, 0.95, above
    assert result.sensitivities.tolist() == [0.5, 0.5, 0, 0]
    assert result.lesions == 2
    assert result.at_rates[2:] == (0.5,) * 4
    assert result.at_rates[0] == 0  # the curve rises only at half a false positive a slide


def test_where_no_lesion_is_missed_the_lowest_score_is_a_point_of_the_curve():
    labels = np.zeros((10, 10), np.int32)
    labels[0:2, 0:2], labels[4:6, 4:6], labels[8:10, 8:10] = 1, 2, 3
    result = froc([(labels, detections((0, 0, 0.9), (4, 4, 0.95), (8, 8, 0.99)))])
    assert result is not None
    assert result.sensitivities.tolist() == [1, 2 / 3, 1 / 3, 0]
    assert result.score == 1


def test_isolated_tumour_cells_are_neither_hits_nor_false_positives():
    labels = np.zeros((10, 10), np.int32)
    labels[0, 0], labels[5:8, 5:8] = -1, 2
    result = froc([(labels, detections((0, 0, 0.9), (6, 6, 0.8)))])
    assert result is not None
    assert result.lesions == 1
    assert result.sensitivities.tolist() == [1.0, 0]
    assert result.false_positives.tolist() == [0, 0]
    assert result.score == 1


def test_growth_joins_what_is_near_and_leaves_what_is_far():
    mask = np.zeros((60, 60), bool)
    mask[20, 10], mask[20, 16], mask[20, 40] = True, True, True
    lesions = find_lesions(mask, 10.0)  # grows by less than 3.75 pixels; the gap of 5 pixels closes
    assert lesions[20, 10] == lesions[20, 13] == lesions[20, 16] == -1  # isolated cells
    assert lesions[20, 40] == lesions[20, 43] == -2
    assert lesions[20, 44] == 0


def test_a_long_lesion_is_not_isolated_cells_and_a_hole_is_filled():
    mask = np.zeros((60, 60), bool)
    mask[10:40, 10:40] = True
    mask[20:32, 20:32] = False
    lesions = find_lesions(mask, 10.0)
    assert lesions[26, 26] == lesions.max() == 1
    # The square of side 30 grows to 36, long axis 4 * sqrt(36 ** 2 / 12) = 41.6 pixels less a little for its corners:
    # shorter than 275 um where a pixel is 5 um.
    assert find_lesions(mask[5:45, 5:45], 5.0).min() == -1


def test_no_lesion_and_no_detection():
    empty = find_lesions(np.zeros((9, 9), bool), 10.0)
    assert not empty.any()
    assert froc([(empty, detections((1, 1, 0.9))), (None, detections())]) is None
    missed = froc([(np.ones((9, 9), np.int32), detections()), (None, detections())])
    assert missed is not None
    assert missed.score == 0
    nothing = detect(np.full((9, 9), 0.5))
    assert nothing.shape == (0, 3)


def test_a_map_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite: scan again in fp32"):
        detect(np.array([[np.nan, 1.0]]))


def test_the_score_is_taken_at_the_challenges_rates():
    assert FALSE_POSITIVE_RATES == (0.25, 0.5, 1, 2, 4, 8)


def test_auc_by_hand_and_against_all_pairs():
    assert auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])) == 0.75
    assert auc(np.array([0, 1]), np.array([0.5, 0.5])) == 0.5
    rng = np.random.default_rng(3)
    labels, scores = rng.random(60) < 0.4, np.round(rng.random(60), 1)
    pairs = scores[labels][:, None] - scores[~labels]
    assert auc(labels, scores) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    assert auc(labels, scores) == mannwhitneyu(scores[labels], scores[~labels]).statistic / (
        labels.sum() * sum(~labels)
    )
    assert math.isnan(auc(np.array([0, 0, 1]), np.array([0.1, math.nan, 0.8])))
    with pytest.raises(ValueError, match="2 positive and 0 negative"):
        auc(np.array([1, 1]), np.array([0.2, 0.3]))


@pytest.fixture
def result():
    rng = np.random.default_rng(0)
    slides = []
    for _ in range(12):
        labels = np.zeros((60, 60), np.int32)
        labels[5:25, 5:25], labels[30:50, 30:50] = 1, 2
        x, y = rng.integers(0, 60, (2, 12))
        scores = np.clip(0.3 * rng.random(12) + 0.5 * (labels[y, x] > 0) + 0.2, 0, 1)
        slides.append((labels, np.stack([scores, x, y], 1)))
    return froc(slides)


def test_the_table_is_the_curve(tmp_path, result):
    write_froc(tmp_path, result)
    with (tmp_path / "froc.csv").open() as stream:
        header, *rows = csv.reader(stream)
    assert header == ["false_positives_per_slide", "sensitivity"]
    assert [float(row[0]) for row in rows] == result.false_positives.tolist()
    assert [float(row[1]) for row in rows] == result.sensitivities.tolist()


def test_the_picture_shows_curve_and_score(tmp_path, result):
    write_froc(tmp_path, result)
    with Image.open(tmp_path / "froc.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == (600, 840, 3)
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
        assert (np.abs(pixels - colour).max(axis=2) < 12).sum() > 200
