import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import torch
from PIL import Image

from medspeed.apps.pathology import infer
from medspeed.apps.pathology.config import ScanConfig
from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.pathology.scan import scan as scan_module
from medspeed.apps.pathology.slides.camelyon import find_slides
from medspeed.apps.pathology.slides.masks import SlideMask
from medspeed.common.export.onnx_model import export_onnx
from tests.apps.pathology.scan_runs import GLASS, MODEL, PURPLE, Purple, write_run, write_slide
from tests.apps.pathology.slides.slide_files import overwrite_tile

OUTPUTS = {"slide.json", "probability.tif", "detections.csv", "detections.geojson", "heatmap.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def config(tmp_path, run, monkeypatch) -> ScanConfig:
    """Scan two slides with a network that finds purple."""
    monkeypatch.setattr(PathologyModel, "build", lambda self, weights=None: Purple())
    write_slide(tmp_path / "slides" / "one.tif", [(224, 288, 50)])
    write_slide(tmp_path / "slides" / "two.tif", [])
    return ScanConfig(run, tmp_path / "slides", tmp_path / "out", device="cpu", reader="tifffile", overlays=False)


def _record(config: ScanConfig, name: str) -> dict[str, Any]:
    path = config.output / name / "slide.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.suffix != ".json"}


@pytest.mark.parametrize("mode", ["dense", "patches"])
def test_each_slide_gets_its_outputs(config, mode, capsys):
    assert infer.main(replace(config, overlays=True, mode=mode)).status == 0
    assert {path.name for path in (config.output / "one").iterdir()} == OUTPUTS
    record = json.loads((config.output / "one" / "slide.json").read_text())
    assert (record["reader"], record["level"], record["mpp"], record["size"]) == ("tifffile", 0, 2.0, [512, 512])
    assert record["mark"]["options"]["backend"] == "torch"
    assert set(record["seconds"]) == {"tissue", "scan", "write", "overlay"}
    assert record["damaged_tiles"] == []
    ((score, x, y),) = (line.split(",") for line in (config.output / "one" / "detections.csv").read_text().splitlines())
    assert float(score) == pytest.approx(record["probability"], abs=1e-6)
    assert record["probability"] > 0.6
    assert abs(int(x) - 224) <= 32
    assert abs(int(y) - 288) <= 32
    stride = 32 if mode == "dense" else 64
    with openslide.OpenSlide(config.output / "one" / "probability.tif") as opened:
        assert float(opened.properties["openslide.mpp-x"]) == pytest.approx(2 * stride)
        assert opened.dimensions == (512 // stride, 512 // stride)
    assert (config.output / "two" / "detections.csv").read_text() == ""
    assert "two: tifffile, level 0 of 2 um for a network of 2 um, probability 0.0" in capsys.readouterr().out


def test_real_weights_scan_a_slide(config, monkeypatch):
    monkeypatch.undo()
    small = write_slide(config.input / "small.tif", [], side=256)
    assert infer.main(replace(config, input=small)).status == 0
    weights = json.loads((config.output / "small" / "slide.json").read_text())["mark"]["weights"]
    assert set(weights) == {"best.safetensors"}
    assert tifffile.imread(config.output / "small" / "probability.tif").any()


@pytest.mark.slow
def test_torch_and_onnxruntime_give_the_same_map(config, tmp_path, monkeypatch):
    monkeypatch.undo()
    run = write_run(tmp_path / "exported")
    network = MODEL.build(run / "best.safetensors")
    (run / "exports").mkdir()
    side, patch = MODEL.tile_size, MODEL.patch_size
    export_onnx(network, run / "exports" / "model_fp32.onnx", (3, side, side), "fp32", {}, (3, patch, patch))
    small = write_slide(tmp_path / "small.tif", [(120, 130, 40)], side=256)
    maps = []
    for backend in ("torch", "onnxruntime"):
        for mode in ("dense", "patches"):
            output = tmp_path / backend / mode
            infer.main(replace(config, model=run, input=small, output=output, backend=backend, mode=mode))
            record = json.loads((output / "small" / "slide.json").read_text())
            assert record["mark"]["options"]["backend"] == backend
            maps.append(tifffile.imread(output / "small" / "probability.tif").astype(int))
    assert np.ptp(maps[0][maps[0] > 0]) > 1
    assert np.abs(maps[0] - maps[2]).max() <= 1
    assert np.abs(maps[1] - maps[3]).max() <= 1


def test_damaged_tiles_are_white_and_recorded(config, capsys):
    overwrite_tile(config.input / "one.tif", 1, 2)
    assert infer.main(config).status == 0
    record = json.loads((config.output / "one" / "slide.json").read_text())
    assert record["damaged_tiles"] == [[0, 1, 2]]
    assert "1 DAMAGED TILES treated as white" in capsys.readouterr().out


def test_a_slide_that_is_tissue_all_over_is_uncertain(config, monkeypatch):
    everywhere = SlideMask(np.ones((8, 8), bool), 1e6)
    monkeypatch.setattr(infer, "tissue_mask", lambda *_, **__: everywhere)
    assert infer.main(replace(config, input=config.input / "one.tif")).status == 0
    assert _record(config, "one")["uncertain"] == ["tissue all over: is its glass colored?"]


@pytest.mark.parametrize(
    ("mpp", "doubts"), [(1.3, ["pixels of 2.0 um, in training 1.3 um"]), (1.4, []), (None, ["pixels of unknown size"])]
)
def test_pixels_far_larger_than_in_training_make_a_slide_uncertain(config, tmp_path, mpp, doubts, capsys):
    run = write_run(tmp_path / "coarse", replace(MODEL, mpp=mpp))
    assert infer.main(replace(config, model=run, input=config.input / "one.tif")).status == 0
    assert _record(config, "one")["uncertain"] == doubts
    assert ("UNCERTAIN: pixels of" in capsys.readouterr().out) == bool(doubts)


def test_finished_slides_are_kept_until_weights_options_or_the_slide_change(config, capsys):
    infer.main(config)
    before = (config.output / "one" / "slide.json").stat().st_mtime_ns
    infer.main(config)
    assert "2 slides already finished with the same weights and options: kept" in capsys.readouterr().out
    assert (config.output / "one" / "slide.json").stat().st_mtime_ns == before
    write_slide(config.input / "two.tif", [(300, 300, 40)])
    infer.main(config)
    assert "1 slide already finished" in capsys.readouterr().out
    assert (config.output / "two" / "detections.csv").read_text() != ""
    infer.main(replace(config, mode="patches"))
    assert "kept" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["scan", "write"])
def test_an_interrupted_scan_goes_on_to_the_same_outputs(config, tmp_path, where, monkeypatch, capsys):
    whole = replace(config, output=tmp_path / "whole")
    infer.main(whole)
    infer.main(replace(config, mode="patches"))  # an earlier scan, whose record must not outlive what it records
    module, name = {"scan": (infer, "scan_slide"), "write": (scan_module, "write_geojson")}[where]
    original, calls = getattr(module, name), []

    def fail(*arguments, **words):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **words)

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(KeyboardInterrupt):
        infer.main(config)
    assert (config.output / "one" / "slide.json").is_file()
    assert "mark" not in _record(config, "two")
    (config.output / "two").mkdir(exist_ok=True)
    (config.output / "two" / ".part-x1-probability.tif").touch()
    capsys.readouterr()
    infer.main(config)
    assert "1 slide already finished" in capsys.readouterr().out
    assert contents(config.output) == contents(whole.output)
    assert {path.name for path in (config.output / "two").iterdir()} == OUTPUTS - {"heatmap.png"}


def test_a_broken_slide_is_named_and_the_others_are_scanned(config, capsys):
    (config.input / "empty.tif").touch()
    assert infer.main(config).status == 1
    said = capsys.readouterr().out
    assert "failed" in said
    assert "1 of 3 slides failed: empty" in said
    assert (config.output / "two" / "slide.json").is_file()
    assert not (config.output / "empty").exists()


@pytest.mark.real_data
def test_a_real_broken_slide_is_refused_in_one_line(config, real_data, capsys):
    broken = real_data / "slides_real" / "broken.svs"
    assert infer.main(replace(config, input=broken, reader="auto")).status == 1
    assert "broken.svs" in capsys.readouterr().out


def test_a_white_slide_gives_an_empty_map(config, capsys):
    tifffile.imwrite(
        config.input / "one.tif",
        np.full((512, 512, 3), 244, np.uint8),
        photometric="rgb",
        tile=(128, 128),
        resolution=(5e3, 5e3),
        resolutionunit="CENTIMETER",
    )
    assert infer.main(replace(config, input=config.input / "one.tif", overlays=True)).status == 0
    record = json.loads((config.output / "one" / "slide.json").read_text())
    assert (record["probability"], record["tiles"], record["detections"]) == (0.0, 0, 0)
    assert "NO TISSUE found" in capsys.readouterr().out
    assert not tifffile.imread(config.output / "one" / "probability.tif").any()
    assert (config.output / "one" / "heatmap.png").is_file()


def test_slides_that_would_share_a_folder_are_refused(config):
    write_slide(config.input / "one.svs", [])
    with pytest.raises(ValueError, match=r"one\.svs and one\.tif would share an output folder"):
        infer.main(config)


@pytest.mark.parametrize("name", ["...tif", "..tif"])
def test_a_name_that_leads_out_of_the_output_is_refused(config, tmp_path, name):
    slide = write_slide(tmp_path / name, [])
    with pytest.raises(ValueError, match="no valid folder name: rename it"):
        infer.main(replace(config, input=slide, output=tmp_path / "o" / "inner"))
    assert not list(tmp_path.rglob("slide.json"))


@pytest.mark.parametrize("place", [".", "images"])
def test_a_folder_of_patches_is_refused(config, place):
    write_slide(config.input / "images" / "a.tif", [], side=256)
    (config.input / "labels.csv").write_text("image,label\na.tif,1\n")
    with pytest.raises(ValueError, match=r"contains patches .*pass the slides they were cut from"):
        infer.main(replace(config, input=config.input / place))


def test_patches_are_scored(config, tmp_path, capsys):
    folder = tmp_path / "patches"
    for name, colour in (("tumour/=b.png", PURPLE), ("normal/a.jpg", GLASS), ("images/c.PNG", PURPLE)):
        (folder / name).parent.mkdir(parents=True)
        Image.new("RGB", (64, 64), colour).save(folder / name)
    (folder / "labels.csv").write_text("image,label\nc.PNG,1\n")
    (folder / "._hidden.png").touch()
    (folder / "normal").rename(tmp_path / "elsewhere")
    (folder / "normal").symlink_to(tmp_path / "elsewhere")
    (folder / ".latest").symlink_to("tumour")  # what is there goes by its own name
    (folder / "a").symlink_to("images")
    with pytest.raises(ValueError, match="mode patches: only for slides; drop it to score the patches in"):
        infer.main(replace(config, input=folder, mode="patches"))
    with pytest.raises(FileNotFoundError, match=r"mistyped\.png: no such file"):
        infer.main(replace(config, input=folder / "mistyped.png"))
    assert infer.main(replace(config, input=folder)).status == 0
    assert "3 patches, torch fp32 on cpu" in capsys.readouterr().out
    lines = [line.split(",") for line in (config.output / "probabilities.csv").read_text().splitlines()]
    assert [name for name, _ in lines] == ["image", "images/c.PNG", "normal/a.jpg", "tumour/=b.png"]
    for (_, score), (red, _, _) in zip(lines[1:], (PURPLE, GLASS, PURPLE), strict=True):
        assert float(score) == pytest.approx(1 / (1 + math.exp(8 * (red / 127.5 - 1))), abs=0.02)


def test_a_patch_alone_is_scored_and_one_of_another_size_is_named(config, tmp_path):
    Image.new("RGB", (64, 64), PURPLE).save(tmp_path / "=a.png")
    assert infer.main(replace(config, input=tmp_path / "=a.png")).status == 0
    assert "\n'=a.png,0.7" in (config.output / "probabilities.csv").read_text()  # no formula in a spreadsheet
    Image.new("RGB", (96, 64)).save(tmp_path / "b.png")
    with pytest.raises(ValueError, match=r"b\.png: 96 x 64 pixels, expected 64 x 64 like the network"):
        infer.main(replace(config, input=tmp_path / "b.png", output=tmp_path / "other"))


def test_a_probability_that_is_no_number_is_not_written(config, tmp_path, monkeypatch):
    Image.new("RGB", (64, 64), PURPLE).save(tmp_path / "a.png")
    monkeypatch.setattr(Purple, "forward", lambda self, image: image.mean((1, 2, 3), keepdim=True) * math.nan)
    with pytest.raises(ValueError, match=r"a\.png: its score is NaN: use --precision fp32"):
        infer.main(replace(config, input=tmp_path / "a.png"))
    assert not (config.output / "probabilities.csv").exists()


def test_scores_of_patches_keep_all_their_digits(config, tmp_path, monkeypatch):
    """A confident network's scores all became 1.000000, and the AUC of the table another one."""
    logits = torch.tensor([15.0, 16.0, -20.0])
    monkeypatch.setattr(infer.Scanner, "say_how", lambda self, what: None)
    for name in "abc":
        Image.new("RGB", (64, 64), PURPLE).save(tmp_path / f"{name}.png")
    scanner = infer.Scanner(replace(config, input=tmp_path))
    scanner.opened = replace(scanner.opened, predict=lambda windows: logits[:, None, None, None])
    scanner.score(sorted(tmp_path.glob("*.png")))
    rows = (config.output / "probabilities.csv").read_text().splitlines()[1:]
    assert [np.float32(row.split(",")[1]) for row in rows] == logits.sigmoid().tolist()


def test_a_bad_patch_is_set_aside(config, tmp_path, capsys):
    folder = tmp_path / "patches"
    folder.mkdir()
    for name in "ac":
        Image.new("RGB", (64, 64), PURPLE).save(folder / f"{name}.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:60])
    done = infer.main(replace(config, input=folder))
    assert (done.status, list(done.failed)) == (1, ["b.png"])
    assert "b.png: cannot be read as an image" in capsys.readouterr().out
    rows = (config.output / "probabilities.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["image", "a.png", "c.png"]


def test_a_folder_that_cannot_be_made_is_told_before_the_scores(config, tmp_path, monkeypatch):
    Image.new("RGB", (64, 64), PURPLE).save(tmp_path / "a.png")
    monkeypatch.setattr("medspeed.apps.pathology.infer.read_image", lambda *_: pytest.fail("a patch was read"))
    with pytest.raises(NotADirectoryError, match=r"a\.png"):
        infer.main(replace(config, input=tmp_path / "a.png", output=tmp_path / "a.png" / "found"))


def test_scores_replace_those_of_a_run_but_no_file_of_the_users(config, tmp_path):
    Image.new("RGB", (64, 64), PURPLE).save(tmp_path / "a.png")
    scores = replace(config, input=tmp_path / "a.png")
    config.output.mkdir()
    table = config.output / "probabilities.csv"
    table.write_bytes(b"\xffmy own table")
    with pytest.raises(FileExistsError, match=r"probabilities\.csv: already exists, not written by medspeed"):
        infer.main(scores)
    assert table.read_bytes() == b"\xffmy own table"
    table.unlink()
    assert [infer.main(scores).status for _ in range(2)] == [0, 0]


def test_pictures_beside_slides_are_no_patches(config):
    Image.new("RGB", (64, 64)).save(config.input / "thumbnail.png")
    assert infer.main(config).status == 0
    assert not (config.output / "probabilities.csv").exists()


def test_a_patch_is_no_slide(config, capsys):
    write_slide(config.input / "patch.tif", [(32, 32, 32)], side=64)
    assert infer.main(config).status == 1
    said = capsys.readouterr().out
    assert "patch.tif: 64 x 64 pixels is a patch" in said
    assert "1 of 3 slides failed: patch" in said


def test_a_folder_without_slides_is_named(config, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="without slides"):
        infer.main(replace(config, input=tmp_path / "nothing"))


def test_masks_and_hidden_files_are_no_slides(config):
    for name in ("one_mask.tif", "._one.tif", "notes.txt"):
        (config.input / name).touch()
    assert [path.name for path in find_slides(config.input)] == ["one.tif", "two.tif"]


def test_the_stride_must_be_a_multiple_of_32():
    with pytest.raises(ValueError, match="stride 48: must be a multiple of 32"):
        ScanConfig(Path("a"), Path("b"), Path("c"), mode="patches", stride=48)
    with pytest.raises(ValueError, match="stride 128: only with --mode patches"):
        ScanConfig(Path("a"), Path("b"), Path("c"), stride=128)
