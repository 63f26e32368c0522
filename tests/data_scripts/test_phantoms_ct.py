"""The anatomy: Hounsfield units, what is there, and what touches the spleen."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from data_scripts.painting import Grid, Part, paint
from data_scripts.phantoms_ct import CAVITY, LOOK, SPLEEN_CENTRE, Patient, abdomen, draw_patient

GRID = Grid((96, 66, 60), (3.5, 3.5, 3.5), (-168.0, -116.0, -100.0))


def anatomy(seed: int) -> tuple[Patient, list[Part]]:
    rng = np.random.default_rng(seed)
    patient = draw_patient(rng)
    return patient, abdomen(patient, rng)


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_are_like_the_spleen_in_hounsfield_units(seed: int) -> None:
    patient, parts = anatomy(seed)
    value = {part.name: part.value for part in parts}
    assert abs(value["liver"] - value["spleen"]) <= 6
    assert 20 <= value["kidney"] - value["spleen"] <= 30
    assert 20 <= value["spleen"] - value["stomach"] <= 30
    assert 100 <= value["spleen"] <= 110
    assert value["lung"] == -850
    assert -115 <= value["fat"] <= -85
    assert 45 <= value["muscle wall"] <= 65
    assert 300 <= value["vertebral cortex"] <= 1000
    assert patient.spleen == value["spleen"]


def test_patients_differ_and_seeds_repeat() -> None:
    assert anatomy(1)[0] == anatomy(1)[0]
    assert anatomy(1)[0] != anatomy(2)[0]
    one, again, other = (next(p for p in anatomy(s)[1] if p.name == "spleen").solids[0] for s in (1, 1, 2))
    assert np.array_equal(one.axes, again.axes)
    assert not np.array_equal(one.axes, other.axes)


def test_only_the_spleen_is_labelled_and_it_is_painted_last() -> None:
    _, parts = anatomy(0)
    assert [part.name for part in parts if part.label] == ["spleen"]
    assert parts[-1].name == "spleen"


@pytest.mark.parametrize("seed", range(4))
def test_the_spleen_lies_left_and_behind_and_touches_like_tissue(seed: int) -> None:
    _, parts = anatomy(seed)
    image, label = paint(GRID, parts, replace(LOOK, noise=0.0, texture=0.0), np.random.default_rng(seed))
    spleen = label == 1
    x, y, z = (np.broadcast_to(axis, GRID.shape)[spleen] for axis in GRID.axes())
    middle = np.array([x.mean(), y.mean(), z.mean()])
    assert np.abs(middle - SPLEEN_CENTRE).max() < 25
    assert np.hypot(x / CAVITY[0], y / CAVITY[1]).max() < 1.03
    assert 120 < spleen.sum() * 3.5**3 / 1000 < 560  # millilitres
    assert ndimage.label(spleen)[1] == 1
    # of the voxels around it, some are of like HU: no threshold cuts it out
    rim = ndimage.binary_dilation(spleen, iterations=2) & ~ndimage.binary_dilation(spleen)
    assert ((image[rim] > 60) & (image[rim] < 150)).mean() > 0.1


def test_a_scan_shows_air_lung_fat_muscle_organs_and_bone() -> None:
    _, parts = anatomy(3)
    image, _ = paint(GRID, parts, replace(LOOK, noise=0.0, texture=0.0), np.random.default_rng(3))
    share = {
        "air": (image < -950).mean(),
        "lung": ((image > -880) & (image < -820)).mean(),
        "fat": ((image > -120) & (image < -80)).mean(),
        "muscle": ((image > 45) & (image < 65)).mean(),
        "organs": ((image > 70) & (image < 145)).mean(),
        "bone": ((image > 300) & (image < 1000)).mean(),
    }
    low = {"air": 0.1, "lung": 0.01, "fat": 0.1, "muscle": 0.05, "organs": 0.1, "bone": 0.005}
    assert {name for name in low if share[name] < low[name]} == set()
