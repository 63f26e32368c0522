import itertools
import shutil
import threading
import time
import warnings
import weakref
from collections import Counter
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from monai.data import SmartCacheDataset

from medspeed.common import host_memory
from medspeed.common.data import crops
from medspeed.common.data.batches import crop_batches, partition_cases
from medspeed.common.data.cache import (
    CachePlan,
    CaseCache,
    fill_cache,
    hold_cases,
    measure_budgets,
    plan_cache,
    read_entry,
    smart_indices,
    write_entry,
)
from medspeed.common.data.crops import (
    PLAIN,
    CachedCase,
    Crops,
    Tier,
    crop_table,
    crops_of_table,
    cut,
    place_case,
    place_together,
)
from medspeed.common.data.geometry import working_grid
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.inference.predict import predict_logits
from tests.support import refuse_host_sync, unet_model

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


def placed(case: PreparedCase, tier: Tier, device: torch.device = CPU) -> CachedCase:
    return place_case(case, tier, CROP, device)


def crops_of(cache: CaseCache, numbers, starts, flips) -> Crops:
    unchanged = np.tile(np.array([1, 0], np.float32), (len(numbers), 1))
    cases = [cache.case(number) for number in numbers.tolist()]
    given = cases, starts, flips, unchanged, cache.crop_size
    if cases[0].offset is None:
        return cut(*given, cache.device)
    table = torch.from_numpy(crop_table(*given)).to(cache.device)
    return crops_of_table(table, cases[0].image, cases[0].label, cache.crop_size, PLAIN)


def kinds(cases: list[PreparedCase], device: torch.device = CPU) -> dict[str, CaseCache]:
    """Return the same cases cached in every way."""
    tiers: dict[str, Tier] = {"flat": "gpu", "ram": "ram", "disk": "disk"}
    made = {name: fill_cache(cases, tier, CROP, device) for name, tier in tiers.items()}
    each_by_itself: dict[str, Tier] = {"last ones": "disk", "each on the device": "gpu"}
    for name, tier in each_by_itself.items():
        load = lru_cache(5)(lambda number, tier=tier: placed(prepared(number), tier, device))
        made[name] = CaseCache(lambda epoch: np.arange(5), CROP, device, tier != "gpu", load)
    return made


def random_crops(cases, count=40):
    random = np.random.default_rng(0)
    numbers = random.integers(0, 5, count)
    room = np.array([np.maximum(cases[number].image.shape[1:], CROP) for number in numbers]) - CROP
    return numbers, np.floor(random.random((count, 3)) * (room + 1)).astype(np.int64), random.random((count, 3)) < 0.5


def compare_all_kinds(cases, device):
    crops = random_crops(cases)
    image, label = crops_of(fill_cache(cases, "gpu", CROP, CPU), *crops)
    assert image.abs().sum() > 0
    for name, cache in kinds(cases, device).items():
        with cache.epoch(0) as numbers:
            assert numbers.tolist() == [0, 1, 2, 3, 4]
            found = crops_of(cache, *crops)
        assert [tensor.dtype for tensor in found] == [torch.float32, torch.uint8], name
        assert found[0].device.type == device.type, name
        assert torch.equal(found[0].cpu(), image), name
        assert torch.equal(found[1].cpu(), label), name


def test_every_kind_cuts_the_same_crops(cases):
    compare_all_kinds(cases, CPU)


@pytest.mark.gpu
def test_every_kind_cuts_the_same_crops_on_a_gpu(cases):
    compare_all_kinds(cases, torch.device("cuda"))


@pytest.mark.parametrize(("channels", "count"), [(1, 3), (4, 1), (4, 3)])
def test_every_kind_cuts_crops_of_the_same_strides_also_along_axes_of_length_one(channels, count):
    """A compiled network is compiled again for others."""
    voxels = torch.ones(channels, 8, 9, 10, dtype=torch.float16)
    one = PreparedCase("one", voxels, torch.ones(8, 9, 10, dtype=torch.uint8), prepared(0).grid)
    numbers, starts, flips = np.zeros(count, np.int64), np.ones((count, 3), np.int64), np.zeros((count, 3), bool)
    tiers: tuple[Tier, ...] = ("gpu", "ram")
    for tier in tiers:
        image, label = crops_of(fill_cache([one], tier, CROP, CPU), numbers, starts, flips)
        assert image.stride() == torch.empty(image.shape).stride(), tier
        assert label.stride() == torch.empty(label.shape).stride(), tier


def test_every_kind_knows_the_same_foreground_and_names(cases):
    expected = fill_cache(cases, "gpu", CROP, CPU)
    for cache in kinds(cases).values():
        with cache.epoch(0):
            for number in range(5):
                one, other = cache.case(number), expected.case(number)
                assert one.name == other.name == f"case{number}"
                assert one.shape.tolist() == other.shape.tolist()
                assert [each.tolist() for each in one.foreground] == [each.tolist() for each in other.foreground]


def test_the_flat_tensors_hold_every_voxel_between_zeros_as_in_inference():
    cases = [prepared(0, (3, 4, 5)), prepared(1, (2, 2, 9))]
    cache = fill_cache(cases, "gpu", (4, 4, 8), CPU)
    first, second = cache.case(0), cache.case(1)
    assert (first.shape.tolist(), second.shape.tolist()) == ([4, 4, 8], [4, 4, 9])
    assert (first.offset, second.offset) == (0, 4 * 4 * 8)
    assert first.image is second.image
    one, other = first.image[:, :128].view(-1, 4, 4, 8), first.image[:, 128:].view(-1, 4, 4, 9)
    assert torch.equal(one[:, :3, :4, 1:6], cases[0].image)
    assert torch.equal(other[:, 1:3, 1:3, :9], cases[1].image)
    assert one.count_nonzero() == cases[0].image.count_nonzero()
    assert other.count_nonzero() == cases[1].image.count_nonzero()
    seen: list[torch.Tensor] = []
    model = unet_model((1.0, 1.0, 1.0), (4, 8), (4, 4, 8), window_batch=1)

    def predict(windows: torch.Tensor) -> torch.Tensor:
        seen.append(windows.clone())
        return torch.zeros(1, 2, 4, 4, 8)

    predict_logits(cases[0].image.float(), predict, model)
    assert torch.equal(seen[0][0], one.float())
    assert int(first.label[:128].count_nonzero()) == int(cases[0].label.count_nonzero())  # type: ignore[union-attr]


def test_foreground_is_listed_per_class():
    label = torch.zeros(2, 2, 2, dtype=torch.uint8)
    label[0, 0, 1], label[1, 1, 1] = 2, 1
    case = PreparedCase("a", torch.zeros(1, 2, 2, 2).half(), label, grid=None)  # type: ignore[arg-type]
    held = place_case(case, "ram", (1, 1, 3), CPU)  # padded to [2, 2, 3]
    assert [voxels.tolist() for voxels in held.foreground] == [[10], [1]]
    assert held.foreground[0].dtype == np.uint32


def test_ram_is_a_copy_and_disk_is_not(cases):
    ram, disk = placed(cases[0], "ram"), placed(cases[0], "disk")
    assert disk.image.data_ptr() == cases[0].image.data_ptr()
    assert ram.image.data_ptr() != cases[0].image.data_ptr()
    assert torch.equal(ram.image, disk.image)


def test_which_kinds_keep_the_cpu_busy(cases):
    made = kinds(cases)
    assert [made[name].on_host for name in ("flat", "ram", "disk", "last ones")] == [False, *[True] * 3]


def test_cutting_waits_for_no_device(cases):
    crops = random_crops(cases)
    for cache in kinds(cases).values():
        with cache.epoch(0), refuse_host_sync():
            crops_of(cache, *crops)


def test_cases_are_only_read(cases):
    before = [each.image.clone() for each in cases]
    crops_of(kinds(cases)["disk"], *random_crops(cases))[0].zero_()
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
        made = placed(prepared(number, (7, 6, 5)), "ram")
        key = next(self.numbers)
        self.alive.add(key)
        weakref.finalize(made.image, self.alive.discard, key)
        self.most = max(self.most, len(self.alive))
        return made


def smart(loads, count=5, held=4, replaced=1, **settings) -> CaseCache:
    return CaseCache(
        lambda epoch: smart_indices(count, held, replaced, epoch), CROP, CPU, True, loads, replaced, **settings
    )


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cases ahead")]


def wait() -> None:
    until = time.monotonic() + 10
    while ahead() and time.monotonic() < until:  # the thread ends a moment after its last case
        time.sleep(0.001)


def test_only_what_is_new_is_loaded_and_in_the_background():
    loads = Loads()
    cache = smart(loads)
    for epoch, new in enumerate([[0, 1, 2, 3], [4], [0], [1], [2]]):
        with cache.epoch(epoch) as numbers:
            assert numbers.tolist() == smart_indices(5, 4, 1, epoch).tolist()
            assert [cache.case(number).name for number in numbers] == [f"case{number}" for number in numbers]
        wait()
        following = [[0, 1, 2, 3], [4], [0], [1], [2], [3]][epoch + 1]
        assert sorted(loads.loaded) == sorted(new + following)
        loads.loaded = following
        assert ahead() == []


def test_the_training_does_not_wait_for_what_is_loaded_ahead():
    trained = threading.Event()

    def load(number):
        assert number < 4 or trained.wait(10)
        return placed(prepared(number % 5), "ram")

    cache = smart(load, count=8, held=4, replaced=2)
    with cache.epoch(0):
        pass
    assert ahead()  # nor does what comes behind it, as a validation: only the next epoch does
    trained.set()
    with cache.epoch(1):
        assert {cache.case(number).name for number in (4, 5)} == {"case4", "case0"}


@pytest.mark.parametrize("epochs", [[0, 1, 2, 3, 9, 10, 4], [0, 1, 2, 3]])
def test_memory_never_holds_more_than_an_epoch_and_what_comes(epochs):
    loads = Loads()
    cache = smart(loads, count=20, held=6, replaced=2)
    batches = crop_batches([cache], 1, 3)
    for epoch in epochs:  # any epoch can be jumped to
        assert len(list(batches.epoch(epoch))) == 2
        wait()
    assert loads.most == 8


def test_a_case_that_fails_ahead_fails_the_next_epoch():
    def load(number):
        if number >= 4:
            raise OSError("no such entry")
        return placed(prepared(number), "ram")

    cache = smart(load, count=8, held=4, replaced=2)
    with cache.epoch(0):
        pass
    with pytest.raises(OSError, match="no such entry"), cache.epoch(1):
        pass
    with cache.epoch(0) as numbers:  # what is sound can still be had
        assert numbers.tolist() == [0, 1, 2, 3]
    wait()
    assert ahead() == []


def test_leaving_an_epoch_early_cancels_what_is_to_come(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    loaded: list[int] = []

    def load(number):
        if number >= 4:
            begun.set()
            go_on.wait(10)
        loaded.append(number)
        return placed(prepared(number, (7, 6, 5)), "ram")

    cache = smart(load, count=8, held=4, replaced=4)
    epoch = cache.epoch(0)
    epoch.__enter__()
    assert begun.wait(10)
    stop = cache._pool.shutdown

    def shutdown(cancel_futures=False):
        stop(wait=False, cancel_futures=cancel_futures)
        go_on.set()
        stop()

    monkeypatch.setattr(cache._pool, "shutdown", shutdown)
    assert not epoch.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sorted(loaded) == [0, 1, 2, 3, 4]  # 4 had begun; 5, 6, 7 had not
    assert ahead() == []


def test_nothing_is_loaded_for_an_epoch_after_the_last():
    loads = Loads()
    cache = smart(loads, epochs=2)
    for epoch in range(2):
        with cache.epoch(epoch):
            pass
    wait()
    assert sorted(loads.loaded) == [0, 1, 2, 3, 4]


def test_a_reshuffle_deals_anew_and_loads_only_what_is_new():
    loads = Loads()

    def cases_of(epoch):
        return partition_cases(10, 2, 0, seed=3, round=epoch // 3)

    cache = CaseCache(cases_of, CROP, CPU, True, loads, 0)
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


def test_a_smart_cache_trains_on_all_cases_equally_though_the_last_batch_is_filled_up():
    """8 crops of 3 cases in an epoch: 3, 3 and 2, by the place in the window, through which every case moves."""
    made = crop_batches([smart(Loads(), count=9, held=3)], 1, 8)
    counts = Counter(name for epoch in range(18) for batch in made.epoch(epoch) for name in batch.cases)
    assert set(counts.values()) == {18 * 8 / 9}


def test_the_crop_of_a_case_does_not_depend_on_what_else_is_held():
    def crops(held):
        made = crop_batches([smart(Loads(), count=7, held=held, replaced=0)], 4, 4)
        return {
            (name, image.numpy().tobytes())
            for batch in made.epoch(2)
            for image, name in zip(batch.image, batch.cases, strict=True)
        }

    assert crops(3) < crops(5)


GIB = 2**30
MIB = 2**20
SIZES = [100 * MIB] * 10


def budgets(gpu, ram, disk):
    return {"ram": ram, "disk": disk} if gpu is None else {"gpu": gpu, "ram": ram, "disk": disk}


def plan(mode, gpu, ram, disk=100 * GIB, asked=None, share=0.25, sizes=SIZES) -> CachePlan:
    return plan_cache(sizes, mode, budgets(gpu, ram, disk), asked, share)


def test_auto_takes_the_gpu_where_all_fits():
    made = plan("auto", gpu=GIB, ram=0)
    assert (made.tier, made.held, made.replaced) == ("gpu", 10, 0)
    assert made.words == "cache auto: 10 cases, up to 1000 MiB in GPU memory (1.0 GiB free for it)"


def test_auto_takes_memory_where_the_gpu_has_no_room_for_all():
    made = plan("auto", gpu=450 * MIB, ram=GIB)
    assert made.tier == "ram"
    assert made.words == "cache auto: 10 cases, up to 1000 MiB in host memory (1.0 GiB free for it)"


def test_auto_takes_the_disk_where_no_memory_has_room_and_says_what_to_do():
    made = plan("auto", gpu=450 * MIB, ram=999 * MIB)
    assert (made.tier, made.held) == ("disk", 10)
    assert made.words == (
        "cache auto: 10 cases, up to 1000 MiB in the memory-mapped prepared store, read at every use: if that is slow, "
        "use --cache smart"
    )


def test_a_cpu_has_no_gpu_tier():
    assert plan("auto", gpu=None, ram=GIB).tier == "ram"
    with pytest.raises(ValueError, match=r"cache gpu: this run computes on the CPU.*--cache auto or ram"):
        plan("gpu", gpu=None, ram=GIB)


def test_nothing_but_the_disk():
    made = plan("disk", gpu=GIB, ram=GIB)
    assert made.tier == "disk"
    assert made.words == "cache disk: 10 cases, up to 1000 MiB in the memory-mapped prepared store"


@pytest.mark.parametrize("mode", ["gpu", "ram"])
def test_a_tier_asked_for_holds_all_or_is_refused(mode):
    assert plan(mode, gpu=1000 * MIB, ram=1000 * MIB).tier == mode
    place = {"gpu": "GPU memory", "ram": "host memory"}[mode]
    with pytest.raises(
        ValueError, match=rf"cache {mode}: 10 cases, up to 1000 MiB, but only 999 MiB of {place} .*--cache auto.*smart"
    ):
        plan(mode, gpu=999 * MIB, ram=999 * MIB)


@pytest.mark.parametrize("mode", ["auto", "gpu", "ram", "disk", "smart"])
def test_a_disk_that_cannot_hold_the_store_is_refused(mode):
    with pytest.raises(
        ValueError, match=r"10 cases, up to 1000 MiB in the prepared .*999 MiB is free: free some space"
    ):
        plan(mode, gpu=GIB, ram=GIB, disk=999 * MIB)


def test_none_keeps_nothing_anywhere():
    made = plan("none", gpu=None, ram=0, disk=0)
    assert (made.tier, made.held) == ("disk", 0)
    assert "prepared from its raw file when needed" in made.words


def test_smart_holds_what_fits_with_what_is_loaded_ahead():
    made = plan("smart", gpu=500 * MIB, ram=10 * GIB)
    assert (made.tier, made.held, made.replaced) == ("gpu", 4, 1)  # 4 + a quarter of 4
    assert made.words == (
        "cache smart: 10 cases, up to 1000 MiB in GPU memory (500 MiB free for it), 4 at a time and 1 replaced "
        "after each epoch: up to 500 MiB"
    )
    assert plan("smart", gpu=500 * MIB, ram=GIB, share=0.5).held == 3  # 3 + 2
    assert plan("smart", gpu=2 * GIB, ram=GIB).held == 10


def test_smart_holds_as_many_as_asked_where_they_fit():
    made = plan("smart", gpu=500 * MIB, ram=GIB, asked=8)
    assert (made.tier, made.held, made.replaced) == ("ram", 8, 2)
    assert plan("smart", gpu=None, ram=GIB, asked=1).held == 1
    with pytest.raises(
        ValueError, match=r"10 cases, .*8 at a time .* 1000 MiB, but only 500 MiB of GPU memory and 900 MiB of host mem"
    ):
        plan("smart", gpu=500 * MIB, ram=900 * MIB, asked=8)
    with pytest.raises(ValueError, match=r"cache smart:11: must be between 1 and"):
        plan("smart", gpu=GIB, ram=GIB, asked=11)
    with pytest.raises(ValueError, match=r"10 cases, .* 1 at a time .* up to 200 MiB"):
        plan("smart", gpu=None, ram=199 * MIB)


def test_smart_counts_with_the_largest_cases():
    made = plan("smart", None, 209, GIB, sizes=[10, 10, 100, 100])
    assert made.held == 1  # with one more loaded ahead, 200; two with one more may take 210


def test_the_brain_tumours_of_the_decathlon():
    """Task01 of MSD: 484 cases of 240 x 240 x 155 with four channels take 36.2 GiB."""
    h200 = plan("auto", 65 * GIB, 0, sizes=[240 * 240 * 155 * (4 * 2 + 1)] * 484)
    assert h200.words == "cache auto: 484 cases, up to 36.2 GiB in GPU memory (65.0 GiB free for it)"


def test_budgets_are_half_of_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(host_memory, "cgroup_free", lambda: [6 * GIB])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (tmp_path / "a.safetensors").write_bytes(bytes(50))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert measure_budgets(cpu, tmp_path) == {"ram": 3 * GIB, "disk": 1050}  # an entry that is there needs no new room
    assert measure_budgets(cuda, tmp_path / "not" / "made", processes=2) == budgets(5 * GIB, 3 * GIB // 2, 1000)


def test_the_smart_cache_of_the_guide():
    """Source: the docstring of monai.data.SmartCacheDataset: 5 images, 4 in the cache, a quarter replaced."""
    table = [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 1], [4, 5, 1, 2], [5, 1, 2, 3]]
    replaced = plan("smart", GIB, GIB, asked=4, sizes=[1] * 5).replaced
    assert [(smart_indices(5, 4, replaced, epoch) + 1).tolist() for epoch in range(5)] == table


@pytest.mark.parametrize(
    ("count", "held", "rate"), [(5, 4, 0.25), (10, 4, 0.5), (7, 3, 0.1), (6, 4, 1.0), (9, 8, 0.5), (4, 4, 0.3)]
)
def test_the_smart_cache_is_that_of_monai(count, held, rate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI warns where all cases are held
        theirs = SmartCacheDataset(
            list(range(count)), None, rate, cache_num=held, shuffle=False, progress=False, num_replace_workers=1
        )
    theirs.start()
    replaced = plan("smart", GIB, GIB, asked=held, share=rate, sizes=[1] * count).replaced
    for epoch in range(6):
        assert smart_indices(count, held, replaced, epoch).tolist() == [theirs[i] for i in range(held)]
        if replaced:
            theirs.update_cache()
    theirs.shutdown()


def test_the_plan_says_what_its_cases_leave_of_the_gpu():
    assert plan("auto", gpu=GIB, ram=0).free == GIB - 1000 * MIB
    assert plan("auto", gpu=250 * MIB, ram=GIB).free == 250 * MIB
    assert plan("smart", gpu=520 * MIB, ram=GIB).free == 20 * MIB
    assert plan("smart", gpu=199 * MIB, ram=GIB).free == 199 * MIB  # its cases lie in host memory
    assert plan("none", gpu=GIB, ram=0).free == plan("disk", gpu=GIB, ram=0).free == GIB
    assert plan("auto", gpu=None, ram=GIB).free == 0


def test_validation_cases_are_held_on_the_device_as_far_as_there_is_room(cases):
    sizes = [case.image.nbytes + case.label.nbytes for case in cases if case.label is not None]
    for count in range(len(cases)):
        for room in (sum(sizes[:count]), sum(sizes[: count + 1]) - 1):
            held = hold_cases(cases, room, torch.device("meta"))
            there = [(case.image.device.type, case.label.device.type) for case in held if case.label is not None]
            assert there == [("meta", "meta")] * count + [("cpu", "cpu")] * (len(cases) - count)
            assert [case.name for case in held] == [case.name for case in cases]
    assert all(case.image.is_meta for case in hold_cases(cases, sum(sizes), torch.device("meta")))


def test_more_cases_than_are_on_their_way_at_once_lie_where_they_should(monkeypatch):
    cases = [prepared(number, (5 + number, 6, 7)) for number in range(7)]
    monkeypatch.setattr(crops, "_AT_ONCE", 3)
    for case, held in zip(cases, place_together(cases, (8, 4, 9), CPU), strict=True):
        x, y, z = (int(whole - side) // 2 for whole, side in zip(held.shape, case.image.shape[1:], strict=True))
        box = tuple(slice(n, n + side) for n, side in zip((x, y, z), case.image.shape[1:], strict=True))
        assert held.offset is not None
        whole = slice(held.offset, held.offset + int(held.shape.prod()))
        image = held.image[:, whole].view(-1, *held.shape)
        assert torch.equal(image[:, *box], case.image)
        assert image.count_nonzero() == case.image.count_nonzero()
        assert case.label is not None
        assert torch.equal(held.label[whole].view(*held.shape)[*box], case.label)
