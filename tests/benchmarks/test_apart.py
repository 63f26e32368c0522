"""Sides that run in a process of their own."""

import os

import pytest

from benchmarks.apart import apart


def test_a_side_runs_elsewhere_each_time_in_the_same_process():
    with apart(dict, {"number": os.getpid}, keep_freed=True) as sides:
        assert list(sides) == ["number"]
        first = sides["number"]()
        assert first == sides["number"]() != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_what_goes_wrong_there_is_raised_here():
    with pytest.raises(ZeroDivisionError), apart(divmod, 1, 0, keep_freed=False):
        pass
