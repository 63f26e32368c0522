"""Which slides there are, and where their tumour is marked, in a folder that is laid out as one of these.

- MONAI's guide: {training,testing}/{images,annotations,masks};
- the challenge's release: training/{normal,tumor}, {training,testing}/lesion_annotations, testing/images;
- the public bucket: images, annotations, masks, evaluation, all slides side by side.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from apps.pathology.camelyon16 import MARKED_IN_PART

SUFFIXES = (".tif", ".tiff", ".svs")
MASK_ENDING = "_mask"  # of a mask's name, behind its slide's
_TRAINING = ("training/images", "training/normal", "training/tumor", "images")
_TESTING = ("testing/images", "images")
_ANNOTATIONS = ("annotations", "lesion_annotations")
_REFERENCES = ("testing/reference.csv", "evaluation/reference.csv", "reference.csv")
_TUMOUR, _NORMAL, _TEST = "tumor_", "normal_", "test_"  # how names begin; the last where all slides lie side by side


@dataclass(frozen=True)
class SlideEntry:
    """One slide: its name (the file name without suffix), its file, whether it has tumour, and where that is marked."""

    name: str
    path: Path
    tumour: bool
    annotation: Path | None
    mask: Path | None
    part: bool = False  # only a part of its tumour is marked


@dataclass(frozen=True)
class SlideSet:
    """The slides of a folder.

    Attributes:
        folder: where they lie.
        name: of the set, from slides.json where there is one, else the folder's.
        synthetic: the slides are drawn.
        training: slides to train and validate on, sorted by name.
        testing: slides that judge, sorted by name; one with tumour may come without annotation and mask.
    """

    folder: Path
    name: str
    synthetic: bool
    training: tuple[SlideEntry, ...]
    testing: tuple[SlideEntry, ...]


def read_slide_set(folder: Path) -> SlideSet:
    """Find the slides of a folder in one of Camelyon16's layouts, their annotations (.xml) and masks (_mask.tif).

    A training slide has tumour if its name begins with tumor_, none if with normal_. Of the test slides reference.csv
    says it; without one, those with an annotation have it, and there are none at all where none has one.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no training slides.
        ValueError: two slides share a name, a training slide is named otherwise, one with tumour has neither
            annotation nor mask, or reference.csv lacks a slide or is damaged.
    """
    training, testing = _slides(folder, _TRAINING, False), _slides(folder, _TESTING, True)
    _refuse_twins([*training, *testing], folder)
    if not training:
        raise FileNotFoundError(
            f"{folder}: no such folder, or no training slides in it; expected training/images/*.tif, training/normal "
            "and training/tumor, or images/*.tif (the layouts of Camelyon16)"
        )
    reference = _reference(folder)
    name, synthetic = _about(folder)
    tests = tuple(_test_entry(path, folder, reference) for path in testing)
    known = reference is not None or any(entry.annotation for entry in tests)
    entries = [_training_entry(path, folder) for path in training]
    marked = tuple(replace(each, part=not synthetic and each.name.lower() in MARKED_IN_PART) for each in entries)
    return SlideSet(folder, name, synthetic, marked, tests if known else ())


def split_slides(
    entries: Sequence[SlideEntry], fraction: float, seed: int
) -> tuple[tuple[SlideEntry, ...], tuple[SlideEntry, ...]]:
    """Divide slides into those that train and those that validate: a share of those with tumour, and of those without.

    It depends on the seed and on the slides' names, not on their order or place. Where there are two or more slides of
    a kind, each side gets one at least; a single one trains.

    Args:
        entries: the slides.
        fraction: that validates, above 0 and below 1.
        seed: of the choice.

    Returns:
        The slides to train on and those to validate on, each sorted by name.

    Raises:
        ValueError: there are fewer than two slides of either kind.
    """
    assert 0 < fraction < 1, fraction
    held: set[str] = set()
    for tumour in (True, False):
        names = sorted(entry.name for entry in entries if entry.tumour == tumour)
        names.sort(key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
        held.update(names[: min(max(round(fraction * len(names)), 1), len(names) - 1)] if names else [])
    if not held:
        raise ValueError(
            f"{len(entries)} training slides: to hold one out for validation, two with tumour or two without are needed"
        )
    ordered = sorted(entries, key=lambda entry: entry.name)
    training = tuple(entry for entry in ordered if entry.name not in held)
    return training, tuple(entry for entry in ordered if entry.name in held)


def is_slide(path: Path) -> bool:
    """Return whether a file is named like a slide: no mask, and not hidden, as "._name" that macOS leaves beside it."""
    name = path.stem.lower()
    return path.suffix.lower() in SUFFIXES and not name.startswith(".") and not name.endswith(MASK_ENDING)


def _slides(folder: Path, places: Iterable[str], testing: bool) -> list[Path]:
    """Return the slides of some folders below `folder`; of "images", only those to train on or to test on."""
    found: list[Path] = []
    for place in places:
        here = folder / place
        slides = [path for path in here.iterdir() if is_slide(path)] if here.is_dir() else []
        found += [path for path in slides if place != "images" or path.stem.lower().startswith(_TEST) == testing]
    return sorted(found, key=lambda path: path.stem)


def _refuse_twins(paths: Iterable[Path], folder: Path) -> None:
    by_name: dict[str, Path] = {}
    for path in paths:
        other = by_name.setdefault(path.stem.lower(), path)
        if other is not path:
            pair = " and ".join(str(each.relative_to(folder)) for each in (other, path))
            raise ValueError(f"{folder}: {pair} are named alike; keep one of them")


def _training_entry(path: Path, folder: Path) -> SlideEntry:
    tumour = path.stem.lower().startswith(_TUMOUR)
    if not tumour and not path.stem.lower().startswith(_NORMAL):
        raise ValueError(f"{path}: a training slide is named {_TUMOUR}... if it has tumour, else {_NORMAL}...")
    annotation, mask = _truth(path, folder, "training")
    if tumour and annotation is None and mask is None:
        raise ValueError(
            f"{path}: neither an annotation ({path.stem}.xml) nor a mask ({path.stem}{MASK_ENDING}.tif) says where its "
            "tumour lies; fetch one, or move the slide away"
        )
    return SlideEntry(path.stem, path, tumour, annotation, mask)


def _test_entry(path: Path, folder: Path, reference: dict[str, bool] | None) -> SlideEntry:
    annotation, mask = _truth(path, folder, "testing")
    if reference is not None and path.stem.lower() not in reference:
        raise ValueError(f"{folder}: reference.csv does not name {path.stem}; complete it, or move the slide away")
    tumour = annotation is not None if reference is None else reference[path.stem.lower()]
    return SlideEntry(path.stem, path, tumour, annotation, mask)


def _truth(path: Path, folder: Path, half: str) -> tuple[Path | None, Path | None]:
    """Return the annotation and the mask of a slide, each None where it is missing."""
    bases = (folder / half, folder)
    annotations = [base / place / f"{path.stem}.xml" for base in bases for place in _ANNOTATIONS]
    masks = [base / "masks" / f"{path.stem}{MASK_ENDING}.tif" for base in bases]
    return next(filter(Path.is_file, annotations), None), next(filter(Path.is_file, masks), None)


def _reference(folder: Path) -> dict[str, bool] | None:
    """Return whether each slide that reference.csv names, in lower case, has tumour; None without such a file."""
    path = next((folder / place for place in _REFERENCES if (folder / place).is_file()), None)
    if path is None:
        return None
    found = {}
    with path.open(newline="", encoding="utf-8-sig") as stream:
        for line, row in enumerate(csv.reader(stream), 1):
            kind = row[1].strip().lower() if len(row) > 1 else ""
            if row and kind not in ("tumor", "normal"):
                raise ValueError(f"{path}, line {line}: expected NAME,Tumor,... or NAME,Normal,..., found {row}")
            if row:
                found[row[0].strip().lower().removesuffix(".tif")] = kind == "tumor"
    return found


def _about(folder: Path) -> tuple[str, bool]:
    """Return the set's name, and whether its slides are drawn, from slides.json where there is one."""
    path = folder / "slides.json"
    if not path.is_file():
        return folder.resolve().name, False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["name"]), bool(content["synthetic"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a name and whether the slides are synthetic ({error}); remove it"
        ) from error
