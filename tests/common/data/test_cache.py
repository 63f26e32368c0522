import itertools
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from common.data import crops
from common.data.batches import crop_batches
from common.data.cache import CaseCache, fill_cache
from common.data.cache_plan import Tier, smart_indices
from common.data.crops import CachedCase, place_case
from common.data.draws import partition_cases
from common.data.geometry import working_grid
from common.data.preparation import PreparedCase
from common.data.store import read_entry, write_entry
from tests.support import refuse_host_sync

CPU = torch.device("cpu")
CROP = (6, 5, 4)
SHAPES = [(9, 8, 7), (4, 12, 3), (6, 5, 4), (11, 3, 9), (5, 4, 3)]  # three of them smaller than a crop somewhere


def prepared(number: int, shape: tuple[int, int, int] | None = None) -> PreparedCase:
    random = torch.Generator().manual_seed(number)
    shape = shape or SHAPES[number]
    image = torch.randn(2, *shape, generator=random).half()
    label = torch.randint(0, 4, shape, generator=random, dtype=torch.uint8)
    return PreparedCase(f"case{number}", image, label, working_grid(shape, np.eye(4), (1.0, 1.0, 1.0)))


@pytest.fixture
def cases(tmp_path) -> list[PreparedCase]:
    """Return cases as the store does: memory-mapped."""
    entries = []
    for number in range(len(SHAPES)):
        path = tmp_path / f"{number}.safetensors"
        write_entry(path, prepared(number), "{}")
        entries.append(read_entry(path, f"case{number}", "{}"))
    return entries


def fixed(load, on_host=True, **settings) -> CaseCache:
    return CaseCache(lambda epoch: np.arange(5), CROP, CPU, on_host, load, list("abcde"), **settings)


def kinds(cases: list[PreparedCase], device: torch.device = CPU) -> dict[str, CaseCache]:
    """Return the same cases cached in every way."""
    tiers: dict[str, list[Tier]] = {
        "flat": ["gpu"] * 5,
        "ram": ["ram"] * 5,
        "disk": ["disk"] * 5,
        "mixed": ["disk", "gpu", "ram", "gpu", "ram"],
    }
    made = {name: fill_cache(cases, each, CROP, device) for name, each in tiers.items()}
    made["last ones"] = fixed(lambda number: place_case(prepared(number), "none", CROP, device), keep=5)
    made["each on the device"] = fixed(lambda number: place_case(cases[number], "gpu", CROP, device), on_host=False)
    for name in ("last ones", "each on the device"):
        made[name].device = device
    return made


def random_crops(cases, count=40):
    random = np.random.default_rng(0)
    numbers = random.integers(0, 5, count)
    room = np.array([np.maximum(cases[number].image.shape[1:], CROP) for number in numbers]) - CROP
    return numbers, np.floor(random.random((count, 3)) * (room + 1)).astype(np.int64), random.random((count, 3)) < 0.5


def compare_all_kinds(cases, device):
    crops = random_crops(cases)
    image, label = fill_cache(cases, ["gpu"] * 5, CROP, CPU).cut(*crops)
    assert image.abs().sum() > 0
    for name, cache in kinds(cases, device).items():
        with cache.epoch(0) as numbers:
            assert numbers.tolist() == [0, 1, 2, 3, 4]
            cut = cache.cut(*crops)
        assert [tensor.dtype for tensor in cut] == [torch.float16, torch.uint8], name
        assert cut[0].device.type == device.type, name
        assert torch.equal(cut[0].cpu(), image), name
        assert torch.equal(cut[1].cpu(), label), name


def test_every_kind_cuts_the_same_crops(cases):
    compare_all_kinds(cases, CPU)


@pytest.mark.gpu
def test_every_kind_cuts_the_same_crops_on_a_gpu(cases):
    compare_all_kinds(cases, torch.device("cuda"))


def test_every_kind_knows_the_same_foreground_and_names(cases):
    expected = fill_cache(cases, ["gpu"] * 5, CROP, CPU)
    for cache in kinds(cases).values():
        with cache.epoch(0):
            for number in range(5):
                one, other = cache.case(number), expected.case(number)
                assert one.name == other.name == f"case{number}"
                assert one.shape.tolist() == other.shape.tolist()
                assert [each.tolist() for each in one.foreground] == [each.tolist() for each in other.foreground]


def test_the_flat_tensors_hold_every_voxel_and_zeros_at_the_far_end():
    cases = [prepared(0, (3, 4, 5)), prepared(1, (2, 2, 9))]
    cache = fill_cache(cases, ["gpu"] * 2, (4, 4, 8), CPU)
    first, second = cache.case(0), cache.case(1)
    assert (first.shape.tolist(), second.shape.tolist()) == ([4, 4, 8], [4, 4, 9])
    assert (first.offset, second.offset) == (0, 4 * 4 * 8)
    assert torch.equal(first.image[:, :3, :4, :5], cases[0].image)
    assert torch.equal(second.image[:, :2, :2, :9], cases[1].image)
    assert not first.image[:, 3:].any()
    assert not first.image[..., 5:].any()
    assert int(first.label.count_nonzero()) == int(cases[0].label.count_nonzero())  # type: ignore[union-attr]


def test_foreground_is_listed_per_class():
    label = torch.zeros(2, 2, 2, dtype=torch.uint8)
    label[0, 0, 1], label[1, 1, 1] = 2, 1
    case = PreparedCase("a", torch.zeros(1, 2, 2, 2).half(), label, grid=None)  # type: ignore[arg-type]
    placed = place_case(case, "ram", (1, 1, 3), CPU)  # padded to [2, 2, 3]
    assert [voxels.tolist() for voxels in placed.foreground] == [[10], [1]]
    assert placed.foreground[0].dtype == np.int32


def test_slices_on_a_device_are_those_on_the_host(cases):
    """The path of tensors that lie on a GPU, taken here with tensors on the CPU."""
    numbers, starts, flips = random_crops(cases)
    volumes = [cases[number].image for number in numbers]
    there = crops._views(volumes, starts, flips, CROP)
    assert torch.equal(there, crops._copies(volumes, starts, flips, CROP, CPU))


def test_ram_is_a_copy_and_disk_is_not(cases):
    ram, disk = (place_case(cases[0], tier, CROP, CPU) for tier in ("ram", "disk"))
    assert disk.image.data_ptr() == cases[0].image.data_ptr()
    assert ram.image.data_ptr() != cases[0].image.data_ptr()
    assert torch.equal(ram.image, disk.image)


def test_which_kinds_keep_the_cpu_busy(cases):
    made = kinds(cases)
    assert [made[name].on_host for name in ("flat", "ram", "disk", "mixed", "last ones")] == [False, *[True] * 4]


def test_a_case_that_is_not_kept_is_loaded_again_when_used_again():
    loaded: list[int] = []

    def load(number):
        loaded.append(number)
        return place_case(prepared(number), "none", CROP, CPU)

    cache = fixed(load, keep=2)
    with cache.epoch(0):
        for number in (0, 1, 0, 2, 0, 1):  # 1 is the one used longest ago when 2 comes
            cache.case(number)
    assert loaded == [0, 1, 2, 1]


def test_cutting_waits_for_no_device(cases):
    crops = random_crops(cases)
    for cache in kinds(cases).values():
        with cache.epoch(0), refuse_host_sync():
            cache.cut(*crops)


def test_cases_are_only_read(cases):
    before = [each.image.clone() for each in cases]
    kinds(cases)["disk"].cut(*random_crops(cases))[0].zero_()
    assert all(torch.equal(each.image, was) for each, was in zip(cases, before, strict=True))


class Loads:
    """A loader that keeps count: what was loaded, in which thread, and how many of the cases are still in memory."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.threads: dict[int, str] = {}
        self.most = 0
        self.alive: set[int] = set()
        self.numbers = itertools.count()

    def __call__(self, number: int) -> CachedCase:
        self.loaded.append(number)
        self.threads[number] = threading.current_thread().name
        made = place_case(prepared(number, (7, 6, 5)), "ram", CROP, CPU)
        key = next(self.numbers)
        self.alive.add(key)
        weakref.finalize(made.image, self.alive.discard, key)
        self.most = max(self.most, len(self.alive))
        return made


def smart(loads, count=5, held=4, replaced=1, **settings) -> CaseCache:
    names = [f"case{number}" for number in range(count)]
    return CaseCache(
        lambda epoch: smart_indices(count, held, replaced, epoch),
        CROP,
        CPU,
        True,
        loads,
        names,
        ahead=replaced,
        **settings,
    )


def wait(cache: CaseCache) -> None:
    for future in cache._coming.values():
        future.exception()
    until = time.monotonic() + 10
    while ahead() and time.monotonic() < until:  # the thread ends a moment after its last case
        time.sleep(0.01)


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cases ahead")]


def test_only_what_is_new_is_loaded_and_in_the_background():
    loads = Loads()
    cache = smart(loads)
    for epoch, new in enumerate([[0, 1, 2, 3], [4], [0], [1], [2]]):
        with cache.epoch(epoch) as numbers:
            assert numbers.tolist() == smart_indices(5, 4, 1, epoch).tolist()
            assert [cache.case(number).name for number in numbers] == [f"case{number}" for number in numbers]
            wait(cache)
            following = [[0, 1, 2, 3], [4], [0], [1], [2], [3]][epoch + 1]
            assert sorted(loads.loaded) == sorted(new + following)
            assert all(loads.threads[number].startswith("cases ahead") for number in following)
        loads.loaded = following
    assert ahead() == []


@pytest.mark.parametrize("epochs", [[0, 1, 2, 3, 9, 10, 4], [0, 1, 2, 3]])
def test_memory_never_holds_more_than_an_epoch_and_what_comes(epochs):
    loads = Loads()
    cache = smart(loads, count=20, held=6, replaced=2)
    batches = crop_batches([cache], 1, 3)
    for epoch in epochs:  # any epoch can be jumped to
        assert len(list(batches.epoch(epoch))) == 2
        wait(cache)
    assert loads.most == 8


def test_a_case_that_fails_ahead_fails_the_next_epoch_and_is_named():
    def load(number):
        if number >= 4:
            raise OSError("no such entry")
        return place_case(prepared(number), "ram", CROP, CPU)

    cache = smart(load, count=8, held=4, replaced=2)
    with cache.epoch(0):
        wait(cache)
    with pytest.raises(OSError, match="no such entry") as error, cache.epoch(1):
        pass
    assert error.value.__notes__ == ["while loading case case4"]
    with cache.epoch(0) as numbers:  # what is sound can still be had
        assert numbers.tolist() == [0, 1, 2, 3]
    wait(cache)
    assert ahead() == []


def test_leaving_an_epoch_early_cancels_what_is_to_come():
    begun, go_on = threading.Event(), threading.Event()
    loaded: list[int] = []

    def load(number):
        if number >= 4:
            begun.set()
            go_on.wait(10)
        loaded.append(number)
        return place_case(prepared(number, (7, 6, 5)), "ram", CROP, CPU)

    epoch = smart(load, count=8, held=4, replaced=4).epoch(0)
    epoch.__enter__()
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert not epoch.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sorted(loaded) == [0, 1, 2, 3, 4]  # 4 had begun; 5, 6, 7 had not
    assert ahead() == []


def test_nothing_is_loaded_for_an_epoch_after_the_last():
    loads = Loads()
    cache = smart(loads, epochs=2)
    for epoch in range(2):
        with cache.epoch(epoch):
            wait(cache)
    assert sorted(loads.loaded) == [0, 1, 2, 3, 4]


def test_a_reshuffle_deals_anew_and_loads_only_what_is_new():
    loads = Loads()

    def cases_of(epoch):
        return partition_cases(10, 2, 0, seed=3, round=epoch // 3)

    cache = CaseCache(cases_of, CROP, CPU, True, loads, [f"case{number}" for number in range(10)])
    for epoch in range(9):
        loads.loaded.clear()
        with cache.epoch(epoch) as numbers:
            assert numbers.tolist() == cases_of(epoch).tolist()
            before = set() if epoch == 0 else set(cases_of(epoch - 1).tolist())
            assert sorted(loads.loaded) == sorted(set(cases_of(epoch).tolist()) - before)
    assert loads.most == 5


def test_batches_resume_exactly_in_a_smart_cache():
    def batches():
        return crop_batches([smart(Loads(), count=7, held=3, replaced=2)], 4, 3)

    made = batches()
    whole = [[batch.image for batch in made.epoch(epoch)] for epoch in range(4)]
    again = [batch.image for batch in batches().epoch(3, first_step=2)]
    assert made.steps_per_epoch == 4
    assert torch.equal(torch.stack(again), torch.stack(whole[3][2:]))


def test_the_crop_of_a_case_does_not_depend_on_what_else_is_held():
    def crops(held):
        made = crop_batches([smart(Loads(), count=7, held=held, replaced=0)], 4, 4)
        return {
            (name, image.numpy().tobytes())
            for batch in made.epoch(2)
            for image, name in zip(batch.image, batch.cases, strict=True)
        }

    assert crops(3) < crops(5)
