"""CT phantoms: the anatomy, grids, how the patient lies in them, and scans around given labels."""

from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage

from medspeed.data_scripts.painting import Scan, draw
from medspeed.data_scripts.phantoms import CAVITY, SPLEEN_CENTRE, abdomen, abdomen_tissues, draw_abdomen, scan_around

RAS = np.diag([2.0, 2.0, 4.0, 1.0])


@pytest.fixture(scope="module")
def scans() -> list[Scan]:
    return [draw_abdomen("small", np.random.default_rng([7, index])) for index in range(16)]


def blob(shape: tuple[int, int, int], centre: tuple[int, int, int], radius: float = 12) -> npt.NDArray[np.uint8]:
    axes = np.ogrid[tuple(slice(0, n) for n in shape)]
    distance = sum((axis - c) ** 2 for axis, c in zip(axes, centre, strict=True))
    return np.asarray(distance < radius**2, dtype=np.uint8)


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_are_like_the_spleen_in_hounsfield_units(seed: int) -> None:
    value = {name: np.mean(bounds) for name, bounds in abdomen_tissues(np.random.default_rng(seed)).items()}
    assert abs(value["liver"] - value["spleen"]) <= 6
    assert 20 <= value["kidney"] - value["spleen"] <= 30
    assert 20 <= value["spleen"] - value["stomach"] <= 30
    assert 100 <= value["spleen"] <= 110
    assert value["lung"] == -850
    assert -115 <= value["fat"] <= -85
    assert 45 <= value["muscle"] <= 65
    assert 300 <= value["bone"] <= 1000


def test_only_the_spleen_is_labelled_and_it_is_painted_last() -> None:
    rng = np.random.default_rng(0)
    parts = draw(abdomen(20), abdomen_tissues(rng), {"spleen": 1}, np.eye(4), rng)
    assert [part.label for part in parts[-2:]] == [0, 1]
    assert sum(part.label for part in parts) == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_spleen_lies_left_and_behind_and_touches_like_tissue(seed: int) -> None:
    label = np.zeros((96, 70, 60), np.uint8)
    scan = scan_around(label, np.diag([3.5, 3.5, 3.5, 1]), np.random.default_rng(seed))
    assert not scan.label.any()
    scan = draw_abdomen("small", np.random.default_rng([2, seed])).turned("RAS")
    spleen = scan.label == 1
    spacing = np.linalg.norm(scan.affine[:3, :3], axis=0)
    middle = (np.argwhere(spleen).mean(axis=0) - (np.array(spleen.shape) - 1) / 2) * spacing
    assert np.abs(middle - SPLEEN_CENTRE)[:2].max() < 30
    assert ndimage.label(spleen)[1] == 1
    # of the voxels around it, some are of like HU: no threshold cuts it out
    rim = ndimage.binary_dilation(spleen, iterations=2) & ~ndimage.binary_dilation(spleen)
    assert ((scan.image[rim] > 60) & (scan.image[rim] < 150)).mean() > 0.1
    assert np.abs(middle[0]) < CAVITY[0]


def test_scans_show_air_lung_fat_muscle_organs_and_bone(scans: list[Scan]) -> None:
    bounds = {
        "air": (-2000, -950), "lung": (-900, -800), "fat": (-130, -70), "muscle": (40, 70), "organs": (70, 145),
        "bone": (250, 1000),
    }  # fmt: skip
    least = {"air": 0.1, "lung": 0.01, "fat": 0.1, "muscle": 0.05, "organs": 0.08, "bone": 0.003}
    images = [ndimage.median_filter(scan.image, 3) for scan in scans[:6]]
    for name, (low, high) in bounds.items():
        assert np.mean([((image > low) & (image < high)).mean() for image in images]) > least[name], name


def codes(affine: npt.NDArray[np.float64]) -> str:
    return "".join(nib.aff2axcodes(affine))


def test_small_scans_keep_to_their_sizes(scans: list[Scan]) -> None:
    for scan in scans:
        assert scan.image.dtype == np.int16
        assert scan.label.dtype == np.uint8
        assert scan.image.shape == scan.label.shape
        turn = nib.io_orientation(scan.affine)
        across = nib.orientations.apply_orientation(scan.label, turn).shape
        spacing = np.linalg.norm(scan.affine[:3, :3], axis=0)[np.argsort(turn[:, 0])]
        assert 80 <= min(across[:2]) <= max(across[:2]) <= 112
        assert 48 <= across[2] <= 72
        assert spacing[0] == pytest.approx(spacing[1])
        assert 3 <= spacing[0] <= 4
        assert 3 <= spacing[2] <= 5


def test_shape_spacing_orientation_and_origin_vary(scans: list[Scan]) -> None:
    assert len({scan.image.shape for scan in scans}) > 8
    assert len({codes(scan.affine) for scan in scans}) >= 4
    assert len({tuple(scan.affine[:3, 3]) for scan in scans}) == len(scans)


def test_the_spleen_is_in_view_in_one_piece_and_of_varying_size(scans: list[Scan]) -> None:
    volumes = []
    for scan in scans:
        assert set(np.unique(scan.label)) == {0, 1}
        sizes = np.bincount(ndimage.label(scan.label)[0].ravel())[1:]
        assert sizes.max() / sizes.sum() > 0.98
        volumes.append(sizes.sum() * abs(np.linalg.det(scan.affine[:3, :3])) / 1000)
    assert min(volumes) > 40
    assert max(volumes) > 1.8 * min(volumes)


def test_the_spleen_is_always_on_the_patients_left(scans: list[Scan]) -> None:
    for scan in scans:
        upright = nib.as_closest_canonical(nib.Nifti1Image(scan.label, scan.affine)).get_fdata()
        # left of the middle in RAS: a low first index
        assert np.argwhere(upright)[:, 0].mean() < upright.shape[0] / 2


def test_some_fields_of_view_cut_the_spleen(scans: list[Scan]) -> None:
    uprights = [nib.as_closest_canonical(nib.Nifti1Image(scan.label, scan.affine)).get_fdata() for scan in scans]
    cut = [bool(upright[:, :, 0].any() or upright[:, :, -1].any()) for upright in uprights]
    assert 1 <= sum(cut) <= len(cut) // 2


def test_a_scan_of_msd_size() -> None:
    scan = draw_abdomen("msd", np.random.default_rng([0, 1]))
    assert scan.image.shape[:2] == (512, 512)
    assert 50 <= scan.image.shape[2] <= 168
    spacing = np.linalg.norm(scan.affine[:3, :3], axis=0)
    assert spacing[0] == pytest.approx(spacing[1])
    assert 0.6 <= spacing[0] <= 0.98
    assert 2.5 <= spacing[2] <= 8
    assert 40 < scan.label.sum() * np.prod(spacing) / 1000 < 600


@pytest.mark.parametrize("axes", ["RAS", "LPS", "LAS", "SLP"])
def test_a_scan_around_a_label_keeps_its_grid_and_surrounds_it(axes: str) -> None:
    turn = nib.orientations.ornt_transform(nib.io_orientation(RAS), nib.orientations.axcodes2ornt(axes))
    label = nib.orientations.apply_orientation(blob((170, 150, 60), (40, 60, 30), 14), turn)
    affine = RAS @ nib.orientations.inv_ornt_aff(turn, (170, 150, 60))
    scan = scan_around(label, affine, np.random.default_rng(0))
    assert np.array_equal(scan.label, label)
    assert np.array_equal(scan.affine, affine)
    assert scan.image.shape == label.shape
    upright = nib.orientations.apply_orientation(scan.image, nib.io_orientation(affine)).astype(float)
    assert 95 < upright[35:45, 55:65, 28:33].mean() < 120
    # the liver: on the other side, of like HU; the spine: bone in the middle
    assert 60 < np.median(upright[110:130, 60:85, 32:36]) < 125
    assert (upright[75:95, 45:85] > 250).mean() > 0.02
    # soft tissue or fat all around the label, no air but in lung, stomach or bowel
    rim = ndimage.binary_dilation(label, iterations=3) & ~ndimage.binary_dilation(label)
    assert np.median(scan.image[rim]) > -150


def test_the_border_of_a_given_label_is_soft() -> None:
    label = blob((170, 150, 60), (40, 60, 30), 14)
    image = np.mean([scan_around(label, RAS, np.random.default_rng(s)).image for s in range(6)], axis=0)
    inner = (label == 1) & ~ndimage.binary_erosion(label)
    deep = ndimage.binary_erosion(label, iterations=3)
    assert image[deep].std() < 25
    assert image[deep].mean() - image[inner].mean() > 10


def test_a_label_on_the_patients_right_gives_a_mirrored_patient() -> None:
    scan = scan_around(blob((170, 150, 60), (130, 60, 30), 14), RAS, np.random.default_rng(0))
    assert 60 < np.median(scan.image[40:60, 60:85, 32:36]) < 125


def test_label_numbers_above_one_are_kept_and_painted() -> None:
    label = blob((170, 150, 60), (40, 60, 30), 14)
    label[blob(label.shape, (40, 60, 30), 5) > 0] = 2
    scan = scan_around(label, RAS, np.random.default_rng(0))
    assert np.array_equal(scan.label, label)
    organ, lesion = scan.image[ndimage.binary_erosion(label == 1)], scan.image[ndimage.binary_erosion(label == 2)]
    assert organ.mean() - lesion.mean() == pytest.approx(15, abs=6)


def test_a_label_without_foreground_and_an_oblique_grid_do_no_harm() -> None:
    turn = np.eye(4)
    turn[:2, :2] = np.array([[0.96, -0.28], [0.28, 0.96]])
    scan = scan_around(np.zeros((60, 50, 20), np.uint8), turn @ np.diag([5.0, 5, 8, 1]), np.random.default_rng(0))
    assert not scan.label.any()
    assert (scan.image > 0).mean() > 0.1


@pytest.mark.real_data
def test_a_real_label_is_enclosed_by_the_body(real_data: Path) -> None:
    source = nib.load(real_data / "msd_spleen_labels" / "labelsTr" / "spleen_56.nii.gz")
    label = np.asarray(source.dataobj)
    scan = scan_around(label, source.affine, np.random.default_rng(0))
    assert np.array_equal(scan.label, label)
    rim = ndimage.binary_dilation(label, iterations=8) & (label == 0)
    assert (scan.image[rim] > -300).mean() > 0.7
