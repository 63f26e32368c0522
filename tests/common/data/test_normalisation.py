import numpy as np
import pytest
import torch

from common.data import normalisation
from common.data.normalisation import contiguous, standardised, windowed


@pytest.fixture(params=[1, 700, 10**6], ids=["planes", "slabs", "whole"])
def _slabs(request, monkeypatch):
    monkeypatch.setattr(normalisation, "SLAB_VOXELS", request.param)


def image_of(dtype: torch.dtype, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    """Return [2, 9, 10, 11] that lies in memory in another order of axes, a third of it zero."""
    shape = (2, 9, 10, 11)
    stored = tuple(shape[axis] for axis in order)
    values = np.random.default_rng(0).integers(-40, 300, stored) * (np.random.default_rng(1).random(stored) > 0.3)
    return torch.from_numpy(values).to(dtype).permute(*np.argsort(order).tolist())


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 3, 1), (3, 0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_each_channel_has_mean_0_and_deviation_1_where_it_is_not_zero(dtype, order):
    image = image_of(dtype, order)
    before = image.clone()
    found = standardised(image, torch.float32)
    assert found.is_contiguous()
    assert torch.equal(image, before)
    for channel, given in zip(found.numpy(), image.numpy().astype(np.float64), strict=True):
        inside = given != 0
        expected = np.where(inside, (given - given[inside].mean()) / given[inside].std(), 0)
        np.testing.assert_allclose(channel, expected, atol=2e-6)


@pytest.mark.parametrize("value", [7, 0.1, -1e-4, 3e7])
def test_a_channel_that_does_not_vary_becomes_zero(value):
    image = torch.full((1, 5, 6, 7), value, dtype=torch.float32)
    image[0, 0] = 0
    assert standardised(image, torch.float32).abs().max() <= abs(value) * 1e-6
    assert not standardised(torch.zeros(1, 2, 2, 2), torch.float16).any()


@pytest.mark.usefixtures("_slabs")
def test_a_window_becomes_0_to_1_and_is_clipped():
    image = torch.tensor([-100, -50, 0, 50, 100, 200], dtype=torch.int16).view(1, 6, 1, 1)
    found = windowed(image, (-50, 150), torch.float16)
    assert found.flatten().tolist() == [0, 0, 0.25, 0.5, 0.75, 1]


@pytest.mark.usefixtures("_slabs")
def test_memory_is_put_in_order():
    image = image_of(torch.int16, (0, 3, 2, 1))
    found = contiguous(image, torch.int32)
    assert found.is_contiguous()
    assert found.dtype == torch.int32
    assert torch.equal(found.to(torch.int16), image)
