"""The case cache: prepared cases on the device, in host memory, mapped from the store, or loaded at every use.

Wherever the cases lie, the same crops are cut from them; where all lie on the device, a batch is one gather.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import torch

from common.data.cache_plan import Tier
from common.data.crops import CachedCase, Crops, Flat, gather, place_case, place_flat, slices, upload
from common.data.geometry import Shape
from common.data.preparation import PreparedCase
from common.data.threads import map_in_threads


class CaseCache:
    """The cases of one partition, and the crops that are cut from them. A case goes by its number in the dataset.

    Which cases an epoch trains on depends on its number alone, so that runs resume. Where they change from epoch to
    epoch (a smart cache, a reshuffle), only what is new is loaded, and up to `ahead` cases of it in a background thread
    while the epoch before trains; so at most `ahead` cases more than an epoch's own are in memory.

    Args:
        cases_of: from an epoch to the numbers of its cases, int64.
        crop_size: X, Y, Z in voxels.
        device: where the crops are wanted.
        on_host: whether cutting keeps the CPU busy, so that it is worth doing ahead of time.
        load: from a number to the case in its place; called in threads. Errors get a note that names the case.
        names: of all cases of the dataset, by number, for that note.
        ahead: cases loaded ahead; for a smart cache, as many as are replaced.
        keep: where nothing but the cases used last is kept, how many; with fewer than a batch holds, they are loaded
            twice for it. None keeps all cases of an epoch.
        epochs: of the run; for later ones nothing is loaded ahead.
        placed: cases that are in their place already.
        flat: the tensors that some of them lie in.
    """

    def __init__(
        self,
        cases_of: Callable[[int], np.ndarray],
        crop_size: Shape,
        device: torch.device,
        on_host: bool,
        load: Callable[[int], CachedCase] | None = None,
        names: Sequence[str] = (),
        *,
        ahead: int = 0,
        keep: int | None = None,
        epochs: int | None = None,
        placed: Mapping[int, CachedCase] = MappingProxyType({}),
        flat: Flat | None = None,
    ) -> None:
        """Begin with what is placed already."""
        self.cases_of, self.crop_size, self.device, self.on_host = cases_of, crop_size, device, on_host
        self._load, self._names, self._ahead, self._keep, self._epochs = load, names, ahead, keep, epochs
        self._here, self._flat = OrderedDict(placed), flat
        self._coming: dict[int, Future[CachedCase]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def epoch(self, number: int) -> Iterator[np.ndarray]:
        """Have the cases of one epoch while it lasts, and load ahead for the next; yield their numbers, int64 [n].

        Raises:
            Exception: what `load` raises, also for what was loaded ahead.
        """
        numbers = self.cases_of(number)
        if self._keep is None:
            self._bring(numbers.tolist())
            self._begin_next(number + 1)
        try:
            yield numbers
        except BaseException:  # the epoch is left early, for whatever reason: no thread stays behind
            self._cancel()
            raise

    def case(self, number: int) -> CachedCase:
        """Return a case of the present epoch; it is loaded where only the last ones used are kept."""
        if number not in self._here:
            while self._keep is not None and len(self._here) >= self._keep:
                self._here.popitem(last=False)
            self._here[number] = self._named_load(number)
        self._here.move_to_end(number)
        return self._here[number]

    def cut(self, numbers: np.ndarray, starts: np.ndarray, flips: np.ndarray) -> Crops:
        """Cut one crop from each of these cases; the host never waits for the device.

        Args:
            numbers: [N] int, the case of each crop.
            starts: [N, 3] int64, first voxel of each crop along X, Y, Z, before it is flipped.
            flips: [N, 3] bool, whether it is then flipped along each axis.

        Returns:
            image [N, C, X, Y, Z] float16 and label [N, 1, X, Y, Z] uint8 on `device`.
        """
        cases = [self.case(number) for number in numbers.tolist()]
        is_flat = np.array([case.offset is not None for case in cases])
        if not is_flat.any():
            return slices(cases, starts, flips, self.crop_size, self.device)
        assert self._flat is not None
        if is_flat.all():
            return gather(self._flat, cases, starts, flips, self.crop_size)
        there, here = np.flatnonzero(is_flat), np.flatnonzero(~is_flat)
        gathered = gather(self._flat, [cases[row] for row in there], starts[there], flips[there], self.crop_size)
        sliced = slices([cases[row] for row in here], starts[here], flips[here], self.crop_size, self.device)
        order = upload(np.argsort(np.concatenate([there, here])), self.device)
        image, label = (torch.cat(parts).index_select(0, order) for parts in zip(gathered, sliced, strict=True))
        return image, label

    def _bring(self, wanted: list[int]) -> None:
        """Have the wanted cases here and no other."""
        if not self._coming.keys() <= set(wanted):  # loaded for another epoch than this one
            self._cancel()
        for number in self._here.keys() - set(wanted):
            del self._here[number]
        try:
            self._here |= {number: future.result() for number, future in self._coming.items()}
        finally:
            self._cancel()
        missing = [number for number in wanted if number not in self._here]
        loaded = map_in_threads(self._named_load, missing, "loading cases", progress=False)
        self._here |= zip(missing, loaded, strict=True)

    def _begin_next(self, epoch: int) -> None:
        if not self._ahead or (self._epochs is not None and epoch >= self._epochs):
            return
        new = [number for number in self.cases_of(epoch).tolist() if number not in self._here][: self._ahead]
        if new:
            self._pool = ThreadPoolExecutor(1, "cases ahead")
            self._coming = {number: self._pool.submit(self._named_load, number) for number in new}
            self._pool.shutdown(wait=False)  # no more will be asked of it: the thread ends when all is loaded

    def _named_load(self, number: int) -> CachedCase:
        assert self._load is not None, number
        try:
            return self._load(number)
        except Exception as error:  # to be raised in the training loop, where nothing else tells which case it was
            error.add_note(f"while loading case {self._names[number]}")
            raise

    def _cancel(self) -> None:
        """Cancel what has not begun, wait for what has, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._coming, self._pool = {}, None


def fill_cache(
    cases: Sequence[PreparedCase],
    tiers: Sequence[Tier],
    crop_size: Shape,
    device: torch.device,
    numbers: np.ndarray | None = None,
) -> CaseCache:
    """Put prepared, labelled cases in their tiers, as `plan_cache` says; every epoch trains on all of them.

    Args:
        cases: in CPU memory or mapped files.
        tiers: of each case; those of "gpu" lie one after the other in two flat tensors on `device`.
        crop_size: X, Y, Z in voxels.
        device: where the crops are wanted.
        numbers: of the cases in the dataset, the key of their random draws; by default 0, 1, 2, ...
    """
    known = np.arange(len(cases)) if numbers is None else numbers
    given = list(zip(known.tolist(), cases, tiers, strict=True))
    placed = {number: place_case(case, tier, crop_size, device) for number, case, tier in given if tier != "gpu"}
    on_host, flat = bool(placed), None
    if resident := {number: case for number, case, tier in given if tier == "gpu"}:
        there, flat = place_flat(list(resident.values()), crop_size, device)
        placed |= zip(resident, there, strict=True)
    return CaseCache(lambda epoch: known, crop_size, device, on_host, placed=placed, flat=flat)
