import os
import signal

import pytest

from common.training.signals import GracefulStop, StopRequested


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_is_noted_and_names_the_exit_status(number, status):
    with GracefulStop() as stop:
        stop.check()
        stop.exit_if_requested()
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(SystemExit) as end:
            stop.exit_if_requested()
    assert end.value.code == status


def test_the_second_signal_acts_as_usual():
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with GracefulStop():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


class Pair:
    """Two ranks of which the other one knows `told`; stands for `torch.distributed` and for `Ranks`."""

    world, control = 2, None

    def __init__(self, monkeypatch):
        self.told, self.waits, self.barriers = 0, 0, 0
        monkeypatch.setattr("torch.distributed.all_reduce", self.all_reduce)

    def all_reduce(self, known, *_, **__):
        known.fill_(max(int(known), self.told))
        return self

    def wait(self):
        self.waits += 1

    def barrier(self):
        self.barriers += 1


def test_what_another_rank_was_told_counts_one_step_later(monkeypatch):
    pair = Pair(monkeypatch)
    with GracefulStop(pair) as stop:  # type: ignore[arg-type]
        stop.after_step()
        pair.told = signal.SIGTERM
        known = []
        for _ in range(2):
            stop.after_step()
            known.append(stop.requested)
        assert known == [False, True]
        stop.check()  # several ranks never break off a validation
        with pytest.raises(SystemExit) as end:
            stop.exit_if_requested()
    assert end.value.code == 143
    assert (pair.waits, pair.barriers) == (2, 1)


def test_among_several_the_own_signal_counts_only_when_all_know_and_a_second_changes_nothing(monkeypatch):
    with GracefulStop(Pair(monkeypatch)) as stop:  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
        stop.agree()
        with pytest.raises(SystemExit) as end:
            stop.exit_if_requested()
    assert end.value.code == 130
