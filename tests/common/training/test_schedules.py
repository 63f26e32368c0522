import math

import pytest

from common.training.schedules import lr_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    assert [lr_factor(schedule, step, 4) for step in range(5)] == pytest.approx(expected)


def test_a_step_outside_the_run_is_a_programmers_error():
    with pytest.raises(AssertionError, match="step 5 of 4"):
        lr_factor("linear", 5, 4)
