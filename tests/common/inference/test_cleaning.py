import numpy as np
import pytest

from common.inference.cleaning import clean_labels
from common.inference.labelling import Labelling, Region, one_region_per_label

ORGANS = one_region_per_label(("background", "liver", "spleen"))
TUMOUR = Labelling(
    ("background", "edema", "core"), (Region("WT", (1, 2), 1), Region("TC", (2,), 2)), exclusive=False
)  # fmt: skip


def two_organs():
    labels = np.zeros((10, 8, 6), np.uint8, order="F")
    labels[0:4, 0:4, 0:4] = 1  # 64 voxels
    labels[6, 6, 0:2] = 1  # 2
    labels[8:10, 0:2, 0:2] = 2  # 8
    labels[5, 5, 5] = 2  # 1
    return labels


def test_each_label_keeps_its_own_largest_part():
    labels = two_organs()
    cleaned = clean_labels(labels, ORGANS, 0.001, largest=True)
    assert np.count_nonzero(cleaned == 1) == 64
    assert np.count_nonzero(cleaned == 2) == 8
    assert cleaned[6, 6, 0] == 0
    assert cleaned[5, 5, 5] == 0
    assert np.count_nonzero(labels) == 75  # the given map is left as it is


@pytest.mark.parametrize(
    ("smallest", "left"), [(0.0, 75), (0.001, 75), (0.002, 74), (0.0021, 72), (0.008, 72), (0.009, 64), (1, 0)]
)
def test_parts_below_a_volume_are_dropped(smallest, left):
    cleaned = clean_labels(two_organs(), ORGANS, 0.001, smallest_ml=smallest)
    assert np.count_nonzero(cleaned) == left


def test_voxels_that_share_a_corner_belong_together():
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = 1
    assert np.count_nonzero(clean_labels(labels, ORGANS, 1.0, largest=True)) == 2


def test_regions_that_overlap_are_cleaned_as_one():
    labels = np.zeros((10, 4, 4), np.uint8)
    labels[0:3] = 1
    labels[1, 1, 1] = labels[1, 3, 3] = 2  # two cores within one tumour: neither is a part of its own
    labels[6, 0, 0] = 2  # a finding elsewhere
    cleaned = clean_labels(labels, TUMOUR, 0.001, largest=True)
    assert np.count_nonzero(cleaned == 2) == 2
    assert cleaned[6, 0, 0] == 0
    assert np.array_equal(cleaned[:3], labels[:3])


def test_nothing_to_clean_gives_the_same_map():
    labels = two_organs()
    assert clean_labels(labels, ORGANS, 0.001) is labels
    empty = np.zeros((3, 3, 3), np.uint8)
    assert not clean_labels(empty, ORGANS, 0.001, largest=True).any()
