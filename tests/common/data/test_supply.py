import itertools
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from common.data.batches import CropBatches
from common.data.cache_host import CaseList, HeldCase, hold_case
from common.data.partitions import partition_cases
from common.data.preparation import PreparedCase
from common.data.smart import smart_indices
from common.data.supply import ChangingSupply, FixedSupply

CPU = torch.device("cpu")
CROP = (4, 4, 4)


def case(index: int) -> HeldCase:
    random = torch.Generator().manual_seed(index)
    image = torch.rand(1, 6, 5, 4, generator=random).half()
    label = (image[0] > 0.8).to(torch.uint8)
    return hold_case(PreparedCase(f"case{index}", image, label, grid=None), CROP, "ram", CPU)  # type: ignore[arg-type]


def hold(cases, numbers):
    return CaseList(cases, numbers, CPU)


class Loads:
    """A loader that keeps count: what was loaded, in which thread, and how many of the cases are still in memory."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.threads: dict[int, str] = {}
        self.most = 0
        self.alive: set[int] = set()
        self.numbers = itertools.count()

    def __call__(self, index: int) -> HeldCase:
        self.loaded.append(index)
        self.threads[index] = threading.current_thread().name
        made = case(index)
        key = next(self.numbers)
        self.alive.add(key)
        weakref.finalize(made.image, self.alive.discard, key)
        self.most = max(self.most, len(self.alive))
        return made


def supply(loads, count=5, held=4, replaced=1, **settings):
    names = [f"case{index}" for index in range(count)]
    return ChangingSupply(
        names, lambda epoch: smart_indices(count, held, replaced, epoch), loads, hold, ahead=replaced, **settings
    )


def wait(made: ChangingSupply) -> None:
    for future in made._coming.values():
        future.exception()
    until = time.monotonic() + 10
    while ahead() and time.monotonic() < until:  # the thread ends a moment after its last case
        time.sleep(0.01)


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cases ahead")]


def test_a_fixed_supply_always_holds_the_same():
    held = hold((case(0),), np.arange(1))
    made = FixedSupply(held)
    for epoch in (0, 7):
        with made.epoch(epoch) as cases:
            assert cases is held


def test_only_what_is_new_is_loaded_and_in_the_background():
    loads = Loads()
    made = supply(loads)
    for epoch, new in enumerate([[0, 1, 2, 3], [4], [0], [1], [2]]):
        with made.epoch(epoch) as held:
            assert held.names == tuple(f"case{index}" for index in smart_indices(5, 4, 1, epoch))
            assert held.numbers.tolist() == smart_indices(5, 4, 1, epoch).tolist()
            wait(made)
            following = [[0, 1, 2, 3], [4], [0], [1], [2], [3]][epoch + 1]
            assert sorted(loads.loaded) == sorted(new + following)
            assert all(loads.threads[index].startswith("cases ahead") for index in following)
        loads.loaded = following
    assert ahead() == []


def test_memory_never_holds_more_than_an_epoch_and_what_comes():
    loads = Loads()
    made = supply(loads, count=20, held=6, replaced=2)
    for epoch in [0, 1, 2, 3, 9, 10, 4]:
        with made.epoch(epoch):
            wait(made)
    assert loads.most == 8


def test_batches_keep_nothing_of_an_epoch_that_is_over():
    loads = Loads()
    made = supply(loads, count=20, held=6, replaced=2)
    batches = CropBatches((made,), CROP, 1, 3, cases_per_epoch=6)
    for epoch in range(4):
        assert len(list(batches.epoch(epoch))) == 2
        wait(made)
    assert loads.most == 8


def test_any_epoch_can_be_jumped_to():
    made = supply(Loads(), count=9, held=3, replaced=2)
    for epoch in [5, 6, 0, 100, 2, 2, 1]:
        with made.epoch(epoch) as held:
            assert held.numbers.tolist() == smart_indices(9, 3, 2, epoch).tolist()
            assert held.names == tuple(f"case{index}" for index in held.numbers)


def test_a_case_that_fails_ahead_fails_the_next_epoch_and_is_named():
    def load(index):
        if index >= 4:
            raise OSError("no such entry")
        return case(index)

    made = supply(load, count=8, held=4, replaced=2)
    with made.epoch(0):
        wait(made)
    with pytest.raises(OSError, match="no such entry") as error, made.epoch(1):
        pass
    assert error.value.__notes__ == ["while loading case case4"]
    with made.epoch(0) as held:  # what is sound can still be had
        assert held.numbers.tolist() == [0, 1, 2, 3]
    wait(made)
    assert ahead() == []


def test_leaving_an_epoch_early_cancels_what_is_to_come():
    begun, go_on = threading.Event(), threading.Event()
    loaded: list[int] = []

    def load(index):
        if index >= 4:
            begun.set()
            go_on.wait(10)
        loaded.append(index)
        return case(index)

    made = supply(load, count=8, held=4, replaced=4)
    epoch = made.epoch(0)
    epoch.__enter__()
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert not epoch.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sorted(loaded) == [0, 1, 2, 3, 4]  # 4 had begun; 5, 6, 7 had not
    assert ahead() == []


def test_nothing_is_loaded_for_an_epoch_after_the_last():
    loads = Loads()
    made = supply(loads, epochs=2)
    for epoch in range(2):
        with made.epoch(epoch):
            wait(made)
    assert sorted(loads.loaded) == [0, 1, 2, 3, 4]


def test_a_reshuffle_deals_anew_and_loads_only_what_is_new():
    loads = Loads()

    def indices(epoch):
        return partition_cases(10, 2, 0, seed=3, round=epoch // 3)

    made = ChangingSupply([f"case{index}" for index in range(10)], indices, loads, hold)
    for epoch in range(9):
        loads.loaded.clear()
        with made.epoch(epoch) as held:
            assert held.numbers.tolist() == indices(epoch).tolist()
            before = set() if epoch == 0 else set(indices(epoch - 1).tolist())
            assert sorted(loads.loaded) == sorted(set(indices(epoch).tolist()) - before)
        del held
    assert loads.most == 5


def test_batches_resume_exactly_in_a_smart_cache():
    def batches():
        return CropBatches((supply(Loads(), count=7, held=3, replaced=2),), CROP, 4, 3, cases_per_epoch=3)

    made = batches()
    whole = [[batch.image for batch in made.epoch(epoch)] for epoch in range(4)]
    again = [batch.image for batch in batches().epoch(3, first_step=2)]
    assert made.steps_per_epoch == 4
    assert torch.equal(torch.stack(again), torch.stack(whole[3][2:]))


def test_the_crop_of_a_case_does_not_depend_on_what_else_is_held():
    def crops(held):
        made = CropBatches((supply(Loads(), count=7, held=held, replaced=0),), CROP, 4, 4, cases_per_epoch=held)
        return {
            (name, image.numpy().tobytes())
            for batch in made.epoch(2)
            for image, name in zip(batch.image, batch.cases, strict=True)
        }

    assert crops(3) < crops(5)
