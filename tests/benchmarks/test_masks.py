"""Agreement of label maps, against answers by hand."""

import nibabel
import numpy as np
import pytest

from benchmarks.masks import least_dice, mean_dice, voxels_that_differ


@pytest.fixture
def pair(tmp_path):
    """Label 1 in 2 and 1 of 4 voxels, 1 of them common; label 2 in 1 and 1, none common; no label 3 in either."""
    for name, values in (("one", [1, 1, 2, 0]), ("other", [1, 0, 0, 2])):
        nibabel.save(
            nibabel.Nifti1Image(np.array(values, np.uint8).reshape(4, 1, 1), np.eye(4)), tmp_path / f"{name}.nii"
        )
    return tmp_path / "one.nii", tmp_path / "other.nii"


@pytest.mark.parametrize(
    ("members", "expected"),
    [((1,), 2 / 3), ((2,), 0.0), ((3,), 1.0), ((1, 2), 0.4)],  # of either label: voxels 3 and 2, one common
)
def test_dice_of_one_region(pair, members, expected):
    assert least_dice([pair], [members]) == pytest.approx(expected, abs=1e-5)


def test_the_least_and_the_mean_are_over_regions_and_pairs(pair):
    same = (pair[0], pair[0])
    assert least_dice([pair, same], [(1,), (3,)]) == pytest.approx(2 / 3, abs=1e-5)
    assert mean_dice([pair, same], [(1,), (3,)]) == pytest.approx((2 / 3 + 3) / 4, abs=1e-4)


def test_voxels_that_differ_are_counted_in_either_mask(pair):
    assert voxels_that_differ([pair, pair], (1,)) == 2
    assert voxels_that_differ([pair], (2,)) == 2
    assert voxels_that_differ([(pair[0], pair[0])], (1, 2)) == 0
