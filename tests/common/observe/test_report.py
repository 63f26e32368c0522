"""The report of a run: what it says, what it does without, and that data never become HTML."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.files import write_json
from common.observe.report import write_report
from common.observe.report_case import embed_volume, read_report_case, write_report_case

IMAGE_NAME = "<img src=x onerror=alert(1)>"
SCRIPT_NAME = "</script><script>window.planted = true</script>"
LIMIT = 8_000_000  # bytes, the size that `write_report` promises


def hand_made_run(folder: Path, per_case: dict[str, float | None] | None = None) -> Path:
    """Write a run folder as an app would, with values that are easy to follow."""
    if per_case is None:
        per_case = {"good": 0.95, "bad": 0.25, "fair": 0.75, IMAGE_NAME: 0.5, SCRIPT_NAME: 0.85}
    (folder / "overlays").mkdir(parents=True)
    summary = {
        "app": "spleen",
        "recipe": "fast",
        "data": {"folder": "data/<b>bold</b>", "name": "Phantoms & more", "synthetic": True},
        "held_out": False,
        "device": "cuda:0",
        "ranks": 2,
        "precision": "bf16",
        "seed": 7,
        "cases": {"training": 15, "validation": 5},
        "steps": 123,
        "target": {"until": "dice=0.9", "held": False, "seconds": 12.5},
        "limit": {"share": 0.5},
        "quality": {
            "name": "foreground Dice",
            "value": 0.66,
            "per_case": per_case,
            "selected_on": "training",
            "per_region": {"<i>region</i>": 0.625, "never there": None},
        },
        "working_grid": {"best": 0.7111, "last": 0.6222, "best_epoch": 2},
        "seconds": {"start": 1.0, "train": 5.0, "prepare": 2.0, "own stage": 0.5, "total": 10.0},
        "onnx": {"precision": "fp32", "path": "a/model_fp32.onnx", "max_abs_diff": 1.25e-6, "quality_delta": 0.0,
                 "fp16": {"precision": "fp16", "path": None, "max_abs_diff": 12.5, "reason": "<b>too far</b>"}},
        "engine": {"ran": False, "reason": "no TensorRT here"},
    }  # fmt: skip
    write_json(folder / "summary.json", summary)
    epochs: list[dict[str, Any]] = [
        {"epoch": 1, "losses": [1.5, 0.5], "loss": 1.0, "seconds": 4.0, "waited": 1.0, "computed": 2.5, "saved": 0.1},
        {"epoch": 2, "losses": [0.2, 0.4], "loss": 0.3, "seconds": 4.0, "waited": 0.5, "computed": 2.5, "dice": 0.7},
        {"epoch": 3, "losses": [0.1, 0.1], "loss": 0.1, "seconds": 2.0, "waited": 0.5, "computed": 1.0, "dice": 0.6},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    environment = {
        "command": ["train.py", "--resume", "runs/x"],
        "time": "2026-11-21T19:44:28+0000",
        "device": "Big GPU",
        "versions": {"torch": "2.13"},
        "git": "0123456789abcdef+changes",
    }
    write_json(folder / "environment.json", environment)
    (folder / "config.yaml").write_text("recipe: fast\nrun: '<u>under</u>'\nroi: [1, 2]\n")
    write_json(folder / "plan.json", {"model": {"window": [96, 96, 96]}})
    write_json(folder / "model.json", {"labelling": {"labels": ["background", "<s>spleen</s>"]}})
    (folder / "run.log").write_text("first line\n<script>window.planted = true</script>\n")
    for name in ("bad", "good", "fair"):
        Image.new("RGB", (30, 20), "red").save(folder / "overlays" / f"{name}.png")
    return folder


def add_case(folder: Path, name: str = SCRIPT_NAME) -> None:
    """Give a run folder a case to look at: a gradient, and a prediction that lies one voxel beside the truth."""
    x, y, z = np.indices((20, 16, 12))
    image = 40 * x + 10 * y + 5 * z
    label = np.zeros(image.shape, np.uint8)
    label[5:12, 4:10, 3:8] = 1
    found = np.roll(label, 1, axis=0)
    write_report_case(folder, name, image, label, found, np.diag([2.0, 3.0, 4.0, 1.0]), (0, image.max()))


class Page(HTMLParser):
    """The page as a parser reads it: tags with their attributes, texts, rows of tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.inside = ""
        self.source = path.read_text()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        self.inside = tag if tag in {"script", "style", "td", "th", "button"} else self.inside

    def handle_endtag(self, tag: str) -> None:
        if tag in {"script", "style", "td", "th"}:
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data
            if self.inside in {"td", "th", "button"}:
                self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def table(self, first: str) -> list[list[str]]:
        start = next(number for number, row in enumerate(self.rows) if row[0] == first)
        width = len(self.rows[start])
        end = next((n for n in range(start + 1, len(self.rows)) if len(self.rows[n]) != width), len(self.rows))
        return self.rows[start + 1 : end]

    @property
    def data(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.scripts[0])
        return content


def report(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    assert [each.name for each in folder.glob(".part-*")] == []
    return Page(path)


def test_the_head_says_what_ran_and_how_well(tmp_path: Path):
    text = report(hand_made_run(tmp_path / "run")).text
    for expected in (
        "spleen", "recipe fast", "0.6600", "foreground Dice", "weights selected on: training",
        "2026-11-21 19:44:28+0000", "while training: best 0.7111 (epoch 2), last 0.6222", "(resumed)",
        "cuda:0, Big GPU", "bf16", "Phantoms & more",
        "15 training, 5 validation", "0123456789ab+changes", "dice=0.9: NOT reached after 12.5 s",
        "SYNTHETIC DATA", "NOT HELD OUT",
    ):  # fmt: skip
        assert expected in text
    assert "INCOMPLETE" not in text


def test_real_data_held_out_has_no_banner(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", {**summary, "data": {"synthetic": False}, "held_out": True})
    text = report(folder).text
    assert "SYNTHETIC DATA" not in text
    assert "NOT HELD OUT" not in text


def test_the_stages_stand_in_order_and_add_up_with_the_rest(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    assert page.table("stage")[:6] == [
        ["start", "1.0", "10.0 %"],
        ["prepare", "2.0", "20.0 %"],
        ["train", "5.0", "50.0 %"],
        ["own stage", "0.5", "5.0 %"],
        ["rest", "1.5", "15.0 %"],
        ["total", "10.0", "100.0 %"],
    ]
    places = [(bar["x"], bar["width"]) for bar in page.all("rect") if "x" in bar]
    assert places == [
        ("0.000%", "10.000%"),
        ("10.000%", "20.000%"),
        ("30.000%", "50.000%"),
        ("80.000%", "5.000%"),
        ("85.000%", "15.000%"),
    ]
    assert (
        "Of 10.0 s of training the host waited 2.0 s for batches (20.0 %); computing the steps took 6.0 s." in page.text
    )


def test_without_waiting_times_nothing_is_said_of_waiting(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0, "seconds": 4.0}\n')
    page = report(folder)
    assert "the host waited" not in page.text
    assert [chart["title"] for chart in page.data["charts"]] == ["loss", "seconds per epoch"]


def test_the_curves_are_what_the_epochs_recorded(tmp_path: Path):
    loss, metric, seconds = report(hand_made_run(tmp_path / "run")).data["charts"]
    assert loss["epochs"] == metric["epochs"] == [1, 2, 3]
    assert loss["curves"] == [
        {"name": "loss", "values": [1.0, 0.3, 0.1], "low": [0.5, 0.2, 0.1], "high": [1.5, 0.4, 0.1]}
    ]
    assert metric["curves"] == [{"name": "dice", "values": [None, 0.7, 0.6]}]
    assert [curve["name"] for curve in seconds["curves"]] == ["seconds", "waited"]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0}\n{"epoch": 2, "loss": NaN}\n')
    assert report(folder).data["charts"][0]["curves"][0]["values"] == [1.0, None]


def test_the_cases_stand_worst_first_and_the_worst_are_shown(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    assert page.table("case")[:5] == [
        ["bad", "0.2500", ""],
        [IMAGE_NAME, "0.5000", ""],
        ["fair", "0.7500", ""],
        [SCRIPT_NAME, "0.8500", ""],
        ["good", "0.9500", ""],
    ]
    assert page.table("region")[:2] == [["<i>region</i>", "0.6250", ""], ["never there", "—", ""]]
    assert [picture["alt"] for picture in page.all("img")] == ["bad", "fair", "good"]
    assert "The worst 3 cases; overlays/ in the run folder holds 3 pictures." in page.text


def test_only_three_overlays_are_shown_and_a_case_without_a_value_is_the_worst(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {"a": 0.9, "b": 0.8, "c": None, "d": 0.7})
    for name in "abcd":
        Image.new("RGB", (30, 20), "red").save(folder / "overlays" / f"{name}.png")
    page = report(folder)
    assert [picture["alt"] for picture in page.all("img")] == ["c", "d", "b"]
    assert page.table("case")[0] == ["c", "—", ""]


def test_figures_without_regions_are_no_cases(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {"testing AUC": 0.9, "testing accuracy": 0.8})
    summary = json.loads((folder / "summary.json").read_text())
    summary["quality"]["per_region"] = {}
    write_json(folder / "summary.json", summary)
    page = report(folder)
    assert page.table("figure")[:2] == [["testing AUC", "0.9000", ""], ["testing accuracy", "0.8000", ""]]
    assert "Cases" not in page.text


def test_exports_say_how_far_they_are_and_why_there_is_none(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    (folder / "exports").mkdir()
    (folder / "exports" / "model_fp32.onnx").write_bytes(bytes(2**21))
    assert report(folder).table("export")[:3] == [
        ["ONNX", "fp32", "1.25e-06", "0", "yes", "model_fp32.onnx (2.0 MiB)", ""],
        ["ONNX", "fp16", "12.5", "—", "no", "none", "<b>too far</b>"],
        ["engine", "—", "—", "—", "no", "none", "no TensorRT here"],
    ]


def test_configuration_and_environment_are_listed(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    for row in (
        ["recipe", "fast"], ["run", "<u>under</u>"], ["roi", "[1, 2]"], ["model.window", "[96, 96, 96]"],
        ["versions.torch", "2.13"], ["command", "train.py --resume runs/x"], ["share", "0.5"],
    ):  # fmt: skip
        assert row in page.rows
    assert len(page.all("details")) == 5


def test_nothing_from_the_data_becomes_an_element(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    page = report(folder)
    assert [script.get("type") for script in page.all("script")] == ["application/json", None]
    assert all((picture["src"] or "").startswith("data:image/") for picture in page.all("img"))
    assert not {"b", "i", "u", "s"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.data["volume"]["case"] == SCRIPT_NAME
    assert page.data["volume"]["names"] == {"1": "<s>spleen</s>"}
    assert not set("<>&") & set(page.scripts[0])
    assert page.text.count(SCRIPT_NAME) == 2  # in the table and above the viewer


def test_names_that_no_text_file_can_hold_do_no_harm(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {"lone \udc80 surrogate": 0.5, "two\nlines\x00": 0.6})
    (folder / "run.log").write_bytes(b"\xff\x00 bytes\n")
    rows = report(folder).table("case")
    assert [row[0] for row in rows[:2]] == ["lone surrogate", "two lines"]


def test_the_page_asks_for_nothing(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    page = report(folder)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert all((each.get(name) or "data:").startswith("data:") for _, each in page.tags for name in ("src", "href"))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|sendBeacon|innerHTML|eval\(", page.source)


def test_the_policy_allows_the_own_style_and_script_alone(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    policy = next(each["content"] or "" for each in page.all("meta") if "http-equiv" in each)
    style = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert len(style) == 1
    for name, text in (("style", style[0]), ("script", page.scripts[1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    assert not [attributes for _, attributes in page.tags if "style" in attributes]  # the policy would refuse it


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("summary.json", "the run has not finished"),
        ("metrics.jsonl", "no curves"),
        ("environment.json", "no date"),
        ("config.yaml", "no configuration"),
        ("plan.json", "nothing of what was chosen"),
    ],
)
def test_what_is_missing_or_damaged_is_said_and_the_rest_is_there(tmp_path: Path, name: str, lost: str):
    folder = hand_made_run(tmp_path / "run")
    (folder / name).write_text("[1, 2\n]]{")
    text = report(folder).text
    assert f"{name} is damaged" in text
    assert lost in text
    (folder / name).unlink()
    text = report(folder).text
    assert f"{name} is missing: {lost}" in text
    assert ("0.6600" in text) == (name != "summary.json")
    assert ("Curves" in text) == (name != "metrics.jsonl")


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("recipe: guide\n")
    page = report(tmp_path)
    assert "recipe guide" in page.text
    assert "no quality yet" in page.text
    for section in ("Curves", "Time", "Cases", "Export parity", "Look at a case", "Heat maps", "Monitor"):
        assert section not in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_monitor_and_heat_maps_are_shown_where_they_are(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    assert not {"Monitor", "Heat maps"} & set(report(folder).text.split("\n"))
    (folder / "heatmaps").mkdir()
    for name in ("monitor", "heatmaps/slide one"):
        Image.new("RGB", (40, 40), "blue").save(folder / f"{name}.png")
    page = report(folder)
    assert [picture["alt"] for picture in page.all("img")] == ["monitor", "bad", "fair", "good", "slide one"]
    assert "1 of 1 heat maps" in page.text


def test_a_wide_picture_is_made_smaller_and_a_damaged_one_is_named(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    Image.new("RGB", (3200, 100), "red").save(folder / "overlays" / "bad.png")
    whole = (folder / "overlays" / "fair.png").read_bytes()
    (folder / "overlays" / "fair.png").write_bytes(whole[: len(whole) // 2])
    page = report(folder)
    shown = page.all("img")
    assert [(picture["alt"], picture["width"], picture["height"]) for picture in shown] == [
        ("bad", "1600", "50"),
        ("good", "30", "20"),
    ]
    content = base64.b64decode((shown[0]["src"] or "").split(",")[1])
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.size == (1600, 50)
    assert "fair.png cannot be read" in page.text


def test_a_large_run_stays_below_the_promised_size(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {f"case {number}": number / 50 for number in range(50)})
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), np.uint8)
    Image.fromarray(noise).save(folder / "overlays" / "case 0.png", compress_level=0)
    for number in range(1, 50):
        (folder / "overlays" / f"case {number}.png").symlink_to("case 0.png")
    record = {"losses": [0.123456789] * 4, "loss": 0.123456789, "seconds": 1.2345, "waited": 0.5, "dice": 0.987654321}
    lines = (json.dumps({"epoch": epoch, **record}) + "\n" for epoch in range(1, 1001))
    (folder / "metrics.jsonl").write_text("".join(lines))
    volume = np.zeros((96, 96, 96), np.uint8)
    write_report_case(folder, "case 0", volume, volume, volume, np.eye(4))
    page = write_report(folder).read_bytes()
    assert page.count(b"data:image/jpeg;base64,") == 2
    assert b"its pictures would exceed 3 MiB" in page
    assert LIMIT / 2 < len(page) < LIMIT


def test_a_volume_is_embedded_by_means_and_middles():
    image = np.zeros((192, 3, 2), np.uint8)
    image[0::2], image[1::2] = 10, 30  # pairs along x become one voxel: their mean is 20
    label = np.zeros_like(image)
    label[100:104, 1, 0] = 2
    prediction = np.zeros_like(image)
    prediction[101, 1, 0] = 5  # the middle of the pair (100, 101) is 101
    volume = embed_volume(image, label, prediction, (1.0, 2.0, 3.0))
    assert volume["shape"] == [96, 3, 2]
    assert volume["spacing"] == [2.0, 2.0, 3.0]
    assert volume["start"] == [50, 1, 0]
    assert volume["labels"] == [2, 5]
    grey, truth, found = (
        np.frombuffer(base64.b64decode(volume[name]), np.uint8).reshape(96, 3, 2)
        for name in ("image", "label", "prediction")
    )
    assert (grey == 20).all()
    assert np.argwhere(truth).tolist() == [[50, 1, 0], [51, 1, 0]]
    assert np.argwhere(found).tolist() == [[50, 1, 0]]


def test_a_written_case_is_turned_to_the_patient_and_windowed(tmp_path: Path):
    image = np.zeros((4, 5, 6), np.float32)
    image[0, 0, 0], image[3, 4, 5], image[1, 1, 1] = -100, 300, 100
    label = np.zeros(image.shape, np.int16)
    label[0, 1, 2] = 1
    affine = np.array([[0, -2.0, 0, 0], [3.0, 0, 0, 0], [0, 0, 4.0, 0], [0, 0, 0, 1]])  # first axis A, second axis L
    path = write_report_case(tmp_path, "one", image, label, np.zeros_like(label), affine, (-100, 300))
    case = read_report_case(path)
    assert case.name == "one"
    assert case.spacing == (2.0, 3.0, 4.0)
    assert case.image.shape == (5, 4, 6)
    assert case.image[4, 0, 0] == 0
    assert case.image[0, 3, 5] == 255
    assert case.image[3, 1, 1] == 128  # (100 + 100) / 400 of 255, rounded to even
    assert np.argwhere(case.label).tolist() == [[3, 0, 2]]
    assert not case.prediction.any()


@pytest.mark.parametrize("side", [1, 95, 96, 97, 200, 512])
def test_any_side_shrinks_to_at_most_96_and_keeps_its_length_and_mean(side: int):
    image = np.full((side, 1, 1), 7, np.uint8)
    volume = embed_volume(image, image, image, (0.5, 1.0, 1.0))
    kept = min(side, 96)
    assert volume["shape"] == [kept, 1, 1]
    assert volume["spacing"][0] * kept == pytest.approx(0.5 * side)
    assert base64.b64decode(volume["image"]) == bytes([7]) * kept


def bad_case(**changes: np.ndarray) -> dict[str, np.ndarray]:
    volume = np.zeros((2, 2, 2), np.uint8)
    return {"image": volume, "label": volume, "prediction": volume, "spacing": np.ones(3), **changes}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bad_case(label=np.zeros((2, 2, 3), np.uint8)), "one shape"),
        (bad_case(image=np.zeros((2, 2, 2), np.float32)), "must be uint8"),
        (bad_case(spacing=np.array([1.0, 0.0, 1.0])), "three lengths in mm"),
        ({"image": np.zeros(3, np.uint8)}, "no array label, prediction, spacing"),
        (bad_case(image=np.array([{}], dtype=object)), "allow_pickle=False"),
    ],
)
def test_a_case_that_cannot_be_shown_is_named_and_the_report_is_there(tmp_path: Path, content: Any, reason: str):
    folder = hand_made_run(tmp_path / "run")
    np.savez(folder / "report_case.npz", **content)
    page = report(folder)
    assert reason in page.text
    assert "volume" not in page.data


def test_a_cut_case_file_is_named(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    path = folder / "report_case.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert "report_case.npz: damaged" in report(folder).text


def test_a_report_is_replaced_by_the_next(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    first = report(folder).source
    assert report(folder).source == first
    (folder / "config.yaml").write_text("recipe: baseline\n")
    assert report(folder).source != first
