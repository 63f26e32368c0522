"""The second moments of Novograd in one kernel against plain torch, in Triton's interpreter; and compiled."""

import os

import pytest
import torch

from medspeed.common.kernels import trust
from medspeed.common.training import optimizers
from medspeed.common.training.optimizers import divisors
from tests.kernels import run_compiled

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")
BLOCKS = (1, 7, 5000, 2)  # the third takes two rounds of a program


@pytest.fixture
def everywhere(monkeypatch):
    """Let what is trusted take tensors of the CPU too."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(optimizers, "trusts", lambda name, tensor: name in trust._trusted)


def steps(*names, scale=None, skips=(0, 0, 0)):
    """Return the divisors of a few steps and the moments after each; the last parameter has no gradient at first."""
    owner = torch.arange(4).repeat_interleave(torch.tensor(BLOCKS))
    second, found = torch.zeros(4), []
    for number, skip in enumerate(skips):
        norms = torch.rand(sum(BLOCKS), generator=torch.Generator().manual_seed(number)) * (number or owner < 3)
        with trust.trusting(*names):
            flag = torch.tensor([float(skip)]) if any(skips) else None
            found.append(divisors(norms * (scale or 1), BLOCKS, owner, second, scale, flag))
        found.append(second.clone())
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


@pytest.mark.slow
def test_the_kernel_compiles_without_spilling():
    run_compiled("tests/common/kernels/compile_moments.py")
