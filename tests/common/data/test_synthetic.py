"""Synthetic sets are made by a program of their own, once; what the apps ask for is what it makes."""

import re
from pathlib import Path

import pytest

from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.synthetic import make_synthetic
from medspeed.data_scripts.make_phantoms import CT_VERSION, MRI_VERSION

APPS = Path(__file__).parents[3] / "apps"


def test_a_set_is_made_once(tmp_path, monkeypatch):
    folder = make_synthetic(tmp_path / "set", "make_phantoms", "ct", "--cases", "1")
    assert read_dataset(folder).synthetic
    monkeypatch.setattr("subprocess.run", lambda *given, **named: pytest.fail("it is there"))
    assert make_synthetic(folder, "make_phantoms", "ct", "--cases", "1") == folder


def test_a_folder_that_holds_something_else_is_left_and_the_program_says_why(tmp_path, capfd):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match=re.escape(f"{tmp_path}: medspeed.data_scripts.make_phantoms ct --cases 1")):
        make_synthetic(tmp_path, "make_phantoms", "ct", "--cases", "1")
    assert "contains other files (mine.txt)" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("app", "name"), [("spleen", f"ct-small-{CT_VERSION}"), ("brats", f"mri-small-{MRI_VERSION}")])
def test_an_app_names_its_folder_by_the_version_that_is_made(app, name):
    assert f'"{name}"' in (APPS / app / "train.py").read_text()
