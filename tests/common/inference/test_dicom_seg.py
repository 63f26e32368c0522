import errno
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest

from medspeed.common.data.dicom import find_series, read_series
from medspeed.common.inference.dicom_seg import write_seg
from medspeed.common.inference.labels import Region
from tests.common.data.dicom_files import PATIENT, traces, write_slices

STORED = np.zeros((5, 6, 4), np.uint16)  # [Z, Y, X]
SPLEEN = Region("spleen", (1,), 1)
# Regions of a brain tumour: the core lies within the whole.
WHOLE, CORE = Region("WT", (1, 2), 1), Region("TC", (2,), 2)


def segment(folder, labels, structures, version="0.1.0", keep_patient=False):
    """Write a series and its segmentation; return series, file and what pydicom reads."""
    (series,) = find_series(folder)
    path = folder.parent / "seg.dcm"
    write_seg(path, labels, series, structures, version, keep_patient)
    return series, path, pydicom.dcmread(path)


def labels_of(*voxels):
    labels = np.zeros((4, 6, 5), np.uint8, order="F")
    for x, y, z, number in voxels:
        labels[x, y, z] = number
    return labels


def world_of(image):
    """Return, by segment number, the RAS positions of its voxels, worked out from the frames' own geometry."""
    shared = image.SharedFunctionalGroupsSequence[0]
    turn = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float)
    rows, columns = map(float, shared.PixelMeasuresSequence[0].PixelSpacing)
    pixels = image.pixel_array.reshape(-1, image.Rows, image.Columns)
    found: dict[int, set[tuple[float, ...]]] = {}
    for frame, groups in zip(pixels, image.PerFrameFunctionalGroupsSequence, strict=True):
        identification = groups if "SegmentIdentificationSequence" in groups else shared
        number = identification.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        origin = np.array(groups.PlanePositionSequence[0].ImagePositionPatient, float)
        for y, x in np.argwhere(frame):
            place = (origin + turn[:3] * columns * x + turn[3:] * rows * y) * [-1, -1, 1]
            found.setdefault(number, set()).add(tuple(place.round(3).tolist()))
    return found


def world_by(affine, labels, members):
    voxels = np.argwhere(np.isin(labels, members))
    return {tuple(place.round(3).tolist()) for place in (voxels @ affine[:3, :3].T + affine[:3, 3])}


@pytest.mark.parametrize("step", [(0, 0, 2.5), (0, 0, -2.5), (0, 0.5, 2)])
def test_a_segmentation_lies_on_the_voxels_of_its_series(tmp_path, step):
    write_slices(tmp_path / "in", STORED, step=step)
    labels = labels_of((0, 0, 0, 1), (3, 1, 2, 1), (1, 5, 2, 2), (2, 4, 4, 1))
    series, path, image = segment(tmp_path / "in", labels, [SPLEEN, Region("liver", (2,), 2)])
    volume = read_series(series)
    assert world_of(image) == {1: world_by(volume.affine, labels, [1]), 2: world_by(volume.affine, labels, [2])}
    uids = [pydicom.dcmread(file).SOPInstanceUID for file in series.files]
    again = highdicom.seg.segread(path).get_pixels_by_source_instance(uids, ignore_spatial_locations=True)
    np.testing.assert_array_equal(again[..., 0].T, labels == 1)
    np.testing.assert_array_equal(again[..., 1].T, labels == 2)


def test_an_orientation_that_the_scanner_rounded_does_not_cost_the_scan(tmp_path):
    def change(number, image):
        image.ImageOrientationPatient = [1, 0, 1e-5 * (number == 2), 0, 1, 0]

    write_slices(tmp_path / "in", STORED, change=change)
    labels = labels_of((0, 0, 0, 1), (3, 1, 2, 1))
    series, _, image = segment(tmp_path / "in", labels, [SPLEEN])
    assert world_of(image)[1] == world_by(read_series(series).affine, labels, SPLEEN.members)


def test_regions_may_overlap(tmp_path):
    write_slices(tmp_path / "in", STORED)
    labels = labels_of((1, 2, 3, 1), (2, 2, 3, 2))
    series, _, image = segment(tmp_path / "in", labels, [CORE, WHOLE])
    affine = read_series(series).affine
    assert world_of(image) == {1: world_by(affine, labels, [2]), 2: world_by(affine, labels, [1, 2])}
    assert image.SegmentsOverlap == "YES"


def test_a_name_is_one_value_of_64_characters_at_most(tmp_path):
    write_slices(tmp_path / "in", STORED)
    named = [Region("a\\b", (1,), 1), Region("c" * 70, (2,), 2)]
    *_, image = segment(tmp_path / "in", labels_of((0, 0, 0, 1)), named)
    assert [each.SegmentLabel for each in image.SegmentSequence] == ["a/b", "c" * 64]


def test_what_a_viewer_asks_for_is_there(tmp_path):
    write_slices(tmp_path / "in", STORED)
    structures = [SPLEEN, Region("left kidney", (2,), 2), Region("liver tumour", (3,), 3), Region("thing", (4,), 4)]
    series, _, image = segment(tmp_path / "in", labels_of((1, 1, 1, 1), (1, 1, 2, 4)), structures)
    source = pydicom.dcmread(series.files[0])
    for keyword in ("StudyInstanceUID", "FrameOfReferenceUID"):
        assert image[keyword].value == source[keyword].value
    assert image.SeriesInstanceUID != source.SeriesInstanceUID
    assert (image.Modality, image.SegmentationType, image.PhotometricInterpretation) == ("SEG", "BINARY", "MONOCHROME2")
    referenced = image.ReferencedSeriesSequence[0]
    assert referenced.SeriesInstanceUID == source.SeriesInstanceUID
    assert {one.ReferencedSOPInstanceUID for one in referenced.ReferencedInstanceSequence} == {
        pydicom.dcmread(file).SOPInstanceUID for file in series.files
    }
    # SNOMED CT: spleen, kidney, neoplasm, tissue.
    kinds = [one.SegmentedPropertyTypeCodeSequence[0] for one in image.SegmentSequence]
    assert [one.CodeValue for one in kinds] == ["78961009", "64033007", "108369006", "85756007"]
    assert [one.SegmentLabel for one in image.SegmentSequence] == ["spleen", "left kidney", "liver tumour", "thing"]
    found_by = image.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence[0]
    assert (found_by.AlgorithmName, found_by.AlgorithmVersion) == ("medspeed", "0.1.0")
    assert image.SegmentSequence[0].SegmentAlgorithmType == "AUTOMATIC"
    measures = image.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert (measures.PixelSpacing, measures.SpacingBetweenSlices) == ([0.8, 0.7], 2.5)


@pytest.mark.parametrize(("thickness", "stored"), [(5, 5), (None, 2.5)])
def test_the_spacing_is_that_of_the_positions_whatever_the_thickness(tmp_path, thickness, stored):
    # A tilted stack: its planes lie 2.5 mm apart, its slice centres further.
    change = lambda _, image: setattr(image, "SliceThickness", thickness)  # noqa: E731
    write_slices(tmp_path / "in", STORED, step=(0, 1.5, 2.5), change=change)
    _, _, image = segment(tmp_path / "in", labels_of((1, 1, 1, 1)), [SPLEEN])
    measures = image.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert (measures.SliceThickness, measures.SpacingBetweenSlices) == (stored, 2.5)


def test_a_series_without_a_thickness_has_that_of_its_positions(tmp_path):
    write_slices(tmp_path / "in", STORED, change=lambda _, image: delattr(image, "SliceThickness"))
    *_, image = segment(tmp_path / "in", labels_of((1, 1, 1, 1)), [SPLEEN])
    assert image.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness == 2.5


def test_a_full_disk_is_an_error_of_one_line_that_names_the_folder(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_slices(tmp_path / "in", STORED)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'$"):
        segment(tmp_path / "in", labels_of((1, 1, 1, 1)), [SPLEEN])


def test_an_empty_mask_is_stored_as_empty_frames_and_a_missing_structure_as_a_segment_without(tmp_path):
    write_slices(tmp_path / "in", STORED)
    _, _, image = segment(tmp_path / "in", labels_of(), [SPLEEN])
    assert image.NumberOfFrames == 5
    assert not image.pixel_array.any()
    _, _, image = segment(tmp_path / "in", labels_of((1, 1, 1, 2)), [SPLEEN, Region("liver", (2,), 2)])
    assert (len(image.SegmentSequence), image.NumberOfFrames) == (2, 1)
    assert set(world_of(image)) == {2}


def test_the_patient_is_nowhere_by_default(tmp_path, caplog):
    write_slices(tmp_path / "Planted_Petra", STORED)
    with caplog.at_level("DEBUG"):
        _, path, image = segment(tmp_path / "Planted_Petra", labels_of((1, 1, 1, 1)), [SPLEEN])
    content = path.read_bytes()
    assert not [trace for trace in traces() if trace.encode() in content or trace in caplog.text]
    assert "1.2.826" not in caplog.text
    assert [image[keyword].value for keyword in ("PatientName", "PatientID", "StudyDate", "AccessionNumber")] == [
        ""
    ] * 4
    assert "InstitutionName" not in image


def test_the_patient_is_kept_where_asked_for(tmp_path, caplog):
    def change(_, image):
        image.SpecificCharacterSet, image.PatientName = "ISO_IR 100", "Müller^Jürgen"

    write_slices(tmp_path / "in", STORED, change=change)
    with caplog.at_level("DEBUG"):
        _, _, image = segment(tmp_path / "in", labels_of((1, 1, 1, 1)), [SPLEEN], keep_patient=True)
    assert image.PatientName == "Müller^Jürgen"
    kept = (
        "PatientID",
        "PatientBirthDate",
        "PatientSex",
        "StudyDate",
        "StudyID",
        "AccessionNumber",
        "StudyDescription",
    )
    assert {keyword: image[keyword].value for keyword in kept} == {keyword: PATIENT[keyword] for keyword in kept}
    assert "Jürgen" not in caplog.text


@pytest.mark.parametrize("keep_patient", [False, True])
@pytest.mark.parametrize("lost", ["StudyInstanceUID", "FrameOfReferenceUID"])
def test_a_header_that_cannot_be_referred_to_is_refused_without_names(tmp_path, lost, keep_patient):
    write_slices(tmp_path / "in", STORED, change=lambda _, image: delattr(image, lost))
    (series,) = find_series(tmp_path / "in")
    path = tmp_path / "seg.dcm"
    with pytest.raises(ValueError, match=f"^{series.name}: cannot write a DICOM segmentation") as refused:
        write_seg(path, labels_of(), series, [SPLEEN], version="1", keep_patient=keep_patient)
    assert not [trace for trace in [*traces(), str(tmp_path)] if trace in str(refused.value)]
    assert refused.value.__suppress_context__
    assert not path.exists()


def test_a_sex_that_is_none_of_dicoms_is_refused_without_quoting_it(tmp_path):
    def change(_, image):
        image.PatientSex = "PLANTED"

    write_slices(tmp_path / "in", STORED, change=change)
    with pytest.raises(ValueError, match=r"has an invalid value among .*PatientSex") as refused:
        segment(tmp_path / "in", labels_of(), [SPLEEN], keep_patient=True)
    assert "PLANTED" not in str(refused.value)
    segment(tmp_path / "in", labels_of(), [SPLEEN])


@pytest.mark.real_data
def test_a_real_series_and_its_segmentation_agree(real_data, tmp_path):
    (series,) = find_series(real_data / "ct_dicom_real")
    volume = read_series(series)
    labels = np.asfortranarray((volume.voxels > 200).astype(np.uint8))
    path = tmp_path / "seg.dcm"
    write_seg(path, labels, series, [Region("bone", (1,), 1)], version="1", keep_patient=False)
    again = highdicom.seg.segread(path).get_volume(combine_segments=True)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ again.affine  # highdicom's axes: slice, row, column, in LPS
    places = np.argwhere(np.asarray(again.array))
    indices = np.linalg.inv(volume.affine) @ affine @ np.c_[places, np.ones(len(places))].T
    found = np.zeros_like(labels)
    found[tuple(indices[:3].round().astype(int))] = 1
    np.testing.assert_array_equal(found, labels)


def test_what_a_header_lacks_is_named_alone(tmp_path):
    def change(_, image):
        del image.StudyInstanceUID

    write_slices(tmp_path / "in", STORED, change=change)
    with pytest.raises(ValueError, match=r"a header lacks StudyInstanceUID: correct the headers, or convert to NIfTI"):
        segment(tmp_path / "in", labels_of(), [SPLEEN])
