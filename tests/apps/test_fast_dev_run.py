"""`--fast_dev_run`: two steps through everything, with any recipe and whatever else is asked for."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from medspeed.apps import parse_flags
from medspeed.apps.brats.train import main as brats
from medspeed.apps.pathology.train import main as pathology
from medspeed.apps.spleen.train import main as spleen
from medspeed.common.inference import predict
from medspeed.common.training import evaluate
from medspeed.common.training.evaluate import RunSummary
from medspeed.data_scripts.make_slides import make_slides

MAINS: dict[str, Callable[[Any], RunSummary | None]] = {"spleen": spleen, "brats": brats, "pathology": pathology}
SMALL = {
    "spleen": ["--crop_size", "[16,16,16]", "--windows.size", "[32,32,32]", "--channels", "[4,8]", "--batch_size", "4"],
    "brats": [
        "--crop_size",
        "[16,16,16]",
        "--windows.size",
        "[32,32,32]",
        "--network.filters",
        "8",
        "--network.blocks_down",
        "[1,1]",
    ],
    "pathology": ["--patch_size", "64", "--tile_size", "512"],
}


@pytest.fixture(scope="module")
def data(phantoms, heads, tmp_path_factory):
    slides = make_slides(tmp_path_factory.mktemp("data") / "slides", 6, 2, 1024)
    return {"spleen": phantoms, "brats": heads, "pathology": slides}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "flags"),
    [
        ("spleen", []),
        ("spleen", ["--recipe", "guide", "--crops.per_case", "4"]),
        ("spleen", ["--parallel.partitions", "2"]),
        ("brats", ["--cache", "smart:4"]),
        ("brats", ["--recipe", "guide"]),
        ("pathology", ["--batch_size", "24"]),
        ("pathology", ["--recipe", "guide", "--batch_size", "40", "--precision", "fp32"]),
    ],
)
def test_two_steps_go_through_everything(app, flags, data, store, tmp_path):
    given = ["--data", str(data[app]), "--store", str(store), "--run", str(tmp_path / "run"), "--device", "cpu"]
    config = parse_flags(app, [*given, "--engine", "none", "--fast_dev_run", "true", *SMALL[app], *flags])
    summary = MAINS[app](config)
    assert summary is not None
    assert summary["steps"] == 2
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(record["losses"]) for record in records] == [1, 1]
    assert all(config.METRIC.lower() in record for record in records)
    assert "the results of this run are meaningless" in (tmp_path / "run" / "run.log").read_text()
    assert (tmp_path / "run" / "report.html").is_file()
    trivial = summary["quality"]["without_learning"]
    assert trivial == {} if config.recipe == "guide" else 0 <= trivial["value"] <= 1


@pytest.mark.slow
def test_volumes_that_do_not_fit_on_the_device_change_no_result(data, store, tmp_path, monkeypatch):
    """In validations, at the end and at the exports' gate each volume is tried again."""
    given = ["--data", str(data["spleen"]), "--store", str(store), "--device", "cpu", "--engine", "none"]
    given, tries, whole = [*given, "--fast_dev_run", "true", *SMALL["spleen"]], list[int](), predict.predict_logits
    expected = spleen(parse_flags("spleen", [*given, "--run", str(tmp_path / "whole")]))

    def fills(image: torch.Tensor, *more: Any) -> torch.Tensor:
        tries.append(len(tries))
        if len(tries) % 2:
            raise torch.OutOfMemoryError("no room")
        return whole(image, *more)

    for module in (predict, evaluate):
        monkeypatch.setattr(module, "predict_logits", fills)
    found = spleen(parse_flags("spleen", [*given, "--run", str(tmp_path / "short")]))
    assert found is not None
    assert expected is not None
    assert len(tries) >= 8  # two validations, one evaluation, the gate
    assert found["quality"] == expected["quality"]
    assert found["onnx"]["quality_delta"] == expected["onnx"]["quality_delta"]
