"""Small DICOM series for tests, with a patient whose traces must show up nowhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

# What identifies the patient; each value is looked for in all that the program says and writes.
PATIENT = {
    "PatientName": "Planted^Petra",
    "PatientID": "PID-774411",
    "PatientBirthDate": "19510203",
    "PatientSex": "F",
    "StudyDate": "20190607",
    "StudyTime": "081533",
    "StudyID": "STID8812",
    "AccessionNumber": "ACC552299",
    "ReferringPhysicianName": "Zuweiser^Rudolf",
    "StudyDescription": "Staging of Petra",
    "InstitutionName": "St. Plantation",
    "StationName": "STATION77",
    "Manufacturer": "Makerscan",
    "OperatorsName": "Opera^Otto",
    "AcquisitionDate": "20190608",
}
Change = Callable[[int, Any], None]


def traces() -> list[str]:
    """Return the parts of the planted values, as they might turn up."""
    parts = [part for value in PATIENT.values() for part in value.split("^")]
    return [part for part in parts if len(part) > 1]


def write_slices(
    folder: Path,
    stored: np.ndarray,
    *,
    origin: Sequence[float] = (-10.0, -20.0, 30.0),
    turn: Sequence[float] = (1, 0, 0, 0, 1, 0),
    step: Sequence[float] = (0, 0, 2.5),
    spacing: Sequence[float] = (0.8, 0.7),
    change: Change | None = None,
    uid: str | None = None,
    study: str | None = None,
) -> str:
    """Write [Z, Y, X] int16 or uint16 values as CT slices, files in another order than slices; return the series' UID.

    Args:
        folder: made where it is missing.
        stored: the values as they lie in the files.
        origin: ImagePositionPatient of the first slice, mm.
        turn: ImageOrientationPatient.
        step: mm from slice to slice.
        spacing: PixelSpacing, between rows and between columns, mm.
        change: called with number from 0 and dataset before a slice is written.
        uid: SeriesInstanceUID.
        study: StudyInstanceUID.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uid, study, frame = uid or generate_uid(), study or generate_uid(), generate_uid()
    for number, plane in enumerate(stored):
        image = Dataset()
        for keyword, value in PATIENT.items():
            setattr(image, keyword, value)
        image.SOPClassUID, image.SOPInstanceUID = CTImageStorage, generate_uid()
        image.SeriesInstanceUID, image.StudyInstanceUID, image.FrameOfReferenceUID = uid, study, frame
        image.Modality, image.InstanceNumber, image.ImageType = "CT", number + 1, ["ORIGINAL", "PRIMARY", "AXIAL"]
        image.ImagePositionPatient = [float(f"{a + number * b:.9g}") for a, b in zip(origin, step, strict=True)]
        image.ImageOrientationPatient = [float(f"{value:.9g}") for value in turn]
        image.PixelSpacing, image.SliceThickness = list(spacing), 2.5
        image.Rows, image.Columns = plane.shape
        image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
        image.BitsAllocated, image.BitsStored, image.HighBit = 16, 16, 15
        image.PixelRepresentation = int(plane.dtype.kind == "i")
        image.RescaleSlope, image.RescaleIntercept = 1, -1024
        image.PixelData = plane.tobytes()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        if change:
            change(number, image)
        # 7 is no divisor of the counts used: the names' order is not that of the slices
        image.save_as(folder / f"Planted_Petra_{(number * 7 + 3) % 101:03}", enforce_file_format=True)
    return uid
