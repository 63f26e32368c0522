"""Networks by name: those of this project, of MONAI, and of a user's own module."""

import subprocess
import sys

import pytest
import torch

from medspeed import models
from medspeed.models import check_name, find_network, networks

OWN = "def small(in_channels, out_channels, *, width=4): return (in_channels, out_channels, width)\nnumber = 5\n"


def test_a_network_is_known_by_being_written_into_a_file(tmp_path, monkeypatch):
    text = "def plain(\n    in_channels: int, out_channels: int): ...\ndef other(image): ...\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    assert networks() == {"plain": "medspeed.models.mine"}


def test_there_are_four():
    assert sorted(networks()) == ["dynunet", "mednext", "segresnet3d", "unet3d"]


@pytest.mark.parametrize("name", ["unet3d", "segresnet", "segresnet3d", "dynunet", "mednext"])
def test_each_gives_logits_of_the_images_size(name):
    sizes = {"channels": (4, 8, 8)} if "unet" in name else {"filters": 8, "blocks_down": (1, 1)}
    network = find_network(name)(3, 2, **sizes)
    assert network(torch.zeros(1, 3, 24, 16, 16)).shape == (1, 2, 24, 16, 16)
    assert network.monai["_target_"] in ("UNet", "SegResNet", "DynUNet", "MedNeXt")


def test_a_users_own_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "of_mine_1.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    network = find_network("of_mine_1:small")
    assert (network.__name__, network(1, 2), network(1, 2, width=9)) == ("of_mine_1:small", (1, 2, 4), (1, 2, 9))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dynnet", "must be one of dynunet, mednext, segresnet3d, unet3d, or your.module:function"),
        ("resnet18_fcn", "must be one of"),
        ("os", "must be one of"),
        ("", "must be one of"),
        ("os:", "must be one of"),
        (".os:path", "must be one of"),
        ("nowhere.at_all:net", "No module named 'nowhere'"),
        ("of_mine_2:large", "of_mine_2' has no attribute 'large'"),
        ("of_mine_3:net", "invalid syntax"),
    ],
)
def test_what_is_missing_is_named(name, words, tmp_path, monkeypatch):
    (tmp_path / "of_mine_2.py").write_text(OWN)
    (tmp_path / "of_mine_3.py").write_text("def def")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match=rf"^network {name}: .*{words}"):
        find_network(name)
    assert check_name(name)[1] == (":net" in name or ":large" in name)


def test_looking_for_names_loads_no_torch():
    words = "import sys; from medspeed.models import check_name; check_name('dynunet'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout == "False\n"
