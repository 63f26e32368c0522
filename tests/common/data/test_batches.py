import hashlib
import math
import threading
import traceback
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medspeed.common.data.batches import Batch, Batches, crop_batches, keyed_batches, keyed_uniforms, partition_cases
from medspeed.common.data.cache import CaseCache, fill_cache
from medspeed.common.data.crops import CachedCase, Tier, place_case
from medspeed.common.data.preparation import PreparedCase
from tests.support import refuse_host_sync

CPU = torch.device("cpu")


def case(name, shape, label=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(1, *shape, generator=generator).half()
    label = torch.zeros(shape, dtype=torch.uint8) if label is None else label
    return PreparedCase(name, image, label, grid=None)  # type: ignore[arg-type]  # the cache does not look at the grid


def coordinates(name, shape):
    """A case whose image tells each voxel's own X, Y, Z (exact in float16 up to 2048) and whose label is X."""
    axes = torch.meshgrid(*(torch.arange(side) for side in shape), indexing="ij")
    return PreparedCase(name, torch.stack(axes).half(), axes[0].to(torch.uint8), grid=None)  # type: ignore[arg-type]


def batches(cases, crop=(4, 4, 4), **settings):
    given = {"crops_per_case": 2, "batch_size": 4, "intensity": 0.0, "flip_axes": "", **settings}
    return crop_batches([fill_cache(cases, "gpu", crop, CPU)], **given)


def test_a_crop_is_a_contiguous_piece_of_its_case():
    held = {"a": coordinates("a", (9, 7, 8)), "b": coordinates("b", (6, 8, 5))}
    for batch in batches(list(held.values()), crop=(3, 4, 5)).epoch(0):
        assert batch.image.shape == (4, 3, 3, 4, 5)
        assert batch.label.shape == (4, 1, 3, 4, 5)
        for image, label, name in zip(batch.image, batch.label, batch.cases, strict=True):
            x, y, z = image[:, 0, 0, 0].int().tolist()
            piece = held[name].image[:, x : x + 3, y : y + 4, z : z + 5]
            assert torch.equal(image, piece.float())
            assert torch.equal(label[0], piece[0].to(torch.uint8))


def test_flips_reverse_image_and_label_together_on_the_named_axes_only():
    seen = set()
    for epoch in range(20):
        for batch in batches([coordinates("a", (9, 9, 9))], flip_axes="xz").epoch(epoch):
            for image, label in zip(batch.image, batch.label, strict=True):
                steps = (image[0, 1, 0, 0] - image[0, 0, 0, 0], image[1, 0, 1, 0] - image[1, 0, 0, 0],
                         image[2, 0, 0, 1] - image[2, 0, 0, 0])  # fmt: skip
                seen.add(tuple(int(step) for step in steps))
                assert torch.equal(label[0].float(), image[0])
    assert seen == {(1, 1, 1), (-1, 1, 1), (1, 1, -1), (-1, 1, -1)}


def test_half_of_the_crops_are_centred_on_foreground():
    label = torch.zeros(40, 40, 40, dtype=torch.uint8)
    label[30, 10, 20] = 1
    made = batches([case("a", (40, 40, 40), label)], crop=(5, 5, 5), crops_per_case=400, batch_size=400)
    (batch,) = made.epoch(0)
    centred = batch.label[:, 0, 2, 2, 2].sum().item()
    # binomial(400, 1/2): 200 +- 5 standard deviations; a background crop hits that very voxel once in 46,656
    assert 150 < centred < 250


def test_classes_are_drawn_evenly_however_small_they_are():
    label = torch.ones(20, 20, 20, dtype=torch.uint8)
    label[10, 10, 10] = 2
    made = batches([case("a", (20, 20, 20), label)], crop=(1, 1, 1), crops_per_case=400, batch_size=400)
    (batch,) = made.epoch(0)
    assert 60 < (batch.label == 2).sum().item() < 140  # a quarter of 400, +- 4.6 standard deviations


def test_intensity_changes_each_crop_by_one_scale_and_shift_in_bounds():
    held = case("a", (8, 8, 8))
    plain = batches([held], crop=(8, 8, 8))
    changed = batches([held], crop=(8, 8, 8), intensity=0.1)
    for before, after in zip(plain.epoch(3), changed.epoch(3), strict=True):
        for x, y in zip(before.image, after.image, strict=True):
            slope, shift = np.polyfit(x.flatten().numpy(), y.flatten().numpy(), 1)
            assert np.allclose(slope * x.numpy() + shift, y.numpy(), atol=1e-6)
            assert 0.9 <= slope <= 1.1
            assert abs(shift) <= 0.1
            assert abs(slope - 1) > 1e-6


def test_an_epoch_goes_on_at_any_step_as_if_it_had_not_stopped():
    made = batches([case("a", (9, 9, 9)), case("b", (9, 8, 7), seed=5), case("c", (6, 6, 6))], flip_axes="xyz")
    whole = list(made.epoch(4))
    assert len(whole) == made.steps_per_epoch == 2
    (last,) = made.epoch(4, first_step=1)
    assert torch.equal(last.image, whole[1].image)
    assert last.cases == whole[1].cases
    assert list(made.epoch(4, first_step=2)) == []


def test_every_case_comes_as_often_as_asked_and_the_last_batch_is_full():
    made = batches([case(name, (5, 5, 5)) for name in "abc"], crops_per_case=3, batch_size=4)
    names = [name for batch in made.epoch(0) for name in batch.cases]
    assert len(names) == 12
    assert min(names.count(name) for name in "abc") >= 3


def test_epochs_and_seeds_differ():
    made = batches([case("a", (9, 9, 9))])
    other = batches([case("a", (9, 9, 9))], seed=1)
    first = next(made.epoch(0)).image
    assert not torch.equal(first, next(made.epoch(1)).image)
    assert not torch.equal(first, next(other.epoch(0)).image)


def test_a_crop_depends_on_its_key_alone_not_on_the_other_cases():
    alone, both = batches([case("a", (9, 9, 9))]), batches([case("a", (9, 9, 9)), case("b", (9, 9, 9), seed=7)])
    crops = {image.numpy().tobytes() for batch in alone.epoch(2) for image in batch.image}
    again = {
        image.numpy().tobytes()
        for batch in both.epoch(2)
        for image, name in zip(batch.image, batch.cases, strict=True)
        if name == "a"
    }
    assert again <= crops


def test_making_a_batch_never_waits_for_the_device():
    made = batches([case("a", (9, 9, 9))], flip_axes="xyz", intensity=0.1)
    with refuse_host_sync():
        assert sum(batch.image.shape[0] for batch in made.epoch(0)) == 4


def golden_cases() -> list[PreparedCase]:
    cases = []
    for number, shape in enumerate([(11, 9, 8), (6, 14, 7), (5, 4, 12), (8, 8, 8), (13, 5, 6)]):
        voxels = torch.arange(math.prod(shape)).reshape(shape)
        image = torch.stack([(voxels * (channel + 3) + number) % 251 for channel in range(2)]).half() / 64 - 1
        label = (voxels % 17 == number).to(torch.uint8) + 2 * (voxels % 53 == 7).to(torch.uint8)
        label = torch.zeros_like(label) if number == 3 else label
        cases.append(PreparedCase(f"case{number}", image, label, grid=None))  # type: ignore[arg-type]
    return cases


GOLDEN_CROP = (6, 6, 6)  # more than some of the cases hold
TIERS: dict[str, Tier] = {"resident": "gpu", "ram": "ram", "disk": "disk", "none": "disk", "alone": "gpu"}


def cached_as(kind: str) -> CaseCache:
    cases = golden_cases()
    if kind in ("none", "alone"):

        def load(number: int) -> CachedCase:
            return place_case(cases[number], TIERS[kind], GOLDEN_CROP, CPU)

        return CaseCache(lambda epoch: np.arange(5), GOLDEN_CROP, CPU, kind == "none", load)
    return fill_cache(cases, TIERS[kind], GOLDEN_CROP, CPU)


@pytest.mark.parametrize("kind", TIERS)
def test_three_epochs_are_the_same_wherever_the_cases_lie(kind):
    """The digest was recorded anew when other cases than the first began to fill the last batch."""
    digest = hashlib.sha256()
    made = crop_batches([cached_as(kind)], 3, 4, seed=11)
    for epoch in range(3):
        for batch in made.epoch(epoch):
            digest.update(batch.image.numpy().tobytes())
            digest.update(batch.label.numpy().tobytes())
            digest.update("".join(batch.cases).encode())
    assert digest.hexdigest() == "7327a71017c777e42c957d00a56a7f1c38d16ff23e666905c71125e562cce55f"


@pytest.mark.parametrize("kind", TIERS)
def test_over_epochs_all_cases_give_as_many_crops(kind):
    """5 cases and 16 crops in an epoch: the one that fills the last batch is of the next case each time."""
    made = crop_batches([cached_as(kind)], 3, 4, seed=11)
    counts = Counter(name for epoch in range(7) for batch in made.epoch(epoch) for name in batch.cases)
    assert sorted(counts.values()) == [22, 22, 22, 23, 23]


def partition(number: int, count: int = 9, partitions: int = 2) -> CaseCache:
    indices = partition_cases(count, partitions, number)
    cases = [case(f"case{index}", (9, 8, 7), seed=int(index)) for index in indices]
    return fill_cache(cases, "gpu", (4, 4, 4), CPU, indices)


def distributed(*numbers: int) -> Batches:
    return crop_batches([partition(number) for number in numbers], 3, 6, 9, partitions=2, seed=5)


def test_one_process_with_two_partitions_yields_what_two_processes_yield():
    both, first, second = distributed(0, 1), distributed(0), distributed(1)
    assert both.steps_per_epoch == first.steps_per_epoch == second.steps_per_epoch == 5  # 27 crops, 6 a step
    for epoch in (0, 3):
        for whole, *parts in zip(both.epoch(epoch), first.epoch(epoch), second.epoch(epoch), strict=True):
            assert torch.equal(whole.image, torch.cat([part.image for part in parts]))
            assert torch.equal(whole.label, torch.cat([part.label for part in parts]))
            assert whole.cases == parts[0].cases + parts[1].cases
            assert whole.image.shape[0] == 6


def test_each_partition_gives_crops_of_its_own_cases_only():
    names = {name for batch in distributed(1).epoch(0) for name in batch.cases}
    assert names == {"case1", "case3", "case5", "case7"}


def test_a_crop_is_the_same_in_whatever_partition_its_case_lies():
    def crops(caches, partitions, batch_size):
        made = crop_batches(caches, 3, batch_size, 9, partitions, seed=5)
        return {
            (name, image.numpy().tobytes())
            for batch in made.epoch(1)
            for image, name in zip(batch.image, batch.cases, strict=True)
        }

    alone = crops([partition(0, partitions=1)], 1, 9)  # 27 crops in 3 full steps
    thirds = crops([partition(number, partitions=3) for number in range(3)], 3, 9)
    assert len(alone) == 27
    assert alone == thirds


def test_keyed_batches_take_whatever_has_an_order():
    """Items that are no crops: what an epoch yields is decided by its number, its partition and the step alone."""

    def numbers(partition: int):
        def take(epoch: int, part: slice) -> Batch:
            found = 100 * epoch + 10 * partition + torch.arange(9)[part]
            return Batch(found, found, tuple(str(each) for each in found.tolist()))

        return lambda epoch: nullcontext(lambda part: take(epoch, part))

    both = keyed_batches([numbers(0), numbers(1)], 3, 2, prefetch_for=CPU)
    assert [batch.image.tolist() for batch in both.epoch(1)] == [
        [100, 101, 110, 111],
        [102, 103, 112, 113],
        [104, 105, 114, 115],
    ]
    assert [batch.cases for batch in both.epoch(0, first_step=2)] == [("4", "5", "14", "15")]
    assert [batch.image.tolist() for batch in keyed_batches([numbers(1)], 3, 2).epoch(1, 2)] == [[114, 115]]


def broken(number: int) -> CachedCase:
    raise ValueError(f"case{number}: damaged")


def test_a_case_that_fails_in_the_background_fails_the_loop_with_its_own_traceback():
    cache = CaseCache(lambda epoch: np.arange(1), (4, 4, 4), CPU, True, broken)
    with pytest.raises(ValueError, match="case0: damaged") as error:
        next(crop_batches([cache], 2, 2).epoch(0))
    assert "broken" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]


@pytest.mark.parametrize("ending", ["close", "error"])
def test_leaving_an_epoch_early_leaves_no_thread_behind(ending):
    before = set(threading.enumerate())
    epoch = crop_batches([cached_as("ram")], 3, 4).epoch(0)
    next(epoch)
    assert set(threading.enumerate()) > before
    if ending == "close":
        epoch.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            epoch.throw(KeyboardInterrupt())
    assert set(threading.enumerate()) == before


def test_an_error_in_the_training_loop_leaves_no_thread_behind():
    before = set(threading.enumerate())

    def train():
        for batch in crop_batches([cached_as("ram")], 3, 4).epoch(0):
            raise ArithmeticError(f"the loss of {batch.cases} is not finite")

    with pytest.raises(ArithmeticError):
        train()
    assert set(threading.enumerate()) == before


def test_a_cache_on_the_device_needs_no_thread():
    before = set(threading.enumerate())
    next(crop_batches([cached_as("resident")], 3, 4).epoch(0))
    assert set(threading.enumerate()) == before


@pytest.mark.gpu
def test_crops_on_a_gpu_equal_those_on_the_cpu():
    cases = [case("a", (30, 31, 32)), case("b", (20, 40, 50), seed=3)]
    there, here = (
        crop_batches([fill_cache(cases, "gpu", (16, 16, 16), torch.device(kind))], 4, 4) for kind in ("cuda", "cpu")
    )
    for gpu, cpu in zip(there.epoch(1), here.epoch(1), strict=True):
        assert torch.equal(gpu.label.cpu(), cpu.label)
        assert torch.allclose(gpu.image.cpu(), cpu.image, atol=1e-6)


def test_round_0_deals_in_turn():
    assert [partition_cases(7, 3, number).tolist() for number in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


@given(st.data(), st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_each_case_is_in_exactly_one_partition_and_sizes_differ_by_one_at_most(data, count, seed, round):
    partitions = data.draw(st.integers(1, count))
    dealt = [partition_cases(count, partitions, number, seed, round) for number in range(partitions)]
    assert sorted(np.concatenate(dealt).tolist()) == list(range(count))
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.dtype == np.int64 for part in dealt)


def test_rounds_and_seeds_deal_anew_and_the_same_ones_alike():
    first = partition_cases(50, 2, 0, seed=1, round=1)
    assert first.tolist() == partition_cases(50, 2, 0, seed=1, round=1).tolist()
    others = [partition_cases(50, 2, 0, seed=seed, round=round) for seed, round in [(1, 0), (1, 2), (2, 1)]]
    for other in others:
        # 25 of 50 drawn at random share 12.5 +- 1.8 with any other 25
        assert 5 <= len(set(first.tolist()) & set(other.tolist())) <= 20


def test_more_partitions_than_cases_are_refused():
    with pytest.raises(ValueError, match="partitions 4: must be between 1 and"):
        partition_cases(3, 4, 0)


def test_keyed_uniforms_are_uniform_and_keyed():
    n = 20_000
    draws = keyed_uniforms(3, 1, np.arange(n), np.zeros(n, dtype=np.int64), 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.allclose(draws.mean(0), 0.5, atol=0.01)
    assert np.allclose(draws.var(0), 1 / 12, atol=0.005)
    assert abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.03
    assert np.array_equal(draws[5:6], keyed_uniforms(3, 1, np.array([5]), np.array([0]), 4))
    assert not np.array_equal(draws[5:6], keyed_uniforms(3, 2, np.array([5]), np.array([0]), 4))
