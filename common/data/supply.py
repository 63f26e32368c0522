"""Supplies: which held cases each epoch trains on; always the same, some new ones each epoch, or dealt anew."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from common.data.cache import HeldCases
from common.data.cache_host import HeldCase
from common.data.parallel import map_in_threads


class Supply(Protocol):
    """Where an epoch's cases come from."""

    def epoch(self, number: int) -> AbstractContextManager[HeldCases]:
        """Hold the cases of one epoch while it lasts; which they are depends on its number alone."""
        ...


@dataclass(frozen=True)
class FixedSupply:
    """The same cases in every epoch."""

    held: HeldCases

    def epoch(self, number: int) -> AbstractContextManager[HeldCases]:
        """Hold the cases."""
        return nullcontext(self.held)


@dataclass
class ChangingSupply:
    """Cases that change from epoch to epoch: a smart cache, a global reshuffle, or both.

    Only what is new in an epoch is loaded, and up to `ahead` cases of it in a background thread while the epoch before
    trains; so at most `ahead` cases more than an epoch's own are in memory. What goes wrong in the thread is raised
    when its epoch begins, with a note that names the case. An epoch that is left early cancels what is to come.

    Args:
        names: of all cases of the dataset, by global number.
        indices: from an epoch to the global numbers of its cases; it depends on nothing else, so that runs resume.
        load: from a global number to the case, in its place; called in threads.
        hold: from an epoch's cases and their global numbers to held cases.
        ahead: cases loaded ahead; for a smart cache, as many as are replaced.
        epochs: of the run; for later ones nothing is loaded ahead.
    """

    names: Sequence[str]
    indices: Callable[[int], np.ndarray]
    load: Callable[[int], HeldCase]
    hold: Callable[[tuple[HeldCase, ...], np.ndarray], HeldCases]
    ahead: int = 0
    epochs: int | None = None
    _here: dict[int, HeldCase] = field(default_factory=dict, init=False, repr=False)
    _coming: "dict[int, Future[HeldCase]]" = field(default_factory=dict, init=False, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)

    @contextmanager
    def epoch(self, number: int) -> Iterator[HeldCases]:
        """Hold the cases of one epoch while it lasts, and load ahead for the next.

        Raises:
            Exception: what `load` raises, also for what was loaded ahead.
        """
        wanted = self.indices(number)
        self._bring(wanted.tolist())
        self._begin_next(number + 1)
        try:
            yield self.hold(tuple(self._here[index] for index in wanted.tolist()), wanted)
        except BaseException:  # the epoch is left early, for whatever reason: no thread stays behind
            self._cancel()
            raise

    def _bring(self, wanted: list[int]) -> None:
        """Have the wanted cases here and no other."""
        if not self._coming.keys() <= set(wanted):  # loaded for another epoch than this one
            self._cancel()
        self._here = {index: case for index, case in self._here.items() if index in wanted}
        try:
            self._here |= {index: future.result() for index, future in self._coming.items()}
        finally:
            self._cancel()
        missing = [index for index in wanted if index not in self._here]
        self._here |= zip(missing, map_in_threads(self._load, missing, "loading cases", progress=False), strict=True)

    def _begin_next(self, number: int) -> None:
        if self.epochs is not None and number >= self.epochs:
            return
        new = [index for index in self.indices(number).tolist() if index not in self._here][: self.ahead]
        if new:
            self._pool = ThreadPoolExecutor(1, "cases ahead")
            self._coming = {index: self._pool.submit(self._load, index) for index in new}
            self._pool.shutdown(wait=False)  # no more will be asked of it: the thread ends when all is loaded

    def _load(self, index: int) -> HeldCase:
        try:
            return self.load(index)
        except Exception as error:  # to be raised in the training loop, where nothing else tells which case it was
            error.add_note(f"while loading case {self.names[index]}")
            raise

    def _cancel(self) -> None:
        """Cancel what has not begun, wait for what has, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._coming, self._pool = {}, None
