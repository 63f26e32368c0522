import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.pathology.patches import tables
from medspeed.apps.pathology.patches.tables import Tables, find_tables, hold_out, keep_digests
from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.apps.pathology.slides.masks import tissue_mask
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.apps.pathology.train import read_data
from medspeed.common.files import write_json
from medspeed.common.ranks import Ranks
from medspeed.data_scripts.make_slides import SLIDES_VERSION, make_slides
from tests.apps.pathology.scan_runs import write_slide


@pytest.fixture(scope="module")
def slides(tmp_path_factory) -> Path:
    return make_slides(tmp_path_factory.mktemp("data") / "slides", 4, 2, 1024)


def tables_of(config: PathologyConfig, directory: Path | None = None, resumed: bool = False) -> tuple[Tables, str]:
    if directory is None:
        with tempfile.TemporaryDirectory() as made:
            return tables_of(config, Path(made), resumed)
    said: list[str] = []
    run: Any = SimpleNamespace(
        directory=directory,
        resumed=resumed,
        planned=resumed,
        device=torch.device("cpu"),
        say=lambda line, kind="note": said.append(line),
        leader=True,
        ranks=Ranks(),
    )
    return find_tables(config, run), "\n".join(said)


def test_slides_give_three_tables_whose_slides_differ(slides):
    tables, said = tables_of(PathologyConfig(data=slides, patch_size=64, patches_per_slide=10, held_out=0.5))
    parts = [{path.stem for path in part.files} for part in tables.parts.values()]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert not set.intersection(*parts[:2]) | set.intersection(*parts[1:])
    assert parts[2] == {"test_001", "test_002"}
    assert tables.mpp == 0.5
    assert tables.synthetic
    assert "SYNTHETIC DATA" in said
    assert "patches of 64 pixels of 0.5 um: 20 training, 20 validation, 20 testing" in said
    assert "slides: read by " in said


def test_room_for_fewer_patches_is_told(slides):
    config = PathologyConfig(data=slides, patch_size=320, patches_per_slide=1_000_000, held_out=0.5)
    tables, said = tables_of(config)
    assert len(tables.parts["training"]) < 2_000_000
    assert "some slides have room for fewer than 1000000 patches; missing: " in said


def test_a_list_of_another_slide_is_refused(slides, tmp_path):
    (tmp_path / "list.csv").write_text("tumor_001,512,512,0,0,0,0,1,0,0,0,0\ntumor_001,9999,512,1,1,1,1,1,1,1,1,1\n")
    (tmp_path / "other.csv").write_text("normal_001,512,512,0,0,0,0,0,0,0,0,0\n")
    with pytest.raises(ValueError, match=r"list\.csv: both have patches of tumor_001\.tif: keep a slide in one"):
        tables_of(PathologyConfig(data=slides, lists=(tmp_path / "list.csv", tmp_path / "list.csv")))
    config = PathologyConfig(data=slides, lists=(tmp_path / "list.csv", tmp_path / "other.csv"))
    with pytest.raises(ValueError, match=r"tumor_001\.tif: a patch is listed at .9615, 128., but the slide has 1024 x"):
        tables_of(config)


def test_lists_of_coordinates_are_taken_as_they_are(slides, tmp_path):
    for name, stem in (("training", "tumor_001"), ("validation", "normal_001")):
        (tmp_path / f"{name}.csv").write_text(f"{stem},512,512,0,0,0,0,1,0,0,0,0\n")
    config = PathologyConfig(data=slides, lists=(tmp_path / "training.csv", tmp_path / "validation.csv"))
    tables, _ = tables_of(config)
    assert {part: len(table) for part, table in tables.parts.items()} == {"training": 9, "validation": 9}
    assert tables.parts["training"].label.sum() == 1
    assert tables.parts["training"].size == 224


def write_patches(folder: Path, count: int, training: int | None = None) -> None:
    """Write patches of 32 pixels and their labels.csv, with a column split where the first so many train."""
    rows = ["image,label" if training is None else "image,label,split"]
    for number in range(count):
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(folder / f"{number}.png")
        side = "" if training is None else ",train" if number < training else ",val"
        rows.append(f"{number}.png,{number % 2}{side}")
    (folder / "labels.csv").write_text("\n".join(rows))


def test_a_folder_of_patches_without_a_split_is_cut(tmp_path):
    write_patches(tmp_path, 20)
    config = PathologyConfig(data=tmp_path, held_out=0.2)
    tables, _ = tables_of(config)
    assert (len(tables.parts["training"]), len(tables.parts["validation"])) == (16, 4)
    other, _ = tables_of(replace(config, seed=1))
    assert tables.parts["validation"].digest() != other.parts["validation"].digest()
    assert tables.mpp is None


def test_without_data_slides_are_made_once(tmp_path, monkeypatch):
    asked = []

    def make(*given):
        asked.append(given)
        raise OSError("made nothing")

    monkeypatch.setattr("medspeed.apps.pathology.patches.tables.make_synthetic", make)
    with pytest.raises(OSError, match="made nothing"):
        tables_of(PathologyConfig(store=tmp_path))
    assert asked == [(tmp_path / "phantoms" / f"slides-{SLIDES_VERSION}", "make_slides")]


def test_patches_of_one_kind_are_refused_before_the_training(slides, tmp_path):
    for name, stem, labels in (
        ("training", "tumor_001", "0,0,0,0,1,0,0,0,0"),
        ("validation", "normal_001", "0," * 8 + "0"),
    ):
        (tmp_path / f"{name}.csv").write_text(f"{stem},512,512,{labels}\n")
    config = PathologyConfig(data=slides, lists=(tmp_path / "training.csv", tmp_path / "validation.csv"))
    with pytest.raises(ValueError, match="no tumour patch among the 9 for validation, so there is no AUC"):
        tables_of(config)


def test_testing_by_patches_of_one_kind_is_left_out(tmp_path):
    rows = ["image,label,split"]
    for number in range(12):
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        split = ("train", "val", "test")[number % 3]
        rows.append(f"{number}.png,{0 if split == 'test' else number % 2},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    tables, said = tables_of(PathologyConfig(data=tmp_path, mpp=0.97))
    assert tables.mpp == 0.97
    assert "patches of 32 pixels of 0.97 um" in said
    assert list(tables.parts) == ["training", "validation"]
    assert "testing: skipped, all 4 patches have the same label" in said


def test_pixels_of_different_sizes_are_said(tmp_path):
    for name, mpp in (("tumor_001", 0.25), ("normal_001", 0.5)):
        write_slide(tmp_path / "training" / "images" / f"{name}.tif", [(256, 256, 90)], mpp=mpp)
        (tmp_path / f"{name}.csv").write_text(f"{name},256,256,0,0,0,0,1,0,0,0,0\n")
    config = PathologyConfig(data=tmp_path, lists=(tmp_path / "tumor_001.csv", tmp_path / "normal_001.csv"))
    tables, said = tables_of(config)
    assert "pixel sizes range from 0.25 to 0.5 um" in said
    assert tables.mpp == 0.5


def test_slides_for_testing_with_pixels_of_another_size_are_said(slides, tmp_path):
    shutil.copytree(slides, tmp_path / "set")
    config = PathologyConfig(data=tmp_path / "set", patch_size=64, patches_per_slide=10, held_out=0.5)
    before, said = tables_of(config)
    assert "pixel sizes range" not in said
    assert before.mpp is not None
    for path in (tmp_path / "set" / "testing" / "images").glob("*.tif"):
        with tifffile.TiffFile(path, mode="r+") as tiff:
            for name in ("XResolution", "YResolution"):
                tag = tiff.pages.first.tags[name]
                tag.overwrite((tag.value[0], 2 * tag.value[1]))
    found, said = tables_of(config)
    assert f"pixel sizes range from {before.mpp:g} to {2 * before.mpp:g} um" in said
    assert found.mpp == before.mpp


def test_a_resumed_run_refuses_other_patches(slides, tmp_path):
    run: Any = SimpleNamespace(directory=tmp_path, resumed=False)
    tables, _ = tables_of(PathologyConfig(data=slides, patch_size=64, patches_per_slide=10, held_out=0.5))
    keep_digests(tables, run)
    run.resumed = True
    keep_digests(tables, run)
    write_json(tmp_path / "patches.json", {part: table.digest() for part, table in tables.parts.items()})
    keep_digests(tables, run)  # as an earlier version kept them, with the times of change
    with pytest.raises(ValueError, match="the patches in --data have changed"):
        keep_digests(replace(tables, parts={**tables.parts, "validation": tables.parts["training"]}), run)


def test_a_resumed_run_draws_as_many_patches_on_another_device(slides, tmp_path):
    """A GPU's defaults are larger; the same slides elsewhere, with other times, do no harm."""
    begun, _ = tables_of(PathologyConfig(data=slides, patch_size=64, patches_per_slide=10))
    keep_digests(begun, SimpleNamespace(directory=tmp_path, resumed=False))  # type: ignore[arg-type]
    write_json(tmp_path / "plan.json", {"patch_size": 64, "patches_per_slide": 10})
    moved = shutil.copytree(slides, tmp_path / "moved", copy_function=shutil.copyfile)
    run: Any = SimpleNamespace(directory=tmp_path, resumed=True, planned=True, device=torch.device("cpu"))
    run.say, run.leader, run.ranks = (lambda line, kind="note": None), True, Ranks()
    found = read_data(PathologyConfig(data=moved), run)
    assert [len(part) for part in found.parts.values()] == [len(part) for part in begun.parts.values()]


def held(labels: np.ndarray, names: list[str], fraction: float, seed: int) -> np.ndarray:
    nowhere: Any = SimpleNamespace(directory=Path("nowhere"), planned=True)
    return hold_out(labels, names, PathologyConfig(held_out=fraction, seed=seed), nowhere)


@pytest.mark.parametrize(
    ("tumour", "normal", "share"), [(4, 4, (1, 1)), (8, 20, (2, 5)), (2, 3, (1, 1)), (1, 3, (0, 1)), (3, 0, (1, 0))]
)
def test_a_share_of_each_kind_is_held_out(tumour, normal, share):
    labels, names = np.array([1] * tumour + [0] * normal), [f"slide_{n}" for n in range(tumour + normal)]
    out = held(labels, names, 0.25, 0)
    assert (int(labels[out].sum()), int((1 - labels[out]).sum())) == share


def test_what_is_held_out_depends_on_seed_and_names_alone():
    labels, names = np.array([0, 1] * 20), [f"slide_{n}" for n in range(40)]
    out = held(labels, names, 0.3, 5)
    assert np.array_equal(held(labels, names[::-1], 0.3, 5)[::-1], held(labels[::-1], names, 0.3, 5))
    assert not np.array_equal(out, held(labels, names, 0.3, 6))
    assert out[np.argsort(names)].tolist() == held(labels[np.argsort(names)], sorted(names), 0.3, 5).tolist()


def test_equal_names_in_several_folders_are_held_out_in_any_order():
    names = [f"s{folder}/{file}.png" for folder in range(5) for file in range(6)]
    nowhere: Any = SimpleNamespace(directory=Path("nowhere"), planned=True)

    def names_held(names: list[str]) -> set[str]:
        drawn = [Path(name).name for name in names]
        out = hold_out(np.zeros(30, int), names, PathologyConfig(), nowhere, drawn)
        return {name for name, held in zip(names, out, strict=True) if held}

    assert names_held(names) == names_held(names[::-1]) == names_held(names[13:] + names[:13])


def test_nothing_to_hold_out():
    with pytest.raises(ValueError, match="found 2 slides or patches; holding one out"):
        held(np.array([1, 0]), ["a", "b"], 0.5, 0)


def test_each_slide_is_held_out_by_one_fold(slides, tmp_path):
    """Two slides with tumour and two without: each of two folds holds out one of either kind."""
    found = []
    for fold in (0, 1):
        config = PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, fold=fold, folds=2)
        validation = tables_of(config, tmp_path)[0].parts["validation"]
        kept = json.loads((tmp_path / "split.json").read_text())
        assert kept["validation"] == [path.stem for path in validation.files]
        assert {kept["fold_of"][name] for name in kept["validation"]} == {fold}
        assert kept["held_out"]
        found += kept["validation"]
        assert sorted(name.split("_")[0] for name in kept["validation"]) == ["normal", "tumor"]
    assert len(found) == len(set(found)) == 4


def test_patches_of_a_slide_stay_on_one_side(tmp_path):
    rows = ["image,label,slide"]
    (tmp_path / "images").mkdir()
    for number in range(12):
        folder = tmp_path / "images" if number % 2 else tmp_path
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{number % 2},{number // 4}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    config = PathologyConfig(data=tmp_path, fold=2, folds=3, groups=f"{tmp_path / 'labels.csv'}:slide")
    tables, _ = tables_of(config, tmp_path)
    sides = [{int(table.files[file].stem) // 4 for file in table.file} for table in tables.parts.values()]
    assert [len(side) for side in sides] == [2, 1]
    assert not sides[0] & sides[1]
    (tmp_path / "labels.csv").write_text(
        "\n".join(f"{row},{('split', 'train', 'val')[min(i, 2)]}" for i, row in enumerate(rows))
    )
    with pytest.raises(ValueError, match=r"labels\.csv: has validation images in its column split; --fold needs it"):
        tables_of(config, tmp_path)


def test_more_folds_than_have_tumour_are_refused_at_once(slides, tmp_path):
    config = PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, fold=0, folds=3)
    with pytest.raises(ValueError, match="folds 3: only 2 hold out tumour; lower --folds"):
        tables_of(config, tmp_path)


def test_slides_that_the_initial_weights_know_are_not_held_out(slides, tmp_path):
    config = PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, fold=0, folds=2)
    tables_of(config, tmp_path)
    first = json.loads((tmp_path / "split.json").read_text())
    (tmp_path / "other").mkdir()
    _, said = tables_of(replace(config, fold=1, init=tmp_path / "best.safetensors"), tmp_path / "other")
    assert f"NOT HELD OUT: the weights of --init were trained on {', '.join(sorted(first['training']))}" in said
    kept = json.loads((tmp_path / "other" / "split.json").read_text())
    assert (kept["held_out"], kept["trained_before"]) == (False, sorted(first["training"]))
    _, said = tables_of(replace(config, init=tmp_path / "best.safetensors"), tmp_path / "other")
    assert "NOT HELD OUT" not in said
    (tmp_path / "no_fold").mkdir()
    for seed in range(2):  # one of them holds out what trained the fold
        plain = replace(config, fold=None, folds=None, init=tmp_path / "best.safetensors", seed=seed)
        _, said = tables_of(plain, tmp_path / "no_fold")
        kept = json.loads((tmp_path / "no_fold" / "split.json").read_text())
        assert kept["trained_before"] == sorted(first["training"])
        assert kept["held_out"] == (not {*kept["validation"]} & {*first["training"]}) == ("NOT HELD" not in said)


def test_a_share_to_hold_out_that_has_no_effect_is_told(tmp_path):
    write_patches(tmp_path, 8, training=4)
    for share in (0.25, 0.5):
        tables, said = tables_of(PathologyConfig(data=tmp_path, held_out=share))
        assert len(tables.parts["validation"]) == 4
        assert ("--held-out 0.5 has no effect" in said) == (share == 0.5)


def test_the_pixel_size_of_slides_is_not_another_one(slides):
    with pytest.raises(ValueError, match=r"^mpp 1\.0: the pixels of the slides have 0\.\d+ um; drop the flag"):
        tables_of(PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, mpp=1.0))


@pytest.mark.parametrize(("mpp", "assumed"), [(None, 0.25), (0.4, 0.4)])
def test_tissue_of_slides_without_a_pixel_size_is_looked_for_at_the_given_one(mpp, assumed, slides, monkeypatch):
    asked, entry = [], read_slide_set(slides).training[0]

    def noted(slide, assumed_mpp):
        asked.append(assumed_mpp)
        return tissue_mask(slide, assumed_mpp)

    monkeypatch.setattr(tables, "tissue_mask", noted)
    tables.sample_patches([entry], PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, mpp=mpp))
    assert asked == [assumed]


def test_an_export_draws_the_patches_of_a_run_whose_slides_do_not_all_state_their_pixel_size(slides, monkeypatch):
    """It reads the run's plan, in which a deduced pixel size stands like a given one."""
    opened = open_slide

    def without(path, reader):
        slide = opened(path, reader)
        if path.stem.endswith("1"):
            slide.mpp = None
        return slide

    monkeypatch.setattr(tables, "open_slide", without)
    config = PathologyConfig(data=slides, patch_size=64, patches_per_slide=4)
    first, said = tables_of(config)
    assert "have no pixel size; tissue detection assumes 0.5 um" in said
    again, _ = tables_of(replace(config, mpp=first.mpp))
    for part, table in first.parts.items():
        assert np.array_equal(table.corner, again.parts[part].corner)


@pytest.mark.parametrize("flag", [{"patch_size": 64}, {"patches_per_slide": 5}])
def test_flags_that_given_patches_do_not_heed_are_refused(tmp_path, flag):
    write_patches(tmp_path, 8)
    ((name, value),) = flag.items()
    with pytest.raises(ValueError, match=rf"^{name} {value}: the data are patches already, of 32 pixels; drop it"):
        tables_of(PathologyConfig(data=tmp_path, **flag))
    assert tables_of(PathologyConfig(data=tmp_path, **flag), resumed=True)  # it began before they were refused
    assert tables_of(PathologyConfig(data=tmp_path, patch_size=32))[0].parts["training"].size == 32


def test_a_fold_goes_on_without_what_divided_it(slides, tmp_path):
    rows = ["slide,patient", *(f"{path.stem},{path.stem}" for path in slides.rglob("*.tif"))]
    (tmp_path / "groups.csv").write_text("\n".join(rows) + "\n")
    groups = f"{tmp_path / 'groups.csv'}:patient"
    config = PathologyConfig(data=slides, patch_size=64, patches_per_slide=4, fold=0, folds=2, groups=groups)
    first = tables_of(config, tmp_path)[0].parts["validation"]
    (tmp_path / "groups.csv").unlink()
    assert tables_of(config, tmp_path, resumed=True)[0].parts["validation"].files == first.files


def test_shares_are_those_of_the_pixels_that_a_square_touches():
    mask = np.random.default_rng(0).random((9, 12)) < 0.4
    mask[-1] = mask[:, -1] = True
    sums = np.pad(mask, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    centres = np.array([[20.0, 14.0], [4.0, 4.0], [46.0, 34.0], [47.9, 35.9]])  # the last at the edge
    for (x, y), share in zip(centres, tables._shares(sums, 4.0, centres, 12.0), strict=True):
        columns = slice(max(0, int((x - 6) // 4)), int(-(-(x + 6) // 4)))
        rows = slice(max(0, int((y - 6) // 4)), int(-(-(y + 6) // 4)))
        whole = (int(-(-(x + 6) // 4)) - int((x - 6) // 4)) * (int(-(-(y + 6) // 4)) - int((y - 6) // 4))
        assert share == pytest.approx(mask[rows, columns].sum() / whole)


def test_patches_that_trained_a_fold_are_known_without_folds_and_the_other_way_round(tmp_path):
    rows = ["image,label"]
    (tmp_path / "a").mkdir()
    for number in range(12):
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / "a" / f"{number}.png")
        rows.append(f"a/{number}.png,{number % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    fold, plain = PathologyConfig(data=tmp_path, fold=0, folds=3), PathologyConfig(data=tmp_path, seed=1)
    for name, config, then in (("fold", fold, plain), ("plain", plain, fold)):
        folders = [tmp_path / f"{name}-{number}" for number in range(2)]
        for folder in folders:
            folder.mkdir()
        tables_of(config, folders[0])
        _, said = tables_of(replace(then, init=folders[0] / "best.safetensors"), folders[1])
        first, second = (json.loads((folder / "split.json").read_text()) for folder in folders)
        seen = {*first["training"]} & {*second["validation"]}
        assert seen
        assert not second["held_out"]
        assert all(name in said for name in seen)
