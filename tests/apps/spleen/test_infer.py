import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from apps.spleen.infer import main
from apps.spleen.model import SpleenModel
from common.data.preparation import Preparation
from common.inference.options import InferConfig
from common.training.checkpoints import save_weights
from common.training.imported import import_weights
from data_scripts.make_phantoms import make_ct_phantoms

ROOT = Path(__file__).parents[3]
MODEL = SpleenModel(
    ("background", "spleen"),
    Preparation((4.0, 4.0, 4.0), "window", (-57.0, 164.0)),
    channels=(4, 8),
    residual_units=1,
    window_size=(24, 24, 16),
    window_batch=2,
    precision="fp32",
)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Three small phantoms: a folder of scans."""
    return make_ct_phantoms(tmp_path_factory.mktemp("scans") / "data", 3, progress=False) / "imagesTr"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of random weights that finds something of everything."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    save_weights(folder / "drawn.safetensors", MODEL.build().state_dict(), {})
    import_weights(folder / "run", "spleen", MODEL, folder / "drawn.safetensors")
    return folder / "run"


def config(run, scans, output, **more):
    return InferConfig(run, scans, output, device="cpu", backend="torch", **{"overlays": False, **more})


def label_maps(folder):
    return {path.name: np.asarray(nibabel.load(path).dataobj) for path in sorted(folder.glob("*.nii.gz"))}


def records(folder):
    """Return when each finished scan's record was written; one that was only begun has no mark."""
    found = [path for path in (folder / "records").glob("*.json") if '"begun"' not in path.read_text()]
    return {path.name: path.stat().st_mtime_ns for path in found}


def rows(folder):
    return list(csv.DictReader((folder / "measurements.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def done(run, scans, tmp_path_factory):
    output = tmp_path_factory.mktemp("done")
    assert main(config(run, scans, output)) == 0
    return output


def test_each_scan_gets_a_map_a_record_and_a_row(done, scans):
    maps = label_maps(done)
    assert list(maps) == sorted(path.name for path in scans.iterdir())
    for row in rows(done):
        found = maps[row["scan"]]
        affine = nibabel.load(scans / row["scan"]).affine
        assert int(row["voxels"]) == np.count_nonzero(found == 1) > 0
        volume = np.count_nonzero(found) * abs(np.linalg.det(affine[:3, :3])) / 1000
        assert float(row["volume_ml"]) == pytest.approx(volume, abs=1e-3)
    timings = json.loads((done / "timings.json").read_text())
    assert timings["scans in this run"] == 3
    assert all(
        {"decode", "prepare", "windows", "restore", "write"} <= set(each) for each in timings["seconds"].values()
    )
    assert (done / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_done_twice(done, run, scans, capsys):
    before = records(done)
    assert main(config(run, scans, done)) == 0
    assert records(done) == before
    assert "3 scans kept" in capsys.readouterr().out
    assert len(rows(done)) == 3
    assert json.loads((done / "timings.json").read_text())["scans in this run"] == 0


@pytest.mark.parametrize(
    "change", [{"flips": "x"}, {"fit_windows": True}, {"largest_component": True}, {"smallest_ml": 5.0}]
)
def test_other_options_are_done_anew(done, run, scans, change, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    before = records(done)
    assert main(config(run, scans, tmp_path / "out", **change)) == 0
    assert all(time != before[name] for name, time in records(tmp_path / "out").items())
    parts = [int(row["parts"]) for row in rows(tmp_path / "out")]
    if "largest_component" in change:
        assert parts == [1, 1, 1]
    elif "smallest_ml" in change:
        assert all(now <= int(row["parts"]) for now, row in zip(parts, rows(done), strict=True))


def test_a_deleted_map_and_a_changed_scan_are_done_anew(done, run, scans, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    shutil.copytree(scans, tmp_path / "scans")
    output, mine = tmp_path / "out", tmp_path / "scans"
    main(config(run, mine, output))  # copies have other times
    before = records(output)
    names = sorted(before)
    (output / names[0].removesuffix(".json")).unlink()
    (mine / names[1].removesuffix(".json")).touch()
    (output / "records" / names[2]).write_text("{")  # damaged
    assert main(config(run, mine, output)) == 0
    assert all(records(output)[name] != before[name] for name in names)


def test_a_bad_scan_is_set_aside_by_name(run, scans, done, tmp_path, capsys):
    mine = tmp_path / "scans"
    shutil.copytree(scans, mine)
    bad = sorted(mine.iterdir())[1]
    bad.write_bytes(bad.read_bytes()[:5000])
    assert main(config(run, mine, tmp_path / "out")) == 1
    said = capsys.readouterr().out
    assert f"set aside: {bad}" in said
    assert f"1 of 3 scans could not be segmented: {bad.name}" in said
    maps = label_maps(tmp_path / "out")
    assert bad.name not in maps
    assert all(np.array_equal(found, label_maps(done)[name]) for name, found in maps.items())
    assert len(rows(tmp_path / "out")) == 2


def test_an_old_record_vouches_for_no_other_model_s_map(run, scans, done, tmp_path, monkeypatch):
    """A run of other options that dies between its map and its record leaves nothing that passes for the first's."""
    shutil.copytree(done, tmp_path / "out")
    output = tmp_path / "out"

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("common.inference.scans.measure", dies)
        with pytest.raises(KeyboardInterrupt):
            main(config(run, scans, output, smallest_ml=1e6))
    first = sorted(path.name for path in scans.iterdir())[0]
    assert not label_maps(output)[first].any()  # the second run's, cleaned of all
    assert main(config(run, scans, output)) == 0
    assert all(np.array_equal(found, label_maps(done)[name]) for name, found in label_maps(output).items())


def test_a_scan_that_fails_now_keeps_nothing_of_before(run, scans, done, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    shutil.copytree(scans, tmp_path / "scans")
    bad = sorted((tmp_path / "scans").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:5000])
    assert main(config(run, tmp_path / "scans", tmp_path / "out")) == 1
    assert bad.name not in label_maps(tmp_path / "out")
    assert bad.name not in [row["scan"] for row in rows(tmp_path / "out")]
    assert f"{bad.name}.json" not in records(tmp_path / "out")


def test_files_of_others_are_not_replaced(run, scans, tmp_path):
    name = sorted(path.name for path in scans.iterdir())[1]
    (tmp_path / name).write_bytes(b"ground truth")
    with pytest.raises(FileExistsError, match="choose another --output"):
        main(config(run, scans, tmp_path))
    assert (tmp_path / name).read_bytes() == b"ground truth"
    assert not label_maps_but(tmp_path, name)


def label_maps_but(folder, name):
    return [path for path in folder.glob("*.nii.gz") if path.name != name]


def test_what_a_killed_run_left_beside_its_outputs_is_removed(run, scans, tmp_path):
    name = sorted(path.name for path in scans.iterdir())[0]
    (tmp_path / f".part-abc-{name}").write_bytes(b"half")
    (tmp_path / ".part-abc-other.txt").write_bytes(b"not ours")
    assert main(config(run, scans, tmp_path)) == 0
    assert [path.name for path in tmp_path.glob(".part-*")] == [".part-abc-other.txt"]


def test_a_scan_that_the_system_cannot_read_or_memory_cannot_hold_costs_itself_alone(
    run, scans, tmp_path, monkeypatch, capsys
):
    from common.data.preparation import prepare_volume as prepare
    from common.inference.scan_files import Scan

    first, second, third = sorted(path.name for path in scans.iterdir())
    read = Scan.read

    def breaks(scan, channels):
        if scan.name == first:
            raise OSError(5, "Input/output error")
        return read(scan, channels)

    def fills(name, *given):
        if name == second:
            raise torch.OutOfMemoryError("no room")
        return prepare(name, *given)

    monkeypatch.setattr(Scan, "read", breaks)
    monkeypatch.setattr("common.inference.scans.prepare_volume", fills)
    assert main(config(run, scans, tmp_path)) == 1
    said = capsys.readouterr().out
    assert "Input/output error" in said
    assert f"{second}: no room" in said
    assert list(label_maps(tmp_path)) == [third]


@pytest.mark.slow
def test_a_rank_whose_scan_fails_does_not_end_the_others(run, tmp_path):
    scans = make_ct_phantoms(tmp_path / "data", 8, progress=False) / "imagesTr"
    bad = sorted(scans.iterdir())[0]
    bad.write_bytes(b"")
    flags = ["--model", str(run), "--input", str(scans), "--output", str(tmp_path / "out"), "--backend", "torch"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command += ["apps/spleen/infer.py", *flags, "--device", "cpu", "--overlays", "false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "1 of 4 scans could not be segmented" in done.stdout + done.stderr
    assert len(label_maps(tmp_path / "out")) == 7
    assert len(rows(tmp_path / "out")) == 7
    assert {path.name for path in (tmp_path / "out").glob("timings*")} == {"timings-0.json", "timings-1.json"}


def test_flips_average_the_logits(run, scans, tmp_path):
    """The logits of a network that is mirrored on the way in and out, averaged by hand."""
    from common.inference.predictors import torch_predictor
    from common.inference.segmentation import predict_logits

    network = MODEL.build(run / "best.safetensors").eval()
    image = torch.randn(1, 40, 30, 20, generator=torch.Generator().manual_seed(0))
    predictor = torch_predictor(network)
    by_hand = [predict_logits(image.flip(mirror), predictor, MODEL).flip(mirror) for mirror in ((), (1,), (3,), (1, 3))]
    found = predict_logits(image, predictor, MODEL, flips="xz")
    assert torch.allclose(found, torch.stack(by_hand).mean(0), atol=1e-5)
    assert not torch.allclose(found, by_hand[0], atol=1e-3)


def test_ranks_share_the_scans_and_the_last_one_writes_all_rows(run, scans, done, tmp_path, monkeypatch):
    monkeypatch.setattr("common.inference.scans.wait_for_all", lambda: None)  # one after the other, here
    for rank in (1, 0):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        assert main(config(run, scans, tmp_path)) == 0
        assert len(records(tmp_path)) == (1 if rank else 3)
    assert [row["scan"] for row in rows(tmp_path)] == [row["scan"] for row in rows(done)]
    maps = label_maps(tmp_path)
    assert all(np.array_equal(found, maps[name]) for name, found in label_maps(done).items())


def test_exported_precisions_are_asked_for_by_name(run, scans, tmp_path):
    with pytest.raises(ValueError, match="int8 is exported only"):
        main(config(run, scans, tmp_path, precision="int8"))
    with pytest.raises(FileNotFoundError, match=r"model_int8\.onnx"):
        main(replace(config(run, scans, tmp_path, precision="int8"), backend="onnxruntime"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("flips", "xx", "each once"),
        ("flips", "w", "letters"),
        ("smallest_ml", -1.0, "volume"),
        ("smallest_ml", float("nan"), "volume"),
    ],
)
def test_options_out_of_bounds_are_named(run, scans, tmp_path, field, value, message):
    with pytest.raises(ValueError, match=rf"{field}.*{message}"):
        config(run, scans, tmp_path, **{field: value})


@pytest.mark.slow
def test_fifty_scans_killed_in_the_middle_are_finished_and_equal(run, tmp_path):
    scans = make_ct_phantoms(tmp_path / "data", 50, progress=False) / "imagesTr"
    assert main(config(run, scans, tmp_path / "whole")) == 0
    flags = ["--backend", "torch", "--device", "cpu", "--overlays", "false"]
    command = [sys.executable, "apps/spleen/infer.py", "--model", str(run), "--input", str(scans)]
    command += ["--output", str(tmp_path / "killed"), *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while len(records(tmp_path / "killed")) < 10 and time.monotonic() - began < 120:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = records(tmp_path / "killed")
    assert 10 <= len(before) < 50
    assert main(config(run, scans, tmp_path / "killed")) == 0
    after = records(tmp_path / "killed")
    assert all(after[name] == time for name, time in before.items())  # nothing twice
    whole, killed = label_maps(tmp_path / "whole"), label_maps(tmp_path / "killed")
    assert len(whole) == 50
    assert all(np.array_equal(found, killed[name]) for name, found in whole.items())
    assert (tmp_path / "whole" / "measurements.csv").read_text() == (
        tmp_path / "killed" / "measurements.csv"
    ).read_text()
