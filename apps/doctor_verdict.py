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
_TEXTS: dict[Bound, str] = {
    "disk": "training waits for batches, limited by the disk",
    "decode": "training waits for batches, limited by file decoding",
    "preparation": "training waits for batches, limited by deterministic transforms",
    "augmentation": "training waits for batches, limited by random transforms",
    "workers": "training waits for batches: too few workers",
    "validation": "validation dominates",
    "checkpointing": "writing checkpoints dominates",
    "logging": "logging dominates",
    "kernel launch": "the steps are too small: most of their time is independent of the batch size",
    "compute": "the device is busy, but another setting is faster",
}


@dataclass(frozen=True)
class Measured:
    """A training's times; all in seconds.

    Args:
        times: of the whole training, estimated from a short one: "waited" for batches, "computed", "saved",
            "logged", "validated".
        batch: of making one batch, all by itself: "disk" (reading the files), "decode", "preparation" (what is the same
            in every epoch), "augmentation" (what is not); what does not apply is left out.
        step: computing one step.
        workers: that make batches side by side; None where their number is not the user's to choose.
        cores: that they could use.
        doubled: the step with twice the batch, where that could be measured.
        alternatives: the step with another setting, by the flag that sets it.
        switches: what to turn for each bound, in words; a bound without has none here.
    """

    times: Mapping[str, float]
    batch: Mapping[Bound, float]
    step: float
    workers: int | None
    cores: int
    doubled: float | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    switches: Mapping[Bound, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What bounds a training.

    Args:
        bound: its name.
        share: of the training's time that it takes.
        gain: how many times as fast the training would be without it, at best.
        text: the verdict in words.
        shares: of the training's time, by name.
    """

    bound: Bound
    share: float
    gain: float
    text: str
    shares: dict[str, float]


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
    bound: Bound
    if shares[largest] >= _WORTH:
        bound = _behind_waiting(measured) if largest == "waited" else _OWN_BOUND[largest]
        share = saved = shares[largest]
        switch = measured.switches.get(bound)
    elif measured.doubled is not None and measured.doubled < _HIDDEN * step:
        bound, share, saved = "kernel launch", computed, computed * (1 - measured.doubled / 2 / step)
        switch = measured.switches.get(bound)
    elif fastest and step >= _GAIN * measured.alternatives[fastest]:
        bound, share, saved = "compute", computed, computed * (1 - measured.alternatives[fastest] / step)
        switch = f"use {fastest}"
    else:
        return Verdict("nothing", computed, 1.0, f"healthy: the device computes {computed:.0%} of the time", shares)
    gain = 1 / (1 - saved)
    text = f"{bound}: {_TEXTS[bound]} ({share:.0%}; up to {gain:.1f}x faster)" + (f"; {switch}" if switch else "")
    return Verdict(bound, share, gain, text, shares)


def _behind_waiting(measured: Measured) -> Bound:
    """Return what makes the batches late: too few workers if enough of them would keep up, else its largest part."""
    needed = sum(measured.batch.values()) / measured.step
    if measured.workers is not None and measured.workers < min(needed, measured.cores) and needed <= measured.cores:
        return "workers"
    return max(measured.batch, key=lambda name: measured.batch[name])
