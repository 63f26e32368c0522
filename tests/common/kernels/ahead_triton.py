# mypy: disable-error-code="untyped-decorator"
"""Kernels that are compiled at once, for a GPU that is not there: none is launched."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from medspeed.common.kernels import trust
from medspeed.common.kernels.trust import Trial, trusting
from tests.kernels import _Driver


@triton.jit
def scaled_kernel(values, FACTOR: tl.constexpr):
    tl.store(values, tl.load(values) * FACTOR)


@triton.jit
def shifted_kernel(values, OFFSET: tl.constexpr):
    tl.store(values, tl.load(values) + OFFSET)


@triton.jit
def wrong_kernel(values, FACTOR: tl.constexpr):
    tl.store(values, tl.load(values) @ FACTOR)


@pytest.fixture
def launched(monkeypatch):
    """The factors of kernels that were launched, on a device that only takes them down; verdicts take no time."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    found: list[int] = []
    monkeypatch.setattr(driver, "_active", driver._active)
    driver.set_active(_Driver(90))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda _: None)
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda *_: None)
    monkeypatch.setattr(CompiledKernel, "run", property(lambda _: lambda *given: found.append(given[-1])))
    monkeypatch.setattr(trust, "_seconds", lambda _: 1.0)
    monkeypatch.setattr(trust, "_OURS", scaled_kernel.module)
    with trusting():
        yield found


def trial(name: str, launch: Any, forget: Any = lambda: None, **how: Any) -> Trial:
    values = torch.ones(16)

    def work() -> list[torch.Tensor]:
        if trust.trusts(name):
            launch(values)
        return [values]

    return Trial(name, work, 0.0, forget=forget, **how)


def test_all_are_compiled_at_once_and_launched_by_their_trials_only(launched, tmp_path):
    threads, both, forgotten = set(), threading.Barrier(2, timeout=60), []
    compiled = triton.compiler.compile

    def compile_beside(*given: Any, **named: Any) -> Any:
        assert not launched
        threads.add(threading.current_thread().name)
        both.wait()  # each while the other compiles
        return compiled(*given, **named)

    trials = [
        trial(
            str(factor), lambda values, factor=factor: scaled_kernel[(1,)](values, factor), lambda: forgotten.append(1)
        )
        for factor in (3, 4)
    ]
    with mock.patch("triton.compiler.compile", compile_beside):
        trust.choose(trials, "fused", tmp_path, print)
    assert len(threads) == 2
    assert threading.main_thread().name not in threads
    assert launched == [3, 4]
    assert len(forgotten) == 4
    with mock.patch("triton.compiler.compile", side_effect=AssertionError), trust._compiling():
        scaled_kernel[(1,)](torch.ones(16), 3)  # compiled before: launched inside, too
    assert launched[-1] == 3


def test_others_kernels_and_other_threads_kernels_are_launched(launched, monkeypatch):
    """Such as those of torch, whose products of matrices may be of Triton: what is computed with them is kept."""
    values = torch.ones(16)
    with trust._compiling():
        beside = threading.Thread(target=lambda: shifted_kernel[(1,)](values, 7))
        beside.start()
        beside.join()
        shifted_kernel[(1,)](values, 8)
        assert launched == [7]
        monkeypatch.setattr(trust, "_OURS", "medspeed.")
        shifted_kernel[(1,)](values, 9)
        assert launched == [7, 9]


def test_an_interrupt_leaves_nothing_behind(launched, monkeypatch):
    from triton.runtime import _async_compile

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_async_compile, "as_completed", interrupted)
        with pytest.raises(KeyboardInterrupt), trust._compiling():
            shifted_kernel[(1,)](torch.ones(16), 10)
    with trust._compiling():
        shifted_kernel[(1,)](torch.ones(16), 11)
    shifted_kernel[(1,)](torch.ones(16), 11)
    assert launched == [11]


def test_an_error_of_the_compiler_is_its_own_trials(launched, tmp_path):
    lines: list[str] = []
    wrong = trial("wrong", lambda values: wrong_kernel[(1,)](values, 2))
    right = trial("right", lambda values: shifted_kernel[(1,)](values, 5))
    assert trust.choose([wrong, right], "fused", tmp_path, lines.append) == {"right"}
    assert "wrong is not used because it failed: " in lines[0]
    assert "tl.load(values) @ FACTOR" in lines[0]  # the compiler's words, whichever Triton's


def test_backward_compiles_in_this_thread(launched):
    seen: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return 2 * values

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(threading.current_thread().name)
            shifted_kernel[(1,)](gradient, 6)
            return gradient

    with trust._compiling():
        assert not torch.autograd.is_multithreading_enabled()
        Twice.apply(torch.ones(16, requires_grad=True)).sum().backward()
        assert not launched
    assert seen == [threading.main_thread().name]
    assert torch.autograd.is_multithreading_enabled()
