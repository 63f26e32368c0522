import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from medspeed.common.inference.scan_files import find_scans, say_plan, scan_bytes
from tests.common.data.dicom_files import write_slices
from tests.support import unet_model

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
MODEL = unet_model((4.0, 4.0, 4.0), (4, 8), (24, 24, 16), window_batch=2)


def scan(folder, shape, spacing, name="a.nii.gz"):
    nibabel.save(nibabel.Nifti1Image(np.zeros(shape, np.int16), np.diag([*spacing, 1.0])), folder / name)
    return folder / name


FINE = replace(
    MODEL, preparation=replace(MODEL.preparation, spacing=(1.0, 1.0, 1.0)), window_size=(16, 16, 16)
)  # two channels of logits, one structure


def test_a_finer_working_grid_takes_more(tmp_path):
    voxels = 50 * 40 * 30
    one = scan_bytes(scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0)), FINE)
    coarse = scan_bytes(scan(tmp_path, (50, 40, 30), (2.0, 2.0, 2.0), "b.nii.gz"), FINE)
    assert one[0] == coarse[0] == voxels * (8 + 20 + 2)
    assert one[1] == pytest.approx(voxels * (12 + 8 * 2), abs=28)
    assert coarse[1] == pytest.approx(8 * one[1], rel=1e-4)  # eight times as many working voxels
    tiny = scan_bytes(scan(tmp_path, (4, 4, 4), (1.0, 1.0, 1.0), "c.nii.gz"), FINE)
    assert tiny[1] == 16**3 * (12 + 8 * 2)  # it is padded to a window


def test_so_many_scans_are_held_as_there_is_room_for_and_the_unreadable_count_nothing(tmp_path):
    scans = [scan(tmp_path, (side,) * 3, (1, 1, 1), f"{side}.nii.gz") for side in (20, 30, 40, 50)]
    hosts, working = zip(*(scan_bytes(each, FINE) for each in scans), strict=True)
    (tmp_path / "broken.nii.gz").write_bytes(b"no")
    broken = [*scans, tmp_path / "broken.nii.gz"]
    assert say_plan(broken, FINE, CPU, 3, 10**9) == (sum(hosts[1:]), working[-1])
    assert say_plan(broken, FINE, CPU, 9, 10**9) == (sum(hosts), working[-1])
    assert say_plan(broken, FINE, CPU, 3, sum(hosts[2:]) + 1) == (sum(hosts[2:]) + 1, working[-1])
    assert say_plan(broken, FINE, CPU, 3, 1) == (hosts[-1], working[-1])  # one is held in any case


def test_a_link_to_a_file_that_is_gone_is_a_scan_that_will_fail(tmp_path):
    there = scan(tmp_path, (4, 4, 4), (1.0, 1.0, 1.0))
    gone = tmp_path / "b.nii.gz"
    gone.symlink_to(tmp_path / "unmounted" / "b.nii.gz")
    (tmp_path / "c.nii.gz").mkdir()
    assert find_scans(tmp_path, 1) == [there, gone]


def test_a_plan_that_cannot_fit_is_told(tmp_path, monkeypatch, capsys):
    scans = [scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0), f"{number}.nii.gz") for number in range(2)]
    say_plan(scans, FINE, CPU, 5, 2**40)
    said = capsys.readouterr().out
    assert "memory: at most 5 scans at a time, 0.0 GiB (" in said
    assert "WARNING" not in said
    monkeypatch.setattr("medspeed.common.inference.scan_files.free_memory", lambda *_: 2**20)
    say_plan(scans, FINE, CPU, 5, 2**19)
    assert "WARNING: that may exceed the free memory" in capsys.readouterr().out


@pytest.mark.parametrize(("left", "warned"), [(2**30, False), (2**10, True)])
def test_what_does_not_fit_on_the_gpu_needs_room_on_the_host(left, warned, tmp_path, monkeypatch, capsys):
    scans = [scan(tmp_path, (50, 40, 30), (1.0, 1.0, 1.0))]
    taken, computed = scan_bytes(scans[0], FINE)
    monkeypatch.setattr("medspeed.common.inference.scan_files.free_memory", lambda *_: taken + computed - 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left, 2**40))
    say_plan(scans, FINE, torch.device("cuda:0"), 5, 1)
    said = capsys.readouterr().out
    assert ("may exceed the free memory" in said) == warned
    assert f"({left / 2**30:.1f} free) on the cuda:0" in said


def test_a_series_counts_as_a_file_does(tmp_path):
    write_slices(tmp_path / "series", np.zeros((4, 5, 6), np.int16), spacing=(2.0, 2.0), step=(0, 0, 2.0))
    host, device = scan_bytes(find_scans(tmp_path)[0], replace(FINE, window_size=(1, 1, 1)))
    assert host == 120 * (8 + 20 + 2)
    assert device == pytest.approx(8 * 120 * (12 + 8 * 2), abs=28)  # 2 mm on a grid of 1 mm


@pytest.mark.slow
def test_a_folder_takes_no_more_than_its_plan(tmp_path):
    """The peak of a process that segments eight scans, less what it has before the first, is within the plan."""
    program = f"""
import torch
from pathlib import Path
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.scan_files import find_scans, say_plan
from medspeed.common.inference.scans import Segmenter
from medspeed.common.inference.scan_files import peak_memory
from tests.support import unet_model
model = unet_model((2.0, 2.0, 2.0), (4, 8), (64, 64, 32))
torch.manual_seed(0)
folder = Path({str(tmp_path)!r})
save_weights(folder / "best.safetensors", model.build().state_dict(), dict())
scans = find_scans(folder / "scans")
def segment(inputs, output):
    config = InferConfig(folder, folder / inputs, folder / output, backend="torch", device="cpu", overlays=False)
    job = Segmenter(config, model).job(find_scans(folder / inputs))
    assert not job.work(job.items)
    return job
segment("small", "warm")
before = peak_memory()
job = segment("scans", "out")
network = 64 * 64 * 32 * 4 * 64  # what the network takes for a window, which the plan leaves out
peak, cpu = peak_memory(), torch.device("cpu")
print("PEAK", peak - before, sum(say_plan(scans, model, cpu, job.in_flight, job.room)) + network)
"""
    rng = np.random.default_rng(0)
    for name, count, shape in (("small", 2, (24, 24, 24)), ("scans", 8, (160, 160, 60))):
        voxels = rng.integers(-200, 300, shape).astype(np.int16)
        image = nibabel.Nifti1Image(voxels, np.diag([1.5, 1.5, 2.0, 1.0]))
        (tmp_path / name).mkdir()
        nibabel.save(image, tmp_path / name / "0.nii.gz")
        for number in range(1, count):
            (tmp_path / name / f"{number}.nii.gz").symlink_to("0.nii.gz")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, plan = (int(word) for word in done.stdout.split("PEAK")[1].split()[:2])
    assert 0 < peak <= plan
