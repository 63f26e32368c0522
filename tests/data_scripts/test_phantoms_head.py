"""MRI phantoms: tissues and tumours of the head, grids, and that the labels fit the image."""

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage

from medspeed.data_scripts.painting import Organ, Scan
from medspeed.data_scripts.phantoms import CORTEX, MIDDLE, NUMBERS, depths, draw_head, head, head_tissues

FLAIR, T1, T1GD, T2 = range(4)
FOLDS = 3.0  # far from the zeros that are sulci


def at(*points: tuple[float, float, float]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the depths at points, [N]."""
    x, y, z = (np.array([p[axis] for p in points], np.float32)[:, None, None] for axis in range(3))
    brain, solid = depths(x, y, z, np.full(x.shape, FOLDS, np.float32))
    return brain.ravel(), solid.ravel()


def test_labels_are_those_of_msd_task01() -> None:
    assert list(NUMBERS.values()) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_tissues_are_as_bright_as_in_each_weighting(seed: int) -> None:
    low, high = ({n: s[i] for n, s in head_tissues(np.random.default_rng(seed)).items()} for i in (0, 1))
    assert (low["white matter"] > high["grey matter"])[[T1, T1GD]].all()
    assert (low["grey matter"] > high["fluid"])[[FLAIR, T1, T1GD]].all()
    assert low["fluid"][T2] > high["grey matter"][T2] > low["grey matter"][T2] > high["white matter"][T2]
    assert min(low["edema"][FLAIR], low["changed white matter"][FLAIR]) > high["grey matter"][FLAIR]
    # contrast agent: vessels and choroid plexus take it up as the tumour's rim does
    for name in ("enhancing", "blood", "choroid plexus"):
        assert low[name][T1GD] > 1.15 * high["white matter"][T1GD]
        assert high[name][T1] < low["white matter"][T1]


def test_the_brain_is_as_large_as_a_brain() -> None:
    axes = [np.arange(-110, 111, 2, dtype=np.float32)] * 3
    x, y, z = np.meshgrid(*axes, indexing="ij")
    brain = depths(x, y, z, np.zeros_like(x))[0] > 0
    assert 1.2 < brain.sum() * 8 / 1e6 < 1.8  # litres
    sides = [np.ptp(np.flatnonzero(brain.any(axis=tuple({0, 1, 2} - {axis})))) * 2 for axis in range(3)]
    assert sides == [pytest.approx(134, abs=6), pytest.approx(172, abs=6), pytest.approx(154, abs=12)]


def test_depth_is_in_millimetres_from_the_lumpy_surface() -> None:
    # the widest place of the hemispheres, 67 mm from the middle, and 1.5 mm of lump per unit of the field
    brain, _ = at((70, -4, 0), (67, -4, 0), (77, -4, 0))
    assert brain == pytest.approx([-3 + 1.5 * FOLDS, 1.5 * FOLDS, -10 + 1.5 * FOLDS], abs=1)


def test_fluid_grey_and_white_matter_lie_where_they_should() -> None:
    middle = 0.6 * FOLDS  # of the fissure between the halves
    points = (30, 0, 30), (-30, 0, 30), (middle, 60, 30), (middle, -6, 10), (69, -4, 10), (90, 0, 0), (55, 2, -4)
    brain, solid = at(*points)
    white, other_white, fissure, callosum, cortex, outside, sylvian = solid
    assert min(white, other_white, callosum) > CORTEX
    assert 0 < cortex < CORTEX
    assert max(fissure, sylvian) < 0 < min(brain[2], brain[6])
    assert outside < brain[5] + 1 < -10


def lesions(seed: int) -> list[Organ]:
    return [organ for organ in head(np.random.default_rng(seed)) if organ.name in {"lesion", "open rim"}]


def test_lesions_have_edema_and_a_core_and_only_some_an_open_rim_or_none() -> None:
    organs = [organ for seed in range(120) for organ in lesions(seed)]
    whole = [organ for organ in organs if organ.name == "lesion"]
    assert all(next(iter(organ.layers)) == "edema" for organ in whole)
    none = sum("enhancing" not in organ.layers for organ in whole)
    assert 0.05 < none / len(whole) < 0.22
    assert 0.12 < (len(organs) - len(whole)) / len(whole) < 0.4
    assert 1.05 < len(whole) / 120 < 1.3


@pytest.mark.parametrize("seed", range(30))
def test_the_core_lies_inside_the_edema_and_the_rim_is_thick_enough(seed: int) -> None:
    lesion = lesions(seed)[0]
    half = np.array(lesion.balls[0][3:])
    assert 5 <= lesion.layers["edema"] <= 11
    assert 30 <= 2 * (half + lesion.layers["edema"]).min() <= 2 * (half + lesion.layers["edema"]).max() <= 75
    if "enhancing" in lesion.layers:
        assert 6 < -lesion.layers["non-enhancing"] < 12.2


@pytest.fixture(scope="module")
def scans() -> list[Scan]:
    return [draw_head("small", np.random.default_rng([7, index])) for index in range(14)]


def codes(scan: Scan) -> str:
    return "".join(nib.aff2axcodes(scan.affine))


def world(mask: npt.NDArray[np.bool_], scan: Scan) -> npt.NDArray[np.float64]:
    """Return where the voxels of a mask lie, mm to RAS [N, 3]."""
    places: npt.NDArray[np.float64] = nib.affines.apply_affine(scan.affine, np.argwhere(mask))
    return places


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
        whole, core, rim = (scan.label >= 1), (scan.label >= 2), (scan.label == 3)
        assert scan.label.max() <= 3
        assert 10 < whole.sum() * voxel < 250  # millilitres
        assert 2 < core.sum() * voxel < whole.sum() * voxel
        # what is beside the core is edema, but where a ventricle, the brain's surface or the midline cuts the lesion
        beside = ndimage.binary_dilation(core) & ~core
        assert whole[beside].mean() > 0.6
        rimless += not rim.any()
    assert rimless <= len(scans) // 2


def middle(scan: Scan, mask: npt.NDArray[np.bool_], channel: int) -> float:
    return float(np.median(scan.image[mask][:, channel]))


def test_the_tumour_looks_as_its_labels_say(scans: list[Scan]) -> None:
    ratios = []
    for scan in scans:
        edema, dead, rim = (scan.label == number for number in (1, 2, 3))
        healthy = (scan.image[..., 0] > 0) & (scan.label == 0)
        pairs = ((edema, healthy, FLAIR), (edema, healthy, T2), (healthy, edema, T1), (edema, dead, T1))
        ratios.append([middle(scan, one, channel) / middle(scan, other, channel) for one, other, channel in pairs])
        assert not rim.any() or middle(scan, rim, T1GD) > 1.4 * middle(scan, dead, T1GD)
    # the coil's bias may outweigh the contrast in one scan, not in most
    assert (np.median(ratios, axis=0) > (1.4, 1.2, 1.03, 1.3)).all()


def test_healthy_tissue_is_as_bright_as_the_tumour_somewhere(scans: list[Scan]) -> None:
    for scan in scans:
        if not (scan.label == 3).any():
            continue
        healthy = scan.image[(scan.image[..., 0] > 0) & ~ndimage.binary_dilation(scan.label, iterations=2)]
        for channel, number in ((T1GD, 3), (FLAIR, 1), (T2, 2)):
            alike = (healthy[:, channel] > np.percentile(scan.image[scan.label == number][:, channel], 20)).sum()
            assert alike > 100


def test_a_scan_of_msd_size() -> None:
    scan = draw_head("msd", np.random.default_rng([0, 1]))
    assert scan.image.shape == (240, 240, 155, 4)
    assert codes(scan) == "RAS"
    assert np.array_equal(scan.affine[:3, :3], np.eye(3))
    brain = scan.image[..., 0] > 0
    sides = [np.ptp(np.flatnonzero(brain.any(axis=tuple({0, 1, 2} - {axis})))) + 1 for axis in range(3)]
    assert sides == [pytest.approx(140, abs=15), pytest.approx(175, abs=15), pytest.approx(147, abs=9)]
    assert 10 < (scan.label > 0).sum() / 1000 < 250


def test_the_same_generator_gives_the_same_scan_and_another_another() -> None:
    first, again, other = (draw_head("small", np.random.default_rng([3, index])) for index in (0, 0, 1))
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.label, again.label)
    assert first.image.shape != other.image.shape or not np.array_equal(first.image, other.image)
