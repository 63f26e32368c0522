"""Random numbers that depend on their key alone, and the deal of the cases to the processes that follows from them.

So runs resume, and spread over processes, exactly.
"""

import numpy as np
import numpy.typing as npt

_NO_CROP = 2**62  # in the place of a crop number, so that the deal and the crops never share random numbers


def keyed_uniforms(seed: int, epoch: int, cases: np.ndarray, crops: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers [N, count] in [0, 1), float64, a pure function of (seed, epoch, case, crop, place).

    Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), its
    finaliser applied once for each part of the key.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.full(len(cases), seed, np.uint64))
        for part in (np.uint64(epoch), cases.astype(np.uint64), crops.astype(np.uint64)):
            key = _mix(key ^ part)
        bits = _mix(key[:, None] ^ np.arange(count, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


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


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
