"""What bounds a training: from measured times to a verdict in words, with the switch to turn and what it would give."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Bound = Literal[
    "disk", "decode", "preparation", "augmentation", "workers", "validation", "checkpointing", "logging",
    "kernel launch", "compute", "nothing",
]  # fmt: skip

# A share below which no fix is worth the reader's time, and the gain from which an alternative is.
_WORTH, _GAIN = 0.15, 1.15
# Twice the batch for less than this many times the time: the step is bound by what does not grow with it.
_HIDDEN = 1.4
_OWN_BOUND: dict[str, Bound] = {"saved": "checkpointing", "logged": "logging", "validated": "validation"}
_LATE = "training waits for batches"
_TEXTS: dict[Bound, str] = {
    "disk": f"{_LATE}, limited by the disk",
    "decode": f"{_LATE}, limited by file decoding",
    "preparation": f"{_LATE}, limited by deterministic transforms",
    "augmentation": f"{_LATE}, limited by random transforms",
    "workers": f"{_LATE}: too few workers",
    "validation": "validation dominates",
    "checkpointing": "writing checkpoints dominates",
    "logging": "logging dominates",
    "kernel launch": "the steps are too small: most of their time is independent of the batch size",
    "compute": "the device is busy, but another setting is faster",
}


@dataclass(frozen=True)
class Measured:
    """A training's times, in seconds."""

    # of the whole training, by a short one: "waited" for batches, "computed", "saved", "logged", "validated"
    times: Mapping[str, float]
    # of making a batch alone: reading files, decoding, what is the same in every epoch, what is not; if it applies
    batch: Mapping[Bound, float]
    step: float  # computing one step
    workers: int | None  # that make batches side by side; None where their number is not the user's to choose
    cores: int  # that they could use
    doubled: float | None = None  # the step with twice the batch, where that could be measured
    alternatives: Mapping[str, float] = field(default_factory=dict)  # the step with another setting, by its flag
    switches: Mapping[Bound, str] = field(default_factory=dict)  # what to turn for each bound, where there is something


@dataclass(frozen=True)
class Verdict:
    """What bounds a training."""

    bound: Bound
    share: float  # of the training's time that it takes
    gain: float  # how many times as fast the training would be without it, at best
    text: str
    shares: dict[str, float]  # of the training's time, by name


def diagnose(measured: Measured) -> Verdict:
    """Name what bounds a training.

    What takes the largest share besides computing is named if it takes 15 percent or more; waiting for batches is
    traced to what makes them. Else computing itself is looked at: whether it is mostly what each step costs whatever
    its batch, and whether another setting was faster.
    """
    total, step = sum(measured.times.values()), measured.step
    shares = {name: seconds / total for name, seconds in measured.times.items()}
    computed, largest = shares["computed"], max((name for name in shares if name != "computed"), key=shares.__getitem__)
    fastest = min(measured.alternatives, key=lambda flag: measured.alternatives[flag], default="")
    bound: Bound = "compute"
    share = computed
    if shares[largest] >= _WORTH:
        bound = _behind_waiting(measured) if largest == "waited" else _OWN_BOUND[largest]
        share = saved = shares[largest]
    elif measured.doubled is not None and measured.doubled < _HIDDEN * step:
        bound, saved = "kernel launch", computed * (1 - measured.doubled / 2 / step)
    elif fastest and step >= _GAIN * measured.alternatives[fastest]:
        saved = computed * (1 - measured.alternatives[fastest] / step)
    else:
        return Verdict("nothing", computed, 1.0, f"healthy: the device computes {computed:.0%} of the time", shares)
    gain, switch = 1 / (1 - saved), f"use {fastest}" if bound == "compute" else measured.switches.get(bound)
    text = f"{bound}: {_TEXTS[bound]} ({share:.0%}; up to {gain:.1f}x faster)" + (f"; {switch}" if switch else "")
    return Verdict(bound, share, gain, text, shares)


def _behind_waiting(measured: Measured) -> Bound:
    """Return what makes the batches late: too few workers if enough of them would keep up, else its largest part."""
    needed = sum(measured.batch.values()) / measured.step
    if measured.workers is not None and measured.workers < min(needed, measured.cores) and needed <= measured.cores:
        return "workers"
    return max(measured.batch, key=lambda name: measured.batch[name])
