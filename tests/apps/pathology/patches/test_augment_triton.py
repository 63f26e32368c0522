import numpy as np
import pytest
import torch

from medspeed.apps.pathology.config import JITTER, Augmentation
from medspeed.apps.pathology.patches.augment import augment, draw_patches, draw_table
from tests.kernels import run_compiled, run_interpreted


@pytest.mark.slow
def test_the_kernels_equal_their_twin():
    run_interpreted("tests/apps/pathology/patches/check_augment.py")


@pytest.mark.slow
def test_the_kernels_compile_without_spilling():
    run_compiled("tests/apps/pathology/patches/compile_augment.py")


def test_the_table_moves_pixels_as_numpy_does():
    draw = draw_patches(Augmentation(JITTER, (0.9, 1.1)), 0, 0, np.arange(64), 35)
    pixels, y, x = np.arange(35.0 * 35).reshape(35, 35), *np.divmod(np.arange(35 * 35), 35)
    for row, flip, turns in zip(draw_table(draw, np.arange(64)), *divmod(draw["element"], 4), strict=True):
        found = pixels.ravel()[row[1] + y * row[2] + x * row[3]].reshape(35, 35)
        assert np.array_equal(found, np.rot90(pixels[:, ::-1] if flip else pixels, turns))


def test_the_table_has_the_draw_of_each_patch_and_its_place():
    draw = draw_patches(Augmentation(JITTER, (0.9, 1.1)), 0, 0, np.arange(64), 32)
    table = draw_table(draw, np.arange(64)[::-1])
    assert np.array_equal(table[:, 0], np.arange(64)[::-1])
    assert np.array_equal(np.take_along_axis(draw["order"], table[:, 6:7].astype(np.int64), axis=1), np.ones((64, 1)))
    assert np.array_equal(table[:, 7:11], draw["order"])
    assert np.array_equal(table[:, 11:15].copy().view(np.float32), draw["factors"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernels_equal_their_twin(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    pixels = torch.randint(256, (80, 3, 224, 224), generator=generator, device="cuda", dtype=torch.uint8)
    draw, places = draw_patches(Augmentation(JITTER, (0.9, 1.1)), 0, 0, np.arange(64), 224), np.arange(64) + 9
    from medspeed.apps.pathology.patches.augment_triton import augmented

    table = torch.from_numpy(draw_table(draw, places)).cuda()
    expected = augment(pixels[9:73], draw)
    found, again = (augmented(pixels, table, dtype, True) for _ in range(2))
    assert (found.float() - expected).abs().max() < max(1e-3, torch.finfo(dtype).eps)
    assert torch.equal(found, again)
