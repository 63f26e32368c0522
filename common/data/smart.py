"""The smart cache: some cases are held at a time, and each epoch a few of them make way for the next ones.

Source: monai.data.SmartCacheDataset; here which cases an epoch holds depends on its number alone, so that runs resume.
"""

import math

import numpy as np


def smart_indices(count: int, held: int, replaced: int, epoch: int) -> np.ndarray:
    """Return the indices [held] of the cases that a smart cache holds in one epoch, counted from 0.

    After each epoch the first `replaced` cases make way, and the next ones in the order of the dataset follow.

    Raises:
        ValueError: more cases are to be held than there are.
    """
    if not 1 <= held <= count:
        raise ValueError(f"smart cache of {held} cases: between 1 and the {count} cases that there are")
    return (epoch * replaced + np.arange(held)) % count


def smart_replaced(count: int, held: int, replace_rate: float) -> int:
    """Return how many of the held cases a smart cache replaces after each epoch, as MONAI's does.

    Raises:
        ValueError: the rate is no share above 0.
    """
    if not 0 < replace_rate <= 1:
        raise ValueError(f"replace_rate {replace_rate}: above 0 and at most 1")
    return min(math.ceil(held * replace_rate), count - held)
