"""The regions of a brain tumour, from the names that a dataset gives its labels."""

import re

from medspeed.common.data.dataset import Dataset
from medspeed.common.inference.labels import LabelScheme, Region

# What datasets call the three tissues, in lower case letters and digits; a tumour is a tumor. Sources: MSD Task01
# (dataset.json), the BraTS papers (Menze 2015; Bakas 2018; Baid 2021) and the BraTS 2023 challenge pages.
TISSUES: dict[str, tuple[str, ...]] = {
    "edema": (
        "edema", "oedema", "peritumoral edema", "peritumoral oedema", "peritumoral edematous tissue",
        "peritumoral edematous invaded tissue", "invaded tissue", "whole tumor edema", "ed", "snfh",
        "surrounding non enhancing flair hyperintensity", "surrounding nonenhancing flair hyperintensity",
    ),
    "core": (
        "non enhancing tumor", "nonenhancing tumor", "non enhancing", "non enhancing tumor core",
        "nonenhancing tumor core", "necrosis", "necrotic", "necrotic core", "necrotic tumor core",
        "necrotic and non enhancing tumor core", "necrotic and non enhancing tumor",
        "necrotic non enhancing tumor core", "ncr", "net", "netc", "ncr net", "ncrnet",
    ),
    "enhancing": (
        "enhancing tumor", "enhancing", "gd enhancing tumor", "gadolinium enhancing tumor", "enhancing tissue",
        "active tumor", "et",
    ),
}  # fmt: skip
# The challenge's own regions (Menze et al., "The multimodal brain tumor image segmentation benchmark", TMI 2015).
_REGIONS = {"TC": ("core", "enhancing"), "WT": ("edema", "core", "enhancing"), "ET": ("enhancing",)}
_NESTED = ("whole tumor", "whole tumour", "tumor core", "tumour core")  # names of regions, not of one tissue
# Label names by number of the challenges' own files, for a dataset.json that does not name them.
NUMBERINGS: dict[str, dict[int, str]] = {
    "brats2013": {1: "necrosis", 2: "edema", 3: "non-enhancing tumour", 4: "enhancing tumour"},
    "brats2018": {1: "necrotic and non-enhancing tumour core", 2: "edema", 4: "enhancing tumour"},  # until 2021
    "brats2023": {1: "necrotic tumour core", 2: "edema", 3: "enhancing tumour"},
}


def choose_labelling(dataset: Dataset, regions: str) -> LabelScheme:
    """Return the regions that a network learns, each with a sigmoid of its own, in the order TC, WT, ET.

    "names" finds the tissues by the labels' names; "labels" makes each label a region, whatever it is; "brats2013",
    "brats2018" (2018 to 2021) and "brats2023" go by the challenges' numbers, whatever the names.

    Raises:
        ValueError: a name is not known, a tissue is missing, or the numbers are not those of the challenge.
    """
    labels = dataset.labels
    if regions == "labels":
        named = ((number, name) for number, name in enumerate(labels) if number and name)
        return LabelScheme(labels, tuple(Region(name, (number,), number) for number, name in named), exclusive=False)
    if regions != "names":
        labels = _renamed(dataset, regions)
    tissues = _tissues(dataset, labels)
    found = []
    for name, parts in _REGIONS.items():  # each paints what is of its first tissue
        members = tuple(sorted(number for tissue in parts for number in tissues[tissue]))
        found.append(Region(name, members, min(tissues[parts[0]])))
    return LabelScheme(labels, tuple(found), exclusive=False)


def _renamed(dataset: Dataset, regions: str) -> tuple[str, ...]:
    """Return the label names of a challenge, checked against the numbers that the dataset lists."""
    numbering = NUMBERINGS[regions]
    listed = {number for number, name in enumerate(dataset.labels) if number and name}
    if listed != set(numbering):
        said = f"regions {regions}: expects the labels {sorted(numbering)}, but {dataset.folder / 'dataset.json'} lists"
        raise ValueError(f"{said} {sorted(listed)}; choose another numbering, or correct dataset.json")
    for number, name in numbering.items():
        if _tissue(dataset.labels[number]) not in (None, _tissue(name)) or dataset.labels[number].lower() in _NESTED:
            said = f"regions {regions}: label {number} is {name}, but {dataset.folder / 'dataset.json'} says"
            raise ValueError(f"{said} {dataset.labels[number]}; use --regions names, or correct dataset.json")
    return tuple(numbering.get(number, dataset.labels[0] if not number else "") for number in range(max(numbering) + 1))


def _tissue(label: str) -> str | None:
    """Return the tissue that a label's name stands for."""
    plain = re.sub(r"\(.*\)", "", label.lower().replace("tumour", "tumor"))
    plain = re.sub(r"[^a-z0-9]+", " ", plain).strip()
    return next((tissue for tissue, names in TISSUES.items() if plain in names), None)


def _tissues(dataset: Dataset, labels: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the label numbers of each tissue."""
    named = {number: _tissue(name) for number, name in enumerate(labels) if number and name}
    found = {tissue: tuple(number for number, each in named.items() if each == tissue) for tissue in TISSUES}
    unknown = [f"{number} {labels[number]!r}" for number, tissue in named.items() if tissue is None]
    missing = [tissue for tissue, numbers in found.items() if not numbers]
    if unknown or missing:
        problem = f"does not know the labels {', '.join(unknown)}" if unknown else f"finds no label for {missing[0]}"
        known = "; ".join(f"{tissue}: {', '.join(names)}" for tissue, names in TISSUES.items())
        said = f"{dataset.folder / 'dataset.json'}: regions names {problem}; known are {known}"
        remedy = f"train with --regions labels; for a challenge's numbers --regions {', '.join(NUMBERINGS)}"
        raise ValueError(f"{said}. For one region per label {remedy}")
    return found
