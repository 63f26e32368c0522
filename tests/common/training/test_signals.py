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
