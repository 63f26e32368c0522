import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medspeed.apps.pathology.model import binary_cross_entropy
from medspeed.common.clock import Clock
from medspeed.common.data.batches import Batch, crop_batches
from medspeed.common.inference import Precision
from medspeed.common.inference.labels import Region
from medspeed.common.kernels import trust
from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.run import Run
from medspeed.common.training.config import TrainingConfig
from medspeed.common.training.fit import train_step
from medspeed.common.training.losses import soft_dice
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.state import TrainingState
from medspeed.common.training.steps import Steps, choose_steps, why_eager
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d
from tests import golden
from tests.common.training.fit_worker import tiny_batches, train
from tests.common.training.test_fit import held_on
from tests.emulated_graph import Trace, emulated, record
from tests.support import last_weights, refuse_host_sync

CPU = torch.device("cpu")
COUNT = 50
# A warm-up, then a cosine: no two steps in a row at the same rate.
RATES = [0.01 * min(1, (n + 1) / 10) * 0.5 * (1 + math.cos(math.pi * n / COUNT)) for n in range(COUNT)]


def volumes(channels: int, classes: int) -> Callable[[int], Batch]:
    def batch(number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        label = torch.randint(0, classes, (2, 1, 8, 8, 8), generator=generator, dtype=torch.uint8)
        image = torch.randn(2, channels, 8, 8, 8, generator=generator) + label
        return Batch(image, label, ("a", "b"))

    return batch


def patches(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    label = torch.randint(0, 2, (4,), generator=generator).float()
    image = torch.randn(4, 3, 32, 32, generator=generator) + label.view(-1, 1, 1, 1)
    return Batch(image.clamp(-1, 1), label, tuple("abcd"))


REGIONS = (Region("core", (1, 3), 3), Region("whole", (1, 2, 3), 2))
CHOOSE = trust.choose
APPS: dict[str, tuple[Any, Any, Callable[[int], Batch]]] = {
    "spleen": (lambda: unet3d(1, 2, (4, 8), 1), soft_dice, volumes(1, 2)),
    "brats": (
        lambda: segresnet3d(4, 2, 8, (1, 1), dropout=0.2),
        lambda logits, label: soft_dice(logits, label, REGIONS),
        volumes(4, 4),
    ),
    "pathology": (lambda: resnet18_fcn(32), partial(binary_cross_entropy, smoothing=0.05), patches),
}


@dataclass
class Made:
    """The steps of a small run, and what they change."""

    steps: Steps
    state: TrainingState
    network: nn.Module
    batch: Callable[[int], Batch]

    def losses(self, count: int) -> list[float]:
        torch.manual_seed(1)  # of dropout
        for number in range(count):
            self.steps(self.batch(number))
        return self.state.losses[:count].tolist()


def make(
    app: str = "spleen",
    optimizer: str = "novograd",
    accumulate: int = 1,
    scale: float | None = None,
    rate_of: Callable[[Any], Any] = lambda rate: rate,
    precision: Precision = "fp32",
    device: torch.device = CPU,
) -> Made:
    torch.manual_seed(0)
    build, loss, batch = APPS[app]
    network = build().train().to(device)
    built = build_optimizer(optimizer, network.parameters(), 0.01)
    scaled = scale is not None or precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, growth_interval=4, enabled=scaled)
    state = TrainingState(Run(Path(), device, Clock(), False), network, built, scaler, COUNT)

    def compute(some: Batch, rate: float | Tensor) -> Tensor:
        return train_step(network, some, loss, built, scaler, precision, rate_of(rate), accumulate)

    def placed(number: int) -> Batch:
        some = batch(number)
        return Batch(some.image.to(device), some.label.to(device), some.cases)

    return Made(Steps(compute, RATES, state), state, network, placed)


def capture(made: Made) -> Made:
    with pytest.MonkeyPatch.context() as patch, emulated(patch):
        assert choose(made) == "steps: one CUDA graph per step"
    return made


def choose(made: Made, store: Path = Path()) -> str:
    """Return what `choose_steps` says, all lines that it says."""
    lines: list[str] = []
    run = SimpleNamespace(
        clock=Clock(), device=made.state.losses.device, ranks=SINGLE, say=lambda line, kind="note": lines.append(line)
    )
    batches = SimpleNamespace(epoch=lambda _: (made.batch(n) for n in (99,)), made_on_device=True)
    choose_steps(made.steps, batches, TrainingConfig(learning_rate=0.01, store=store), run)  # type: ignore[arg-type]
    return "\n".join(lines)


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("app", "count"),
    [
        ("spleen", 14),
        ("brats", 14),
        pytest.param("pathology", 12, marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_graph_have_the_losses_of_eager_ones(app, count):
    """At rates that rise and fall; with batch normalisation's running figures, and with dropout."""
    eager, graph = make(app), capture(make(app))
    assert largest(eager.losses(count), graph.losses(count)) < 1e-6
    assert all(map(torch.equal, eager.network.state_dict().values(), graph.network.state_dict().values()))


def test_accumulated_steps_of_a_graph_have_the_losses_of_eager_ones():
    assert largest(make(accumulate=2).losses(6), capture(make(accumulate=2)).losses(6)) < 1e-6


def test_a_graph_skips_the_steps_whose_gradients_overflow():
    """The loss scale falls there and grows elsewhere, on the device, as in eager steps."""
    overflows, scales = (0, 3, 4, 11), []
    runs = make(scale=2.0**10), make(scale=2.0**10)
    flag = torch.zeros(())
    for made in runs:
        weight = next(made.network.parameters())
        weight.register_hook(lambda gradient: torch.where(flag > 0, math.inf, gradient))
    capture(runs[1])
    for number in range(16):
        flag.fill_(number in overflows)
        before = [[each.clone() for each in made.network.parameters()] for made in runs]
        for made, was in zip(runs, before, strict=True):
            made.steps(made.batch(number))
            assert all(map(torch.equal, was, made.network.parameters())) == (number in overflows)
        scales.append({made.state._scaler.get_scale() for made in runs})
    assert [math.log2(*each) for each in scales] == [9, 9, 9, 8, 7, 7, 7, 7, 8, 8, 8, 7, 7, 7, 7, 8]
    eager, graph = (made.state.losses[:16].tolist() for made in runs)
    assert largest(eager, graph) < 1e-6


def changed(made: Made) -> list[Tensor]:
    return [each.clone() for each in (*made.state.tensors(), made.state.losses, torch.get_rng_state())]


def test_a_rate_that_a_graph_freezes_is_found_in_the_trial(monkeypatch):
    """And would not go unseen in the losses."""
    made = make(rate_of=float)
    with emulated(monkeypatch):
        assert choose(made) == "steps: eager (see the trial above)"
    assert made.losses(2) == pytest.approx(make().losses(2), rel=1e-6)
    made.steps.hold(made.batch(99))
    made.steps._replay = record(made.steps._on_sample)
    assert largest(make().losses(8)[6:], made.losses(8)[6:]) > 1e-4


def test_the_work_of_a_step_is_counted_on_the_largest_batch():
    """MONAI's last batch of an epoch may be smaller."""
    made = make()
    some = made.batch(0)
    made.steps(some)
    made.steps(Batch(some.image[:1], some.label[:1], some.cases[:1]))
    assert made.steps.shape == (2, 1, 8, 8, 8)


@pytest.mark.parametrize("known", [False, True])
def test_a_capture_that_fails_leaves_eager_steps_and_all_as_it_was(known, monkeypatch, tmp_path):
    """Also where an earlier start of the program has found it right."""

    def refuse(body: Callable[[], object]) -> Callable[[], object]:
        body()
        raise RuntimeError("operation not permitted when stream is capturing\nwith a long story")

    made = make("brats")
    before = changed(made)
    with emulated(monkeypatch) as patch:
        patch.setattr(trust, "record", refuse)
        patch.setattr(trust, "choose", (lambda *_: ["captured step"]) if known else CHOOSE)
        said = choose(made, tmp_path)
    reason = "operation not permitted when stream is capturing"
    assert f"steps: eager (capture failed: {reason})" in said if known else f"failed: RuntimeError {reason}" in said
    assert all(map(torch.equal, before, changed(made)))
    assert made.losses(3) == make("brats").losses(3)


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_is_taken_and_a_trial_changes_nothing(faster, monkeypatch, tmp_path):
    made, rounds = make("brats"), iter([2.0, 1.0] if faster else [1.0, 2.0])  # the eager steps are timed first
    before = changed(made)
    with emulated(monkeypatch) as patch:
        patch.setattr(trust, "choose", CHOOSE)
        patch.setattr(trust, "_seconds", lambda work: next(rounds))
        said = choose(made, tmp_path)
    assert (
        "captured step (2.00 times as fast)\nsteps: one CUDA graph" in said
        if faster
        else "captured step (0.50)" in said
    )
    assert all(map(torch.equal, before, changed(made)))
    assert (made.steps._replay is not None) == faster


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_what_steps_compute_while_kernels_are_compiled_is_forgotten(scale, monkeypatch, tmp_path):
    """As none of our kernels is launched then, all may be NaN, and stay so where it is not put back."""
    made, compiling = make("brats", scale=scale), []

    @contextmanager
    def garbage():
        compiling.append(1)
        hook = made.network.register_forward_hook(lambda *given: given[-1] * math.nan)
        yield
        hook.remove()

    with emulated(monkeypatch) as patch:
        patch.setattr(trust, "choose", CHOOSE)
        patch.setattr(trust, "_seconds", lambda work: 1.0)
        patch.setattr(trust, "_compiling", garbage)
        said = choose(made, tmp_path)
    assert compiling == [1]
    assert "captured step (1.00)" in said
    assert made.losses(4) == make("brats", scale=scale).losses(4)


def test_a_batch_of_another_size_is_done_eagerly():
    runs = make(), capture(make())
    for number in range(3):
        batch = runs[0].batch(number)
        some = Batch(batch.image[:1], batch.label[:1], batch.cases[:1]) if number == 1 else batch
        for made in runs:
            made.steps(some)
    assert largest(*(made.state.losses[:3].tolist() for made in runs)) < 1e-6


def test_the_cutting_of_crops_is_captured_where_the_cases_lie_on_the_device():
    """A step then copies one table; a batch of cases elsewhere, a smart cache's for instance, is done eagerly."""
    caches = held_on(CPU), held_on(CPU)
    batches = [crop_batches([cache], 4, 2, intensity=0.3) for cache in caches]
    runs = make(), make()
    for made in runs:
        made.batch = lambda number: next(batches[0].epoch(number))
    capture(runs[1])
    for number in range(6):
        drafts = [next(batches[number == 4].epoch(number)) for _ in runs]
        for made, draft in zip(runs, drafts, strict=True):
            made.steps(draft)
        assert ["image" in vars(draft) for draft in drafts] == [True, number == 4]
    assert largest(*(made.state.losses[:6].tolist() for made in runs)) < 1e-6


@pytest.mark.parametrize("app", ["spleen", "brats", pytest.param("pathology", marks=pytest.mark.slow)])
def test_steps_are_ready_for_a_graph(app):
    """Two steps at two rates: the same operators with the same numbers, shapes and strides; nothing waits."""
    made = make(app)
    made.losses(1)
    traces = [Trace(), Trace()]
    with refuse_host_sync():
        for number, trace in enumerate(traces, 1):
            batch = made.batch(number)
            with trace:
                made.steps(batch)
    assert traces[0].frozen() == traces[1].frozen()


def test_a_rate_of_the_hosts_is_not_ready_for_a_graph():
    made = make(rate_of=float)
    made.losses(1)
    traces = [Trace(), Trace()]
    for number, trace in enumerate(traces, 1):
        with trace:
            made.steps(made.batch(number))
    one, other = (trace.frozen() for trace in traces)
    assert [a[0] for a, b in zip(one, other, strict=True) if a != b] == ["aten::_fused_sgd_"]


@pytest.mark.parametrize("name", ["adam", "sgd", "monai_novograd"])
def test_other_optimizers_get_their_rates_from_the_host(name):
    made = make(optimizer=name)
    made.losses(3)
    assert made.state.optimizer.param_groups[0]["lr"] == RATES[2]


def test_when_no_graph_is_captured():
    config, made = TrainingConfig(optimizer="novograd"), make()
    cuda = Run(Path(), torch.device("cuda"), Clock(), False)
    batches = replace(tiny_batches(cuda.ranks, 1), made_on_device=True)

    def reason(batches=batches, made=made, config=config, run=cuda):
        return why_eager(batches, made.state, config, run)

    assert reason() is None
    assert reason(config=replace(config, graph="off")) == "--graph off"
    assert reason(run=replace(cuda, device=CPU)) == "no CUDA graphs on a cpu"
    assert reason(run=replace(cuda, ranks=Ranks(0, 2))) == "several ranks exchange gradients"
    assert reason(made=make(optimizer="adam")) == "the optimizer novograd reads its learning rate on the host"
    assert reason(batches=replace(batches, made_on_device=False)) == "batches are not made on the device"


def weights_of(folder: Path) -> dict[str, Tensor]:
    return last_weights(folder)


@pytest.mark.parametrize("norm", ["batch", pytest.param("group", marks=pytest.mark.slow)])
def test_a_run_of_captured_steps_equals_an_eager_one_and_goes_on_to_the_bit(norm, tmp_path, monkeypatch):
    """Stopped within an epoch; the process that goes on captures anew."""
    wish = {"norm": norm, "steps": 3}
    train({**wish, "run": tmp_path / "eager"})
    assert "steps: eager (no CUDA graphs on a cpu)" in (tmp_path / "eager" / "run.log").read_text()
    with emulated(monkeypatch):
        train({**wish, "run": tmp_path / "whole"})
        assert "steps: one CUDA graph per step" in (tmp_path / "whole" / "run.log").read_text()
        with pytest.raises(ValueError, match="case_7"):
            train({**wish, "run": tmp_path / "cut", "checkpoint_seconds": 0, "at": 4, "who": 0, "what": "fail"})
        train({**wish, "run": tmp_path / "cut", "resume": True})
    for name in ("whole", "cut"):
        found, wanted = weights_of(tmp_path / name), weights_of(tmp_path / "eager")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert golden.recorded(tmp_path / name) == golden.recorded(tmp_path / "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_graph_on_the_gpu_equals_eager_steps(app, precision):
    """Of real kernels, some of which add in another order each time: later losses drift apart."""
    runs = [make(app, precision=precision, device=torch.device("cuda")) for _ in range(2)]
    runs[1].steps.hold(runs[1].batch(99))
    runs[1].steps.capture()
    eager, graph = (made.losses(5) for made in runs)
    assert graph == pytest.approx(eager, rel=0.02)
    assert graph[0] == pytest.approx(eager[0], rel=1e-4)
