"""Each network is compiled twice, once to train and once to validate, and both before training begins."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from medspeed.apps import open_training, parse_flags
from medspeed.benchmarks.fake_cuda.steps import write_data
from medspeed.common.training.fit import train_step
from medspeed.common.training.setup import start_run

TINY = {
    "spleen": (
        "--channels", "[4,8]", "--crop_size", "[16,16,16]", "--crops.per_case", "4", "--windows.size", "[16,16,16]",
        "--batch_size", "4",
    ),
    "brats": (
        "--network.filters", "8", "--network.blocks_down", "[1,1]", "--crop_size", "[16,16,16]",
        "--windows.size", "[16,16,16]", "--batch_size", "1",
    ),
    "pathology": ("--batch_size", "2",),
}  # fmt: skip
STEPS = 2


@pytest.fixture
def counter(monkeypatch):
    """Counts compilations, and takes down the modes in which what is compiled runs, as it is."""
    found: Any = CompileCounter()
    compiled = nn.Module.compile
    found.modes = set()  # with gradients or not, and CUDA's products: newer versions of torch compile for each anew

    def backend(graph, inputs):
        run = found(graph, inputs)

        def noted(*given):
            found.modes.add((torch.is_grad_enabled(), torch.backends.cuda.matmul.fp32_precision))
            return run(*given)

        return noted

    monkeypatch.setattr(nn.Module, "compile", lambda self, **words: compiled(self, backend=backend, **words))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")  # the compiler warns about things of its own
@pytest.mark.parametrize(
    ("app", "parts"),
    [
        ("spleen", 1),
        ("brats", 1),
        pytest.param("spleen", 2, marks=pytest.mark.slow),
        pytest.param("pathology", 1, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_once_training_has_begun(app, parts, counter, tmp_path):
    data = write_data(app, tmp_path / "data")
    words = ("--data", str(data), "--store", str(tmp_path / "store"), "--run", str(tmp_path / "run"))
    how = ("--device", "cpu", "--precision", "fp32", "--compile", "true", "--parallel.accumulate", str(parts))
    with start_run(parse_flags(app, [*words, *how, *TINY[app]])) as run:
        _, setup = open_training(parse_flags(app, [*words, *how, *TINY[app]]), run)
        assert run.clock.seconds()["compile"] > 0
        assert counter.frame_count == len(counter.modes) == 2
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with closing(setup.batches.epoch(0)) as batches:
            for _ in range(STEPS):
                args = setup.loss_function, setup.optimizer, scaler, setup.precision, 0.01, parts
                train_step(setup.network, next(batches), *args)
        setup.validate(setup.network, lambda: None)
    assert counter.frame_count == len(counter.modes) == 2
