"""cuCIM's kernels need a GPU and cupy: what they compute is checked there only, what is asked of them everywhere."""

import pytest
import torch

from apps.pathology import cucim_recipe
from apps.pathology.cucim_recipe import batch_transforms, why_not_cucim
from common.data.colour import ColourJitter

NOTHING = ColourJitter(0.0, 0.0, 0.0, 0.0)
GUIDE = ColourJitter(64 / 255, 0.75, 0.25, 0.04)


def patches() -> torch.Tensor:
    return torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_cpu_takes_the_twin():
    assert why_not_cucim(torch.device("cpu")) == "the device is cpu"


def test_a_gpu_without_cupy_takes_the_twin(monkeypatch):
    monkeypatch.setattr(cucim_recipe, "find_spec", lambda name: None)
    assert "cupy is not installed" in str(why_not_cucim(torch.device("cuda")))


@pytest.mark.gpu
def test_nothing_but_flips_and_rotations_without_jitter_and_zoom():
    pytest.importorskip("cupy")
    given = patches()
    found = batch_transforms(NOTHING, (1.0, 1.0))(given.cuda())
    assert found.shape == given.shape
    assert found.dtype == torch.float32
    scaled = given.float().flatten(2) / 127.5 - 1
    # cuCIM's hue goes by HSV and back in uint8 even where nothing turns.
    assert (found.cpu().flatten(2).sort().values - scaled.sort().values).abs().mean() < 1 / 127.5
    assert not torch.equal(found.cpu().flatten(2), scaled)


@pytest.mark.gpu
def test_each_patch_has_colours_of_its_own():
    pytest.importorskip("cupy")
    same = patches()[:1].expand(32, -1, -1, -1).contiguous().cuda()
    found = batch_transforms(GUIDE, (0.9, 1.1))(same)
    assert found.min() >= -1
    assert found.max() <= 1
    means = found.mean((1, 2, 3)).cpu()
    assert means.unique().numel() > 24
    assert 0.02 < float(means.std()) < 0.3
