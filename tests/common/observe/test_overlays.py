"""The overlay picture: what it shows, its pixels, its size, and that nothing odd breaks it."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import apply_orientation, inv_ornt_aff
from PIL import Image

from medspeed.common.observe.overlays import _slice, close_up_of, draw_overlay, oriented_scan, picture

AFFINE = np.diag([3.0, 3.0, 3.0, 1.0])
AXIAL, CORONAL, SAGITTAL = 2, 1, 0
ORIENTATIONS = [
    np.array([*zip(axes, flips, strict=True)])
    for axes in itertools.permutations(range(3))
    for flips in itertools.product((1, -1), repeat=3)
]


def whole(image: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(0, side) for side in image.shape)


def marked() -> tuple[np.ndarray, np.ndarray]:
    """Return an R, A, S image whose brightest voxel is far right, anterior and superior, and its affine."""
    image = np.zeros((9, 8, 7), dtype=np.float32)
    image[7, 6, 5] = 100
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    affine[:3, 3] = (-10, 20, -300)
    return image, affine


@pytest.mark.parametrize("turn", ORIENTATIONS, ids=lambda turn: "".join(nib.orientations.ornt2axcodes(turn)))
def test_every_orientation_is_shown_alike(turn: np.ndarray):
    image, affine = marked()
    labels = (image > 0).astype(np.uint8)
    turned = oriented_scan(
        apply_orientation(image, turn),
        apply_orientation(labels, turn),
        affine @ inv_ornt_aff(turn, image.shape),
        window=(0, 100),
    )
    assert np.array_equal(turned.image, image)
    assert np.allclose(turned.affine, affine)
    assert turned.largest == (7, 6, 5)
    # The patient's right is on the left, anterior (in sagittal planes: left) and superior are up.
    for plane, index, row, column in ((AXIAL, 5, 1, 1), (CORONAL, 6, 1, 1), (SAGITTAL, 7, 1, 1)):
        assert picture(turned.image, whole(turned.image), plane, index)[row, column] == 100


def test_pictures_are_rows_by_columns_and_named_by_their_place_in_mm():
    image, affine = marked()
    scan = oriented_scan(image, np.zeros(image.shape, np.uint8), affine)
    box = whole(image)
    assert [picture(image, box, plane, 0).shape for plane in (AXIAL, CORONAL, SAGITTAL)] == [(8, 9), (7, 9), (7, 8)]
    assert scan.caption(box, AXIAL, 3) == "axial, z = -288 mm"
    assert scan.caption(box, SAGITTAL, 3) == "sagittal, x = -4 mm"


def test_slices_cut_the_foreground_where_it_is_largest():
    image, labels, truth = np.zeros((20, 20, 30)), np.zeros((20, 20, 30), np.uint8), np.zeros((20, 20, 30), np.uint8)
    labels[4:9, 5:12, 6] = 1
    labels[4, 5, 6:16] = 2
    truth[2, 3, 20] = 1  # the truth counts for the extent as well
    scan = oriented_scan(image, labels, np.eye(4), truth)
    assert scan.largest == (4, 5, 6)
    assert scan.extent == ((2, 8), (3, 11), (6, 20))
    nothing = oriented_scan(np.zeros((20, 10, 30)), np.zeros((20, 10, 30), np.uint8), np.eye(4))
    assert nothing.largest == (10, 5, 15)


def test_a_slice_of_a_box_is_the_boxs_part_of_it():
    image, _ = marked()
    box = np.s_[2:9, 3:8, 4:7]
    for plane in (AXIAL, CORONAL, SAGITTAL):
        index = (7, 6, 5)[plane]
        others = [side for axis, side in enumerate(box) if axis != plane]
        due = np.take(image, index, plane)[tuple(others)].T[::-1, ::-1]
        assert np.array_equal(picture(image, box, plane, index), due)


def test_close_ups_hold_the_foreground_and_stay_inside():
    labels = np.zeros((60, 50, 30), np.uint8)
    labels[50:58, 20:24, 5:25] = 1  # 8 x 4 mm, near the left edge
    box = close_up_of(oriented_scan(np.zeros(labels.shape), labels, np.eye(4)))
    assert box == np.s_[2:60, 0:50, 0:30]  # 8 + 2 * 25 mm, at most the scan


def test_window_from_percentiles_without_the_darkest():
    image = np.zeros((10, 10, 20), np.float16)
    image[:, :, 10:] = np.arange(1000).reshape(10, 10, 10) + 1
    empty = np.zeros(image.shape, np.uint8)
    low, high = oriented_scan(image, empty, np.eye(4)).window
    assert low == pytest.approx(6, abs=1)
    assert high == pytest.approx(995, abs=1.5)
    assert oriented_scan(0 * image, empty, np.eye(4)).window == (0, 1)
    low, high = oriented_scan(np.full((4, 4, 4), 1e30), empty[:4, :4, :4], np.eye(4)).window
    assert low < high
    assert oriented_scan(image, empty, np.eye(4), window=(1, 2)).window == (1, 2)


def phantom(shape: tuple[int, int, int] = (60, 50, 40)) -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy body with one bright organ, and the organ's label."""
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, side) for side in shape), indexing="ij"))
    image = np.where((grid[:2] ** 2).sum(0) < 0.8, 20.0, -1000.0)
    organ = ((grid - np.array([-0.4, -0.1, 0.1])[:, None, None, None]) ** 2).sum(0) < 0.1
    image[organ] += 60
    noise = np.random.default_rng(0).normal(scale=25, size=shape)
    return (image + noise).astype(np.float32), organ.astype(np.uint8)


def drawn(path: Path, *arguments: Any, **options: Any) -> np.ndarray:
    """Draw an overlay; return its pixels [rows, columns, 3] as signed integers."""
    words = {name: options.pop(name) for name in ("names", "title") if name in options}
    draw_overlay(path, oriented_scan(*arguments, **options), **words)
    with Image.open(path) as drawn_picture:
        assert drawn_picture.format == "PNG"
        return np.asarray(drawn_picture.convert("RGB")).astype(int)


def coloured(pixels: np.ndarray) -> np.ndarray:
    """Return where pixels have a colour, above the legend."""
    mask: np.ndarray = np.ptp(pixels, axis=-1) > 40
    mask[-40:] = False
    return mask


def test_prediction_is_filled_where_it_is(tmp_path: Path):
    image, organ = phantom()
    pixels = drawn(tmp_path / "overlay.png", image, organ, AFFINE, window=(-57, 164), title="case")
    assert pixels.shape[1] == 1170
    assert 400 < pixels.shape[0] < 1000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # grey levels, not a blank sheet
    orange = coloured(pixels)
    assert orange.sum() > 5000
    red, green, blue = pixels[orange].mean(axis=0)
    assert red > green > blue
    # The organ is on the patient's left: on the right half of the first panel, which fills the left third.
    columns = np.flatnonzero(orange[60:300, :360].any(axis=0))
    assert 190 < columns.mean() < 340


def test_another_mask_gives_another_picture_and_the_same_one_the_same_bytes(tmp_path: Path):
    image, organ = phantom()
    shifted = np.roll(organ, 2, axis=1)
    first, again, other, outlined = (tmp_path / f"{name}.png" for name in "abcd")
    a = drawn(first, image, organ, AFFINE)
    drawn(again, image, organ, AFFINE)
    drawn(other, image, shifted, AFFINE)
    d = drawn(outlined, image, organ, AFFINE, truth=organ)
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()
    assert coloured(d).sum() > coloured(a).sum()  # the outline adds to the fill
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png", "c.png", "d.png"]  # nothing left over


def test_truth_alone_is_outlined_only(tmp_path: Path):
    image, organ = phantom()
    empty = np.zeros_like(organ)
    outline = coloured(drawn(tmp_path / "a.png", image, empty, AFFINE, truth=organ)).sum()
    fill = coloured(drawn(tmp_path / "b.png", image, organ, AFFINE)).sum()
    assert 0 < outline < 0.5 * fill
    assert coloured(drawn(tmp_path / "c.png", image, empty, AFFINE)).sum() == 0


def test_rare_colours_survive(tmp_path: Path):
    image, organ = phantom()
    organ[organ > 0] = 2
    organ[18, 22, 20:24] = 3  # four voxels of yellow
    pixels = drawn(tmp_path / "a.png", image, organ, AFFINE, names=("background", "a", "b", "c"))
    red, green, blue = (pixels[..., channel] for channel in range(3))
    above_legend = np.arange(len(pixels))[:, None] < len(pixels) - 40
    assert ((blue > red + 40) & above_legend).any()
    assert ((red > blue + 60) & (green > blue + 60) & (abs(red - green) < 30) & above_legend).any()


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 5.0), (2.0, 2.0, 2.0), (4.0, 1.0, 1.0)])
def test_the_aspect_is_that_of_the_patient(tmp_path: Path, spacing: tuple[float, float, float]):
    sides = [round(160 / mm) for mm in spacing]
    image, labels = np.zeros(sides), np.zeros(sides, np.uint8)
    labels[tuple(slice(round(60 / mm), round(100 / mm)) for mm in spacing)] = 1  # a cube of 40 mm
    mask = coloured(drawn(tmp_path / "a.png", image, labels, np.diag([*spacing, 1.0]), window=(-1, 1)))
    top = mask[:420]
    for left in (0, 390, 780):  # axial, coronal, sagittal
        rows, columns = np.nonzero(top[:, left : left + 390])
        assert np.ptp(rows) == pytest.approx(np.ptp(columns), abs=3)
        assert np.ptp(rows) > 60


@pytest.mark.parametrize("shape", [(1, 40, 40), (40, 40, 1), (5, 5, 200), (200, 5, 5), (2, 2, 2)])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, int, int]):
    labels = np.ones(shape, np.uint8)
    assert coloured(drawn(tmp_path / "a.png", np.ones(shape), labels, np.eye(4), truth=labels)).any()


def test_names_are_plain_text(tmp_path: Path):
    image, organ = phantom()
    names = ("background", "_$x^{2$ <img src=x>\n\x00 and a very long name indeed")
    title = "case_$\\frac{1}$_" + 200 * "x" + "\nsecond line"
    # As markup, these would be an error.
    pixels = drawn(tmp_path / "a.png", image, organ, AFFINE, truth=organ, names=names, title=title)
    assert (pixels[:40] < 100).all(axis=-1).sum() > 500  # the title is written
    assert (pixels[:, -10:] == 255).all()  # and ends inside the page
    pixels = drawn(tmp_path / "b.png", image, 9 * organ, AFFINE, names=names)  # a label without a name
    assert (pixels[-40:, :200] < 100).all(axis=-1).sum() > 50


def test_int_half_and_file_orders(tmp_path: Path):
    image, organ = phantom()
    whole = np.asfortranarray(image.round().astype(np.int16))
    expected = drawn(tmp_path / "a.png", whole, organ, AFFINE, window=(-57, 164))
    for dtype in (np.float16, np.float64):
        assert np.array_equal(
            drawn(tmp_path / "b.png", whole.astype(dtype), organ, AFFINE, window=(-57, 164)), expected
        )


def test_a_failed_write_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    image, organ = phantom()
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left"):
        draw_overlay(path, oriented_scan(image, organ, AFFINE))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_thin_truth_is_outlined_where_the_panel_is_smaller_than_the_slice(tmp_path: Path):
    truth = np.zeros((900, 900, 3), np.uint8)
    truth[100:800, 450, 1] = 1  # one voxel wide, less than half a pixel
    pixels = drawn(tmp_path / "a.png", np.zeros(truth.shape), np.zeros_like(truth), np.eye(4), truth=truth)
    assert coloured(pixels)[60:420, 16:380].any()


def test_thick_slices_are_outlined_where_they_are():
    """A panel narrower than the slice and higher: the outline is a pixel or two larger, not a slice."""
    truth = np.zeros((512, 8, 40), np.uint8)
    truth[100:400, :, 15:25] = 1
    scan = oriented_scan(np.zeros(truth.shape), np.zeros_like(truth), np.diag([0.8, 0.8, 5.0, 1.0]), truth=truth)
    rows = np.flatnonzero(np.ptp(np.asarray(_slice(scan, whole(truth), CORONAL, 4, (373, 182))).astype(int), -1).any(1))
    assert rows.min() == pytest.approx(15 / 40 * 182, abs=3)
    assert rows.max() == pytest.approx(25 / 40 * 182, abs=3)


def test_matplotlib_is_not_loaded():
    program = "import sys, medspeed.common.observe.overlays as o; o.font(20.0); assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)


@pytest.mark.real_data
def test_a_real_ct_is_drawn_small(tmp_path: Path, real_data: Path):
    scan = nib.load(real_data / "ct_spleen_real/imagesTr/real_b.nii.gz")
    truth = np.asanyarray(nib.load(real_data / "ct_spleen_real/labelsTr/real_b.nii.gz").dataobj)
    path = tmp_path / "real_b.png"
    options = {"truth": truth, "names": ("background", "spleen"), "window": (-57, 164), "title": "real_b"}
    pixels = drawn(path, np.asanyarray(scan.dataobj), np.roll(truth, 3, axis=1), scan.affine, **options)
    assert path.stat().st_size < 300_000
    # The file is L, A, S; the spleen must be on the right of the picture all the same.
    columns = np.flatnonzero(coloured(pixels)[60:345, :390].any(axis=0))  # the axial plane is 16 to 389 pixels wide
    assert columns.min() > 202
