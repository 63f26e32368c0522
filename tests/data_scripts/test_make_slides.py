"""The slide maker: its command line, its sets, and that the task stays a task."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image, ImageDraw
from scipy.stats import rankdata

from medspeed.data_scripts.make_slides import SLIDES_VERSION, entries, main, make_slides, pyramid, write_pyramid
from medspeed.data_scripts.slides_paint import draw_slide

SCRIPT = Path(__file__).resolve().parents[2] / "data_scripts" / "make_slides.py"
SIZE = 1024
PATCH = 128  # px
IMAGES = {f"training/images/{s}.tif" for s in ("normal_001", "normal_002", "tumor_001", "tumor_002", "tumor_003")}
IMAGES |= {f"testing/images/test_00{n}.tif" for n in (1, 2, 3)}
TRUTHS = {f"training/annotations/tumor_00{n}.xml" for n in (1, 2, 3)}
TRUTHS |= {f"training/masks/tumor_00{n}_mask.tif" for n in (1, 2, 3)}
TRUTHS |= {f"testing/annotations/test_00{n}.xml" for n in (1, 3)}
TRUTHS |= {f"testing/masks/test_00{n}_mask.tif" for n in (1, 3)}


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slides(tmp_path_factory.mktemp("slides") / "set", 5, 3, SIZE)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_set_is_in_the_layout_of_camelyon16(slides: Path) -> None:
    assert set(contents(slides)) == IMAGES | TRUTHS | {"slides.json", "testing/reference.csv"}
    listed = json.loads((slides / "slides.json").read_text())
    assert listed["synthetic"] is True
    assert "not for clinical use" in listed["licence"]
    assert listed["training"] == ["normal_001", "normal_002", "tumor_001", "tumor_002", "tumor_003"]
    assert listed["testing"] == ["test_001", "test_002", "test_003"]
    expected = {"kind": "slides", "version": SLIDES_VERSION, "training": 5, "testing": 3, "size": SIZE, "seed": 0}
    assert listed["phantom"] == expected


def test_the_reference_tells_tumour_slides_and_the_size_of_their_metastases(slides: Path) -> None:
    rows = [line.split(",") for line in (slides / "testing" / "reference.csv").read_text().splitlines()]
    assert [(row[0], row[1]) for row in rows] == [("test_001", "Tumor"), ("test_002", "Normal"), ("test_003", "Tumor")]
    assert rows[1] == ["test_002", "Normal", "None", "None"]
    for stem, _, _, extent in (rows[0], rows[2]):
        boxes = [np.ptp(points, axis=0) for group, points in polygons(slides / f"testing/annotations/{stem}.xml")]
        # the long axis lies between the longer side of the box around a lesion and the diagonal of that box
        least, most = max(box.max() for box in boxes) * 0.5, max(np.hypot(*box) for box in boxes) * 0.5
        assert (least <= 300) if extent == "micro" else (most > 300)


def polygons(path: Path) -> list[tuple[str, npt.NDArray[np.float64]]]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "ASAP_Annotations"
    groups = {group.attrib["Name"] for group in root.findall("AnnotationGroups/Group")}
    found = []
    for number, entry in enumerate(root.findall("Annotations/Annotation")):
        assert (entry.attrib["Name"], entry.attrib["Type"]) == (f"Annotation {number}", "Polygon")
        assert entry.attrib["PartOfGroup"] in groups
        points = entry.findall("Coordinates/Coordinate")
        assert [point.attrib["Order"] for point in points] == [str(order) for order in range(len(points))]
        xy = np.array([[float(point.attrib["X"]), float(point.attrib["Y"])] for point in points])
        found.append((entry.attrib["PartOfGroup"], xy))
    return found


@pytest.mark.parametrize("stem", ["training/{}/tumor_001", "training/{}/tumor_002", "testing/{}/test_003"])
def test_masks_and_annotations_agree(slides: Path, stem: str) -> None:
    mask = tifffile.imread(slides / f"{stem.format('masks')}_mask.tif", key=0)
    painted = Image.new("1", mask.shape[::-1])
    found = polygons(slides / f"{stem.format('annotations')}.xml")
    assert 1 <= sum(group in {"_0", "_1", "Tumor"} for group, _ in found) <= 5
    for group, points in sorted(found, key=lambda polygon: polygon[0] in {"_2", "Exclusion"}):
        ImageDraw.Draw(painted).polygon([(x - 0.5, y - 0.5) for x, y in points], fill=group not in {"_2", "Exclusion"})
    truth = np.asarray(painted)
    assert truth.any()
    assert 2 * (truth & (mask == 1)).sum() / (truth.sum() + (mask == 1).sum()) > 0.98


def test_masks_lie_on_tissue(slides: Path) -> None:
    for number in (1, 2, 3):
        image = tifffile.imread(slides / f"training/images/tumor_00{number}.tif", key=3).astype(np.int16)
        mask = tifffile.imread(slides / f"training/masks/tumor_00{number}_mask.tif", key=3)
        tissue = np.ptp(image, axis=2) > 15
        assert tissue[mask == 1].mean() > 0.85 > tissue.mean()


def test_same_seed_same_bytes_whatever_the_cores(slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = contents(make_slides(tmp_path / "again", 2, 2, SIZE))
    first = contents(slides)
    # fewer slides: the ones there are the same, since each depends on the seed, its kind and its number alone
    same = {name: data == first[name] for name, data in again.items() if name.endswith((".tif", ".xml"))}
    assert all(same.values())
    assert len(same) == 8
    other = contents(make_slides(tmp_path / "other", 2, 2, 512, seed=1))
    one = contents(make_slides(tmp_path / "one", 2, 2, 512))
    assert not [name for name, data in other.items() if name.endswith((".tif", ".xml")) and data == one[name]]


def test_an_interrupted_set_is_gone_on_with(slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def draw_or_fail(size: int, tumour: bool, rng: np.random.Generator) -> object:
        calls.append(tumour)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return draw_slide(size, tumour, rng)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with monkeypatch.context() as patched:
        patched.setattr("medspeed.data_scripts.make_slides.draw_slide", draw_or_fail)
        with pytest.raises(OSError, match="no space left"):
            make_slides(tmp_path, 2, 2, SIZE)
    assert not (tmp_path / "slides.json").exists()
    left = contents(tmp_path)
    assert "training/images/tumor_001.tif" in left
    with pytest.raises(ValueError, match=r"contains another dataset \(seed 0 instead of 1\): choose another folder"):
        make_slides(tmp_path, 2, 2, SIZE, seed=1)
    assert contents(tmp_path) == left
    made = contents(make_slides(tmp_path, 2, 2, SIZE))
    first = contents(slides)
    assert {name for name in made if name.endswith((".tif", ".xml"))} <= set(first)
    assert all(data == first[name] for name, data in made.items() if name.endswith((".tif", ".xml")))
    assert "unfinished.json" not in made


def test_a_whole_set_is_left_alone(slides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(slides)
    monkeypatch.setattr("medspeed.data_scripts.make_slides.draw_slide", None)
    make_slides(slides, 5, 3, SIZE)
    assert contents(slides) == before


def features(seed: int, number: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return mean and deviation of R, G, B of the patches of a slide [N, 6], and which are tumour [N]."""
    side = 1536 // PATCH
    image, mask, _ = draw_slide(1536, number % 2 == 1, np.random.default_rng([seed, number]))
    patches = image.reshape(side, PATCH, side, PATCH, 3).swapaxes(1, 2).reshape(-1, PATCH * PATCH, 3)
    share = mask.reshape(side, PATCH, side, PATCH).mean(axis=(1, 3)).ravel()
    tissue = (np.ptp(patches, axis=2) > 25).mean(axis=1) > 0.5
    kept = tissue & ((share > 0.5) | (share == 0))
    means, deviations = patches[kept].mean(axis=1), patches[kept].std(axis=1)
    return np.concatenate([means, deviations], axis=1), share[kept] > 0.5


def logistic(x: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the weights of a logistic regression with both classes weighing the same, by Newton steps."""
    weight = np.where(y, 0.5 / y.sum(), 0.5 / (~y).sum())
    w = np.zeros(x.shape[1])
    for _ in range(25):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x.T * (weight * p * (1 - p))) @ x + 1e-3 * np.eye(len(w))
        w -= np.linalg.solve(hessian, x.T @ (weight * (p - y)) + 1e-3 * w)
    return w


def auc(scores: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> float:
    ranks = rankdata(scores)
    return float((ranks[y].sum() - y.sum() * (y.sum() + 1) / 2) / (y.sum() * (~y).sum()))


def held_out_auc(slides: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]]) -> float:
    """Return the mean patch AUC of two halves of the slides, each judged by the regression of the other."""
    x = np.concatenate([slide[0] for slide in slides])
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    halves = []
    for half in (0, 1):
        chosen = [slide for number, slide in enumerate(slides) if number // 2 % 2 == half]
        scaled = (np.concatenate([slide[0] for slide in chosen]) - mean) / deviation
        halves.append((np.c_[scaled, np.ones(len(scaled))], np.concatenate([slide[1] for slide in chosen])))
    return float(np.mean([auc(halves[1 - i][0] @ logistic(*halves[i]), halves[1 - i][1]) for i in (0, 1)]))


@pytest.mark.slow
def test_colour_alone_does_not_tell_tumour() -> None:
    slides = [features(3, number) for number in range(12)]
    assert sum(int(y.sum()) for _, y in slides) > 80
    assert held_out_auc(slides) <= 0.75
    # and the regression is no straw man: where tumour is a little darker it finds it
    darker = [(x - 60 * y[:, None] * np.eye(6)[0], y) for x, y in slides]
    assert held_out_auc(darker) > 0.9


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--training", "1"], "--training 1: must be at least 2"),
        (["--testing", "0"], "--testing 0: must be at least 2"),
        (["--size", "300"], "--size 300: must be 512 to 65535 px"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["--to", str(tmp_path / "out"), *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"make_slides: error: {complaint}")
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "text"), [("notes.txt", "mine"), ("slides.json", "[1]"), ("unfinished.json", "{")])
def test_a_folder_with_other_things_is_refused_and_untouched(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"contains other files \\({name}\\): choose a new or empty folder"):
        make_slides(tmp_path)
    assert contents(tmp_path) == {name: text.encode()}


def test_mistyped_options_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--to", "out", "--train", "4"])
    assert stopped.value.code == 2
    assert "--train" in capsys.readouterr().err


def test_it_runs_from_another_folder_without_torch(tmp_path: Path) -> None:
    # an import of torch or monai would fail: they are hidden behind broken twins
    for name in ("torch", "monai"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a data script needs no torch')")
    command = [sys.executable, str(SCRIPT), "--to", "made", "--training", "2", "--testing", "2", "--size", "512"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{SCRIPT.parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "synthetic slides" in ran.stdout
    assert (tmp_path / "made" / "slides.json").is_file()


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "medspeed data make-slides --to" in capsys.readouterr().out


def test_half_of_the_slides_have_tumour() -> None:
    slides = entries(5, 4)
    assert slides == [
        ("normal", 1, False), ("normal", 2, False), ("tumor", 1, True), ("tumor", 2, True), ("tumor", 3, True),
        ("test", 1, True), ("test", 2, False), ("test", 3, True), ("test", 4, False)
    ]  # fmt: skip


def test_every_third_slide_is_compressed_without_loss(slides: Path) -> None:
    found = {}
    for number in (1, 2, 3):
        with tifffile.TiffFile(slides / f"training/images/tumor_00{number}.tif") as file:
            found[number] = int(file.pages.first.compression)
    assert found == {1: 7, 2: 7, 3: 8}


def test_levels_are_means_and_leave_an_odd_line_out() -> None:
    base = np.zeros((99, 100), np.uint8)
    base[:2, :4] = [[0, 1, 10, 20], [1, 0, 30, 41]]
    _, half = pyramid(base)
    assert half.shape == (49, 50)
    assert half[0, :2].tolist() == [1, 25]  # 2 / 4 is rounded up, 101 / 4 down


def test_a_slide_of_3072_px_has_level_6() -> None:
    shapes = [level.shape for level in pyramid(np.zeros((3072, 3100), np.uint8))]
    assert shapes == [(3072 >> n, 3100 >> n) for n in range(7)]


@pytest.mark.parametrize(("compression", "number"), [("jpeg", 7), ("deflate", 8)])
def test_levels_are_directories_of_their_own(
    tmp_path: Path, compression: Literal["jpeg", "deflate"], number: int
) -> None:
    base = np.full((600, 700, 3), 240, np.uint8)
    base[100:300, 200:500] = (200, 90, 160)
    write_pyramid(tmp_path / "a.tif", base, compression)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert not file.is_bigtiff
        assert len(file.pages) == 4
        for order, (page, level) in enumerate(zip(file.pages, pyramid(base), strict=True)):
            assert isinstance(page, tifffile.TiffPage)
            assert (page.subfiletype, page.compression, page.subifds) == (int(order > 0), number, None)
            assert (page.tilewidth, page.tilelength) == (256, 256)
            assert page.get_resolution("MICROMETER") == pytest.approx((2 / 2**order,) * 2)  # pixels per um
            difference = np.abs(page.asarray().astype(int) - level)
            assert difference.mean() < (1.5 if compression == "jpeg" else 1e-9)


def test_a_mask_keeps_its_values(tmp_path: Path) -> None:
    mask = (np.add.outer(np.arange(300), np.arange(260)) % 97 < 40).astype(np.uint8)
    write_pyramid(tmp_path / "m.tif", mask, "deflate")
    assert np.array_equal(tifffile.imread(tmp_path / "m.tif", key=0), mask)
    assert set(np.unique(tifffile.imread(tmp_path / "m.tif", key=1))) == {0, 1}
