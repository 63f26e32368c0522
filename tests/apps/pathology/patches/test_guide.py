from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from medspeed.apps.doctor_training import batch_parts
from medspeed.apps.pathology.config import Augmentation, PathologyConfig, Reader
from medspeed.apps.pathology.patches import guide
from medspeed.apps.pathology.patches.guide import cucim_transform, monai_dataset, monai_patches, why_not_cucim
from medspeed.apps.pathology.patches.table import PatchTable, opaque, read_image
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.clock import Clock
from medspeed.common.data.batches import Batches
from medspeed.common.ranks import Ranks
from tests.apps.pathology.scan_runs import write_slide
from tests.apps.pathology.slides.slide_files import overwrite_tile, painted, write_pyramid

CPU = torch.device("cpu")
AUGMENTATION = Augmentation((64 / 255, 0.75, 0.25, 0.04), (0.9, 1.1))


@pytest.fixture
def table(tmp_path: Path) -> PatchTable:
    """Ten patches of a slide at different places."""
    slide = write_slide(tmp_path / "a.tif", [(200, 200, 60)])
    corner = np.array([(32 * number, 16 * number + 90) for number in range(10)], np.int32)
    return PatchTable((slide,), np.zeros(10, np.int32), corner, np.arange(10, dtype=np.uint8) % 2, 64)


def batches_of(table: PatchTable, seed: int = 0, ranks: Ranks = Ranks()) -> Batches:  # noqa: B008
    config = PathologyConfig(
        recipe="guide", reader="openslide", batch_size=4, workers=None, seed=seed, augmentation=AUGMENTATION
    )
    run: Any = SimpleNamespace(device=CPU, ranks=ranks, say=print, clock=Clock())
    return monai_patches(table, config, run)


def test_pixels_are_the_slides(table):
    import tifffile

    slide, dataset = tifffile.imread(table.files[0]), monai_dataset(table, [], "openslide")
    assert len(dataset) == 10
    for item, (x, y), label in zip(dataset, table.corner, table.label, strict=True):
        assert np.array_equal(item["image"].numpy(), slide[y : y + 64, x : x + 64].transpose(2, 0, 1))
        assert (item["label"], item["name"]) == (label, "a")


@pytest.mark.parametrize("workers", [None, 2])
def test_a_slide_with_damaged_tiles_is_told_of_once(workers, tmp_path):
    """Not by each worker in each epoch, and by the run, which keeps what it says."""
    for name in ("a", "b"):
        write_pyramid(tmp_path / f"{name}.tif", compression="jpeg", photometric="ycbcr")
    overwrite_tile(tmp_path / "b.tif", 1, 1)
    file, corner = np.arange(8, dtype=np.int32) % 2, np.tile(np.array([[64, 64]], np.int32), (8, 1))
    table = PatchTable((tmp_path / "a.tif", tmp_path / "b.tif"), file, corner, (file == 1).astype(np.uint8), 64)
    config, said = (
        PathologyConfig(recipe="guide", batch_size=4, workers=workers, augmentation=AUGMENTATION),
        list[str](),
    )
    run: Any = SimpleNamespace(device=CPU, ranks=Ranks(), say=lambda line, *_: said.append(line))
    batches = monai_patches(table, config, run)
    assert sum(len(list(batches.epoch(number))) for number in range(2)) == 4
    assert [line for line in said if "DAMAGED" in line] == ["b: DAMAGED TILES treated as white"]


@pytest.mark.parametrize("reader", ["auto", "cucim", "openslide", "tifffile"])
def test_what_was_never_scanned_is_white_and_what_is_outside(reader: Reader, tmp_path):
    write_pyramid(tmp_path / "a.tif", missing=(1, 1), compression="jpeg", photometric="ycbcr")
    corner, one = np.array([[64, 64], [-40, 0], [290, 200]], np.int32), np.zeros(3, np.int32)
    table = PatchTable((tmp_path / "a.tif",), one, corner, one.astype(np.uint8), 64)
    missing, left, corner_of = (item["image"].numpy() for item in monai_dataset(table, [], reader))
    assert (missing == 255).all()
    assert (left[:, :, :40] == 255).all()
    assert (corner_of[:, 10:] == 255).all()
    slide = open_slide(tmp_path / "a.tif", reader)
    assert np.array_equal(left, slide.read(-40, 0, 64, 64).transpose(2, 0, 1))
    assert left[:, :, 40:].std() > 10


@pytest.mark.parametrize("options", [{"predictor": 2, "tile": (64, 64)}, {"rowsperstrip": 16}])
def test_files_that_crash_cucim_are_read_by_others(options: dict[str, Any], tmp_path):
    """Deflate of differences, and strips."""
    image, file = painted(300, 200), tmp_path / "a.tif"
    tifffile.imwrite(file, image, photometric="rgb", compression="deflate", metadata=None, **options)
    one = np.zeros(1, np.uint8)
    (item,) = monai_dataset(PatchTable((file,), one, np.zeros((1, 2), np.int32), one, 64), [], "auto")
    assert np.array_equal(item["image"].numpy(), image[:64, :64].transpose(2, 0, 1))


def test_the_doctor_calls_the_reading_of_regions_decoding(table):
    parts, workers = batch_parts(batches_of(table), "none")
    assert set(parts) == {"decode"}
    assert workers


def test_ranks_read_different_patches(table, monkeypatch):
    taken = []

    def noting(table: PatchTable, *rest: Any) -> list[int]:
        taken.append(table.corner.tolist())
        return [0] * len(table)

    monkeypatch.setattr(guide, "monai_dataset", noting)
    for rank in (0, 1):
        assert batches_of(table, ranks=Ranks(rank, 2)).steps_per_epoch == 2  # of 2 patches each
    assert taken == [table.corner[0::2].tolist(), table.corner[1::2].tolist()]
    for rank in (0, 1, 2):  # each as many, and none left out
        batches_of(table, ranks=Ranks(rank, 3))
    rows = [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert taken[2:] == [table.corner[each].tolist() for each in rows]


def test_an_epoch_is_drawn_from_seed_and_number_alone(table):
    batches = batches_of(table)
    assert batches.steps_per_epoch == 2
    assert next(batches.epoch(0)).image.shape == (4, 3, 64, 64)
    first, again, other = (
        torch.cat([batch.image for batch in batches.epoch(number)]) for number in (3, 3, 4)
    )  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, torch.cat([each.image for each in batches_of(table, seed=1).epoch(3)]))
    assert first.min() >= -1
    assert first.max() <= 1


def test_cucim_gets_whole_batches_as_they_were_read(table, monkeypatch, capsys):
    given = []

    def sevens(images: torch.Tensor) -> torch.Tensor:
        given.append(images)
        return images * 0 + 7

    monkeypatch.setattr(guide, "why_not_cucim", lambda device: None)
    monkeypatch.setattr(guide, "cucim_transform", lambda augmentation: sevens)
    assert all((batch.image == 7).all() for batch in batches_of(table).epoch(0))
    assert given[0].shape == (4, 3, 64, 64)
    assert (given[0] == given[0].round()).all()
    assert given[0].max() > 1
    assert "cuCIM on the GPU" in capsys.readouterr().out


def test_too_few_patches_are_refused(table):
    with pytest.raises(ValueError, match="batch_size 4: only 3 training patches"):
        batches_of(table.take(np.arange(3)))


def test_a_source_that_cannot_go_on_within_an_epoch_yields_nothing_at_its_end(table):
    batches = batches_of(table)
    assert not batches.resumes_within_epoch
    assert list(batches.epoch(0, 2)) == []


def patches() -> torch.Tensor:
    return torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_cpu_takes_the_twin():
    assert why_not_cucim(torch.device("cpu")) == "the device is cpu"


def test_a_gpu_without_cupy_takes_the_twin(monkeypatch):
    monkeypatch.setattr(guide, "find_spec", lambda name: None)
    assert "cupy is not installed" in str(why_not_cucim(torch.device("cuda")))


@pytest.mark.gpu
def test_nothing_but_flips_and_rotations_without_jitter_and_zoom():
    pytest.importorskip("cupy")
    given = patches()
    found = cucim_transform(Augmentation((0.0, 0.0, 0.0, 0.0), (1.0, 1.0)))(given.cuda())
    assert found.shape == given.shape
    assert found.dtype == torch.float32
    scaled = given.float().flatten(2) / 127.5 - 1
    # cuCIM's hue goes by HSV and back in uint8 even where nothing turns.
    assert (found.cpu().flatten(2).sort().values - scaled.sort().values).abs().mean() < 1 / 127.5
    assert not torch.equal(found.cpu().flatten(2), scaled)


@pytest.mark.gpu
def test_each_patch_has_colours_of_its_own():
    pytest.importorskip("cupy")
    same = patches()[:1].expand(32, -1, -1, -1).contiguous().cuda()
    found = cucim_transform(AUGMENTATION)(same)
    assert found.abs().max() <= 1 + 1e-6  # rounding on the GPU
    means = found.mean((1, 2, 3)).cpu()
    assert means.unique().numel() > 24
    assert 0.02 < float(means.std()) < 0.3


def test_pictures_are_read_as_by_our_own_recipe(tmp_path, capsys):
    """Three channels, and white where there is nothing, whatever the PNG holds."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 4), np.uint8)
    picture = Image.fromarray(pixels, "RGBA")
    for number in range(4):
        (picture if number else picture.convert("P")).save(tmp_path / f"{number}{'.tif' if number == 3 else '.png'}")
    files, zeros = tuple(sorted(tmp_path.glob("*.*"))), np.zeros((4, 2), np.int32)
    order = np.arange(4, dtype=np.int32)
    pictures = PatchTable(files, order, zeros, order.astype(np.uint8) % 2, 64, whole=True)
    for item, file in zip(monai_dataset(pictures, [], "auto"), files, strict=True):
        assert np.array_equal(item["image"].numpy(), read_image(file).transpose(2, 0, 1))
    batches_of(pictures)
    assert "patches: read by PIL, again in each epoch" in capsys.readouterr().out
    Image.fromarray(pixels[..., 0].astype(np.uint16)).save(files[0])
    with Image.open(files[0]) as deep, pytest.raises(ValueError, match="expected 8 bits"):
        opaque(deep)


def test_an_image_of_another_size_is_named_before_the_first_epoch(tmp_path):
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for file in files:
        Image.new("RGB", (64, 64) if file.stem != "2" else (32, 32)).save(file)
    order, label = np.arange(4, dtype=np.int32), np.array([0, 1, 0, 1], np.uint8)
    table = PatchTable(tuple(files), order, np.zeros((4, 2), np.int32), label, 64, whole=True)
    with pytest.raises(ValueError, match=r"2\.png: 32 x 32 pixels, expected 64 x 64"):
        batches_of(table)
