"""A short way through everything: what `--fast_dev_run` makes of cases and batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from torch import nn

from common.data.batches import Batch, Batches
from common.data.cases import Split
from common.observe.run import Run

SAID = "FAST DEV RUN: two steps on a few cases; no figure of this run means anything"
_TRAINING, _VALIDATION = 2, 1  # cases, or as many as there are parts to deal them to


@dataclass(frozen=True)
class OneStep:
    """The first batch of each epoch of other batches."""

    batches: Batches

    @property
    def steps_per_epoch(self) -> int:
        """One."""
        return 1

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether `epoch` can start at any step: as the other batches."""
        return self.batches.resumes_within_epoch

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batch, unless it is done; what prepares the others ends then."""
        with closing(self.batches.epoch(number, first_step)) as batches:  # type: ignore[type-var]
            yield from islice(batches, 1 - first_step)


def forgiving(validate: Callable[[nn.Module, Callable[[], None]], float]) -> Callable[..., float]:
    """Return a validation that gives 0 where there is nothing to find: a few cases may well hold nothing."""

    def value(network: nn.Module, check: Callable[[], None]) -> float:
        found = validate(network, check)
        return 0.0 if math.isnan(found) else found

    return value


def few_cases(split: Split, parts: int, run: Run) -> Split:
    """Return the split with a few of its cases, and say that no figure means anything."""
    run.say(SAID)
    training, validation = split.training[: max(_TRAINING, parts)], split.validation[: max(_VALIDATION, parts)]
    return replace(split, training=training, validation=validation, description=f"{split.description}; cut short")


def each_kind(labels: Sequence[int], count: int) -> list[int]:
    """Return the places of the first `count` of each label, in order."""
    seen: dict[int, int] = {}
    places = []
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= count:
            places.append(place)
    return places
