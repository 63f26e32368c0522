"""A network by flag, through each part: trained, through the gate into ONNX and an engine, and back in inference."""

import importlib.util
import json
import sys
from typing import Any

import numpy as np
import pytest

from medspeed import predict, train
from medspeed.apps import parse_flags
from medspeed.common.config import config_from_values, config_from_yaml, config_to_yaml, flat
from medspeed.common.data.volumes import read_volume

OWN = """
from torch import nn


class Own(nn.Module):
    def __init__(self, channels, classes, width):
        super().__init__()
        self.down, self.norm = nn.Conv3d(channels, width, 2, 2), nn.BatchNorm3d(width)
        self.up = nn.ConvTranspose3d(width, classes, 3, 2, 1)

    def forward(self, image):
        x = self.norm(self.down(image))
        if x.shape[2] % 2:
            x = x * 2
        return self.up(x.view(x.shape), output_size=image.shape[2:])


def own(in_channels, out_channels, *, width=4):
    return Own(in_channels, out_channels, width)
"""
SMALL = {"crop_size": (16, 16, 16), "windows": {"size": (32, 32, 32)}, "batch_size": 4, "device": "cpu"}
RTX = "tensorrt_rtx" if importlib.util.find_spec("tensorrt_rtx") else "none"


@pytest.fixture
def given(phantoms, store, tmp_path):
    return {**SMALL, "data": phantoms, "store": store, "run": tmp_path / "run", "fast_dev_run": True, "quiet": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "engine"),
    [
        ("dynunet", {"network": "dynunet", "channels": (4, 8, 8)}, RTX),
        ("mednext", {"network": {"name": "mednext", "filters": 4, "blocks_down": (1, 1)}}, "none"),
    ],
)
def test_a_network_by_flag_goes_all_the_way(name, sizes, engine, given):
    train("spleen", **given, **sizes, engine=engine)
    summary = json.loads((given["run"] / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["onnx"]["path"]
    assert summary["onnx"]["max_abs_diff"] < 1e-3
    assert (given["run"] / "exports" / "model_fp32.plan").is_file() == (engine != "none")
    assert json.loads((given["run"] / "model.json").read_text())["network"].startswith(name)


@pytest.mark.slow
def test_a_network_of_ones_own_file_is_trained_exported_and_used(given, phantoms, tmp_path, monkeypatch):
    (tmp_path / "net_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    train("spleen", **given, network="net_of_mine:own", engine="none", channels_last=True)
    scan, masks = next((phantoms / "imagesTr").glob("*.nii.gz")), {}
    how: dict[str, Any] = {"device": "cpu", "overlays": False, "quiet": True}
    with pytest.raises(PermissionError, match="pass --network net_of_mine:own; its exported models need none"):
        predict(given["run"], scan, tmp_path / "refused", backend="torch", **how)
    for backend, network in (("onnxruntime", None), ("torch", "net_of_mine:own")):
        output = tmp_path / backend
        predict(given["run"], scan, output, backend=backend, precision="fp32", network=network, **how)
        masks[backend] = np.asarray(read_volume(output / scan.name, 1).voxels)
    assert (masks["torch"] == masks["onnxruntime"]).mean() > 0.999


def test_old_spellings_and_files_mean_what_they_meant(tmp_path):
    flags = ["--network.filters", "8", "--network.blocks_down", "[1,1]", "--network.dropout", "0.2"]
    config = parse_flags("brats", flags)
    assert (config.network_name, config.network.filters, config.network.blocks_down) == ("segresnet3d", 8, (1, 1))
    old = tmp_path / "config.yaml"
    old.write_text("network:\n  filters: 8\n  blocks_down: [1, 1]\n  dropout: 0.2\n")
    assert config_from_yaml(type(config), old) == config
    assert parse_flags("spleen", ["--channels", "4,8"]).halvings() == 1


@pytest.mark.parametrize("app", ["spleen", "brats"])
def test_the_name_is_the_groups_own_flag(app, tmp_path):
    config = parse_flags(app, ["--network", "dynunet", "--channels", "4 8 8"])
    assert (config.network_name, config.halvings()) == ("dynunet", None)
    kind = type(config)
    assert config_from_values(kind, {}, {"network": "dynunet", "channels": (4, 8, 8)}) == config
    assert config_from_values(kind, {}, {"network": {"name": "dynunet"}, "channels": (4, 8, 8)}) == config
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert flat(config_from_yaml(kind, tmp_path / "config.yaml")) == flat(config)


def test_a_network_that_is_not_there_ends_with_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_flags("spleen", ["--network", "dynnet"])
    said = capsys.readouterr().err
    assert "--network dynnet: must be one of dynunet, mednext, segresnet3d, unet3d, or your.module:function" in said
