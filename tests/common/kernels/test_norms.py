"""The fused normalisations against torch, in Triton's interpreter; compiled for what there is no device of."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from medspeed.common.kernels import norm_operators, norms, trust
from medspeed.common.kernels.norms import BatchNormPReLU, GroupNormReLU, channels_innermost, fork, fused_norm
from medspeed.common.kernels.weights import half_weights
from medspeed.common.training.setup import network_trials
from medspeed.models import unet3d as module
from medspeed.models.resnet18_fcn import ResidualBlock
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d
from tests.kernels import CAPABILITIES
from tests.support import count_operators

ROOT = Path(__file__).parents[3]
torch.manual_seed(0)  # of the networks below: a value that rounding moves across ReLU's kink moves gradients
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LAYOUT = torch.channels_last_3d
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")


@pytest.fixture(autouse=True)
def triton():
    pytest.importorskip("triton", reason="triton is not installed")


def fused(*given):
    return fused_norm(*given)[0]


def drawn(*shape, dtype=torch.float32, seed=0):
    values = 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1
    layouts = {5: LAYOUT, 4: torch.channels_last}
    return values.to(dtype).contiguous(memory_format=layouts.get(len(shape), torch.contiguous_format))


def exact(tensors):
    return [None if each is None else each.detach().double().requires_grad_() for each in tensors]


def check(found, expected, inputs, doubles, bound, gradient):
    """Compare values and gradients, each by its largest value."""
    found.backward(gradient)
    expected.backward(gradient.double())
    pairs = [(found, expected)] + [(a.grad, b.grad) for a, b in zip(inputs, doubles, strict=True) if a is not None]
    for number, (one, other) in enumerate(pairs):
        assert (one - other).abs().max() <= bound * other.abs().max(), number


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("samples", "channels", "groups", "sides"),
    [(2, 16, 8, (5, 7, 9)), (1, 24, 8, (3, 5, 7)), (3, 8, 8, (4, 4, 4)), (1, 128, 8, (3, 3, 3)), (2, 5, 1, (1, 2, 3))],
)
def test_group_norm_and_relu_are_torchs(samples, channels, groups, sides, dtype):
    inputs = [drawn(samples, channels, *sides, dtype=dtype).requires_grad_()]
    inputs += [drawn(channels, seed=seed).requires_grad_() for seed in (1, 2)]
    doubles = exact(inputs)
    image, weight, bias = inputs
    found = fused(image, weight, bias, groups, samples, 1e-5)
    expected = F.relu(F.group_norm(doubles[0], groups, doubles[1], doubles[2], 1e-5))
    assert (found.dtype, found.stride()) == (dtype, inputs[0].stride())
    check(found, expected, inputs, doubles, BOUNDS[dtype], drawn(*found.shape, dtype=dtype, seed=3))


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("samples", "channels", "sides"), [(2, 16, (5, 7, 9)), (3, 1, (3, 5, 7)), (2, 3, (4, 4, 5)), (2, 256, (2, 2, 3))]
)
def test_batch_norm_prelu_and_sum_are_torchs(samples, channels, sides, added, dtype):
    image = drawn(samples, channels, *sides, dtype=dtype).requires_grad_()
    residual = drawn(samples, channels, *sides, dtype=dtype, seed=4).requires_grad_() if added else None
    inputs = [
        image,
        *(drawn(channels, seed=seed).requires_grad_() for seed in (1, 2)),
        torch.tensor([0.3], requires_grad=True),
        residual,
        drawn(channels, dtype=dtype, seed=9).requires_grad_() if added else None,
    ]
    doubles = exact(inputs)
    running = [drawn(channels, seed=5), drawn(channels, seed=6).abs(), torch.tensor(3)]
    means, variances = (each.double() for each in running[:2])
    shift = drawn(channels, seed=7)
    weight, bias, slope, other, others_bias = inputs[1:]
    found = fused(image, weight, bias, channels, 1, 1e-5, "prelu", slope, other, others_bias, running, shift, 0.1)
    normal = F.batch_norm(doubles[0], means, variances, doubles[1], doubles[2], True, 0.1, 1e-5)
    expected = F.prelu(normal, doubles[3]) + (0 if other is None else doubles[4] + doubles[5].view(-1, 1, 1, 1))
    check(found, expected, inputs, doubles, BOUNDS[dtype], drawn(*found.shape, dtype=dtype, seed=8))
    assert torch.allclose(running[0].double(), means + 0.1 * shift, atol=1e-6)
    assert torch.allclose(running[1].double(), variances, atol=1e-6)
    assert running[2].item() == 4


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["none", "relu", "sum_relu"])
@pytest.mark.parametrize("shape", [(3, 16, 5, 7), (2, 3, 9, 4), (1, 128, 3, 5)])
def test_batch_norm_sum_and_relu_are_torchs(shape, kind, dtype):
    image, residual = (drawn(*shape, dtype=dtype, seed=seed) for seed in (0, 4))
    inputs = [image, drawn(shape[1], seed=1), drawn(shape[1], seed=2), residual if kind == "sum_relu" else None]
    inputs = [None if each is None else each.requires_grad_() for each in inputs]
    doubles = exact(inputs)
    found = fused(*inputs[:3], shape[1], 1, 1e-5, kind, None, inputs[3])
    expected = F.batch_norm(doubles[0], None, None, doubles[1], doubles[2], True)
    expected = expected if doubles[3] is None else expected + doubles[3]
    expected = expected if kind == "none" else F.relu(expected)
    assert (found.dtype, found.stride()) == (dtype, image.stride())
    check(found, expected, inputs, doubles, BOUNDS[dtype], drawn(*shape, dtype=dtype, seed=3))


@interpreted
def test_a_part_of_longer_rows_is_normalised_as_it_lies():
    wide, weight, bias = drawn(2, 12, 3, 4, 5), torch.ones(6), torch.zeros(6)
    with count_operators() as counted:
        found = fused(wide[:, 6:], weight, bias, 6, 1, 1e-5)
    assert not counted["aten::clone"]
    assert found.stride() == drawn(2, 6, 3, 4, 5).stride()
    expected = F.relu(F.batch_norm(wide[:, 6:], None, None, weight, bias, True))
    assert torch.allclose(found, expected, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["relu", "sum_relu"])
def test_gradients_of_several_uses_are_added_whatever_their_strides(kind, dtype):
    """Of three: one lies in half of a wider tensor's rows, as behind a concatenation."""
    shape = (2, 8, 3, 4, 5)
    image, residual = (drawn(*shape, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 1))
    given = [image, torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True), residual]
    doubles = exact(given)

    def uses(y, apart):
        one, rest = apart(y)
        two, three = apart(rest)
        wide = torch.cat([two, two * 2], 1)
        return (
            (one.float() * 3).square().sum()
            + (wide.float() * torch.arange(16).view(-1, 1, 1, 1)).sum()
            + three.float().sum()
        )

    added = residual if kind == "sum_relu" else None
    with count_operators() as counted:
        uses(fused(*given[:3], 8, 1, 1e-5, kind, None, added), fork).backward()
    expected = F.batch_norm(doubles[0], None, None, doubles[1], doubles[2], True)
    uses(F.relu(expected + doubles[3] if kind == "sum_relu" else expected), lambda y: (y, y)).backward()
    for number, (one, other) in enumerate(zip(given, doubles, strict=True)):
        if other.grad is not None:
            assert (one.grad - other.grad).abs().max() <= 2 * BOUNDS[dtype] * other.grad.abs().max(), number
    assert counted["aten::add"] == 3  # of the two losses, and of two * 2 with two: none of the norm's


def test_what_comes_from_elsewhere_is_forked_by_torch():
    image = drawn(2, 8, 3, 4, 5).requires_grad_()
    for each in (image, image * 2, image.detach()):
        assert all(one is each for one in fork(each))


@interpreted
@pytest.mark.parametrize("layout", [LAYOUT, torch.contiguous_format], ids=["last", "contiguous"])
def test_the_gradient_of_a_shortcut_is_added(layout):
    image = drawn(2, 8, 3, 4, 5).requires_grad_()
    twin = image.detach().clone().requires_grad_()
    first, second = drawn(2, 8, 3, 4, 5, seed=1), drawn(2, 8, 3, 4, 5, seed=2).contiguous(memory_format=layout)
    torch.autograd.backward(fused_norm(image, torch.ones(8), torch.zeros(8), 8, 2, 1e-5), (first, second))
    torch.autograd.backward((F.relu(F.group_norm(twin, 8)), twin), (first, second))
    assert torch.allclose(image.grad, twin.grad, atol=1e-6)


@interpreted
def test_many_programs_of_many_tiles_give_the_same_twice(monkeypatch):
    from medspeed.common.kernels import norm_operators

    monkeypatch.setattr(norm_operators, "TILE", 256)
    monkeypatch.setattr(norm_operators, "PROGRAMS", 7)
    test_group_norm_and_relu_are_torchs(2, 16, 8, (5, 7, 9), torch.float32)
    test_batch_norm_prelu_and_sum_are_torchs(2, 3, (5, 3, 9), True, torch.float32)
    image, weight, bias = drawn(2, 16, 5, 7, 9), drawn(16, seed=1), drawn(16, seed=2)
    assert norm_operators.geometry(image, 8, 2)[0] == (4, 2)
    assert torch.equal(*(fused(image, weight, bias, 8, 2, 1e-5) for _ in range(2)))


@interpreted
def test_numbers_that_are_none_stay_so_and_large_means_cost_nothing():
    image = drawn(1, 8, 4, 4, 4)
    image[0, 3, 0, 0, 0] = float("nan")
    found = fused(image, torch.ones(8), torch.zeros(8), 8, 1, 1e-5)
    assert found[0, 3].isnan().all()
    assert not found[0, 2].isnan().any()
    far = drawn(1, 8, 8, 8, 8) + 1000
    expected = F.relu(F.group_norm(far.double(), 8))
    assert (fused(far, torch.ones(8), torch.zeros(8), 8, 1, 1e-5) - expected).abs().max() < 1e-3


@interpreted
@pytest.mark.parametrize("gradient", ["expanded", "contiguous"])
def test_gradients_may_lie_anyhow(gradient):
    image = drawn(2, 8, 3, 4, 5).requires_grad_()
    given = torch.ones(1).expand(2, 8, 3, 4, 5) if gradient == "expanded" else drawn(2, 8, 3, 4, 5).contiguous()
    fused(image, torch.ones(8), torch.zeros(8), 8, 2, 1e-5).backward(given)
    twin = image.detach().clone().requires_grad_()
    F.relu(F.group_norm(twin, 8)).backward(given)
    assert torch.allclose(image.grad, twin.grad, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 64, 64, 32), (2, 16, 33, 37, 41)], ids=str)
def test_group_norm_of_large_images_is_exact_on_a_cpu(shape, dtype):
    """A background far from 0, as z-scored MRI has: torch's own is ten times further off than the bound."""
    image = (drawn(*shape) + 8).to(dtype)
    image[:, :, : shape[2] // 2] = 8
    norm = GroupNormReLU(8, shape[1])
    assert image.is_contiguous(memory_format=LAYOUT)
    assert image[0, 0].numel() > norms._MOST_SUMMED
    nn.init.normal_(norm.weight), nn.init.constant_(norm.bias, 20)  # far from ReLU's kink
    inputs = [image.requires_grad_(), norm.weight, norm.bias]
    doubles = exact(inputs)
    with torch.autocast("cpu", enabled=dtype == torch.bfloat16):
        found = norm(image)
    assert (found.dtype, found.stride()) == (dtype, image.stride())
    expected = F.relu(F.group_norm(doubles[0], 8, *doubles[1:]))
    gradient = drawn(*shape, seed=3)
    found.backward(gradient.to(dtype).contiguous())
    expected.backward(gradient.double())
    pairs = [(found, expected)] + [(a.grad, b.grad) for a, b in zip(inputs, doubles, strict=True)]
    bounds = BOUNDS[dtype], 20 * BOUNDS[dtype], 0.03, 0.03  # the weights' gradients are torch's
    for (one, other), bound in zip(pairs, bounds, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max()


def test_group_norm_of_large_images_that_lie_otherwise_is_torchs():
    norm, whole = GroupNormReLU(8, 16), drawn(1, 16, 40, 40, 48)
    for image in (whole.contiguous()[..., 8:], whole[..., 8:], whole.transpose(2, 4), whole[:0]):
        ours, torchs = (image.detach().requires_grad_() for _ in range(2))
        gradient = drawn(*image.shape, seed=1)
        norm(ours).backward(gradient)
        F.relu(F.group_norm(torchs, 8, norm.weight, norm.bias)).backward(gradient)
        assert torch.allclose(ours.grad, torchs.grad, atol=1e-5)


@pytest.mark.parametrize("module", [GroupNormReLU(4, 8), BatchNormPReLU(8)], ids=["group", "batch"])
def test_the_twin_is_differentiable_to_the_bit_of_its_numbers(module):
    twin = copy.deepcopy(module).double()
    image, residual = (drawn(2, 8, 2, 3, 2, seed=seed).double().requires_grad_() for seed in (0, 1))
    shift = torch.ones(8, dtype=torch.float64)
    given = (image,) if isinstance(twin, GroupNormReLU) else (image, residual)
    assert torch.autograd.gradcheck(lambda image, *other: twin(image, shift, *other) if other else twin(image), given)


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("network", "name"),
    [
        (segresnet3d(1, 2, 8, (1, 1)), norms.GROUP),
        (unet3d(1, 2, (4, 8), 1), norms.BATCH),
        (ResidualBlock(4, 8, 2), norms.RELU),
    ],
    ids=["segresnet", "unet", "resnet"],
)
def test_its_trial_passes_and_finds_a_planted_fault(network, name, dtype, everywhere, monkeypatch):
    monkeypatch.setattr(norms, "_SHAPE", (2, 6, 5, 4))
    before = torch.get_rng_state()
    run = SimpleNamespace(device=torch.device("cpu"))
    precision = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    trials = network_trials(network, SimpleNamespace(precision=precision), run)  # type: ignore[arg-type]
    (trial,) = (each for each in trials if each.name == name)
    assert trust.difference(trial.fused(), trial.work(), trial.tolerance) == ""
    assert torch.equal(before, torch.get_rng_state())  # the run's own numbers
    monkeypatch.setattr(norms, "fused_norm", lambda *given: tuple(1.2 * each for each in fused_norm(*given)))
    assert "off by" in trust.difference(trial.fused(), trial.work(), trial.tolerance)


@interpreted
def test_sums_of_many_voxels_are_compared_in_float16_too(everywhere, monkeypatch):
    """Gradients of weights add up all of them: next to 65504 there would be nothing to compare."""
    monkeypatch.setattr(norms, "_SHAPE", (8, 26, 26, 26))
    trial = norms.norm_trial(BatchNormPReLU(2), norms.BATCH, torch.float16, torch.device("cpu"))
    found, expected = trial.fused(), trial.work()
    assert trust.difference(found, expected, trial.tolerance) == ""
    assert all(each.isfinite().all() for each in (*found, *expected))


@interpreted
@pytest.mark.parametrize(
    ("network", "name", "fault"),
    [
        (unet3d(1, 2, (4, 8), 1), norms.BATCH, "running"),
        (unet3d(1, 2, (4, 8), 1), norms.BATCH, "residual"),
        (unet3d(1, 2, (4, 8), 1), norms.BATCH, "residual_bias"),
        (segresnet3d(1, 2, 8, (1, 1)), norms.GROUP, "beside"),
    ],
    ids=["running", "residual", "bias", "beside"],
)
def test_its_trial_finds_a_fault_in_what_training_alone_uses(network, name, fault, everywhere, monkeypatch):
    monkeypatch.setattr(norms, "_SHAPE", (2, 6, 5, 4))

    forward, backward = norm_operators.norm_forward, norm_operators.norm_backward

    def wrong_forward(*tensors):
        given = [*tensors]
        place = {"residual": 4, "residual_bias": 5}.get(fault)
        if place and given[place] is not None:
            given[place] = 0 * given[place]
        found = forward(*given)
        if fault == "running":
            given[6][0].fill_(77)
        return found

    def wrong_backward(gradients, image, y, beside, *rest):
        return backward(gradients, image, y, None if fault == "beside" else beside, *rest)

    monkeypatch.setattr(norm_operators, "norm_forward", wrong_forward)
    monkeypatch.setattr(norm_operators, "norm_backward", wrong_backward)
    run = SimpleNamespace(device=torch.device("cpu"))
    trials = network_trials(network, SimpleNamespace(precision="fp32"), run)  # type: ignore[arg-type]
    (trial,) = (each for each in trials if each.name == name)
    assert "off by" in trust.difference(trial.fused(), trial.work(), trial.tolerance)


@interpreted
@pytest.mark.parametrize(
    ("network", "name"),
    [
        (segresnet3d(1, 2, 8, (1, 2)), norms.GROUP),
        (unet3d(1, 2, (4, 8, 8), 2), norms.BATCH),
        # Not fewer channels: oneDNN (torch 2.13, AVX2) takes weights' gradients of 1 x 1, 4 to 8, from anywhere.
        (nn.Sequential(nn.Conv2d(1, 8, 3), ResidualBlock(8, 16, 2), ResidualBlock(16, 16)), norms.RELU),
    ],
    ids=["segresnet", "unet", "resnet"],
)
def test_a_network_with_them_learns_as_without(network, name, everywhere):
    """Logits, gradients and statistics, which then tell in evaluation; each kernel runs once for a normalisation."""
    fused, plain = copy.deepcopy(network), copy.deepcopy(network)
    flat = name == norms.RELU
    image, layout = (drawn(2, 1, 16, 16), torch.channels_last) if flat else (drawn(2, 1, 8, 8, 8), LAYOUT)
    for each in (fused, plain):
        each.to(memory_format=layout)
        with trust.trusting(*[name] * (each is fused)):
            each.train()(image).pow(3).mean().backward()
        each.eval()
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            bound = 1e-2 if flat else 1e-4  # small sums of many steps back, which rounding alone moves
            assert (one.grad - other.grad).abs().max() <= bound * other.grad.abs().max() + 1e-5 * flat + 1e-7, name
    assert torch.allclose(fused(image), plain(image), atol=1e-5)


@interpreted
@pytest.mark.parametrize("units", [1, 2])
def test_a_shortcut_joined_with_a_convolution_computes_the_same(units, everywhere, monkeypatch):
    """In half precision, where weights are cast: but for the order of some sums."""
    network = unet3d(1, 2, (4, 8, 8), units).train()
    image = drawn(2, 1, 16, 8, 8)  # four planes are left at the coarsest level: of two, see `choose_precision`
    network.to(memory_format=LAYOUT)  # type: ignore[call-overload]
    monkeypatch.setattr(module, "trusts", lambda name, tensor: name in trust._trusted)
    counts, runs = [], []
    for join in (False, True):
        found = copy.deepcopy(network)
        monkeypatch.setattr(module, "half_weights", lambda network, join, now=join: half_weights(network, "cpu", now))
        with trust.trusting(norms.BATCH), torch.autocast("cpu", torch.bfloat16), count_operators() as counted:
            found(image).float().pow(3).mean().backward()
        counts.append(counted["aten::convolution"])
        runs.append(found)
    assert counts[0] - counts[1] == (2 if units > 1 else 0)  # one of each level but the last
    apart, joined = (
        {name: each.grad for name, each in run.named_parameters() if each.grad is not None} for run in runs
    )
    whole = torch.nn.utils.get_total_norm(apart.values())
    for name in apart.keys() & joined.keys():  # a slope's gradient is one sum, which may come out near zero
        assert (joined[name] - apart[name]).norm() <= 0.05 * apart[name].norm() + 0.005 * whole, name
    assert torch.allclose(runs[1].eval()(image), runs[0].eval()(image), atol=1e-2)


def test_rows_of_channels_may_be_parts_of_longer_ones():
    image = drawn(2, 8, 3, 4, 5)
    assert all(map(channels_innermost, (image, image[:, :3], image[:, 3:], *image.chunk(2, 1))))
    assert not any(map(channels_innermost, (image.contiguous(), image[..., 1:], image[:, :, 1:][:, :3], image[:, ::2])))


@interpreted
def test_a_residual_may_be_the_same_at_all_voxels():
    image, residual = drawn(2, 8, 3, 4, 5), drawn(1, 8, 1, 1, 1).expand(2, 8, 3, 4, 5)
    found = fused(image, torch.ones(8), torch.zeros(8), 8, 1, 1e-5, "prelu", torch.zeros(1), residual)
    assert torch.allclose(found, F.relu(F.batch_norm(image, None, None, training=True)) + residual, atol=1e-5)


def test_a_channel_of_one_value_is_refused_as_by_torch(everywhere):
    with trust.trusting(norms.BATCH), pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNormPReLU(8)(drawn(1, 8, 1, 1, 1))


def test_tensors_of_other_layouts_take_the_twin(everywhere, monkeypatch):
    monkeypatch.setattr(norms, "fused_norm", lambda *_: pytest.fail("fused"))
    image = torch.randn(2, 8, 3, 4, 5)
    with trust.trusting(norms.GROUP, norms.BATCH):
        assert torch.equal(GroupNormReLU(8, 8)(image), F.relu(F.group_norm(image, 8, torch.ones(8), torch.zeros(8))))
        BatchNormPReLU(8)(image)
        BatchNormPReLU(8).eval()(image.contiguous(memory_format=LAYOUT))


def test_operators_have_true_fakes():
    """Shapes, strides and dtypes that compilers and the counting of launches go by."""
    fake = torch._subclasses.fake_tensor.FakeTensorMode()
    with fake:
        image = torch.empty(2, 16, 4, 6, 8, dtype=torch.bfloat16).contiguous(memory_format=LAYOUT).requires_grad_()
        weight, bias, slope = (torch.empty(size, requires_grad=True) for size in (16, 16, 1))
        running = [torch.empty(16), torch.empty(16), torch.empty((), dtype=torch.int64), torch.empty(16)]
        for found in (
            fused(image, weight, bias, 8, 2, 1e-5),
            fused(image, weight, bias, 16, 1, 1e-5, "prelu", slope, image, weight, running[:3], running[3], 0.1),
            fused(image, weight, bias, 16, 1, 1e-5, "sum_relu", None, image),
        ):
            assert (found.shape, found.stride(), found.dtype) == (image.shape, image.stride(), image.dtype)
            found.sum().backward()
    assert image.grad.stride() == image.stride()  # type: ignore[union-attr]
    assert slope.grad.shape == (1,)  # type: ignore[union-attr]


@pytest.mark.slow
def test_kernels_compile_without_local_memory_or_spills():
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, Path(__file__).with_name("compile_worker.py"), *map(str, CAPABILITIES)]
    given = {"env": {**clean, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(words, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 40 * len(CAPABILITIES)
    for line in lines:
        assert "fits True" in line, line
        assert "fp32" in line or line.endswith("local 0 spilled 0 atomics 0"), line
