import numpy as np
import torch

from common.data.cache import ResidentCache, fill_cache, outline
from common.data.preparation import PreparedCase

CPU = torch.device("cpu")


def case(name, shape, label=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(1, *shape, generator=generator).half()
    label = torch.zeros(shape, dtype=torch.uint8) if label is None else label
    return PreparedCase(name, image, label, grid=None)  # type: ignore[arg-type]  # the cache does not look at the grid


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


def test_types():
    cache = fill_cache([case("a", (4, 4, 4))], (2, 2, 2), CPU)
    assert isinstance(cache, ResidentCache)
    assert (cache.image.dtype, cache.label.dtype) == (torch.float16, torch.uint8)
    assert cache.numbers.tolist() == [0]
    assert fill_cache([case("a", (4, 4, 4))], (2, 2, 2), CPU, np.array([7])).numbers.tolist() == [7]


def test_an_outline_counts_in_the_padded_shape():
    label = torch.zeros(2, 2, 2, dtype=torch.uint8)
    label[1, 0, 1], label[1, 1, 0] = 1, 1
    made = outline(case("a", (2, 2, 2), label), (1, 3, 4))
    assert made.shape.tolist() == [2, 3, 4]
    assert [voxels.tolist() for voxels in made.foreground] == [[12 + 1, 12 + 4]]  # 12 = 3 x 4 voxels in a plane of X


def test_a_cut_takes_the_asked_voxels_in_the_asked_direction():
    held = case("b", (5, 6, 7), label=torch.arange(5 * 6 * 7).remainder(3).to(torch.uint8).reshape(5, 6, 7), seed=1)
    cache = fill_cache([case("a", (4, 4, 4)), held], (2, 3, 2), CPU)
    starts, flips = np.array([[1, 2, 3], [0, 0, 5]]), np.array([[False, False, False], [True, False, True]])
    image, label = cache.cut(np.array([1, 1]), starts, flips, (2, 3, 2))
    assert (image.dtype, label.dtype, image.shape) == (torch.float16, torch.uint8, (2, 1, 2, 3, 2))
    assert torch.equal(image[0], held.image[:, 1:3, 2:5, 3:5])
    assert torch.equal(image[1], held.image[:, 0:2, 0:3, 5:7].flip([1, 3]))
    assert held.label is not None
    assert torch.equal(label[1, 0], held.label[0:2, 0:3, 5:7].flip([0, 2]))
