import numpy as np
import pytest
import torch

from common.data.batches import CropBatches, keyed_uniforms
from common.data.cache import ResidentCache, cache_device, fill_cache
from common.data.preparation import PreparedCase
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
    given = {"crops_per_case": 2, "batch_size": 4, "intensity": 0.0, "flip_axes": (), **settings}
    return CropBatches(fill_cache(cases, crop, CPU), crop, **given)


def test_the_cache_holds_every_voxel_where_it_says():
    cases = [case("a", (3, 4, 5), seed=1), case("b", (2, 2, 9), seed=2)]
    cache = fill_cache(cases, (2, 2, 2), CPU)
    for number, held in enumerate(cases):
        x, y, z = 1, 1, 3
        index = cache.offsets[number] + (np.array([x, y, z]) * cache.strides[number]).sum()
        assert cache.image[0, index] == held.image[0, x, y, z]
    assert cache.image.shape == (1, 3 * 4 * 5 + 2 * 2 * 9)


def test_small_volumes_are_padded_with_zeros_at_the_far_end():
    held = case("a", (3, 4, 5), label=torch.ones(3, 4, 5, dtype=torch.uint8))
    cache = fill_cache([held], (4, 4, 8), CPU)
    assert cache.shapes.tolist() == [[4, 4, 8]]
    volume = cache.image.reshape(4, 4, 8)
    assert torch.equal(volume[:3, :4, :5], held.image[0])
    assert volume[3:].abs().max() == 0
    assert int(cache.label.sum()) == 60


def test_foreground_is_listed_per_class():
    label = torch.zeros(2, 2, 2, dtype=torch.uint8)
    label[0, 0, 1], label[1, 1, 1] = 2, 1
    cache = fill_cache([case("a", (2, 2, 2), label)], (1, 1, 1), CPU)
    assert [voxels.tolist() for voxels in cache.foreground[0]] == [[7], [1]]


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
        for batch in batches([coordinates("a", (9, 9, 9))], flip_axes=(0, 2)).epoch(epoch):
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
    made = batches([case("a", (9, 9, 9)), case("b", (9, 8, 7), seed=5), case("c", (6, 6, 6))], flip_axes=(0, 1, 2))
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
    made = batches([case("a", (9, 9, 9))], flip_axes=(0, 1, 2), intensity=0.1)
    with refuse_host_sync():
        assert sum(batch.image.shape[0] for batch in made.epoch(0)) == 4


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


def test_the_cache_lies_on_a_gpu_that_has_room_and_else_in_host_memory(monkeypatch):
    cases = [case("a", (64, 64, 64))]  # 0.75 MiB
    device, line = cache_device(cases, CPU)
    assert device == CPU
    assert "1 cases, 1 MiB in memory" in line
    for free, kind in [(2**30, "cuda"), (2**20, "cpu")]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2**34))
        assert cache_device(cases, torch.device("cuda"))[0].type == kind


@pytest.mark.gpu
def test_crops_on_a_gpu_equal_those_on_the_cpu():
    cases = [case("a", (30, 31, 32)), case("b", (20, 40, 50), seed=3)]
    there = CropBatches(fill_cache(cases, (16, 16, 16), torch.device("cuda")), (16, 16, 16), 4, 4)
    here = CropBatches(fill_cache(cases, (16, 16, 16), CPU), (16, 16, 16), 4, 4)
    for gpu, cpu in zip(there.epoch(1), here.epoch(1), strict=True):
        assert torch.equal(gpu.label.cpu(), cpu.label)
        assert torch.allclose(gpu.image.cpu(), cpu.image, atol=1e-6)


def test_types():
    cache = fill_cache([case("a", (4, 4, 4))], (2, 2, 2), CPU)
    assert isinstance(cache, ResidentCache)
    assert (cache.image.dtype, cache.label.dtype) == (torch.float16, torch.uint8)
