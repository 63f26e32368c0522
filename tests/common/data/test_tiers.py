import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.data.tiers import Budgets, case_bytes, measure_budgets, plan_cache
from common.observe import host_memory
from common.observe.host_memory import cgroup_free

GIB = 2**30
MIB = 2**20
NAMES = [f"case{number}" for number in range(10)]
SIZES = [100 * MIB] * 10


def plan(mode, gpu, ram, disk=100 * GIB, **settings):
    return plan_cache(NAMES, SIZES, mode, Budgets(gpu, ram, disk), **settings)


def test_the_bytes_of_a_case():
    assert case_bytes((240, 240, 155), 4) == 240 * 240 * 155 * (4 * 2 + 1)
    assert case_bytes((3, 4, 5), 1) == 180


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
    made = plan_cache("abc", [50, 200, 50], "auto", Budgets(100, 200, GIB))
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
    assert plan("smart", gpu=500 * MIB, ram=GIB, replace_rate=0.5).held == 3  # 3 + 2
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
    made = plan_cache("abcd", [10, 10, 100, 100], "smart", Budgets(None, 209, GIB))
    assert made.held == 1  # with one more loaded ahead, 200; two with one more may take 210


def test_names_and_sizes_belong_together():
    with pytest.raises(ValueError, match=r"10 cases with 9 sizes"):
        plan_cache(NAMES, SIZES[:9], "auto", Budgets(None, GIB, GIB))
    with pytest.raises(ValueError, match=r"0 cases"):
        plan_cache([], [], "auto", Budgets(None, GIB, GIB))


def test_the_brain_tumours_of_the_decathlon():
    """Task01 of MSD: 484 cases of 240 x 240 x 155 with four channels take 36.2 GiB."""
    sizes = [case_bytes((240, 240, 155), 4)] * 484
    names = [f"BRATS_{number:03d}" for number in range(1, 485)]
    h200 = plan_cache(names, sizes, "auto", Budgets(65 * GIB, 0, 100 * GIB))
    assert h200.lines == (
        "cache auto: 484 cases take up to 36.2 GiB",
        "  484 cases, 36.2 GiB in GPU memory (of 65.0 GiB free for it)",
    )
    small = plan_cache(names, sizes, "auto", Budgets(10 * GIB, 12 * GIB, 100 * GIB))
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
    assert measure_budgets(cpu, tmp_path) == Budgets(None, 3 * GIB, 1050)  # an entry that is there needs no new room
    assert measure_budgets(cuda, tmp_path / "not" / "made", processes=2) == Budgets(5 * GIB, 3 * GIB // 2, 1000)


def write(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_limits_of_control_groups_version_2(tmp_path):
    write(tmp_path, membership="0::/pod/box")
    root = tmp_path / "cgroup"
    write(root / "pod/box", memory__max="max", memory__current=500)
    write(root / "pod", memory__max=1000, memory__current=700, memory__stat="anon 400\ninactive_file 200")
    assert cgroup_free(root, tmp_path / "membership") == [500]
    write(root / "pod/box", memory__max=600)
    assert cgroup_free(root, tmp_path / "membership") == [100, 500]


def test_limits_of_control_groups_version_1(tmp_path):
    write(tmp_path, membership="5:devices:/\n4:cpu,memory:/box\n0::/")
    root = tmp_path / "cgroup"
    write(root / "memory", memory__limit_in_bytes=5000, memory__usage_in_bytes=4000)  # the box itself is not mounted
    assert cgroup_free(root, tmp_path / "membership") == [1000]


def test_no_control_groups_no_limits(tmp_path):
    assert cgroup_free(tmp_path, tmp_path / "missing") == []
