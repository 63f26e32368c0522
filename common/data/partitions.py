"""Which cases each process trains on: equal shares of the dataset, dealt anew from time to time."""

import numpy as np

from common.data.draws import keyed_uniforms

_NO_CROP = 2**62  # in the place of a crop number, so that the deal and the crops never share random numbers


def partition_cases(count: int, partitions: int, number: int, seed: int = 0, round: int = 0) -> np.ndarray:
    """Return the indices of the cases of one partition, int64; each of range(count) is in exactly one partition.

    Round 0 deals in turn: number, number + partitions, ... A later round permutes all cases first, with a permutation
    that depends on (seed, round) alone: with `round = epoch // E`, the cases are reshuffled globally every E epochs.

    Args:
        count: cases of the dataset.
        partitions: in all; their sizes differ by one at most.
        number: the partition wanted, from 0.
        seed: of the permutations.
        round: how many times the cases have been dealt before.

    Raises:
        ValueError: there are more partitions than cases, or no such partition.
    """
    if not 1 <= partitions <= count:
        raise ValueError(f"partitions {partitions}: between 1 and the {count} cases, so that none is empty")
    if not 0 <= number < partitions:
        raise ValueError(f"partition {number}: between 0 and {partitions - 1}, of {partitions} partitions")
    dealt = np.arange(count, dtype=np.int64)
    if round:
        draws = keyed_uniforms(seed, round, dealt, np.full(count, _NO_CROP), 1)[:, 0]
        dealt = np.argsort(draws, kind="stable").astype(np.int64)
    return dealt[number::partitions]
