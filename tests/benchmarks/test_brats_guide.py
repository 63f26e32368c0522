"""The peer: MONAI's recipe does what the tutorial's does, on the right labels."""

import json

import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import Compose

from medspeed.benchmarks import peers
from medspeed.benchmarks.peers import brats_guide


def given(folder, *words):
    """Return the guide's flags for the two heads, both of which train."""
    split = folder / "split.json"
    split.write_text(json.dumps({"training": ["head_0", "head_1"], "validation": ["head_0"]}))
    words = ("--crop", "24", "24", "24", "--roi", "32", "32", "32", "--device", "cpu", *words)
    return brats_guide.parse_flags(["--data", str(folder), "--split", str(split), *words])


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
    flags = given(small_heads, "--spacing", "2", "1", "1")
    fixed = Compose(brats_guide.fixed_transforms(("image", "label"), flags))
    item = fixed(peers.read_pairs(flags, 1)[0][0])
    assert item["image"].shape == (4, 12, 24, 24)
    assert item["label"].shape == (3, 12, 24, 24)


def test_the_random_transforms_leave_the_cache_as_it_is(small_heads):
    """MONAI's NormalizeIntensityd writes into what it is given, here a view of the cached volume."""
    dataset = brats_guide.training_loader(given(small_heads)).dataset
    before = [dataset._cache[number]["image"].clone() for number in range(2)]
    dataset.transform.set_random_state(0)
    crops = [dataset[number % 2]["image"] for number in range(24)]  # an eighth of them is not flipped at all
    for number in range(2):
        assert torch.equal(dataset._cache[number]["image"], before[number])
    assert abs(float(crops[0][crops[0] != 0].mean())) < 1


def test_labels_other_than_the_guides_are_refused(small_heads, tmp_path):
    labels = {"0": "background", "1": "necrosis", "2": "edema", "3": "enhancing tumour"}  # the numbers of BraTS 2023
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "training": []}))
    with pytest.raises(ValueError, match="the guide knows those of MSD only"):
        brats_guide.training_loader(given(tmp_path))


def test_its_validation_is_the_mean_dice_of_the_regions(small_heads):
    """By hand: a network that says yes everywhere has 2 n / (n + N), with n voxels of a region in N."""

    class Everywhere(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(image[:, :3])

    label = np.asarray(nibabel.load(small_heads / "labelsTr" / "head_0.nii.gz").dataobj)
    sizes = [np.isin(label, of).sum() for of in brats_guide.REGIONS.values()]
    due = np.mean([2 * size / (size + label.size) for size in sizes])
    assert brats_guide.make_validation(given(small_heads))(Everywhere()) == pytest.approx(due, rel=1e-5)


@pytest.mark.parametrize("spacing", ["1", "2"])
def test_files_are_segmented_onto_their_own_grid(small_heads, tmp_path, spacing):
    """A network that sees enhancing tumour where the normalised FLAIR is bright marks the ball's inside."""

    class Threshold(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return (image[:, :1] - 1.5).expand(-1, 3, -1, -1, -1) * 10

    file = small_heads / "imagesTr" / "head_0.nii.gz"
    brats_guide.infer([file], Threshold(), tmp_path, given(small_heads, "--spacing", *[spacing] * 3))
    made = nibabel.load(tmp_path / file.name)
    truth = np.asarray(nibabel.load(small_heads / "labelsTr" / file.name).dataobj)
    found = np.asarray(made.dataobj)
    assert np.allclose(made.affine, nibabel.load(file).affine)
    assert found.shape == truth.shape
    assert set(np.unique(found)) == {0, 3}
    overlap = 2 * ((found == 3) & (truth >= 2)).sum() / ((found == 3).sum() + (truth >= 2).sum())
    assert overlap > 0.8
