"""The Python interface: what a notebook calls, and what it leaves behind."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import medspeed
from medspeed import evaluate, predict, train
from medspeed.api import App, _settings_restored
from medspeed.apps import APPS
from medspeed.apps.spleen.config import RECIPES, SpleenConfig
from medspeed.common import console
from medspeed.common.config import config_from_values
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference.model import save_weights
from medspeed.common.inference.runs import import_weights
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.models.unet3d import UNet3d
from tests.support import unet_model

MODEL = unet_model((4.0, 4.0, 4.0), (4, 8), (24, 24, 16), window_batch=2)
SMALL = {"channels": (4, 8), "crop_size": [16, 16, 16], "windows": {"size": (32, 32, 32)}, "batch_size": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_phantoms("ct", tmp_path_factory.mktemp("data") / "phantoms", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run of random weights."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    save_weights(folder / "drawn.safetensors", MODEL.build().state_dict(), {})
    import_weights(folder / "run", "spleen", MODEL, folder / "drawn.safetensors")
    return folder / "run"


def state():
    """Return what a call must leave as it was."""
    names = (None, "pydicom", "highdicom", "medspeed")
    loggers = [logging.getLogger(name).level for name in names]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]
    return (
        logging.root.handlers[:],
        loggers,
        handlers,
        warnings.filters[:],
        threading.excepthook,
        torch.get_num_threads(),
        console._verbosity,
    )


def test_the_package_is_typed_and_loads_no_torch_until_it_is_used():
    program = (
        "import sys, medspeed; print(medspeed.__version__); from medspeed import train; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [medspeed.__version__, "False"]
    assert (Path(medspeed.__file__).parent / "py.typed").is_file()
    assert set(medspeed.__all__) <= {*dir(medspeed), *dir(medspeed.api)}
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = medspeed.trian  # type: ignore[attr-defined]


def test_a_user_without_home_has_a_folder_and_no_telemetry_is_sent():
    program = """
import pwd
def unknown(_): raise KeyError
pwd.getpwuid = unknown
import medspeed, os, pathlib
print(pathlib.Path.home().parent, *map(os.environ.get, {NAMES}))
"""
    names = ["ORT_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"]
    unset = {name: value for name, value in os.environ.items() if name not in ("HOME", *names)}
    words = [sys.executable, "-c", program.replace("{NAMES}", str(names))]
    done = subprocess.run(words, env=unset, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [tempfile.gettempdir(), "1", "true", "false"]


def test_the_apps_are_those_there_are():
    assert set(get_args(App)) == set(APPS)
    with pytest.raises(ValueError, match="app 'liver': must be one of brats, pathology, spleen"):
        train("liver")  # type: ignore[arg-type]


def test_flags_are_keywords_of_the_same_names():
    given = {"epochs": 3, "crop_size": [32, 32, 16], "windows": {"overlap": 0.5}, "crops.per_case": 2, "data": "~/x"}
    config = config_from_values(SpleenConfig, RECIPES, {"recipe": "guide", **given})
    assert (config.epochs, config.crop_size, config.crops.per_case, config.recipe) == (3, (32, 32, 16), 2, "guide")
    assert (config.windows.overlap, config.windows.size) == (0.5, (160, 160, 160))
    assert config.data == Path.home() / "x"


@pytest.mark.parametrize(
    ("flags", "kind", "said"),
    [
        ({"epoch": 3}, ValueError, r"epoch: no such field \(did you mean epochs\?\)"),
        ({"windows": {"sise": 3}}, ValueError, r"windows.sise: no such field \(did you mean windows.size\?\)"),
        ({"window_size": (32, 32, 32)}, ValueError, "did you mean windows.size"),
        ({"epochs": "many"}, ValueError, "epochs many: expected a whole number, or null"),
        ({"epochs": 0}, ValueError, "epochs 0: must be at least 1"),
        ({"recipe": "slow"}, ValueError, "recipe slow: expected one of baseline, guide, fast"),
        ({"resume": "nowhere"}, FileNotFoundError, "nowhere"),
    ],
)
def test_a_mistake_is_an_exception_that_names_the_flag(flags, kind, said):
    with pytest.raises(kind, match=said):
        train("spleen", **flags)


def test_scans_are_segmented_and_told_one_by_one(model, data, tmp_path, capfd):
    scans = tmp_path / "scans"
    scans.mkdir()
    for path in sorted((data / "imagesTr").iterdir())[:2]:
        (scans / path.name).symlink_to(path)
    (scans / "broken.nii.gz").write_bytes(b"no scan")
    before = state()
    found = predict(model, scans, str(tmp_path / "out"), quiet=True, device="cpu", overlays=False)
    assert state() == before
    assert capfd.readouterr() == ("", "")
    assert list(found.done) == ["phantom_000.nii.gz", "phantom_001.nii.gz"]
    assert list(found.failed) == ["broken.nii.gz"]
    assert "broken.nii.gz" in found.failed["broken.nii.gz"]
    for name, each in found.done.items():
        assert each.files == (tmp_path / "out" / name,)
        labels = read_volume(each.files[0])
        voxel_ml = abs(np.linalg.det(labels.affine[:3, :3])) / 1000
        assert each.volumes_ml == {"spleen": pytest.approx((labels.voxels == 1).sum() * voxel_ml, abs=1e-3)}
    again = predict(model, scans, tmp_path / "out", device="cpu", overlays=False)
    assert again == found
    assert "2 scans already finished" in capfd.readouterr().out


def test_label_maps_are_compared_with_references_those_of_a_run_too(model, data, tmp_path, capfd):
    masks = predict(model, data / "imagesTr", tmp_path / "masks", quiet=True, device="cpu", overlays=False)
    found = evaluate(tmp_path / "masks", data / "labelsTr", quiet=True, tolerance=1)
    assert capfd.readouterr() == ("", "")
    names = [name.removesuffix(".nii.gz") for name in masks.done]
    assert list(found.cases) == names
    (scores,) = found.cases[names[0]]
    labels, due = (
        read_volume(path / f"{names[0]}.nii.gz").voxels == 1 for path in (tmp_path / "masks", data / "labelsTr")
    )
    assert scores["dice"] == pytest.approx(2 * (labels & due).sum() / (labels.sum() + due.sum()))
    assert (found.tolerance_mm, found.status) == (1.0, 0)
    again = evaluate(model, data, quiet=True, output=tmp_path / "again", tolerance=1)
    assert again.summary == found.summary
    with pytest.raises(ValueError, match=r"tolerances: no such field \(did you mean tolerance\?\)"):
        evaluate(tmp_path / "masks", data / "labelsTr", tolerances=1)


def test_what_is_no_model_or_no_flag_is_named(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="model takes the folder of a training run"):
        predict(tmp_path, tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"overlay: no such field \(did you mean overlays\?\)"):
        predict(model, tmp_path, tmp_path / "out", overlay=True)
    with pytest.raises(ValueError, match="input: given twice"):
        predict(model, tmp_path, tmp_path / "out", input=tmp_path / "others")
    with pytest.raises(ValueError, match="data: given twice"):
        evaluate(model, tmp_path, data=tmp_path / "others")
    (tmp_path / "model.json").write_text('{"app": "liver"}')
    with pytest.raises(ValueError, match="app 'liver': must be one of"):
        predict(tmp_path, tmp_path, tmp_path / "out")


def test_a_signal_that_ended_the_work_acts_as_usual_afterwards(monkeypatch):
    """Ctrl-C interrupts the cell, another one does what the caller's handler does."""
    statuses = iter([128 + signal.SIGINT, 128 + signal.SIGTERM, 1])

    def main(config: SpleenConfig) -> None:
        raise SystemExit(next(statuses))

    monkeypatch.setattr("medspeed.apps.spleen.train.main", main)
    with pytest.raises(KeyboardInterrupt):
        train("spleen")
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(RuntimeError, match="ended with status 143"):
            train("spleen")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    with pytest.raises(RuntimeError, match="ended with status 1"):
        train("spleen")


def test_settings_are_restored_by_the_last_of_calls_that_overlap(monkeypatch):
    """Each of two threads is inside while the other begins or ends; the first to begin is the first to end."""
    monkeypatch.setattr(console, "_verbosity", "normal")
    began, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def run(number):
        with _settings_restored():
            console.set_verbosity("silent")
            logging.getLogger("medspeed").setLevel(logging.CRITICAL)
            torch.set_num_threads(3)  # which threads that begin from now on inherit
            began[number].set()
            assert go_on[number].wait(30)

    before = state()
    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        assert began[number].wait(30)
    for number, thread in enumerate(threads):
        assert console._verbosity == "silent"
        go_on[number].set()
        thread.join()
    assert state() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == before[-2]


def test_numbers_of_numpy_are_numbers():
    given = {"epochs": np.int64(5), "learning_rate": np.float64(0.5), "crop_size": tuple(np.array([64, 64, 48]))}
    config = config_from_values(SpleenConfig, RECIPES, {**given, "spacing": np.ones(3), "split": Path("split.json")})
    assert (config.epochs, config.learning_rate, config.crop_size) == (5, 0.5, (64, 64, 48))
    assert (config.spacing, config.split) == ((1.0, 1.0, 1.0), "split.json")


def spleen(data, run, **more):
    flags = {**SMALL, "data": data, "store": run.parent / "store", "engine": "none", "device": "cpu", "epochs": 2}
    return train("spleen", run=run, quiet=True, **{**flags, **more})


@pytest.mark.slow
def test_a_training_in_a_thread_says_nothing_and_leaves_nothing(data, tmp_path, capfd):
    found, before = [], state()
    thread = threading.Thread(target=lambda: found.append(spleen(data, tmp_path / "run", fast_dev_run=True)))
    thread.start()
    thread.join()
    assert state() == before
    assert capfd.readouterr() == ("", "")
    (summary,) = found
    assert (summary["app"], summary["steps"], summary["run"]) == ("spleen", 2, str(tmp_path / "run"))
    assert "the results of this run are meaningless" in (tmp_path / "run" / "run.log").read_text()
    masks = predict(summary["run"], data / "imagesTr", tmp_path / "masks", quiet=True, device="cpu")
    assert len(masks.done) == 3
    assert masks.status == 0


@pytest.mark.slow
def test_an_interrupted_training_is_saved_and_goes_on(data, tmp_path):
    """Ctrl-C in a notebook, while the first epoch runs."""
    steps = []

    def interrupt(module, _):
        if module.training and isinstance(module, UNet3d):
            steps.append(1)
            if len(steps) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    hook, before = torch.nn.modules.module.register_module_forward_pre_hook(interrupt), state()
    try:
        with pytest.raises(KeyboardInterrupt):
            spleen(data, tmp_path / "run")
    finally:
        hook.remove()
    assert state() == before
    assert len(steps) == 1
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
    with pytest.raises(ValueError, match="a resumed run keeps its own"):
        train("spleen", resume=tmp_path / "run", epochs=3)
    assert train("spleen", resume=tmp_path / "run", quiet=True)["steps"] == 4


def test_predict_and_evaluate_take_several_models(data, model, tmp_path):
    torch.manual_seed(4)
    save_weights(tmp_path / "drawn.safetensors", MODEL.build().state_dict(), {})
    import_weights(tmp_path / "other", "spleen", MODEL, tmp_path / "drawn.safetensors")
    scan = data / "imagesTr" / "phantom_000.nii.gz"
    found = predict([model, str(tmp_path / "other")], scan, tmp_path / "masks", quiet=True, overlays=False)
    mark = found.done[scan.name].record["mark"]
    assert [each["run"] for each in mark["model"]["members"]] == [model.name, "other"]
    with pytest.raises(ValueError, match=r"^output: must be given to evaluate the mean of 2 models"):
        evaluate([model, tmp_path / "other"], data, quiet=True)
