"""Trials of the fused kernels, some planted wrong; run by `test_trials.py` with Triton's interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medspeed.apps.spleen.config import SpleenConfig
from medspeed.common.clock import Clock
from medspeed.common.data import crops
from medspeed.common.data.batches import crop_batches
from medspeed.common.data.cache import fill_cache
from medspeed.common.data.crops import Tier
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.kernels import crops_triton, dice_triton, trust
from medspeed.common.kernels.trust import choose, trusting
from medspeed.common.ranks import Ranks
from medspeed.common.run import Run
from medspeed.common.training import losses
from medspeed.common.training.setup import dtype_of, volume_trials
from tests.support import unet_model

CPU = torch.device("cpu")
MODEL = unet_model((2.0, 2.0, 2.0), (4, 8), (8, 8, 8))
CONFIG = SpleenConfig(
    batch_size=4, crop_size=(8, 8, 8), precision="bf16", loss="dice_ce", channels_last=True, channels=(4, 8)
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    for module in (losses, crops):
        monkeypatch.setattr(module, "trusts", lambda name, tensor: name in trust._trusted)
    monkeypatch.setattr(trust, "_seconds", lambda work: 1.0)
    with trusting():
        yield


def trials_of(config, ranks=1, tier: Tier = "gpu"):
    volume = torch.rand(1, 12, 12, 12, generator=torch.Generator().manual_seed(0)).half()
    label = (volume[0] > 0.9).to(torch.uint8)
    cases = [PreparedCase("a", volume, label, grid=None)]  # type: ignore[arg-type]  # nobody looks at it
    cache = fill_cache(cases, tier, (8, 8, 8), CPU)
    batches = crop_batches([cache], 4, 4, form=(dtype_of(config.precision), True))
    return volume_trials(config, MODEL, batches, Run(Path(), CPU, Clock(), False, Ranks(0, ranks)))


def chosen(config, store, ranks=1):
    lines: list[str] = []
    return choose(trials_of(config, ranks), "fused", store, lines.append), lines


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kernels_that_are_right_are_trusted(precision, tmp_path):
    assert chosen(replace(CONFIG, precision=precision), tmp_path)[0] == {"loss", "crops"}


def test_a_wrong_gradient_is_found_and_the_twin_computes_the_loss(tmp_path, monkeypatch):
    right = dice_triton.loss_gradient
    monkeypatch.setattr(dice_triton, "loss_gradient", lambda *given: 1.1 * right(*given))
    names, lines = chosen(CONFIG, tmp_path)
    assert names == {"crops"}
    assert "loss is not used because it failed" in lines[0]


def test_crops_cut_in_the_wrong_place_are_found(tmp_path, monkeypatch):
    right = torch.ops.medspeed.crops
    monkeypatch.setattr(crops_triton, "gathered_crops", lambda *given: [each.flip(2) for each in right(*given)])
    assert chosen(CONFIG, tmp_path)[0] == {"loss"}


def test_what_the_run_does_not_use_is_not_tried(tmp_path):
    assert chosen(replace(CONFIG, loss="monai_dice_ce"), tmp_path)[0] == {"crops"}
    assert [trial.name for trial in trials_of(CONFIG, tier="ram")] == ["loss"]
    for changing in ("smart", "gpu:2"):
        assert [trial.name for trial in trials_of(replace(CONFIG, cache=changing))] == ["loss"]


def test_a_verdict_is_of_the_sizes_of_the_run():
    one, two = (trials_of(CONFIG, ranks)[0].about for ranks in (1, 2))
    assert one != two
    assert one != trials_of(replace(CONFIG, precision="fp32"))[0].about
