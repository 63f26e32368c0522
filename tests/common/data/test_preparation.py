from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    ScaleIntensityRanged,
    Spacingd,
)

from medspeed.common.data import preparation as module
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import (
    Preparation,
    PreparedCase,
    prepare_case,
    prepare_volume,
    standardised,
    windowed,
)
from medspeed.common.data.volumes import Volume, read_volume

CT = Preparation((1.5, 1.5, 2.0), "window", (-57.0, 164.0))
MR = Preparation((1.0, 1.0, 1.0), "zscore", None, channels=2)
HALF_STEP = 2.5e-4  # of float16 between 0.5 and 1: half its spacing, and a little
KEYS = ("image", "label")


def prepare(name: str, image: Path, label: Path | None, preparation: Preparation, classes: int = 3) -> PreparedCase:
    if label is None:
        return prepare_volume(name, read_volume(image, preparation.channels), preparation)
    return prepare_case(Case(name, image, label), preparation, range(classes))


def monai_chain(preparation: Preparation) -> Compose:
    """Return the transforms that `prepare_case` stands for."""
    if preparation.window:
        crop = CropForegroundd(KEYS, source_key="image", allow_smaller=True)
        end: list[Any] = [ScaleIntensityRanged("image", *preparation.window, 0.0, 1.0, clip=True), crop]
    else:
        crop = CropForegroundd(KEYS, source_key="image", select_fn=lambda image: image != 0, allow_smaller=True)
        end = [crop, NormalizeIntensityd("image", nonzero=True, channel_wise=True)]
    start = [
        LoadImaged(KEYS),
        EnsureChannelFirstd(KEYS),
        Orientationd(KEYS, axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
        Spacingd(KEYS, pixdim=preparation.spacing, mode=("bilinear", "nearest")),
    ]
    return Compose(start + end)


def monais(image: Path, label: Path, preparation: Preparation) -> tuple[torch.Tensor, torch.Tensor]:
    found = monai_chain(preparation)({"image": image, "label": label})
    return found["image"].as_tensor(), found["label"].as_tensor()[0]


def save(path: Path, voxels: np.ndarray, affine: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


def body(shape: tuple[int, ...] = (31, 26, 13)) -> np.ndarray:
    """Return a bright body off the centre of dark air, in HU, with noise in both."""
    rng = np.random.default_rng(0)
    image = rng.normal(-1000, 20, shape)
    inside = tuple(slice(n // 5, n - n // 8) for n in shape)
    image[inside] = rng.normal(40, 90, image[inside].shape)
    return image.round().astype(np.int16)


def labels(shape: tuple[int, ...] = (31, 26, 13)) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 3, shape).astype(np.uint8)


LPS = np.diag([-0.79, -0.83, 5.0, 1])
PIR = np.array([[0, 0, 1.7, 3], [-0.9, 0, 0, 50], [0, -2.5, 0, -4], [0, 0, 0, 1]])
TILTED = np.array([[0.81, 0, 0, 3], [0, 0.81, 0.9, 50], [0, 0, 4.1, -4], [0, 0, 0, 1]])


@pytest.mark.parametrize("affine", [np.eye(4), LPS, PIR, TILTED], ids=["RAS", "LPS", "PIR", "tilted"])
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_a_ct_equals_monais(tmp_path, affine, dtype):
    image = save(tmp_path / "image.nii.gz", body().astype(dtype), affine)
    label = save(tmp_path / "label.nii.gz", labels(), affine)
    case = prepare("a", image, label, CT, classes=3)
    expected, truth = monais(image, label, CT)
    assert case.name == "a"
    assert case.image.dtype == torch.float16
    assert case.image.shape == expected.shape
    assert tuple(case.image.shape[1:]) == case.grid.crop_shape
    assert (case.image.float() - expected).abs().max() <= HALF_STEP
    assert case.label is not None
    assert case.label.dtype == torch.uint8
    assert torch.equal(case.label, truth.to(torch.uint8))
    assert case.image.is_contiguous()
    assert case.label.is_contiguous()


@pytest.mark.parametrize("affine", [np.diag([-0.79, -0.83, 4.7, 1]), PIR * 1.0173], ids=["LPS", "PIR"])
def test_several_mr_channels_equal_monais(tmp_path, affine):
    """Zeros stay zeros, each channel has its own mean and deviation, and the crop keeps what any channel has.

    The spacings keep voxels of both grids from coinciding: there MONAI's rounding turns zeros into 1e-14, "nonzero".
    """
    rng = np.random.default_rng(0)
    image = np.zeros((21, 19, 14, 2), np.float32)
    image[3:15, 2:16, 4:12, 0] = rng.normal(200, 50, (12, 14, 8))
    image[5:18, 6:12, 2:10, 1] = rng.normal(-30, 5, (13, 6, 8))
    scan = save(tmp_path / "image.nii.gz", image, affine)
    label = save(tmp_path / "label.nii.gz", labels((21, 19, 14)), affine)
    case = prepare("a", scan, label, MR, classes=3)
    expected, truth = monais(scan, label, MR)
    assert case.image.shape == expected.shape
    assert (case.image.float() - expected).abs().max() <= 16 * HALF_STEP  # values up to 8: coarser float16 steps
    assert case.label is not None
    assert torch.equal(case.label, truth.to(torch.uint8))


def test_a_constant_or_empty_mr_channel_is_no_trouble(tmp_path):
    image = np.zeros((8, 8, 8, 2), np.int16)
    image[2:6, 2:6, 2:6, 0] = 7  # deviation 0: MONAI divides by 1
    path = save(tmp_path / "image.nii.gz", image, np.eye(4))
    case = prepare("a", path, None, MR)
    assert case.label is None
    assert case.image.shape == (2, 4, 4, 4)
    assert case.image.abs().max() == 0
    assert case.grid.crop_start == (2, 2, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.float64])
def test_all_types_of_voxels_give_the_same(tmp_path, dtype):
    voxels = np.abs(body((12, 11, 10))) % 120
    narrow = Preparation((1.5, 0.7, 1.0), "window", (10.0, 100.0))
    expected = prepare("a", save(tmp_path / "a.nii.gz", voxels, np.eye(4)), None, narrow)
    found = prepare("b", save(tmp_path / "b.nii.gz", voxels.astype(dtype), np.eye(4)), None, narrow)
    assert torch.equal(found.image, expected.image)


def test_known_voxels(tmp_path):
    """By hand: a line along x of 0, 10, 20, 30 HU at 2 mm, windowed from 0 to 40, wanted at 1 mm."""
    line = np.array([0, 10, 20, 30], np.int16).reshape(4, 1, 1)
    image = save(tmp_path / "image.nii.gz", line, np.diag([2.0, 1, 1, 1]))
    label = save(tmp_path / "label.nii.gz", (line // 10).astype(np.uint8), np.diag([2.0, 1, 1, 1]))
    case = prepare("a", image, label, Preparation((1, 1, 1), "window", (0.0, 40.0)), classes=4)
    assert case.grid.shape == (7, 1, 1)
    assert case.grid.crop_start == (1, 0, 0)  # the voxel of 0 HU is background
    assert case.image.flatten().tolist() == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]
    assert case.label is not None
    assert case.label.flatten().tolist() == [0, 1, 2, 2, 2, 3]  # halfway, the even voxel


def test_known_z_scores(tmp_path):
    """By hand: 2, 4, 6, 8 have mean 5 and deviation sqrt(5); the zero between them stays."""
    line = np.array([0, 2, 4, 0, 6, 8, 0], np.int16).reshape(7, 1, 1)
    image = save(tmp_path / "image.nii.gz", line, np.eye(4))
    case = prepare("a", image, None, Preparation((1, 1, 1), "zscore", None))
    expected = [-3 / 5**0.5, -1 / 5**0.5, 0, 1 / 5**0.5, 3 / 5**0.5]
    np.testing.assert_allclose(case.image.flatten().tolist(), expected, atol=1e-3)


def test_a_volume_in_memory_is_prepared_alike(tmp_path):
    path = save(tmp_path / "image.nii.gz", body(), LPS)
    expected = prepare("a", path, None, CT)
    found = prepare_volume("a", read_volume(path), CT)
    assert torch.equal(found.image, expected.image)
    assert found.grid == expected.grid


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_a_window_of_whole_numbers_is_one_of_real_numbers(dtype):
    """Torch turns -57 into 199 beside uint8."""
    voxels = np.zeros((20, 20, 20), dtype)
    voxels[5:15, 5:15, 5:15] = 120
    volume = Volume(voxels, np.eye(4), Path("a.nii"))
    found = prepare_volume("a", volume, Preparation((1, 1, 1), "window", (-57, 164)))
    assert found.image.shape == (1, 20, 20, 20)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (1.5, 1.5, 1.5)])
def test_the_scan_itself_is_left_alone(tmp_path, spacing):
    volume = read_volume(save(tmp_path / "image.nii.gz", body().astype(np.float32), np.eye(4)))
    before = volume.voxels.copy()
    prepare_volume("a", volume, Preparation(spacing, "window", (-57.0, 164.0)))
    assert np.array_equal(volume.voxels, before)


def test_threads_do_not_disturb_each_other(tmp_path):
    path = save(tmp_path / "image.nii.gz", body(), PIR)
    expected = prepare("a", path, None, CT)
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for found in pool.map(lambda _: prepare("a", path, None, CT), range(12)):
            assert torch.equal(found.image, expected.image)


def test_a_working_grid_is_judged_before_it_is_made(tmp_path, monkeypatch):
    path = save(tmp_path / "a.nii.gz", body(), np.diag([90.0, 90, 90, 1]))
    with pytest.raises(
        ValueError, match=r"a\.nii\.gz: its \(31, 26, 13\) voxels become .* more than 1000 times as many"
    ):
        prepare("a", path, None, CT)
    path = save(tmp_path / "b.nii.gz", body(), np.diag([4.0, 4, 4, 1]))
    monkeypatch.setattr(module, "free_memory", lambda *_: 10000)
    assert prepare("b", path, None, CT).image.any()  # little enough to be tried
    monkeypatch.setattr(module, "ALWAYS_TRIED", 0)
    with pytest.raises(ValueError, match=r"b\.nii\.gz: at spacing \(1.5, 1.5, 2.0\) mm it needs 0.0 GiB, 0.0 are free"):
        prepare("b", path, None, CT)


@pytest.mark.parametrize(
    ("values", "dtype", "said"),
    [
        ([0, 1, 3], np.uint8, "expected label values 0, 1, 2, found 0, 1, 3"),
        ([0, -1], np.int16, "found -1, 0"),
        ([0, 257], np.int16, "found 0, 257"),
        ([0, 0.5], np.float32, "found 0, 0.5"),
        (list(range(300)), np.int16, r"found 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, \.\.\."),
    ],
)
def test_a_label_outside_the_classes_is_refused(tmp_path, values, dtype, said):
    image = save(tmp_path / "image.nii.gz", body(), np.eye(4))
    voxels = np.resize(np.array(values), body().shape).astype(dtype)
    label = save(tmp_path / "label.nii.gz", voxels, np.eye(4))
    with pytest.raises(ValueError, match=f"label.nii.gz.*{said}"):
        prepare("a", image, label, CT, classes=3)


def test_labels_with_a_gap_are_allowed_where_they_are_listed(tmp_path):
    image = save(tmp_path / "image.nii.gz", body(), np.eye(4))
    for values, dtype in (([0, 1, 2, 4], np.uint8), ([0, 4], np.float32)):
        label = save(tmp_path / "label.nii.gz", np.resize(np.array(values), body().shape).astype(dtype), np.eye(4))
        assert prepare_case(Case("a", image, label), CT, (0, 1, 2, 4)).label is not None
        with pytest.raises(ValueError, match=r"expected label values 0, 1, 2, 3, found .*4: correct file"):
            prepare_case(Case("a", image, label), CT, range(4))


def test_labels_stored_as_real_numbers_are_welcome(tmp_path):
    image = save(tmp_path / "image.nii.gz", body(), np.eye(4))
    case = prepare("a", image, save(tmp_path / "l.nii.gz", labels().astype(np.float32), np.eye(4)), CT, classes=3)
    same = prepare("a", image, save(tmp_path / "m.nii.gz", labels(), np.eye(4)), CT)
    assert case.label is not None
    assert same.label is not None
    assert torch.equal(case.label, same.label)


def test_a_label_on_another_grid_is_refused(tmp_path):
    image = save(tmp_path / "image.nii.gz", body(), np.eye(4))
    label = save(tmp_path / "label.nii.gz", labels(), LPS)
    with pytest.raises(ValueError, match=r"label\.nii\.gz is not on the grid of its image .*image\.nii\.gz"):
        prepare("a", image, label, CT, classes=3)


def test_an_image_without_foreground_is_named(tmp_path):
    air = save(tmp_path / "air.nii.gz", np.full((6, 6, 6), -1000, np.int16), np.eye(4))
    with pytest.raises(ValueError, match=r"air\.nii\.gz: every voxel is at or below -57, the lower bound"):
        prepare("a", air, None, CT)
    black = save(tmp_path / "black.nii.gz", np.zeros((6, 6, 6, 2), np.int16), np.eye(4))
    with pytest.raises(ValueError, match=r"black\.nii\.gz: every voxel is 0: no foreground"):
        prepare("a", black, None, MR)
    speck = np.full((9, 9, 9), -1000, np.int16)
    speck[1, 1, 1] = 100
    with pytest.raises(ValueError, match=r"speck\.nii\.gz: no foreground is left at spacing \(4, 4, 4\) mm"):
        prepare("a", save(tmp_path / "speck.nii.gz", speck, np.eye(4)), None, Preparation((4, 4, 4), "window", (0, 1)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"spacing": (1.0, 0.0, 1.0)}, r"spacing \(1.0, 0.0, 1.0\): must be 0.01 to 100 mm"),
        ({"spacing": (1.0, float("nan"), 1.0)}, "must be 0.01 to 100 mm"),
        ({"window": (5.0, 5.0)}, "the lower bound must be below"),
        ({"window": (float("-inf"), 5.0)}, r"window \(-inf, 5.0\): the lower bound"),
    ],
)
def test_figures_that_cannot_be_meant_are_refused(fields, said):
    given: dict[str, Any] = {"spacing": (1.0, 1.0, 1.0), "normalisation": "window", "window": (-57.0, 164.0)}
    with pytest.raises(ValueError, match=said):
        Preparation(**(given | fields))


@pytest.fixture(params=[1, 700, 10**6], ids=["planes", "slabs", "whole"])
def _slabs(request, monkeypatch):
    monkeypatch.setattr(module, "SLAB_VOXELS", request.param)


def image_of(dtype: torch.dtype, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    """Return [2, 9, 10, 11] that lies in memory in another order of axes, a third of it zero."""
    shape = (2, 9, 10, 11)
    stored = tuple(shape[axis] for axis in order)
    values = np.random.default_rng(0).integers(-40, 300, stored) * (np.random.default_rng(1).random(stored) > 0.3)
    return torch.from_numpy(values).to(dtype).permute(*np.argsort(order).tolist())


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 3, 1), (3, 0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.float64])
def test_each_channel_has_mean_0_and_deviation_1_where_it_is_not_zero(dtype, order):
    image = image_of(dtype, order)
    before = image.clone()
    found = standardised(image, torch.float32)
    assert found.is_contiguous()
    assert torch.equal(image, before)
    for channel, given in zip(found.numpy(), image.numpy().astype(np.float64), strict=True):
        inside = given != 0
        expected = np.where(inside, (given - given[inside].mean()) / given[inside].std(), 0)
        np.testing.assert_allclose(channel, expected, atol=2e-6)


@pytest.mark.parametrize("value", [7, 0.1, -1e-4, 3e7, 1e12])
def test_a_channel_that_does_not_vary_becomes_zero(value):
    image = torch.full((1, 5, 6, 7), value, dtype=torch.float32)
    image[0, 1] *= 1 + 2**-23  # what rounding leaves
    image[0, 0] = 0
    assert not standardised(image, torch.float32).any()
    assert not standardised(torch.zeros(1, 2, 2, 2), torch.float16).any()


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.float64])
def test_a_window_becomes_0_to_1_and_is_clipped(dtype):
    image = torch.tensor([-100, -50, 0, 50, 100, 200], dtype=dtype).view(1, 6, 1, 1)
    before = image.clone()
    found = windowed(image, (-50, 150), torch.float16)
    assert found.flatten().tolist() == [0, 0, 0.25, 0.5, 0.75, 1]
    assert torch.equal(image, before)


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["real_a", "real_b"])
def test_real_scans_equal_monais(real_data, name):
    folder = real_data / "ct_spleen_real"
    image, label = folder / "imagesTr" / f"{name}.nii.gz", folder / "labelsTr" / f"{name}.nii.gz"
    case = prepare(name, image, label, CT, classes=2)
    expected, truth = monais(image, label, CT)
    assert case.image.shape == expected.shape
    assert (case.image.float() - expected).abs().max() <= HALF_STEP
    assert case.label is not None
    assert torch.equal(case.label, truth.to(torch.uint8))


@pytest.mark.real_data
def test_a_real_brain_equals_monais(real_data):
    folder = real_data / "brain_tumour_real"
    image, label = (next((folder / part).glob("*.nii.gz")) for part in ("imagesTr", "labelsTr"))
    coarse = Preparation((2.0, 2.0, 2.0), "zscore", None, channels=2)
    case = prepare("brain", image, label, coarse, classes=4)
    expected, truth = monais(image, label, coarse)
    assert case.image.shape == expected.shape
    assert (case.image.float() - expected).abs().max() <= 16 * HALF_STEP
    assert case.label is not None
    assert torch.equal(case.label, truth.to(torch.uint8))


@pytest.mark.gpu
def test_the_gpu_prepares_what_the_cpu_prepares(tmp_path):
    volume = read_volume(save(tmp_path / "i.nii.gz", body(), PIR))
    expected, found = (prepare_volume("a", volume, CT, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert found.image.is_cuda
    assert found.grid == expected.grid
    torch.testing.assert_close(found.image.cpu(), expected.image, atol=1e-3, rtol=0)
