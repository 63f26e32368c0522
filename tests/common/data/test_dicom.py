import io
import logging
import math
import os
import re
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    GrayscaleSoftcopyPresentationStateStorage,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    MediaStorageDirectoryStorage,
    RLELossless,
    RTStructureSetStorage,
    SecondaryCaptureImageStorage,
    SegmentationStorage,
    generate_uid,
)
from scipy.spatial.transform import Rotation

from medspeed.common.data import dicom, dicom_slices
from medspeed.common.data.dicom import DicomSeries, find_series, read_series
from medspeed.common.data.volumes import Volume, read_volume
from tests.common.data.dicom_files import Change, traces, write_slices

NOISE = np.random.default_rng(3).integers(0, 3000, (5, 6, 4)).astype(np.uint16)  # [Z, Y, X]


def read_only(folder: Path) -> Volume:
    (series,) = find_series(folder)
    assert series.problem == ""
    return read_series(series)


def problem_of(folder: Path) -> str:
    """Return why the only series is refused; nothing of the patient, a path or a UID may be in it or in the notes."""
    (series,) = find_series(folder)
    with pytest.raises(ValueError, match=series.name) as refused:
        read_series(series)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    message = str(refused.value)
    for trace in [*traces(), str(folder), folder.name, "1.2.826"]:
        assert trace not in message + repr((series.name, series.notes, series.problem, series.modality))
    return message.removeprefix(series.name)


def at(slices: set[int], **values: Any) -> Change:
    """Return a change that sets attributes of some slices, or removes those that are None."""

    def change(number: int, image: Any) -> None:
        for keyword, value in values.items() if number in slices else ():
            if value is None:
                delattr(image, keyword)
            else:
                setattr(image, keyword, value)

    return change


ALL = set(range(5))


def test_a_series_becomes_a_volume_in_order_of_position(tmp_path):
    uid = write_slices(tmp_path, NOISE)
    (series,) = find_series(tmp_path)
    assert series.name.removeprefix("series-").isalnum()
    assert len(series.name) == 19
    assert uid not in series.name
    assert (series.shape, series.modality, series.notes, series.problem) == ((4, 6, 5), "CT", (), "")
    volume = read_series(series)
    assert volume.path == Path(series.name)
    assert volume.voxels.dtype == np.int16
    assert volume.voxels.flags.f_contiguous
    np.testing.assert_array_equal(volume.voxels, NOISE.T.astype(int) - 1024)
    # By hand: columns lie 0.7 mm apart along L, so -0.7 along R; rows 0.8 mm along P; slices 2.5 mm along S.
    np.testing.assert_allclose(
        volume.affine, [[-0.7, 0.0, 0.0, 10.0], [0.0, -0.8, 0.0, 20.0], [0.0, 0.0, 2.5, 30.0], [0.0, 0.0, 0.0, 1.0]]
    )


def test_slices_that_come_from_top_to_bottom_are_turned_round(tmp_path):
    write_slices(tmp_path, NOISE, step=(0, 0, -2.5))
    volume = read_only(tmp_path)
    np.testing.assert_array_equal(volume.voxels, NOISE[::-1].T.astype(int) - 1024)
    np.testing.assert_allclose(volume.affine[:3, 2:], [[0.0, 10.0], [0.0, 20.0], [2.5, 20.0]])


def test_a_tilted_gantry_shears_the_affine_and_is_told(tmp_path):
    # Slices move 2 mm along S and 2 tan(12 degrees) mm along P, while their planes stay axial.
    shift = 2 * np.tan(np.deg2rad(12))
    write_slices(tmp_path, NOISE, step=(0, shift, 2), change=at(ALL, SliceThickness=2))
    (series,) = find_series(tmp_path)
    assert series.notes == ("gantry tilt of 12.0 degrees shears the affine; ITK does not read it: use the DICOM-SEG",)
    affine = read_series(series).affine
    np.testing.assert_allclose(affine @ [0, 0, 0, 1], [10, 20, 30, 1])
    np.testing.assert_allclose(affine @ [1, 2, 4, 1], [10 - 0.7, 20 - 1.6 - 4 * shift, 38, 1], atol=1e-6)


angles = st.floats(-180, 180)


@settings(max_examples=10)
@given(turn=st.tuples(angles, angles, angles), origin=st.tuples(*[st.floats(-900, 900)] * 3), seed=st.integers(0, 9))
def test_every_voxel_lies_where_its_header_says(tmp_path_factory, turn, origin, seed):
    folder = tmp_path_factory.mktemp("any")
    rotation = Rotation.from_euler("xyz", turn, degrees=True).as_matrix()
    along_row, along_column, normal = rotation.T
    distance, between_rows, between_columns = np.random.default_rng(seed).uniform(0.3, 5, 3).round(4)
    write_slices(
        folder, NOISE[:3], origin=origin, turn=[*along_row, *along_column], step=distance * normal,
        spacing=(between_rows, between_columns),
    )  # fmt: skip
    volume = read_only(folder)
    for file in folder.iterdir():
        image = pydicom.dcmread(file)
        position, k = np.array(image.ImagePositionPatient, float), image.InstanceNumber - 1
        for i, j in ((0, 0), (3, 0), (0, 5), (2, 4)):
            lps = position + along_row * between_columns * i + along_column * between_rows * j
            np.testing.assert_allclose((volume.affine @ [i, j, k, 1])[:3], lps * [-1, -1, 1], atol=1e-4)
            assert volume.voxels[i, j, k] == NOISE[k, j, i].astype(int) - 1024


def test_signed_values_keep_their_sign(tmp_path):
    signed = (NOISE.astype(int) - 1500).astype(np.int16)
    write_slices(tmp_path, signed, change=at(ALL, RescaleIntercept=0))
    np.testing.assert_array_equal(read_only(tmp_path).voxels, signed.T)


def test_twelve_stored_bits_are_read_without_the_four_above_them(tmp_path):
    # -5 in 12 bits is 0xFFB; what the upper four bits hold (overlays, of old) does not count.
    stored = np.full((2, 3, 4), 0x3FFB, np.int16)
    write_slices(tmp_path, stored, change=at(ALL, BitsStored=12, HighBit=11, RescaleIntercept=0))
    assert (read_only(tmp_path).voxels == -5).all()


def test_a_slope_that_is_no_whole_number_gives_float32_slice_by_slice(tmp_path):
    def change(number, image):
        image.RescaleSlope, image.RescaleIntercept = 0.25 * (number + 1), -3.5

    write_slices(tmp_path, NOISE, change=change)
    volume = read_only(tmp_path)
    assert volume.voxels.dtype == np.float32
    np.testing.assert_array_equal(volume.voxels, NOISE.T * (0.25 * np.arange(1, 6)) - 3.5)


def test_values_beyond_int16_become_float32(tmp_path):
    stored = np.full((2, 3, 4), 65535, np.uint16)
    write_slices(tmp_path, stored, change=at(ALL, RescaleIntercept=0))
    volume = read_only(tmp_path)
    assert volume.voxels.dtype == np.float32
    assert (volume.voxels == 65535).all()
    write_slices(tmp_path / "edge", stored, change=at(ALL, RescaleIntercept=-32768))
    assert [one.problem for one in find_series(tmp_path / "edge")] == [""]
    assert read_only(tmp_path / "edge").voxels.dtype == np.int16


@pytest.mark.parametrize(("kind", "told"), [("", False), ("hu", False), ("US", False), ("MGML", True), ("Z_EFF", True)])
def test_a_ct_whose_values_are_not_hu_is_noted(tmp_path, kind, told):
    write_slices(tmp_path, NOISE, change=at(ALL, RescaleType=kind))
    (series,) = find_series(tmp_path)
    assert any("its values are not HU" in note for note in series.notes) == told
    assert not series.problem


def test_mri_goes_without_a_rescale(tmp_path):
    write_slices(tmp_path, NOISE, change=at(ALL, Modality="MR", RescaleSlope=None, RescaleIntercept=None))
    np.testing.assert_array_equal(read_only(tmp_path).voxels, NOISE.T)


def jpegls(pixels: Any) -> bytes:
    return bytes(imagecodecs.jpegls_encode(pixels.view(np.uint16)))


def jpeg2000(pixels: Any) -> bytes:
    return bytes(imagecodecs.jpeg2k_encode(pixels, level=0, codecformat="j2k", reversible=True))


def lossless_jpeg(pixels: Any) -> bytes:
    return bytes(imagecodecs.ljpeg_encode(pixels.view(np.uint16), bitspersample=16))


ENCODERS = {JPEGLSLossless: jpegls, JPEG2000Lossless: jpeg2000, JPEGLosslessSV1: lossless_jpeg}


def compressed(syntax: UID) -> Change:
    def change(number: int, image: Any) -> None:
        if syntax == RLELossless:
            image.compress(RLELossless, generate_instance_uid=False)
            return
        image.PixelData = encapsulate([ENCODERS.get(syntax, jpeg2000)(image.pixel_array)])
        image["PixelData"].VR = "OB"
        image.file_meta.TransferSyntaxUID = syntax

    return change


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("syntax", [JPEG2000Lossless, JPEGLSLossless, JPEGLosslessSV1, RLELossless])
def test_compressed_slices_are_as_the_uncompressed(tmp_path, syntax, signed):
    stored = np.random.default_rng(1).integers(0, 3000, (2, 32, 40)).astype(np.int16 if signed else np.uint16)
    stored -= np.array(1500 * signed, stored.dtype)
    write_slices(tmp_path / "plain", stored)
    write_slices(tmp_path / "packed", stored, change=compressed(syntax))
    for file in (tmp_path / "packed").iterdir():
        assert pydicom.dcmread(file).file_meta.TransferSyntaxUID == syntax
    np.testing.assert_array_equal(read_only(tmp_path / "packed").voxels, read_only(tmp_path / "plain").voxels)


def test_a_signed_slice_in_an_unsigned_jpeg_2000_stream_keeps_its_sign(tmp_path):
    signed = (NOISE.astype(int) - 1500).astype(np.int16)

    def change(number, image):
        image.RescaleIntercept, image.PixelRepresentation = 0, 0
        compressed(JPEG2000Lossless)(number, image)  # the stream tells of unsigned values, the header of signed ones
        image.PixelRepresentation = 1

    write_slices(tmp_path, signed, change=change)
    np.testing.assert_array_equal(read_only(tmp_path).voxels, signed.T)


def test_a_jpeg_2000_stream_of_another_size_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    """A kilobyte may ask for gigabytes."""

    def change(number, image):
        stream = bytearray(jpeg2000(image.pixel_array))
        stream[8:16] = struct.pack(">2I", 2**20, 2**20)
        image.PixelData = encapsulate([bytes(stream)])
        image["PixelData"].VR = "OB"
        image.file_meta.TransferSyntaxUID = JPEG2000Lossless

    write_slices(tmp_path, NOISE, change=change)
    monkeypatch.setattr(imagecodecs, "jpeg2k_decode", lambda _: pytest.fail("decoded"))
    assert re.search("pixel data of slice . are missing, truncated or damaged", problem_of(tmp_path))


@pytest.mark.parametrize("syntax", [JPEG2000Lossless, JPEGLSLossless, JPEGLosslessSV1])
def test_what_a_compressed_stream_holds_above_the_stored_bits_does_not_count(tmp_path, syntax):
    """-5 in 12 bits is 0xFFB: neither an overlay of old in the bits above it, nor a sign that they lack."""
    for number, above in enumerate((0, 0x3000, 0xF000)):

        def change(place, image, above=above):
            image.PixelData = (np.full((32, 40), 0xFFB, np.uint16) | np.uint16(above)).tobytes()
            image.PixelRepresentation = 0
            compressed(syntax)(place, image)
            image.BitsStored, image.HighBit, image.RescaleIntercept, image.PixelRepresentation = 12, 11, 0, 1

        write_slices(tmp_path / str(number), np.zeros((2, 32, 40), np.uint16), change=change)
        assert (read_only(tmp_path / str(number)).voxels == -5).all()


def test_empty_files_of_a_broken_copy_are_told_and_an_index_is_not(tmp_path, caplog):
    write_slices(tmp_path, NOISE)
    (tmp_path / "volume.nii.gz").touch()  # no DICOM file, whatever it lacks
    index = pydicom.Dataset()
    index.file_meta = pydicom.dataset.FileMetaDataset()
    index.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    index.file_meta.MediaStorageSOPClassUID = MediaStorageDirectoryStorage
    index.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    index.save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    assert [series.problem for series in find_series(tmp_path)] == [""]
    assert "damaged" not in caplog.text
    next(tmp_path.glob("Planted*")).write_bytes(b"")
    find_series(tmp_path)
    assert "skipped 1 files that are empty, or damaged DICOM: copy them again" in caplog.text


@pytest.mark.parametrize("damage", ["cut before its header", "of another class"])
def test_an_end_slice_that_damage_hides_is_told(tmp_path, caplog, damage):
    """Without it the others are a regular stack: nothing else would show that the scan ends too early."""
    write_slices(tmp_path, NOISE)
    (series,) = find_series(tmp_path)
    last = series.files[-1].rename(tmp_path / "last.dcm")
    (tmp_path / "._last.dcm").write_bytes(b"macOS")
    state = pydicom.dcmread(last)  # what a workstation may add to a series
    state.SOPClassUID = state.file_meta.MediaStorageSOPClassUID = GrayscaleSoftcopyPresentationStateStorage
    del state.Rows, state.Columns, state.PixelData
    state.save_as(tmp_path / "state.dcm")
    find_series(tmp_path)
    assert "skipped" not in caplog.text
    content = last.read_bytes()
    kind = pydicom.dcmread(last).SOPClassUID.encode()
    assert content.count(kind) == 2  # in the file's own header, too
    last.write_bytes(content[:63] if damage.startswith("cut") else content.replace(kind, kind[:-1] + b"0"))
    (series,) = find_series(tmp_path)
    assert (len(series.files), series.problem) == (len(NOISE) - 1, "")
    assert "skipped 1 files" in caplog.text


REFUSED: dict[str, tuple[Change, str]] = {
    "two phases": (
        lambda number, image: setattr(image, "ImagePositionPatient", [0, 0, number // 2]),
        r": 5 slices share 3 positions \(slice 1 at 0.00 mm and slice 2 at 0.00 mm; slice 3 at 1.00 mm and slice 4 at "
        r"1.00 mm\): several phases",
    ),
    "one place": (at(ALL, ImagePositionPatient=[0, 0, 7]), ": 5 slices share 1 positions .slice 1 at"),
    "uneven": (
        at({2}, ImagePositionPatient=[-10, -20, 34.5]),
        r": slice 3 is 0.50 mm off the regular grid \(at most 0.2",
    ),
    "sideways": (at({1}, ImagePositionPatient=[-11, -20, 32.5]), r": slice 2 is 1.00 mm off the regular grid"),
    "orientation": (
        at({3}, ImageOrientationPatient=[0, 1, 0, 0, 0, 1]),
        r" mixes stacks: slice 1 has ImageOrientationPatient \[1.0, .* slice 4 has \[0.0, 1.0, .*export each",
    ),
    "shape": (at({3}, Rows=5), r" mixes stacks: slice 1 has Rows \[6.0\], slice 4 has \[5.0\]"),
    "spacing": (at({4}, PixelSpacing=[0.8, 0.8]), r"slice 1 has PixelSpacing \[0.8, 0.7\], slice 5 has \[0.8, 0.8\]"),
    "skewed": (at(ALL, ImageOrientationPatient=[1, 0, 0, 0.1, 1, 0]), "is not a pair of orthogonal unit vectors"),
    "multi-frame": (at({0}, NumberOfFrames=3), r": slice 1 is an enhanced multi-frame image \(3 frames\)"),
    "enhanced": (at(ALL, SOPClassUID=pydicom.uid.EnhancedCTImageStorage), "is an enhanced multi-frame image"),
    "colour": (
        at(ALL, SamplesPerPixel=3, PhotometricInterpretation="RGB", SOPClassUID=SecondaryCaptureImageStorage),
        ": slice [1-5] is a color image",
    ),
    "no position": (at({1}, ImagePositionPatient=None), ": slice 2 has no valid ImagePositionPatient"),
    "no geometry": (
        at(ALL, ImagePositionPatient=None, ImageOrientationPatient=None, PixelSpacing=None),
        "has no valid PixelSpacing, ImageOrientationPatient, ImagePositionPatient",
    ),
    "zero spacing": (at(ALL, PixelSpacing=[0.8, 0]), r"'PixelSpacing': \(0.8, 0.0\)}; each must be above 0"),
    "no rescale": (at({2}, RescaleIntercept=None), ": slice 3 has no usable RescaleSlope and RescaleIntercept"),
    "zero slope": (at({2}, RescaleSlope=0), ": slice 3 has no usable RescaleSlope"),
    "huge slope": (at({2}, RescaleSlope="1e38"), ": values reach .*e.41: correct RescaleSlope"),
    "localizers": (at(ALL, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), ": it contains only localizers"),
    "no pixels": (at({1}, PixelData=None), ": pixel data of slice 2 are missing, truncated or damaged"),
    "too few pixels": (at({1}, PixelData=b"\0" * 46), ": pixel data of slice 2 are missing, truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_regular_stack_is_refused_alone(tmp_path, caplog, case):
    change, expected = REFUSED[case]
    write_slices(tmp_path / "Planted" / "bad", NOISE, change=change)
    message = problem_of(tmp_path / "Planted")
    assert re.search(expected, message), message
    assert not caplog.text
    good = write_slices(tmp_path / "Planted" / "good", NOISE)
    assert good
    series = find_series(tmp_path)
    readable = [one for one in series if one.shape == (4, 6, 5) and not one.problem]
    assert len(series) == 2
    assert "" in [complaint_of(one) for one in readable]


@pytest.mark.parametrize(
    ("uid", "said"),
    [
        (
            b"1.2.840.10008.1.2.4.100",
            "MPEG2 Main Profile / Main Level, which cannot be decoded: export it uncompressed",
        ),
        (b"1.2.840.99999.1.2.4.100", "1.2.840.99999.1.2.4.100, which"),
    ],
)
def test_a_transfer_syntax_without_a_decoder_is_named(tmp_path, uid, said):
    write_slices(tmp_path, NOISE, change=compressed(pydicom.uid.MPEG2MPML))
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes().replace(b"1.2.840.10008.1.2.4.100", uid))
    assert f"uses transfer syntax {said}" in problem_of(tmp_path)


def complaint_of(series: DicomSeries) -> str:
    try:
        read_series(series)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("lost", "places"), [({2}, "slice 2 at 32.50 mm and slice 4 at 37.50 mm"), ({1, 2}, "slice 1 at")]
)
def test_missing_slices_are_refused_with_their_place(tmp_path, lost, places):
    write_slices(tmp_path, np.concatenate((NOISE, NOISE)))
    for file in tmp_path.iterdir():
        if pydicom.dcmread(file).InstanceNumber - 1 in lost:
            file.unlink()
    message = problem_of(tmp_path)
    assert f"slices are missing between {places}" in message
    assert "others are 2.50 mm apart" in message


def test_slices_too_far_apart_are_refused(tmp_path):
    write_slices(tmp_path, NOISE, step=(0, 0, 1e6))
    assert ": voxel size 0.7 x 0.8 x 1e+06 mm, expected 0.01 to 100 mm" in problem_of(tmp_path)


def test_more_voxels_than_memory_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    write_slices(tmp_path, NOISE)
    monkeypatch.setattr(dicom, "free_memory", lambda *_: 900)
    assert read_only(tmp_path).voxels.size == 120  # little enough to be tried
    monkeypatch.setattr(dicom, "ALWAYS_TRIED", 0)
    assert ": its 4 x 6 x 5 voxels need" in problem_of(tmp_path)


def test_a_deflated_file_is_inflated_no_further_than_needed(tmp_path):
    def deflate(number: int, image: Any) -> None:
        image.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian

    def swell(number: int, image: Any) -> None:
        deflate(number, image)
        image.PixelData = bytes(4 * dicom_slices.MAX_HEADER)

    write_slices(tmp_path / "good", NOISE, change=deflate)
    assert np.array_equal(read_only(tmp_path / "good").voxels, NOISE.T.astype(np.int16) - 1024)
    write_slices(tmp_path / "bomb", NOISE, change=swell)
    (series,) = find_series(tmp_path / "bomb")
    content = dicom_slices.inflated(series.files[0], 48)
    assert isinstance(content, io.BytesIO)
    assert len(content.getvalue()) < dicom_slices.MAX_HEADER + 1000
    assert re.search("pixel data of slice . are missing, truncated or damaged", problem_of(tmp_path / "bomb"))


def test_pipes_are_passed_over_and_folders_that_cannot_be_listed_told(tmp_path, caplog, monkeypatch):
    write_slices(tmp_path / "a", NOISE)
    os.mkfifo(tmp_path / "a" / "pipe.dcm")
    (tmp_path / "Planted").mkdir()
    list_folder = os.scandir

    def denied(folder: Any) -> Any:
        if folder == forbidden or os.fspath(folder) == str(forbidden):
            raise PermissionError(13, "Permission denied", str(folder))
        return list_folder(folder)

    forbidden = tmp_path / "Planted"
    monkeypatch.setattr(os, "scandir", denied)
    assert [series.shape for series in find_series(tmp_path)] == [(4, 6, 5)]
    assert caplog.messages == ["skipped the files of a folder that cannot be listed (Permission denied)"]
    with pytest.raises(PermissionError):
        find_series(forbidden)


def test_one_slice_is_no_volume(tmp_path):
    write_slices(tmp_path, NOISE[:1])
    assert "it has 1 slice; a volume needs at least 2" in problem_of(tmp_path)


def test_rounded_positions_are_regular_enough(tmp_path):
    def change(number, image):
        image.ImagePositionPatient = [-10, -20, round(30 + 0.625 * number, 1)]  # off by up to 0.05 mm

    write_slices(tmp_path, NOISE, change=change)
    assert read_only(tmp_path).affine[2, 2] == pytest.approx(0.625, abs=0.02)


def test_localizers_and_copies_within_a_series_are_left_out_and_told(tmp_path):
    write_slices(tmp_path, NOISE, change=at({0}, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]))
    (tmp_path / "again").write_bytes(next(file for file in tmp_path.iterdir() if "_010" in file.name).read_bytes())
    (series,) = find_series(tmp_path)
    assert series.shape == (4, 6, 4)
    assert series.notes == ("1 of 6 images skipped: localizers", "1 of 6 images skipped: duplicates")
    np.testing.assert_array_equal(read_series(series).voxels, NOISE[1:].T.astype(int) - 1024)


def test_one_image_twice_is_no_volume_and_slices_of_one_identity_are_a_bad_one(tmp_path):
    write_slices(tmp_path / "one", NOISE[:1])
    (file,) = (tmp_path / "one").iterdir()
    (tmp_path / "one" / "again").write_bytes(file.read_bytes())
    write_slices(tmp_path / "same", NOISE, change=at(ALL, SOPInstanceUID="1.2.3"))
    (one,), (same,) = (find_series(tmp_path / name) for name in ("one", "same"))
    assert (one.is_volume, same.is_volume) == (False, True)
    assert "1 slice" in same.problem


def test_a_slice_thickness_that_is_not_the_distance_is_told(tmp_path):
    write_slices(tmp_path, NOISE, change=at(ALL, SliceThickness=5))
    (series,) = find_series(tmp_path)
    assert series.notes == ("SliceThickness is 5 mm but slices are 2.5 mm apart; the distance is used",)
    assert read_series(series).affine[2, 2] == 2.5


def test_series_are_found_in_any_folder_and_what_is_no_image_is_left_out(tmp_path):
    write_slices(tmp_path / "a" / "b", NOISE)
    write_slices(tmp_path / "c", NOISE)
    write_slices(tmp_path / "d", NOISE[:1], change=at(ALL, SOPClassUID=SegmentationStorage, Modality="SEG"))
    write_slices(tmp_path / "d", NOISE[:1], change=at(ALL, SOPClassUID=RTStructureSetStorage))
    (tmp_path / "notes.txt").write_text("DICM")
    (tmp_path / "empty").write_bytes(b"")
    series = find_series(tmp_path)
    assert len(series) == 2
    assert [one.name for one in series] == sorted(one.name for one in series)
    assert find_series(tmp_path / "d") == ()


def test_slices_without_number_are_read_and_refused_without_one(tmp_path):
    write_slices(tmp_path, NOISE, change=at(ALL, InstanceNumber=None))
    np.testing.assert_array_equal(read_only(tmp_path).voxels, NOISE.T.astype(int) - 1024)


def test_a_file_that_is_gone_after_it_was_found_is_told_without_its_name(tmp_path):
    write_slices(tmp_path, NOISE)
    (series,) = find_series(tmp_path)
    series.files[2].unlink()
    with pytest.raises(ValueError, match="1 of 5 files can no longer be read") as refused:
        read_series(series)
    assert "Petra" not in str(refused.value)


@pytest.mark.parametrize("syntax", [None, JPEG2000Lossless])
def test_a_file_cut_anywhere_is_refused_or_told_never_guessed(tmp_path, caplog, syntax):
    write_slices(tmp_path, NOISE, change=compressed(syntax) if syntax else None)
    victim = next(file for file in tmp_path.iterdir() if pydicom.dcmread(file).InstanceNumber == 3)
    content = victim.read_bytes()
    end = len(content) - (8 if syntax else 0)  # the delimiter behind the last fragment carries nothing
    for length in [*range(133, end, 97), end - 1]:
        victim.write_bytes(content[:length])
        caplog.clear()
        said = [complaint_of(one) for one in find_series(tmp_path)]  # two where the cut went through the series' UID
        assert said
        assert all(said), length
        gap = "slices are missing between slice 2" in "".join(said)
        assert gap or "slice 3" in said[0] or "a slice without InstanceNumber has no" in said[0], (length, said)
        assert ("skipped 1 files" in caplog.text) == (gap and len(said) == 1)
        assert not [trace for trace in [*traces(), str(tmp_path)] if trace in "".join(said)]
        assert not [trace for trace in [*traces(), str(tmp_path)] if trace in caplog.text]


def test_nothing_of_a_broken_header_is_said(tmp_path, caplog):
    # Values against their VR: pydicom would quote them in warnings and logs.
    def change(number, image):
        for keyword, value in (("ImagePositionPatient", b"Planted\\Petra\\x "), ("InstanceNumber", b"Petra ")):
            image[keyword] = pydicom.dataelem.RawDataElement(
                image[keyword].tag, image[keyword].VR, len(value), value, 0, False, True
            )
        image.SpecificCharacterSet = "ISO_IR 999"

    with pytest.warns(UserWarning, match="ISO_IR 999"):
        write_slices(tmp_path, NOISE, change=change)
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        assert "a slice without InstanceNumber has no valid ImagePositionPatient" in problem_of(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("pydicom")]


def test_a_mistake_of_ours_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    write_slices(tmp_path, NOISE)

    def mistaken(value):
        raise AttributeError("of this program")

    monkeypatch.setattr(dicom_slices, "math", SimpleNamespace(isfinite=mistaken, nan=math.nan))
    with pytest.raises(AttributeError, match="of this program"):
        find_series(tmp_path)


def test_damaged_bytes_anywhere_never_escape_as_another_error(tmp_path, caplog):
    write_slices(tmp_path, NOISE)
    victim = next(tmp_path.iterdir())
    content = victim.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(25):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[random.integers(132, len(content), 20)] = random.integers(0, 256, 20)
        victim.write_bytes(damaged.tobytes())
        for series in find_series(tmp_path):
            said = complaint_of(series)
            assert said == "" or series.name in said
            assert not [trace for trace in traces() if trace in said]
    assert not [trace for trace in [*traces(), str(tmp_path)] if trace in caplog.text]


@pytest.mark.real_data
def test_a_real_series_is_the_nifti_that_others_made_of_it(real_data):
    (series,) = find_series(real_data / "ct_dicom_real")
    assert series.shape == (512, 512, 20)
    assert series.notes == ("SliceThickness is 3 mm but slices are 2 mm apart; the distance is used",)
    volume = read_series(series)
    nifti = read_volume(real_data / "ct_spleen_real" / "imagesTr" / "real_b.nii.gz")
    # The converter stored the rows from the last to the first, as NIfTI tools do so that y runs to anterior: its file
    # holds the same voxels at the same places in the world under other indices.
    np.testing.assert_array_equal(volume.voxels, nifti.voxels[:, ::-1])
    assert volume.voxels.dtype == nifti.voxels.dtype == np.int16
    flipped = np.diag([1.0, -1.0, 1.0, 1.0])
    flipped[1, 3] = 511
    np.testing.assert_allclose(volume.affine, nifti.affine @ flipped, atol=1e-4)
    one_by_one = [pydicom.dcmread(io.BytesIO(file.read_bytes())) for file in series.files]
    np.testing.assert_array_equal(volume.voxels, np.stack([one.pixel_array.T for one in one_by_one], -1) - 1024.0)


@pytest.mark.parametrize("module", [dicom.__name__, "medspeed.common.inference.dicom_seg", "pydicom.valuerep"])
def test_no_warning_may_quote_a_file(module):
    with warnings.catch_warnings(record=True) as shown:
        dicom_slices.quiet_dicom()
        warnings.warn_explicit("Invalid value for VR PN: 'Doe^Jane'", UserWarning, "file.py", 1, module=module)
    assert not shown


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at(ALL, ImagePositionPatient=None), "ImagePositionPatient"),
        (lambda _, image: setattr(image, "SOPClassUID", EnhancedCTImageStorage), "ImagePositionPatient|multi-frame"),
    ],
)
def test_slices_of_no_known_place_are_a_bad_volume_not_a_scout(change, said, tmp_path):
    def changed(number: int, image: Any) -> None:
        at(ALL, ImagePositionPatient=None)(number, image)
        change(number, image) if said != "ImagePositionPatient" else None

    write_slices(tmp_path, NOISE, change=changed)
    (series,) = find_series(tmp_path)
    assert series.is_volume
    assert re.search(said, problem_of(tmp_path))
