"""Fused max pooling against torch, in Triton's interpreter, on a GPU, and compiled for what there is no device of."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from medspeed.common.kernels import pooling, trust
from medspeed.common.kernels.pooling import MaxPool
from medspeed.common.training.setup import network_trials
from medspeed.models.resnet18_fcn import resnet18_fcn
from tests.kernels import run_compiled
from tests.support import count_operators

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIDES = [(7, 6), (8, 9), (5, 5), (6, 4), (1, 2), (1, 1)]
KINDS = {
    "any": lambda values: values,
    "few": lambda values: values.round(),  # many equal ones
    "constant": torch.zeros_like,
    "negative": lambda values: -1 - values.abs(),
    "none but -inf": lambda values: torch.full_like(values, -math.inf),
    "some -inf": lambda values: torch.where(values > -0.5, -math.inf, values),
    "some NaN": lambda values: torch.where(values > 1, math.nan, values),
}
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")


@pytest.fixture(autouse=True)
def triton():
    pytest.importorskip("triton", reason="triton is not installed")


def drawn(*shape, dtype=torch.float32, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.contiguous(memory_format=torch.channels_last)


def check(image, gradient):
    """Compare maxima, and gradients summed in float64, with torch's."""
    twin = image.detach().cpu().double().requires_grad_()
    image.requires_grad_()
    with trust.trusting(pooling.NAME):
        found = MaxPool()(image)
    assert type(found.grad_fn).__name__ == "FusedMaxPoolBackward"
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = F.max_pool2d(twin, 3, 2, 1)
    assert torch.equal(found.detach().cpu().double().nan_to_num(99), expected.detach().nan_to_num(99))
    found.backward(gradient)
    expected.backward(gradient.cpu().double())
    assert image.grad.is_contiguous(memory_format=torch.channels_last)
    bound = torch.finfo(image.dtype).eps
    torch.testing.assert_close(image.grad.cpu().double(), twin.grad, rtol=bound, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=str)
@pytest.mark.parametrize(("kind", "channels"), [*((kind, 8) for kind in KINDS), ("any", 64), ("some NaN", 3)])
def test_maxima_and_gradients_are_torchs(kind, channels, dtype, everywhere):
    for y, x in SIDES:
        image = KINDS[kind](drawn(2, channels, y, x, dtype=dtype))
        check(image, drawn(2, channels, (y + 1) // 2, (x + 1) // 2, dtype=dtype, seed=1))


@interpreted
def test_gradients_may_lie_anyhow(everywhere):
    check(drawn(2, 8, 6, 7), torch.ones(1).expand(2, 8, 3, 4))
    check(drawn(2, 8, 6, 7), drawn(2, 8, 3, 4).contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_maxima_and_gradients_are_torchs(kind, dtype):
    for shape in ((4, 64, 112, 112), (2, 8, 37, 50), (3, 3, 9, 9)):
        image = KINDS[kind](drawn(*shape, dtype=dtype))
        gradient = drawn(*shape[:2], *((side + 1) // 2 for side in shape[2:]), dtype=dtype, seed=1)
        check(image.cuda(), gradient.cuda())


@interpreted
@pytest.mark.parametrize("precision", PRECISIONS)
def test_its_trial_passes_and_finds_a_planted_fault(precision, everywhere, monkeypatch):
    from medspeed.common.kernels import pooling_triton

    monkeypatch.setattr(pooling, "_SHAPE", (2, 8, 11, 14))
    config, run = SimpleNamespace(precision=precision), SimpleNamespace(device=torch.device("cpu"))
    trials = network_trials(resnet18_fcn(32), config, run)  # type: ignore[arg-type]
    (trial,) = (each for each in trials if each.name == pooling.NAME)
    assert trust.difference(trial.fused(), trial.work(), trial.tolerance) == ""
    own = pooling_triton.max_pool
    faults = (lambda image: (1.1 * own(image)[0], own(image)[1]), lambda image: (own(image)[0], own(image)[1] ^ 1))
    for number, fault in enumerate(faults):
        monkeypatch.setattr(pooling_triton, "max_pool", fault)
        assert f"tensor {number} is off by" in trust.difference(trial.fused(), trial.work(), trial.tolerance)


@interpreted
def test_a_network_takes_it_in_training_alone(everywhere):
    network, image = resnet18_fcn(32).to(memory_format=torch.channels_last), drawn(2, 3, 32, 32)  # type: ignore[call-overload]
    plain = network(image).detach()
    for training in (True, False):
        with trust.trusting(pooling.NAME), count_operators() as counted:
            found = network.train(training)(image)
        assert counted["medspeed::max_pool"] == training
        assert counted["aten::max_pool2d_with_indices"] == (not training)
        assert not training or torch.equal(found, plain)


def test_images_of_other_layouts_take_the_twin(everywhere):
    image = torch.randn(2, 8, 6, 7)
    with trust.trusting(pooling.NAME), count_operators() as counted:
        assert torch.equal(MaxPool()(image), F.max_pool2d(image, 3, 2, 1))
    assert not counted["medspeed::max_pool"]


def test_operators_have_true_fakes():
    """Shapes, strides and dtypes that compilers and the counting of launches go by."""
    from medspeed.common.kernels.pooling_triton import max_pool, max_pool_gradient

    image = drawn(2, 8, 5, 6, dtype=torch.bfloat16)
    maxima, indices = F.max_pool2d(image, 3, 2, 1, return_indices=True)
    with FakeTensorMode() as mode:
        found, places = max_pool(mode.from_tensor(image))
        gradient = max_pool_gradient(found, places, 5, 6)
    for one, other in ((found, maxima), (places, indices.byte()), (gradient, image)):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.slow
def test_the_kernels_compile_without_spilling():
    run_compiled("tests/common/kernels/compile_pooling.py")
