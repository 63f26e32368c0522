"""The visit to a host with a GPU: its script with a stand-in for Python, its own parts, and all of it on a CPU."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.benchmark import Timer

from medspeed.apps import parse_flags
from medspeed.benchmarks import visit_parts
from medspeed.benchmarks.speedrun import parse_options

ROOT = Path(__file__).parents[2]
PARTS = [
    "survey", "tests", "data", "steps-spleen", "steps-brats", "steps-pathology",
    "profile-spleen", "profile-brats", "profile-pathology", "target", "files",
]  # fmt: skip
SURVEY = '{"convolutions": [], "environment": {"device": "Stand-in", "versions": {"torch": "9"}}}'
STAND_IN = f"""#!/usr/bin/env bash
env printf '%s\\n' "$@" "" >>"$CALLS"  # in one piece: two may write at once
to() {{ while [ "$1" != --to ] && [ "$1" != --output ]; do shift; done; echo "$2"; }}
case "$*" in
  "- "*) exec {sys.executable} "$@" ;;
  *"--part survey"*) echo "$SURVEY" >"$(to "$@")" ;;
  "-m pytest "*) exit 3 ;;
  *"steps-spleen.json"*) sleep 60 ;;
  *"--part brats"*) echo '{{"eager": {{"s per step": 0.5}}, "graph": {{"fa' >"$(to "$@")" ;;
  *infer.py*) touch "$FILES"; sleep "$LAST" ;;
esac
"""


def visit(folder: Path, *words: str, **environ: str) -> "subprocess.Popen[str]":
    """Start a visit with a stand-in for Python, in which pytest fails and the spleen's steps take a minute."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    given = {
        "PYTHON": str(stand_in),
        "TMPDIR": str(folder),
        "LAST": "0",
        "SURVEY": SURVEY,
        "FILES": str(folder / "last"),
        "CALLS": str(folder / "calls"),
        **environ,
    }
    command = ["benchmarks/gpu_visit.sh", "--output", str(folder / "record"), "--limit", "steps-spleen=1", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "record" / "summary.json").read_text())
    return record


def test_a_part_that_fails_or_takes_too_long_stops_no_other(tmp_path):
    with visit(tmp_path, "--break", "profile-spleen", MEDSPEED_COMMIT="abc") as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said
    record = record_of(tmp_path)
    assert list(record["states"]) == PARTS
    assert record["states"] == dict.fromkeys(PARTS, "done") | {
        "tests": "failed, status 3", "steps-spleen": "out of time", "profile-spleen": "failed, status 1",
    }  # fmt: skip
    assert (record["gpu"], record["versions"], record["commit"], record["rehearsal"]) == (
        "Stand-in", "torch 9", "abc", False,
    )  # fmt: skip
    assert "damaged" in record["parts"]["steps-brats"]  # the stand-in wrote half of it
    table = (tmp_path / "record" / "summary.md").read_text()
    assert "| steps-spleen | out of time | 1 |" in table
    assert "broken on purpose" in said
    with tarfile.open(tmp_path / "record.tar.gz") as archive:
        assert {"record/summary.json", "record/logs/tests.log"} <= set(archive.getnames())
    assert not list(tmp_path.glob("gpu-visit.*"))  # what it made meanwhile


@pytest.mark.parametrize("words", [(), ("--rehearse",)])
def test_the_flags_that_parts_are_told_are_flags(tmp_path, words):
    """Else an hour with a GPU would end with a mistyped one."""
    with visit(tmp_path, *words) as process:
        process.communicate()
    parsed = []
    for call in (tmp_path / "calls").read_text().split("\n\n"):
        program, *told = call.split("\n")
        if program == "benchmarks/visit_parts.py":
            given = visit_parts.PARSER.parse_args(told)
            if given.part != "survey":
                parsed.append(parse_flags(given.part, given.flags).APP)
        elif program == "benchmarks/speedrun.py":
            parsed.append(parse_flags("spleen", parse_options(told)[1]).APP)
    assert parsed == [*["spleen", "brats", "pathology"] * 2, "spleen"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_visit_leaves_its_record(tmp_path, number):
    with visit(tmp_path, LAST="60") as process:
        while not (tmp_path / "last").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + number, said
    assert record_of(tmp_path)["states"]["files"] == "interrupted"
    assert record_of(tmp_path)["states"]["target"] == "done"


@pytest.mark.parametrize(
    "words", [("--minutes", "0"), ("--limit", "survey"), ("--outputs", "x"), ("--break",), ("--output", "tests")]
)
def test_a_mistyped_option_is_refused_before_anything_is_made(tmp_path, words):
    done = subprocess.run(
        ["benchmarks/gpu_visit.sh", *words],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert words[0] in done.stderr
    assert not list(tmp_path.iterdir())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1),
            nn.ConvTranspose3d(4, 2, 2, 2),
        )  # fmt: skip

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(image)
        return out


def test_each_distinct_convolution_is_timed_forward_and_backward(tmp_path, monkeypatch):
    monkeypatch.setattr(visit_parts, "NETWORKS", {"any": (Small, (1, 1, 4, 4, 4), (1, 1, 4, 4, 4))})
    monkeypatch.setattr(visit_parts, "measure_ceiling", lambda *_: 2e12)
    visit_parts.survey(torch.device("cpu"), tmp_path / "survey.json")
    found = json.loads((tmp_path / "survey.json").read_text())
    assert found["products, TFLOP/s"] == 2.0
    rows = [(row["weight"], row["stride"], row["calls"]) for row in found["convolutions"]]
    assert rows == [([4, 1, 3, 3, 3], [1] * 3, 1), ([4, 4, 3, 3, 3], [1] * 3, 2), ([4, 2, 2, 2, 2], [2] * 3, 1)]
    for row in found["convolutions"]:
        assert set(row["ms"]) == set(visit_parts.LAYOUTS)
        for each in row["ms"].values():
            assert set(each) == set(visit_parts.PASSES)
            assert min(each.values()) > 0


def test_convolutions_are_timed_with_all_threads(monkeypatch):
    made: list[Any] = []

    def timer(*words: Any, **how: Any) -> Any:
        made.append(how["num_threads"])
        return Timer(*words, **how)

    monkeypatch.setattr(visit_parts, "Timer", timer)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    visit_parts.layouts(torch.rand(1, 1, 4, 4), torch.rand(1, 1, 1, 1), [[1, 1], [0, 0], [1, 1], False, [0, 0], 1])
    assert set(made) == {3}


def test_a_convolution_that_cannot_run_is_told_and_the_next_one_timed(tmp_path, monkeypatch):
    def fails(image: torch.Tensor, weight: torch.Tensor, told: Any) -> Any:
        if weight.shape[1] == 1:
            raise torch.OutOfMemoryError("no room")
        return {}

    monkeypatch.setattr(visit_parts, "NETWORKS", {"any": (Small, (1, 1, 4, 4, 4), (1, 1, 4, 4, 4))})
    monkeypatch.setattr(visit_parts, "layouts", fails)
    visit_parts.survey(torch.device("cpu"), tmp_path / "survey.json")
    rows = json.loads((tmp_path / "survey.json").read_text())["convolutions"]
    assert [row["ms"] for row in rows] == ["failed: OutOfMemoryError: no room", {}, {}]


def test_a_way_that_cannot_run_is_told(tmp_path, monkeypatch):
    def fails(config: Any) -> Any:
        assert (config.APP, config.graph, config.kernels, config.compile, config.epochs) == (
            "spleen",
            "auto",
            "auto",
            False,
            3,
        )
        raise ValueError("no such kernel")

    monkeypatch.setattr(visit_parts, "trained", fails)
    visit_parts.steps("spleen", ["--epochs", "3"], ["auto"], torch.device("cpu"), tmp_path / "steps.json")
    assert json.loads((tmp_path / "steps.json").read_text())["auto"] == "failed: ValueError: no such kernel"


@pytest.mark.slow
@pytest.mark.parametrize("app", ["spleen", "brats"])
def test_inference_and_benchmarks_of_volumes_import_without_what_dicom_and_slides_need(app):
    """A host with a GPU and without a network has what was carried there."""
    blocked = ["cc3d", "imagecodecs", "gdcm", "highdicom", "openslide", "cucim", "lmdb", "ignite", "fire"]
    blocked += ["cupy", "tensorrt", "tensorrt_rtx"]
    wanted = [
        f"medspeed.apps.{app}.infer",
        f"medspeed.apps.{app}.train",
        "medspeed.benchmarks.compare",
        "medspeed.benchmarks.visit_parts",
    ]
    wanted += [f"medspeed.benchmarks.peers.{app}_guide", "medspeed.benchmarks.speedrun"]
    program = f"import importlib, sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
    program += f"for name in {wanted}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_visit_is_rehearsed_with_a_part_that_fails_and_one_that_takes_too_long(tmp_path):
    command = ["benchmarks/gpu_visit.sh", "--rehearse", "--output", str(tmp_path / "record"), "--minutes", "18"]
    command += ["--break", "profile-pathology", "--limit", "profile-brats=1"]
    for name in set(PARTS) - {"profile-brats"}:
        command += ["--limit", f"{name}=900"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    record = record_of(tmp_path)
    logs = "\n".join(path.read_text()[-1500:] for path in (tmp_path / "record" / "logs").iterdir())
    due = {"profile-pathology": "failed, status 1", "profile-brats": "out of time"}
    assert record["states"] == dict.fromkeys(PARTS, "done") | due, logs
    parts = record["parts"]
    assert len({row["app"] for row in parts["survey"]["convolutions"]}) == 3
    for app in ("spleen", "brats", "pathology"):
        for way in ("guide", "eager"):
            assert parts[f"steps-{app}"][way]["computed, s per step"] > 0, (app, way)
        for way in ("graph", "auto"):  # on a CPU there is neither, and the flags lead to the same steps
            assert parts[f"steps-{app}"][way]["losses"] == parts[f"steps-{app}"]["eager"]["losses"]
    assert {side: len(runs) for side, runs in parts["target"]["runs"].items()} == {"fast": 1, "warm": 1}
    assert parts["files"]["scans in this run"] == 2
    assert parts["tests"]["failures"] == parts["tests"]["errors"] == 0
    assert record["rehearsal"] is True
    assert record["versions"].startswith("torch ")
    assert "no figure here means anything" in (tmp_path / "record" / "summary.md").read_text()
