import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from common.data.preparation import Preparation
from common.inference.labelling import Labelling, one_region_per_label
from common.inference.memory_plan import most_bytes, say_plan, scan_bytes, window_bytes
from common.inference.predictors import Precision
from common.inference.scan_files import Scan, find_scans
from tests.common.data.dicom_files import write_slices

ROOT = Path(__file__).parents[3]


LABELLING = one_region_per_label(("background", "spleen"))
PREPARATION = Preparation((1.0, 1.0, 1.0), "window", (0.0, 1.0))


@dataclass(frozen=True)
class Model:
    """One convolution from 1 to 8 channels, and one to 2."""

    preparation: Preparation = PREPARATION
    window_size: tuple[int, int, int] = (16, 16, 16)
    window_batch: int = 2
    overlap: float = 0.25
    precision: Precision = "fp32"
    labelling: Labelling = LABELLING

    def build(self, weights=None):
        return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv3d(8, 2, 1))


def scan(folder, shape, spacing, name="a.nii.gz"):
    nibabel.save(nibabel.Nifti1Image(np.zeros(shape, np.int16), np.diag([*spacing, 1.0])), folder / name)
    return Scan(name, folder / name)


def test_activations_are_counted_without_computing_them():
    """The eight channels live until the two are there; the ReLU works in place."""
    assert window_bytes(Model()) == 2 * 16**3 * 4 * (8 + 2)


def test_a_finer_working_grid_takes_more(tmp_path):
    one = scan_bytes(scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0)), Model())
    coarse = scan_bytes(scan(tmp_path, (50, 40, 30), (2.0, 2.0, 2.0), "b.nii.gz"), Model())
    voxels = 50 * 40 * 30
    assert one.host == coarse.host == voxels * (8 + 20)
    assert one.device == voxels * (12 + 8 * 2)
    assert coarse.device == pytest.approx(8 * one.device, abs=2)  # eight times as many working voxels


def test_three_scans_are_held_at_most_and_the_unreadable_count_nothing(tmp_path):
    scans = [scan(tmp_path, (side,) * 3, (1, 1, 1), f"{side}.nii.gz") for side in (20, 30, 40, 50)]
    (tmp_path / "broken.nii.gz").write_bytes(b"no")
    host, device, largest = most_bytes([*scans, Scan("broken.nii.gz", tmp_path / "broken.nii.gz")], Model())
    assert host == sum(scan_bytes(each, Model()).host for each in scans[1:])
    assert device == scan_bytes(scans[-1], Model()).device
    assert largest == "50.nii.gz"
    assert most_bytes([], Model()) == (0, 0, "")


def test_a_plan_that_cannot_fit_is_told(tmp_path, monkeypatch, capsys):
    scans = [scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0), f"{number}.nii.gz") for number in range(2)]
    say_plan(scans, Model(), torch.device("cpu"))
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr("common.inference.memory_plan.free_memory", lambda: 2**20)
    say_plan(scans, Model(), torch.device("cpu"))
    assert "WARNING: that may be more than there is" in capsys.readouterr().out


def test_a_series_counts_the_masks_of_its_segmentation(tmp_path):
    write_slices(tmp_path / "series", np.zeros((4, 5, 6), np.int16), spacing=(2.0, 2.0), step=(0, 0, 2.0))
    (found,) = find_scans(tmp_path)
    each = scan_bytes(found, replace(Model(), window_size=(1, 1, 1)))
    assert each.host == 120 * (8 + 20 + 2)
    assert each.device == pytest.approx(8 * 120 * (12 + 8 * 2), abs=2)  # 2 mm on a grid of 1 mm


@pytest.mark.slow
def test_a_folder_takes_no_more_than_its_plan(tmp_path):
    """The peak of a process that segments twelve scans, less what it has before the first, is within the plan."""
    program = f"""
import torch
from pathlib import Path
from apps.spleen.model import SpleenModel
from common.data.preparation import Preparation
from common.inference.memory_plan import most_bytes, window_bytes
from common.inference.options import InferConfig
from common.inference.predictors import OpenedPredictor, torch_predictor
from common.inference.scan_files import find_scans
from common.inference.scan_records import Records
from common.inference.scans import Job, segment_all
from common.observe.host_memory import peak_memory
from common.observe.timeline import Timeline
preparation = Preparation((2.0, 2.0, 2.0), "window", (-57.0, 164.0))
model = SpleenModel(("b", "s"), preparation, (4, 8), 1, (64, 64, 32), 1, "fp32")
torch.manual_seed(0)
opened = OpenedPredictor(torch_predictor(model.build().eval()), "torch", "fp32", "")
folder = Path({str(tmp_path)!r})
scans = find_scans(folder / "scans")
def job(output):
    config = InferConfig(folder, folder / "scans", folder / output, overlays=False)
    return Job(config, model, opened, torch.device("cpu"), Records(folder / output, {{}}, False), Timeline())
small = find_scans(folder / "small")
segment_all(small, job("warm"))
before = peak_memory()
assert not segment_all(scans, job("out"))
print("PEAK", peak_memory() - before, sum(most_bytes(scans, model)[:2]) + window_bytes(model))
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
    assert scan_bytes(tiny, wide).device == 64**3 * (12 + 8 * 2)
