import os
import signal
import threading

import pytest

from medspeed.common.signals import STOP_SIGNALS, ended_by_signals, give_back_signals, take_signals


def handlers():
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_block_as_an_error_does_and_is_given_back(number):
    before = handlers()
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert handlers() == before


def test_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_signal_is_taken_outside_of_the_main_thread():
    before, found = handlers(), []

    def work():
        with ended_by_signals():
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_handler_that_python_does_not_know_becomes_the_default():
    """A library in C may have set one; Python shows it as None, and cannot set it again."""
    before = take_signals([signal.SIGUSR1], lambda *_: None)
    give_back_signals({signal.SIGUSR1: None})
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    give_back_signals(before)
