"""Which cases a folder holds before it is in MSD layout: pairs by file name, nnU-Net's raw layout, or MSD's own."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.data.dataset import SUFFIXES, read_dataset
from common.files import read_object

# What tools append to a case's name; a name that pairs as it is keeps all of it.
_IMAGE_ENDING = re.compile(r"[-_. ](0000|image|img|ct|mri?|volume|vol)$", re.IGNORECASE)
_LABEL_ENDING = re.compile(r"[-_. ](seg|segmentation|labels?|mask|gt|roi)$", re.IGNORECASE)
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")  # nnU-Net: dataset_format.md
_IGNORED = "ignore"  # nnU-Net's name for voxels that nobody annotated

Reason = tuple[str, str]
"""A case's name, and why it cannot be used."""


@dataclass(frozen=True)
class RawCase:
    """A case as it lies: its image, or an image per channel in channel order, and its label; a test case has none."""

    name: str
    images: tuple[Path, ...]
    label: Path | None = None


@dataclass(frozen=True)
class RawSet:
    """What a folder holds, and what its label values mean.

    Attributes:
        name: of the set.
        modality: the name of each channel; "CT" has a meaning, the others are names.
        labels: the name of each label number, background first; "" where a number means nothing.
        cases: the labelled cases, then those for test.
        unpaired: cases that lack an image, a channel or a label.
        values: numbers in the files that stand for another number.
        rounds: label values a little off whole numbers will be rounded; where nothing is written they are an error.
    """

    name: str
    modality: tuple[str, ...]
    labels: tuple[str, ...]
    cases: tuple[RawCase, ...]
    unpaired: tuple[Reason, ...] = ()
    values: Mapping[int, int] = field(default_factory=dict)
    rounds: bool = True


def pair_folders(images: Path, labels: Path, name: str, modality: Sequence[str], names: Sequence[str]) -> RawSet:
    """Pair the images of a folder with the labels of another by their names.

    Equal names pair first; what is left pairs without endings such as _0000, _img, _ct and _seg, _label, -mask.

    Args:
        images: a folder of .nii.gz or .nii files (any case); hidden files do not count.
        labels: another such folder.
        name: what the set shall be called.
        modality: the name of each channel.
        names: the name of each label number, background first.

    Raises:
        FileNotFoundError: a folder is missing or holds no such file.
        ValueError: both folders are one.
    """
    if images.resolve() == labels.resolve():
        raise ValueError(f"--labels {labels}: the same folder as --images; put the labels into one of their own")
    unpaired: list[Reason] = []
    by_image, by_label = _by_stem(images, unpaired), _by_stem(labels, unpaired)
    pairs = {stem: (by_image.pop(stem), by_label.pop(stem)) for stem in sorted(by_image.keys() & by_label.keys())}
    rest: dict[str, tuple[list[Path], list[Path]]] = defaultdict(lambda: ([], []))
    for column, (by_stem, ending) in enumerate([(by_image, _IMAGE_ENDING), (by_label, _LABEL_ENDING)]):
        for stem, path in by_stem.items():
            rest[ending.sub("", stem) or stem][column].append(path)
    for stem, (found, marked) in sorted(rest.items()):
        if len(found) == len(marked) == 1 and stem not in pairs:
            pairs[stem] = (found[0], marked[0])
            continue
        reason = f"no label of that name in {labels}" if found else f"no image of that name in {images}"
        if found and marked:
            reason = f"{len(found)} images and {len(marked)} labels of one name; give each case a name of its own"
        if stem in pairs:
            reason = f"{stem} has its pair already"
        unpaired.append((", ".join(path.name for path in (*found, *marked)), reason))
    cases = tuple(RawCase(stem, (image,), label) for stem, (image, label) in sorted(pairs.items()))
    return RawSet(name, tuple(modality), tuple(names), cases, tuple(unpaired))


def read_nnunet(folder: Path, names: Sequence[str] | None = None) -> RawSet:
    """Read a folder in nnU-Net's raw layout: dataset.json, imagesTr/CASE_0000.nii.gz, labelsTr/CASE.nii.gz, imagesTs.

    Args:
        folder: such as Dataset003_Liver.
        names: of the label numbers, instead of those in dataset.json; needed where that lists regions.

    Raises:
        FileNotFoundError: there is no dataset.json, no imagesTr, or no image.
        ValueError: dataset.json cannot be used; the message says what to change.

    Source: github.com/MIC-DKFZ/nnUNet, documentation/dataset_format.md (version 2; of version 1 "modality" is read).
    """
    path = folder / "dataset.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; --nnunet takes a folder such as nnUNet_raw/Dataset003_Liver")
    content = read_object(path)
    modality = _numbered(content.get("channel_names", content.get("modality")), "channel_names", path)
    ending = content.get("file_ending", ".nii.gz")
    if ending not in SUFFIXES:
        raise ValueError(f"{path}: file_ending {ending!r}: only {' and '.join(SUFFIXES)} are read; convert the files")
    labels = tuple(names) if names else _plain_labels(content.get("labels"), path)
    unpaired: list[Reason] = []
    by_label = _by_stem(folder / "labelsTr", unpaired)
    by_case = _by_channel(folder / "imagesTr", modality, unpaired)
    unpaired += [(name, f"no label in {folder / 'labelsTr'}") for name in sorted(by_case.keys() - by_label.keys())]
    missing = sorted(by_label.keys() - by_case.keys() - {name for name, _ in unpaired})
    unpaired += [(name, f"a label, but no image in {folder / 'imagesTr'}") for name in missing]
    cases = [RawCase(name, by_case[name], by_label[name]) for name in sorted(by_case.keys() & by_label.keys())]
    tests = folder / "imagesTs"
    if tests.is_dir() and any(_stem_of(image) for image in tests.iterdir()):
        cases += [RawCase(name, images) for name, images in sorted(_by_channel(tests, modality, unpaired).items())]
    set_name = re.sub(r"^Dataset\d+_", "", folder.resolve().name)
    return RawSet(set_name, modality, labels, tuple(cases), tuple(unpaired))


def read_msd(folder: Path) -> RawSet:
    """Read a folder in MSD layout; the test images that are not there are left out, as training does.

    Raises:
        FileNotFoundError, ValueError: as `common.data.dataset.read_dataset`.
    """
    found = read_dataset(folder)
    cases = [RawCase(case.name, (case.image,), case.label) for case in (*found.cases, *found.test_cases)]
    there = tuple(case for case in cases if case.label or case.images[0].is_file())
    return RawSet(found.name, found.modality, found.labels, there, rounds=False)


def _stem_of(path: Path) -> str | None:
    """Return a volume's name without .nii.gz or .nii, in whatever case; None for any other or a hidden file."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix) and not path.name.startswith(".") and path.is_file():
            return path.name[: -len(suffix)] or None
    return None


def _by_stem(folder: Path, unpaired: list[Reason]) -> dict[str, Path]:
    """Return the volumes of a folder by name; two files of one name are no case."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if stem := _stem_of(path):
            found[stem].append(path)
    if not found:
        others = sorted({path.suffix for path in folder.iterdir() if path.suffix})
        raise FileNotFoundError(f"{folder}: holds no .nii.gz or .nii files{f', only {others}' if others else ''}")
    for stem, paths in found.items():
        if len(paths) > 1:
            unpaired.append((stem, f"{' and '.join(path.name for path in paths)} in {folder}: keep one"))
    return {stem: paths[0] for stem, paths in found.items() if len(paths) == 1}


def _by_channel(folder: Path, modality: Sequence[str], unpaired: list[Reason]) -> dict[str, tuple[Path, ...]]:
    """Return each case's images in channel order; what is incomplete goes to `unpaired`."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for stem, path in _by_stem(folder, unpaired).items():
        if match := _CHANNEL.fullmatch(stem):
            found[match["case"]][int(match["channel"])] = path
        else:
            unpaired.append((stem, f"{path}: expected CASE_0000.nii.gz, the channel's number at the end"))
    due = set(range(len(modality)))
    for case, channels in found.items():
        if due != channels.keys():
            numbers = ", ".join(f"{number:04d}" for number in sorted(due ^ channels.keys()))
            word = "missing" if due - channels.keys() else "too many"
            unpaired.append((case, f"channel {numbers} {word} in {folder}; dataset.json lists {', '.join(modality)}"))
    return {case: tuple(ch[n] for n in sorted(ch)) for case, ch in found.items() if due == ch.keys()}


def _plain_labels(labels: object, path: Path) -> tuple[str, ...]:
    """Return the label names by number; version 1 of nnU-Net maps number to name, version 2 name to number."""
    if not isinstance(labels, dict) or not labels:
        raise ValueError(f'{path}: labels: expected {{"background": 0, "liver": 1}}, found {labels!r}')
    regions = [name for name, number in labels.items() if isinstance(number, list)]
    if regions:
        remedy = "name the plain label numbers with --names background FIRST SECOND ..."
        raise ValueError(f"{path}: labels: {', '.join(regions)} are regions (lists of numbers); {remedy}")
    by_number = labels if all(str(key).isdecimal() for key in labels) else {str(n): name for name, n in labels.items()}
    return _numbered({n: name for n, name in by_number.items() if name != _IGNORED}, "labels", path)


def _numbered(names: object, key: str, path: Path) -> tuple[str, ...]:
    expected = [str(number) for number in range(len(names))] if isinstance(names, dict) else []
    if not isinstance(names, dict) or not names or sorted(names) != sorted(expected):
        raise ValueError(f"{path}: {key}: expected names for the numbers 0, 1, ... without gaps, found {names!r}")
    return tuple(str(names[number]) for number in expected)
