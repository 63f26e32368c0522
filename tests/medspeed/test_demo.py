"""The demo weights of the package: what they are, and that a user can try them at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import medspeed
from medspeed import predict
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import sha256_of
from medspeed.common.inference.options import InferConfig, model_folder
from medspeed.data_scripts.make_phantoms import make_phantoms

ROOT = Path(__file__).parents[2]
SHIPPED = Path(medspeed.__file__).parent / "demo"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    """A scan that was not among those of the training, with its labels."""
    data = make_phantoms("ct", tmp_path_factory.mktemp("demo") / "data", 1, seed=9)
    return data / "imagesTr" / "phantom_000.nii.gz", data / "labelsTr" / "phantom_000.nii.gz"


def test_they_are_small_and_say_what_they_are():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 600_000
    summary = json.loads((SHIPPED / "summary.json").read_text())
    assert summary["data"]["synthetic"] is True
    assert summary["held_out"] is True
    assert summary["quality"]["value"] > 0.9
    card = (SHIPPED / "README.md").read_text()
    assert sha256_of(SHIPPED / "best.safetensors") in card
    assert "has seen no patient data" in card
    assert f"{summary['quality']['value']:.4f}" in card


def test_no_path_of_the_machine_that_trained_them_is_in_them():
    for path in SHIPPED.iterdir():
        assert not [word for word in (b"/tmp", b"/home", b"/root", b"/work") if word in path.read_bytes()], path


def test_the_word_demo_is_the_users_own_copy_unless_a_folder_is_called_so(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder,) = InferConfig((Path("demo"),), Path("in"), Path("out")).model
    assert folder == home / ".cache" / "medspeed" / "demo"
    assert {path.name for path in folder.iterdir()} == {path.name for path in SHIPPED.iterdir()}
    (folder / "best.safetensors").write_bytes(b"damaged")
    model_folder(Path("demo"))
    assert (folder / "best.safetensors").read_bytes() == (SHIPPED / "best.safetensors").read_bytes()
    (tmp_path / "demo").mkdir()
    assert model_folder(Path("demo")) == Path("demo")


def test_they_find_the_spleen_of_a_phantom_and_warn(home, phantom, tmp_path, capsys):
    scan, truth = phantom
    found = predict("demo", scan, tmp_path / "out", device="cpu")
    labels, due = (read_volume(path).voxels == 1 for path in (found.done[scan.name].files[0], truth))
    assert 2 * np.sum(labels & due) / (labels.sum() + due.sum()) > 0.8
    assert "SYNTHETIC DATA" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("to", ["triton", "bundle"])
def test_they_are_exported_like_any_run(home, to, tmp_path):
    command = [sys.executable, ROOT / "apps" / "spleen" / "export.py", "--model", "demo", "--to", to, "--device", "cpu"]
    command += ["--output", tmp_path / to]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert list((tmp_path / to).rglob("SHA256SUMS"))
    assert any("synthetic phantoms" in path.read_text() for path in (tmp_path / to).rglob("*.md"))
