"""Fair timing on a noisy machine: the sides run in turn, and the median of the rounds' ratios is quoted."""

import statistics
import time
from collections.abc import Callable, Mapping

from common.observe.timing import synchronise


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Return the seconds of each side in each round; with `warm_up` one more round comes first and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + warm_up):
        for name, side in sides.items():
            synchronise()
            began = time.perf_counter()
            side()
            synchronise()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return the median over the rounds of slow / fast, to two decimals."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 2)


def median(seconds: list[float]) -> float:
    """Return the median to a tenth of a millisecond."""
    return round(statistics.median(seconds), 4)
