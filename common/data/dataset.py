"""Which scans there are and which of them train: `dataset.json` in the layout of the Medical Segmentation Decathlon."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from common.files import read_object

SUFFIXES = (".nii.gz", ".nii")
MOST_NAMES_LISTED = 5
_MOST_LABELS = 256  # label maps are uint8


@dataclass(frozen=True)
class Case:
    """One patient's scan: its name (the file name without suffix), image file and, where there is one, label file."""

    name: str
    image: Path
    label: Path | None


@dataclass(frozen=True)
class Dataset:
    """What `dataset.json` says.

    Attributes:
        folder: where `dataset.json` lies.
        name: the dataset's own name, "Spleen" for MSD Task09.
        modality: one per image channel, in channel order ("CT", or "FLAIR", "T1w", ...).
        labels: the name of each label number, background first; "" for a number that is left out.
        cases: the labelled cases, sorted by name.
        test_cases: the cases without labels, sorted by name; their files need not be there.
        synthetic: the scans are phantoms.
    """

    folder: Path
    name: str
    modality: tuple[str, ...]
    labels: tuple[str, ...]
    cases: tuple[Case, ...]
    test_cases: tuple[Case, ...]
    synthetic: bool


@dataclass(frozen=True)
class Split:
    """Which cases train and which validate.

    Attributes:
        training: the cases whose voxels the weights see, sorted by name.
        validation: the cases on which quality is measured, sorted by name.
        held_out: no validation case is a training case.
        description: how the split was made, in a sentence.
    """

    training: tuple[Case, ...]
    validation: tuple[Case, ...]
    held_out: bool
    description: str

    def to_json(self) -> dict[str, Any]:
        """Return the split by case names; written to a file, `split_cases` takes it back."""
        return {
            "description": self.description,
            "held_out": self.held_out,
            "training": [case.name for case in self.training],
            "validation": [case.name for case in self.validation],
        }


def read_dataset(folder: Path) -> Dataset:
    """Read `dataset.json` and check that every training image and label it lists is there.

    Label numbers may leave some out, as BraTS did until 2021 (0, 1, 2, 4).

    Source: http://medicaldecathlon.com (the optional key "synthetic" is ours).

    Raises:
        FileNotFoundError: no `dataset.json`, or files that it lists are missing.
        ValueError: it is no JSON, lacks a key, numbers its labels wrongly, lists a case twice, points outside `folder`.
    """
    path = folder / "dataset.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: not found; a dataset folder holds dataset.json, imagesTr and labelsTr (the layout of the "
            "Medical Segmentation Decathlon)"
        )
    content = read_object(path)
    labels = _label_names(_required(content, "labels", dict, path), path)
    synthetic = content.get("synthetic", False)
    if not isinstance(synthetic, bool):
        raise ValueError(f"{path}: synthetic: expected true or false, found {synthetic!r}")
    cases = _cases(_required(content, "training", list, path), folder, path, labelled=True)
    if not cases:
        raise ValueError(f"{path}: training: expected at least one image with its label, found none")
    _check_files_exist(cases, path)
    return Dataset(
        folder=folder,
        name=_required(content, "name", str, path),
        modality=_names_by_number(_required(content, "modality", dict, path), "modality", path),
        labels=labels,
        cases=cases,
        test_cases=_cases(content.get("test", []), folder, path, labelled=False),
        synthetic=synthetic,
    )


def split_cases(dataset: Dataset, split: str) -> Split:
    """Divide the labelled cases into those that train and those that validate.

    Args:
        dataset: what `read_dataset` returned.
        split: a fraction for validation ("0.2", or "0.2:7" with the seed 7 in place of 0), "all" (every case trains and
            validates), or the path of a JSON file {"training": [names], "validation": [names]}.

    Raises:
        FileNotFoundError: `split` is neither a fraction nor "all", and no such file exists.
        ValueError: the fraction is not between 0 and 1, the dataset is too small, the file names a case wrongly.
    """
    if split == "all":
        return Split(dataset.cases, dataset.cases, False, f"all {len(dataset.cases)} cases train and validate")
    fraction, colon, seed = split.partition(":")
    try:
        share, seed_number = float(fraction), int(seed) if colon else 0
    except ValueError:
        return _split_from_file(dataset, Path(split))
    return _split_by_fraction(dataset, share, seed_number)


def _split_by_fraction(dataset: Dataset, fraction: float, seed: int) -> Split:
    if not 0 < fraction < 1:
        raise ValueError(
            f"split {fraction:g}: the fraction of validation cases must lie between 0 and 1, both excluded"
        )
    total = len(dataset.cases)
    if total < 2:
        raise ValueError(
            f"split {fraction:g}: expected at least 2 labelled cases, one to train and one to validate, found {total} "
            f"in {dataset.folder}; use the split 'all' to validate on the training case"
        )
    held_out = min(max(round(fraction * total), 1), total - 1)
    # Ordered by a digest of seed and name: the same on every platform and version, whatever random generators do.
    shuffled = sorted(dataset.cases, key=lambda case: hashlib.sha256(f"{seed}:{case.name}".encode()).digest())
    description = f"{held_out} of {total} cases held out for validation: fraction {fraction:g}, seed {seed}"
    return Split(_by_name(shuffled[held_out:]), _by_name(shuffled[:held_out]), True, description)


def _split_from_file(dataset: Dataset, path: Path) -> Split:
    if not path.is_file():
        raise FileNotFoundError(
            f"split {str(path)!r}: no such file; expected a fraction such as 0.2, a fraction and a seed such as 0.2:7, "
            "'all', or a JSON file with the lists training and validation"
        )
    return split_of(dataset, read_object(path), path)


def split_of(dataset: Dataset, content: Mapping[str, Any], path: Path) -> Split:
    """Return the split that `Split.to_json` gave; `path` is the file that errors name.

    Raises:
        ValueError: a case is named wrongly, twice, or on both sides.
    """
    training = _chosen_cases(dataset, _required(content, "training", list, path), path)
    validation = _chosen_cases(dataset, _required(content, "validation", list, path), path)
    both = sorted({case.name for case in training} & {case.name for case in validation})
    if both and content.get("held_out", True) is not False:
        raise ValueError(
            f"{path}: {_listed(both)} train and validate; to measure quality on training cases, say "
            "\"held_out\": false in the file or use the split 'all'"
        )
    unused = len(dataset.cases) - len(training) - len(validation) + len(both)
    description = f"{len(training)} training and {len(validation)} validation cases ({unused} unused) named in {path}"
    return Split(training, validation, not both, description)


def _chosen_cases(dataset: Dataset, names: Sequence[object], path: Path) -> tuple[Case, ...]:
    by_name = {case.name: case for case in dataset.cases}
    unknown = [str(name) for name in names if not isinstance(name, str) or name not in by_name]
    if unknown:
        raise ValueError(f"{path}: {_listed(unknown)} are no labelled cases of {dataset.folder / 'dataset.json'}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path}: expected at least one training and one validation case, and each only once")
    return _by_name(by_name[str(name)] for name in names)


def _cases(entries: object, folder: Path, path: Path, labelled: bool) -> tuple[Case, ...]:
    if not isinstance(entries, list):
        raise ValueError(f"{path}: test: expected a list of images, found {entries!r}")
    cases = []
    for entry in entries:
        if labelled and not (isinstance(entry, dict) and {"image", "label"} <= entry.keys()):
            raise ValueError(f'{path}: training: expected {{"image": ..., "label": ...}}, found {entry!r}')
        image = _inside(folder, entry.get("image") if isinstance(entry, dict) else entry, path)
        label = _inside(folder, entry["label"], path) if labelled else None
        if not image.name.startswith("._"):  # macOS leaves such a file beside each that it packs; MSD lists some
            cases.append(Case(_case_name(image, path), image, label))
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: {_listed(sorted(twice))}: listed more than once; expected one image per case name")
    return _by_name(cases)


def _inside(folder: Path, entry: object, path: Path) -> Path:
    if not isinstance(entry, str):
        raise ValueError(f"{path}: expected the path of an image, found {entry!r}")
    relative = PurePosixPath(entry)
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{path}: {entry!r} leaves the dataset's folder; expected a relative path without '..'")
    return folder / relative


def _case_name(image: Path, path: Path) -> str:
    for suffix in SUFFIXES:
        if image.name.endswith(suffix) and image.name != suffix:
            return image.name.removesuffix(suffix)
    raise ValueError(f"{path}: {image.name}: expected an image file named {' or '.join('NAME' + s for s in SUFFIXES)}")


def _check_files_exist(cases: Sequence[Case], path: Path) -> None:
    files = [file for case in cases for file in (case.image, case.label) if file is not None]
    missing = [str(file.relative_to(path.parent)) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{path}: {len(missing)} of {len(files)} listed files are missing: {_listed(missing)}")


def _required(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:  # noqa: ANN401 - `kind`, checked
    if key not in content:
        raise ValueError(f"{path}: the key {key!r} is missing; found {sorted(content)}")
    if not isinstance(content[key], kind):
        raise ValueError(f"{path}: {key}: expected a {kind.__name__}, found {content[key]!r}")
    return content[key]


def _label_names(names: dict[str, object], path: Path) -> tuple[str, ...]:
    """Return the name of each label number; the names of those that are left out are ""."""
    if "0" in names and all(number.isdecimal() and int(number) < _MOST_LABELS for number in names):
        names = {str(number): "" for number in range(max(map(int, names)))} | names
    labels = _names_by_number(names, "labels", path)
    if len(labels) < 2:
        raise ValueError(f"{path}: labels {list(labels)}: expected the background and at least one structure")
    return labels


def _names_by_number(names: dict[str, object], key: str, path: Path) -> tuple[str, ...]:
    expected = [str(number) for number in range(len(names))]
    found = [names.get(number) for number in expected]
    if not names or not all(isinstance(name, str) for name in found):
        raise ValueError(f'{path}: {key}: expected {{"0": name, "1": name, ...}} from 0, found {names}')
    return tuple(map(str, found))


def _by_name(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=lambda case: case.name))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES_LISTED
    return ", ".join(names[:MOST_NAMES_LISTED]) + (f" and {more} more" if more > 0 else "")
