"""That several ranks compute what one process would, and that an error of one is seen and ends all."""

import json
import socket
import threading

import pytest
import torch

from medspeed.common.ranks import BEAT_SECONDS, SILENT_SECONDS, SINGLE, Watch
from medspeed.common.run import join_ranks
from tests.common.rank_programs import free_port
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
    with pytest.raises(AssertionError, match="4 crops in 3 micro-batches"):
        train({"run": str(tmp_path / "run"), "accumulate": 3})


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks("cpu") as ranks:
        assert ranks is SINGLE
        ranks.leave()
        assert ranks.leader
        assert ranks.shard([1, 2, 3]) == ranks.gather([1, 2, 3]) == [1, 2, 3]


def test_the_leader_leaves_after_the_watch_of_the_last_rank(start_ranks, tmp_path):
    """Its end is that of the store, of which a watch that still asks it would complain."""
    wish = {"run": str(tmp_path), "lags": True, "steps": 1, "epochs": 1}
    leader, other = start_ranks(2, FIT, json.dumps(wish))
    assert (leader.wait(60)[0], (tmp_path / "stopped").is_file()) == (0, True)
    assert other.wait(60) == (0, "")


def test_a_leaders_error_before_training_is_one_line_and_ends_all(start_ranks, tmp_path):
    (tmp_path / "taken").touch()
    programs = start_ranks(2, FIT, json.dumps({"run": str(tmp_path), "lags": True}))
    assert programs[0].wait(60)[0] == 1
    assert (tmp_path / "stopped").is_file()  # so that the other rank's watch does not miss the leader's store
    statuses, texts = zip(*(program.wait(60) for program in programs), strict=True)
    assert statuses == (1, 1), texts
    assert texts[0].startswith(f"rank 0 of 2: error: {tmp_path}: the run folder is not empty")
    assert texts[0].count("\n") == 1
    assert texts[1] == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[/__w/gloo/pair.cc:537] Read error [::1]:316: Connection reset by peer\nadvice"),
            r"lost the other ranks \(Read error \[::1\]:316: Connection reset by peer\); there is no checkpoint",
        ),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), r"lost the other ranks \(Timed out waiting"),
        (torch.distributed.DistNetworkError("The client socket has failed"), "lost the other ranks"),
        (RuntimeError("[enforce fail at pair.cc:473] op.preamble.length <= op.nbytes. 8 vs 4"), "^.enforce fail"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "^mat1"),
    ],
)
def test_a_lost_rank_is_told_from_a_programmers_error(error, said, monkeypatch):
    for name, value in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr("medspeed.common.run.torchrun_place", lambda: (0, 1, 0))
    with pytest.raises((RuntimeError, ConnectionError), match=said), join_ranks("cpu"):
        raise error
    torch.distributed.destroy_process_group()


class Store:
    """What the watch needs of a store; `cut` says whether the link is gone."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.cut = False

    def set(self, key, value):
        assert not self.cut or self.fail()
        self.values[key] = value.encode()

    def multi_get(self, keys):
        assert not self.cut or self.fail()
        return [self.values[key] for key in keys]

    def fail(self):
        raise RuntimeError("Connection reset by peer")


@pytest.fixture
def watches(monkeypatch):
    """Some watches around one store, whose own threads do nothing: `beat_all` is their time."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    store = Store()

    def make(world):
        made = [Watch(store, rank, world) for rank in range(world)]  # type: ignore[arg-type]
        for rank in range(world):
            store.values[str(rank)] = b"0 0 0 somewhere"
        return made, store

    return make


def beat_all(watches, seconds, beating=(0, 1)):
    """Let time pass; return the first verdict of each rank, and after how many seconds it came."""
    verdicts = {}
    for number in range(1, int(seconds / BEAT_SECONDS) + 1):
        for rank in beating:
            verdict = watches[rank].beat()
            if verdict and rank not in verdicts:
                verdicts[rank] = (number * BEAT_SECONDS, verdict)
    return verdicts


def step_all(watches, count):
    for number in range(1, count + 1):
        for watch in watches:
            watch.at_step(number)
        assert not beat_all(watches, BEAT_SECONDS, range(len(watches)))


def test_a_rank_without_beats_is_dead(watches):
    made, _ = watches(2)
    assert not beat_all(made, 10)
    when, why = beat_all(made, 30, beating=[0])[0]
    assert when <= SILENT_SECONDS + BEAT_SECONDS  # rank 0 hears before rank 1 speaks
    assert why == f"rank 1 (host {socket.gethostname()}) has not responded for 16 s"


def test_a_cut_link_ends_every_rank(watches):
    made, store = watches(2)
    step_all(made, 3)
    store.cut = True
    assert not beat_all(made, SILENT_SECONDS - BEAT_SECONDS)
    verdicts = beat_all(made, BEAT_SECONDS)
    assert verdicts.keys() == {0, 1}
    assert verdicts[0][1].startswith("no contact with the other ranks for 16 s")


def test_a_main_thread_that_hangs_is_found_by_those_that_wait(watches):
    made, _ = watches(3)
    step_all(made, 4)
    for rank in (0, 2):
        made[rank].at_step(5)  # rank 1 stays in step 4
    verdicts = beat_all(made, 60, beating=[0, 1, 2])
    assert verdicts.keys() == {0, 2}
    for rank in (0, 2):
        assert verdicts[rank][1].startswith("rank 1 (host ")
        assert "hangs: it has been in step 4 for 40 s while this rank waits in step 5" in verdicts[rank][1]


def test_the_longest_step_before_stretches_what_counts_as_hung(watches):
    made, _ = watches(2)
    step_all(made, 4)
    made[0]._longest = 30.0
    made[0].at_step(5)
    assert beat_all(made, 200)[0][0] >= 4 * 30


def test_long_honest_work_and_the_first_step_are_never_hung(watches):
    made, _ = watches(2)
    made[0].at_step(1)
    made[1].at_step(1)
    made[0].at_step(1)
    assert not beat_all(made, 600)
    step_all(made, 4)
    made[0].at_step(0)  # it saves
    made[1].at_step(5)
    assert not beat_all(made, 600)
    made[0].at_step(5)
    assert not beat_all(made, 38)  # and back in the loop it has time to catch up
