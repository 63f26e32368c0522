import os
import signal
from contextlib import ExitStack, closing

import pytest

from medspeed.common.ranks import SINGLE
from medspeed.common.training import setup
from medspeed.common.training.setup import GracefulStop


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
def test_the_first_signal_is_noted_and_names_the_exit_status(number, status):
    saved: list[int] = []
    with closing(GracefulStop(SINGLE, lambda: saved.append(1))) as stop:
        stop.check()
        stop.exit_if_requested()
        os.kill(os.getpid(), number)
        assert stop.requested
        for leave in (stop.check, stop.exit_if_requested):
            with pytest.raises(SystemExit) as end:
                leave()
            assert end.value.code == status
    assert saved == [1]


def test_a_signal_while_the_handlers_are_set_is_noted(monkeypatch):
    def interrupted(numbers, handler):
        handler(signal.SIGTERM, None)
        return ExitStack()

    monkeypatch.setattr(setup, "take_signals", interrupted)
    assert GracefulStop(SINGLE, lambda: None).requested


def test_a_shutdown_s_second_signal_changes_nothing():
    """It sends SIGTERM and SIGHUP together; a wrapper may hand on a SIGTERM that came here, too."""
    with closing(GracefulStop(SINGLE, lambda: None)) as stop:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested == signal.SIGTERM


def test_the_second_ctrl_c_acts_as_usual():
    with closing(GracefulStop(SINGLE, lambda: None)):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with closing(GracefulStop(SINGLE, lambda: None)):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with closing(GracefulStop(SINGLE, lambda: None)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


class Pair:
    """Two ranks of which the other one knows `told`; stands for `torch.distributed` and for `Ranks`."""

    world, control = 2, None

    def __init__(self, monkeypatch):
        self.told, self.waits, self.left = 0, 0, 0
        monkeypatch.setattr("torch.distributed.all_reduce", self.all_reduce)

    def all_reduce(self, known, *_, **__):
        known.fill_(max(int(known), self.told))
        return self

    def wait(self):
        self.waits += 1

    def leave(self):
        self.left += 1


def test_what_another_rank_was_told_counts_one_step_later(monkeypatch):
    pair = Pair(monkeypatch)
    with closing(GracefulStop(pair, list)) as stop:  # type: ignore[arg-type]
        stop.after_step()
        pair.told = signal.SIGTERM
        known = []
        for _ in range(2):
            stop.after_step()
            known.append(bool(stop.requested))
        assert known == [False, True]
        stop.check()  # several ranks never break off a validation
        with pytest.raises(SystemExit) as end:
            stop.exit_if_requested()
    assert end.value.code == 143
    assert (pair.waits, pair.left) == (2, 1)


def test_among_several_the_own_signal_counts_only_when_all_know_and_a_second_changes_nothing(monkeypatch):
    with closing(GracefulStop(Pair(monkeypatch), list)) as stop:  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
        stop.agree()
        with pytest.raises(SystemExit) as end:
            stop.exit_if_requested()
    assert end.value.code == 130
