"""The peer: MONAI's recipe does what the tutorial's does, on the right labels."""

import json

import nibabel
import numpy as np
import pytest
import torch
from monai.data import CacheDataset
from monai.transforms import Compose

from medspeed.benchmarks.peers import brats_guide

CPU = torch.device("cpu")


def items(folder):
    listed = json.loads((folder / "dataset.json").read_text())["training"]
    return [{key: str(folder / path) for key, path in pair.items()} for pair in listed]


def test_the_regions_of_each_label_are_those_of_msd():
    label = torch.tensor([0, 1, 2, 3]).view(4, 1, 1)
    tumour_core, whole_tumour, enhancing = brats_guide.label_to_regions(label)[:, :, 0, 0].tolist()
    assert tumour_core == [0, 0, 1, 1]
    assert whole_tumour == [0, 1, 1, 1]
    assert enhancing == [0, 0, 0, 1]


def test_regions_become_the_label_map_they_were_made_of():
    label = torch.randint(0, 4, (5, 6, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(brats_guide.regions_to_label(brats_guide.label_to_regions(label)), label[None].to(torch.uint8))


def test_a_fixed_item_has_the_images_and_the_regions_on_one_grid(small_heads):
    fixed = Compose(brats_guide.fixed_transforms(("image", "label"), CPU, (2.0, 1.0, 1.0)))
    item = fixed(items(small_heads)[0])
    assert item["image"].shape == (4, 12, 24, 24)
    assert item["label"].shape == (3, 12, 24, 24)


def test_the_random_transforms_leave_the_cache_as_it_is(small_heads):
    """MONAI's NormalizeIntensityd writes into what it is given, here a view of the cached volume."""
    transforms = brats_guide.training_transforms(CPU, (1.0, 1.0, 1.0), (24, 24, 24))
    dataset = CacheDataset(items(small_heads), transforms, copy_cache=False, progress=False)
    before = [dataset._cache[number]["image"].clone() for number in range(2)]
    dataset.transform.set_random_state(0)
    crops = [dataset[number % 2]["image"] for number in range(24)]  # an eighth of them is not flipped at all
    for number in range(2):
        assert torch.equal(dataset._cache[number]["image"], before[number])
    assert abs(float(crops[0][crops[0] != 0].mean())) < 1


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)])
def test_files_are_segmented_onto_their_own_grid(small_heads, tmp_path, spacing, monkeypatch):
    """A network that sees enhancing tumour where the normalised FLAIR is bright marks the ball's inside."""

    class Threshold(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return (image[:, :1] - 1.5).expand(-1, 3, -1, -1, -1) * 10

    file = small_heads / "imagesTr" / "head_0.nii.gz"
    monkeypatch.setattr(brats_guide, "VALIDATION_ROI", (32, 32, 32))
    brats_guide.segment_files([file], Threshold(), tmp_path, CPU, spacing)
    made = nibabel.load(tmp_path / file.name)
    truth = np.asarray(nibabel.load(small_heads / "labelsTr" / file.name).dataobj)
    found = np.asarray(made.dataobj)
    assert np.allclose(made.affine, nibabel.load(file).affine)
    assert found.shape == truth.shape
    assert set(np.unique(found)) == {0, 3}
    overlap = 2 * ((found == 3) & (truth >= 2)).sum() / ((found == 3).sum() + (truth >= 2).sum())
    assert overlap > 0.8
