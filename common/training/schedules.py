"""Learning-rate schedules: pure functions of the part of the run that is done."""

import math
from collections.abc import Callable
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


def lr_factor(schedule: ScheduleName, step: int, total_steps: int) -> float:
    """Return what the base learning rate is multiplied by at a step of a run of `total_steps` steps.

    Args:
        schedule: "constant" stays 1; "linear" and "cosine" fall from 1 at step 0 to 0 after the last step.
        step: steps done before this one, 0 to `total_steps`.
        total_steps: steps in the whole run, at least 1.
    """
    assert 0 <= step <= total_steps, f"step {step} of {total_steps}"
    return SCHEDULES[schedule](step / total_steps)


SCHEDULES: dict[ScheduleName, Callable[[float], float]] = {  # from the part of the run that is done, 0 to 1
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
