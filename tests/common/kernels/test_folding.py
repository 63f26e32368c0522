"""Convolutions whose voxels are folded into channels, against the same ones as they are."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from medspeed.common.kernels import folding, trust
from medspeed.common.kernels.folding import FOLDED, Conv2d, Conv3d, ConvTranspose3d, fold, unfold
from medspeed.common.training.setup import network_trials
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

LAYOUTS = {5: torch.channels_last_3d, 4: torch.channels_last}


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(*shape, dtype=dtype, generator=generator)
    return made.contiguous(memory_format=LAYOUTS[len(shape)]).requires_grad_()


def results(layer, image, trusted):
    """Return output and gradients, of image and parameters."""
    given = image.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    with trust.trusting(*[FOLDED] * trusted):
        found = layer(given)
    found.backward(torch.linspace(-1, 2, found.numel(), dtype=found.dtype, device=found.device).view(found.shape))
    return [found.detach(), given.grad, *[each.grad.clone() for each in layer.parameters() if each.grad is not None]]


@pytest.mark.parametrize(
    ("layer", "shape", "count"),
    [
        (Conv3d(1, 32, 3, 2, 1), (2, 1, 6, 4, 32), 16),
        (Conv3d(2, 2, 3, 1, 1), (2, 2, 3, 4, 48), 16),
        (Conv3d(2, 2, 3, 1, 1), (2, 2, 3, 4, 24), 1),  # 24 is no multiple of 16
        (Conv3d(4, 16, 3, 1, 1, bias=False), (1, 4, 3, 4, 32), 16),
        (Conv3d(16, 16, 3, 1, 1), (2, 16, 3, 5, 12), 4),
        (Conv3d(16, 32, 3, 2, 1), (2, 16, 4, 6, 8), 4),
        (Conv3d(32, 32, 3, 1, 1), (1, 32, 2, 3, 2), 2),
        (Conv3d(16, 3, 1), (2, 16, 3, 4, 16), 8),
        (Conv3d(64, 64, 3, 1, 1), (1, 64, 3, 3, 4), 1),
        (ConvTranspose3d(32, 2, 3, 2, 1, 1), (2, 32, 3, 2, 8), 16),
        (ConvTranspose3d(64, 16, 3, 2, 1, 1), (1, 64, 2, 3, 4), 4),
        (Conv2d(3, 64, 7, 2, 3), (2, 3, 12, 32), 8),
    ],
    ids=str,
)
def test_values_and_gradients_are_the_plain_ones(layer, shape, count, everywhere, monkeypatch):
    plain, given = layer._plain, []

    def counted(image, *more):
        given.append(image.shape[1])
        return plain(image, *more)

    monkeypatch.setattr(type(layer), "_plain", staticmethod(counted))
    layer, image = copy.deepcopy(layer).double(), drawn(*shape)
    expected, found = (results(layer, image, trusted) for trusted in (False, True))
    step = layer.stride[0] if layer.transposed else 1
    assert given[1] == given[0] * max(1, count // step)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_folding_moves_nothing_and_comes_back():
    image = drawn(2, 3, 4, 5, 8)
    folded = fold(image, 4)
    assert folded.shape == (2, 12, 4, 5, 2)
    assert folded.data_ptr() == image.data_ptr()
    assert torch.equal(folded[0, 3 * 2 + 1, 1, 2, 1], image[0, 1, 1, 2, 6])  # voxel 2 of the second four, channel 1
    assert torch.equal(unfold(folded, 4), image)


@pytest.mark.parametrize(
    "made", [lambda: unet3d(1, 2, (16, 32), 2), lambda: segresnet3d(4, 3, 16, (1, 1)), resnet18_fcn], ids="usr"
)
def test_a_network_with_them_learns_as_without_and_keeps_its_names(made, everywhere):
    network = made().double()
    shape = (2, 3, 224, 32) if hasattr(network, "head") else (1, 1 if hasattr(network, "model") else 4, 8, 8, 32)
    shape = (1, 3, 224, 224) if hasattr(network, "head") else shape
    network.to(memory_format=LAYOUTS[len(shape)])
    assert not any("table" in name for name in network.state_dict())
    expected, found = (results(copy.deepcopy(network), drawn(*shape), trusted) for trusted in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-8 * other.abs().max()


def test_what_is_not_trusted_or_lies_otherwise_is_left_alone(everywhere, monkeypatch):
    monkeypatch.setattr(folding, "fold", lambda *_: pytest.fail("folded"))
    layer = Conv3d(16, 16, 3, 1, 1)
    layer(drawn(1, 16, 3, 4, 16, dtype=torch.float32))
    with trust.trusting(FOLDED):
        layer(torch.randn(1, 16, 3, 4, 16))  # its channels are not innermost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_has_a_trial_that_passes_and_finds_a_planted_fault(dtype, everywhere, monkeypatch):
    monkeypatch.setattr("medspeed.common.kernels.norms._SHAPE", (2, 8, 6, 32))
    networks = (unet3d(1, 2, (16, 32), 2), segresnet3d(4, 3, 16, (1, 1)), nn.Sequential(Conv2d(3, 64, 7, 2, 3)))
    config = SimpleNamespace(precision="fp32" if dtype == torch.float32 else "bf16")
    run, found = SimpleNamespace(device=torch.device("cpu")), []
    for network in networks:
        trials = network_trials(network, config, run)  # type: ignore[arg-type]
        found.append([each for each in trials if each.name.endswith("folded")])
    firsts = {
        "convolution 1 to 16, 3": 2,
        "convolution 4 to 16, 3": 2,
        "convolution 3 to 64, 7": 3,
    }  # the last has a bias
    for trials, (first, tensors) in zip(found, firsts.items(), strict=True):
        assert [len(each.work()) for each in trials if each.name.startswith(first)] == [tensors]  # the image's not
    assert [len(trials) for trials in found] == [7, 6, 1]
    for trials in found:
        assert len({trial.name for trial in trials}) == len(trials)
        for trial in trials:
            # Processors without bf16 instructions add up in bf16, twin and variant each in an order of its own.
            tolerance = trial.tolerance if dtype == torch.float32 else 0.5
            assert trust.difference(trial.fused(), trial.work(), tolerance) == ""
            with monkeypatch.context() as planted:
                planted.setattr(folding, "unfold", lambda image, count: unfold(image, count).roll(1, -1))
                assert "off by" in trust.difference(trial.fused(), trial.work(), tolerance)


def test_a_kind_is_folded_where_it_alone_is_trusted(everywhere, monkeypatch):
    layer, image, calls = Conv3d(16, 16, 3, 1, 1), drawn(1, 16, 3, 4, 16, dtype=torch.float32), []

    def counted(image, count):
        calls.append(count)
        return fold(image, count)

    monkeypatch.setattr(folding, "fold", counted)
    for name in (layer.kind, Conv3d(16, 32, 3, 2, 1).kind):
        with trust.trusting(name):
            layer(image)
    assert calls == [4]


def test_a_kind_is_known_by_channels_kernel_and_stride():
    layers = (Conv3d(4, 16, 3, 1, 1), Conv3d(4, 32, 3, 1, 1), Conv3d(4, 16, 3, 2, 1), Conv3d(4, 16, 1))
    layers += (ConvTranspose3d(4, 16, 3, 2, 1, 1),)  # type: ignore[assignment]
    assert len({layer.kind for layer in layers}) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv3d(1, 32, 3, 2, 1), (2, 1, 32, 32, 64)),
        (Conv3d(2, 2, 3, 1, 1), (2, 2, 32, 32, 96)),
        (Conv3d(16, 3, 1), (2, 16, 32, 32, 48)),
        (ConvTranspose3d(32, 2, 3, 2, 1, 1), (2, 32, 16, 16, 48)),
        (Conv2d(3, 64, 7, 2, 3), (2, 3, 64, 96)),
    ],
    ids=str,
)
def test_on_a_gpu_they_are_the_plain_ones(layer, shape, dtype):
    layer = copy.deepcopy(layer).cuda().to(dtype=dtype, memory_format=LAYOUTS[len(shape)])
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected, found = (results(layer, drawn(*shape).to("cuda", dtype), trusted) for trusted in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * other.abs().max()
