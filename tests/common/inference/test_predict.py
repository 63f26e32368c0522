from collections.abc import Callable, Sequence
from itertools import permutations, product
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, CropForegroundd, Invertd, Orientationd, Spacingd

from medspeed.common.data.geometry import Shape, WorkingGrid, to_working, working_grid
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.data.volumes import read_volume
from medspeed.common.inference import predict
from medspeed.common.inference.labels import LabelScheme, Region, one_region_per_label
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.postprocessing import Postprocessing
from medspeed.common.inference.predict import restore_labels, sample_windows

ORIENTATIONS = [(axes, signs) for axes in permutations(range(3)) for signs in product((1, -1), repeat=3)]
SHAPE = (19, 14, 11)
SPACING = (1.53, 1.47, 2.11)  # no voxel of one grid lies exactly on one of the other: there MONAI's rounding decides
LogitsOf = Callable[[Shape], torch.Tensor]
CLOSE = 1e-5  # where two classes are nearer than this, either is right


def restored(logits: torch.Tensor, grid: WorkingGrid) -> np.ndarray:
    """Restore exclusive classes; one channel is the difference of two."""
    return restore_labels(logits, grid, one_region_per_label(["", *map(str, range(1, max(len(logits), 2)))]))


def affine_of(
    axes: tuple[int, ...] = (0, 1, 2),
    signs: tuple[int, ...] = (1, 1, 1),
    spacing: Sequence[float] = (0.81, 0.93, 4.7),
    shear: float = 0.0,
    turn: float = 0.0,
) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = 0
    for axis in range(3):
        affine[axes[axis], axis] = signs[axis] * spacing[axis]
    world = np.eye(4)
    world[1, 2] = shear
    world[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    world[:3, 3] = (10.1, -200.7, 30.3)
    return world @ affine


def monai_way(
    affine: np.ndarray, logits_of: LogitsOf, spacing: Sequence[float] = SPACING, margin: int = 3
) -> tuple[WorkingGrid, torch.Tensor, torch.Tensor]:
    """Return grid, logits, and MONAI's logits on the file's grid; the crop leaves out `margin` voxels of the file."""
    image = torch.zeros((1, *SHAPE), dtype=torch.float64)
    x, y, z = (slice(margin, n - margin) for n in SHAPE)
    image[:, x, y, z] = 1
    chain = Compose(
        [
            Orientationd("image", axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
            Spacingd("image", pixdim=spacing),
            CropForegroundd("image", source_key="image", allow_smaller=True),
        ]
    )
    case = chain({"image": MetaTensor(image, affine=torch.from_numpy(affine))})
    cropped = case["image"].applied_operations[-1]["extra_info"]["cropped"]
    grid = working_grid(SHAPE, affine, spacing).cropped(cropped[::2], case["image"].shape[1:])
    logits = logits_of(grid.crop_shape)
    inverse = Invertd("logits", chain, orig_keys="image", nearest_interp=False)
    native = inverse({"logits": MetaTensor(logits), "image": case["image"]})["logits"].as_tensor()
    return grid, logits, native


def assert_equal_to_monai(found: np.ndarray, native: torch.Tensor) -> None:
    ordered = native.sort(dim=0, descending=True).values
    sure = (ordered[0] - ordered[1] > CLOSE).numpy()
    assert found.shape == tuple(native.shape[1:])
    assert found.dtype == np.uint8
    assert sure.mean() > 0.3
    assert np.array_equal(found[sure], native.argmax(0).numpy()[sure])


def noise(classes: int) -> LogitsOf:
    return lambda shape: torch.from_numpy(np.random.default_rng(0).normal(0, 1, (classes, *shape)).astype(np.float32))


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_every_orientation_equals_monai(axes, signs):
    grid, logits, native = monai_way(affine_of(axes, signs), noise(2))
    assert_equal_to_monai(restored(logits, grid), native)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(
    ("native", "working"),
    [((0.81, 0.93, 4.7), SPACING), ((3.1, 2.9, 1.1), (1.3, 1.7, 5.3)), ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))],
    ids=["up and down", "down and up", "unchanged"],
)
def test_every_number_of_classes_equals_monai(classes, native, working):
    affine = affine_of(signs=(-1, 1, -1), spacing=native)
    grid, logits, found = monai_way(affine, noise(classes), spacing=working, margin=2)
    assert_equal_to_monai(restored(logits, grid), found)


@pytest.mark.parametrize(("shear", "turn"), [(0.0, 0.4), (0.3, 0.0), (0.25, -0.7)])
@pytest.mark.parametrize("margin", [0, 3])
def test_oblique_grids_equal_monai(shear, turn, margin):
    affine = affine_of(signs=(-1, 1, 1), shear=shear, turn=turn)
    grid, logits, native = monai_way(affine, noise(3), margin=margin)
    assert grid.separable == (shear == 0)
    assert_equal_to_monai(restored(logits, grid), native)


@pytest.mark.parametrize(("shear", "turn"), [(0.0, 0.0), (0.3, 0.0), (-0.6, 0.5)])
@pytest.mark.parametrize("spacing", [(0.81, 0.93, 4.7), (5.3, 7.1, 8.9)], ids=["fine", "coarse"])
def test_small_blobs_anywhere_equal_monai(spacing, shear, turn):
    """Corners, edges, beyond the edge (of coarse voxels) and the middle: the box around both must miss nothing."""
    rng = np.random.default_rng(0)

    def blob(shape: Shape) -> torch.Tensor:
        logits = torch.zeros((3, *shape))
        logits[0] = 1
        for number in (1, 2):
            x, y, z = (slice(max(c - 1, 0), c + 2) for c in (int(rng.choice([0, n // 2, n - 1])) for n in shape))
            logits[number, x, y, z] = 2.0 + number
        return logits

    for _ in range(25):
        margin = int(rng.choice([0, 3]))
        grid, logits, native = monai_way(affine_of((1, 0, 2), (1, -1, 1), spacing, shear, turn), blob, margin=margin)
        assert_equal_to_monai(restored(logits, grid), native)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_channel_is_the_difference_of_two(dtype):
    grid = working_grid(SHAPE, affine_of(), SPACING).cropped((1, 2, 0), (4, 5, 9))
    difference = noise(1)(grid.crop_shape).to(dtype)
    two = torch.cat([torch.zeros_like(difference), difference])
    found = restored(difference, grid)
    assert 0 < found.mean() < 1
    assert np.array_equal(found, restored(two, grid))
    assert found.flags.f_contiguous


def test_nothing_positive_gives_an_empty_mask():
    grid = working_grid(SHAPE, affine_of(), SPACING)
    assert not restored(torch.full((1, *grid.crop_shape), -1.0), grid).any()
    assert not restored(torch.zeros((3, *grid.crop_shape)), grid).any()  # all equal: background, as argmax says
    between = torch.full((1, 41, 1, 1), -1.0)
    between[0, 3] = 1  # at 1.5 mm, and the file has voxels at 0 and 5 mm only
    fine = working_grid((5, 1, 1), np.diag([5.0, 1, 1, 1]), (0.5, 1, 1))
    assert not restored(between, fine).any()


def test_of_equal_classes_the_first_is_taken():
    grid = working_grid((2, 1, 1), np.eye(4), (1.0, 1.0, 1.0))
    logits = torch.tensor([[0.0, 1], [2, 1], [2, 1]]).view(3, 2, 1, 1)
    assert restored(logits, grid).ravel().tolist() == [1, 0]


def test_known_voxels():
    """By hand: logits +1 and -3 at 0 and 4 mm cross zero at 1 mm; voxels of the file at 0, 1, 2, 3, 4 mm."""
    grid = working_grid((5, 1, 1), np.eye(4), (4.0, 1.0, 1.0))
    assert restored(torch.tensor([1.0, -3.0]).view(1, 2, 1, 1), grid).ravel().tolist() == [1, 0, 0, 0, 0]
    assert restored(torch.tensor([1.0, -1.5]).view(1, 2, 1, 1), grid).ravel().tolist() == [1, 1, 0, 0, 0]
    # Outside the crop logits are 0: foreground fades out, and is foreground as long as anything is left of it.
    half = grid.cropped((0, 0, 0), (1, 1, 1))
    assert restored(torch.ones(1, 1, 1, 1), half).ravel().tolist() == [1, 1, 1, 1, 0]


def test_logits_of_another_shape_are_a_programming_error():
    grid = working_grid(SHAPE, affine_of(), SPACING)
    with pytest.raises(AssertionError):
        restored(torch.zeros((2, 3, 3, 3)), grid)


def test_logits_that_memory_does_not_hold_are_refused_with_what_helps(monkeypatch):
    """Before they are asked for: the system would kill the program."""
    monkeypatch.setattr(predict, "ALWAYS_TRIED", 0)
    monkeypatch.setattr(predict, "free_memory", lambda *_: 4 * 5 * 8**3 - 1)
    given = torch.zeros(1, 8, 8, 8), lambda windows: torch.zeros(len(windows), 5, 8, 8, 8), (8, 8, 8), [(0, 0, 0)], 1
    with pytest.raises(ValueError, match=r"the logits of 5 labels need 0\.0 GiB, 0\.0 are free: crop the scan"):
        predict._sum_windows(*given, difference=False)
    monkeypatch.setattr(predict, "free_memory", lambda *_: 4 * 5 * 8**3)
    assert predict._sum_windows(*given, difference=False).shape == (5, 8, 8, 8)


def there_and_back(label: torch.Tensor, grid: WorkingGrid) -> np.ndarray:
    """Carry [z, y, x] labels to the working grid, and back as logits of +1 and -1."""
    carried = to_working(label[None], grid, nearest=True).float()
    return restored(carried * 2 - 1, grid)


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return float(2 * np.count_nonzero(a & b) / (np.count_nonzero(a) + np.count_nonzero(b)))


def ellipsoid(shape: tuple[int, ...] = (40, 36, 24)) -> np.ndarray:
    centred = [(np.arange(n) - n * 0.45) / (n * 0.3) for n in shape]
    x, y, z = np.ix_(*centred)
    return np.asfortranarray(x**2 + y**2 + z**2 < 1).astype(np.uint8)


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS[::5])
@pytest.mark.parametrize(("factor", "least"), [(1.0, 1.0), (0.5, 0.99), (2.0, 0.9)])
def test_a_label_comes_back(axes, signs, factor, least):
    label = ellipsoid()
    spacing = (0.8, 1.1, 2.5)
    affine = affine_of(axes, signs, spacing)
    working = [factor * spacing[axes.index(axis)] for axis in range(3)]
    grid = working_grid(label.shape, affine, working)
    assert dice(there_and_back(torch.from_numpy(label.T), grid), label) >= least


@pytest.mark.real_data
def test_the_real_labels_come_back(real_data):
    """At twice the spacing along every axis: at least 0.92 in the median and 0.85 each; unchanged: the same voxels."""
    found = []
    for path in sorted((real_data / "msd_spleen_labels" / "labelsTr").glob("*.nii.gz")):
        volume = read_volume(path)
        label, spacing = torch.from_numpy(volume.voxels.T), np.linalg.norm(volume.affine[:3, :3], axis=0)
        grid = working_grid(volume.voxels.shape, volume.affine, 2 * spacing)
        found.append(dice(there_and_back(label, grid), volume.voxels))
        if len(found) % 10 == 1:
            same = working_grid(volume.voxels.shape, volume.affine, spacing)
            assert np.array_equal(there_and_back(label, same), volume.voxels)
    assert len(found) == 41
    assert np.median(found) >= 0.92
    assert min(found) >= 0.85


@pytest.mark.gpu
@pytest.mark.parametrize("shear", [0.0, 0.3])
@pytest.mark.parametrize("classes", [1, 2, 4])
def test_the_gpu_restores_what_the_cpu_restores(shear, classes):
    grid = working_grid(SHAPE, affine_of((1, 0, 2), (1, -1, 1), shear=shear), SPACING)
    grid = grid.cropped((1, 1, 1), [n - 2 for n in grid.shape])
    logits = noise(classes)(grid.crop_shape)
    assert np.mean(restored(logits.cuda(), grid) != restored(logits, grid)) < 1e-3


@pytest.mark.parametrize("value", [0.3, 0.5, 0.7])
def test_a_threshold_is_the_probability_that_a_voxel_must_exceed(value):
    grid = working_grid(SHAPE, np.eye(4), (1.0, 1.0, 1.0))
    logits = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    probability, step = logits.double().sigmoid().numpy(), Postprocessing(("b",), threshold=value)
    regions = LabelScheme(("", "a", "b"), (Region("all", (1, 2), 1), Region("b", (2,), 2)), exclusive=False)
    inner, outer = probability[1] > value, probability[0] > 0.5
    assert np.array_equal(restore_labels(logits, grid, regions, (step,)), np.where(inner, 2, outer))
    one = one_region_per_label(("background", "b"))
    assert np.array_equal(restore_labels(logits[1:], grid, one, (step,)), inner)  # the difference of two classes
    exact = logits.double().softmax(dim=0).numpy()[1] > value
    assert np.array_equal(restore_labels(logits, grid, one, (step,)), exact)
    assert torch.equal(logits, torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_no_label_never_wins(dtype):
    """Of labels 0, 1 and 3 the next best is taken where 2 has the highest logit."""
    grid, gap = working_grid(SHAPE, np.eye(4), (1.0, 1.0, 1.0)), one_region_per_label(("", "a", "", "b"))
    logits = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2] += 3e4
    due = np.array([0, 1, 3])[logits[[0, 1, 3]].float().argmax(dim=0)]
    assert np.array_equal(restore_labels(logits, grid, gap), due)
    assert np.array_equal(gap.labels_of(logits), due)


def test_a_sample_is_the_centre_of_each_case_with_zeros_around_a_small_one():
    image = torch.arange(1.0, 10 * 3 * 5 + 1).view(1, 10, 3, 5).half()
    grid = working_grid((10, 3, 5), np.eye(4), (1.0, 1.0, 1.0))
    case, model = PreparedCase("a", image, None, grid), cast(VolumeModel, SimpleNamespace(window_size=(4, 6, 5)))
    found = sample_windows([case, case], model)
    assert (found.shape, found.dtype) == ((2, 1, 4, 6, 5), torch.float32)
    assert torch.equal(found[1, :, :, 1:4], image[:, 3:7].float())
    assert torch.count_nonzero(found[1]) == 4 * 3 * 5
