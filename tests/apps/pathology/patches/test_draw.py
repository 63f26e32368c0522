from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.pathology.patches import tables as patch_sampling
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.patches.tables import sample_patches
from medspeed.apps.pathology.slides.camelyon import SlideEntry

SIDE, SIZE = 1024, 64
GLASS, EOSIN = (243, 242, 244), (222, 150, 190)
TUMOUR = (slice(208, 496), slice(304, 704))  # rows, columns; whole pixels of the mask level of 8 pixels
TISSUE = (slice(64, 960), slice(96, 992))


def write_slide(path: Path, mpp: float = 1.0) -> Path:
    image = np.full((SIDE, SIDE, 3), GLASS, np.uint8)
    image[TISSUE] = EOSIN
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            image,
            photometric="rgb",
            tile=(256, 256),
            compression="zlib",
            resolution=(1e4 / mpp,) * 2,
            resolutionunit="CENTIMETER",
            metadata=None,
        )
    return path


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[SlideEntry]:
    """Return a slide with a mask, one with outlines of the same tumour, and a normal one."""
    folder = tmp_path_factory.mktemp("slides")
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[TUMOUR] = 1
    with tifffile.TiffWriter(folder / "m_mask.tif") as writer:
        for factor in (1, 2, 4, 8, 16):
            writer.write(mask[::factor, ::factor], tile=(128, 128), subfiletype=int(factor > 1), metadata=None)
    corners = [(304, 208), (704, 208), (704, 496), (304, 496)]
    vertices = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(corners))
    (folder / "outlined.xml").write_text(
        '<ASAP_Annotations><Annotations><Annotation Name="A" Type="Polygon" PartOfGroup="_0"><Coordinates>'
        f"{vertices}</Coordinates></Annotation></Annotations></ASAP_Annotations>"
    )
    return [
        SlideEntry("tumor_1", write_slide(folder / "tumor_1.tif"), True, folder / "m_mask.tif"),
        SlideEntry("tumor_2", write_slide(folder / "tumor_2.tif"), True, folder / "outlined.xml"),
        SlideEntry("normal_1", write_slide(folder / "normal_1.tif"), False, None),
    ]


def sample(entries: list[SlideEntry], per_slide: int = 200, size: int = SIZE, seed: int = 0) -> PatchTable:
    config = PathologyConfig(patches_per_slide=per_slide, seed=seed, reader="tifffile")
    object.__setattr__(config, "patch_size", size)  # also one that no network takes
    return sample_patches(entries, config)


def corners_of(table: PatchTable, name: str) -> np.ndarray:
    return np.asarray(table.corner[table.file == [path.stem for path in table.files].index(name)])


def shares(table: PatchTable, place: tuple[slice, slice], margin: int = 0) -> np.ndarray:
    """Return which share of each patch, widened by a margin, a rectangle covers."""
    truth = np.zeros((SIDE, SIDE))
    truth[place] = 1
    side = table.size + 2 * margin
    wide = np.pad(truth, margin)
    return np.array([wide[y : y + side, x : x + side].mean() for x, y in table.corner.tolist()])


def test_halves_and_counts(entries):
    table = sample(entries)
    assert [path.stem for path in table.files] == ["normal_1", "tumor_1", "tumor_2"]
    assert np.bincount(table.file).tolist() == [200, 200, 200]
    assert [int(table.label[table.file == file].sum()) for file in range(3)] == [0, 100, 100]


def test_tumour_patches_show_tumour(entries):
    table = sample(entries)
    tumour = table.take(table.label == 1)
    centre = tumour.corner + SIZE // 2
    assert ((centre >= (304, 208)) & (centre < (704, 496))).all()
    found = shares(tumour, TUMOUR)
    # A mask pixel is 8 pixels: half of one at each of two sides may be missing.
    assert found.min() >= 0.5 - 4 / SIZE
    assert found.min() < 0.75  # the rim is not left out


def test_normal_patches_keep_a_patch_away_from_tumour(entries):
    table = sample(entries, 2000)
    normal = table.take((table.label == 0) & (table.file > 0))
    assert shares(normal, TUMOUR, margin=SIZE).max() == 0
    wide = shares(normal, TUMOUR, margin=SIZE + 24)
    assert wide.max() > 0  # nor further than needed
    middle = np.rint(table.take(table.label == 0).corner + SIZE / 2).astype(int)
    rows, columns = TISSUE
    assert ((middle >= (columns.start, rows.start)) & (middle < (columns.stop, rows.stop))).all()
    assert (middle.min(0) < (columns.start + 8, rows.start + 8)).all()  # the edge is not left out
    assert shares(table.take(table.file == 0), TUMOUR).max() == 1  # tissue of a normal slide, wherever it lies


def test_margin_holds_where_tissue_is_found_on_a_coarser_grid(entries, tmp_path):
    """At 0.25 um a pixel of the tissue's mask spans 32 pixels, of the tumour's 8."""
    fine = SlideEntry("tumor_1", write_slide(tmp_path / "fine.tif", mpp=0.25), True, entries[0].marks)
    table = sample([fine], 4000)
    assert shares(table.take(table.label == 0), TUMOUR, margin=SIZE).max() == 0


def test_corners_are_any_pixels_within_the_slide_and_differ(entries):
    table = sample(entries, 2000)
    places = np.column_stack([table.file, table.corner])
    assert len(np.unique(places, axis=0)) == len(table)
    assert table.corner.min() >= 0
    assert table.corner.max() <= SIDE - SIZE
    for axis in (0, 1):
        assert set(table.corner[:, axis] % 8) == set(range(8))


def test_draw_depends_on_seed_and_name_alone(entries):
    whole = sample(entries)
    assert whole.digest() == sample(entries[::-1]).digest()
    alone = sample(entries[1:2])
    assert np.array_equal(alone.corner, corners_of(whole, "tumor_2"))
    assert not np.array_equal(sample(entries, seed=1).corner, whole.corner)
    first, second = corners_of(whole, "tumor_1"), corners_of(whole, "tumor_2")
    assert not np.array_equal(first, second)


def test_slides_with_less_room_give_what_they_have(entries, tmp_path):
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[300:308, 400:472] = 1  # 8 of 64 rows: no patch is half tumour
    tifffile.imwrite(tmp_path / "thin_mask.tif", mask)
    thin = SlideEntry("tumor_1", entries[0].path, True, tmp_path / "thin_mask.tif")
    table = sample([thin, entries[2]])
    assert np.bincount(table.file).tolist() == [200, 100]
    assert table.label.sum() == 0
    # One mask pixel in the middle of a patch-sized tumour: 64 places for the centre are there, and no more.
    mask[:] = 0
    mask[304:312, 400:408] = 1
    tifffile.imwrite(tmp_path / "small_mask.tif", mask)
    small = SlideEntry("tumor_1", entries[0].path, True, tmp_path / "small_mask.tif")
    assert sample([small], 400, size=8).label.sum() <= 64


def test_no_room_and_no_truth_are_errors(entries):
    with pytest.raises(ValueError, match="1 slides: no room for a patch of 1024 pixels"):
        sample([entries[2]], size=1024)
    bare = SlideEntry("tumor_1", entries[0].path, True, None)
    with pytest.raises(ValueError, match=r"tumor_1\.tif: neither a mask nor an annotation"):
        sample([bare])


def test_of_a_slide_marked_in_part_only_tumour_is_drawn(entries):
    table = sample([replace(entries[0], part=True), entries[2]])
    assert np.bincount(table.file, table.label).tolist() == [0, 100]
    assert np.bincount(table.file).tolist() == [200, 100]


def test_masks_too_large_are_looked_at_coarsely_and_thinned(entries, monkeypatch):
    monkeypatch.setattr(patch_sampling, "_MASK_PIXELS", 64 * 64)
    monkeypatch.setattr(patch_sampling, "_PLACES", 500)
    table = sample([entries[1], entries[2]], 100)
    assert np.bincount(table.file).tolist() == [100, 100]
    assert shares(table.take(table.label == 1), TUMOUR).min() > 0.3  # of a mask's pixel, 16 pixels wide
    assert shares(table.take((table.label == 0) & (table.file == 1)), TUMOUR, margin=SIZE - 16).max() == 0
