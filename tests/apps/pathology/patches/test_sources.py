from pathlib import Path

import numpy as np
import pytest
import torch

from apps.pathology.config import Augmentation
from apps.pathology.patches.sources import patch_batches
from apps.pathology.patches.store import Patches, Tier
from apps.pathology.patches.table import PatchTable
from common.data.batches import KeyedBatches
from tests.support import refuse_host_sync

CPU = torch.device("cpu")
COUNT = 23
AUGMENTATION = Augmentation((0.25, 0.75, 0.25, 0.04), (0.9, 1.1))
MOVES = Augmentation((0, 0, 0, 0), (1.0, 1.0))  # flips and quarter turns


@pytest.fixture
def patches() -> Patches:
    """Patches that carry their own number in every pixel."""
    label = np.arange(COUNT, dtype=np.uint8) % 2
    table = PatchTable((Path("a.tif"),), np.zeros(COUNT, np.int32), np.zeros((COUNT, 2), np.int32), label, 32)
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32)).astype(np.uint8)
    pixels[:, :, 0, 0] = np.arange(COUNT)[:, None]
    return Patches(table, pixels)


def batches_of(
    patches: Patches, size: int, partitions: int = 1, mine: tuple[int, ...] | None = None, tier: Tier = "ram"
) -> KeyedBatches:
    here = range(partitions) if mine is None else mine
    rows = np.flatnonzero(np.isin(np.arange(COUNT) % partitions, here))
    return patch_batches(patches.near(rows, tier, CPU), here, partitions, size, AUGMENTATION, 3, CPU)


def test_an_epoch_takes_each_patch_once_at_most_with_its_label(patches: Patches):
    batches = patch_batches(patches, range(1), 1, 5, MOVES, 0, CPU)
    assert batches.steps_per_epoch == 4
    numbers = {}
    for epoch in range(2):
        found = []
        for batch in batches.epoch(epoch):
            assert batch.image.shape == (5, 3, 32, 32)
            # a turned patch has its number in another corner
            corners = ((batch.image[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]] + 1) * 127.5).round().int()
            mine = [
                next(
                    n
                    for n in range(COUNT)
                    if n in corner and sorted(np.asarray(patches.pixels)[n, 0].ravel()) == sorted(pixels)
                )
                for corner, pixels in zip(
                    corners.tolist(),
                    ((batch.image[:, 0] + 1) * 127.5).round().int().flatten(1).tolist(),
                    strict=True,
                )
            ]
            assert batch.label.tolist() == [float(n % 2) for n in mine]
            found += mine
        assert len(set(found)) == len(found) == 20
        numbers[epoch] = found
    assert numbers[0] != numbers[1]


def test_an_epoch_can_be_entered_at_any_step_and_repeats(patches: Patches):
    batches = batches_of(patches, 5)
    whole = list(batches.epoch(2))
    later = list(batches_of(patches, 5).epoch(2, 2))
    assert len(later) == 2
    for one, other in zip(whole[2:], later, strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.label, other.label)


def test_two_processes_with_a_partition_each_hold_the_batch_of_one_with_two(patches: Patches):
    one = next(batches_of(patches, 6, partitions=2).epoch(1))
    two = [next(batches_of(patches, 6, partitions=2, mine=(number,)).epoch(1)) for number in (0, 1)]
    assert [len(part.image) for part in two] == [3, 3]
    assert torch.equal(one.image, torch.cat([part.image for part in two]))
    assert torch.equal(one.label, torch.cat([part.label for part in two]))


@pytest.mark.parametrize("tier", ["gpu", "disk"])
def test_the_tier_changes_nothing(patches: Patches, tier: Tier):
    tiers: tuple[Tier, Tier] = ("ram", tier)
    one, other = (next(batches_of(patches, 6, 2, (1,), tier=each).epoch(0)) for each in tiers)
    assert torch.equal(one.image, other.image)
    assert torch.equal(one.label, other.label)


def test_a_batch_waits_for_nothing(patches: Patches):
    batches = batches_of(patches, 5, tier="gpu")
    with refuse_host_sync():
        assert len(list(batches.epoch(0))) == 4


def test_a_batch_larger_than_the_set_is_refused(patches: Patches):
    with pytest.raises(ValueError, match="batch_size 24: 23 training patches in 1 partitions do not fill one batch"):
        batches_of(patches, 24)
