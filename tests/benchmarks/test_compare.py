"""Each part of `compare.py` runs at a tiny scale, and its rows are of both sides."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.benchmarks import GUIDES, compare, harness, peers, sides
from medspeed.benchmarks.peers import make_step
from medspeed.benchmarks.sides import Task
from medspeed.common.data.batches import Batch
from medspeed.common.export.export import Exported
from medspeed.common.inference.model import write_model
from medspeed.data_scripts import make_slides as maker
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.data_scripts.make_slides import make_slides

CPU = torch.device("cpu")
CROPS = {
    size: f"--crop-size {size} {size} {size} --batch-size {batch} --windows.size 32 32 32"
    for size, batch in ((16, 4), (32, 4))
}
SMALL: dict[str, dict[str, Any]] = {
    "spleen": {
        "fast": "--channels 4 8 --spacing 6 6 6 --crops.per-case 4 --optimizer novograd",
        "guide": """--network '{"channels": [4, 8], "strides": [2]}' --spacing 6 6 6 --roi 32 32 32""",
        "steps": [CROPS[32]], "warm": f"{CROPS[32]} --epochs 1",
    },
    "brats": {
        "fast": "--network.filters 8 --network.blocks-down 1 1 --network.dropout 0 --spacing 1 1 1 --crops.per-case 1 "
        "--optimizer novograd",
        "guide": """--network '{"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}' --roi 32 32 32""",
        "steps": [CROPS[16].replace("4", "2")],
        "warm": f"{CROPS[16].replace('4', '2')} --epochs 30 --validate-every 30",
    },
    "pathology": {
        "guide": "",
        "steps": ["--patch-size 64 --batch-size 9 --patches-per-slide 9"],
        "warm": "--patch-size 64 --batch-size 9 --patches-per-slide 9 --epochs 1 --tile-size 1024",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Have sizes of seconds, in place of those of `guides.yaml`; and no monitor."""
    monkeypatch.setenv("MEDSPEED_MONITOR_SECONDS", "0")
    none = Exported("onnx", "fp32"), Exported("engine")  # no way of slides takes an export, which costs most of a run
    monkeypatch.setattr("medspeed.apps.pathology.train.export", lambda *given: none)
    for app, changes in SMALL.items():
        monkeypatch.setitem(GUIDES, app, {**GUIDES[app], **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory, small_heads):
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:  # slides with level 6, at which the guide looks at 256 places of each
        patch.setattr(maker, "_SMALLEST_LEVEL", 16)
        slides = make_slides(folder / "slides", 4, 2, 1024)
    return {
        "spleen": make_phantoms("ct", folder / "ct", 2),
        "brats": small_heads,
        "pathology": slides,
    }


@pytest.fixture
def run(data, tmp_path, monkeypatch, in_this_process):
    """Run parts of `compare.py` from the command line, one round; return the record, and its rows by what they are."""

    def compared(app: str, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
        output = tmp_path / "record.json"
        line = ["compare.py", app, "--data", data[app], "--rounds", 1, "--device", "cpu", "--output", output, *words]
        monkeypatch.setattr(sys, "argv", list(map(str, line)))
        compare.main()
        record = json.loads(output.read_text())
        return record, {each["what"].partition(" (guide")[0]: each for each in record["rows"]}

    return compared


@pytest.mark.parametrize("bf16", [True, False])
def test_ours_alone_steps_without_the_guide_and_without_what_is_emulated(run, monkeypatch, capsys, bf16):
    monkeypatch.setattr(sides, "computes_bf16", lambda device: bf16)
    monkeypatch.setattr(sides, "choose_precision", lambda *_: "bf16" if bf16 else "fp32")
    _, rows = run("brats", "--part", "step", "--sides", "fast", "--cases", "2")
    assert all(each["guide"] is None and each["fast"] > 0 for each in rows.values())
    assert any("bf16" in name for name in rows) is bf16
    assert ("only emulates" in capsys.readouterr().out) is not bf16


def test_the_guides_steps_run_where_nothing_of_ours_does_on_a_float32_batch_by_the_clock_of_ours(
    data, tmp_path, monkeypatch
):
    """Whatever the precision of our run: its batch may be of another dtype and layout, as a fused kernel makes it."""
    task, batch = Task("brats", data["brats"], CPU, 1, 8, True, tmp_path), tmp_path / "batch.pt"
    image = torch.rand(2, 4, 16, 16, 16, dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)
    label = torch.ones(2, 1, 16, 16, 16, dtype=torch.uint8)
    setup = SimpleNamespace(batches=SimpleNamespace(epoch=lambda _: iter([Batch(image, label, ("a", "b"))])))
    with monkeypatch.context() as patched:
        patched.setattr(harness, "opened", lambda config: nullcontext((None, setup, None)))
        harness.save_batch(None, batch)
    saved, _ = torch.load(batch, weights_only=True)
    assert saved.dtype == torch.float32
    assert saved.is_contiguous()
    assert torch.equal(saved, image.float())
    monkeypatch.setattr(harness, "opened", lambda config: pytest.fail("a run of ours in the guide's process"))
    given = next(iter(task.ways(task.config(GUIDES["brats"]["steps"][0])).values()))
    found = harness.guide_steps("brats", batch, given.network, "fp32")
    assert found["computed, s per step"] > 0
    assert found["batch"] == [2, 4, 16, 16, 16]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_record_lies_in_a_folder_of_date_device_and_app_and_only_a_finished_one_is_refused(
    data, tmp_path, monkeypatch, capsys, bf16
):
    monkeypatch.setattr(compare, "computes_bf16", lambda device: bf16)
    monkeypatch.setattr(compare, "step", lambda task: [harness.row("a step", "s", [2.0], [1.0])])
    line = ["compare.py", "brats", "--data", data["brats"], "--device", "cpu", "--part", "step", "--output", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, line)))
    folder = compare.new_record(tmp_path, "brats", CPU)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_cpu{'-bf16' * bf16}_brats-guide-against-fast", folder.name)
    folder.mkdir()
    (folder / "record.json").write_text("of one that was interrupted")
    compare.main()
    assert json.loads((folder / "record.json").read_text())["rows"][0]["ratio"] == 2.0
    assert f"compare.py brats --data {data['brats']}" in (folder / "README.md").read_text()
    assert "README" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main()
    assert f"{folder.name} already exists; move it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("app", GUIDES)
def test_step_has_a_row_for_every_pair_of_sides(run, app):
    _, rows = run(app, "--part", "step")
    assert all(each["guide"] > 0 and each["fast"] > 0 for each in rows.values())
    assert any("both fp32" in what for what in rows)
    assert any(what.endswith("with the making of the batch") for what in rows)


@pytest.mark.parametrize("app", GUIDES)
def test_both_sides_step_on_the_same_batch(data, tmp_path, monkeypatch, app):
    """The first losses are equal where the weights are, so image, labels and loss are (patches without smoothing)."""
    smooth = " --augmentation.label-smoothing 0" * (app == "pathology")
    task, losses = Task(app, data[app], CPU, 1, 8, True, tmp_path), dict[str, float]()
    config = task.config(GUIDES[app]["steps"][0] + smooth, "fp32")
    given = next(iter(task.ways(config).values()))

    def same_weights(network: torch.nn.Module) -> torch.nn.Module:
        draw = np.random.default_rng(0)
        for name, value in network.named_parameters():
            if value.ndim > 1 or name.endswith("bias"):
                value.data = torch.from_numpy(0.1 * draw.standard_normal(value.shape)).float()
        return network

    def guide_step(network: torch.nn.Module, *others: Any) -> Any:
        step, optimizer = make_step(same_weights(network), *others)
        return lambda *batch: losses.setdefault("guide", step(*batch)), optimizer

    monkeypatch.setattr(peers, "make_step", guide_step)
    harness.save_batch(config, tmp_path / "batch.pt")
    harness.guide_steps(app, tmp_path / "batch.pt", given.network, "fp32")
    with harness.opened(config) as (_, setup, _):
        batch = next(iter(setup.batches.epoch(0)))
        loss = setup.loss_function(same_weights(setup.network.train())(batch.image), batch.label)
    assert loss.item() == pytest.approx(losses["guide"], rel=1e-4)


@pytest.mark.slow
def test_masks_of_both_sides_are_timed_and_judged(run):
    _, rows = run("brats", "--part", "inference")
    scan = rows["file to file, fp32"]
    assert scan["ratio"] == pytest.approx(scan["guide"] / scan["fast"], rel=0.05, abs=0.02)
    assert rows["peak memory, fp32"]["guide"] > 0
    # The heads fill 22 of 24 voxels, which the guide keeps whole and ours crops: no more than rims may differ.
    assert rows["least Dice of a mask to the guide's, fp32"]["fast"] > 0.9
    dice = rows["Dice of these masks, fp32"]
    assert abs(dice["guide"] - dice["fast"]) < 0.05


@pytest.mark.slow
def test_scans_of_slides_are_timed_and_judged(run):
    _, rows = run("pathology", "--part", "inference")
    assert rows["file to file, fp32"]["fast"] > 0
    assert 0 <= rows["FROC of these scans, fp32"]["guide"] <= 1
    assert 0 <= rows["slide AUC of these scans, fp32"]["fast"] <= 1


def test_the_guides_maps_are_judged_as_scans_of_ours_are(data, tmp_path):
    """A map that is sure of every tumour slide, and of nothing on the others, tells the slides apart."""
    task = Task("pathology", data["pathology"], CPU, 1, 4, True, tmp_path)
    write_model(tmp_path / "run", "pathology", PathologyModel(64, None, 1024, 1, "fp32"))
    tumour = {entry.path for entry in read_slide_set(data["pathology"]).testing if entry.tumour}
    (tmp_path / "guide").mkdir()
    for file in task.scans():
        np.save(tmp_path / "guide" / f"{file.stem}.npy", np.full((16, 16), 0.9 * (file in tumour)))
    found = sides.judge_maps(task, tmp_path / "guide", tmp_path / "guide" / "scans")
    assert found["slide AUC of these scans"] == ([1.0], [1.0])
    froc, again = found["FROC of these scans"]
    assert froc == again
    assert 0 <= froc[0] <= 1


def test_slides_with_and_without_tumour_are_scanned_in_turn(data, tmp_path):
    tumour = {entry.path: entry.tumour for entry in read_slide_set(data["pathology"]).testing}
    scans = Task("pathology", data["pathology"], CPU, 1, 4, True, tmp_path).scans()
    assert [tumour[path] for path in scans] == [True, False]


@pytest.mark.slow  # two whole runs, exports and all
@pytest.mark.parametrize(
    ("app", "tiny", "lines"),
    [
        (
            "brats", "--split all --crop-size 16 16 16 --windows.size 32 32 32",
            ("learning_rate: 0.01", "loss: monai_dice_focal"),
        ),
        (
            "pathology", "--held-out 0.5 --patch-size 64 --patches-per-slide 12 --batch-size 6 --tile-size 1024",
            ("source: uncached",),
        ),
    ],
)  # fmt: skip
def test_quality_is_of_equal_runs_of_both_recipes(data, tmp_path, monkeypatch, app, tiny, lines):
    known = GUIDES[app]["quality"]
    flags = f"{known['both']} {tiny} --epochs 2 --validate-every 2 --data {data[app]}"
    monkeypatch.setitem(GUIDES, app, {**GUIDES[app], "quality": {**known, "both": flags}})
    (found,) = compare.quality(Task(app, data[app], CPU, 1, 8, True, tmp_path))
    assert found["what"].endswith("1 seeds, equal epochs")
    assert 0 <= found["guide"] <= 1
    assert 0 <= found["fast"] <= 1
    written = {side: (tmp_path / f"{side}-0" / "config.yaml").read_text() for side in ("guide", "fast")}
    assert all(line in written["guide"] for line in lines)
    assert all("epochs: 2" in text for text in written.values())


def test_the_dice_of_label_maps(tmp_path: Path):
    """Label 1 in 2 and 1 of 4 voxels, 1 of them common; label 2 in 1 and 1, none common; no label 3 in either."""
    for name, values in (("one", [1, 1, 2, 0]), ("other", [1, 0, 0, 2])):
        voxels = np.array(values, np.uint8).reshape(4, 1, 1)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{name}.nii")
    regions = {"a": (1,), "b": (2,), "c": (3,), "ab": (1, 2)}  # of either label: voxels 3 and 2, one common
    found = sides.dices([tmp_path / "one.nii"], [tmp_path / "other.nii"], regions)
    assert found.tolist() == [pytest.approx([2 / 3, 0.0, 1.0, 0.4])]
