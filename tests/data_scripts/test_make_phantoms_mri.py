"""The maker of head MRI phantoms: its command line, its sets, and that the task stays a task."""

import gzip
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from medspeed.data_scripts.make_phantoms import MRI_VERSION, main, make_phantoms

CASES = 12
REGIONS = {"whole tumour": (1, 2, 3), "tumour core": (2, 3), "enhancing tumour": (3,)}
LEVELS = np.linspace(-3, 6, 181)  # thresholds in standard deviations


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_phantoms("mri", tmp_path_factory.mktemp("phantoms") / "set", CASES)


def unpacked(files: dict[str, bytes]) -> dict[str, bytes]:
    """Header and voxels of the scans: what the maker promises whatever the compressor does."""
    return {name: gzip.decompress(data) for name, data in files.items() if name.endswith(".gz")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_set_says_what_it_is_in_the_layout_of_msd_task01(phantoms: Path) -> None:
    dataset = json.loads((phantoms / "dataset.json").read_text())
    assert dataset["name"] == "BrainTumourPhantoms"
    assert dataset["modality"] == {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    assert dataset["labels"] == {
        "0": "background",
        "1": "edema",
        "2": "non-enhancing tumor",
        "3": "enhancing tumour",
    }
    assert dataset["tensorImageSize"] == "4D"
    assert dataset["synthetic"] is True
    assert "not for clinical use" in dataset["licence"]
    expected = {"kind": "mri", "version": MRI_VERSION, "cases": CASES, "size": "small", "seed": 0}
    assert dataset["phantom"] == expected
    assert len(dataset["training"]) == dataset["numTraining"] == CASES


def test_files_hold_four_channels_and_one_label_on_one_grid(phantoms: Path) -> None:
    for pair in json.loads((phantoms / "dataset.json").read_text())["training"]:
        image, label = nib.load(phantoms / pair["image"]), nib.load(phantoms / pair["label"])
        assert image.get_data_dtype() == np.int16
        assert label.get_data_dtype() == np.uint8
        assert image.shape == (*label.shape, 4)
        assert np.array_equal(image.affine, label.affine)
        assert image.header.get_zooms()[:3] == label.header.get_zooms()


def test_same_seed_same_scans_whatever_the_cores(
    phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = unpacked(contents(make_phantoms("mri", tmp_path / "again", 2)))
    first = unpacked(contents(phantoms))
    # fewer cases: the ones there are the same, since each depends on the seed and its index alone
    assert {name: data == first[name] for name, data in again.items()} == {
        f"{kind}/phantom_00{i}.nii.gz": True for kind in ("imagesTr", "labelsTr") for i in (0, 1)
    }


def test_another_seed_gives_other_bytes(phantoms: Path, tmp_path: Path) -> None:
    other = contents(make_phantoms("mri", tmp_path / "other", 1, seed=1))
    first = contents(phantoms)
    assert all(first[name] != data for name, data in other.items())


def dice_per_level(values: npt.NDArray[np.float64], truth: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the Dice of `values >= level` and of `values < level` for each level [2, LEVELS]; two empties count 1."""
    bins = np.clip(np.ceil((values - LEVELS[0]) / (LEVELS[1] - LEVELS[0])), 0, LEVELS.size).astype(np.intp)
    voxels, hits = (np.cumsum(np.bincount(b, minlength=LEVELS.size + 1))[:-1] for b in (bins, bins[truth]))
    below = 2 * hits, voxels + truth.sum()
    above = 2 * (truth.sum() - hits), values.size - voxels + truth.sum()
    return np.stack([np.where(size > 0, both / np.maximum(size, 1), 1.0) for both, size in (above, below)])


def best_threshold(scans: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]]) -> dict[str, float]:
    """Return each region's best mean Dice over channels, thresholds and directions, chosen with the truth in hand."""
    scores = np.zeros((len(REGIONS), 4, 2, LEVELS.size))
    for image, label in scans:
        brain = image[..., 0] > 0
        for channel in range(4):
            values = image[brain][:, channel].astype(np.float64)
            values = (values - values.mean()) / values.std()
            for row, numbers in enumerate(REGIONS.values()):
                scores[row, channel] += dice_per_level(values, np.isin(label[brain], numbers)) / len(scans)
    return {region: float(score.max()) for region, score in zip(REGIONS, scores, strict=True)}


def test_a_trivial_solver_stays_poor(phantoms: Path) -> None:
    folders = [phantoms / kind for kind in ("imagesTr", "labelsTr")]
    pairs = [[nib.load(folder / f"phantom_{i:03d}.nii.gz") for folder in folders] for i in range(CASES)]
    scans = [(np.asarray(image.dataobj), np.asarray(label.dataobj)) for image, label in pairs]
    best = best_threshold(scans)
    assert np.mean(list(best.values())) <= 0.5
    assert max(best.values()) <= 0.7
    # and the solver is no straw man: where the enhancing rim alone is bright it finds it
    bright = [(np.where((label == 3)[..., None], np.int16(20000), image), label) for image, label in scans]
    assert best_threshold(bright)["enhancing tumour"] > 0.85


def test_a_folder_with_ct_phantoms_is_refused(tmp_path: Path) -> None:
    make_phantoms("ct", tmp_path, 1)
    with pytest.raises(ValueError, match=r"contains another dataset \(kind 'ct' instead of 'mri'"):
        make_phantoms("mri", tmp_path, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--case", "2"], "--cases"),
        ([], "--cases"),
        (["--size", "large", "--cases", "2"], "--size"),
        (["--labels", "x", "--cases", "2"], "--labels"),
    ],
)
def test_mistyped_options_exit_2_and_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["mri", "--to", "out", *arguments])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["mri", "--help"])
    assert stopped.value.code == 0
    assert "medspeed data make-phantoms mri --to" in capsys.readouterr().out
