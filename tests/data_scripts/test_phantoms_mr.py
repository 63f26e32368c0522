"""The phantom head: where its tissues lie, how bright they are, and which tumours it gets."""

import numpy as np
import numpy.typing as npt
import pytest

from data_scripts.painting import Part
from data_scripts.phantoms_mr import (
    CHANNELS,
    CORTEX,
    EDEMA,
    ENHANCING,
    LABELS,
    NON_ENHANCING,
    Depths,
    depths,
    draw_head,
)

FLAIR, T1, T1GD, T2 = range(4)
FOLDS = 3.0  # far from the zeros that are sulci


def at(*points: tuple[float, float, float]) -> Depths:
    """Return the depths at points, as volumes [N, 1, 1]."""
    x, y, z = (np.array([p[axis] for p in points], np.float32)[:, None, None] for axis in range(3))
    return depths(x, y, z, np.full(x.shape, FOLDS, np.float32))


def lesion_parts(parts: tuple[Part, ...]) -> list[Part]:
    return [part for part in parts if part.label]


def test_channels_and_labels_are_those_of_msd_task01() -> None:
    assert CHANNELS == ("FLAIR", "T1w", "t1gd", "T2w")
    assert LABELS == ("background", "edema", "non-enhancing tumor", "enhancing tumour")
    assert [LABELS[number] for number in (EDEMA, NON_ENHANCING, ENHANCING)] == list(LABELS[1:])


@pytest.mark.parametrize("seed", range(20))
def test_tissues_are_as_bright_as_in_each_weighting(seed: int) -> None:
    signals = draw_head(np.random.default_rng(seed)).signals
    white, grey, fluid = (signals[name] for name in ("white matter", "grey matter", "fluid"))
    assert white[T1] > grey[T1] > fluid[T1]
    assert white[T1GD] > grey[T1GD] > fluid[T1GD]
    assert fluid[T2] > grey[T2] > white[T2]
    assert grey[FLAIR] > white[FLAIR] > fluid[FLAIR]
    assert min(signals["edema"][FLAIR], signals["changed white matter"][FLAIR]) > grey[FLAIR]
    # contrast agent: vessels and choroid plexus take it up as the tumour's rim does
    for name in ("enhancing", "blood", "choroid plexus"):
        assert signals[name][T1GD] > 1.15 * white[T1GD]
        assert signals[name][T1] < white[T1]


def test_the_brain_is_as_large_as_a_brain() -> None:
    axes = [np.arange(-110, 111, 2, dtype=np.float32)] * 3
    x, y, z = np.meshgrid(*axes, indexing="ij")
    brain = depths(x, y, z, np.zeros_like(x)).brain > 0
    assert 1.2 < brain.sum() * 8 / 1e6 < 1.8  # litres
    sides = [np.ptp(np.flatnonzero(brain.any(axis=tuple({0, 1, 2} - {axis})))) * 2 for axis in range(3)]
    assert sides == [pytest.approx(134, abs=6), pytest.approx(172, abs=6), pytest.approx(154, abs=12)]


def test_depth_is_in_millimetres_from_the_lumpy_surface() -> None:
    # the widest place of the hemispheres, 67 mm from the middle, and 1.5 mm of lump per unit of the field
    deep = at((70, -4, 0), (67, -4, 0), (77, -4, 0)).brain.ravel()
    assert deep == pytest.approx([-3 + 1.5 * FOLDS, 1.5 * FOLDS, -10 + 1.5 * FOLDS], abs=1)


def test_fluid_grey_and_white_matter_lie_where_they_should() -> None:
    middle = 0.6 * FOLDS  # of the fissure between the halves
    deep = at((30, 0, 30), (-30, 0, 30), (middle, 60, 30), (middle, -6, 10), (69, -4, 10), (90, 0, 0), (55, 2, -4))
    matter, brain = deep.matter.ravel(), deep.brain.ravel()
    white, other_white, fissure, callosum, cortex, outside, sylvian = matter
    assert min(white, other_white, callosum) > CORTEX
    assert 0 < cortex < CORTEX
    assert max(fissure, sylvian) < 0 < min(brain[2], brain[6])
    assert outside < brain[5] + 1 < -10


def test_lesions_have_edema_and_a_core_and_only_some_an_open_rim_or_none() -> None:
    kinds: list[tuple[int, ...]] = []
    for seed in range(90):
        parts = lesion_parts(draw_head(np.random.default_rng(seed)).parts)
        assert parts[0].label == EDEMA
        starts = [i for i, part in enumerate(parts) if part.label == EDEMA]
        for first, stop in zip(starts, [*starts[1:], len(parts)], strict=True):
            kinds.append(tuple(part.label for part in parts[first + 1 : stop]))
    closed, none = (ENHANCING, NON_ENHANCING), (NON_ENHANCING,)
    opened = (ENHANCING, NON_ENHANCING, NON_ENHANCING, NON_ENHANCING)
    assert set(kinds) == {closed, none, opened}
    assert 0.07 < kinds.count(none) / len(kinds) < 0.25
    assert 0.12 < kinds.count(opened) / len(kinds) < 0.4
    assert 1.05 < len(kinds) / 90 < 1.3


def half_axes(part: Part) -> npt.NDArray[np.float64]:
    lengths: npt.NDArray[np.float64] = np.linalg.norm(part.solids[0].axes, axis=0)
    return lengths


@pytest.mark.parametrize("seed", range(30))
def test_the_core_lies_inside_the_edema_and_the_rim_is_thick_enough(seed: int) -> None:
    whole, core, *inner = lesion_parts(draw_head(np.random.default_rng(seed)).parts)[:3]
    assert np.array_equal(whole.solids[0].centre, core.solids[0].centre)
    margin = half_axes(whole) - half_axes(core)
    assert 4 <= margin.min() <= margin.max() <= 12
    assert 30 <= 2 * half_axes(whole).min() <= 2 * half_axes(whole).max() <= 70
    if core.label == ENHANCING:
        thick = half_axes(core) - half_axes(inner[0])
        assert 5.8 < thick.min() < 11.6
