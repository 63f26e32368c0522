import numpy as np
import pytest
import torch

from common.data import cache_host
from common.data.cache import HeldCases, fill_cache
from common.data.cache_host import CaseList, LoadedCases, MixedCases, hold_case, hold_cases
from common.data.entries import read_entry, write_entry
from common.data.geometry import working_grid
from common.data.preparation import PreparedCase
from common.data.tiers import Tier
from tests.support import refuse_host_sync

CPU = torch.device("cpu")
CROP = (6, 5, 4)
SHAPES = [(9, 8, 7), (4, 12, 3), (6, 5, 4), (11, 3, 9), (5, 4, 3)]  # three of them smaller than a crop somewhere


def case(number: int) -> PreparedCase:
    random = torch.Generator().manual_seed(number)
    shape = SHAPES[number]
    image = torch.randn(2, *shape, generator=random).half()
    label = torch.randint(0, 4, shape, generator=random, dtype=torch.uint8)
    return PreparedCase(f"case{number}", image, label, working_grid(shape, np.eye(4), (1.0, 1.0, 1.0)))


@pytest.fixture
def cases(tmp_path) -> list[PreparedCase]:
    """Return cases as the store does: memory-mapped."""
    entries = []
    for number in range(len(SHAPES)):
        path = tmp_path / f"{number}.safetensors"
        write_entry(path, case(number), "{}")
        entries.append(read_entry(path, f"case{number}", "{}"))
    return entries


def kinds(cases: list[PreparedCase], device: torch.device = CPU) -> dict[str, HeldCases]:
    """Return the same cases held in every way."""
    tiers: dict[str, list[Tier]] = {
        "resident": ["gpu"] * 5,
        "ram": ["ram"] * 5,
        "disk": ["disk"] * 5,
        "mixed": ["disk", "gpu", "ram", "gpu", "ram"],
    }
    made: dict[str, HeldCases] = {name: hold_cases(cases, each, CROP, device) for name, each in tiers.items()}
    names = tuple(case.name for case in cases)
    made["none"] = LoadedCases(
        names, np.arange(5), device, lambda row: hold_case(case(row), CROP, "none", device), keep=3
    )
    own = tuple(hold_case(each, CROP, "gpu", device) for each in cases)
    made["each on the device"] = CaseList(own, np.arange(5), device)
    return made


def random_crops(cases, count=40):
    random = np.random.default_rng(0)
    rows = random.integers(0, 5, count)
    room = np.array([np.maximum(cases[row].image.shape[1:], CROP) for row in rows]) - CROP
    return rows, np.floor(random.random((count, 3)) * (room + 1)).astype(np.int64), random.random((count, 3)) < 0.5


def compare_all_kinds(cases, device):
    rows, starts, flips = random_crops(cases)
    image, label = fill_cache(cases, CROP, CPU).cut(rows, starts, flips, CROP)
    assert image.abs().sum() > 0
    for name, held in kinds(cases, device).items():
        cut = held.cut(rows, starts, flips, CROP)
        assert [tensor.dtype for tensor in cut] == [torch.float16, torch.uint8], name
        assert cut[0].device.type == device.type, name
        assert torch.equal(cut[0].cpu(), image), name
        assert torch.equal(cut[1].cpu(), label), name


def test_every_kind_cuts_the_same_crops(cases):
    compare_all_kinds(cases, CPU)


@pytest.mark.gpu
def test_every_kind_cuts_the_same_crops_on_a_gpu(cases):
    compare_all_kinds(cases, torch.device("cuda"))


def test_every_kind_knows_the_same_outlines_and_names(cases):
    expected = fill_cache(cases, CROP, CPU)
    for name, held in kinds(cases).items():
        assert held.names == expected.names, name
        assert held.numbers.tolist() == [0, 1, 2, 3, 4], name
        for row in range(5):
            one, other = held.outline(row), expected.outline(row)
            assert one.shape.tolist() == other.shape.tolist(), name
            assert [voxels.tolist() for voxels in one.foreground] == [voxels.tolist() for voxels in other.foreground]


def test_slices_on_a_device_are_those_on_the_host(cases):
    """The path of tensors that lie on a GPU, taken here with tensors on the CPU."""
    rows, starts, flips = random_crops(cases)
    volumes = [cases[row].image for row in rows]
    there = cache_host._slice_there(volumes, starts, flips, CROP)
    assert torch.equal(there, cache_host._copy_here(volumes, starts, flips, CROP, CPU))


def test_ram_is_a_copy_and_disk_is_not(cases):
    ram, disk = (hold_case(cases[0], CROP, tier, CPU) for tier in ("ram", "disk"))
    assert disk.image.data_ptr() == cases[0].image.data_ptr()
    assert ram.image.data_ptr() != cases[0].image.data_ptr()
    assert torch.equal(ram.image, disk.image)


def test_one_tier_needs_no_mixture(cases):
    made = kinds(cases)
    assert isinstance(made["mixed"], MixedCases)
    assert not any(isinstance(held, MixedCases) for name, held in made.items() if name != "mixed")
    assert [made[name].on_host for name in ("resident", "ram", "disk", "mixed", "none")] == [False, *[True] * 4]


def test_numbers_travel_with_a_mixture(cases):
    tiers = ["ram", "gpu", "ram", "gpu", "disk"]
    held = hold_cases(cases, tiers, CROP, CPU, np.array([10, 11, 12, 13, 14]))  # type: ignore[arg-type]
    assert isinstance(held, MixedCases)
    assert held.numbers.tolist() == [10, 11, 12, 13, 14]
    assert [part.numbers.tolist() for part in held.parts] == [[11, 13], [10, 12, 14]]


def test_a_case_that_is_not_kept_is_loaded_again_when_used_again():
    loaded: list[int] = []

    def load(row):
        loaded.append(row)
        return hold_case(case(row), CROP, "none", CPU)

    held = LoadedCases(("a", "b", "c"), np.arange(3), CPU, load, keep=2)
    for row in (0, 1, 0, 2, 0, 1):  # 1 is the one used longest ago when 2 comes
        held.outline(row)
    assert loaded == [0, 1, 2, 1]


def test_cutting_on_the_host_waits_for_no_device(cases):
    rows, starts, flips = random_crops(cases)
    for held in kinds(cases).values():
        with refuse_host_sync():
            held.cut(rows, starts, flips, CROP)


def test_cases_are_only_read(cases):
    before = [each.image.clone() for each in cases]
    rows, starts, flips = random_crops(cases)
    kinds(cases)["disk"].cut(rows, starts, flips, CROP)[0].zero_()
    assert all(torch.equal(each.image, was) for each, was in zip(cases, before, strict=True))
