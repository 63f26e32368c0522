"""Cleaning of label maps, and its choice on validation cases, against counting by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from medspeed.common.data.volumes import Volume, read_volume
from medspeed.common.inference.labels import LabelScheme, Region, case_dice, one_region_per_label
from medspeed.common.inference.postprocessing import (
    CaseParts,
    Postprocessing,
    Steps,
    case_parts,
    choose,
    logit_bars,
    robust_gain,
    thresholds,
)
from medspeed.common.inference.scans import clean_by_hand, clean_labels
from medspeed.data_scripts.make_phantoms import make_phantoms

ORGANS = one_region_per_label(("background", "liver", "spleen"))
TUMOUR = LabelScheme(
    ("background", "edema", "core"), (Region("WT", (1, 2), 1), Region("TC", (2,), 2)), exclusive=False
)  # fmt: skip


def cleaned_by_hand(labels, labelling, voxel_ml, *, largest=False, smallest_ml=0.0):
    return clean_labels(labels, labelling, voxel_ml, clean_by_hand(labelling, largest, smallest_ml))


def two_organs():
    labels = np.zeros((10, 8, 6), np.uint8, order="F")
    labels[0:4, 0:4, 0:4] = 1  # 64 voxels
    labels[6, 6, 0:2] = 1  # 2
    labels[8:10, 0:2, 0:2] = 2  # 8
    labels[5, 5, 5] = 2  # 1
    return labels


def test_each_label_keeps_its_own_largest_part():
    labels = two_organs()
    cleaned = cleaned_by_hand(labels, ORGANS, 0.001, largest=True)
    assert np.count_nonzero(cleaned == 1) == 64
    assert np.count_nonzero(cleaned == 2) == 8
    assert cleaned[6, 6, 0] == 0
    assert cleaned[5, 5, 5] == 0
    assert np.count_nonzero(labels) == 75  # the given map is left as it is


@pytest.mark.parametrize(
    ("smallest", "left"), [(0.0, 75), (0.001, 75), (0.002, 74), (0.0021, 72), (0.008, 72), (0.009, 64), (1, 0)]
)
def test_parts_below_a_volume_are_dropped(smallest, left):
    cleaned = cleaned_by_hand(two_organs(), ORGANS, 0.001, smallest_ml=smallest)
    assert np.count_nonzero(cleaned) == left


def test_voxels_that_share_a_corner_belong_together():
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = 1
    assert np.count_nonzero(cleaned_by_hand(labels, ORGANS, 1.0, largest=True)) == 2


def test_regions_that_overlap_are_cleaned_as_one():
    labels = np.zeros((10, 4, 4), np.uint8)
    labels[0:3] = 1
    labels[1, 1, 1] = labels[1, 3, 3] = 2  # two cores within one tumour: neither is a part of its own
    labels[6, 0, 0] = 2  # a finding elsewhere
    cleaned = cleaned_by_hand(labels, TUMOUR, 0.001, largest=True)
    assert np.count_nonzero(cleaned == 2) == 2
    assert cleaned[6, 0, 0] == 0
    assert np.array_equal(cleaned[:3], labels[:3])


def test_labels_with_a_sigmoid_each_are_cleaned_one_by_one():
    apart = replace(ORGANS, exclusive=False)
    assert np.array_equal(
        cleaned_by_hand(two_organs(), apart, 0.001, largest=True),
        cleaned_by_hand(two_organs(), ORGANS, 0.001, largest=True),
    )


def test_nothing_to_clean_gives_the_same_map():
    labels = two_organs()
    assert cleaned_by_hand(labels, ORGANS, 0.001) is labels
    empty = np.zeros((3, 3, 3), np.uint8)
    assert not cleaned_by_hand(empty, ORGANS, 0.001, largest=True).any()


def kept(mask, largest, fewest):
    """The wanted parts as SciPy numbers them: of equally large ones the first, slice by slice and row by row."""
    parts = ndimage.label(mask.T, np.ones((3, 3, 3)))[0].T
    voxels = np.bincount(parts.ravel())
    voxels[0] = 0
    wanted = voxels >= max(1, fewest)
    if largest and len(voxels) > 1:
        wanted &= np.arange(len(voxels)) == voxels.argmax()
    return wanted[parts]


@given(st.integers(0, 2**31), st.floats(0.02, 0.6), st.booleans(), st.integers(0, 12), st.sampled_from("CF"))
@settings(deadline=None)
def test_what_is_kept_are_the_parts_that_counting_keeps(seed, density, largest, fewest, order):
    labels = np.asarray(np.random.default_rng(seed).random((9, 7, 6)) < density, np.uint8, order=order)
    cleaned = cleaned_by_hand(labels, ORGANS, 1.0, largest=largest, smallest_ml=float(fewest))
    assert np.array_equal(cleaned == 1, kept(labels == 1, largest, fewest))


def test_of_two_equally_large_parts_the_lower_slice_stays():
    labels = np.zeros((8, 3, 8), np.uint8)
    labels[0, 0, 6] = labels[6, 0, 1] = 1
    for some in (labels, np.asfortranarray(labels)):
        cleaned = cleaned_by_hand(some, ORGANS, 1.0, largest=True)
        assert np.argwhere(cleaned).tolist() == [[6, 0, 1]]


@pytest.mark.parametrize("voxel_ml", [0.001, np.float32(0.001), 0.0010000001, 0.0009999999])
def test_rounding_of_the_spacing_changes_no_volume(voxel_ml):
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[:2, :2, :2] = 1  # 8 voxels of a mm3 are 0.008 ml
    assert cleaned_by_hand(labels, ORGANS, voxel_ml, smallest_ml=0.008).sum() == 8
    assert cleaned_by_hand(labels, ORGANS, voxel_ml, smallest_ml=0.0085).sum() == 0


def parts_of(labels, truth, labelling, voxel_ml=0.001) -> dict[Steps, CaseParts]:
    return {(): case_parts(labels, truth, labelling, voxel_ml)}


def specks(seed, labelling, count):
    """An organ of 216 voxels, found whole, and specks of the last label where nothing is; and the truth."""
    rng, truth = np.random.default_rng(seed), np.zeros((24, 24, 24), np.uint8, order="F")
    truth[2:8, 2:8, 2:8] = 1
    labels = truth.copy(order="F")
    for x, y in rng.permutation([(x, y) for x in range(10, 24, 3) for y in range(0, 24, 3)])[:count]:
        labels[x, y, 3] = len(labelling.labels) - 1
    return labels, truth


@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([0.0, 0.002, 0.004]), st.sampled_from([ORGANS, TUMOUR]))
@settings(deadline=None, max_examples=40)
def test_the_dice_after_a_choice_is_that_of_the_cleaned_maps(seed, largest, smallest_ml, labelling):
    rng, cases = np.random.default_rng(seed), []
    for _ in range(4):
        truth = ndimage.zoom(rng.integers(0, 3, (3, 3, 3)), 4, order=0).astype(np.uint8)
        noisy = np.where(rng.random(truth.shape) < 0.03, rng.integers(0, 3, truth.shape), truth).astype(np.uint8)
        cases.append((np.asarray(noisy, order="F"), truth))
    chosen, after = choose([parts_of(labels, truth, labelling) for labels, truth in cases], labelling)
    for (labels, truth), found in zip(cases, after, strict=True):
        counts = parts_of(clean_labels(labels, labelling, 0.001, chosen), truth, labelling)[()].counts
        assert case_dice(counts) == found


def test_specks_are_removed_from_the_structure_that_has_them():
    cases = [specks(seed, ORGANS, 5 + seed) for seed in range(4)]
    chosen, after = choose([parts_of(labels, truth, ORGANS) for labels, truth in cases], ORGANS)
    assert chosen == (
        Postprocessing(("spleen",), smallest_ml=0.01),
    )  # the first volume above a speck; the liver is whole
    assert after == [1.0] * 4


def test_regions_lose_their_specks_together():
    cases = [specks(seed, TUMOUR, 5 + seed) for seed in range(4)]
    for labels, truth in cases:
        labels[4, 4, 4] = truth[4, 4, 4] = 2  # a core, smaller than every volume, within the tumour
    chosen, after = choose([parts_of(labels, truth, TUMOUR) for labels, truth in cases], TUMOUR)
    assert chosen == (Postprocessing(("WT", "TC"), smallest_ml=0.01),)
    assert after == [1.0] * 4


def test_one_case_decides_nothing():
    cases = [specks(seed, ORGANS, 20 if seed == 0 else 0) for seed in range(5)]
    parts = [parts_of(labels, truth, ORGANS) for labels, truth in cases]
    chosen, after = choose(parts, ORGANS)
    assert chosen == ()
    assert after == [case_dice(each[()].counts) for each in parts] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_what_removes_true_parts_is_not_chosen():
    """Two true halves and specks larger than the smaller half: neither the largest nor a volume helps."""
    cases = []
    for _ in range(4):
        truth = np.zeros((30, 10, 10), np.uint8, order="F")
        truth[:6, :8, :8] = truth[8:14, :8, :8] = 1  # 384 voxels each
        labels = truth.copy(order="F")
        labels[20:28, :8, :8] = 1  # 512 false ones
        cases.append(parts_of(labels, truth, ORGANS))
    assert choose(cases, ORGANS)[0] == ()


def test_the_largest_part_alone_is_kept_where_no_volume_tells_it_from_false_ones():
    """250 false voxels of 0.001 ml beside 300 true ones: the volumes that are tried lie below both, or above."""
    truth = np.zeros((30, 10, 10), np.uint8, order="F")
    truth[:3] = 1
    labels = truth.copy(order="F")
    labels[20:25, :5] = 1
    chosen, after = choose([parts_of(labels, truth, ORGANS)] * 4, ORGANS)
    assert chosen == (Postprocessing(("liver",), largest=True),)
    assert after == [1.0] * 4
    assert str(chosen[0]) == "liver: only the largest component"


def test_the_gain_leaves_out_the_case_that_gains_most():
    assert robust_gain([0.5, 0.5, 0.5], [0.9, 0.6, 0.4]) == pytest.approx(0.0)
    assert robust_gain([0.5, 0.5, 0.5], [0.6, 0.6, 0.6]) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory) -> list[Volume]:
    """The label maps of eight CT phantoms."""
    folder = make_phantoms("ct", tmp_path_factory.mktemp("phantoms") / "data", 8)
    return [read_volume(path) for path in sorted((folder / "labelsTr").iterdir())]


def predicted(truth: np.ndarray, seed: int, planted: int) -> np.ndarray:
    """The truth with a ragged border, and balls of two to three voxels that belong to nothing."""
    rng = np.random.default_rng(seed)
    found = ndimage.binary_dilation(truth > 0, iterations=1) & (rng.random(truth.shape) < 0.7) | (truth > 0)
    centres = np.zeros(truth.shape, bool)
    centres[tuple(rng.integers(4, side - 4, planted) for side in truth.shape)] = True
    balls = ndimage.binary_dilation(centres, iterations=2)
    return np.asfortranarray(found | balls, np.uint8)


@pytest.mark.parametrize("planted", [0, 60])
def test_what_is_chosen_on_some_phantoms_raises_or_keeps_the_dice_of_others(phantoms, planted):
    labelling, cases = one_region_per_label(("background", "spleen")), []
    for number, truth in enumerate(phantoms):
        true = np.asfortranarray(truth.voxels > 0, np.uint8)
        cases.append((predicted(true, number, planted), true, truth.voxel_ml))
    validation = [parts_of(labels, true, labelling, voxel_ml) for labels, true, voxel_ml in cases[:4]]
    chosen, _ = choose(validation, labelling)
    assert bool(chosen) == bool(planted)
    for labels, true, voxel_ml in cases[4:]:
        cleaned = clean_labels(labels, labelling, voxel_ml, chosen)
        before, after = (case_dice(parts_of(each, true, labelling, voxel_ml)[()].counts) for each in (labels, cleaned))
        assert after >= before
        assert after > before + 0.02 or not planted


def test_the_threshold_of_one_structure_is_chosen_and_then_what_is_cleaned_of_that():
    """At 0.5 the tumour has a rim that is none, at 0.7 only specks; other thresholds of the core change nothing."""
    cases: list[dict[Steps, CaseParts]] = []
    better = Postprocessing(("WT",), threshold=0.7)
    for seed in range(4):
        labels, truth = specks(seed, TUMOUR, 9)
        labels[labels == 2] = 1
        rim = labels.copy(order="F")
        rim[2:8, 2:8, 8:12] = 1
        tried = {each: case_parts(labels if each == (better,) else rim, truth, TUMOUR, 0.001) for each in
                 [(), *thresholds(TUMOUR)]}  # fmt: skip
        assert len(tried) == 5  # as it is, and lower and higher for each of two regions
        cases.append(tried)
    chosen, after = choose(cases, TUMOUR)
    assert chosen == (better, Postprocessing(("WT", "TC"), smallest_ml=0.01))
    assert after == [1.0] * 4


def test_of_many_structures_no_threshold_is_tried():
    assert len(thresholds(one_region_per_label(("", *"abcd")))) == 8
    assert thresholds(one_region_per_label(("", *"abcde"))) == []


def test_a_threshold_is_subtracted_from_the_logits_of_its_structure():
    steps = (Postprocessing(("TC",), threshold=0.7), Postprocessing(("WT", "TC"), largest=True))
    assert logit_bars(TUMOUR, steps) == [0.0, pytest.approx(np.log(0.7 / 0.3))]
    lower = Postprocessing(("spleen",), threshold=0.3)
    assert logit_bars(ORGANS, (lower,)) == [0.0, 0.0, pytest.approx(np.log(0.3 / 0.7))]


@pytest.mark.parametrize("threshold", [0.0, 1.0, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold .*: must be a probability"):
        Postprocessing(("spleen",), threshold=threshold)


@pytest.mark.parametrize("volume", [-1.0, float("nan"), float("inf")])
def test_a_volume_that_is_none_is_refused(volume):
    with pytest.raises(ValueError, match=r"smallest_ml .*: must be a volume in ml"):
        Postprocessing(("spleen",), smallest_ml=volume)
