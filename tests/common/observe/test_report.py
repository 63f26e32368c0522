"""The report of a run: what it says, what it does without, and that data never become HTML."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medspeed.common.files import write_json
from medspeed.common.observe.overlays import oriented_scan
from medspeed.common.observe.report import _duration, write_report, write_report_case

IMAGE_NAME = "<img src=x onerror=alert(1)>"
SCRIPT_NAME = "</script><script>window.planted = true</script>"
LABEL = "</script><script>window.planted = true</script>"
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
        "limit": {"seconds_per_step": 0.0345, "tflops": 0.0456, "percent": 12.3},
        "quality": {
            "name": "foreground Dice",
            "value": 0.66,
            "per_case": per_case,
            "selected_on": "training",
            "per_region": {"<i>region</i>": 0.625, "never there": None},
            "without_learning": {"value": 0.3105, "how": "<i>region</i> by position"},
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
        "memory_gib": 23.5,
        "versions": {"torch": "2.13"},
        "git": "0123456789abcdef+changes",
    }
    write_json(folder / "environment.json", environment)
    for name in ("overlays/bad", "overlays/good", "overlays/fair", "progress"):
        Image.new("RGB", (30, 20), "red").save(folder / f"{name}.png")
    return folder


def add_case(folder: Path, name: str = IMAGE_NAME) -> None:
    """Give a run folder a case to look at: a gradient, and a prediction that lies one voxel beside the truth."""
    x, y, z = np.indices((20, 16, 12))
    image = 40 * x + 10 * y + 5 * z
    truth = np.zeros(image.shape, np.uint8)
    truth[5:12, 4:10, 3:8] = 1
    found = np.roll(truth, 1, axis=0)
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    affine[:3, 3] = -20, 10, 5
    write_report_case(folder, name, oriented_scan(image, found, affine, truth, (0, image.max())), ("background", LABEL))


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
        self.inside = tag if tag in {"script", "style", "td", "th"} else self.inside

    def handle_endtag(self, tag: str) -> None:
        if tag in {"script", "style", "td", "th"}:
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data
            if self.inside in {"td", "th"}:
                self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def pictures(self) -> list[str | None]:
        return [picture["alt"] for picture in self.all("img")]

    def table(self, first: str) -> list[list[str]]:
        start = next(number for number, row in enumerate(self.rows) if row[0] == first)
        width = len(self.rows[start])
        end = next((n for n in range(start + 1, len(self.rows)) if len(self.rows[n]) != width), len(self.rows))
        return self.rows[start + 1 : end]

    @property
    def cases(self) -> list[dict[str, Any]]:
        return [json.loads(script) for script in self.scripts[:-1]]


def written(folder: Path) -> Path:
    return write_report(folder, json.loads((folder / "summary.json").read_text()))


def report(folder: Path) -> Page:
    path = written(folder)
    assert path == folder / "report.html"
    assert [each.name for each in folder.glob(".part-*")] == []
    return Page(path)


def test_the_head_says_what_ran_and_how_well(tmp_path: Path):
    text = report(hand_made_run(tmp_path / "run")).text
    for expected in (
        "spleen fast", "0.6600", "foreground Dice", "weights selected on: training",
        "without learning: 0.3105 (<i>region</i> by position)",
        "2026-11-21 19:44:28+0000 (resumed)", "while training: best 0.7111 (epoch 2), last 0.6222",
        "cuda:0, Big GPU", "bf16", "Phantoms & more",
        "15 training, 5 validation", "0123456789ab+changes", "dice=0.9: NOT reached after 12.5 s",
        "SYNTHETIC DATA", "NOT HELD OUT",
    ):  # fmt: skip
        assert expected in text


def test_real_data_held_out_has_no_banner(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", {**summary, "data": {"synthetic": False}, "held_out": True})
    text = report(folder).text
    assert "SYNTHETIC DATA" not in text
    assert "NOT HELD OUT" not in text


def test_the_stages_stand_in_order_and_add_up_with_the_rest(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    assert page.table("stage")[:5] == [
        ["start", "1.0 s", "10.0 %", ""],
        ["train", "5.0 s", "50.0 %", ""],
        ["prepare", "2.0 s", "20.0 %", ""],
        ["own stage", "0.5 s", "5.0 %", ""],
        ["rest", "1.5 s", "15.0 %", ""],
    ]
    assert [bar["value"] for bar in page.all("meter")][-5:] == ["0.1", "0.5", "0.2", "0.05", "0.15"]
    assert "10.0 s from the start of the process" in page.text
    assert "Of 10.0 s of training the host waited 2.0 s for batches; computing the steps took 6.0 s." in page.text


def test_the_cases_stand_worst_first(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    assert page.table("case")[:5] == [
        ["bad", "0.2500", ""],
        [IMAGE_NAME, "0.5000", ""],
        ["fair", "0.7500", ""],
        [SCRIPT_NAME, "0.8500", ""],
        ["good", "0.9500", ""],
    ]
    assert page.table("region")[:2] == [["<i>region</i>", "0.6250", ""], ["never there", "—", ""]]
    assert page.pictures() == ["progress"]
    assert "A picture of each case: overlays/" in page.text


def test_a_region_has_its_surface_distances_and_its_volume_beside_its_dice(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    means = {"nsd": {"cases": 5, "mean": 0.81234}, "hd95_mm": {"mean": 12.345}, "error_percent": {"mean": -7.25}}
    summary["quality"]["metrics"] = {"<i>region</i>": means, "never there": {"nsd": {"cases": 0}}}
    write_json(folder / "summary.json", summary)
    rows = [[" ".join(cell.split()) for cell in row] for row in report(folder).table("region")[:2]]
    assert rows[0] == ["<i>region</i>", "0.6250", "NSD 0.812, HD95 12.3 mm, volume error -7.2 %"]
    assert rows[1] == ["never there", "—", ""]


def test_a_case_without_a_value_is_the_worst(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {"a": 0.9, "b": 0.8, "c": None, "d": 0.7})
    page = report(folder)
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
    assert report(folder).table("export")[:3] == [
        ["onnx", "fp32", "1.25e-06", "0", "yes", "model_fp32.onnx", ""],
        ["onnx", "fp16", "12.5", "—", "no", "none", "<b>too far</b>"],
        ["engine", "—", "—", "—", "no", "none", "no TensorRT here"],
    ]


def test_a_steps_speed_is_told_and_nothing_has_raw_keys(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    assert "A training step takes 34.5 ms and reaches 45.6 GFLOP/s, 12.3 % of what" in page.text
    assert not [
        key for key in ("memory_gib", "seconds_per_step", "versions", "per_case", "best_epoch") if key in page.text
    ]


def test_the_title_tells_runs_apart(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "20261122-1944"))
    assert "<title>20261122-1944 · spleen fast</title>" in page.source


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (119.2, "119.2 s"), (119.8, "2 min 0 s"), (417, "6 min 57 s"), (7170, "119 min 30 s"),
     (7200, "2 h 0 min"), (90061, "25 h 1 min")],
)  # fmt: skip
def test_times_are_said_as_people_say_them(seconds: float, said: str):
    assert _duration(seconds) == said


def test_the_result_comes_first_then_the_cases_then_curves_and_time(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    parts = ("0.6600", "Cases", 'id="viewer"', "Curves", ">Time<", "Export parity")
    places = [written(folder).read_text().index(part) for part in parts]
    assert places == sorted(places)


def test_nothing_from_the_data_becomes_an_element(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    page = report(folder)
    assert [script.get("type") for script in page.all("script")] == ["application/json", None]
    assert all((picture["src"] or "").startswith("data:image/") for picture in page.all("img"))
    assert not {"b", "i", "u", "s"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert [case["labels"] for case in page.cases] == [{"1": LABEL}]
    assert f"1: {LABEL}" in page.text
    assert not set("<>&") & set(page.scripts[0])
    assert f"{IMAGE_NAME} (0.5000)" in page.text  # the choice of the viewer


def test_names_that_no_text_file_can_hold_do_no_harm(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {"lone \udc80 surrogate": 0.5, "two\nlines\x00": 0.6})
    rows = report(folder).table("case")
    assert [row[0] for row in rows[:2]] == ["lone \\udc80 surrogate", "two\\nlines\\x00"]


def test_the_page_asks_for_nothing(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    page = report(folder)
    assert "http://" not in page.source
    assert "https://" not in page.source
    addresses = [each.get(name) or "data:" for _, each in page.tags for name in ("src", "href")]
    assert all(address.startswith(("data:", "./", "#viewer")) for address in addresses)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|sendBeacon|innerHTML|eval\(", page.source)


def test_the_policy_allows_the_own_style_and_script_alone(tmp_path: Path):
    page = report(hand_made_run(tmp_path / "run"))
    policy = next(each["content"] or "" for each in page.all("meta") if "http-equiv" in each)
    style = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert len(style) == 1
    for name, text in (("style", style[0]), ("script", page.scripts[-1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    assert not [attributes for _, attributes in page.tags if "style" in attributes]  # the policy would refuse it


def test_a_large_run_stays_below_the_promised_size_and_says_what_is_left_out(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run", {f"case {number:02}": number / 50 for number in range(50)})
    noise = np.random.default_rng(0).integers(0, 256, (200, 450, 3), np.uint8)  # more than any such picture takes
    for name in ("progress", "monitor"):
        Image.fromarray(noise).save(folder / f"{name}.png", compress_level=0)
    image = np.random.default_rng(0).integers(0, 256, (96, 96, 96), np.uint8)
    for number in range(12):  # of noise, which nothing makes smaller
        write_report_case(folder, f"case {number:02}", oriented_scan(image, image, np.eye(4), image), (), 50)
    path = written(folder)
    assert path.read_bytes().count(b"data:image/png;base64,") == 2
    assert LIMIT / 2 < path.stat().st_size < LIMIT
    page = Page(path)
    (shown,) = {len(page.cases), len(page.all("option"))}
    assert 1 < shown < 12
    assert f"{12 - shown} more cases did not fit on this page." in page.text


@pytest.mark.parametrize(
    ("of", "sides", "shape"),
    [(1, (120, 120, 120), [96] * 3), (9, (120, 120, 120), [96] * 3), (10, (120, 120, 120), [92] * 3),
     (30, (120, 120, 120), [64] * 3), (72, (120, 120, 120), [48] * 3), (500, (120, 120, 120), [48] * 3),
     (9, (300, 300, 20), [192, 192, 20]), (9, (300, 300, 40), [148, 148, 40]), (72, (300, 300, 20), [74, 74, 20])],
)  # fmt: skip
def test_many_cases_share_the_bytes_of_nine(tmp_path: Path, of: int, sides: tuple[int, ...], shape: list[int]):
    volume = np.zeros(sides, np.uint8)
    assert written_case(tmp_path, "one", volume, volume, volume, np.eye(4), names=(), of=of)["shape"] == shape


def test_each_case_is_in_the_viewer_the_worst_first_and_the_table_leads_there(tmp_path: Path):
    folder = hand_made_run(tmp_path / "run")
    for name in ("good", "bad", IMAGE_NAME):
        add_case(folder, name)
    page = report(folder)
    assert len(page.cases) == 3
    assert [option["value"] for option in page.all("option")] == ["0", "1", "2"]
    places = [
        page.text.index(f"{name} ({dice:.4f})") for name, dice in (("bad", 0.25), (IMAGE_NAME, 0.5), ("good", 0.95))
    ]
    assert places == sorted(places)
    links = re.findall(r'<a href="#viewer" data-case="(.)">(.*?)</a>', page.source)
    assert [number for number, _ in links] == ["0", "1", "2"]
    assert (links[0][1], links[2][1]) == ("bad", "good")


def written_case(
    folder: Path,
    name: str,
    image: Any,
    found: Any,
    truth: Any,
    affine: Any,
    *,
    names: Any,
    window: Any = None,
    of: int = 1,
) -> dict[str, Any]:
    write_report_case(folder, name, oriented_scan(image, found, affine, truth, window), names, of)
    content: dict[str, Any] = json.loads((folder / "report_cases" / f"{name}.json").read_text())
    return content


def unpacked(case: dict[str, Any], name: str) -> np.ndarray:
    return np.frombuffer(gzip.decompress(base64.b64decode(case[name])), np.uint8).reshape(case["shape"])


def test_a_damaged_case_or_no_environment_costs_only_itself(tmp_path: Path):
    folder = hand_made_run(tmp_path)
    add_case(folder, "good")
    add_case(folder, "bad")
    (folder / "report_cases" / "bad.json").write_text("{")
    (folder / "environment.json").unlink()
    page = write_report(folder, json.loads((folder / "summary.json").read_text())).read_text()
    assert re.findall(r'<option value="0">(.*) \(', page.split("</option>")[0]) == ["good"]
    assert "<option" not in page.split("</option>")[1].split("</select>")[0]


def test_a_case_is_made_small_by_means_and_middles(tmp_path: Path):
    image = np.zeros((384, 3, 2), np.uint8)
    image[0::2], image[1::2] = 10, 30  # pairs along x become one voxel: their mean is 20
    truth = np.zeros_like(image)
    truth[100:104, 1, 0] = 2
    found = np.zeros_like(image)
    found[101, 1, 0] = 5  # the middle of the pair (100, 101) is 101
    case = written_case(
        tmp_path, "one", image, found, truth, np.diag([1.0, 2.0, 3.0, 1.0]), names=("", "a", "b"), window=(0, 255)
    )
    assert case["shape"] == [192, 3, 2]
    assert case["spacing"] == [2.0, 2.0, 3.0]
    assert case["start"] == [50, 1, 0]
    assert case["labels"] == {"2": "b", "5": "label 5"}
    assert (unpacked(case, "image") == 20).all()
    assert np.argwhere(unpacked(case, "truth")).tolist() == [[50, 1, 0], [51, 1, 0]]
    assert np.argwhere(unpacked(case, "prediction")).tolist() == [[50, 1, 0]]


def test_a_case_is_turned_to_the_patient_and_windowed(tmp_path: Path):
    image = np.zeros((4, 5, 6), np.float32)
    image[0, 0, 0], image[3, 4, 5], image[1, 1, 1] = -100, 300, 100
    truth = np.zeros(image.shape, np.int16)
    truth[0, 1, 2] = 1
    affine = np.array([[0, -2.0, 0, 0], [3.0, 0, 0, 0], [0, 0, 4.0, 0], [0, 0, 0, 1]])  # first axis A, second axis L
    names = ("background", "organ")
    case = written_case(tmp_path, "one", image, 0 * truth, truth, affine, names=names, window=(-100, 300))
    assert case["spacing"] == case["native"] == [2.0, 3.0, 4.0]
    assert case["labels"] == {"1": "organ"}
    grey = unpacked(case, "image")
    assert grey.shape == (5, 4, 6)
    assert (grey[4, 0, 0], grey[0, 3, 5]) == (0, 255)
    assert grey[3, 1, 1] == 128  # (100 + 100) / 400 of 255, rounded to even
    assert np.argwhere(unpacked(case, "truth")).tolist() == [[3, 0, 2]]
    assert np.array(case["affine"]) @ (3, 0, 2, 1) == pytest.approx((affine @ (0, 1, 2, 1))[:3])  # the same place in mm
    assert not unpacked(case, "prediction").any()


@pytest.mark.parametrize("side", [1, 191, 193, 512])
def test_any_side_shrinks_to_at_most_192_and_keeps_its_length_and_mean(tmp_path: Path, side: int):
    image = np.full((side, 1, 1), 7, np.uint8)
    affine = np.diag([0.5, 1.0, 1.0, 1.0])
    case = written_case(tmp_path, "one", image, image, image, affine, names=(), window=(0, 255))
    kept = min(side, 192)
    assert case["shape"] == [kept, 1, 1]
    assert case["spacing"][0] * kept == pytest.approx(0.5 * side)
    assert unpacked(case, "image").ravel().tolist() == [7] * kept
    ends = [np.array(case["affine"]) @ (place, 0, 0, 1) for place in (-0.5, kept - 0.5)]
    assert [end[0] for end in ends] == pytest.approx([-0.25, 0.5 * side - 0.25])  # edge to edge, as in the file


def test_intensities_beyond_the_window_are_kept_for_another_one(tmp_path: Path):
    image = np.linspace(-1000, 1000, 21, dtype=np.float32).reshape(21, 1, 1)
    labels = np.zeros(image.shape, np.uint8)
    case = written_case(tmp_path, "one", image, labels, labels, np.eye(4), names=(), window=(0, 100))
    assert (case["window"], case["range"]) == ([0, 100], [-100, 200])
    assert unpacked(case, "image").ravel()[8:13].tolist() == [0, 0, 85, 170, 255]
    case = written_case(tmp_path, "one", image, labels, labels, np.eye(4), names=(), window=(-900, 900))
    assert case["range"] == [-1000, 1000]
