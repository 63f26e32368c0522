"""Which scans there are and which of them train: `dataset.json` in the layout of the Medical Segmentation Decathlon."""

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NotRequired, TypedDict

from medspeed.common.console import hides_bar
from medspeed.common.files import read_as, read_object

SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha")
_MOST_NAMED = 5


@dataclass(frozen=True, order=True)
class Case:
    """One patient's scan: its name (the file name without suffix), image file and, where there is one, label file."""

    name: str
    image: Path
    label: Path | None


@dataclass(frozen=True)
class Dataset:
    """What `dataset.json` says."""

    folder: Path  # where `dataset.json` lies
    name: str  # the dataset's own name, "Spleen" for MSD Task09
    modality: tuple[str, ...]  # one per image channel, in channel order ("CT", or "FLAIR", "T1w", ...)
    labels: tuple[str, ...]  # the name of each label number, background first; "" for a number that is left out
    cases: tuple[Case, ...]  # the labelled cases, sorted by name
    test_cases: tuple[Case, ...]  # the cases without labels, sorted by name; their files need not be there
    synthetic: bool  # the scans are phantoms


@dataclass(frozen=True)
class Split:
    """Which cases train and which validate."""

    training: tuple[Case, ...]  # the cases whose voxels the weights see, sorted by name
    validation: tuple[Case, ...]  # those on which quality is measured, likewise
    held_out: bool  # no validation case is a training case
    description: str  # how the split was made, in a sentence
    record: dict[str, Any] = field(default_factory=dict)  # of a fold, see `medspeed.common.data.folds.deal_folds`

    def to_json(self) -> dict[str, Any]:
        """Return the split by case names; written to a file, `split_cases` takes it back."""
        training, validation = ([case.name for case in side] for side in (self.training, self.validation))
        about = {"description": self.description, "held_out": self.held_out}
        return {**about, "training": training, "validation": validation, **self.record}


class _Entry(TypedDict):
    image: str
    label: str


class _Listed(TypedDict):
    name: str
    modality: dict[str, str]
    labels: dict[str, str]
    training: list[_Entry]
    test: NotRequired[list[str | dict[str, str]]]
    synthetic: NotRequired[bool]


class SplitNames(TypedDict):
    """What a split file holds."""

    training: list[str]
    validation: list[str]
    held_out: NotRequired[bool]
    fold_of: NotRequired[dict[str, int]]  # of a fold: all cases, and which holds each out
    bytes: NotRequired[dict[str, list[int]]]  # of the files of each case


def read_dataset(folder: Path) -> Dataset:
    """Read `dataset.json` and check that every training image and label it lists is there.

    Source: http://medicaldecathlon.com; "synthetic" is ours, and gaps between label numbers are BraTS's (0, 1, 2, 4).

    Raises:
        FileNotFoundError: no `dataset.json`, or files that it lists are missing.
        ValueError: it is no JSON, lacks a key, numbers its labels wrongly, lists a case twice, points outside `folder`.
    """
    path = folder / "dataset.json"
    if not path.is_file():
        due = "dataset.json, imagesTr and labelsTr (the layout of the Medical Segmentation Decathlon)"
        raise FileNotFoundError(f"{path}: not found; a dataset folder contains {due}")
    if "training" not in (keys := read_object(path).keys()) and {"channel_names", "file_ending"} & keys:
        raise ValueError(f"{path}: is nnU-Net's: convert it with `medspeed data to-msd --nnunet {folder} --to NEW`")
    content = read_as(path, _Listed)
    modality, labels = (by_number(content[key], key, path) for key in ("modality", "labels"))
    if not all(map(str.strip, modality)) or len(labels) < 2:
        raise ValueError(f"{path}: expected names for all channels, found {modality}, and two or more labels, {labels}")
    wrong = [name for name, count in Counter(content["labels"].values()).items() if count > 1 or not name.isprintable()]
    if wrong or not all(map(str.strip, content["labels"].values())):
        found = _listed([ascii(name) for name in wrong]) or "an empty name"
        raise ValueError(f"{path}: labels: expected a unique, printable name for each number, found {found}")
    cases = _cases(((entry["image"], entry["label"]) for entry in content["training"]), path)
    if not cases:
        raise ValueError(f"{path}: training: expected at least one image with a label, found none")
    files = [file for case in cases for file in (case.image, case.label) if file]
    missing = [str(file.relative_to(folder)) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{path}: {len(missing)} of {len(files)} listed files are missing: {_listed(missing)}")
    test = (entry if isinstance(entry, str) else entry.get("image", "") for entry in content.get("test", []))
    test_cases = _cases(((image, None) for image in test), path)
    return Dataset(folder, content["name"], modality, labels, cases, test_cases, content.get("synthetic", False))


def make_synthetic(folder: Path, script: str, *flags: str) -> Path:
    """Return the folder of a synthetic set; it is made where it is not whole yet.

    It is drawn by the program of `data_scripts` that `script` names ("make_phantoms"), with these flags and `--to`. An
    OSError is raised where that fails; it has said why on stderr.
    """
    if any((folder / name).is_file() for name in ("dataset.json", "slides.json")):  # written last
        return folder
    command = [sys.executable, "-P", "-m", f"medspeed.data_scripts.{script}", *flags, "--to", str(folder)]
    command += ["--quiet"] if hides_bar() else []
    if status := subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise OSError(f"{folder}: {' '.join(command[3:])} failed with status {status}; see its message above")
    return folder


def split_cases(dataset: Dataset, split: str) -> Split:
    """Divide the labelled cases into those that train and those that validate.

    The split is a fraction for validation ("0.2", or "0.2:7" with the seed 7 in place of 0), "all" (every case trains
    and validates), or the path of a JSON file {"training": [names], "validation": [names]}.

    Raises:
        FileNotFoundError: `split` is neither a fraction nor "all", and no such file exists.
        ValueError: the fraction is not between 0 and 1, the dataset is too small; the file names a case that there is
            not, or one twice or on both sides.
    """
    total = len(dataset.cases)
    if split == "all":
        return Split(dataset.cases, dataset.cases, False, f"all {total} cases used for both training and validation")
    first, colon, last = split.partition(":")
    try:
        fraction, seed = float(first), int(last) if colon else 0
    except ValueError:
        return read_split(dataset, Path(split))
    if not 0 < fraction < 1:
        raise ValueError(f"split {fraction:g}: the fraction of validation cases must be above 0 and below 1")
    if total < 2:
        said = f"split {fraction:g}: expected at least 2 labelled cases to train and to validate, found {total}"
        raise ValueError(f"{said} in {dataset.folder}; use the split 'all' to validate on the training case")
    count = min(max(round(fraction * total), 1), total - 1)
    # Ordered by a digest of seed and name: the same on every platform and version, whatever random generators do.
    shuffled = sorted(dataset.cases, key=lambda case: hashlib.sha256(f"{seed}:{case.name}".encode()).digest())
    description = f"{count} of {total} cases held out for validation: fraction {fraction:g}, seed {seed}"
    return Split(tuple(sorted(shuffled[count:])), tuple(sorted(shuffled[:count])), True, description)


def read_split(dataset: Dataset, path: Path) -> Split:
    """Return the split in a JSON file, such as one of `Split.to_json`; for the errors see `split_cases`."""
    if not path.is_file():
        due = "a fraction such as 0.2, a fraction and a seed such as 0.2:7, 'all', or a JSON file with the lists"
        raise FileNotFoundError(f"split {str(path)!r}: no such file; expected {due} training and validation")
    content = read_as(path, SplitNames)
    by_name = {case.name: case for case in dataset.cases}
    sides = content["training"], content["validation"]
    for names in sides:
        if unknown := [name for name in names if name not in by_name]:
            raise ValueError(f"{path}: not among the labelled cases of {dataset.folder}: {_listed(unknown)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{path}: expected at least one training and one validation case, none listed twice")
    both = sorted(set(sides[0]) & set(sides[1]))
    if both and content.get("held_out", True):
        remedy = "to evaluate on training cases, set \"held_out\": false in the file or use the split 'all'"
        raise ValueError(f"{path}: {_listed(both)} used for both training and validation; {remedy}")
    training, validation = (tuple(by_name[name] for name in sorted(names)) for names in sides)
    unused = len(by_name) - len(training) - len(validation) + len(both)
    description = f"{len(training)} training and {len(validation)} validation cases ({unused} unused) named in {path}"
    return Split(training, validation, not both and content.get("held_out", True), description)


def _cases(entries: Iterable[tuple[str, str | None]], path: Path) -> tuple[Case, ...]:
    """Return the cases of image and label files, relative to the folder of `path`."""
    cases = []
    for image_file, label_file in entries:
        for file in map(PurePosixPath, filter(None, (image_file, label_file))):
            if file.is_absolute() or ".." in file.parts:
                raise ValueError(f"{path}: {str(file)!r} points outside the dataset folder; expected a path within it")
        image, label = path.parent / image_file, None if label_file is None else path.parent / label_file
        name = stem_of(image.name)
        if name in ("", image.name):
            raise ValueError(f"{path}: {image.name}: expected an image file named NAME{' or NAME'.join(SUFFIXES)}")
        if not name.startswith("._"):  # macOS leaves such a file beside each that it packs; MSD lists some
            cases.append(Case(name, image, label))
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: {_listed(sorted(twice))}: listed more than once; expected one image per case name")
    return tuple(sorted(cases))


def stem_of(name: str) -> str:
    """Return the name of a file without the suffix of a volume, in whatever case, where it has one."""
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def by_number(names: Mapping[str, str], key: str, path: Path) -> tuple[str, ...]:
    """Return the name of each number from 0, "" for one that is left out."""
    if "0" not in names or (wrong := sorted(names.keys() - {str(number) for number in range(256)})):  # of uint8
        found = _listed([ascii(number) for number in wrong]) if "0" in names else "none for 0"
        raise ValueError(f'{path}: {key}: expected {{"0": name, "1": name, ...}} from 0 to 255, found {found}')
    return tuple(names.get(str(number), "") for number in range(max(map(int, names)) + 1))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
