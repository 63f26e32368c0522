import csv
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from medspeed.common.data.dataset import stem_of
from medspeed.common.data.dicom import DicomSeries
from medspeed.common.data.preparation import Preparation, prepare_volume
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.postprocessing import Postprocessing
from medspeed.common.inference.predict import predict_logits
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.inference.runs import import_weights
from medspeed.common.inference.scan_files import find_scans, read_scan
from medspeed.common.inference.scans import clean_by_hand, clean_labels, flipped_logits, segment_scans
from medspeed.data_scripts.make_phantoms import make_phantoms
from tests.common.data.dicom_files import write_slices
from tests.support import unet_model

ROOT = Path(__file__).parents[3]
MODEL = unet_model((4.0, 4.0, 4.0), (4, 8), (24, 24, 16), window_batch=2)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Three small phantoms: a folder of scans."""
    return make_phantoms("ct", tmp_path_factory.mktemp("scans") / "data", 3) / "imagesTr"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of random weights that finds something of everything."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    save_weights(folder / "drawn.safetensors", MODEL.build().state_dict(), {})
    import_weights(folder / "run", "spleen", MODEL, folder / "drawn.safetensors")
    return folder / "run"


def segment(given):
    return segment_scans(given, MODEL).status


def config(run, scans, output, **more):
    return InferConfig(run, scans, output, device="cpu", backend="torch", **{"overlays": False, **more})


def label_maps(folder):
    return {path.name: np.asarray(nibabel.load(path).dataobj) for path in sorted(folder.glob("*.nii.gz"))}


def records(folder):
    """Return when each finished scan's record was written; one that was only begun has no mark."""
    paths = (folder / "records").glob("[!.]*.json")  # one that is being written has a dot before its name
    found = [path for path in paths if '"begun"' not in path.read_text()]
    return {path.name: path.stat().st_mtime_ns for path in found}


def rows(folder):
    return list(csv.DictReader((folder / "measurements.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def done(run, scans, tmp_path_factory):
    output = tmp_path_factory.mktemp("done")
    assert segment(config(run, scans, output)) == 0
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


def test_nothing_is_done_twice(done, run, scans, capsys):
    before = records(done)
    assert segment(config(run, scans, done)) == 0
    assert records(done) == before
    assert "3 scans already finished" in capsys.readouterr().out
    assert len(rows(done)) == 3
    assert json.loads((done / "timings.json").read_text())["scans in this run"] == 0


@pytest.mark.parametrize(
    "change", [{"flips": "x"}, {"fit_windows": True}, {"largest_component": True}, {"smallest_ml": 5.0}]
)
def test_other_options_are_done_anew(done, run, scans, change, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    before = records(done)
    assert segment(config(run, scans, tmp_path / "out", **change)) == 0
    assert all(time != before[name] for name, time in records(tmp_path / "out").items())
    parts = [int(row["parts"]) for row in rows(tmp_path / "out")]
    if "largest_component" in change:
        assert parts == [1, 1, 1]
    elif "smallest_ml" in change:
        assert all(now <= int(row["parts"]) for now, row in zip(parts, rows(done), strict=True))


def test_the_model_s_post_processing_is_applied_unless_the_flags_say_otherwise(done, run, scans, tmp_path):
    model = replace(MODEL, postprocessing=(Postprocessing(("spleen",), smallest_ml=1e9),))

    def found(name, **flags):
        assert segment_scans(config(run, scans, tmp_path / name, **flags), model).status == 0
        return label_maps(tmp_path / name).items()

    before = label_maps(done)
    assert not any(labels.any() for _, labels in found("model"))
    assert all(np.array_equal(labels, before[name]) for name, labels in found("off", smallest_ml=0.0))
    assert all(np.array_equal(labels, before[name]) for name, labels in found("off too", largest_component=False))
    for name, labels in found("largest", largest_component=True):
        by_hand = clean_by_hand(MODEL.labelling, True, 0.0)
        assert np.array_equal(labels, clean_labels(before[name], MODEL.labelling, 1.0, by_hand))


def test_a_bad_scan_is_set_aside_by_name_and_keeps_nothing_of_before(run, scans, done, tmp_path, capsys):
    mine, output = shutil.copytree(scans, tmp_path / "scans"), shutil.copytree(done, tmp_path / "out")
    bad = sorted(mine.iterdir())[1]
    bad.write_bytes(bad.read_bytes()[:5000])
    assert segment(config(run, mine, output)) == 1
    said = capsys.readouterr().out
    assert f"failed: {bad}" in said
    assert f"1 of 3 scans failed: {bad.name}" in said
    maps = label_maps(output)
    assert bad.name not in maps
    assert all(np.array_equal(found, label_maps(done)[name]) for name, found in maps.items())
    assert len(rows(output)) == len(records(output)) == 2


def test_a_scan_that_the_system_cannot_read_or_memory_cannot_hold_costs_itself_alone(
    run, scans, tmp_path, monkeypatch, capsys
):
    first, second, third = sorted(path.name for path in scans.iterdir())

    def breaks(scan, channels):
        if scan.name == first:
            raise OSError(5, "Input/output error")
        return read_scan(scan, channels)

    def fills(name, *given):
        if name == second:
            raise torch.OutOfMemoryError("no room")
        return prepare_volume(name, *given)

    monkeypatch.setattr("medspeed.common.inference.scans.read_scan", breaks)
    monkeypatch.setattr("medspeed.common.inference.scans.prepare_volume", fills)
    assert segment(config(run, scans, tmp_path)) == 1
    said = capsys.readouterr().out
    assert "Input/output error" in said
    assert f"{second}: no room" in said
    assert list(label_maps(tmp_path)) == [third]


def test_a_scan_that_does_not_fit_on_the_device_is_done_on_the_host_as_if_it_did(run, scans, tmp_path, monkeypatch):
    assert segment(config(run, scans, tmp_path / "whole", flips="x")) == 0
    tries = []

    def fills(image, *given):
        tries.append(image)
        if len(tries) % 4 == 2:  # in each scan's second flip, once
            raise torch.OutOfMemoryError("no room")
        return predict_logits(image, *given)

    monkeypatch.setattr("medspeed.common.inference.scans.predict_logits", fills)
    assert segment(config(run, scans, tmp_path / "short", flips="x")) == 0
    assert len(tries) == 4 * len(list(scans.iterdir()))
    whole, short = label_maps(tmp_path / "whole"), label_maps(tmp_path / "short")
    assert whole.keys() == short.keys()
    assert all(np.array_equal(found, short[name]) for name, found in whole.items())
    assert rows(tmp_path / "short") == rows(tmp_path / "whole")  # the agreement of flips, too


def test_names_that_are_long_or_no_utf_8_cost_no_table(run, scans, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    names = [os.fsdecode(b"\xe9\x1b.nii.gz"), "b" * 240 + ".nii.gz"]
    for name in names:
        shutil.copy(next(iter(scans.iterdir())), mine / name)
    assert segment(config(run, mine, tmp_path / "out", overlays=True)) == 0
    assert sorted(label_maps(tmp_path / "out")) == sorted(names)
    assert {row["scan"] for row in rows(tmp_path / "out")} == {"\\udce9\\x1b.nii.gz", names[1]}
    assert set(json.loads((tmp_path / "out" / "timings.json").read_text())["seconds"]) == set(names)


def test_a_table_of_the_user_s_own_is_not_replaced(run, scans, tmp_path):
    for name in ("measurements.csv", "timings.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(FileExistsError, match=f"{name}: already exists, .* choose another --output"):
            segment(config(run, scans, folder))
        assert (folder / name).read_text() == "mine"


@pytest.mark.slow
def test_a_rank_whose_scan_fails_does_not_end_the_others(run, scans, tmp_path):
    """All scans of the first are damaged, so that it has long failed while the other is at work."""
    (tmp_path / "scans").mkdir()
    for number, good in enumerate([*scans.iterdir()] * 3):
        (tmp_path / "scans" / f"{number}_a.nii.gz").touch()
        (tmp_path / "scans" / f"{number}_b.nii.gz").symlink_to(good)
    flags = ["--model", str(run), "--input", str(tmp_path / "scans"), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command += ["apps/spleen/infer.py", *flags, "--backend", "torch", "--device", "cpu", "--overlays", "false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "9 of 9 scans failed" in done.stdout + done.stderr
    assert len(label_maps(tmp_path / "out")) == 9
    assert len(rows(tmp_path / "out")) == 9
    assert {path.name for path in (tmp_path / "out").glob("timings*")} == {"timings-0.json", "timings-1.json"}


def test_nothing_found_and_a_model_of_phantoms_are_said(run, scans, tmp_path, capsys):
    mine = shutil.copytree(run, tmp_path / "run")
    (mine / "summary.json").write_text('{"data": {"synthetic": true}}')
    one = next(iter(scans.iterdir()))
    assert segment(config(mine, one, tmp_path / "out", smallest_ml=1e9)) == 0
    said = capsys.readouterr().out
    assert said.count("trained on SYNTHETIC DATA") == 1
    assert f"{one.name}: UNCERTAIN: EMPTY: no structure was found, decode" in said
    assert segment(config(run, one, tmp_path / "other")) == 0
    said = capsys.readouterr().out
    assert "SYNTHETIC" not in said
    assert "EMPTY" not in said


@pytest.mark.parametrize("empty", [0, 1])
def test_a_channel_that_is_empty_is_said(tmp_path, capsys, empty):
    """A sequence that was not exported, say: the network was never shown that."""
    model = replace(MODEL, preparation=Preparation((4.0, 4.0, 4.0), "zscore", None, 2))
    save_weights(tmp_path / "drawn.safetensors", model.build().state_dict(), {})
    import_weights(tmp_path / "run", "brats", model, tmp_path / "drawn.safetensors")
    voxels = np.random.default_rng(0).normal(100, 9, (30, 26, 20, 2)).astype(np.int16)
    (tmp_path / "scans").mkdir()
    nibabel.Nifti1Image(voxels, np.diag([4.0, 4.0, 4.0, 1.0])).to_filename(tmp_path / "scans" / "a.nii.gz")
    voxels[..., empty] = 0
    nibabel.Nifti1Image(voxels, np.diag([4.0, 4.0, 4.0, 1.0])).to_filename(tmp_path / "scans" / "b.nii.gz")
    assert segment_scans(config(tmp_path / "run", tmp_path / "scans", tmp_path / "out"), model).status == 0
    assert f"b.nii.gz: UNCERTAIN: channel {empty} is EMPTY" in capsys.readouterr().out
    assert {row["scan"]: "is EMPTY" in row["uncertain"] for row in rows(tmp_path / "out")} == {
        "a.nii.gz": False, "b.nii.gz": True,
    }  # fmt: skip


def test_flips_average_the_logits(run, scans, tmp_path):
    """The logits of a network that is mirrored on the way in and out, averaged by hand."""
    network = MODEL.build(run / "best.safetensors").eval()
    image = torch.randn(1, 40, 30, 20, generator=torch.Generator().manual_seed(0))
    predictor = torch_predictor(network)
    by_hand = [predict_logits(image.flip(mirror), predictor, MODEL).flip(mirror) for mirror in ((), (1,), (3,), (1, 3))]
    found = flipped_logits(image, predictor, MODEL, MODEL.window_size, "xz", [])
    assert torch.allclose(found, torch.stack(by_hand).mean(0), atol=1e-5)
    assert not torch.allclose(found, by_hand[0], atol=1e-3)


@pytest.mark.parametrize(("threshold", "both"), [(0.5, 4), (0.7, 0)])
def test_the_agreement_of_flips_is_that_of_the_labels_that_are_written(threshold, both):
    """A network that says the same of each image: organ beyond a plane. Behind a mirror that is on the other side."""
    model = replace(MODEL, postprocessing=(Postprocessing(("spleen",), threshold=threshold),))
    logits = torch.tensor([-1.0] * 10 + [0.5] * 11 + [1.0] * 3).reshape(24, 1, 1)  # of 24 planes; 0.7 is 0.85

    def predict(windows: torch.Tensor) -> torch.Tensor:
        organ = logits.expand(len(windows), 1, 24, 24, 16)
        return torch.cat((torch.zeros_like(organ), organ), dim=1)

    pairs: list[torch.Tensor] = []
    flipped_logits(torch.zeros(1, 24, 24, 16), predict, model, MODEL.window_size, "x", pairs)
    shared, found = pairs[0][0].tolist()
    assert shared == both * 24 * 16
    assert found == 2 * (14 if both else 3) * 24 * 16


def test_exported_precisions_are_asked_for_by_name(run, scans, tmp_path):
    with pytest.raises(ValueError, match="precision int8: backend torch takes fp32, bf16, fp16"):
        segment(config(run, scans, tmp_path, precision="int8"))
    with pytest.raises(FileNotFoundError, match=r"model_int8\.onnx"):
        segment(replace(config(run, scans, tmp_path, precision="int8"), backend="onnxruntime"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("flips", "xx", "each at most once"),
        ("flips", "w", "letters"),
        ("smallest_ml", -1.0, "volume"),
        ("smallest_ml", float("nan"), "volume"),
    ],
)
def test_options_out_of_bounds_are_named(run, scans, tmp_path, field, value, message):
    with pytest.raises(ValueError, match=rf"{field}.*{message}"):
        config(run, scans, tmp_path, **{field: value})


@pytest.mark.slow
def test_scans_killed_in_the_middle_are_finished_and_equal(run, tmp_path):
    scans = make_phantoms("ct", tmp_path / "data", 3) / "imagesTr"
    for number in range(3, 16):
        (scans / f"copy_{number:02}.nii.gz").symlink_to(scans / f"phantom_00{number % 3}.nii.gz")
    assert segment(config(run, scans, tmp_path / "whole")) == 0
    flags = ["--backend", "torch", "--device", "cpu", "--overlays", "false"]
    command = [sys.executable, "apps/spleen/infer.py", "--model", str(run), "--input", str(scans)]
    command += ["--output", str(tmp_path / "killed"), *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            began = time.monotonic()
            while len(records(tmp_path / "killed")) < 4 and time.monotonic() - began < 300:
                time.sleep(0.02)
        finally:
            process.kill()
    before = records(tmp_path / "killed")
    assert 4 <= len(before) < 16
    assert segment(config(run, scans, tmp_path / "killed")) == 0
    after = records(tmp_path / "killed")
    assert all(after[name] == time for name, time in before.items())  # nothing twice
    whole, killed = label_maps(tmp_path / "whole"), label_maps(tmp_path / "killed")
    assert len(whole) == 16
    assert all(np.array_equal(found, killed[name]) for name, found in whole.items())
    assert (tmp_path / "whole" / "measurements.csv").read_text() == (
        tmp_path / "killed" / "measurements.csv"
    ).read_text()


def nifti(path, shape=(6, 5, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.ones(shape, np.int16), np.diag([1.0, 2.0, 3.0, 1.0])), path)
    return path


def test_a_folder_gives_its_nifti_files_in_order_and_nothing_else(tmp_path):
    for name in ("b.nii.gz", "a.nii", "._b.nii.gz", "below/c.nii.gz"):
        nifti(tmp_path / name) if not name.startswith("._") else (tmp_path / name).write_bytes(b"mac")
    (tmp_path / "a.nii.png").write_bytes(b"")
    nifti(tmp_path / "c.nii").rename(tmp_path / "c.NII")  # a scan, too: left out without a word, it would be missed
    found = find_scans(tmp_path)
    assert [scan.name for scan in found] == ["a.nii", "b.nii.gz", "c.NII"]
    assert [stem_of(scan.name) for scan in found] == ["a", "b", "c"]
    (scan,) = find_scans(tmp_path / "a.nii")
    assert read_scan(scan, 1).voxels.shape == (6, 5, 4)


def test_a_header_whose_voxels_lie_in_another_file_is_no_scan_that_passes_unseen(tmp_path):
    for name in ("a.nii", "a.hdr", "b.mhd", "b.raw", "c.NHDR"):
        (tmp_path / name).touch()
    found = find_scans(tmp_path)
    assert [scan.name for scan in found] == ["a.nii", "b.mhd", "c.NHDR"]  # that of a is there in another format
    with pytest.raises(ValueError, match=r"b\.mhd: expected a file named .*: save it as one of these"):
        read_scan(found[1], 1)


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
    with pytest.raises(ValueError, match=r"a\.nii and a\.nii\.gz have one name"):
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
    with pytest.raises(FileNotFoundError, match="or DICOM series"):
        find_scans(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        find_scans(tmp_path / "missing.nii.gz")


def test_fitted_windows_are_computed_by_torch_unless_another_is_asked_for(run, scans, tmp_path, monkeypatch):
    asked: list[str] = []

    def opened(runs, model, backend, *given, **more):
        asked.append(backend)
        raise ValueError("enough")

    monkeypatch.setattr("medspeed.common.inference.scans.open_models", opened)
    for fits, backend in ((True, "auto"), (False, "auto"), (True, "onnxruntime")):
        with pytest.raises(ValueError, match="enough"):
            segment(replace(config(run, scans, tmp_path / "out", fit_windows=fits), backend=backend))
    assert asked == ["torch", "auto", "onnxruntime"]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match=r"output .*out: is a file; it must be a folder"):
        InferConfig(tmp_path / "run", tmp_path / "in", tmp_path / "out")
