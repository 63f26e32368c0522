import gzip
import math
import os
import subprocess
import zlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medspeed.common.data import volumes
from medspeed.common.data.label_files import write_label
from medspeed.common.data.volumes import Volume, check_same_grid, read_header, read_volume

AFFINE = np.array([[-1.5, 0, 0, 40.5], [0, 1.25, 0, -61.5], [0, 0, 3.0, -804.5], [0, 0, 0, 1]])
SHEARED = np.array([[1.0, 0, 0, 5], [0, 1.0, 0.4, -3], [0, 0, 2.0, 7], [0, 0, 0, 1]])


def voxels_of(dtype: Any = np.int16, shape: tuple[int, ...] = (5, 4, 3)) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 100, shape)
    return np.asarray(values - (50 if np.dtype(dtype).kind in "if" else 0)).astype(dtype)


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE, **fields: Any) -> Path:
    """Write a NIfTI file by nibabel, then overwrite header fields byte by byte."""
    image = nibabel.Nifti1Image(voxels, affine, dtype=voxels.dtype)
    content = bytearray(image.to_bytes())
    header = nibabel.Nifti1Header(bytes(content[:348]), check=False)
    for name, value in fields.items():
        header[name] = value
    content[:348] = header.binaryblock
    path.write_bytes(gzip.compress(bytes(content), compresslevel=1) if path.suffix == ".gz" else bytes(content))
    return path


@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64])
def test_reading_gives_what_nibabel_gives(tmp_path, name, dtype):
    path = write(tmp_path / name, voxels_of(dtype))
    volume = read_volume(path)
    assert volume.voxels.dtype == dtype
    assert np.array_equal(volume.voxels, np.asarray(nibabel.load(path).dataobj))
    assert np.array_equal(volume.affine, AFFINE)
    assert volume.voxels.flags.f_contiguous
    assert volume.voxels.flags.writeable
    assert volume.path == path


def test_big_endian_files_come_in_native_order(tmp_path):
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels_of(), AFFINE, header), tmp_path / "a.nii.gz")
    volume = read_volume(tmp_path / "a.nii.gz")
    assert nibabel.load(tmp_path / "a.nii.gz").header.endianness == ">"
    assert volume.voxels.dtype == np.dtype(np.int16)
    assert np.array_equal(volume.voxels, voxels_of())
    assert volume.voxels.flags.f_contiguous


@pytest.mark.parametrize(("slope", "inter"), [(2.0, -1024.0), (0.1, 0.0), (1.0, -1000.0)])
def test_scaling_is_applied(tmp_path, slope, inter):
    path = write(tmp_path / "a.nii.gz", voxels_of(), scl_slope=slope, scl_inter=inter)
    volume = read_volume(path)
    assert volume.voxels.dtype == np.float32
    np.testing.assert_allclose(volume.voxels, nibabel.load(path).get_fdata(), rtol=1e-6)


@pytest.mark.parametrize("slope", [0.0, np.nan, 1.0])
def test_a_slope_of_0_or_nan_means_none(tmp_path, slope):
    volume = read_volume(write(tmp_path / "a.nii.gz", voxels_of(), scl_slope=slope, scl_inter=0))
    assert volume.voxels.dtype == np.int16
    assert np.array_equal(volume.voxels, voxels_of())


@pytest.mark.parametrize("codes", [(1, 0), (0, 1), (0, 0), (2, 1)])
def test_the_affine_is_nibabels_for_all_codes(tmp_path, codes, caplog):
    path = write(tmp_path / "a.nii.gz", voxels_of(), sform_code=codes[0], qform_code=codes[1])
    assert np.array_equal(read_volume(path).affine, nibabel.load(path).affine)
    assert (f"{tmp_path}: files without orientation are read as LAS" in caplog.text) == (codes == (0, 0))


def test_channels_and_axes_of_length_one(tmp_path):
    four = write(tmp_path / "four.nii.gz", voxels_of(np.float32, (5, 4, 3, 2)))
    single = write(tmp_path / "single.nii.gz", voxels_of(shape=(5, 4, 3, 1)))
    volume = read_volume(four, channels=2)
    assert volume.voxels.shape == (5, 4, 3, 2)
    assert np.array_equal(volume.voxels, np.asarray(nibabel.load(four).dataobj))
    assert read_volume(single).voxels.shape == (5, 4, 3)


def test_the_header_is_read_without_the_voxels(tmp_path):
    path = write(tmp_path / "a.nii", voxels_of())
    path.write_bytes(path.read_bytes()[:352])
    header = read_header(path)
    shape, affine = header.shape, header.affine
    assert shape == (5, 4, 3)
    assert np.array_equal(affine, AFFINE)
    with pytest.raises(ValueError, match=r"expected 120 bytes of voxels.*found 0"):
        read_volume(path)


def rotten(kind: str, path: Path) -> None:
    """Write a file that is wrong in one way."""
    whole = write(path, voxels_of(shape=(24, 24, 24))).read_bytes()
    content = gzip.decompress(whole)
    contents = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "cut in the header": gzip.compress(content[:200]),
        "checksum": whole[:-8] + bytes(4) + whole[-4:],
        "garbage behind it": whole + b"not of a scan.",
        "short payload": gzip.compress(content[:-10]),
        "plain": content,
        "text": gzip.compress(b"not a scan " * 100),
        "version 2": gzip.compress(nibabel.Nifti2Image(voxels_of(), AFFINE).to_bytes()),
        "rgb": gzip.compress(nibabel.Nifti1Image(np.zeros((4, 4, 4), [(c, "u1") for c in "RGB"]), AFFINE).to_bytes()),
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "complex":
        write(path, voxels_of(np.complex64))
    elif kind == "pair":
        write(path, voxels_of(), magic=b"ni1")
    elif kind == "unknown type":
        write(path, voxels_of(), datatype=999)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "is empty"),
        ("cut", "truncated or damaged"),
        ("cut in the header", "200 bytes, less than a NIfTI-1 header"),
        ("checksum", "truncated or damaged"),
        ("garbage behind it", "other bytes behind its gzip stream: copy it again, or `gzip -dc FILE"),
        ("short payload", "expected 27648 bytes of voxels.*found 27638"),
        ("plain", "not gzip.*rename it to .nii,"),
        ("text", "not a single-file NIfTI-1"),
        ("pair", "magic b'ni1'"),
        ("version 2", "header size 540"),
        ("rgb", "found NIfTI type 128"),
        ("complex", "found NIfTI type 32"),
        ("unknown type", "found NIfTI type 999"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, kind, said):
    rotten(kind, tmp_path / "case_07.nii.gz")
    with pytest.raises(ValueError, match=f"case_07.nii.gz.*{said}"):
        read_volume(tmp_path / "case_07.nii.gz")


def test_other_names_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.nii\.gz: no such file"):
        read_volume(tmp_path / "gone.nii.gz")
    (tmp_path / "scan.dcm").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"scan\.dcm: expected a file named \.nii\.gz"):
        read_volume(tmp_path / "scan.dcm")
    packed = write(tmp_path / "a.nii.gz", voxels_of()).rename(tmp_path / "a.nii")
    with pytest.raises(ValueError, match=r"a\.nii is gzip.*rename it to \.nii\.gz"):
        read_volume(packed)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dim": [3, 32767, 32767, 32767, 1, 1, 1, 1]}, "declares 70362301923326 bytes"),
        ({"dim": [2, 5, 4, 1, 1, 1, 1, 1]}, r"found shape \(5, 4\)"),
        ({"dim": [3, 5, -4, 3, 1, 1, 1, 1]}, r"found shape \(5, -4, 3\)"),
        ({"dim": [4, 5, 4, 1, 3, 1, 1, 1]}, r"expected 3-D.*found \(5, 4, 1, 3\)"),
        ({"dim": [5, 5, 4, 1, 3, 2, 1, 1]}, r"found shape \(5, 4, 1, 3, 2\)"),
        ({"vox_offset": 2.0**30}, "begin at byte 1073741824"),
        ({"vox_offset": 12}, "begin at byte 12"),
        ({"vox_offset": np.inf}, "begin at byte inf"),
        ({"vox_offset": np.nan}, "begin at byte nan"),
        ({"scl_slope": np.inf}, "scl_slope is inf, .*expected numbers"),
        ({"xyzt_units": 1}, "lengths in metres, expected mm"),
        ({"xyzt_units": 3 + 8}, "lengths in micrometres, expected mm"),
        ({"srow_z": [0, 0, 1e6, 0]}, r"voxel size 1.5 x 1.25 x 1e\+06 mm, expected 0.01 to 100 mm"),
        ({"srow_x": [2, 1e5, 0, 0]}, r"1e\+05 x 3 mm, expected 0.01 to 100 mm"),
        ({"srow_y": [0, 0.001, 0, 0]}, "x 0.001 x 3 mm, expected 0.01 to 100 mm"),
        ({"srow_x": [1, 0, 0, 1e30]}, r"first voxel is at 1e\+30 x -61.5 x -804.5 mm, expected within 100000 mm"),
        ({"scl_slope": 1, "scl_inter": np.nan}, "scl_inter nan, expected numbers"),
        ({"srow_x": [np.nan, 0, 0, 0]}, "affine is singular or not finite"),
        ({"srow_x": [0, 0, 0, 0]}, "affine is singular or not finite"),
        ({"srow_x": [1, 1, 0, 0], "srow_y": [1, 1, 0, 0]}, "affine is singular or not finite"),
        ({"sform_code": 0, "qform_code": 0, "pixdim": [1, 1, 0, 1, 1, 1, 1, 1]}, "affine is singular or not finite"),
        ({"sform_code": 0, "qform_code": 1, "quatern_b": 2}, "has no affine"),
    ],
)
def test_a_header_that_cannot_be_meant_is_refused(tmp_path, fields, said):
    with pytest.raises(ValueError, match=f"odd.nii.gz.*{said}"):
        read_volume(write(tmp_path / "odd.nii.gz", voxels_of(), **fields))


def test_channels_that_do_not_fit_are_refused(tmp_path):
    three = write(tmp_path / "three.nii.gz", voxels_of())
    with pytest.raises(ValueError, match=r"three\.nii\.gz: expected 4-D, 2 channels last .*, found \(5, 4, 3\)"):
        read_volume(three, channels=2)
    four = write(tmp_path / "four.nii.gz", voxels_of(shape=(5, 4, 3, 2)))
    with pytest.raises(ValueError, match=r"four\.nii\.gz: expected 4-D, 4 channels last .*, found \(5, 4, 3, 2\)"):
        read_volume(four, channels=4)


def test_bytes_behind_the_voxels_are_padding_or_an_error(tmp_path):
    path = write(tmp_path / "a.nii", voxels_of())
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(512))
    assert np.array_equal(read_volume(path).voxels, voxels_of())
    path.write_bytes(whole + bytes(2**20))
    with pytest.raises(ValueError, match="continues past the 120 bytes of voxels"):
        read_volume(path)


def test_memory_is_bounded(tmp_path, monkeypatch):
    path = write(tmp_path / "a.nii.gz", voxels_of())
    monkeypatch.setattr(volumes, "free_memory", lambda *_: 100)
    assert read_volume(path).voxels.nbytes == 120  # little enough to be tried
    monkeypatch.setattr(volumes, "ALWAYS_TRIED", 0)
    with pytest.raises(ValueError, match=r"a\.nii\.gz: its header declares 120 bytes.*, 100 bytes of memory are free"):
        read_volume(path)


def test_the_least_and_the_largest_voxel_are_read(tmp_path):
    for side in (0.01, 100):
        assert read_header(write(tmp_path / "a.nii", voxels_of(), np.diag([side, side, side, 1]))).shape == (5, 4, 3)


@pytest.mark.parametrize("read", [read_header, read_volume])
def test_a_pixdim_that_is_not_the_affines_is_told_once(tmp_path, caplog, read):
    path = write(tmp_path / "a.nii", voxels_of(), pixdim=[1, 1, 1, 1, 1, 1, 1, 1])
    for _ in range(2):
        found = read(path)
        assert np.array_equal(found.affine, AFFINE)
    assert caplog.messages == [
        f"{path}: voxel size 1.5 x 1.25 x 3 mm in its sform, which is used, but 1 x 1 x 1 mm in its pixdim, which "
        "other programs may use: if the sform is right, image.set_qform(image.affine) in nibabel corrects the file"
    ]
    image = nibabel.load(path)
    image.set_qform(image.affine)  # the remedy
    nibabel.save(image, tmp_path / "b.nii")
    read(tmp_path / "b.nii")
    tilted = np.array([[1.0, 0, 0, 0], [0, 1.0, 1.0, 0], [0, 0, 2.0, 0], [0, 0, 0, 1]])
    read_header(write(tmp_path / "tilted.nii", voxels_of(), tilted, pixdim=[1, 1, 1, 2, 1, 1, 1, 1]))
    assert len(caplog.messages) == 1


def test_a_qform_that_turns_the_axes_otherwise_is_told(tmp_path, caplog):
    image = nibabel.Nifti1Image(voxels_of(), np.diag([2.0, 2, 2, 1]))
    for code, told in ((1, 1), (0, 0)):
        image.set_sform(np.diag([2.0, 2, 2, 1]), code=1)
        image.set_qform(np.diag([-2.0, 2, 2, 1]), code=code)
        nibabel.save(image, path := tmp_path / f"{code}.nii")
        assert np.array_equal(read_header(path).affine, np.diag([2.0, 2, 2, 1]))
        said = f"{path}: its qform, which other programs may use, turns the axes otherwise: if the sform is right,"
        assert [message.startswith(said) for message in caplog.messages] == [True] * told
        caplog.clear()


@pytest.mark.parametrize("infinite", [np.float32(np.inf), np.float64(-1e308)])
def test_voxels_that_are_no_numbers_are_counted(infinite, tmp_path):
    voxels = voxels_of(infinite.dtype)
    voxels[0, 1, 2] = np.nan
    voxels[3, 0, 0] = infinite
    with pytest.raises(ValueError, match=r"a\.nii\.gz: 2 of 60 voxels are NaN or infinite"):
        read_volume(write(tmp_path / "a.nii.gz", voxels))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_cut_and_no_flipped_byte_changes_a_voxel_unnoticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "a.nii.gz"
    whole = write(path, voxels_of(shape=(12, 12, 12))).read_bytes()
    place = data.draw(st.integers(1, len(whole) - 1), label="place")
    path.write_bytes(whole[:place])
    with pytest.raises(ValueError, match=r"a\.nii\.gz"):
        read_volume(path)
    flipped = whole[place] ^ data.draw(st.integers(1, 255), label="flip")
    path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    try:
        found = read_volume(path)
    except ValueError:
        return
    # Gzip's own header and length do not touch the content.
    assert np.array_equal(found.voxels, voxels_of(shape=(12, 12, 12)))
    assert np.array_equal(found.affine, AFFINE)


@pytest.mark.parametrize(("unit", "side"), [("meter", 0.002), ("micron", 2000.0)])
def test_the_remedy_for_lengths_in_another_unit_holds(tmp_path, unit, side):
    image = nibabel.Nifti1Image(voxels_of(), np.diag([side, side, side, 1]))
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "a.nii")
    with pytest.raises(
        ValueError, match=r'the first three rows of its affine by (1000|0.001) and set_xyzt_units\("mm"\)'
    ) as error:
        read_volume(tmp_path / "a.nii")
    factor = float(str(error.value).split("affine by ")[1].split()[0])
    mended = nibabel.Nifti1Image(image.dataobj, np.diag([factor, factor, factor, 1]) @ image.affine, image.header)
    mended.header.set_xyzt_units("mm")
    nibabel.save(mended, tmp_path / "b.nii")
    volume = read_volume(tmp_path / "b.nii")
    np.testing.assert_allclose(volume.affine, np.diag([2, 2, 2, 1]), rtol=1e-6)


@pytest.mark.parametrize("units", [0, 2, 7, 8 + 2])
def test_an_unknown_unit_is_mm_and_the_label_lies_where_the_image_does(tmp_path, units):
    path = write(tmp_path / "a.nii", voxels_of(np.uint8), xyzt_units=units)
    volume = read_volume(path)
    write_label(tmp_path / "mask.nii", volume.voxels, volume.affine)
    assert np.array_equal(nibabel.load(tmp_path / "mask.nii").affine, nibabel.load(path).affine)


@pytest.mark.parametrize("name", ["out/mask.nii.gz", "mask.nii"])
@pytest.mark.parametrize("affine", [AFFINE, np.eye(4), SHEARED], ids=["LAS", "identity", "sheared"])
def test_a_label_comes_back_as_it_was(tmp_path, name, affine):
    labels = np.asfortranarray(voxels_of(np.uint8))
    write_label(tmp_path / name, labels, affine)
    found = nibabel.load(tmp_path / name)
    assert np.array_equal(np.asarray(found.dataobj), labels)
    np.testing.assert_allclose(found.affine, affine, rtol=1e-6)
    assert found.get_data_dtype() == np.uint8
    assert found.header.get_xyzt_units()[0] == "mm"
    content = (tmp_path / name).read_bytes()
    stored = nibabel.Nifti1Header((gzip.decompress(content) if name.endswith(".gz") else content)[:348])
    assert (float(stored["scl_slope"]), float(stored["scl_inter"])) == (1, 0)  # nibabel shows them as not-a-number
    np.testing.assert_allclose(found.header.get_zooms(), np.linalg.norm(affine[:3, :3], axis=0), rtol=1e-6)
    assert [file.name for file in (tmp_path / name).parent.iterdir()] == [Path(name).name]
    assert np.array_equal(read_volume(tmp_path / name).voxels, labels)


def test_the_qform_counts_only_where_it_says_the_same(tmp_path):
    labels = voxels_of(np.uint8)  # C order: written as it should be all the same
    write_label(tmp_path / "straight.nii.gz", labels, AFFINE)
    straight = nibabel.load(tmp_path / "straight.nii.gz")
    assert np.array_equal(np.asarray(straight.dataobj), labels)
    assert (int(straight.header["sform_code"]), int(straight.header["qform_code"])) == (1, 1)
    np.testing.assert_allclose(straight.get_qform(), AFFINE, atol=1e-4)
    write_label(tmp_path / "sheared.nii.gz", labels, SHEARED)
    sheared = nibabel.load(tmp_path / "sheared.nii.gz")
    assert (int(sheared.header["sform_code"]), int(sheared.header["qform_code"])) == (1, 0)


def test_a_label_file_says_neither_when_nor_where_it_was_written(tmp_path):
    write_label(tmp_path / "a.nii.gz", voxels_of(np.uint8), AFFINE)
    content = (tmp_path / "a.nii.gz").read_bytes()
    assert content[3:8] == bytes(5)  # flags, among them the name's, and the time
    assert len(gzip.decompress(content)) == 352 + 60


@pytest.mark.parametrize("size", [59, 60, 61, 119, 120, 121, 1000])
def test_a_large_label_is_a_gzip_file_of_many_members_however_many_threads_write_it(tmp_path, monkeypatch, size):
    """Every reader takes the members one after the other: gzip's program, zlib, nibabel, and ours."""
    monkeypatch.setattr("medspeed.common.data.label_files._MEMBER", 60)
    labels = np.random.default_rng(size).integers(0, 3, (size, 1, 1)).astype(np.uint8)
    written = set()
    for cores in (1, 2, 9):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        write_label(tmp_path / "a.nii.gz", labels, AFFINE)
        content = (tmp_path / "a.nii.gz").read_bytes()
        written.add(gzip.decompress(content))
    assert len(written) == 1
    members, rest = [], content
    while rest:
        member = zlib.decompressobj(31)
        members.append(len(member.decompress(rest)))
        assert member.eof
        rest = member.unused_data
    assert members == [352, *[60] * (size // 60), *([size % 60] if size % 60 else [])]
    program = subprocess.run(["gzip", "-dc"], input=content, capture_output=True, check=True).stdout
    assert program == gzip.decompress(content)
    assert program[352:] == labels.tobytes()
    assert np.array_equal(np.asarray(nibabel.load(tmp_path / "a.nii.gz").dataobj), labels)
    assert np.array_equal(read_volume(tmp_path / "a.nii.gz").voxels, labels)
    (tmp_path / "a.nii.gz").write_bytes(content[:-9])
    with pytest.raises(ValueError, match=r"truncated|copy it again"):
        read_volume(tmp_path / "a.nii.gz")


def test_a_large_label_in_nrrd_is_one_gzip_member(tmp_path, monkeypatch):
    """Of several, pynrrd and with it MONAI's NrrdReader read the first."""
    monkeypatch.setattr("medspeed.common.data.label_files._MEMBER", 60)
    labels = np.random.default_rng(0).integers(0, 3, (200, 2, 1)).astype(np.uint8)
    write_label(tmp_path / "a.nrrd", labels, AFFINE)
    content, member = (tmp_path / "a.nrrd").read_bytes(), zlib.decompressobj(31)
    assert member.decompress(content.partition(b"\n\n")[2]) == labels.tobytes(order="F")
    assert member.eof
    assert member.unused_data == b""


def test_a_label_must_lie_on_its_image():
    image = Volume(voxels_of(shape=(5, 4, 3, 2)), AFFINE, Path("image.nii.gz"))
    nearly = AFFINE + np.array([[0, 0, 0, 0.05], [0] * 4, [0] * 4, [0] * 4])
    check_same_grid(image, Volume(voxels_of(), nearly, Path("label.nii.gz")))
    with pytest.raises(ValueError, match=r"label\.nii\.gz.*image\.nii\.gz: shape \(5, 4, 2\) against \(5, 4, 3\)"):
        check_same_grid(image, Volume(voxels_of(shape=(5, 4, 2)), AFFINE, Path("label.nii.gz")))
    flipped = AFFINE * np.array([[-1], [1], [1], [1]])
    with pytest.raises(ValueError, match=r"corners up to 81 mm apart \(at most 0.125\).*-804\.5.*resample it onto"):
        check_same_grid(image, Volume(voxels_of(), flipped, Path("label.nii.gz")))


def test_the_first_volume_alone_is_read_without_looking_at_the_rest(tmp_path):
    voxels = voxels_of(shape=(5, 4, 3, 4))
    path = write(tmp_path / "a.nii", voxels)
    path.write_bytes(path.read_bytes()[: 352 + voxels[..., :1].nbytes])  # nothing of the other three is there
    with pytest.raises(ValueError, match=r"the file can hold at most|expected 480 bytes of voxels"):
        read_volume(path, 4)
    whole = write(tmp_path / "b.nii.gz", voxels)
    volume = read_volume(whole, 4, first_only=True)
    assert np.array_equal(volume.voxels, voxels[..., :1])
    assert np.array_equal(volume.affine, AFFINE)
    three = write(tmp_path / "c.nii.gz", voxels[..., 0])
    assert np.array_equal(read_volume(three, first_only=True).voxels, voxels[..., 0])


def test_an_affine_that_is_not_finite_is_told_alone(tmp_path, caplog):
    with pytest.raises(ValueError, match="singular or not finite"):
        read_header(write(tmp_path / "a.nii", voxels_of(), srow_x=[math.nan, 0, 0, 0]))
    assert caplog.records == []
