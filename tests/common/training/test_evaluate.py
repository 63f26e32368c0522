"""What the end of a training says of its Dice, and the post-processing that it chooses."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.common.clock import Clock
from medspeed.common.data.dataset import Case, Split
from medspeed.common.inference.model import write_model
from medspeed.common.inference.postprocessing import CaseParts, Postprocessing, Steps, case_parts
from medspeed.common.inference.runs import load_models
from medspeed.common.run import Run
from medspeed.common.training import evaluate
from medspeed.common.training.evaluate import choose_postprocessing, doubts, no_choice
from medspeed.common.training.sources import Data
from medspeed.models import find_network
from tests.support import unet_model

MODEL = unet_model((2.0, 2.0, 2.0), (4, 8), (16, 16, 16))


def test_a_dice_that_proves_nothing_is_doubted_in_capitals():
    assert doubts(0.9, held_out=True) == []
    assert [each.split(":")[0] for each in doubts(0.9, held_out=False)] == ["NOT HELD OUT"]
    assert [each.split(":")[0] for each in doubts(0.0, held_out=True)] == ["NOTHING LEARNED"]
    assert [each.split(":")[0] for each in doubts(0.0, held_out=False)] == ["NOT HELD OUT", "NOTHING LEARNED"]


def speckled(voxels: int) -> dict[Steps, CaseParts]:
    """A spleen of 1000 voxels of a mm3, and false ones elsewhere."""
    truth = np.zeros((30, 30, 30), np.uint8, order="F")
    truth[2:12, 2:12, 2:12] = 1
    labels = truth.copy(order="F")
    labels[20 : 20 + voxels, 20, 20] = 1
    return {(): case_parts(labels, truth, MODEL.labelling, 0.001)}


def chosen(folder, cases, held_out=True, **fields):
    folder.mkdir(exist_ok=True)
    write_model(folder, "spleen", MODEL)
    run = Run(folder, torch.device("cpu"), Clock(), resumed=False)
    config, split = SpleenConfig(**fields), Split((), (Case("a", Path(), Path()),) * len(cases), held_out, "")
    found = choose_postprocessing(cases, no_choice(config, split), MODEL, config, run)
    return found, load_models([folder], "spleen", find_network).postprocessing, (folder / "run.log").read_text()


def test_what_helps_on_validation_cases_is_kept_in_the_model_and_said(tmp_path):
    found, kept, said = chosen(tmp_path, [speckled(9) for _ in range(4)])
    assert kept == (Postprocessing(("spleen",), smallest_ml=0.01),)
    before = 2000 / 2009  # 9 false voxels are below 0.01 ml
    assert (found["before"], found["after"]) == (pytest.approx(before), 1.0)
    assert said == (
        f"post-processing: spleen: components of at least 0.01 ml (Dice {before:.4f} before, 1.0000 after; a "
        "case rightly found empty counts as 1)\n"
    )
    assert found["steps"] == [{"structures": ("spleen",), "largest": False, "smallest_ml": 0.01, "threshold": 0.5}]
    assert json.dumps(found)


@pytest.mark.parametrize(
    ("voxels", "cases", "more", "why"),
    [
        (9, 3, {}, "3 validation cases; a choice needs 4"),
        (9, 4, {"held_out": False}, "validation cases were trained on"),
        (9, 4, {"fast_dev_run": True}, "this is a fast dev run"),
        (3, 4, {}, "nothing gains more than 0.002 Dice, its best case left out"),
    ],
)
def test_nothing_is_chosen_without_a_reason_to(tmp_path, voxels, cases, more, why):
    before = unwritten(tmp_path / "before")
    found, kept, said = chosen(tmp_path / "run", [speckled(voxels) for _ in range(cases)], **more)
    assert (kept, said) == ((), f"post-processing: none: {why}\n")
    assert found["before"] == found["after"] < 1.0
    assert (tmp_path / "run" / "model.json").read_text() == before
    assert "postprocessing" not in before  # as files were before there was such a field


def unwritten(folder):
    folder.mkdir()
    write_model(folder, "spleen", MODEL)
    return (folder / "model.json").read_text()


def test_rules_that_cannot_be_tried_do_not_cost_the_run(tmp_path, monkeypatch, capsys):
    def unmounted(*given):
        raise OSError("the store is gone")

    monkeypatch.setattr(evaluate, "stored_cases", unmounted)
    case = Case("a", tmp_path / "a.nii.gz", tmp_path / "a.nii.gz")
    data = Data(None, Split((case,), (case,), True, ""), None)  # type: ignore[arg-type]
    run = Run(tmp_path, torch.device("cpu"), Clock(), resumed=False)
    assert evaluate._without_learning(MODEL, data, SpleenConfig(), run) == {}
    assert "the Dice without learning could not be computed: the store is gone" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("windows", "judged"), [((8, 8, 8, 1), 3), ((100, 1), 1), ((1, 1), 2), ((1,) * 20, 8)])
def test_exports_are_judged_on_as_many_cases_as_fill_24_windows_and_on_8_at_most(
    tmp_path, monkeypatch, windows, judged
):
    """On a CPU each large scan takes the gate a minute; the first is always judged."""
    cases = tuple(Case(f"c{number}", Path(), Path()) for number in range(len(windows)))
    sides = {case.name: count * 16 for case, count in zip(cases, windows, strict=True)}
    seen: list[tuple[Sequence[Case], Sequence[Any]]] = []
    monkeypatch.setattr(
        evaluate,
        "stored_cases",
        lambda cases, *_: [SimpleNamespace(image=torch.zeros(1, sides[c.name], 16, 16)) for c in cases],
    )
    monkeypatch.setattr(evaluate, "volume_gate", lambda cases, prepared, *_: seen.append((cases, prepared)))
    monkeypatch.setattr(evaluate, "best_network", lambda *_: None)
    monkeypatch.setattr(evaluate, "export", lambda *_: ())
    data: Any = SimpleNamespace(split=Split((), cases, True, ""))
    run, fitted = Run(tmp_path, torch.device("cpu"), Clock(), resumed=False), SimpleNamespace()
    evaluate.export_best(MODEL, cast(Any, fitted), data, SpleenConfig(), run)
    ((chosen_cases, prepared),) = seen
    assert chosen_cases == cases[:judged]
    assert len(prepared) == judged
