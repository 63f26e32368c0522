import os
import struct
import zlib
from pathlib import Path
from typing import Literal

import imagecodecs
import numpy as np
import pytest
import tifffile
from monai.transforms import GridSplit
from PIL import Image

from medspeed.apps.pathology.patches.table import PatchTable, decode, read_coordinates, read_image, read_patch_folder


def table(folder: Path, labels: list[int], files: int = 2, size: int = 32) -> PatchTable:
    folder.mkdir(exist_ok=True)
    paths = tuple(folder / f"slide_{number}.tif" for number in range(files))
    for path in paths:
        if not path.exists():
            path.write_bytes(b"pixels")
            os.utime(path, (1, 1))
    rows = np.arange(len(labels), dtype=np.int32)
    return PatchTable(paths, rows % files, np.stack([rows * 7, rows * 3], 1), np.array(labels, np.uint8), size)


def test_take_keeps_order_and_files(tmp_path):
    whole = table(tmp_path, [0, 1, 0, 1])
    some = whole.take(np.array([3, 0]))
    assert len(some) == 2
    assert some.label.tolist() == [1, 0]
    assert some.corner.tolist() == [[21, 9], [0, 0]]
    assert some.file.tolist() == [1, 0]
    assert some.files == whole.files
    assert whole.take(np.array([True, False, False, True])).label.tolist() == [0, 1]


def test_digest_is_the_same_in_another_folder(tmp_path):
    assert table(tmp_path / "a", [0, 1]).digest() == table(tmp_path / "b", [0, 1]).digest()


def test_digest_tells_whatever_changes(tmp_path):
    whole = table(tmp_path, [0, 1, 1])
    found = [whole.digest(), table(tmp_path, [0, 1, 0]).digest(), table(tmp_path, [0, 1, 1], size=64).digest()]
    found += [table(tmp_path, [0, 1, 1], files=3).digest(), whole.take(np.array([1, 0, 2])).digest()]
    whole.corner[0, 0] += 1
    found.append(whole.digest())
    untimed = whole.digest(times=False)
    os.utime(whole.files[0], (2, 2))
    found.append(whole.digest())
    assert whole.digest(times=False) == untimed  # of a copy, for instance
    whole.files[0].write_bytes(b"other pixels")
    assert whole.digest(times=False) != untimed
    os.utime(whole.files[0], (2, 2))
    found.append(whole.digest())
    assert len(set(found)) == len(found) == 8


ROWS = ["image,label,split", "a.png,1,train", "b.png,0,train", "c.png,1,val", "d.png,0,test"]


def folder_of(folder: Path, rows: list[str], side: tuple[int, int] = (96, 96), below: str = "images") -> Path:
    (folder / below).mkdir(exist_ok=True)
    for name in "abcd":
        Image.new("RGB", side).save(folder / below / f"{name}.png")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("below", ["images", "."])
def test_parts_of_a_labelled_folder(tmp_path, below):
    found = read_patch_folder(folder_of(tmp_path, ROWS, below=below))
    assert list(found) == ["training", "validation", "testing"]
    assert [path.name for path in found["training"].files] == ["a.png", "b.png"]
    assert found["training"].label.tolist() == [1, 0]
    assert found["training"].file.tolist() == [0, 1]
    assert found["validation"].files == (tmp_path / below / "c.png",)
    assert found["testing"].label.tolist() == [0]
    assert all(part.size == 96 and not part.corner.any() for part in found.values())


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Validation"])
def test_names_of_the_validation_split(tmp_path, name):
    assert len(read_patch_folder(folder_of(tmp_path, [*ROWS[:3], f"c.png,1,{name}"]))["validation"]) == 1


def test_all_train_without_a_split(tmp_path):
    found = read_patch_folder(folder_of(tmp_path, ["label,image", "1,a.png", "0,b.png"]))
    assert list(found) == ["training"]
    assert found["training"].label.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("c.png,2,train", "line 4: label '2'"),
        ("c.png,,train", "line 4: label ''"),
        ("c.png,1,dev", "line 4: split 'dev': expected one of train"),
        ("c.png,1", "line 4: split ''"),
        ("a.png,1,val", r"line 4: a\.png is listed twice"),
        ("../c.png,1,val", r"line 4: image '\.\./c\.png'"),
    ],
)
def test_damaged_lines_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"labels\.csv, {message}"):
        read_patch_folder(folder_of(tmp_path, [*ROWS[:3], row]))


def test_folders_that_cannot_train(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"labels\.csv, line 4: e\.png is missing"):
        read_patch_folder(folder_of(tmp_path, [*ROWS[:3], "e.png,1,val"]))
    with pytest.raises(ValueError, match="the header is image,class; expected image,label or"):
        read_patch_folder(folder_of(tmp_path, ["image,class", "a.png,1"]))
    with pytest.raises(ValueError, match="the header is image,label,label; expected"):
        read_patch_folder(folder_of(tmp_path, ["image,label,Label", "a.png,1,0"]))
    with pytest.raises(ValueError, match="the header is image,label,split,split; expected"):
        read_patch_folder(folder_of(tmp_path, ["image,label,split,split", "a.png,1,train,val"]))
    with pytest.raises(ValueError, match="no training images"):
        read_patch_folder(folder_of(tmp_path, [ROWS[0], ROWS[3]]))
    with pytest.raises(ValueError, match=r"a\.png: 96 x 64 pixels, expected squares"):
        read_patch_folder(folder_of(tmp_path, ROWS, side=(96, 64)))
    (tmp_path / "images" / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"a\.png: cannot be read as an image "):
        read_patch_folder(tmp_path)
    Image.fromarray(np.full((96, 96), 40_000, np.uint16)).save(tmp_path / "images" / "a.png")
    with pytest.raises(ValueError, match=r"a\.png: .*pixels of mode I;16, expected 8 bits"):
        read_patch_folder(tmp_path)


@pytest.mark.real_data
def test_real_patches(real_data):
    found = read_patch_folder(real_data / "pcam_real")
    assert {part: len(table) for part, table in found.items()} == {"training": 527, "validation": 173}
    assert found["training"].size == 96


def slides(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_region_by_hand(tmp_path):
    """A flag by itself: the file goes column by column, so that its second flag is the patch below the first."""
    images = slides(tmp_path / "images", "tumor_001.tif", "normal_001.tif")
    path = tmp_path / "list.csv"
    for flag, (column, row) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]):
        flags = ",".join("1" if number == flag else "0" for number in range(9))
        path.write_text(f"tumor_001,25417,127565,{flags}\n")
        table = read_coordinates(path, images)
        assert len(table) == 9
        assert table.label.sum() == 1
        expected = [25417 - 384 + 272 * column, 127565 - 384 + 272 * row]
        assert table.corner[table.label == 1].tolist() == [expected]
    assert (table.size, table.files) == (224, (images / "tumor_001.tif",))


def test_labels_are_in_the_order_in_which_the_guide_reads_them(tmp_path):
    images = slides(tmp_path / "images", "a.tif")
    for flags in ("1,1,0,0,1,0,0,0,1", "0,1,1,0,0,0,1,0,0"):
        (tmp_path / "list.csv").write_text(f"a,500,600,{flags}\n")
        columns = ["a", "500", "600", *flags.split(",")]
        guide = [int(columns[column]) for column in (3, 6, 9, 4, 7, 10, 5, 8, 11)]
        assert read_coordinates(tmp_path / "list.csv", images).label.tolist() == guide


def test_patches_are_those_of_monais_grid_split(tmp_path):
    images = slides(tmp_path / "images", "a.tif")
    (tmp_path / "list.csv").write_text(f"a,384,384{',0' * 9}\n")
    table = read_coordinates(tmp_path / "list.csv", images)
    numbered = np.arange(768**2).reshape(1, 768, 768)
    split = GridSplit((3, 3), 224)(numbered)
    assert len(split) == len(table)
    for patch, (x, y) in zip(split, table.corner.tolist(), strict=True):
        assert np.array_equal(patch[0], numbered[0, y : y + 224, x : x + 224])


def test_slides_are_found_below_the_folder_whatever_their_case(tmp_path):
    (tmp_path / "data" / "training").mkdir(parents=True)
    images = slides(tmp_path / "data" / "training" / "images", "tumor_001.tif", "normal_002.tif", "tumor_001_mask.tif")
    (tmp_path / "list.csv").write_text(
        f"Tumor_001,500,600{',1' * 9}\nnormal_002,900,800{',0' * 9}\n\ntumor_001,0,0{',0' * 9}\n"
    )
    table = read_coordinates(tmp_path / "list.csv", tmp_path / "data")
    assert table.files == (images / "tumor_001.tif", images / "normal_002.tif")
    assert table.file.tolist() == [0] * 9 + [1] * 9 + [0] * 9
    assert table.corner[18].tolist() == [-384, -384]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a,1,2{',0' * 8}", r"list\.csv, line 1: 11 columns; expected 12"),
        (f"a,1,2{',0' * 9}\na,1,x{',0' * 9}", r"list\.csv, line 2: expected whole numbers .*'x'"),
        (f"a,1,2{',0' * 8},2", r"list\.csv, line 1: .*flags of 0 or 1, found '2'"),
        ("", r"list\.csv: lists no regions"),
        (f"a,1,2{',0' * 9}\nA.tif,1,2{',1' * 9}", r"list\.csv, line 2: an earlier line disagrees about \('a', 1, 2\)"),
    ],
)
def test_damaged_lists_are_named(tmp_path, text, message):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_coordinates(tmp_path / "list.csv", slides(tmp_path / "images", "a.tif"))


def test_a_region_that_is_listed_twice_counts_once(tmp_path):
    (tmp_path / "list.csv").write_text(f"a,500,600{',1' * 9}\n , \na,500,600{',1' * 9}\n")
    assert len(read_coordinates(tmp_path / "list.csv", slides(tmp_path / "images", "a.tif"))) == 9


def test_an_image_of_16_bits_is_refused_and_what_is_transparent_is_white(tmp_path):
    """Pillow opens the first as black, and the second by what lies under the transparency."""
    deep = np.full((8, 8, 3), (200, 120, 180), np.uint16) * 16
    (tmp_path / "deep.png").write_bytes(imagecodecs.png_encode(deep))
    with pytest.raises(ValueError, match=r"deep\.png: cannot be read as an image .*expected 8 bits"):
        read_image(tmp_path / "deep.png")
    orders: tuple[Literal["<", ">"], ...] = ("<", ">")
    for order in orders:
        tifffile.imwrite(tmp_path / "deep.tif", deep, photometric="rgb", byteorder=order, compression="lzw")
        with pytest.raises(ValueError, match=r"deep\.tif: cannot be read as an image .*expected 8 bits"):
            read_image(tmp_path / "deep.tif")
    header = struct.pack("<2sIHHI IiiHHIIiiII", b"BM", 54 + 128, 0, 0, 54, 40, 8, 8, 1, 16, 0, 128, 0, 0, 0, 0)
    (tmp_path / "small.bmp").write_bytes(header + struct.pack("<H", 31 << 10) * 64)  # 5 bits of red, green and blue
    assert read_image(tmp_path / "small.bmp")[0, 0].tolist() == [255, 0, 0]
    seen = np.zeros((8, 8, 4), np.uint8)
    seen[:4] = 200, 120, 180, 255
    Image.fromarray(seen).save(tmp_path / "half.png")
    assert read_image(tmp_path / "half.png")[[0, 7], 0].tolist() == [[200, 120, 180], [255, 255, 255]]


def test_missing_and_doubled_slides_are_named(tmp_path):
    (tmp_path / "list.csv").write_text("".join(f"tumor_{n},1,2{',0' * 9}\n" for n in range(7)))
    images = slides(tmp_path / "images", "tumor_0.tif")
    with pytest.raises(FileNotFoundError, match=r"6 of 7 slides are not in .*: tumor_1, .*tumor_5 and 1 more"):
        read_coordinates(tmp_path / "list.csv", images)
    slides(images / "more", "Tumor_0.tif")
    with pytest.raises(ValueError, match="share a name"):
        read_coordinates(tmp_path / "list.csv", images)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"image,label,split\n" + b"a" * 200_000 + b",1,train\n", "line 2: expected CSV text in UTF-8 .field larger"),
        (b"image,label,split\na.png,1,\xff\n", "expected CSV text in UTF-8 "),
        (b"image,label,split\na.png,1\n", "line 2: split '': expected one of"),
    ],
)
def test_a_damaged_table_is_named_in_one_line(tmp_path, text, said):
    folder_of(tmp_path, ROWS)
    (tmp_path / "labels.csv").write_bytes(text)
    with pytest.raises(ValueError, match=rf"labels\.csv, .*{said}|labels\.csv, {said}"):
        read_patch_folder(tmp_path)


def test_an_image_of_another_format_is_told_which_to_take(tmp_path):
    folder_of(tmp_path, [*ROWS, "e.webp,1,train"])
    with pytest.raises(ValueError, match=r"labels\.csv, line 6: image 'e\.webp': save it as PNG, JPEG, BMP or TIFF"):
        read_patch_folder(tmp_path)


def test_a_tiff_image_is_a_patch_of_one_size_and_no_slide(tmp_path):
    folder_of(tmp_path, [*ROWS, "e.tif,1,train"])
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "images" / "e.tif")
    table = read_patch_folder(tmp_path)["training"]
    rows, found = next(decode(table))
    (place,) = (number for number, row in enumerate(rows) if table.files[table.file[row]].name == "e.tif")
    assert np.array_equal(found[place], pixels.transpose(2, 0, 1))
    Image.fromarray(np.tile(pixels, (2, 2, 1))).save(tmp_path / "images" / "e.tif")
    with pytest.raises(ValueError, match=r"e\.tif: 192 x 192 pixels, expected 96 x 96"):
        next(decode(table))


def test_names_of_columns_may_have_blanks_and_capitals(tmp_path):
    """Otherwise the patches of a column " Split" would all train."""
    due = read_patch_folder(folder_of(tmp_path, ROWS))
    found = read_patch_folder(folder_of(tmp_path, ["Image, LABEL, Split ,,,note,note", *ROWS[1:]]))
    assert {part: table.files for part, table in found.items()} == {part: table.files for part, table in due.items()}


def test_an_image_that_says_more_pixels_than_it_has_is_named(tmp_path):
    folder_of(tmp_path, ROWS)
    png = bytearray((tmp_path / "images" / "a.png").read_bytes())
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    (tmp_path / "images" / "a.png").write_bytes(png)
    with pytest.raises(ValueError, match=r"a\.png: cannot be read as an image .*decompression bomb"):
        read_patch_folder(tmp_path)


@pytest.mark.parametrize("place", ["5.7,3", "inf,3", "-5,3", f"{2**31},3", "x,3", ",3"])
def test_a_place_that_is_none_is_named(tmp_path, place):
    (tmp_path / "list.csv").write_text(f"a,{place}{',0' * 9}\n")
    with pytest.raises(ValueError, match=r"list\.csv, line 1: "):
        read_coordinates(tmp_path / "list.csv", slides(tmp_path / "slides", "a.tif"))


@pytest.mark.parametrize("text", ["null", "[]", '{"training": [{"image": "a", "location": [1, 2]}]}'])
def test_a_list_of_another_form_is_named(tmp_path, text):
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(ValueError, match=r"list\.json, line 1: \d columns; expected 12: slide,x,y,flags"):
        read_coordinates(tmp_path / "list.json", slides(tmp_path / "slides", "a.tif"))
