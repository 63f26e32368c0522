"""DICOM in, DICOM-SEG and NIfTI out, by the app's own inference; and no trace of the patient in anything."""

import gzip
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import torch

from medspeed.apps.spleen.infer import main
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.runs import import_weights
from tests.common.data.dicom_files import PATIENT, traces, write_slices
from tests.support import unet_model

MODEL = unet_model((3.0, 3.0, 4.0), (4, 8), (32, 32, 16), window_batch=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    save_weights(folder / "drawn.safetensors", MODEL.build().state_dict(), {})
    import_weights(folder / "run", "spleen", MODEL, folder / "drawn.safetensors")
    return folder / "run"


def segment(run: Path, scans: Path, output: Path, **more):
    return main(InferConfig((run,), scans, output, device="cpu", backend="torch", **more)).status


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, compressed ones also as they were before."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found | {f"{name}, unpacked": gzip.decompress(each) for name, each in found.items() if name.endswith(".gz")}


def two_series(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(2):
        stored = rng.integers(900, 1300, (12, 40, 44)).astype(np.uint16)
        write_slices(folder / f"Planted^Petra {number}", stored)
    return folder


def test_no_trace_of_the_patient_is_in_any_output_or_log(run, tmp_path, capfd):
    scans = two_series(tmp_path / "Planted_Petra")
    broken = sorted((scans / "Planted^Petra 1").iterdir())
    broken[3].unlink()  # and one series is refused, whose error must not tell either
    output = tmp_path / "out"
    assert segment(run, scans, output) == 1
    said = "".join(capfd.readouterr())
    assert "slices are missing" in said
    found = contents(output)
    assert len([name for name in found if name.endswith(".dcm")]) == 1
    assert {"measurements.csv", "timings.json"} <= set(found)
    for trace in traces():
        if len(trace) < 5:
            continue  # a sex or a number of two digits turns up anywhere
        assert trace not in said, trace
        for name, content in found.items():
            assert trace not in name, trace
            assert trace.encode() not in content, (trace, name)


def test_keep_patient_files_the_segmentation_under_the_patient(run, tmp_path):
    scans = two_series(tmp_path / "scans")
    assert segment(run, scans, tmp_path / "out", keep_patient=True, overlays=False) == 0
    for path in (tmp_path / "out").glob("*.dcm"):
        seg = pydicom.dcmread(path)
        assert (str(seg.PatientName), seg.PatientID) == (PATIENT["PatientName"], PATIENT["PatientID"])
    assert len(list((tmp_path / "out").glob("*.dcm"))) == 2


def test_a_segmentation_that_was_deleted_is_written_again(run, tmp_path):
    scans, output = two_series(tmp_path / "scans"), tmp_path / "out"
    assert segment(run, scans, output, overlays=False) == 0
    gone, kept = sorted(output.glob("*.dcm"))
    before = kept.stat().st_mtime_ns
    gone.unlink()
    assert segment(run, scans, output, overlays=False) == 0
    assert gone.is_file()
    assert kept.stat().st_mtime_ns == before


def test_other_modalities_are_refused_and_what_is_no_volume_is_left_out(run, tmp_path, capsys):
    stored = np.full((6, 20, 20), 1100, np.uint16)
    write_slices(tmp_path / "scans" / "ct", stored)
    write_slices(tmp_path / "scans" / "pet", stored, change=lambda _, image: setattr(image, "Modality", "PT"))
    write_slices(tmp_path / "scans" / "one", stored[:1])
    write_slices(tmp_path / "scans" / "same", stored, change=lambda _, image: setattr(image, "SOPInstanceUID", "1.2"))
    write_slices(tmp_path / "scans" / "study", stored, change=lambda _, image: delattr(image, "StudyInstanceUID"))
    assert segment(run, tmp_path / "scans", tmp_path / "out", overlays=False) == 1
    said = capsys.readouterr().out
    assert "5 of 6 images skipped: duplicates" in said
    assert said.count("cannot write a DICOM segmentation") == 1
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 1  # none without its segmentation
    assert "its modality is PT, the model was trained on CT" in said
    assert said.count("skipped, not a volume") == 1
    assert "3 of 4 scans failed" in said


def test_a_folder_of_both_kinds_is_refused(run, tmp_path):
    scans = two_series(tmp_path / "scans")
    (scans / "a.nii.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="1 volume file and 2 DICOM series"):
        segment(run, scans, tmp_path / "out")


def test_a_model_of_four_channels_refuses_a_series(tmp_path):
    from medspeed.common.inference.scan_files import find_scans, read_scan

    (scan, _) = find_scans(two_series(tmp_path))
    with pytest.raises(ValueError, match="one channel, the model expects 4"):
        read_scan(scan, 4)


@pytest.mark.real_data
def test_the_mask_of_a_real_series_lies_on_the_voxels_of_the_nifti_path(run, real_data, tmp_path):
    """The NIfTI of the same scan holds its rows in the other direction; the mask must be the same in the patient."""
    assert segment(run, real_data / "ct_dicom_real", tmp_path / "dicom", overlays=False) == 0
    scan = real_data / "ct_spleen_real" / "imagesTr" / "real_b.nii.gz"
    assert segment(run, scan, tmp_path / "nifti", overlays=False) == 0
    (path,) = (tmp_path / "dicom").glob("*.nii.gz")
    one, other = nibabel.load(path), nibabel.load(tmp_path / "nifti" / "real_b.nii.gz")
    by_dicom, by_nifti = np.asarray(one.dataobj), np.asarray(other.dataobj)
    assert 0 < np.count_nonzero(by_nifti) < by_nifti.size
    to_other = np.linalg.inv(other.affine) @ one.affine
    places = np.argwhere(by_dicom) @ to_other[:3, :3].T + to_other[:3, 3]
    assert np.allclose(places, np.rint(places), atol=1e-3)
    x, y, z = np.rint(places).astype(int).T
    assert by_nifti[x, y, z].all()
    assert len(places) == np.count_nonzero(by_nifti)
    (seg,) = (tmp_path / "dicom").glob("*.dcm")
    dataset = pydicom.dcmread(seg)
    assert np.count_nonzero(dataset.pixel_array) == len(places)
