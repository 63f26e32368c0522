import copy
import io
import math
import pickle
from typing import get_args, get_type_hints

import monai.optimizers
import pytest
import torch
from torch import nn

from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.optimizers import Muon, Novograd, build_optimizer, orthogonal
from medspeed.common.training.setup import SCHEDULES
from tests.support import count_operators, refuse_host_sync


def small_network() -> nn.Sequential:
    """A network with parameters of several sizes (more and fewer elements than a block) and memory formats."""
    torch.manual_seed(0)
    # No bias before the normalisation: its gradient is rounding noise, which Novograd blows up to norm 1.
    network = nn.Sequential(
        nn.Conv3d(1, 6, 3, bias=False),
        nn.BatchNorm3d(6),
        nn.PReLU(),
        nn.Conv3d(6, 8, 3),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    return in_format(network, torch.channels_last_3d)


def in_format(network: nn.Sequential, memory_format: torch.memory_format) -> nn.Sequential:
    for parameter in network.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return network


def backward(network: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Leave the gradients of one random batch in the network's parameters."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, 1, 6, 6, 6, generator=generator)
    network.zero_grad()
    torch.autograd.backward(network(batch).square().mean() * scale)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def weights(network: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def gradients(network: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_weights_equal_monais_over_50_steps():
    ours, theirs = small_network(), small_network()
    optimizer = Novograd(ours.parameters(), lr=0.01)
    reference = monai.optimizers.Novograd(theirs.parameters(), lr=0.01)
    start = weights(ours)
    for step in range(50):
        for network, stepper in ((ours, optimizer), (theirs, reference)):
            backward(network, step)
            stepper.step()
    assert largest_difference(ours, theirs) < 1e-6
    assert not any(torch.equal(a, b) for a, b in zip(weights(ours), start, strict=True))


def test_a_scheduler_equals_monais():
    networks = [small_network(), small_network()]
    steppers = []
    for network, kind in zip(networks, (Novograd, monai.optimizers.Novograd), strict=True):
        optimizer = kind(network.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: SCHEDULES["cosine"](step / 50))
        steppers.append((optimizer, schedule))
    for step in range(50):
        for network, (optimizer, schedule) in zip(networks, steppers, strict=True):
            backward(network, step)
            optimizer.step()
            schedule.step()
    assert largest_difference(*networks) < 1e-6


def test_frozen_parameters():
    ours, theirs = small_network(), small_network()
    for network, kind in ((ours, Novograd), (theirs, monai.optimizers.Novograd)):
        _, frozen, *_ = network.parameters()
        frozen.requires_grad_(False)
        optimizer = kind(network.parameters(), lr=0.01)
        for seed in range(2):
            backward(network, seed)
            optimizer.step()
        assert frozen not in optimizer.state
    assert largest_difference(ours, theirs) < 1e-7


def test_a_rate_on_the_device_equals_the_same_number():
    networks = [small_network(), small_network()]
    numbers, tensors = (Novograd(network.parameters()) for network in networks)
    for step in range(10):
        rate = 0.01 / (1 + step)
        for network, optimizer, lr in zip(networks, (numbers, tensors), (rate, torch.tensor(rate)), strict=True):
            backward(network, step)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    assert largest_difference(*networks) < 1e-7


def test_gradients_of_other_strides_in_axes_of_length_1_stay_on_the_fast_path(monkeypatch):
    copied: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    copy_ = torch._foreach_copy_

    def noted(to, given):
        copied.append((to, given))
        copy_(to, given)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    ours, theirs = (nn.Parameter(torch.ones(3, 4, 1, 1).to(memory_format=torch.channels_last)) for _ in range(2))
    optimizer, plain = Novograd([ours]), Novograd([theirs])
    for _ in range(2):
        gradient = torch.arange(12.0).view(3, 4, 1, 1)
        ours.grad = gradient.as_strided((3, 4, 1, 1), (4, 1, 1, 1))
        theirs.grad = gradient.to(memory_format=torch.channels_last)
        optimizer.step()
        plain.step()
    assert torch.equal(ours, theirs)
    assert all(view.stride() == given.stride() for to, those in copied for view, given in zip(to, those, strict=True))


def test_a_parameter_with_gaps_in_its_memory_is_a_programmers_error():
    weight = nn.Parameter(torch.ones(3, 8)[:, ::2])
    weight.grad = torch.ones(3, 4)
    with pytest.raises(AssertionError, match="no gaps in a parameter's memory"):
        Novograd([weight]).step()


def test_a_gradient_laid_out_unlike_its_parameter_is_a_programmers_error():
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(4, 3).t()
    with pytest.raises(AssertionError, match="laid out unlike"):
        Novograd([weight]).step()


def test_first_step_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Novograd([weight], lr=0.1)
    weight.grad = torch.tensor([3.0, 4.0])  # norm 5: update [0.6, 0.8]
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([1 - 0.06, 2 - 0.08]))
    assert torch.allclose(optimizer.state[weight]["exp_avg_sq"], torch.tensor(25.0))


def test_norm_of_a_large_gradient_is_exact():
    weight = nn.Parameter(torch.zeros(4_000_000))
    optimizer = Novograd([weight])
    weight.grad = torch.full_like(weight, 0.1)  # summed in float32 one after the other this is off by 1e-4
    optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(4_000_000 * 0.1**2, rel=1e-6)


def test_gradients_are_left_untouched():
    network = small_network()
    optimizer = Novograd(network.parameters())
    for step in range(2):
        backward(network, step)
        before = [gradient.clone() for gradient in gradients(network)]
        optimizer.step()
        assert all_equal(gradients(network), before)


def test_state_is_stacked_on_the_device():
    network = small_network()
    optimizer = Novograd(network.parameters())
    backward(network, 0)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert len({state[name].untyped_storage().data_ptr() for state in optimizer.state.values()}) == 1
    saved = next(iter(optimizer.state.values()))["exp_avg"].untyped_storage().nbytes()
    assert saved <= 4 * sum(1024 * math.ceil(parameter.numel() / 1024) for parameter in network.parameters())
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()  # what the fast foreach kernels ask for


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_never_waits_for_the_device(scaled):
    network = small_network()
    optimizer = Novograd(network.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with refuse_host_sync():
        for step in range(3):
            backward(network, step)
            scaler.scale(torch.zeros(()))  # makes the scale, as scaling the loss would
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_on_the_gpu_equals_the_cpu_and_never_waits(scaled):
    on_cpu, on_gpu = small_network(), small_network().cuda()
    optimizers = [Novograd(network.parameters(), lr=0.01) for network in (on_cpu, on_gpu)]
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.zeros((), device="cuda"))
    for step in range(5):
        backward(on_cpu, step)
        for parameter, gradient in zip(on_gpu.parameters(), gradients(on_cpu), strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizers[0].step()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step uploads its tables
        try:
            scaler.step(optimizers[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
    assert largest_difference(on_cpu, on_gpu.cpu()) < 1e-6


def launches(parameters: int) -> int:
    """Return how many operators the second step of an optimizer of so many parameters launches."""
    optimizer = Novograd([nn.Parameter(torch.ones(3 + i % 4, 500)) for i in range(parameters)])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)
    scaler.update()
    with count_operators() as plain:
        optimizer.step()
    with count_operators() as scaled:
        scaler.step(optimizer)
    assert plain.total() <= 25
    return plain.total() + scaled.total()


def test_launches_do_not_grow_with_the_number_of_parameters():
    assert launches(10) == launches(100)


def test_grad_scaler_equals_monais_driven_the_classic_way():
    ours, theirs = small_network(), small_network()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7) for _ in range(2)]
    optimizers = [Novograd(ours.parameters(), 0.01), monai.optimizers.Novograd(theirs.parameters(), 0.01)]
    for step in range(30):
        for network, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            backward(network, step, scale=scaler.scale(torch.ones(())).item())
            if step in (0, 11):  # overflow, also before there is any state
                gradients(network)[0][0, 0, 0, 0, 0] = math.inf if step else math.nan
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2.0 ** (10 - 2 + 1 + 2)  # two overflows; a run of 10 good steps, one of 18
    assert largest_difference(ours, theirs) < 1e-6


def test_an_overflowed_step_changes_neither_weights_nor_state():
    network = small_network()
    optimizer = Novograd(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for step in range(4):
        backward(network, step)
        overflow = step % 2 == 1
        if overflow:
            gradients(network)[0].fill_(math.inf)
        before, state = weights(network), copy.deepcopy(optimizer.state_dict()["state"])
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        after = optimizer.state_dict()["state"]
        assert (scaler.get_scale() == scale / 2) == overflow
        assert all_equal(weights(network), before) == overflow
        if overflow:
            assert all(torch.equal(after[p][name], state[p][name]) for p in state for name in state[p])


def test_gradients_unscaled_before_the_step_are_not_divided_again():
    ours, theirs = small_network(), small_network()
    optimizer, plain = Novograd(ours.parameters(), lr=0.1), Novograd(theirs.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        backward(ours, step, scale=scaler.scale(torch.ones(())).item())
        backward(theirs, step)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert largest_difference(ours, theirs) < 1e-6


def test_state_round_trip_continues_bit_for_bit():
    network = small_network()
    optimizer = Novograd(network.parameters(), lr=0.01)
    for step in range(5):
        backward(network, step)
        optimizer.step()
    stream = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)

    resumed = small_network()
    resumed.load_state_dict(saved["network"])
    restored = Novograd(resumed.parameters(), lr=0.5)
    restored.load_state_dict(saved["optimizer"])
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(restored.state_dict()["state"][index][name], value)
    for step in range(5, 10):
        for each, stepper in ((network, optimizer), (resumed, restored)):
            backward(each, step)
            stepper.step()
    assert all_equal(weights(network), weights(resumed))
    assert restored.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_copy_continues_bit_for_bit(copied, steps):
    network = small_network()
    optimizer = Novograd(network.parameters(), lr=0.01)
    for step in range(steps):
        backward(network, step)
        optimizer.step()
    pairs = [(network, optimizer), copied((network, optimizer))]
    for step in range(steps, steps + 5):
        for each, stepper in pairs:
            backward(each, step)
            stepper.step()
        assert all_equal(weights(pairs[0][0]), weights(pairs[1][0]))
    assert pairs[1][1].param_groups[0]["lr"] == 0.01
    before = weights(pairs[1][0])
    backward(network, 10)
    optimizer.step()
    assert all_equal(weights(pairs[1][0]), before)  # they share no memory


def test_state_survives_a_change_of_memory_format():
    network = small_network()
    optimizer = Novograd(network.parameters(), lr=0.01)
    backward(network, 0)
    optimizer.step()
    contiguous = in_format(copy.deepcopy(network), torch.contiguous_format)
    restored = Novograd(contiguous.parameters())
    restored.load_state_dict(optimizer.state_dict())
    for each, stepper in ((network, optimizer), (contiguous, restored)):
        backward(each, 1)
        stepper.step()
    assert largest_difference(network, contiguous) < 1e-6


def test_loading_copies_the_state():
    network = small_network()
    optimizer, other = Novograd(network.parameters()), Novograd(network.parameters())
    backward(network, 0)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    before = [state["exp_avg"].clone() for state in other.state.values()]
    optimizer.step()
    assert all_equal([state["exp_avg"] for state in other.state.values()], before)


def test_bf16_autocast_training_lowers_the_loss():
    network = small_network()
    optimizer = Novograd(network.parameters(), lr=0.02)
    batch, target = torch.randn(8, 1, 6, 6, 6), torch.randn(8, 3)
    losses = []
    for _ in range(40):
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (network(batch) - target).float().square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())


def test_mixed_precisions_in_a_group_are_a_programmers_error():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AssertionError, match="one device"):
        Novograd(parameters).step()


def test_optimizers_by_name():
    parameter = nn.Parameter(torch.ones(2))
    names, _ = get_args(get_type_hints(TrainingConfig)["optimizer"])
    built = {name: build_optimizer(name, [parameter], 0.25) for name in get_args(names)}
    assert {name: type(each) for name, each in built.items()} == {
        "novograd": Novograd,
        "muon": Muon,
        "monai_novograd": monai.optimizers.Novograd,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    assert all(each.param_groups[0]["lr"] == 0.25 for each in built.values())
    sgd = built["sgd"].param_groups[0]
    assert (sgd["momentum"], sgd["nesterov"], sgd["weight_decay"]) == (0.9, False, 4e-5)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (8, 8)])
def test_an_orthogonal_matrix_keeps_singular_vectors_and_has_singular_values_near_1(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False)
    values = torch.linspace(1.0, 0.1, min(shape))
    given = (u * values) @ v / values.norm()
    other, turned = (u.T @ each @ v.T for each in orthogonal([given.flip(0), given]))  # of one size: at once
    assert not torch.allclose(other, turned, atol=1e-2)
    assert torch.allclose(turned, torch.diag(turned.diagonal()), atol=1e-4)
    assert 0.65 < turned.diagonal().min() < turned.diagonal().max() < 1.25


def test_muon_moves_matrices_as_torchs_own_does():
    theirs = [nn.Parameter(value.clone()) for value in (torch.ones(5, 9), torch.ones(12, 3))]
    ours = [nn.Parameter(value.detach().clone()) for value in theirs]
    kernels = [nn.Parameter(value.detach().clone().reshape(len(value), -1, 3)) for value in theirs]
    generator = torch.Generator().manual_seed(0)
    steppers = Muon([*ours, *kernels], 0.05), torch.optim.Muon(theirs, 0.05, weight_decay=0.0, momentum=0.9)
    for _ in range(4):
        for mine, kernel, other in zip(ours, kernels, theirs, strict=True):
            mine.grad = other.grad = torch.randn(other.shape, generator=generator)
            kernel.grad = mine.grad.reshape(kernel.shape)
        for stepper in steppers:
            stepper.step()
    for mine, kernel, other in zip(ours, kernels, theirs, strict=True):
        assert torch.allclose(mine, other, atol=0.01)  # theirs iterates in bfloat16
        assert (other - 1).abs().max() > 0.05
        assert torch.equal(kernel.reshape(mine.shape), mine)


def test_muon_moves_a_vector_by_the_rate_along_its_momentum():
    vector, still, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    vector.grad, still.grad = torch.tensor([3.0, 4.0]), torch.zeros(2)
    Muon([vector, still, frozen.requires_grad_(False)], 0.1).step()
    assert vector.tolist() == pytest.approx([-0.1 * 0.6 * 2**0.5, -0.1 * 0.8 * 2**0.5])
    assert still.tolist() == frozen.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("rows", "columns", "length"), [(512, 520, 512**0.5), (1040, 520, (2 * 520) ** 0.5)])
def test_muon_moves_a_large_matrix_along_its_momentum_as_far_as_an_orthogonal_one(rows, columns, length):
    large, small = (nn.Parameter(torch.zeros(size)) for size in ((rows, 8, columns // 8), (4, 40)))
    large.grad, small.grad = (
        torch.randn(each.shape, generator=torch.Generator().manual_seed(2)) for each in (large, small)
    )
    Muon([large, small], 0.1).step()
    assert torch.allclose(large, -0.1 * length * large.grad / large.grad.norm(), atol=1e-6)
    assert not torch.allclose(small, -0.1 * 2 * small.grad / small.grad.norm(), atol=1e-3)  # it is made orthogonal


def test_muon_goes_on_from_its_state_as_if_it_had_not_stopped():
    network = small_network()
    optimizer = Muon(network.parameters(), 0.05)
    for step in range(3):
        backward(network, step)
        optimizer.step()
    other = copy.deepcopy(network)
    restored = Muon(other.parameters(), 0.05)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepper in ((network, optimizer), (other, restored)):
        backward(each, 3)
        stepper.step()
    assert all_equal(weights(network), weights(other))
