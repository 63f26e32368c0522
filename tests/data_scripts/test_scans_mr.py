"""Head MRI scans: their grids, what is in them, and that the labels fit the image."""

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage

from data_scripts.painting import Grid, Part, boxes_of, ellipsoid, lay
from data_scripts.phantom_sets import Scan
from data_scripts.phantoms_mr import EDEMA, ENHANCING, NON_ENHANCING
from data_scripts.scans_mr import MIDDLE, draw_scan

FLAIR, T1, T1GD, T2 = range(4)


@pytest.fixture(scope="module")
def scans() -> list[Scan]:
    return [draw_scan("small", np.random.default_rng([7, index])) for index in range(14)]


def codes(scan: Scan) -> str:
    return "".join(nib.aff2axcodes(scan.affine))


def world(mask: npt.NDArray[np.bool_], scan: Scan) -> npt.NDArray[np.float64]:
    """Return where the voxels of a mask lie, mm to RAS [N, 3]."""
    places: npt.NDArray[np.float64] = nib.affines.apply_affine(scan.affine, np.argwhere(mask))
    return places


def test_a_part_with_a_value_for_each_channel_is_laid_over_each() -> None:
    grid = Grid((9, 9, 9), (1.0, 1.0, 1.0), (-4.0, -4.0, -4.0))
    part = Part("x", np.array([10.0, -2.0]), (ellipsoid((0, 0, 0), (3.5, 3.5, 3.5)),), label=2)
    values, labels = np.ones((2, *grid.shape), np.float32), np.zeros(grid.shape, np.uint8)
    scene = list(zip([part], boxes_of([part], grid), strict=True))
    lay(values, labels, grid, slice(0, 9), scene, np.zeros(grid.shape, np.float32))
    # along x the surface lies 3.5 mm out: voxel 3 is just inside, voxel 4 outside
    assert values[0, 4:, 4, 4].tolist() == pytest.approx([10, 10, 10, 10, 1], abs=1e-5)
    assert values[1, 4:, 4, 4].tolist() == pytest.approx([-2, -2, -2, -2, 1], abs=1e-5)
    # both channels are covered by the same share of each voxel
    assert (values[0] - 1) / 9 == pytest.approx((values[1] - 1) / -3, abs=1e-6)
    assert labels[4, 4].tolist() == [0, 2, 2, 2, 2, 2, 2, 2, 0]


def test_small_scans_keep_to_their_sizes_and_types(scans: list[Scan]) -> None:
    for scan in scans:
        assert scan.image.dtype == np.int16
        assert scan.label.dtype == np.uint8
        assert scan.image.shape == (*scan.label.shape, 4)
        assert all(low <= n <= high for n, low, high in zip(scan.label.shape, (68, 84, 64), (76, 92, 70), strict=True))
        spacing = np.linalg.norm(scan.affine[:3, :3], axis=0)
        assert spacing == pytest.approx([spacing[0]] * 3)
        assert 2.2 <= spacing[0] <= 2.4


def test_shape_spacing_orientation_and_gain_vary(scans: list[Scan]) -> None:
    assert len({scan.image.shape for scan in scans}) > 8
    assert {codes(scan) for scan in scans} == {"RAS", "LPS"}
    brightest = np.array([np.percentile(scan.image, 99, axis=(0, 1, 2)) for scan in scans])
    assert (brightest.max(axis=0) > 2 * brightest.min(axis=0)).all()


def test_all_channels_are_zero_outside_the_brain_and_none_inside(scans: list[Scan]) -> None:
    for scan in scans:
        inside = scan.image > 0
        assert scan.image.min() == 0
        assert np.array_equal(inside.all(axis=-1), inside.any(axis=-1))
        brain = inside[..., 0]
        # one piece, with a rim of nothing around it but below, where the stem may leave the field of view
        sizes = np.bincount(ndimage.label(brain)[0].ravel())[1:]
        assert sizes.max() / sizes.sum() > 0.999
        faces = brain[0], brain[-1], brain[:, 0], brain[:, -1], brain[..., -1]
        assert not any(face.any() for face in faces)
        assert 0.2 < brain.mean() < 0.5
        assert not scan.label[~brain].any()


def test_the_affine_says_where_the_head_lies(scans: list[Scan]) -> None:
    for scan in scans:
        places = world(scan.image[..., 0] > 0, scan)
        assert np.abs(places.mean(axis=0) - MIDDLE).max() < 12
        # cerebellum and stem lie low and behind
        low = places[:, 2] < np.percentile(places[:, 2], 8)
        assert places[low, 1].mean() < places[:, 1].mean() - 10


def test_labels_are_nested_and_of_decent_size(scans: list[Scan]) -> None:
    rimless = 0
    for scan in scans:
        voxel = abs(np.linalg.det(scan.affine[:3, :3])) / 1000
        whole, core, rim = (scan.label >= EDEMA), (scan.label >= NON_ENHANCING), (scan.label == ENHANCING)
        assert scan.label.max() <= ENHANCING
        assert 10 < whole.sum() * voxel < 250  # millilitres
        assert 2 < core.sum() * voxel < whole.sum() * voxel
        # what is beside the core is edema, but where a ventricle, the brain's surface or the midline cuts the lesion
        beside = ndimage.binary_dilation(core) & ~core
        assert whole[beside].mean() > 0.6
        rimless += not rim.any()
    assert 1 <= rimless <= len(scans) // 2


def middle(scan: Scan, mask: npt.NDArray[np.bool_], channel: int) -> float:
    return float(np.median(scan.image[mask][:, channel]))


def test_the_tumour_looks_as_its_labels_say(scans: list[Scan]) -> None:
    ratios = []
    for scan in scans:
        edema, dead, rim = (scan.label == number for number in (EDEMA, NON_ENHANCING, ENHANCING))
        healthy = (scan.image[..., 0] > 0) & (scan.label == 0)
        pairs = ((edema, healthy, FLAIR), (edema, healthy, T2), (healthy, edema, T1), (edema, dead, T1))
        ratios.append([middle(scan, one, channel) / middle(scan, other, channel) for one, other, channel in pairs])
        assert not rim.any() or middle(scan, rim, T1GD) > 1.4 * middle(scan, dead, T1GD)
    # the coil's bias may outweigh the contrast in one scan, not in most
    assert (np.median(ratios, axis=0) > (1.4, 1.2, 1.03, 1.3)).all()


def test_healthy_tissue_is_as_bright_as_the_tumour_somewhere(scans: list[Scan]) -> None:
    for scan in scans:
        if not (scan.label == ENHANCING).any():
            continue
        healthy = scan.image[(scan.image[..., 0] > 0) & ~ndimage.binary_dilation(scan.label, iterations=2)]
        for channel, number in ((T1GD, ENHANCING), (FLAIR, EDEMA), (T2, NON_ENHANCING)):
            alike = (healthy[:, channel] > np.percentile(scan.image[scan.label == number][:, channel], 20)).sum()
            assert alike > 100


def test_a_scan_of_msd_size() -> None:
    scan = draw_scan("msd", np.random.default_rng([0, 1]))
    assert scan.image.shape == (240, 240, 155, 4)
    assert codes(scan) == "RAS"
    assert np.array_equal(scan.affine[:3, :3], np.eye(3))
    brain = scan.image[..., 0] > 0
    sides = [np.ptp(np.flatnonzero(brain.any(axis=tuple({0, 1, 2} - {axis})))) + 1 for axis in range(3)]
    assert sides == [pytest.approx(140, abs=15), pytest.approx(175, abs=15), pytest.approx(147, abs=9)]
    assert 10 < (scan.label > 0).sum() / 1000 < 250


def test_the_same_generator_gives_the_same_scan_and_another_another() -> None:
    first, again, other = (draw_scan("small", np.random.default_rng([3, index])) for index in (0, 0, 1))
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.label, again.label)
    assert first.image.shape != other.image.shape or not np.array_equal(first.image, other.image)
