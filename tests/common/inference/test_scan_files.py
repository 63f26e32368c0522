import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from common.data.dicom import DicomSeries
from common.data.preparation import Preparation
from common.inference.labels import one_region_per_label
from common.inference.model import VolumeModel
from common.inference.scan_files import find_scans, most_bytes, read_scan, say_plan, scan_bytes, stem_of
from tests.common.data.dicom_files import write_slices

ROOT = Path(__file__).parents[3]
LABELLING = one_region_per_label(("background", "spleen"))
PREPARATION = Preparation((1.0, 1.0, 1.0), "window", (0.0, 1.0))


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
    assert [stem_of(scan) for scan in found] == ["a", "b"]
    (scan,) = find_scans(tmp_path / "a.nii")
    assert read_scan(scan, 1).voxels.shape == (6, 5, 4)


def test_a_folder_without_nifti_gives_its_dicom_series(tmp_path):
    for number in range(2):
        write_slices(tmp_path / f"patient {number}", np.zeros((3, 5, 6), np.int16))
    found = find_scans(tmp_path)
    assert len(found) == 2
    for scan in found:
        assert scan.name.startswith("series-")
        assert isinstance(scan, DicomSeries)
        assert read_scan(scan, 1).voxels.shape == scan.shape == (6, 5, 3)
        assert len(scan.files) == 3


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
    assert isinstance(found, DicomSeries)
    assert len(found.files) == 3


def test_nothing_to_segment_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="without DICOM"):
        find_scans(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_scans(tmp_path / "missing.nii.gz")


def eight_channels(in_channels: int, out_channels: int) -> nn.Module:
    """One convolution to 8 channels, and one to the classes."""
    return nn.Sequential(nn.Conv3d(in_channels, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv3d(8, out_channels, 1))


def Model(**changed: Any) -> VolumeModel:  # noqa: N802
    plain = VolumeModel(eight_channels, {}, LABELLING, PREPARATION, (16, 16, 16), 2, 0.25, "fp32")
    return replace(plain, **changed)


def scan(folder, shape, spacing, name="a.nii.gz"):
    nibabel.save(nibabel.Nifti1Image(np.zeros(shape, np.int16), np.diag([*spacing, 1.0])), folder / name)
    return folder / name


def test_a_finer_working_grid_takes_more(tmp_path):
    one = scan_bytes(scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0)), Model())
    coarse = scan_bytes(scan(tmp_path, (50, 40, 30), (2.0, 2.0, 2.0), "b.nii.gz"), Model())
    voxels = 50 * 40 * 30
    assert one[0] == coarse[0] == voxels * (8 + 20)
    assert one[1] == voxels * (12 + 8 * 2)
    assert coarse[1] == pytest.approx(8 * one[1], abs=2)  # eight times as many working voxels


def test_three_scans_are_held_at_most_and_the_unreadable_count_nothing(tmp_path):
    scans = [scan(tmp_path, (side,) * 3, (1, 1, 1), f"{side}.nii.gz") for side in (20, 30, 40, 50)]
    (tmp_path / "broken.nii.gz").write_bytes(b"no")
    host, device, largest = most_bytes([*scans, tmp_path / "broken.nii.gz"], Model())
    assert host == sum(scan_bytes(each, Model())[0] for each in scans[1:])
    assert device == scan_bytes(scans[-1], Model())[1]
    assert largest == "50.nii.gz"
    assert most_bytes([], Model()) == (0, 0, "")


def test_a_plan_that_cannot_fit_is_told(tmp_path, monkeypatch, capsys):
    scans = [scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0), f"{number}.nii.gz") for number in range(2)]
    say_plan(scans, Model(), torch.device("cpu"))
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr("common.inference.scan_files.free_memory", lambda: 2**20)
    say_plan(scans, Model(), torch.device("cpu"))
    assert "WARNING: that may be more than there is" in capsys.readouterr().out


def test_a_series_counts_the_masks_of_its_segmentation(tmp_path):
    write_slices(tmp_path / "series", np.zeros((4, 5, 6), np.int16), spacing=(2.0, 2.0), step=(0, 0, 2.0))
    (found,) = find_scans(tmp_path)
    host, device = scan_bytes(found, replace(Model(), window_size=(1, 1, 1)))
    assert host == 120 * (8 + 20 + 2)
    assert device == pytest.approx(8 * 120 * (12 + 8 * 2), abs=2)  # 2 mm on a grid of 1 mm


@pytest.mark.slow
def test_a_folder_takes_no_more_than_its_plan(tmp_path):
    """The peak of a process that segments twelve scans, less what it has before the first, is within the plan."""
    program = f"""
import torch
from pathlib import Path
from common.inference.options import InferConfig
from common.inference.open_predictor import OpenedPredictor
from common.inference.predictors import torch_predictor
from common.inference.scan_files import find_scans, most_bytes
from common.inference.scans import Segmenter
from common.clock import peak_memory
from common.observe.plots import Timeline
from tests.support import unet_model
model = unet_model((2.0, 2.0, 2.0), (4, 8), (64, 64, 32))
torch.manual_seed(0)
folder = Path({str(tmp_path)!r})
opened = OpenedPredictor(torch_predictor(model.build().eval()), "torch", "fp32", "", folder)
scans = find_scans(folder / "scans")
def segment(inputs, output):
    config = InferConfig(folder, folder / inputs, folder / output, overlays=False)
    job = Segmenter(config, model, opened, torch.device("cpu"), {{}}, Timeline()).job(find_scans(folder / inputs))
    assert not job.work(job.items)
segment("small", "warm")
before = peak_memory()
segment("scans", "out")
network = 64 * 64 * 32 * 4 * 64  # what the network takes for a window, which the plan leaves out
print("PEAK", peak_memory() - before, sum(most_bytes(scans, model)[:2]) + network)
"""
    rng = np.random.default_rng(0)
    for name, count, shape in (("small", 2, (24, 24, 24)), ("scans", 12, (160, 160, 60))):
        (tmp_path / name).mkdir()
        for number in range(count):
            voxels = rng.integers(-200, 300, shape).astype(np.int16)
            image = nibabel.Nifti1Image(voxels, np.diag([1.5, 1.5, 2.0, 1.0]))
            nibabel.save(image, tmp_path / name / f"{number}.nii.gz")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, plan = (int(word) for word in done.stdout.split("PEAK")[1].split()[:2])
    assert 0 < peak <= plan


def test_a_scan_bigger_than_its_window_is_padded_to_it(tmp_path):
    tiny = scan(tmp_path, (4, 4, 4), (1.0, 1.0, 1.0))
    wide = replace(Model(), window_size=(64, 64, 64))
    assert scan_bytes(tiny, wide)[1] == 64**3 * (12 + 8 * 2)
