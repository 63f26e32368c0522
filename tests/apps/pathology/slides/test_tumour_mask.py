import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.path import Path as Outline

from medspeed.apps.pathology.slides.camelyon import SlideEntry
from medspeed.apps.pathology.slides.masks import rasterise, read_asap, tumour_mask

Points = list[tuple[float, float]]
SQUARE: Points = [(2.0, 1.0), (6.0, 1.0), (6.0, 5.0), (2.0, 5.0)]


def asap(*outlines: tuple[str, list[tuple[float, float]]], head: str = "") -> str:
    entries = ""
    for number, (group, points) in enumerate(outlines):
        vertices = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(points))
        entries += f'<Annotation Name="A{number}" Type="Polygon" PartOfGroup="{group}" Color="#F4FA58">'
        entries += f"<Coordinates>{vertices}</Coordinates></Annotation>"
    return f'<?xml version="1.0"?>{head}<ASAP_Annotations><Annotations>{entries}</Annotations></ASAP_Annotations>'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def filled(
    folder: Path, width: int, height: int, downsample: float, *tumour: Points, excluded: tuple[Points, ...] = ()
) -> np.ndarray:
    """Return the mask of some outlines, those to be left out first in the file."""
    text = asap(*(("Exclusion", each) for each in excluded), *(("_0", each) for each in tumour))
    return rasterise(write(folder / "a.xml", text), width, height, downsample)


def entry(mask: Path | None = None, annotation: Path | None = None) -> SlideEntry:
    return SlideEntry("a", Path("a.tif"), True, mask or annotation)


def write_mask(path: Path, base: np.ndarray, factors: tuple[int, ...] = (1, 2, 4)) -> Path:
    with tifffile.TiffWriter(path) as writer:
        for factor in factors:
            writer.write(
                base[::factor, ::factor], tile=(16, 16), compression="zlib", subfiletype=int(factor > 1), metadata=None
            )
    return path


def test_groups_say_what_is_tumour(tmp_path):
    groups = ["Tumor", "_0", "_1", "_2", "Exclusion"]
    found = read_asap(write(tmp_path / "a.xml", asap(*((group, SQUARE) for group in groups))))
    assert [tumour for _, tumour in found] == [True, True, True, False, False]
    assert all(np.array_equal(each, SQUARE) for each, _ in found)


def test_vertices_follow_their_order_not_that_of_the_file(tmp_path):
    text = asap(("_0", SQUARE))
    first, second = re.findall(r"<Coordinate .*?/>", text)[:2]
    swapped = text.replace(first, "@").replace(second, first).replace("@", second)
    assert np.array_equal(read_asap(write(tmp_path / "a.xml", swapped))[0][0], SQUARE)


def test_dots_are_passed_over(tmp_path):
    text = asap(("_0", SQUARE), ("None", [(1.0, 1.0)])).replace('Name="A1" Type="Polygon"', 'Name="A1" Type="Dot"')
    assert len(read_asap(write(tmp_path / "a.xml", text))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<ASAP_Annotations><Annotations>", r"a\.xml: expected the XML of ASAP"),
        ("<html/>", r"a\.xml: expected the element ASAP_Annotations, found html"),
        (asap(("_0", SQUARE[:2])), r"a\.xml: A0: 2 vertices; an outline needs 3"),
        (asap(("_0", SQUARE), ("Nodule", SQUARE)), r"A1: group 'Nodule'; known are Tumor, _0, _1"),
        (asap(("_0", SQUARE)).replace('X="2.0"', 'X="2,0"'), r"a\.xml: A0: a vertex without a number.*2,0"),
        (asap(("_0", SQUARE)).replace('X="2.0"', ""), r"a\.xml: A0: a vertex without a number.*X"),
        (asap(("_0", SQUARE)).replace('X="2.0"', 'X="inf"'), r"a\.xml: A0: 4 vertices; .* all finite"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_asap(write(tmp_path / "a.xml", text))


def test_entities_do_not_expand_without_end(tmp_path):
    entities = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
    text = asap(("_0", SQUARE), head=f'<!DOCTYPE a [<!ENTITY a0 "{"0" * 20}">{entities}]>').replace("2.0", "&a9;")
    with pytest.raises(ValueError, match="expected the XML of ASAP: limit on input amplification"):
        read_asap(write(tmp_path / "a.xml", text))


def test_a_square_by_hand(tmp_path):
    expected = np.zeros((7, 8), bool)
    expected[1:5, 2:6] = True
    assert np.array_equal(filled(tmp_path, 8, 7, 1, SQUARE), expected)
    # The same square moved by less than half a pixel covers the same centres, by more than half the next ones.
    moved = [(x + 0.4, y - 0.4) for x, y in SQUARE]
    assert np.array_equal(filled(tmp_path, 8, 7, 1, moved), expected)
    moved = [(x + 0.6, y) for x, y in SQUARE]
    assert np.array_equal(filled(tmp_path, 8, 7, 1, moved), np.roll(expected, 1, 1))


def test_overlapping_outlines_unite_and_holes_are_taken_out(tmp_path):
    hole = [(3.0, 2.0), (4.0, 2.0), (4.0, 3.0), (3.0, 3.0)]
    mask = filled(tmp_path, 8, 7, 1, SQUARE, SQUARE, excluded=(hole,))
    assert mask.sum() == 15
    assert not mask[2, 3]


def test_downsample_divides_the_coordinates(tmp_path):
    large = [(4 * x, 4 * y) for x, y in SQUARE]
    assert np.array_equal(filled(tmp_path, 8, 7, 4, large), filled(tmp_path, 8, 7, 1, SQUARE))


@given(st.lists(st.floats(0.5, 7.4), min_size=3, max_size=12), st.floats(0, 6))
def test_agrees_with_matplotlib(tmp_path_factory, radii, start):
    angles = start + np.arange(len(radii)) / len(radii) * 2 * np.pi
    points = np.stack([10 + np.array(radii) * np.cos(angles), 7.5 + np.array(radii) * np.sin(angles)], 1)
    y, x = np.mgrid[:15, :20] + 0.5
    centres = np.stack([x.ravel(), y.ravel()], 1)
    closed = Outline([*points.tolist(), points[0].tolist()])
    wider, narrower = (closed.contains_points(centres, radius=radius) for radius in (1e-6, -1e-6))
    sure = wider == narrower  # the others lie on the outline
    found = filled(tmp_path_factory.mktemp("outline"), 20, 15, 1, points.tolist())
    assert np.array_equal(found.ravel()[sure], wider[sure])


def test_what_an_outline_encloses_twice_is_outside(tmp_path):
    twice = [(0.0, 0.0), (6.0, 0.0), (6.0, 6.0), (0.0, 6.0), (0.0, 0.0), (4.0, 0.0), (4.0, 4.0), (0.0, 4.0)]
    mask = filled(tmp_path, 6, 6, 1, twice)
    assert not mask[:4, :4].any()
    assert mask.sum() == 20


def test_outlines_beyond_the_slide_are_refused(tmp_path):
    assert filled(tmp_path, 8, 7, 1, [(-0.5, 0.0), (8.9, 0.0), (4.0, 7.0)]).any()
    with pytest.raises(ValueError, match=r"a\.xml: a vertex at \(9\.5, 1\) is outside the slide, about 8 x 7"):
        filled(tmp_path, 8, 7, 1, [*SQUARE, (9.5, 1.0)])
    with pytest.raises(ValueError, match=r"a vertex at \(38, 4\) .* slide, about 32 x 28 pixels at level 0"):
        filled(tmp_path, 8, 7, 4, [*SQUARE, (38.0, 4.0)])


def test_mask_pyramids_are_read_at_the_coarsest_level_asked_for(tmp_path):
    base = np.zeros((48, 64), np.uint8)
    base[8:24, 16:40], base[10:14, 20:24], base[40, 40] = 1, 3, 255
    path = write_mask(tmp_path / "a_mask.tif", base)
    for most, downsample in ((1, 1), (3.9, 2), (4, 4), (100, 4)):
        found = tumour_mask(entry(path), 64, 48, most)
        assert found.downsample == downsample
        level = base[::downsample, ::downsample]
        assert np.array_equal(found.mask, (level == 1) | (level == 255))


def test_in_masks_of_the_public_bucket_two_is_tumour_and_one_is_other_tissue(tmp_path):
    base = np.zeros((48, 64), np.uint8)
    base[8:40, 8:48], base[16:24, 16:32] = 1, 2
    found = tumour_mask(entry(write_mask(tmp_path / "a_mask.tif", base)), 64, 48, 4)
    assert np.array_equal(found.mask, base[::4, ::4] == 2)


def test_levels_that_are_padded_or_no_whole_number_of_times_smaller_are_passed_over(tmp_path):
    """By rounded factors the tumour would lie elsewhere than in level 0."""
    base = np.zeros((200, 300), np.uint8)
    base[100:140, 200:260] = 1
    odd = base[np.arange(0, 200, 2.5).astype(int)][:, np.arange(0, 300, 2.5).astype(int)]
    padded = np.pad(base[::4, ::4], ((0, 14), (0, 21)))  # to tiles of 64 and 96
    path = tmp_path / "a_mask.tif"
    with tifffile.TiffWriter(path) as writer:
        for level in (base, odd, padded):
            writer.write(level, tile=(16, 16), compression="zlib", metadata=None)
    found = tumour_mask(entry(path), 300, 200, 8)
    assert found.downsample == 1
    assert np.array_equal(found.mask, base == 1)


def test_outlines_serve_where_there_is_no_mask(tmp_path):
    path = write(tmp_path / "a.xml", asap(("_0", [(4 * x, 4 * y) for x, y in SQUARE])))
    found = tumour_mask(entry(annotation=path), 30, 26, 5)
    assert found.downsample == 4
    assert found.mask.shape == (7, 8)
    assert found.mask.sum() == 16


def test_masks_that_are_none(tmp_path):
    path = write_mask(tmp_path / "a_mask.tif", np.zeros((48, 64), np.uint8))
    with pytest.raises(ValueError, match=r"a_mask\.tif: .*64 x 48 pixels, but the slide has 64 x 64"):
        tumour_mask(entry(path), 64, 64, 1)
    with pytest.raises(ValueError, match=r"b_mask\.tif: .* uint16"):
        tumour_mask(entry(write_mask(tmp_path / "b_mask.tif", np.zeros((48, 64), np.uint16))), 64, 48, 1)
    path.write_bytes(b"no tiff")
    with pytest.raises(ValueError, match=r"a_mask\.tif: cannot be used as a mask"):
        tumour_mask(entry(path), 64, 48, 1)
    with pytest.raises(ValueError, match="neither a mask nor an annotation"):
        tumour_mask(entry(), 64, 48, 1)


@pytest.mark.parametrize(
    "text", [asap(), asap(("Tumor", [(1.0, 1.0)] * 3)), asap(("Tumor", SQUARE), ("Exclusion", SQUARE))]
)
def test_marks_that_enclose_nothing_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"a\.tif: .*a\.xml marks no tumour"):
        tumour_mask(entry(annotation=write(tmp_path / "a.xml", text)), 16, 16, 1)
    mask = write_mask(tmp_path / "a_mask.tif", np.zeros((32, 32), np.uint8), (1,))
    with pytest.raises(ValueError, match=r"a_mask\.tif marks no tumour"):
        tumour_mask(entry(mask=mask), 32, 32, 1)


def test_an_unknown_encoding_is_named(tmp_path):
    path = write(tmp_path / "a.xml", '<?xml version="1.0" encoding="utf-9"?><ASAP_Annotations/>')
    with pytest.raises(ValueError, match=r"a\.xml: expected the XML of ASAP"):
        read_asap(path)
