"""The second moments of Novograd in one kernel against plain torch, in Triton's interpreter; and compiled."""

import os
from typing import Any

import pytest
import torch

from medspeed.common.kernels import trust
from medspeed.common.training import optimizers
from medspeed.common.training.optimizers import BLOCK, Novograd
from tests.kernels import run_compiled

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")
BLOCKS = (1, 7, 5000, 2)  # the third takes two rounds of a program


@pytest.fixture
def everywhere(monkeypatch):
    """Let what is trusted take tensors of the CPU too."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(optimizers, "trusts", lambda name, tensor: name in trust._trusted)


def steps(*names, scale=None, skips=(0, 0, 0)):
    """Return the weights and moments after each of a few steps; the last parameter has no gradient at first."""
    parameters, found = [torch.zeros(BLOCK * blocks, requires_grad=True) for blocks in BLOCKS], []
    optimizer: Any = Novograd(parameters)
    optimizer.grad_scale = scale
    for number, skip in enumerate(skips):
        generator = torch.Generator().manual_seed(number)
        for each in parameters:
            last = each is parameters[-1] and not number
            each.grad = torch.rand(len(each), generator=generator) * (scale or 1) * (not last)
        optimizer.found_inf = torch.tensor([float(skip)]) if any(skips) else None
        with trust.trusting(*names):
            optimizer.step()
        found += [each.detach().clone() for each in (*parameters, optimizer.packed[1])]
    return found


@interpreted
@pytest.mark.parametrize("scale", [None, torch.tensor(1024.0)])
@pytest.mark.parametrize("skips", [(0, 0, 0), (1, 0, 1)])
def test_the_kernel_is_its_twin(everywhere, scale, skips):
    found, expected = (steps(*names, scale=scale, skips=skips) for names in ((optimizers.MOMENTS,), ()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=0)


@interpreted
def test_its_trial_passes_and_finds_a_planted_fault(everywhere, monkeypatch):
    trial = optimizers.moments_trial(torch.device("cpu"))
    assert trust.difference(trial.fused(), trial.work(), trial.tolerance) == ""
    from medspeed.common.kernels import moments_triton

    right = moments_triton.second_moments
    monkeypatch.setattr(moments_triton, "second_moments", lambda *given: 1.1 * right(*given))
    assert "off by" in trust.difference(trial.fused(), trial.work(), trial.tolerance)


def test_its_trial_times_what_the_kernel_replaces_alone():
    """Twice its ten operators, and what they are given."""
    trial = optimizers.moments_trial(torch.device("cpu"))
    first = trial.work()
    with torch.profiler.profile() as recorded:
        second = trial.work()
    assert sum(event.cpu_parent is None for event in recorded.events()) <= 2 * 12 + 2
    assert all(map(torch.equal, first, second))


@pytest.mark.slow
def test_the_kernel_compiles_without_spilling():
    run_compiled("tests/common/kernels/compile_moments.py")
