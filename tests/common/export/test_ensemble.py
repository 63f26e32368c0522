"""An ensemble as one run folder: one ONNX model behind the gate, with the digests of all members."""

import json
from dataclasses import replace

import pytest
import torch

from medspeed.apps.pathology.export import PathologyExport
from medspeed.apps.pathology.export import main as export_pathology
from medspeed.apps.spleen.export import SpleenExport
from medspeed.apps.spleen.export import main as export_spleen
from medspeed.common.export.bundle import write_volume_bundle
from medspeed.common.export.deploy import write_ensemble
from medspeed.common.export.model_card import model_card
from medspeed.common.files import sha256_of, write_json
from medspeed.common.inference.open_predictor import open_predictor
from medspeed.common.inference.predictors import read_onnx_metadata
from medspeed.common.inference.runs import load_models, open_models
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.models import find_network
from tests.common.inference.test_runs import CPU, MODEL, write_run


@pytest.fixture
def runs(tmp_path):
    return tuple(write_run(tmp_path / name, seed) for seed, name in enumerate("ab"))


@pytest.mark.slow
def test_several_runs_become_one_onnx_model_of_their_mean(runs, tmp_path, capsys):
    data, whole = make_phantoms("ct", tmp_path / "data", 2), tmp_path / "whole"
    assert export_spleen(SpleenExport(runs, "onnx", whole, data=data, device="cpu")) == whole / "exports"
    assert "Dice on 2 cases" in capsys.readouterr().out
    digests = [sha256_of(run / "best.safetensors") for run in runs]
    model = load_models([whole], "spleen", find_network)
    assert [member.sha256 for member in model.members] == digests
    assert read_onnx_metadata(whole / "exports" / "model_fp32.onnx")["members"].split() == digests
    card = model_card(whole, "Task")
    assert "mean of the logits of 2 networks" in card
    assert all(f"- {run.name}: unet3d, sha256 `{digest}`" in card for run, digest in zip(runs, digests, strict=True))
    windows = torch.rand((1, 1, *MODEL.window_size), generator=torch.Generator().manual_seed(0))
    due = open_models(runs, load_models(runs, "spleen", find_network), backend="torch", device=CPU).predict(windows)
    for backend in ("onnxruntime", "torch"):
        found = open_predictor(whole, model, backend=backend, device=CPU)
        torch.testing.assert_close(found.predict(windows), due, rtol=1e-4, atol=1e-4)
    with pytest.raises(FileExistsError, match=r"whole: not empty; --output of several models must be a new folder"):
        write_ensemble(whole, "spleen", model, runs)


def test_the_data_of_an_ensemble_are_those_of_all_and_only_what_none_saw_is_held_out(runs, tmp_path):
    names = [f"phantom_00{number}" for number in range(4)]
    summary = {"data": {"folder": str(tmp_path / "moved"), "name": "p", "synthetic": True}}
    for run, validation, before, flips in zip(runs, (names[:2], names[1:3]), "ba", ("xy", "yz"), strict=True):
        training = [name for name in names if name not in validation]
        split = {"training": training, "validation": validation, "trained_before": [before]}
        write_json(run / "split.json", split)
        write_json(run / "plan.json", {"crops": {"flips": flips}})
        write_json(run / "summary.json", summary)
    model = load_models(runs, "spleen", find_network)
    write_ensemble(tmp_path / "whole", "spleen", model, runs)
    split = json.loads((tmp_path / "whole" / "split.json").read_text())
    assert (split["training"], split["validation"]) == ([names[0], *names[2:]], [names[1]])
    assert split["held_out"] is True
    assert split["trained_before"] == ["a", "b"]  # what the weights that each began with knew
    assert json.loads((tmp_path / "whole" / "plan.json").read_text()) == {"crops": {"flips": "y"}}
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["data"] == summary["data"]
    write_json(runs[1] / "summary.json", {"data": {"folder": "elsewhere", "synthetic": False}})
    write_ensemble(tmp_path / "mixed", "spleen", model, runs)
    assert json.loads((tmp_path / "mixed" / "summary.json").read_text())["data"] == {"synthetic": True}
    assert json.loads((tmp_path / "mixed" / "split.json").read_text()) == split  # so that none passes for unseen
    (runs[0] / "split.json").unlink()
    write_json(runs[0] / "plan.json", {"crops": None})
    write_ensemble(tmp_path / "imported", "spleen", model, runs)
    assert json.loads((tmp_path / "imported" / "split.json").read_text())["held_out"] is False  # nobody knows
    assert not (tmp_path / "imported" / "plan.json").exists()
    with pytest.raises(ValueError, match=r"an ensemble cannot be a MONAI bundle"):
        write_volume_bundle(tmp_path / "bundle", tmp_path / "whole", "Task", model)


def test_weights_that_do_not_fit_and_damaged_files_leave_nothing(runs, tmp_path):
    model = load_models(runs, "spleen", find_network)
    wide = replace(model.members[1], arguments={"channels": (4, 12), "residual_units": 1})
    with pytest.raises(ValueError, match=r"b/best.safetensors: does not fit"):
        write_ensemble(tmp_path / "whole", "spleen", replace(model, members=(model.members[0], wide)), runs)
    (runs[1] / "split.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b/split.json: Object missing required field `training`"):
        write_ensemble(tmp_path / "whole", "spleen", model, runs)
    (runs[1] / "split.json").unlink()
    for run in runs:
        (run / "fingerprint.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a/fingerprint.json: .*restore or remove it"):
        write_ensemble(tmp_path / "whole", "spleen", model, runs)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    "given", [{"to": "bundle", "output": "o"}, {"to": "onnx"}, {"to": "onnx", "output": "o", "init": "w.pt"}]
)
def test_several_models_need_a_new_run_folder_for_models_or_engines(runs, given):
    with pytest.raises(ValueError, match=r"model .*/a .*/b: several become one with --to onnx or engine and --output"):
        SpleenExport(runs, **given)


def test_pathology_takes_one_run(runs, tmp_path):
    with pytest.raises(ValueError, match=r"expected one run; only volumes take several"):
        export_pathology(PathologyExport(runs, "onnx", tmp_path / "o"))
