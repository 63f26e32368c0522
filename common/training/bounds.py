"""The bounds of what the apps' configurations share; it loads no torch, so that a wrong flag answers at once."""

import math
from collections.abc import Iterable
from typing import Any

Check = tuple[str, bool, str]  # field, whether it holds, its bound in words

_AT_LEAST_ONE = (
    "crops_per_case", "batch_size", "accumulate", "partitions", "reshuffle_every", "window_batch", "residual_units",
    "filters", "epochs", "validate_every", "workers", "cache_cases", "patches_per_slide",
)  # fmt: skip


def check_bounds(config: Any, extra: Iterable[Check] = ()) -> None:  # noqa: ANN401 - each app's own dataclass
    """Check the fields that a configuration has of those that the apps share, then the app's own.

    Raises:
        ValueError: names the field, the value and the bound.
    """
    counts = [(name, _absent(config, name) or getattr(config, name) >= 1, "at least 1") for name in _AT_LEAST_ONE]
    checks: list[Check] = [
        *counts,
        ("seed", 0 <= config.seed < 2**63, "0 or more, below 2 ** 63"),
        ("learning_rate", 0 < config.learning_rate < math.inf, "above 0"),
        ("intensity", _absent(config, "intensity") or 0 <= config.intensity < 1, "in [0, 1)"),
        ("overlap", _absent(config, "overlap") or 0 <= config.overlap < 1, "in [0, 1)"),
        ("flip_axes", set(getattr(config, "flip_axes", None) or "") <= set("xyz"), "letters of xyz, or empty"),
        ("checkpoint_seconds", config.checkpoint_seconds >= 0, "0 or more"),
        ("monitor", 0 <= config.monitor <= 3600, "0 (none) to 3600 seconds"),
        ("spacing", _absent(config, "spacing") or min(config.spacing) > 0, "above 0 mm on each axis"),
        *extra,
    ]
    for name, holds, bound in checks:
        if not holds:
            raise ValueError(f"{name} {getattr(config, name)}: must be {bound}")


def check_divides(name: str, size: tuple[int, int, int] | None, levels: int | None) -> None:
    """Check that a size fits a network that halves it `levels` times; what is not chosen yet fits.

    Raises:
        ValueError: a side does not divide by what the levels halve.
    """
    if size is None or levels is None:
        return
    if any(side < 1 or side % 2**levels for side in size):
        raise ValueError(f"{name} {size}: each side must divide by {2**levels} ({levels} stride-2 levels)")


def _absent(config: Any, name: str) -> bool:  # noqa: ANN401
    return getattr(config, name, None) is None
