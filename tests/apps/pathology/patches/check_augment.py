"""The kernels of the augmentation against their twin; run by `test_augment_triton.py` with Triton's interpreter."""

import numpy as np
import pytest
import torch

from medspeed.apps.pathology.config import Augmentation
from medspeed.apps.pathology.patches import augment, augment_triton
from medspeed.apps.pathology.patches.augment import draw_patches, draw_table
from medspeed.apps.pathology.patches.augment_triton import augmented

STRONG = Augmentation((0.25, 0.75, 0.25, 0.4), (0.5, 2.0))


def pool(count, size):
    """Patches of the colours' corners, greys and random ones."""
    pixels = torch.randint(
        256, (count, 3, size, size), generator=torch.Generator().manual_seed(size), dtype=torch.uint8
    )
    pixels[:, :, 0, :8] = 255 * torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], [0, 1] * 4])[:, :8]
    pixels[:, :, 1] = 128
    return pixels


def both(draw, pixels, places, dtype=torch.float32, channels_last=True):
    table = torch.from_numpy(draw_table(draw, places))
    return augmented(pixels, table, dtype, channels_last), augment.augment(pixels[places], draw)


@pytest.mark.parametrize(("size", "steps"), [(24, 8), (33, 2)])
def test_patches_are_those_of_the_twin(size, steps, monkeypatch):
    """Each flip and turn once."""
    monkeypatch.setattr(
        augment_triton, "_STEPS", steps
    )  # the grey of a patch in one part, and in two of several blocks
    draw, places = draw_patches(STRONG, 1, 0, np.arange(8), size), np.arange(8)[::-1].copy()
    draw["element"] = np.arange(8)
    draw["moves"] = augment._moves(size)[draw["element"]]
    found, expected = both(draw, pool(12, size), places)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patches_in_half_precision(dtype, channels_last):
    pixels, draw = pool(4, 15), draw_patches(STRONG, 2, 0, np.arange(4), 15)
    found, expected = both(draw, pixels, np.arange(4), dtype, channels_last)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert (found.float() - expected).abs().max() < torch.finfo(dtype).eps


def test_without_jitter_and_zoom_pixels_are_only_moved():
    draw = draw_patches(Augmentation((0, 0, 0, 0), (1, 1)), 0, 0, np.arange(8), 9)
    found, expected = both(draw, pool(8, 9), np.arange(8))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("zoom", [0.5, 0.93, 1.08, 2.0])
def test_each_zoom_alone(zoom):
    draw = draw_patches(Augmentation((0, 0, 0, 0), (1, 1)), 0, 0, np.arange(4), 21)
    augment.set_zooms(draw, np.full(4, zoom), 21)
    found, expected = both(draw, pool(4, 21), np.arange(4))
    assert (found - expected).abs().max() < 1e-4


def test_the_operators_are_what_they_tell_the_compiler():
    pixels, draw = pool(3, 24), draw_patches(STRONG, 1, 0, np.arange(2), 24)
    table = torch.from_numpy(draw_table(draw, np.array([2, 0])))
    checks = ("test_schema", "test_faketensor")
    for channels_last in (False, True):
        arguments = pixels, table, torch.bfloat16, channels_last
        torch.library.opcheck(augmented, arguments, test_utils=checks)
