"""Trilinear doubling in a kernel against torch's: in Triton's interpreter, compiled for no device, and on a GPU."""

import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from medspeed.common.kernels import doubling as module
from medspeed.common.kernels import norms, trust
from medspeed.common.kernels.doubling import DOUBLING, Doubling
from medspeed.common.training.setup import network_trials
from medspeed.models.segresnet3d import segresnet3d
from tests.kernels import run_compiled
from tests.support import count_operators

pytest.importorskip("triton", reason="triton is not installed")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")
LAST = torch.channels_last_3d
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # what is rounded once
# Odd and even sides, and sides of 1; several programs along each axis; channels that are no power of two.
SHAPES = [(2, 8, 3, 4, 5), (1, 16, 5, 1, 2), (1, 64, 1, 5, 5), (2, 16, 1, 1, 1), (1, 3, 2, 1, 6), (1, 1, 1, 2, 70)]


def drawn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return values.contiguous(memory_format=LAST)


def example(shape, dtype=torch.float32, device="cpu"):
    """Return image, shortcut and gradient."""
    large = *shape[:2], *(2 * side for side in shape[2:])
    made = [drawn(*each, seed=seed, dtype=dtype, device=device) for seed, each in enumerate((shape, large, large))]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2]


def exact(image, shortcut, gradient):
    """Return torch's sum, and its gradients, in float64."""
    image, shortcut = (each.detach().double().requires_grad_() for each in (image, shortcut))
    found = F.interpolate(image, scale_factor=2, mode="trilinear", align_corners=False) + shortcut
    return found, *torch.autograd.grad(found, (image, shortcut), gradient.double())


def fused(image, shortcut, gradient):
    with trust.trusting(DOUBLING), count_operators() as counted:
        found = Doubling(image.shape[1])(image, shortcut)
        gradients = torch.autograd.grad(found, (image, shortcut), gradient)
    assert counted["medspeed::doubling_forward"] == counted["medspeed::doubling_backward"] == 1
    return found, *gradients


def check(found, expected, dtype):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == dtype
        assert one.is_contiguous(memory_format=LAST)
        assert (one - other).abs().max() <= BOUNDS[dtype] * other.abs().max(), number


@interpreted
@pytest.mark.parametrize(
    ("shape", "dtype"),  # every shape in the strictest one; the others differ where numbers are loaded and stored
    [
        *((shape, torch.float32) for shape in SHAPES),
        ((1, 3, 2, 1, 6), torch.float16),
        ((1, 3, 2, 1, 6), torch.bfloat16),
    ],
    ids=str,
)
def test_sum_and_gradients_are_torchs(shape, dtype, everywhere):
    given = example(shape, dtype)
    check(fused(*given), exact(*given), dtype)


@interpreted
@pytest.mark.parametrize("lies", ["contiguous", "expanded"])
def test_image_and_gradient_may_lie_anyhow(lies, everywhere):
    image, shortcut, gradient = example((2, 8, 3, 4, 5))
    image = image.detach().contiguous().requires_grad_()
    gradient = gradient.contiguous() if lies == "contiguous" else torch.ones(1).expand(gradient.shape)
    check(fused(image, shortcut, gradient), exact(image, shortcut, gradient), torch.float32)


@interpreted
def test_the_operators_are_what_they_tell_the_compiler():
    from medspeed.common.kernels.doubling_triton import doubling_backward, doubling_forward

    image, shortcut, gradient = (each.detach() for each in example((1, 3, 2, 1, 6), torch.bfloat16))
    for operator, given in ((doubling_forward, (image, shortcut)), (doubling_backward, (gradient,))):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("place", "change"), [(1, Tensor.contiguous), (0, Tensor.double), (1, Tensor.double)])
def test_what_the_kernel_cannot_take_goes_to_its_twin(place, change, everywhere):
    given = [each.detach() for each in example((1, 8, 2, 3, 4))[:2]]
    expected = Doubling(8)(*given)
    given[place] = change(given[place])
    with trust.trusting(DOUBLING), count_operators() as counted:
        found = Doubling(8)(*given)
    assert not counted["medspeed::doubling_forward"]
    assert found.dtype == given[1].dtype
    assert torch.allclose(found.float(), expected, atol=1e-6)


def test_a_shortcut_of_other_sides_is_an_error(everywhere):
    image, shortcut, _ = example((1, 8, 2, 3, 4))
    with trust.trusting(DOUBLING), pytest.raises(RuntimeError, match="size of tensor"):
        Doubling(8)(image, shortcut[:, :, :, :5].contiguous(memory_format=torch.channels_last_3d))


@interpreted
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_its_trial_passes_and_finds_a_planted_fault(precision, everywhere, monkeypatch):
    from medspeed.common.kernels import doubling_triton

    monkeypatch.setattr(module, "_SIDES", (1, 2, 2))
    monkeypatch.setattr(doubling_triton, "_STEPS", 1)
    network, config = segresnet3d(1, 2, 8, (1, 1)), SimpleNamespace(precision=precision)
    before, run = torch.get_rng_state(), SimpleNamespace(device=torch.device("cpu"))
    trials = network_trials(network, config, run)  # type: ignore[arg-type]
    (trial,) = [each for each in trials if each.name == DOUBLING]
    assert trust.difference(trial.fused(), trial.work(), trial.tolerance) == ""
    assert torch.equal(before, torch.get_rng_state())  # the run's own numbers
    sound = doubling_triton.doubling_backward
    monkeypatch.setattr(doubling_triton, "doubling_backward", lambda gradient: 1.1 * sound(gradient))
    assert "tensor 1 is off by" in trust.difference(trial.fused(), trial.work(), trial.tolerance)


@interpreted
def test_a_network_with_it_learns_as_without(everywhere):
    network: Any = segresnet3d(1, 2, 8, (1, 1, 1))
    network, image = network.to(memory_format=LAST), drawn(2, 1, 8, 12, 4)
    with_it, without = copy.deepcopy(network), copy.deepcopy(network)
    for each, names in ((with_it, [DOUBLING]), (without, [])):
        with trust.trusting(norms.GROUP, *names), count_operators() as counted:
            each(image).pow(3).mean().backward()
        assert counted["medspeed::doubling_backward"] == 2 * len(names)
    for (name, one), other in zip(with_it.named_parameters(), without.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max() + 1e-7, name
    assert with_it.state_dict().keys() == network.state_dict().keys()
    assert not any("doubling" in name for name in network.state_dict())


@pytest.mark.slow
def test_the_kernels_compile_without_spilling():
    run_compiled("tests/common/kernels/compile_doubling.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 16, 33, 28, 36), (1, 64, 14, 15, 9)], ids=str)
def test_on_a_gpu_the_kernels_are_torchs_and_repeat_to_the_bit(shape, dtype):
    given = example(shape, dtype, "cuda")
    found = fused(*given)
    check(found, exact(*given), dtype)
    assert all(map(torch.equal, found, fused(*given)))
