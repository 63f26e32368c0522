import math

import nibabel
import numpy as np
import pytest

from common.inference.scan_files import Scan, find_scans
from tests.common.data.dicom_files import write_slices


def nifti(path, shape=(6, 5, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.ones(shape, np.int16), np.diag([1.0, 2.0, 3.0, 1.0])), path)
    return path


def test_a_folder_gives_its_nifti_files_in_order_and_nothing_else(tmp_path):
    for name in ("b.nii.gz", "a.nii", "._b.nii.gz", "below/c.nii.gz"):
        nifti(tmp_path / name) if not name.startswith("._") else (tmp_path / name).write_bytes(b"mac")
    (tmp_path / "a.nii.png").write_bytes(b"")
    found = find_scans(tmp_path)
    assert [scan.name for scan in found] == ["a.nii", "b.nii.gz"]
    assert [scan.stem for scan in found] == ["a", "b"]
    assert [scan.label_name for scan in found] == ["a.nii", "b.nii.gz"]
    assert find_scans(tmp_path / "a.nii")[0].read(1).voxels.shape == (6, 5, 4)


def test_a_folder_without_nifti_gives_its_dicom_series(tmp_path):
    for number in range(2):
        write_slices(tmp_path / f"patient {number}", np.zeros((3, 5, 6), np.int16))
    found = find_scans(tmp_path)
    assert len(found) == 2
    for scan in found:
        assert scan.name.startswith("series-")
        assert scan.label_name == f"{scan.name}.nii.gz"
        assert scan.size()[0] == (6, 5, 3)
        assert scan.read(1).voxels.shape == (6, 5, 3)
        assert scan.stamp()[0] == 3


def test_two_files_with_one_name_are_refused(tmp_path):
    for name in ("a.nii.gz", "a.nii", "b.nii"):
        nifti(tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.nii and a\.nii\.gz would share"):
        find_scans(tmp_path)


def test_links_to_folders_of_series_are_followed_once(tmp_path):
    write_slices(tmp_path / "archive" / "patient", np.zeros((3, 5, 6), np.int16))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one").symlink_to(tmp_path / "archive" / "patient")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "archive" / "patient")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (found,) = find_scans(tmp_path / "in")
    assert found.stamp()[0] == 3


def test_nothing_to_segment_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="without DICOM"):
        find_scans(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_scans(tmp_path / "missing.nii.gz")


def test_the_stamp_changes_with_the_file(tmp_path):
    scan = Scan("a.nii.gz", nifti(tmp_path / "a.nii.gz"))
    before = scan.stamp()
    assert scan.stamp() == before
    nifti(tmp_path / "a.nii.gz", (7, 5, 4))
    assert scan.stamp() != before


def test_the_size_is_read_from_the_header(tmp_path):
    shape, voxel = Scan("a.nii.gz", nifti(tmp_path / "a.nii.gz", (6, 5, 4, 2))).size()
    assert shape == (6, 5, 4, 2)
    assert math.isclose(voxel, 6.0)
