"""Measurements by hand."""

import csv
import math
import os
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medspeed.common.inference.labels import (
    Region,
    one_region_per_label,
)
from medspeed.common.inference.measure import Measures, measure
from medspeed.common.inference.scans import clean_by_hand, clean_labels
from medspeed.common.inference.scores import write_measures

SPLEEN = (Region("spleen", (1,), 1),)


def box(sides, at=(2, 3, 4), shape=(30, 30, 30)):
    labels = np.zeros(shape, np.uint8)
    labels[tuple(slice(start, start + side) for start, side in zip(at, sides, strict=True))] = 1
    return labels


def test_a_row_of_pixels_is_as_long_as_its_pixels():
    (found,) = measure(box((7, 1, 1)), np.diag([2.0, 1.5, 3.0, 1.0]), SPLEEN)
    assert (found.structure, found.voxels, found.parts) == ("spleen", 7, 1)
    assert found.volume_ml == pytest.approx(7 * 9 / 1000)
    assert (found.longest_axial_mm, found.short_axial_mm) == (14.0, 1.5)
    assert (found.extent_rl_mm, found.extent_pa_mm, found.extent_is_mm) == (14.0, 1.5, 3.0)


def test_a_disc_has_its_diameter():
    x, y = np.mgrid[:101, :101] - 50
    labels = np.zeros((101, 101, 3), np.uint8)
    labels[:, :, 1] = x**2 + y**2 <= 40**2
    labels[:, :, 0] = x**2 + y**2 <= 20**2
    (found,) = measure(labels, np.diag([0.5, 0.5, 5.0, 1.0]), SPLEEN)
    assert found.longest_axial_mm == pytest.approx(40.5, abs=0.3)  # 80 pixels between centres, and half one at each end
    assert found.short_axial_mm == pytest.approx(40.5, abs=0.3)


def test_an_oblique_bar_is_measured_across():
    labels = np.zeros((60, 60, 1), np.uint8)
    for step in range(40):
        labels[step : step + 3, step, 0] = 1
    (found,) = measure(labels, np.eye(4), SPLEEN)
    assert found.longest_axial_mm == pytest.approx(39 * math.sqrt(2) + 2.1, abs=1.0)
    assert found.short_axial_mm < 4.5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (1, 0, 2)])
def test_the_file_s_axes_do_not_matter(order):
    labels = box((9, 5, 3))
    affine = np.diag([1.0, 2.0, 4.0, 1.0])
    turned = np.eye(4)
    turned[:3, :3] = affine[:3, :3][:, order]
    turned[:, 0] *= -1  # and one of them runs the other way
    assert measure(labels.transpose(order), turned, SPLEEN) == measure(labels, affine, SPLEEN)


@given(st.floats(-0.6, 0.6), st.floats(-0.6, 0.6))
def test_a_shear_along_the_slices_changes_no_slice_and_no_volume(shift_x, shift_y):
    sheared = np.diag([1.0, 2.0, 3.0, 1.0])
    sheared[0, 2], sheared[1, 2] = shift_x, shift_y  # a tilted gantry
    plain, tilted = (measure(box((6, 4, 5)), affine, SPLEEN)[0] for affine in (np.diag([1.0, 2.0, 3.0, 1.0]), sheared))
    assert tilted.volume_ml == plain.volume_ml
    assert (tilted.longest_axial_mm, tilted.short_axial_mm) == (plain.longest_axial_mm, plain.short_axial_mm)


def test_the_longest_slice_is_found_whatever_the_boxes():
    rng = np.random.default_rng(0)
    labels = np.zeros((20, 20, 12), np.uint8)
    for index in range(12):
        labels[rng.integers(0, 20, 4), rng.integers(0, 20, 4), index] = 1
    (found,) = measure(labels, np.diag([1.0, 1.3, 2.0, 1.0]), SPLEEN)
    each = [measure(labels[:, :, [index]], np.diag([1.0, 1.3, 2.0, 1.0]), SPLEEN)[0] for index in range(12)]
    assert found.longest_axial_mm == max(one.longest_axial_mm for one in each)


def test_a_tiny_volume_is_not_rounded_away():
    """Of voxels of 0.05 mm, as the training cases' figures have it."""
    (found,) = measure(box((12, 12, 12)), np.diag([0.05, 0.05, 0.05, 1]), (Region("nodule", (1,), 1),))
    assert found.volume_ml == pytest.approx(12**3 * 0.05**3 / 1000, rel=1e-6)


def test_what_is_not_there_measures_nothing_and_overlapping_regions_count_twice():
    labels = box((4, 4, 4))
    labels[2, 3, 4] = 2
    whole, core, absent = measure(
        labels, np.eye(4), (Region("WT", (1, 2), 1), Region("TC", (2,), 2), Region("ET", (3,), 3))
    )
    assert (whole.voxels, core.voxels, absent.voxels) == (64, 1, 0)
    assert absent == Measures("ET", 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert core.longest_axial_mm == 1.0


def test_the_table_has_a_row_for_each_structure_and_no_formula(tmp_path):
    found = [asdict(each) for each in measure(box((2, 2, 2)), np.eye(4), SPLEEN)]
    write_measures(tmp_path / "m.csv", {"a.nii.gz": found, "=HYPERLINK(1).nii": found})
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert [row["scan"] for row in rows] == ["a.nii.gz", "'=HYPERLINK(1).nii"]
    assert (rows[0]["structure"], rows[0]["voxels"], rows[0]["volume_ml"]) == ("spleen", "8", "0.008")


def test_no_text_of_the_table_is_a_formula_or_goes_to_a_terminal(tmp_path):
    names = ["=cmd|'/C calc'!A0", "+1", "-1", "@a", " =1", "\t=1", "\uff1d1", "a\x1b[31m", os.fsdecode(b"\xe9")]
    labelling = one_region_per_label(["background", *names])
    found = [asdict(each) for each in measure(box((2, 2, 2)), np.eye(4), labelling.regions)]
    write_measures(tmp_path / "m.csv", dict.fromkeys(names, found[:1]) | {"a": found})
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    due = ["'=cmd|'/C calc'!A0", "'+1", "'-1", "'@a", "' =1", "'\\t=1", "'\uff1d1", "a\\x1b[31m", "\\udce9"]
    assert [row["scan"] for row in rows[: len(names)]] == due
    assert [row["structure"] for row in rows[len(names) :]] == due
    assert rows[0]["voxels"] == "8"


@pytest.mark.parametrize("shape", [(1, 1, 1), (24, 24, 1), (1, 24, 500), (3, 5, 7)])
def test_thin_and_scattered_masks_are_counted(shape):
    """cc3d by itself fails on them."""
    full, scattered = np.ones(shape, np.uint8), np.zeros(shape, np.uint8)
    scattered[::2, ::2, ::2] = 1
    assert measure(full, np.eye(4), SPLEEN)[0].parts == 1
    assert measure(scattered, np.eye(4), SPLEEN)[0].parts == scattered.sum()
    one = one_region_per_label(["background", "a"])
    assert np.array_equal(clean_labels(full, one, 1.0, clean_by_hand(one, True, 0.0)), full)
    assert not clean_labels(scattered, one, 1.0, clean_by_hand(one, False, 2.0)).any()
