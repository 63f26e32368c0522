from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from apps.pathology.patches import store as patch_store
from apps.pathology.patches.store import stored_patches
from apps.pathology.patches.table import PatchTable
from apps.pathology.slides.reader import SlidePool


@pytest.fixture
def table(tmp_path: Path) -> PatchTable:
    """Two images and a slide of noise, each patch of it within the slide."""
    rng = np.random.default_rng(0)
    files = []
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(tmp_path / name)
        files.append(tmp_path / name)
    tifffile.imwrite(
        tmp_path / "s.tif", rng.integers(0, 256, (256, 320, 3), np.uint8), tile=(64, 64), photometric="rgb"
    )
    files.append(tmp_path / "s.tif")
    file = np.array([2, 0, 2, 1], np.int32)
    corner = np.array([[100, 50], [0, 0], [3, 200], [0, 0]], np.int32)
    return PatchTable(tuple(files), file, corner, np.array([1, 0, 0, 1], np.uint8), 32)


def expected(table: PatchTable) -> np.ndarray:
    slide = tifffile.imread(table.files[2])
    images = [np.asarray(Image.open(file)) for file in table.files[:2]]
    pixels = [slide[50:82, 100:132], images[0], slide[200:232, 3:35], images[1]]
    return np.stack(pixels).transpose(0, 3, 1, 2)


def stored(table: PatchTable, folder: Path) -> np.ndarray:
    pool = SlidePool(reader="tifffile")
    try:
        return np.array(stored_patches(table, folder, pool, 1, False).pixels)
    finally:
        pool.close()


def test_patches_are_those_of_their_files_in_the_tables_order(tmp_path: Path, table: PatchTable):
    found = stored(table, tmp_path / "store")
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected(table))


def test_a_sound_store_is_read_and_a_damaged_one_made_anew(
    tmp_path: Path, table: PatchTable, monkeypatch: pytest.MonkeyPatch
):
    stored(table, tmp_path / "store")
    decoded = []
    read = patch_store._read

    def noting(table: PatchTable, rows: Any, *rest: Any) -> Any:
        decoded.append(rows.tolist())
        return read(table, rows, *rest)

    monkeypatch.setattr(patch_store, "_read", noting)
    stored(table, tmp_path / "store")
    assert decoded == []
    (path,) = (tmp_path / "store").glob("*.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert np.array_equal(stored(table, tmp_path / "store"), expected(table))
    assert decoded == [[1, 3], [0, 2]]  # the images together, then the slide
    path.write_bytes(content[:-100])  # torn
    assert np.array_equal(stored(table, tmp_path / "store"), expected(table))


def test_another_file_gives_another_store(tmp_path: Path, table: PatchTable):
    stored(table, tmp_path / "store")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(table.files[0])
    assert stored(table, tmp_path / "store")[1].max() == 0


def test_images_must_be_alike_and_whole(tmp_path: Path, table: PatchTable):
    Image.fromarray(np.zeros((32, 40, 3), np.uint8)).save(table.files[1])
    with pytest.raises(ValueError, match=r"b\.png: 40 x 32 pixels; the first patch of the set has 32 x 32"):
        stored(table, tmp_path / "store")
    table.files[1].write_bytes(table.files[0].read_bytes()[:200])
    with pytest.raises(ValueError, match=r"b\.png: cannot be read as an image"):
        stored(table, tmp_path / "store")
    assert not list((tmp_path / "store").glob("*.npy"))


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, table: PatchTable, monkeypatch: pytest.MonkeyPatch
):
    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(OSError, match=r"4 patches of 32 pixels need .* are free; make room"):
        stored(table, tmp_path / "store")
