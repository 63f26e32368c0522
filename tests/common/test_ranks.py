"""That several ranks compute what one process would, and that an error of one is seen and ends all."""

import json

import pytest
import torch

from common.ranks import SINGLE, _brief, _is_lost, join_ranks
from tests.common.training.exact_worker import everything, twenty_steps
from tests.common.training.fit_worker import train

WORKER, FIT = "tests.common.training.exact_worker", "tests.common.training.fit_worker"


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return everything()


@pytest.fixture(scope="module")
def computed(start_ranks, tmp_path_factory):
    """What each of two, and each of three ranks has computed."""
    found = {}
    for world in (2, 3):
        folder = tmp_path_factory.mktemp("ranks")
        programs = start_ranks(world, WORKER, str(folder))
        ends = [program.wait() for program in programs]
        assert [status for status, _ in ends] == [0] * world, ends
        found[world] = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return found


@pytest.fixture(params=[2, 3])
def found(request, computed):
    return computed[request.param]


@pytest.fixture
def two(computed):
    return computed[2]


def largest_difference(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_parts_of_a_list_come_back_in_its_order_on_every_rank(found):
    for each in found:
        gathered = each["gather"]
        for length in (0, 1, 2, 6, 7):
            assert gathered[length] == [f"case {i}" for i in range(length)]
        assert [tensor.tolist() for tensor in gathered[-1]] == [[float(i)] * 2 for i in range(5)]


def test_what_the_leader_has_all_have(found):
    assert [each["leader"] for each in found] == [{"folder": "run of rank 0"}] * len(found)
    assert [each["once"] for each in found] == [0] * len(found)


def test_the_sum_has_the_gradient_of_one_process(found, alone):
    value, gradient = alone["sum"]
    for each in found:
        assert each["sum"][0] == pytest.approx(value)
        assert torch.allclose(each["sum"][1], gradient)


def test_running_figures_become_their_mean_and_counts_stay(found):
    for each in found:
        assert each["buffers"]["running_mean"].tolist() == [pytest.approx((len(found) - 1) / 2)] * 3
        assert each["buffers"]["num_batches_tracked"] == 0


def test_twenty_steps_of_two_ranks_are_those_of_one_process(two, alone):
    """Group normalisation, batch Dice over both ranks, Novograd."""
    losses, weights = alone["group dice"]
    assert losses[-1] < 0.5 * losses[0]
    for each in two:
        assert each["group dice"][0] == pytest.approx(losses, abs=1e-4)
        assert largest_difference(each["group dice"][1], weights) <= 1e-5


def test_batch_normalisation_sees_its_own_rank_only(two, alone):
    """Not a mistake: normalising over all ranks would cost a collective per layer; the weights of the ranks agree."""
    assert largest_difference(two[0]["batch dice"][1], two[1]["batch dice"][1]) == 0
    assert largest_difference(two[0]["batch dice"][1], alone["batch dice"][1]) > 1e-3


def test_micro_batches_are_exact_for_a_mean_over_samples(two, alone):
    losses, weights = twenty_steps(SINGLE, "group", "mean")
    for each in [alone, *two]:
        assert each["two micro-batches, mean"][0] == pytest.approx(losses, abs=1e-4)
        assert largest_difference(each["two micro-batches, mean"][1], weights) <= 1e-5


def test_micro_batches_are_another_loss_for_a_batch_as_a_whole(alone):
    losses, _ = alone["group dice"]
    assert alone["two micro-batches, dice"][0][0] != pytest.approx(losses[0], abs=1e-4)


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="accumulate 3: must divide the 4 crops of a batch"):
        train({"run": str(tmp_path / "run"), "accumulate": 3})


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks("cpu") as ranks:
        assert ranks is SINGLE
        ranks.barrier()
        assert ranks.leader
        assert ranks.shard([1, 2, 3]) == ranks.gather([1, 2, 3]) == [1, 2, 3]


def test_a_leaders_error_before_training_is_one_line_and_ends_all(start_ranks, tmp_path):
    (tmp_path / "taken").touch()
    programs = start_ranks(2, FIT, json.dumps({"run": str(tmp_path)}))
    statuses, texts = zip(*(program.wait(60) for program in programs), strict=True)
    assert statuses == (1, 1), texts
    assert texts[0].startswith(f"rank 0 of 2: error: {tmp_path}: the run folder is not empty")
    assert texts[0].count("\n") == 1
    assert texts[1] == ""


GLOO = "[/__w/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31646: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(f"{GLOO}. This is typically caused by a remote worker hanging."), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (torch.distributed.DistNetworkError("The client socket has failed"), True),
        (RuntimeError("[enforce fail at pair.cc:473] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_lost_rank_is_told_from_a_programmers_error(error, lost):
    assert _is_lost(error) is lost


def test_an_error_of_gloo_is_shortened():
    error = RuntimeError(f"{GLOO}. This is typically caused by a remote worker hanging.")
    assert _brief(error) == "Read error [127.0.0.1]:31646: Connection reset by peer"
