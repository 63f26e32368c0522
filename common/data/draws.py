"""Random numbers that depend on their key alone, so that runs resume, and spread over processes, exactly."""

import numpy as np
import numpy.typing as npt


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


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
