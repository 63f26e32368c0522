"""The peer: MONAI's recipe does what the tutorial's and the bundle's do."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.pathology.patches.augment import jitter_
from medspeed.apps.pathology.scan.scan import choose_view, scan_slide
from medspeed.apps.pathology.slides.masks import SlideMask
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.benchmarks import peers
from medspeed.benchmarks.peers import pathology_guide
from medspeed.data_scripts.make_slides import make_slides

# MONAI makes tensors of the reader's arrays as they are.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_slides(tmp_path_factory.mktemp("data") / "slides", 2, 2, 1024)


CPU = torch.device("cpu")


def given(*words):
    return pathology_guide.parse_flags(["--data", "nowhere", "--device", "cpu", *words])


@pytest.mark.parametrize(("part", "amount"), [(0, 1.2), (1, 0.4), (2, 1.2), (3, 0.03), (3, -0.04)])
def test_each_part_of_the_jitter_is_the_apps(part, amount):
    """TorchVision's, of PIL's images: each factor by itself is rounded to bytes, and the hue to 255 steps of a turn."""
    image = np.random.default_rng(part).integers(0, 256, (32, 32, 3), np.uint8)
    factors, ours = np.array([[1, 1, 1, 0]], np.float32), torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    factors[0, part] = amount
    jitter_(ours, factors, np.arange(4)[None])
    theirs = np.asarray(pathology_guide.adjust(Image.fromarray(image), part, amount))
    difference = np.abs(theirs - 255 * ours[0].permute(1, 2, 0).numpy())
    assert difference.max() < (12 if part == 3 else 1.5)
    assert difference.mean() < (1.5 if part == 3 else 0.5)


def test_the_labels_of_a_region_are_put_row_by_row(tmp_path):
    """NCRF's grid goes column by column: label number 3 is the second column's first."""
    (tmp_path / "list.csv").write_text("tumor_001,512,300,0,1,2,3,4,5,6,7,8\n/other/a.svs,5,6,1\n")
    item, single = pathology_guide.read_list(tmp_path / "list.csv", tmp_path)
    assert (single["image"], single["location"], single["label"]) == ("/other/a.svs", [6, 5], [1])
    assert item["image"] == str(tmp_path / "training" / "images" / "tumor_001.tif")
    assert item["location"] == [300, 512]
    assert item["label"] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_a_region_gives_nine_patches_in_row_order(folder):
    slide = next((folder / "training" / "images").glob("tumor*"))
    item = {"image": str(slide), "location": [512, 500], "label": [float(n) for n in range(9)]}
    patches = pathology_guide.make_dataset([item], [], given())[0]
    assert [float(each["label"]) for each in patches] == list(range(9))
    opened = open_slide(slide)
    for number, each in enumerate(patches):
        row, column = divmod(number, 3)
        x, y = 500 - 384 + 272 * column, 512 - 384 + 272 * row
        assert np.array_equal(np.asarray(each["image"]).transpose(1, 2, 0), opened.read(x, y, 224, 224))


def test_the_scan_is_the_apps_patch_mode_where_both_look(folder):
    slide = next((folder / "testing" / "images").glob("*"))

    class Redness(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return 3 * image[:, :1].mean((2, 3), keepdim=True)

    flags = given("--patch", "64", "--mask_level", "4", "--reader", "openslide", "--workers", "0")
    found = pathology_guide.scan_slide(slide, Redness().eval(), flags)
    model = PathologyModel(64, None, 512, 1, "fp32")
    opened = open_slide(slide, "openslide")
    everywhere = SlideMask(np.ones((64, 64), bool), 16.0)
    view = choose_view(opened, None)
    ours = scan_slide(opened, model, Redness(), CPU, everywhere, view, stride=32, batch=64).values
    assert found.shape == (64, 64)
    assert (found > 0).sum() > 500
    # Centres at 16 n + 8 there and at 32 n + 16 here: none is shared, but a mean over 64 pixels hardly moves in 8.
    middle = (found[0::2, 0::2] + found[1::2, 0::2] + found[0::2, 1::2] + found[1::2, 1::2]) / 4
    inside = np.minimum.reduce([found[0::2, 0::2], found[1::2, 0::2], found[0::2, 1::2], found[1::2, 1::2]]) > 0
    inside[[0, -1]] = inside[:, [0, -1]] = False  # outside the slide the peer sees black, ours white
    assert np.abs(middle - ours)[inside].max() < 0.1
    assert np.corrcoef(middle[inside], ours[inside])[0, 1] > 0.98


def test_a_patch_with_one_label_is_read_around_its_centre(folder):
    slide = next((folder / "training" / "images").glob("tumor*"))
    item = {"image": str(slide), "location": [500, 512], "label": [1.0]}
    (found,) = pathology_guide.make_dataset([item], [], given("--patch", "64"))[0]
    assert found["label"].item() == 1
    assert np.array_equal(np.asarray(found["image"]).transpose(1, 2, 0), open_slide(slide).read(480, 468, 64, 64))


@pytest.mark.slow
def test_the_script_trains(folder, tmp_path, capsys):
    lists = []
    for name in ("normal_001", "tumor_001"):
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[name, 512, 512, *[int("tumor" in name)] * 9]] * 2)
        lists.append(path)
    both = tmp_path / "both.csv"
    both.write_text("".join(path.read_text() for path in lists))
    words = f"--data {folder} --training {both} --validation {both} --epochs 1 --batch 2 --workers 1 --device cpu"
    peers.train(pathology_guide, pathology_guide.parse_flags(words.split()))
    assert "epoch 1: AUC 0." in capsys.readouterr().out
