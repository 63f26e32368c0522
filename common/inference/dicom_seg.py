"""DICOM segmentations out: a label map as a SEG object that viewers lay over its series."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from highdicom.content import AlgorithmIdentificationSequence
from highdicom.seg import Segmentation, SegmentDescription
from pydicom.sr.codedict import codes
from pydicom.uid import generate_uid

from medspeed.common.data.dicom import DicomSeries
from medspeed.common.data.dicom_slices import BROKEN, inflated, quiet_dicom
from medspeed.common.files import atomic_path
from medspeed.common.inference.labels import Region

ALGORITHM = "medspeed"
_ATTRIBUTES: dict[str, Any] = {
    "segmentation_type": "BINARY",  # frames without voxels are left out, unless all are
    "series_number": 9000,  # any will do; beyond those that scanners give
    "instance_number": 1,
    "manufacturer": ALGORITHM,
    "manufacturer_model_name": ALGORITHM,
    "device_serial_number": "none",  # must not be empty (type 1), and must not name a host
    "series_description": f"Segmentation by {ALGORITHM}",
    "specific_character_set": "ISO_IR 192",  # UTF-8 holds whatever the source's character set does
}
# What a SEG needs of its source images: where they lie and what they are called, nothing of the patient.
REFERENCES = (
    "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID", "Modality", "Rows",
    "Columns", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness",
    "LossyImageCompression",
)  # fmt: skip
# Attributes that must be there, but may be empty (type 2). Source: DICOM PS3.3 C.7.1.1 and C.7.2.1
BLANK = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID",
    "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip
# SNOMED CT names of what a structure is; a word of its name decides, lesions first. Source: DICOM PS3.16 CID 7166, 7159
ORGANS = {
    "spleen", "liver", "kidney", "pancreas", "lung", "heart", "brain", "prostate", "hippocampus", "gallbladder",
    "stomach", "aorta", "colon", "esophagus", "bone",
}  # fmt: skip
LESIONS = {
    "edema": "Edema", "oedema": "Edema", "necrosis": "Necrosis",
    **dict.fromkeys(("tumor", "tumour", "neoplasm", "cancer", "wt", "tc", "et"), "Neoplasm"),
}  # fmt: skip


def write_seg(
    path: Path, labels: np.ndarray, series: DicomSeries, structures: Sequence[Region], version: str, keep_patient: bool
) -> None:
    """Write a label map [X, Y, Z] uint8, on the grid of a series, as a binary DICOM segmentation, atomically.

    Each structure is a segment; a voxel may belong to several. Without voxels it has no frames; where none has any, all
    frames are stored, empty. The study, series and frame-of-reference UIDs are those of the source, whose headers are
    read again, so that viewers and archives can match them. The `version` is that of what found the labels, up to 64
    characters; `keep_patient` copies the attributes of patient and study, which are left empty otherwise.

    Raises:
        ValueError: a source header cannot be read or lacks what a segmentation must refer to.
    """
    assert labels.dtype == np.uint8, labels.dtype
    assert labels.shape == series.shape, (labels.shape, series.shape)
    quiet_dicom()
    said = f"{series.name}: cannot write a DICOM segmentation: a header"
    found_by = AlgorithmIdentificationSequence(ALGORITHM, codes.cid7162.ArtificialIntelligence, version)
    segments = [
        SegmentDescription(number, each.name.replace("\\", "/")[:64], *_codes(each.name), "AUTOMATIC", found_by)
        for number, each in enumerate(structures, 1)
    ]
    masks = np.stack([np.isin(labels.T, region.members) for region in structures], axis=-1)  # [Z, Y, X, S]
    given: dict[str, Any] = {"pixel_array": masks, "segment_descriptions": segments, "software_versions": version}
    given |= {name: generate_uid() for name in ("series_instance_uid", "sop_instance_uid")}
    try:
        sources = [_source(file, keep_patient) for file in series.files]
    except BROKEN:  # pydicom's; it may quote the patient, as highdicom's below: neither is chained
        raise ValueError(f"{said} cannot be read: copy it again") from None
    for one in sources:  # highdicom wants one orientation to the last digit, which scanners round
        one.ImageOrientationPatient = sources[0].ImageOrientationPatient
    try:
        image = Segmentation(source_images=sources, **given, **_ATTRIBUTES)
    except (AttributeError, TypeError, ValueError):  # highdicom's, of what a header lacks or holds
        due = (*REFERENCES, *BLANK) if keep_patient else REFERENCES
        lacking = [name for name in REFERENCES[:-2] if any(one.get(name) is None for one in sources)]
        found = f"lacks {', '.join(lacking)}" if lacking else f"has an invalid value among {', '.join(due)}"
        raise ValueError(f"{said} {found}: correct the headers, or convert to NIfTI") from None
    _set_distance(image, sources)
    image.save_as(content := io.BytesIO())  # by itself pydicom does not name the folder of a full disk
    with atomic_path(path) as part:
        part.write_bytes(content.getbuffer())


def _source(file: Path, keep_patient: bool) -> pydicom.Dataset:
    """Return the header of a source image; without the patient, identifying attributes are never read."""
    tags = None if keep_patient else list(REFERENCES)
    header = pydicom.dcmread(inflated(file, 0), stop_before_pixels=True, specific_tags=tags)
    for keyword in (*BLANK, "SliceThickness"):  # this follows from the positions
        if keyword not in header:
            setattr(header, keyword, None)
    return header


def _set_distance(image: Segmentation, sources: Sequence[pydicom.Dataset]) -> None:
    """Store the distance of the slices' planes, which highdicom leaves out where they are tilted."""
    first, last = (np.array(one.ImagePositionPatient, np.float64) for one in (sources[0], sources[-1]))
    turn = np.array(sources[0].ImageOrientationPatient, np.float64)
    distance = round(float((last - first) @ np.cross(turn[:3], turn[3:])) / (len(sources) - 1), 6)
    measures = image.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SpacingBetweenSlices = distance
    measures.SliceThickness = measures.get("SliceThickness") or distance


def _codes(name: str) -> tuple[Any, Any]:
    """Return category and type of a structure; Tissue and Tissue where its name says nothing."""
    words = re.findall("[a-z]+", name.lower())
    for word in filter(LESIONS.__contains__, words):
        return codes.SCT.MorphologicallyAbnormalStructure, getattr(codes.SCT, LESIONS[word])
    for word in filter(ORGANS.__contains__, words):
        return codes.SCT.AnatomicalStructure, getattr(codes.SCT, word.capitalize())
    return codes.SCT.Tissue, codes.SCT.Tissue
