import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from medspeed.common.data import fingerprint as module
from medspeed.common.data import preparation
from medspeed.common.data.dataset import Case, Dataset, read_dataset
from medspeed.common.data.fingerprint import Fingerprint, plan_preparation
from medspeed.common.data.preparation import Preparation
from medspeed.common.data.volumes import Volume, read_volume
from medspeed.common.files import from_json

CT = Dataset(Path("somewhere"), "Organ", ("CT",), ("background", "organ", "lesion"), (), (), False)
MR = replace(CT, modality=("FLAIR", "T1w"))
KNOWN = Preparation((1.5, 1.5, 2.0), "window", (-57.0, 164.0))


def fingerprint(cases: Sequence[Case], dataset: Dataset, store: Path | None = None, **more: Any) -> Fingerprint:
    """Return the fingerprint; without a store, measured anew."""
    with TemporaryDirectory() as folder:
        return module.fingerprint(cases, dataset, store or Path(folder), **more)


def save(path: Path, voxels: np.ndarray, spacing: tuple[float, float, float] = (1, 1, 1)) -> None:
    nib.save(nib.Nifti1Image(voxels, np.diag([*spacing, 1.0])), path)


def write_case(folder: Path, name: str, image: np.ndarray, label: np.ndarray, spacing=(1.0, 1.0, 1.0)) -> Case:
    case = Case(name, folder / f"{name}.nii.gz", folder / f"{name}_label.nii.gz")
    assert case.label is not None
    save(case.image, image, spacing)
    save(case.label, label, spacing)
    return case


def figures_of(dataset: Dataset, **changes: object) -> Fingerprint:
    shape = (512, 512, 90)
    figures = Fingerprint(dataset.modality, 12, (0.7849, 0.7849, 5.0), shape, shape, (-1003.6, 119.7))
    return replace(figures, **changes)  # type: ignore[arg-type]


@pytest.fixture
def three(tmp_path: Path) -> list[Case]:
    """Three CTs whose figures are told by hand: in each, label 1 on a few voxels and label 2 on one."""
    cases = []
    for number, (shape, spacing) in enumerate([((4, 5, 6), (1, 2, 3)), ((4, 4, 8), (2, 2, 5)), ((6, 3, 7), (1, 1, 9))]):
        image = np.full(shape, -1000, np.int16)
        label = np.zeros(shape, np.uint8)
        image[1, 1, 1:5] = [10, 20, 30, 40 + number]
        label[1, 1, 1:5] = [1, 1, 1, 2]
        cases.append(write_case(tmp_path, f"case{number}", image, label, spacing))
    return cases


def test_figures_told_by_hand(three):
    found = fingerprint(three, CT)
    assert found.spacing == (1.0, 2.0, 5.0)
    assert found.shape == (4, 4, 7)
    assert (found.modality, found.cases) == (("CT",), 3)
    assert found.foreground == (10, 42)  # of 10, 20, 30, 40, 10, 20, 30, 41, 10, 20, 30, 42, each often


def test_axes_are_counted_along_right_anterior_superior(tmp_path):
    # The file's axes run to S, L and A, with 3, 1 and 2 mm.
    affine = np.array([[0, -1, 0, 5], [0, 0, 2, 6], [3, 0, 0, 7], [0, 0, 0, 1]], float)
    case = Case("a", tmp_path / "a.nii.gz", tmp_path / "l.nii.gz")
    voxels = np.ones((10, 20, 30), np.uint8)
    for path in (case.image, case.label):
        nib.save(nib.Nifti1Image(voxels, affine), path)
    for known in (None, KNOWN):
        found = fingerprint([case], CT, known=known)
        assert found.spacing == (1.0, 2.0, 3.0)
        assert found.shape == (20, 30, 10)


def test_every_case_has_the_same_say(tmp_path):
    shape = (30, 30, 30)
    ramp = np.arange(27_000, dtype=np.int16).reshape(shape) // 27
    large = write_case(tmp_path, "large", np.full((100, 100, 100), 500, np.int16), np.ones((100, 100, 100), np.uint8))
    small = write_case(tmp_path, "small", ramp, np.ones(shape, np.uint8))
    # 10,000 voxels of each: of the 1,000,000 and 27,000 that there are, the percentiles would be 190 and 810.
    assert fingerprint([large, small], CT).foreground == pytest.approx((10, 990), abs=1)


def test_a_case_of_few_voxels_has_the_same_say(tmp_path):
    """As in nnU-Net, which draws them repeatedly: by their number they would be 0.003 of all."""
    large, small = np.full((30, 30, 30), 40, np.int16), np.full((3, 3, 3), 120, np.int16)
    cases = [
        write_case(tmp_path, name, each, np.ones_like(each, np.uint8)) for name, each in (("a", large), ("b", small))
    ]
    assert fingerprint(cases, CT).foreground == (40, 120)


def test_a_label_that_lies_between_the_sampled_voxels_is_seen(tmp_path):
    image, label = np.full((60, 60, 60), 60, np.int16), np.ones((60, 60, 60), np.uint8)
    image[1, 0, 0], label[1, 0, 0] = 700, 2  # the second voxel of the file; every twenty-first is taken
    two = replace(CT, labels=("background", "kidney", "stone"))
    assert fingerprint([write_case(tmp_path, "a", image, label)], two).foreground == pytest.approx((60, 64))


def test_a_rare_label_is_not_cut_off_by_the_window(tmp_path):
    """Fat of 0.2 percent at -120 HU beside an organ at 100: without it the window begins at about 70."""
    rng = np.random.default_rng(0)
    image, label = rng.normal(100, 10, (40, 40, 40)).astype(np.float32), np.ones((40, 40, 40), np.uint8)
    image[:5, :5, :5], label[:5, :5, :5] = rng.normal(-120, 10, (5, 5, 5)), 2
    two = replace(CT, labels=("background", "organ", "fat"))
    found = fingerprint([write_case(tmp_path, "a", image, label)], two).foreground
    assert found is not None
    low, high = found
    assert low == pytest.approx(-133, abs=9)  # the 10th percentile of N(-120, 10), of some twenty voxels
    assert high == pytest.approx(126, abs=4)  # the 99.5th of N(100, 10)


@pytest.mark.parametrize(("level", "sides"), [(3000, (74, 335)), (-1000, (-135, 126))])
def test_metal_or_air_does_not_flatten_the_others(level, sides, tmp_path):
    """Both are cut off four widths (of about 52 HU) beyond the window of all labels, of N(100, 10)."""
    rng = np.random.default_rng(0)
    image, label = rng.normal(100, 10, (40, 40, 40)).astype(np.float32), np.ones((40, 40, 40), np.uint8)
    image[:5, :5, :5], label[:5, :5, :5] = level, 2
    two = replace(CT, labels=("background", "organ", "clip"))
    assert fingerprint([write_case(tmp_path, "a", image, label)], two).foreground == pytest.approx(sides, abs=25)


def test_sampled_voxels_speak_for_all(tmp_path):
    image = np.random.default_rng(0).normal(40, 25, (64, 64, 40)).astype(np.float32)
    label = np.zeros(image.shape, np.uint8)
    label[8:56, 8:56, 4:36] = 1
    found = fingerprint([write_case(tmp_path, "a", image, label)], CT)
    assert found.foreground == pytest.approx(np.percentile(image[label > 0], [0.5, 99.5]), abs=5)


def test_each_channel_of_ct_has_its_own_figures_of_others_the_first_is_read(tmp_path):
    label = np.zeros((5, 6, 7), np.uint8)
    label[1:3, 1:3, 1:3] = 1
    image = np.stack([np.where(label, 3, 0), np.where(label, 8, -5)], -1).astype(np.float32)
    cases = [write_case(tmp_path, "a", image, label)]
    for modality, expected in ((("CT", "CT"), (3, 8)), (("T1", "T2"), (3, 3))):
        assert fingerprint(cases, replace(MR, modality=modality)).foreground == expected


def test_a_case_without_foreground_counts_for_spacing_only(three, tmp_path):
    empty = write_case(tmp_path, "empty", np.zeros((4, 4, 4), np.int16), np.zeros((4, 4, 4), np.uint8), (1, 1, 1))
    found = fingerprint([*three, empty], CT)
    assert found.foreground == fingerprint(three, CT).foreground
    assert found.spacing == (1.0, 1.5, 4.0)
    with pytest.raises(ValueError, match=r"somewhere: no voxel of the training cases \(1\) has a label above 0"):
        fingerprint([empty], CT)


@pytest.mark.parametrize(("dtype", "number"), [(np.uint8, 3), (np.int16, -1), (np.float32, 0.5)])
def test_labels_that_are_not_listed_are_named(tmp_path, dtype, number):
    label = np.zeros((4, 4, 4), dtype)
    label[0, 0, :2] = [1, number]
    case = write_case(tmp_path, "a", np.zeros((4, 4, 4), np.int16), label)
    with pytest.raises(
        ValueError, match=rf"a_label\.nii\.gz: expected label values 0, 1, 2, found .*{number}.*dataset.json"
    ):
        fingerprint([case], CT)


def test_image_and_label_must_share_a_grid(tmp_path):
    case = write_case(tmp_path, "a", np.zeros((4, 4, 4), np.int16), np.ones((4, 4, 4), np.uint8))
    assert case.label is not None
    save(case.label, np.ones((4, 4, 4), np.uint8), (2, 1, 1))
    with pytest.raises(ValueError, match=r"a_label\.nii\.gz .* of its image .*a\.nii\.gz"):
        fingerprint([case], CT)


def test_of_a_known_dataset_a_part_is_read(three, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_KNOWN_READ", 2)
    found = fingerprint(three, CT, tmp_path / "store", known=KNOWN)
    assert found == fingerprint(three[::2], CT)
    monkeypatch.setattr(preparation, "read_volume", None)
    assert fingerprint(three, CT, tmp_path / "store", known=KNOWN) == found
    assert plan_preparation(CT, found, known=KNOWN)[0] == KNOWN


def test_the_figures_of_scans_by_hand(tmp_path):
    """CT without its air, MR in standard deviations without its zeros; axes by the patient, volumes by the label."""
    image, label = np.full((5, 4, 10), -1000, np.int16), np.zeros((5, 4, 10), np.uint8)
    image[0, 0] = np.arange(-2, 8) * 100  # -1000 is none of them: 10 values from -200 to 700
    label[1, 1, :3], label[2, 2, :4] = 1, 2
    affine = np.array([[0, 0, -3.0, 0], [2, 0, 0, 0], [0, 1.5, 0, 0], [0, 0, 0, 1]])  # its axes run to A, S and L
    case = Case("a", tmp_path / "a.nii.gz", tmp_path / "l.nii.gz")
    for path, voxels in ((case.image, image), (case.label, label)):
        nib.save(nib.Nifti1Image(voxels, affine), path)
    (found,) = fingerprint([case], CT).scans
    assert (found.spacing, found.size) == ((3.0, 2.0, 1.5), (30.0, 10.0, 6.0))
    assert found.intensity == (-155.0, 250.0, 655.0)  # 0.45, 4.5 and 8.55 of the way along ten values
    assert found.volumes_ml == (0.0, 0.027, 0.036)  # 3 and 4 voxels of 9 mm3
    heads = np.zeros((4, 5, 5, 2), np.float32, order="F")
    heads[0, 0, :5, 0] = [1, 2, 3, 4, 5]  # mean 3, deviation the root of 2
    heads[..., 1] = 9
    figures = module.scan_figures(Volume(heads, np.eye(4), Path("b")), ct=False)
    assert figures.intensity == pytest.approx((-1.8 / 2**0.5, 0, 1.8 / 2**0.5), abs=1e-3)
    air = module.scan_figures(Volume(np.full((3, 3, 3), -1000), np.eye(4), Path("c")), ct=True)
    assert air.intensity == (-500.0, -500.0, -500.0)


def test_figures_are_kept_until_a_file_or_a_list_changes(three, monkeypatch, tmp_path):
    store = tmp_path / "store"
    read: list[Path] = []

    def spy(path: Path, channels: int = 1, first_only: bool = False) -> Volume:
        read.append(path)
        return read_volume(path, channels, first_only)

    monkeypatch.setattr(preparation, "read_volume", spy)
    first = fingerprint(three, CT, store)
    assert len(read) == 6
    assert fingerprint(three, CT, store) == first
    assert len(read) == 6
    fingerprint(three[:2], CT, store)
    assert len(read) == 10
    fingerprint(three[:2], replace(CT, labels=("background", "organ", "tumour")), store)
    assert len(read) == 14
    save(three[0].image, np.full((4, 5, 6), 77, np.int16), (1, 2, 3))
    changed = fingerprint(three, CT, store)
    assert len(read) == 20
    assert changed != first
    (store / "fingerprint.json").write_text("{")
    assert fingerprint(three, CT, store) == changed
    assert len(read) == 26


def test_percentiles_between_far_values_of_int16_are_those_of_float32(tmp_path):
    """Padding beside metal: their difference is no int16."""
    image, label = np.zeros((4, 5, 6), np.int16), np.zeros((4, 5, 6), np.uint8)
    image[0, 0, :3], label[0, 0, :3] = [-3024, 30710, 30710], 2
    image[2:], label[2:] = np.arange(60).reshape(2, 5, 6), 1
    found = []
    for dtype in (np.int16, np.float32):
        (tmp_path / dtype.__name__).mkdir()
        case = write_case(tmp_path / dtype.__name__, "a", image.astype(dtype), label)
        found.append(fingerprint([case], CT, tmp_path / dtype.__name__).foreground)
    assert found[0] == found[1]


def test_a_small_spacing_keeps_two_digits():
    figures = replace(figures_of(CT), spacing=(0.0149, 0.0351, 0.784))
    assert plan_preparation(CT, figures)[0].spacing == (0.0149, 0.0351, 0.78)


@pytest.mark.parametrize("changes", [{}, {"foreground": None}])
def test_figures_survive_json(changes):
    figures = figures_of(MR, **changes)
    assert from_json(Fingerprint, json.loads(json.dumps(asdict(figures)))) == figures


def test_ct_gets_a_window_of_whole_units_and_the_median_spacing():
    preparation, lines = plan_preparation(CT, figures_of(CT))
    assert preparation == Preparation((0.78, 0.78, 5.0), "window", (-1004.0, 120.0))
    assert lines == (
        "spacing (0.78, 0.78, 5) mm: median of 12 measured cases",
        "window (-1004, 120) HU: 0.5 and 99.5 percentiles of the foreground of 12 measured cases, "
        "widened to 10 and 90 of each label",
    )


def test_mr_gets_z_scores():
    preparation, lines = plan_preparation(MR, figures_of(MR))
    assert preparation == Preparation((0.78, 0.78, 5.0), "zscore", None, channels=2)
    assert lines[1] == "normalization: z-score per channel over nonzero voxels (modality FLAIR, T1w, not CT)"


def test_ct_beside_others_is_said_to_be_flat():
    petct = replace(MR, modality=("CT", "PET"))
    assert "clip the CT of all scans first" in plan_preparation(petct, figures_of(petct))[1][1]


def test_a_known_preparation_goes_before_the_fingerprint():
    preparation, lines = plan_preparation(CT, figures_of(CT), known=KNOWN)
    assert preparation == KNOWN
    assert lines == (
        "spacing (1.5, 1.5, 2) mm: known for this dataset or --init",
        "window (-57, 164) HU: known for this dataset or --init",
    )
    exact = replace(KNOWN, spacing=(0.9375, 0.9375, 4.125))  # of weights, for instance: the files' own
    assert plan_preparation(CT, figures_of(CT), known=exact)[0] == exact
    # What is named like a dataset that is known need not be it: a name alone chooses nothing here.
    assert plan_preparation(replace(CT, name="Spleen"), figures_of(CT))[0] != KNOWN


@pytest.mark.parametrize("known", [None, KNOWN])
def test_what_is_asked_for_goes_first(known):
    spacing, window = (3.0, 3.0, 4.0), (-160.0, 240.0)
    preparation, lines = plan_preparation(CT, figures_of(CT), spacing, window, known)
    assert preparation == Preparation(spacing, "window", window)
    assert lines == ("spacing (3, 3, 4) mm: as asked", "window (-160, 240) HU: as asked")


@pytest.mark.parametrize(
    ("dataset", "wanted", "message"),
    [
        (CT, {"spacing": (1.0, 0.0, 1.0)}, r"spacing \(1\.0, 0\.0, 1\.0\)"),
        (CT, {"spacing": (1.0, float("nan"), 1.0)}, "spacing"),
        (CT, {"window": (164.0, -57.0)}, r"window \(164.0, -57.0\): the lower bound must be below"),
        (CT, {"window": (float("-inf"), 5.0)}, r"window \(-inf, 5.0\)"),
        (MR, {"window": (0.0, 1.0)}, "applies to CT only, and the modality is FLAIR, T1w"),
    ],
)
def test_what_cannot_be_meant_is_refused(dataset, wanted, message):
    with pytest.raises(ValueError, match=message):
        plan_preparation(dataset, figures_of(dataset), **wanted)


def test_a_constant_foreground_has_a_window_of_one_unit():
    assert plan_preparation(CT, figures_of(CT, foreground=(50.0, 50.2)))[0].window == (50.0, 51.0)


@pytest.mark.real_data
def test_real_scans(real_data):
    dataset = read_dataset(real_data / "ct_spleen_real")
    found = fingerprint(dataset.cases, dataset)
    images = [nib.load(case.image) for case in dataset.cases]
    labels = [np.asarray(nib.load(case.label).dataobj) for case in dataset.cases]
    assert found.spacing == pytest.approx(np.median([image.header.get_zooms() for image in images], axis=0))
    inside = [image.get_fdata().T[label.T > 0] for image, label in zip(images, labels, strict=True)]
    some = [values[np.linspace(0, len(values) - 1, 10_000).round().astype(int)] for values in inside]
    assert found.foreground == pytest.approx(np.percentile(np.concatenate(some), [0.5, 99.5]))
    assert plan_preparation(dataset, found)[0].normalisation == "window"

    brain = read_dataset(real_data / "brain_tumour_real")
    found = fingerprint(brain.cases, brain)
    assert (found.spacing, found.shape) == ((1, 1, 1), (240, 240, 155))
    assert plan_preparation(brain, found)[0] == Preparation((1.0, 1.0, 1.0), "zscore", None, channels=2)


def test_the_extent_is_that_of_the_box_around_what_is_not_zero_in_the_first_channel(tmp_path):
    image, label = np.zeros((9, 8, 7, 2), np.int16), np.zeros((9, 8, 7), np.uint8)
    image[2, 3, 1, 0] = image[5, 3, 1, 1] = image[4, 6, 2, 0] = -7
    label[4, 6, 2] = 1
    cases = [write_case(tmp_path, "a", image, label, (1, 1, 1))]
    dataset = Dataset(tmp_path, "Brains", ("FLAIR", "T1w"), ("background", "tumour"), tuple(cases), (), False)
    figures = fingerprint(cases, dataset)
    assert (figures.shape, figures.extent) == ((9, 8, 7), (3, 4, 2))


def test_an_empty_first_channel_has_the_extent_of_its_image(tmp_path):
    """As small as nothing, it would make windows of a few voxels."""
    image, label = np.zeros((9, 8, 7, 2), np.int16), np.zeros((9, 8, 7), np.uint8)
    image[..., 1], label[4, 6, 2] = 5, 1
    dataset = Dataset(tmp_path, "Brains", ("FLAIR", "T1w"), ("background", "tumour"), (), (), False)
    figures = fingerprint([write_case(tmp_path, "a", image, label, (1, 1, 1))], dataset, tmp_path / "store")
    assert figures.extent == figures.shape == (9, 8, 7)
