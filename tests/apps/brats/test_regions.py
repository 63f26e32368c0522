"""Regions from label names, against what the datasets' own texts say."""

from pathlib import Path

import pytest

from medspeed.apps.brats.regions import NUMBERINGS, choose_labelling
from medspeed.common.data.dataset import Dataset, read_dataset
from medspeed.common.inference.labels import Region

# The labels of each dataset as its dataset.json or its challenge's page lists them, and TC, WT, ET as the challenge
# defines them: ET the enhancing tumour, TC that and the core, WT all.
DATASETS = {
    "MSD Task01": (
        ["background", "edema", "non-enhancing tumor", "enhancing tumour"],
        {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)},
    ),
    "BraTS 2013": (
        ["background", "necrosis", "edema", "non-enhancing tumor", "enhancing tumor"],
        {"TC": (1, 3, 4), "WT": (1, 2, 3, 4), "ET": (4,)},
    ),
    "BraTS 2018": (
        ["background", "NCR/NET", "ED", "", "ET"],
        {"TC": (1, 4), "WT": (1, 2, 4), "ET": (4,)},
    ),
    "BraTS 2021": (
        ["background", "necrotic tumor core", "peritumoral edematous/invaded tissue", "",
         "GD-enhancing tumor"],
        {"TC": (1, 4), "WT": (1, 2, 4), "ET": (4,)},
    ),
    "BraTS 2023": (
        ["background", "NCR", "SNFH", "ET"],
        {"TC": (1, 3), "WT": (1, 2, 3), "ET": (3,)},
    ),
    "BraTS-METS 2023": (
        ["background", "NETC", "SNFH", "ET"],
        {"TC": (1, 3), "WT": (1, 2, 3), "ET": (3,)},
    ),
    "nnU-Net Dataset002": (
        ["background", "edema", "non_enhancing_tumor", "enhancing_tumor"],
        {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)},
    ),
}  # fmt: skip


def dataset(*labels: str) -> Dataset:
    return Dataset(Path("data"), "Brains", ("FLAIR", "T1w"), labels, (), (), False)


@pytest.mark.parametrize("name", DATASETS)
def test_regions_are_those_of_the_datasets_text(name):
    labels, expected = DATASETS[name]
    labelling = choose_labelling(dataset(*labels), "names")
    assert {region.name: region.members for region in labelling.regions} == expected
    assert not labelling.exclusive
    assert labelling.channels == 3


def test_each_region_paints_its_own_tissue():
    labels, _ = DATASETS["MSD Task01"]
    assert choose_labelling(dataset(*labels), "names").regions == (
        Region("TC", (2, 3), 2),
        Region("WT", (1, 2, 3), 1),
        Region("ET", (3,), 3),
    )


@pytest.mark.real_data
def test_the_real_brains_name_their_labels_as_msd_does(real_data):
    found = read_dataset(real_data / "brain_tumour_real")
    assert found.labels[1:] == ("edema", "non-enhancing tumor", "enhancing tumour")
    assert [region.members for region in choose_labelling(found, "names").regions] == [(2, 3), (1, 2, 3), (3,)]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"does not know the labels 2 'cyst'; known are edema: edema, oedema") as error:
        choose_labelling(dataset("background", "edema", "cyst", "enhancing tumour"), "names")
    assert "--regions labels" in str(error.value)
    assert "snfh" in str(error.value)


def test_a_missing_tissue_is_refused():
    with pytest.raises(ValueError, match="finds no label for core"):
        choose_labelling(dataset("background", "edema", "enhancing tumour"), "names")


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_a_challenges_numbers_hold_whatever_the_names(numbering):
    numbers = NUMBERINGS[numbering]
    labels = ["background", *(f"label{n}" if n in numbers else "" for n in range(1, max(numbers) + 1))]
    labelling = choose_labelling(dataset(*labels), numbering)
    enhancing = next(region for region in labelling.regions if region.name == "ET")
    assert enhancing.members == (max(numbers),)
    whole = next(region for region in labelling.regions if region.name == "WT")
    assert whole.members == tuple(sorted(numbers))
    assert whole.value == 2  # edema is 2 in all three


def test_a_challenges_numbers_that_the_names_contradict_are_refused():
    """Such as those of MSD, and of nnU-Net's conversion of BraTS."""
    with pytest.raises(ValueError, match=r"brats2023: label 1 is necrotic tumour core, but .*dataset\.json says edema"):
        choose_labelling(dataset("background", "edema", "necrosis", "enhancing tumour"), "brats2023")
    choose_labelling(dataset("background", "NCR", "ED", "ET"), "brats2023")
    with pytest.raises(ValueError, match=r"label 1 is necrotic tumour core, but .* says whole tumor"):
        choose_labelling(dataset("background", "whole tumor", "tumor core", "enhancing tumor"), "brats2023")
    long = ("Non-enhancing Tumor Core (NETC)", "Surrounding Non-enhancing FLAIR Hyperintensity (SNFH)")
    choose_labelling(dataset("background", *long, "Enhancing Tissue (ET)"), "names")
    with pytest.raises(ValueError, match=r"label 3 is non-enhancing tumour, but .* says Enhancing Tissue"):
        choose_labelling(dataset("background", *long, "Enhancing Tissue (ET)", "Resection Cavity (RC)"), "brats2013")


def test_another_numbering_than_the_files_is_refused():
    with pytest.raises(ValueError, match=r"brats2018: expects the labels \[1, 2, 4\], but .* lists \[1, 2, 3\]"):
        choose_labelling(dataset("background", "a", "b", "c"), "brats2018")


def test_any_labels_can_each_be_a_region():
    labelling = choose_labelling(dataset("background", "PZ", "", "TZ"), "labels")
    assert labelling.regions == (Region("PZ", (1,), 1), Region("TZ", (3,), 3))
    assert labelling.channels == 2
