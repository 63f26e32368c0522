from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.pathology.monai_recipe import MonaiPatchBatches, training_transforms, validation_transforms
from apps.pathology.patch_table import PatchTable
from common.data.colour import ColourJitter
from tests.apps.pathology.scan_runs import write_slide

CPU = torch.device("cpu")
# MONAI makes tensors of the reader's arrays as they are.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
JITTER = ColourJitter(0.25, 0.75, 0.25, 0.04)


@pytest.fixture
def table(tmp_path: Path) -> PatchTable:
    """Ten patches of a slide at different places."""
    slide = write_slide(tmp_path / "a.tif", [(200, 200, 60)])
    corner = np.array([(32 * number, 16 * number + 90) for number in range(10)], np.int32)
    return PatchTable((slide,), np.zeros(10, np.int32), corner, np.arange(10, dtype=np.uint8) % 2, 64)


def batches_of(table: PatchTable, transforms: list[Any], seed: int = 0, **options) -> MonaiPatchBatches:
    return MonaiPatchBatches(table, transforms, "openslide", 4, 0, seed, CPU, **options)


def test_pixels_are_the_slides_scaled_to_one(table):
    import tifffile

    slide = tifffile.imread(table.files[0])
    (batch, *_) = batches_of(table, validation_transforms()).epoch(0)
    assert batch.image.shape == (4, 3, 64, 64)
    expected = [slide[y : y + 64, x : x + 64].transpose(2, 0, 1) / 127.5 - 1 for x, y in table.corner]
    for image, label in zip(batch.image.numpy(), batch.label, strict=True):
        places = [n for n, each in enumerate(expected) if np.abs(each - image).max() < 1e-5]
        assert places
        assert float(label) in {float(table.label[n]) for n in places}


def test_an_epoch_is_drawn_from_seed_and_number_alone(table):
    batches = batches_of(table, training_transforms(JITTER, (0.9, 1.1)))
    assert batches.steps_per_epoch == 2
    first, again, other = (
        torch.cat([batch.image for batch in batches.epoch(number)]) for number in (3, 3, 4)
    )  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(
        first,
        torch.cat([each.image for each in batches_of(table, training_transforms(JITTER, (0.9, 1.1)), 1).epoch(3)]),
    )
    assert first.min() >= -1
    assert first.max() <= 1


def test_what_the_device_does_comes_last(table):
    batches = batches_of(table, [], on_device=lambda images: images * 0 + 7)
    assert all((batch.image == 7).all() for batch in batches.epoch(0))


def test_too_few_patches_are_refused(table):
    with pytest.raises(ValueError, match="batch_size 4: there are 3 training patches"):
        batches_of(table.take(np.arange(3)), [])


def test_a_source_that_cannot_go_on_within_an_epoch_yields_nothing_at_its_end(table):
    batches = batches_of(table, [])
    assert not batches.resumes_within_epoch
    assert list(batches.epoch(0, 2)) == []
