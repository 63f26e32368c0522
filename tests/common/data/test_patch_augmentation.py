from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.transforms import Zoom

from common.data import patch_augmentation
from common.data.colour import ColourJitter, jitter
from common.data.patch_augmentation import PatchAugmentation, augment
from tests.support import refuse_host_sync

STILL = ColourJitter(0, 0, 0, 0)
PATHOLOGY = PatchAugmentation(ColourJitter(64 / 255, 0.75, 0.25, 0.04))


def patches(number=16, size=24, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (number, size, size, 3), dtype=np.uint8))


def scaled(images):
    return np.asarray(images, np.float32).transpose(0, 3, 1, 2) / 127.5 - 1


def test_without_a_zoom_pixels_are_only_moved():
    images = patches(32)
    draw = replace(PATHOLOGY, jitter=STILL, zoom_share=0).draw(0, 0, np.arange(32))
    moved = [
        np.rot90(image[:, ::-1] if flip else image, turns)
        for image, flip, turns in zip(images.numpy(), draw.flips, draw.turns, strict=True)
    ]
    assert len({(bool(flip), int(turns)) for flip, turns in zip(draw.flips, draw.turns, strict=True)}) == 8
    result = augment(images, draw)
    assert np.array_equal(np.rint((result.numpy() + 1) * 127.5), np.stack(moved).transpose(0, 3, 1, 2))
    assert np.abs(result.numpy() - scaled(np.stack(moved))).max() < 1e-6


@pytest.mark.parametrize("size", [24, 25, 96])
def test_a_zoom_is_monais(size):
    images = patches(8, size)
    draw = replace(PATHOLOGY, jitter=STILL, flip=0, zoom=(0.7, 1.5), zoom_share=1).draw(0, 0, np.arange(8))
    result = augment(images, replace(draw, turns=np.zeros(8, np.int8)))
    for image, zoom, ours in zip(scaled(images.numpy()), draw.zooms, result.numpy(), strict=True):
        expected = Zoom(float(zoom), mode="bilinear", padding_mode="edge")(image)
        assert np.abs(ours - expected.numpy()).max() < 2e-4


def test_colours_are_jittered_before_the_patch_is_moved_and_zoomed():
    images = patches(24)
    draw = PATHOLOGY.draw(1, 0, np.arange(24))
    coloured = jitter(images.permute(0, 3, 1, 2).float() / 255, draw.jitter)
    for place in range(24):
        moved = torch.rot90(
            coloured[place].flip(2) if draw.flips[place] else coloured[place], draw.turns[place], (1, 2)
        )
        zoomed = Zoom(float(draw.zooms[place]), mode="bilinear", padding_mode="edge")(moved)
        ours = augment(images, draw)[place]
        assert (ours - (2 * zoomed.as_tensor() - 1)).abs().max() < 2e-4


def test_draws_have_their_shares_and_ranges():
    draw = PATHOLOGY.draw(0, 0, np.arange(4000))
    assert abs(draw.flips.mean() - 0.5) < 0.03
    assert np.abs(np.bincount(draw.turns, minlength=4) / 4000 - 0.25).max() < 0.03
    zoomed = draw.zooms[draw.zooms != 1]
    assert abs(len(zoomed) / 4000 - 0.5) < 0.03
    assert (round(zoomed.min(), 2), round(zoomed.max(), 2)) == (0.9, 1.1)
    assert abs(np.corrcoef(draw.jitter.factors[:, 0], draw.flips)[0, 1]) < 0.05


@pytest.mark.parametrize("chunk", [1, 3 * 24 * 24, 2**20])
def test_a_patch_does_not_depend_on_its_batch_layout_or_chunk(chunk, monkeypatch):
    images = patches(16)
    whole = augment(images, PATHOLOGY.draw(5, 1, np.arange(16)))
    monkeypatch.setattr(patch_augmentation, "_CHUNK_PIXELS", chunk)
    rows = np.array([9, 2, 14, 7])
    some = augment(images[rows], PATHOLOGY.draw(5, 1, rows))
    assert torch.allclose(some, whole[rows], atol=1e-5)
    planes = images.permute(0, 3, 1, 2).contiguous()
    assert torch.allclose(augment(planes, PATHOLOGY.draw(5, 1, np.arange(16))), whole, atol=1e-5)
    assert torch.equal(
        augment(images, PATHOLOGY.draw(5, 1, np.arange(16))), augment(planes, PATHOLOGY.draw(5, 1, np.arange(16)))
    )


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match=r"flip 1.5: a probability"):
        replace(PATHOLOGY, flip=1.5)
    with pytest.raises(ValueError, match=r"zoom \(1.1, 0.9\)"):
        replace(PATHOLOGY, zoom=(1.1, 0.9))
    draw = PATHOLOGY.draw(0, 0, np.arange(1))
    for wrong in (torch.zeros(1, 8, 9, 3, dtype=torch.uint8), torch.zeros(1, 3, 8, 8), torch.zeros(3, 8, 8)):
        with pytest.raises(ValueError, match="square"):
            augment(wrong, draw)


def test_the_host_does_not_wait():
    images, draw = patches(24), PATHOLOGY.draw(0, 0, np.arange(24))
    with refuse_host_sync():
        augment(images, draw)
