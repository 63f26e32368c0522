import numpy as np
import pytest

from medspeed.common.data.dicom import find_series, group_channels, read_series
from medspeed.common.data.dicom_slices import sequence_of
from tests.common.data.dicom_files import traces, write_slices

NAMES = ("FLAIR", "T1w", "t1gd", "T2w")  # of MSD's Task01, in its order
STUDY = "1.2.826.0.1.3680043.8.498.1"


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("T1w", "t1"), ("t1gd", "t1ce"), ("T2w", "t2"), ("FLAIR", "flair"), ("t1ce", "t1ce"), ("BraTS_t1c", "t1ce"),
        ("AX T1 POST GD", "t1ce"), ("T1 MPRAGE +C", "t1ce"), ("SAG MPRAGE", "t1"), ("t1_pre_contrast", "t1"),
        ("T1 SE ohne KM", "t1"), ("T1 tse km", "t1ce"), ("t1 without contrast", "t1"), ("T1 w/o Gd", "t1"),
        ("T1 Gd norm", "t1ce"), ("T1 posterior fossa", "t1"), ("Ax T2 FLAIR", "flair"), ("t2_tse_tra", "t2"),
        ("T2* GRE", ""), ("T1 FLAIR", ""), ("T1 map", ""), ("DWI b1000", ""), ("T1 T2", ""), ("", ""),
        ("T2 mapping", ""), ("T1 post SUB", ""), ("T1 mit Kontrast", "t1ce"), ("T1 nonkontrast", "t1"),
        ("AX T1 WO CONTRAST", "t1"), ("Ax T1 C-", "t1"), ("T1 -C", "t1"), ("T1 GD-", ""), ("T1_noGd", "t1"),
        ("T1 BEFORE GD", "t1"), ("T1 GRE before contrast", "t1"), ("T1 UNENHANCED CONTRAST", "t1"),
        ("T1 sans gado", "t1"), ("T1 sin contraste", "t1"), ("T1 zonder contrast", "t1"), ("T1 uten kontrast", "t1"),
        ("AX T1 GAD", "t1ce"), ("AX T1 W GAD", "t1ce"), ("T1 FS GAD", "t1ce"), ("T1 +GAD", "t1ce"), ("t1-c", "t1ce"),
        ("T1 MPRAGE DOTAREM", "t1ce"), ("T1 MULTIHANCE", "t1ce"), ("T1 INJ", "t1ce"), ("T1 enhanced", "t1ce"),
        ("T1 C+", "t1ce"), ("T1 -C+", "t1ce"), ("T1 CE-MPRAGE", "t1ce"), ("T1 C-spine post", "t1ce"), ("T1-GD", "t1ce"),
        ("ep2d_diff T2", ""), ("DWI T2 b0", ""), ("T2 SWI", ""), ("DSC T2 perf", ""), ("T2 GRE", ""), ("T1 DCE", ""),
        ("T1 SE AVANT INJ", "t1"), ("T1 GADO SANS FS", "t1ce"), ("AX T1 POST WO FS", "t1ce"), ("T1 vor KM", "t1"),
        ("T1 Gd before RT", "t1ce"), ("AX T1 WO", "t1"), ("T1 non fat sat post", "t1ce"), ("T1 pre fs", "t1"),
        ("AX T1 POST DSC", "t1ce"), ("T1 MPRAGE POST PERFUSION", "t1ce"), ("SWIFT T1", "t1"), ("FLAIR SWITCH", "flair"),
        ("T2 diffuse glioma protocol", "t2"), ("t2_fl2d_tra_hemo", ""), ("T2W_FFE", ""), ("T2 SWAN", ""),
        ("T1W_TSE C+", "t1ce"), ("C+ T1", "t1ce"), ("T1 Clariscan", "t1ce"), ("SAG MPRAGE -CE", ""), ("3D T1 -Gd", ""),
        ("MPRAGE-CE", "t1ce"), ("T1 - Gd", "t1ce"), ("T1 antes de contraste", "t1"), ("t2f", "flair"), ("t1n", "t1"),
    ],
)  # fmt: skip
def test_what_a_description_says_of_the_sequence(text, due):
    assert sequence_of(text) == due


def series(folder, description=None, number=0, study=STUDY, frames=(STUDY,) * 5, **more):
    """Write a series [X, Y, Z] = [4, 6, 5] of values around 100 times its number."""

    def describe(at, image):
        image.Modality, image.RescaleIntercept, image.FrameOfReferenceUID = "MR", 0, frames[at]
        if description is not None:
            image.SeriesDescription = description

    stored = np.random.default_rng(number).integers(100 * number, 100 * number + 50, (5, 6, 4)).astype(np.uint16)
    write_slices(folder, stored, change=describe, study=study, **more)
    return stored.T


def test_the_series_of_a_study_become_its_channels_in_the_models_order(tmp_path):
    """Two by their description, two by their folder; another series is left out with a word."""
    t2 = series(tmp_path / "a", "T2 TSE", 1)
    flair = series(tmp_path / "b", "T2 FLAIR", 2)
    t1 = series(tmp_path / "t1", "Planted Petra", 3)
    t1ce = series(tmp_path / "t1ce", None, 4)
    series(tmp_path / "c", "DWI", 5)
    (scan,) = group_channels(find_series(tmp_path), NAMES)
    assert scan.problem == ""
    assert scan.name.startswith("study-")
    assert [len(each.files) for each in scan.channels] == [5] * 4
    channels = ", ".join(f"{each.sequence} {each.name}" for each in scan.channels)
    assert [each.sequence for each in scan.channels] == ["flair", "t1", "t1ce", "t2"]
    assert scan.notes == (f"channels: {channels}", "1 other series of the study left out")
    volume = read_series(scan)
    assert volume.voxels.shape == (4, 6, 5, 4)
    assert volume.voxels.flags.f_contiguous
    for number, due in enumerate((flair, t1, t1ce, t2)):
        assert np.array_equal(volume.voxels[..., number], due)
    np.testing.assert_allclose(volume.affine[:3, 3], (10, 20, 30))


def test_frames_of_reference_that_differ_are_told(tmp_path):
    """Places in two frames cannot be compared: of two channels, or within a series."""
    for number, name in enumerate(NAMES):
        series(tmp_path / str(number), name, number, frames=(f"{STUDY}.{number // 3}",) * 5)
    (scan,) = group_channels(find_series(tmp_path), NAMES)
    assert scan.problem == ""
    assert scan.notes[1:] == (
        "the channels have several frames of reference: are they registered, and of one patient?",
    )
    series(tmp_path / "mixed", "T1", 0, f"{STUDY}.9", frames=("1.2", "1.2", "1.2", "1.3", "1.3"))
    (mixed,) = (each for each in find_series(tmp_path) if each.study != scan.name)
    assert mixed.problem.startswith(
        "its slices have 2 frames of reference (FrameOfReferenceUID): export each separately"
    )


def test_each_study_is_a_scan(tmp_path):
    for study in range(2):
        for number, name in enumerate(NAMES):
            series(tmp_path / f"{study}{number}", name, number, f"{STUDY}.{study}")
    scans = group_channels(find_series(tmp_path), NAMES)
    assert len({scan.name for scan in scans}) == 2
    assert [scan.problem for scan in scans] == ["", ""]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("FLAIR", "T1w", "T2w"), "of its 3 series, t1ce: none; each channel must match exactly one"),
        ((*NAMES, "T1 SE"), r"of its 5 series, t1: series-[0-9a-f]{12} and series-[0-9a-f]{12}; each channel must"),
    ],
)
def test_a_channel_that_is_missing_or_twice_is_named(tmp_path, names, said):
    for number, name in enumerate(names):
        series(tmp_path / str(number), name, number)
    (scan,) = group_channels(find_series(tmp_path), NAMES)
    with pytest.raises(ValueError, match=said) as refused:
        read_series(scan)
    assert str(refused.value).startswith(f"{scan.name}: ")
    assert not [trace for trace in traces() if len(trace) > 3 and trace in str(refused.value)]


def test_series_that_are_not_on_one_grid_are_refused(tmp_path):
    for number, name in enumerate(NAMES):
        series(tmp_path / str(number), name, number, origin=(-10, -20, 30 + 5 * (name == "T2w")))
    (scan,) = group_channels(find_series(tmp_path), NAMES)
    with pytest.raises(ValueError, match="are not on one grid: register and resample them first"):
        read_series(scan)


@pytest.mark.parametrize("names", [(), ("CT", "PET"), ("T1w", "t1")])
def test_channels_of_other_kinds_are_refused(names):
    with pytest.raises(ValueError, match=r"matched to t1, t1ce, t2 and flair, each once; combine the series"):
        group_channels((), names)
