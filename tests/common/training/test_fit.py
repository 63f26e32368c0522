from dataclasses import replace

import pytest
import torch
from torch import nn

from medspeed.common.clock import Clock
from medspeed.common.data.batches import crop_batches
from medspeed.common.data.cache import fill_cache
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.ranks import SINGLE, Ranks
from medspeed.common.run import Run
from medspeed.common.training.fit import train_step
from medspeed.common.training.losses import soft_dice
from medspeed.common.training.optimizers import build_optimizer
from medspeed.common.training.state import TrainingState, load_checkpoint, save_checkpoint
from medspeed.models.unet3d import unet3d
from tests.support import count_operators, refuse_host_sync

CPU = torch.device("cpu")
SCALER = torch.amp.GradScaler("cpu", enabled=False)


def held_on(device):
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 24, 24, 24, generator=generator).half()
    label = (image[0] > 0.7).to(torch.uint8)
    cases = [PreparedCase(name, image, label, grid=None) for name in "ab"]  # type: ignore[arg-type]
    return fill_cache(cases, "gpu", (16, 16, 16), device)


@pytest.fixture
def held():
    return held_on(CPU)


@pytest.fixture
def batches(held):
    return crop_batches([held], 4, 2)


def note(state, step, loss, *cases):
    state.losses[step] = loss
    state.note_step(step, cases)


class Rank(Ranks):
    """A rank that leads itself, whatever its number."""

    leader = True

    def __init__(self, rank):
        super().__init__(rank)


def run_in(folder, ranks=SINGLE):
    return Run(folder, CPU, Clock(), False, ranks)


def make(channels=(4, 8)):
    torch.manual_seed(0)
    network = unet3d(1, 2, channels, 1).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return network, build_optimizer("novograd", network.parameters(), 0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_fast_step_never_waits_for_the_device(precision, batches, tmp_path):
    """Batch, forward, loss, backward, optimizer, and the note of the loss; the first step sets up the optimizer."""
    network, optimizer = make()
    state = TrainingState(run_in(tmp_path), network, optimizer, SCALER, batches.steps_per_epoch)
    made = batches.epoch(0)
    train_step(network, next(made), soft_dice, optimizer, SCALER, precision, 0.01)
    with refuse_host_sync():
        for step, batch in enumerate(made, 1):
            loss = train_step(network, batch, soft_dice, optimizer, SCALER, precision, 0.01)
            note(state, step, loss, *batch.cases)
    assert len(state.checked()) == batches.steps_per_epoch


def test_the_guides_parts_do_wait(batches):
    """The test above can fail: MONAI's Novograd reads a value per parameter."""
    network, _ = make()
    optimizer = build_optimizer("monai_novograd", network.parameters(), 0.01)
    with pytest.raises(AssertionError, match="makes the host wait"), refuse_host_sync():
        train_step(network, next(batches.epoch(0)), soft_dice, optimizer, SCALER, "fp32", 0.01)


def test_a_batch_takes_the_same_few_operators_whatever_its_size(held):
    counts = []
    for size in (1, 4):
        made = crop_batches([held], 4, size).epoch(0)
        next(made)
        with count_operators() as counted:
            next(made)
        counts.append(sum(counted.values()))
    assert counts[0] == counts[1] <= 50


def test_the_loss_falls(batches):
    network, optimizer = make()
    losses = [
        float(train_step(network, batch, soft_dice, optimizer, SCALER, "fp32", 0.01))
        for epoch in range(8)
        for batch in batches.epoch(epoch)
    ]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_the_learning_rate_of_a_step_is_the_one_given(batches):
    network, optimizer = make()
    train_step(network, next(batches.epoch(0)), soft_dice, optimizer, SCALER, "fp32", 0.125)
    assert optimizer.param_groups[0]["lr"] == 0.125


def state_of(folder, per_epoch):
    network = nn.Linear(2, 2)
    return TrainingState(run_in(folder), network, torch.optim.Adam(network.parameters()), SCALER, per_epoch)


def test_ranks_that_save_together_keep_the_mean_of_their_statistics(tmp_path, monkeypatch):
    averaged: list[nn.Module] = []
    monkeypatch.setattr(Ranks, "average_buffers", lambda ranks, network: averaged.append(network))
    state = state_of(tmp_path, 3)
    state.save()
    assert averaged == []
    state.save(together=True)
    assert averaged == [state._network]


def test_a_checkpoint_holds_one_learning_rate_not_those_of_all_steps(tmp_path):
    state, rates = state_of(tmp_path, 3), torch.linspace(1, 0, 100_000)
    state.optimizer.param_groups[0]["lr"] = rates[3]
    state.save()
    assert (tmp_path / "checkpoints" / "last").stat().st_size < 100_000
    assert state.optimizer.param_groups[0]["lr"].data_ptr() == rates[3].data_ptr()  # the steps still read it there


def test_a_state_comes_back_whole(tmp_path):
    state = state_of(tmp_path, 3)
    state.epoch = 2
    note(state, 0, 0.5, "a")
    state.note_validation(0.75, 2)
    state.keep_best({})
    state.save()
    other = state_of(tmp_path, 3)
    other.restore()
    assert (other.epoch, other.step, other.steps_done) == (2, 1, 7)
    assert other.checked() == [0.5]
    assert (other.best, other.best_epoch) == (0.75, 2)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_random_numbers_of_cuda_go_on_where_the_checkpoint_stands(rank, tmp_path, monkeypatch):
    device = {"state": torch.tensor([5, 12]).view(torch.uint8)}
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda _: device["state"])
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda state, _: device.update(state=state))
    for found in (12, 4096):
        state = TrainingState(run_in(tmp_path, Rank(rank)), nn.Linear(2, 2), make()[1], SCALER, 3)
        state._on_cuda = True
        state.restore()
        assert device["state"].view(torch.int64).tolist() == [5 + rank, found]
        device["state"] = torch.tensor([5, 4096]).view(torch.uint8)
        state.save()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_goes_on_to_the_bit(tmp_path, device):
    run, ones = replace(run_in(tmp_path), device=torch.device(device)), torch.ones(1000, device=device)
    network = nn.Linear(2, 2).to(device)
    states = [TrainingState(run, network, torch.optim.Adam(network.parameters()), SCALER, 3) for _ in range(2)]
    nn.functional.dropout(ones)
    states[0].save()
    wanted = nn.functional.dropout(ones)
    states[1].restore()
    assert torch.equal(nn.functional.dropout(ones), wanted)


def test_another_number_of_steps_per_epoch_is_refused(tmp_path):
    state_of(tmp_path, 3).save()
    with pytest.raises(ValueError, match="the checkpoint has 3 steps per epoch, this run has 4"):
        state_of(tmp_path, 4).restore()


def test_a_bad_loss_is_found_before_it_is_saved(tmp_path):
    state = state_of(tmp_path, 3)
    state.save()
    note(state, 0, 1.0, "a")
    note(state, 1, float("inf"), "b", "c")
    with pytest.raises(FloatingPointError, match=r"loss inf at step 2 \(epoch 1\), cases b, c"):
        state.save()
    other = state_of(tmp_path, 3)
    other.restore()
    assert other.step == 0


def test_weights_that_a_gradient_made_bad_are_never_saved(tmp_path):
    """The loss of the step is finite; also where it is the very last one."""
    state = state_of(tmp_path, 1)
    state.save()
    with torch.no_grad():
        state._network.weight[0, 1] = float("nan")
    note(state, 0, 1.0, "a")
    for look in (state.save, state.checked):
        with pytest.raises(FloatingPointError, match=r"non-finite weights after step 1 \(epoch 1\)"):
            look()
    other = state_of(tmp_path, 1)
    other.restore()
    assert other.step == 0
    other._network.register_buffer("nothing", torch.zeros(0))
    assert other.checked() == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("losses", "x", "invalid data type 'str'"),
        ("epoch", -5, "epoch -5, step 1 with 1 losses"),
        ("step", 10**9, "epoch 0, step 1000000000"),
        ("epoch", "x", "'str' and 'int'"),
        ("optimizer", {}, "param_groups"),
        ("optimizer", 5, "'int' object"),
        ("random", None, "ByteTensor"),
        ("random", torch.zeros(3), "RNG state"),
        ("seconds", {"train": "x"}, "'float' and 'str'"),
        ("random", ..., "other fields than this version: random"),
        ("unheard", 1, "other fields than this version: unheard"),
    ],
)
def test_a_damaged_state_is_one_line(tmp_path, name, value, words):
    state = state_of(tmp_path, 3)
    note(state, 0, 0.5, "a")
    state.save()
    weights, content = load_checkpoint(tmp_path / "checkpoints") or ({}, {})
    content[name] = value
    save_checkpoint(
        tmp_path / "checkpoints", (9, 9), weights, {name: each for name, each in content.items() if each is not ...}
    )
    with pytest.raises(ValueError, match=f"last: does not fit this run .*{words}"):
        state_of(tmp_path, 3).restore()


def test_another_networks_checkpoint_is_one_line(tmp_path):
    state_of(tmp_path, 3).save()
    network = nn.Linear(3, 2)
    other = TrainingState(run_in(tmp_path), network, torch.optim.Adam(network.parameters()), SCALER, 3)
    with pytest.raises(ValueError, match="does not fit this run"):
        other.restore()


def test_only_a_metric_that_is_not_lower_is_a_new_best(tmp_path):
    state = state_of(tmp_path, 1)
    assert [state.note_validation(value, epoch) for epoch, value in enumerate([0.0, 0.5, 0.5, 0.4, 0.6])] == [
        True, True, True, False, True]  # fmt: skip


def test_a_rank_that_does_not_lead_saves_nothing(tmp_path):
    state = TrainingState(run_in(tmp_path, Ranks(rank=1, world=2)), nn.Linear(2, 2), make()[1], SCALER, 3)
    note(state, 0, float("nan"), "a")
    before = state.saved
    state.save()
    assert not list(tmp_path.iterdir())
    assert state.saved > before  # and it counts from here, as the leader does


@pytest.mark.gpu
def test_fp16_with_loss_scaling_learns():
    cuda = torch.device("cuda")
    network, _ = make()
    network = network.to(cuda)
    optimizer = build_optimizer("novograd", network.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda")
    made = crop_batches([held_on(cuda)], 4, 2)
    losses = [
        float(train_step(network, batch, soft_dice, optimizer, scaler, "fp16", 0.01))
        for epoch in range(8)
        for batch in made.epoch(epoch)
    ]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
