import shutil
import warnings
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from monai.data import SmartCacheDataset

from common import run as host_memory
from common.data.cache_plan import CachePlan, measure_budgets, plan_cache, smart_indices, smart_replaced

GIB = 2**30
MIB = 2**20
SIZES = {f"case{number}": 100 * MIB for number in range(10)}


def budgets(gpu, ram, disk):
    return {"ram": ram, "disk": disk} if gpu is None else {"gpu": gpu, "ram": ram, "disk": disk}


def plan(mode, gpu, ram, disk=100 * GIB, **settings) -> CachePlan:
    return plan_cache(SIZES, mode, budgets(gpu, ram, disk), **settings)


def test_auto_takes_the_gpu_where_all_fits():
    made = plan("auto", gpu=GIB, ram=0)
    assert made.tiers == ("gpu",) * 10
    assert made.lines == (
        "cache auto: 10 cases take up to 1000 MiB",
        "  10 cases, 1000 MiB in GPU memory (of 1.0 GiB free for it)",
    )


def test_auto_fills_the_gpu_first_then_memory():
    made = plan("auto", gpu=450 * MIB, ram=GIB)
    assert made.tiers == ("gpu",) * 4 + ("ram",) * 6
    assert made.lines[1:] == (
        "  4 cases, 400 MiB in GPU memory (of 450 MiB free for it)",
        "  6 cases, 600 MiB in host memory (of 1.0 GiB free for it)",
    )


def test_auto_leaves_the_rest_on_disk_and_says_what_to_do():
    made = plan("auto", gpu=450 * MIB, ram=299 * MIB)
    assert made.tiers == ("gpu",) * 4 + ("ram",) * 2 + ("disk",) * 4
    assert made.lines[3] == "  4 cases, 400 MiB in the memory-mapped prepared store"
    assert "what lies on disk (case6, ...)" in made.lines[4]
    assert "--cache smart" in made.lines[4]


def test_a_large_case_does_not_keep_smaller_ones_out():
    made = plan_cache({"a": 50, "b": 200, "c": 50}, "auto", budgets(100, 200, GIB))
    assert made.tiers == ("gpu", "ram", "gpu")


def test_a_cpu_has_no_gpu_tier():
    assert plan("auto", gpu=None, ram=GIB).tiers == ("ram",) * 10
    with pytest.raises(ValueError, match=r"cache gpu: the batches lie on the CPU.*--cache auto or ram"):
        plan("gpu", gpu=None, ram=GIB)


def test_nothing_but_the_disk():
    assert plan("disk", gpu=GIB, ram=GIB).tiers == ("disk",) * 10
    assert plan("auto", gpu=0, ram=0).tiers == ("disk",) * 10


@pytest.mark.parametrize("mode", ["gpu", "ram"])
def test_a_tier_asked_for_holds_all_or_is_refused(mode):
    assert plan(mode, gpu=1000 * MIB, ram=1000 * MIB).tiers == (mode,) * 10
    place = {"gpu": "GPU memory", "ram": "host memory"}[mode]
    with pytest.raises(
        ValueError, match=rf"cache {mode}: 10 cases take up to 1000 MiB and 999 MiB of {place} .*--cache auto.*smart"
    ):
        plan(mode, gpu=999 * MIB, ram=999 * MIB)


@pytest.mark.parametrize("mode", ["auto", "gpu", "ram", "disk", "smart"])
def test_a_disk_that_cannot_hold_the_store_is_refused(mode):
    with pytest.raises(ValueError, match=r"10 cases take up to 1000 MiB on disk.*999 MiB are free there: make room"):
        plan(mode, gpu=GIB, ram=GIB, disk=999 * MIB)


def test_none_keeps_nothing_anywhere():
    made = plan("none", gpu=None, ram=0, disk=0)
    assert (made.tiers, made.held) == (("none",) * 10, 0)
    assert "prepared from its raw file whenever it is used" in made.lines[0]


def test_smart_holds_what_fits_with_what_is_loaded_ahead():
    made = plan("smart", gpu=500 * MIB, ram=10 * GIB)
    assert (made.tiers, made.held, made.replaced) == (("gpu",) * 10, 4, 1)  # 4 + a quarter of 4
    assert made.lines == (
        "cache smart: 10 cases take up to 1000 MiB; 4 at a time in GPU memory, 1 replaced after each epoch, up to "
        "500 MiB with those (of 500 MiB free for it); the others wait in the memory-mapped prepared store",
    )
    assert plan("smart", gpu=500 * MIB, ram=GIB, replace_share=0.5).held == 3  # 3 + 2
    assert plan("smart", gpu=2 * GIB, ram=GIB).held == 10


def test_smart_holds_as_many_as_asked_where_they_fit():
    made = plan("smart", gpu=500 * MIB, ram=GIB, smart_cases=8)
    assert (set(made.tiers), made.held, made.replaced) == ({"ram"}, 8, 2)
    assert plan("smart", gpu=None, ram=GIB, smart_cases=1).held == 1
    with pytest.raises(
        ValueError, match=r"8 of 10 cases .* 1000 MiB, and 500 MiB of GPU memory and 900 MiB of host mem"
    ):
        plan("smart", gpu=500 * MIB, ram=900 * MIB, smart_cases=8)
    with pytest.raises(ValueError, match=r"smart_cases 11: between 1 and the 10 cases"):
        plan("smart", gpu=GIB, ram=GIB, smart_cases=11)
    with pytest.raises(ValueError, match=r"1 of 10 cases .* up to 200 MiB"):
        plan("smart", gpu=None, ram=199 * MIB)


def test_smart_counts_with_the_largest_cases():
    made = plan_cache({"a": 10, "b": 10, "c": 100, "d": 100}, "smart", budgets(None, 209, GIB))
    assert made.held == 1  # with one more loaded ahead, 200; two with one more may take 210


def test_the_brain_tumours_of_the_decathlon():
    """Task01 of MSD: 484 cases of 240 x 240 x 155 with four channels take 36.2 GiB."""
    sizes = {f"BRATS_{number:03d}": 240 * 240 * 155 * (4 * 2 + 1) for number in range(1, 485)}
    h200 = plan_cache(sizes, "auto", budgets(65 * GIB, 0, 100 * GIB))
    assert h200.lines == (
        "cache auto: 484 cases take up to 36.2 GiB",
        "  484 cases, 36.2 GiB in GPU memory (of 65.0 GiB free for it)",
    )
    small = plan_cache(sizes, "auto", budgets(10 * GIB, 12 * GIB, 100 * GIB))
    assert Counter(small.tiers) == {"gpu": 133, "ram": 160, "disk": 191}
    assert small.lines[1:4] == (
        "  133 cases, 10.0 GiB in GPU memory (of 10.0 GiB free for it)",
        "  160 cases, 12.0 GiB in host memory (of 12.0 GiB free for it)",
        "  191 cases, 14.3 GiB in the memory-mapped prepared store",
    )


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
    replaced = smart_replaced(5, 4, 0.25)
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
    replaced = smart_replaced(count, held, rate)
    for epoch in range(6):
        assert smart_indices(count, held, replaced, epoch).tolist() == [theirs[i] for i in range(held)]
        if replaced:
            theirs.update_cache()
    theirs.shutdown()


@pytest.mark.parametrize("held", [0, 6])
def test_a_smart_cache_of_more_than_all_or_of_none_is_refused(held):
    with pytest.raises(ValueError, match=f"smart cache of {held} cases: between 1 and the 5 cases"):
        smart_indices(5, held, 1, 0)


def test_how_many_cases_are_replaced():
    assert [smart_replaced(5, 4, 0.25), smart_replaced(10, 4, 0.3), smart_replaced(4, 4, 0.3)] == [1, 2, 0]
    for rate in (0, 1.1):
        with pytest.raises(ValueError, match=rf"replace_share {rate}: above 0 and at most 1"):
            smart_replaced(5, 4, rate)
