import pytest

from tests.kernels import run_interpreted


@pytest.mark.slow
def test_the_trials_find_what_is_wrong():
    run_interpreted("tests/common/training/check_trials.py")
