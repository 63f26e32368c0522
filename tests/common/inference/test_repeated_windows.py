"""Windows in a CUDA graph, which tests/emulated_graph.py stands for on a CPU."""

import pytest
import torch
from torch import nn

from medspeed.common.inference import open_predictor
from medspeed.common.inference.open_predictor import channels_last_predictor, repeating_predictor
from medspeed.common.inference.predictors import torch_predictor
from medspeed.common.kernels import trust
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d
from tests import emulated_graph
from tests.support import refuse_host_sync, sliding_windows

NETWORKS = {"unet": lambda: unet3d(1, 2, (4, 8)), "segresnet": lambda: segresnet3d(1, 2, 8)}


class Counted:
    """A predictor that counts the calls that the host makes of it, and can read one number from the host."""

    def __init__(self, network: nn.Module, precision="fp32") -> None:
        self.predict, self.calls, self.shift = torch_predictor(network.eval(), precision), 0, 0.0

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.predict(windows) + self.shift * self.calls


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(trust, "record", emulated_graph.record)
    monkeypatch.setattr(trust, "choose", emulated_graph.tried)


def predictors(network, precision="fp32"):
    said: list[str] = []
    counted = Counted(network, precision)
    return counted, repeating_predictor(counted, "a network", said.append), said


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_repeated_windows_are_those_of_eager_calls(emulated, name, precision):
    torch.manual_seed(0)
    counted, repeating, said = predictors(NETWORKS[name](), precision)
    for shape in ((2, 1, 16, 16, 8), (1, 1, 8, 16, 16)):
        repeating(torch.rand(shape))
        before = counted.calls
        kept = []
        for _ in range(3):
            windows = torch.rand(shape)
            kept.append((repeating(windows), counted.predict(windows)))
        assert counted.calls == before  # nothing was launched one by one
        assert all(torch.equal(found, due) for found, due in kept)  # nor written over
    before = counted.calls
    windows = torch.rand(1, 1, 8, 8, 8)
    assert torch.equal(repeating(windows), counted.predict(windows))
    assert counted.calls == before + 1  # a third shape
    assert said == []


@torch.no_grad()
def test_a_whole_image_is_that_of_eager_windows(emulated):
    counted, repeating, _ = predictors(unet3d(1, 2, (4, 8)))
    image = torch.rand(1, 40, 24, 20)
    found, due = (sliding_windows(image, each, (16, 16, 16), batch_size=2) for each in (repeating, counted.predict))
    assert torch.equal(found, due)


@torch.no_grad()
def test_a_predictor_that_reads_from_the_host_is_called_itself(emulated):
    """Its number would be frozen: the trial sees it."""
    counted, repeating, _ = predictors(unet3d(1, 2, (4, 8)))
    counted.shift = 1.0
    windows = torch.rand(1, 1, 8, 8, 8)
    repeating(windows)
    before = counted.calls
    assert torch.equal(repeating(windows), counted.predict(windows) + before + 1)


@pytest.mark.parametrize("known", [False, True])
def test_a_capture_that_fails_is_said_and_costs_nothing_else(monkeypatch, known):
    def fails(body):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(trust, "record", fails)
    monkeypatch.setattr(trust, "choose", (lambda trials, *_: [trials[0].name]) if known else emulated_graph.tried)
    counted, repeating, said = predictors(unet3d(1, 2, (4, 8)))
    for _ in range(2):
        windows = torch.rand(1, 1, 8, 8, 8)
        assert torch.equal(repeating(windows), counted.predict(windows))
    names = ("windows in a graph of our kernels", "windows in a graph")
    assert said == [f"{name}: capture failed: operation not permitted when stream is capturing" for name in names]


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_the_work_on_windows_reads_nothing_from_the_host_and_is_the_same_for_all(name):
    predict, traces = channels_last_predictor(NETWORKS[name]().eval(), "bf16"), []
    for scale in (1.0, 1e-3):
        trace = emulated_graph.Trace()
        windows = scale * torch.rand(2, 1, 16, 16, 8)
        with trace, refuse_host_sync():
            predict(windows)
        traces.append(trace.frozen())
    assert traces[0] == traces[1]
    assert len(traces[0]) > 20


@pytest.mark.gpu
def test_a_graph_on_a_gpu_gives_what_eager_calls_give(tmp_path, monkeypatch):
    monkeypatch.setattr(open_predictor, "_STORE", tmp_path)
    monkeypatch.setattr(trust, "_FASTER", 1e9)  # whatever it is worth here
    for name, precision in (("unet", "fp32"), ("segresnet", "bf16")):
        counted, repeating, _ = predictors(NETWORKS[name]().cuda(), precision)
        windows = torch.rand(2, 1, 16, 16, 8, device="cuda")
        repeating(windows)
        before = counted.calls
        for _ in range(3):
            windows = torch.rand_like(windows)
            assert torch.allclose(repeating(windows), counted.predict(windows), rtol=0.02, atol=0.02)
        assert counted.calls == before
