"""Find the cases in a folder that is not in MSD layout, and check whether each is fit for training.

A valid case is readable and finite, its label is on the grid of its image, and all label values have names.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from medspeed.common.data.dataset import SUFFIXES, by_number, read_dataset, stem_of
from medspeed.common.data.volumes import Volume, check_same_grid, read_volume
from medspeed.common.files import read_object, sha256_of

Result = TypeVar("Result")

# What tools append to a case's name; a name that pairs as it is keeps all of it.
_ENDINGS = [r"[-_. ](0000|image|img|ct|mri?|volume|vol)$", r"[-_. ](seg|segmentation|labels?|mask|gt|roi)$"]
# A mask stored as float with a scale comes back some 1e-7 off; one that was resampled with interpolation far more.
_MOST_OFF = 1e-3
_MOST_VALUES = 65_536  # of a label map, between the lowest and the highest
_MOST_UNNAMED = 100  # numbers: more are an image's
_AIR_BELOW = -200  # HU; air is -1000, and every CT of a body shows some


@dataclass
class RawCase:
    """A case as it lies, and what was found of it; the figures are set once its image has been read."""

    name: str
    images: tuple[Path, ...] = ()  # one, or one per channel in channel order
    label: Path | None = None  # a test case has none
    problems: list[str] = field(default_factory=list)  # why it cannot be used; empty where it can
    notes: list[str] = field(default_factory=list)  # what is worth a look
    relabelled: bool = False  # the label's values are not those of the file
    shape: tuple[int, ...] = ()  # voxels along R, A, S
    spacing: tuple[float, ...] = ()  # mm along R, A, S
    orientation: str = ""  # where the file's axes point, such as "LPS"
    least: float = 0  # the lowest value of all channels
    most: float = 0  # the highest
    volumes: tuple[float, ...] = ()  # millilitres of each label number; empty without a label
    digests: tuple[str, ...] = ()  # of the images


@dataclass(frozen=True)
class RawSet:
    """What a folder holds, and what its label values mean."""

    name: str
    modality: tuple[str, ...]  # the name of each channel; "CT" has a meaning
    labels: tuple[str, ...]  # the name of each label number, background first; "" where a number means nothing
    cases: tuple[RawCase, ...]  # those that lack an image, a channel or a label say so in their problems
    values: Mapping[int, int] = field(default_factory=dict)  # numbers in the files that stand for another number
    ignored: str = ""  # the number in the files of voxels that nobody annotated
    most_off: float = _MOST_OFF  # how far off a whole number a label value is rounded, not refused


def pair_folders(images: Path, labels: Path, name: str, modality: Sequence[str], names: Sequence[str]) -> RawSet:
    """Pair the images of a folder with the label maps of another by their names.

    Equal names pair first; what is left pairs without endings such as _0000, _img, _ct and _seg, _label, -mask.
    FileNotFoundError where a folder is missing or holds no such file, ValueError where both are one.
    """
    if images.resolve() == labels.resolve():
        raise ValueError(f"--labels {labels}: same folder as --images; put the labels into a separate folder")
    columns = _volumes(images), _volumes(labels)
    equal = {stem for stem, _ in columns[0]} & {stem for stem, _ in columns[1]}
    found: dict[str, tuple[list[Path], list[Path]]] = defaultdict(lambda: ([], []))
    for number, (column, ending) in enumerate(zip(columns, _ENDINGS, strict=True)):
        for stem, path in column:
            short = re.sub(ending, "", stem, flags=re.IGNORECASE)
            found[stem if equal & {stem, short} else short or stem][number].append(path)
    cases = []
    for stem, (scans, masks) in sorted(found.items()):
        cases.append(RawCase(stem, tuple(scans), next(iter(masks), None)))
        if (len(scans), len(masks)) != (1, 1):
            there = ", ".join(map(str, [*scans, *masks]))
            cases[-1].problems.append(f"expected an image and a label with the same name, found {there}")
    return RawSet(name, tuple(modality), tuple(names), tuple(cases))


def read_nnunet(folder: Path, names: Sequence[str] | None = None) -> RawSet:
    """Read a folder in nnU-Net's raw layout: dataset.json, imagesTr/CASE_0000.nii.gz, labelsTr/CASE.nii.gz, imagesTs.

    `names` of the label numbers stand instead of those in dataset.json; they are needed where that lists regions.

    Raises:
        FileNotFoundError: there is no dataset.json, neither imagesTr nor imagesTs alone, or no image.
        ValueError: dataset.json cannot be used; the message says what to change.

    Source: github.com/MIC-DKFZ/nnUNet, documentation/dataset_format.md (version 2; of version 1 "modality" is read).
    """
    path = folder / "dataset.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; --nnunet takes a folder such as nnUNet_raw/Dataset003_Liver")
    content = read_object(path)
    modality = _names(content.get("channel_names", content.get("modality")), "channel_names", path)
    ending = content.get("file_ending", ".nii.gz")
    if ending not in SUFFIXES:
        raise ValueError(f"{path}: file_ending {ending!r}: only {', '.join(SUFFIXES)} are read; convert the files")
    labels = tuple(names) if names else _names(content.get("labels"), "labels", path)
    tests, only_tests = folder / "imagesTs", not any((folder / each).exists() for each in ("imagesTr", "labelsTr"))
    there = any(path.name.lower().endswith(ending) for path in tests.glob("[!.]*"))
    held = _by_channel(tests, ending, modality) if there else {}
    cases = {} if held and only_tests else _by_channel(folder / "imagesTr", ending, modality)
    for name, label in _volumes(folder / "labelsTr", (ending,)) if cases else ():
        missing = RawCase(name, problems=[f"a label, but no image in {folder / 'imagesTr'}"])
        cases.setdefault(name, missing).label = label
    for case in cases.values():
        case.problems += [] if case.label else [f"no label in {folder / 'labelsTr'}"]
    set_name = re.sub(r"^Dataset\d+_", "", folder.resolve().name)
    ignored = str(content["labels"].get("ignore", "")) if isinstance(content.get("labels"), dict) else ""
    return RawSet(set_name, modality, labels, (*cases.values(), *held.values()), ignored=ignored)


def read_msd(folder: Path) -> RawSet:
    """Read a folder in MSD layout, as `read_dataset` does; the test images that are not there are left out."""
    found = read_dataset(folder)
    there = [case for case in (*found.cases, *found.test_cases) if case.label or case.image.is_file()]
    cases = tuple(RawCase(case.name, (case.image,), case.label) for case in there)
    return RawSet(found.name, found.modality, found.labels, cases, most_off=0)


def examine(case: RawCase, raw: RawSet) -> None:
    """Read a case that has all its files, and note everything that is wrong with it, not just the first."""
    image = _attempt(case, read_image, case, raw)
    label = _attempt(case, read_volume, case.label) if case.label else None
    numbers = _attempt(case, read_numbers, label, raw) if label else None
    if label and numbers is not None:
        if not numbers.any():
            case.notes.append("the label is empty")
        case.relabelled = not np.array_equal(numbers, label.voxels)
        if case.relabelled and label.voxels.dtype.kind == "f" and (label.voxels % 1).any():
            case.notes.append("label values slightly off whole numbers were rounded")
    if image and label:
        _attempt(case, check_same_grid, image, label)
    if image:
        _describe(case, image, numbers, raw)


def _attempt(case: RawCase, work: Callable[..., Result], *inputs: Any) -> Result | None:  # noqa: ANN401
    """Return what `work` does; None where it says that a file is bad, which is kept."""
    try:
        return work(*inputs)
    except (ValueError, OSError) as error:
        case.problems.append(str(error))
        return None


def _describe(case: RawCase, image: Volume, numbers: np.ndarray | None, raw: RawSet) -> None:
    """Set the figures of a case, and look at its intensities."""
    axes = nib.orientations.io_orientation(image.affine)[:, 0].argsort()
    case.shape = tuple(np.array(image.voxels.shape)[axes].tolist())
    case.spacing = tuple(voxel_sizes(image.affine)[axes].tolist())
    case.orientation = "".join(nib.aff2axcodes(image.affine))
    case.least, case.most = float(image.voxels.min()), float(image.voxels.max())
    case.digests = tuple(map(sha256_of, case.images))
    if numbers is not None:
        case.volumes = tuple((_count(numbers, 0, len(raw.labels) - 1) * image.voxel_ml).tolist())
    spans = np.ptp(image.voxels, axis=(0, 1, 2)).reshape(-1)
    same = [name for name, span in zip(raw.modality, spans, strict=True) if not span]
    if same and case.least < case.most:
        case.notes.append(f"{', '.join(same)}: every voxel has one value; is the sequence missing?")
    if case.least == case.most:
        case.problems.append(f"{case.images[0]}: every voxel is {case.least:g}: the image is empty")
    elif all(name.strip().upper() == "CT" for name in raw.modality) and case.least >= _AIR_BELOW:
        air = "a CT in HU contains air, about -1000; was it rescaled, or is it not a CT?"
        case.notes.append(f"no value below {_AIR_BELOW}: {air}")


def read_image(case: RawCase, raw: RawSet) -> Volume:
    """Read a case's image; files of one channel each, which must lie on one grid, are stacked to [X, Y, Z, C]."""
    if len(case.images) == 1:
        return read_volume(case.images[0], len(raw.modality))
    parts = [read_volume(path) for path in case.images]
    for part in parts[1:]:
        check_same_grid(parts[0], part, "first channel")
    return Volume(np.stack([part.voxels for part in parts], axis=3), parts[0].affine, case.images[0])


def read_numbers(label: Volume, raw: RawSet) -> np.ndarray:
    """Return a label map [X, Y, Z] uint8 of `raw.labels`' numbers; ValueError where a value has none, or no name."""
    whole = np.rint(label.voxels) if label.voxels.dtype.kind == "f" else label.voxels
    off = float(np.abs(label.voxels - whole).max())
    if off > raw.most_off:
        remedy = "was it resampled with interpolation? resample it with nearest neighbours, or convert it"
        raise ValueError(f"{label.path}: label values up to {off:.2g} off whole numbers, expected 0, 1, ...; {remedy}")
    low, high = int(whole.min()), int(whole.max())
    if high - low >= _MOST_VALUES:
        raise ValueError(f"{label.path}: values from {low} to {high}: expected a label map; is it an image?")
    found = [int(number) + low for number in np.flatnonzero(_count(whole, low, high))]
    meant = {number: raw.values.get(number, number) for number in found}
    named = {number: f"{number} {name}" for number, name in enumerate(raw.labels) if name}
    if unnamed := [str(number) for number, target in meant.items() if target not in named]:
        found_and_due = f"found the values {', '.join(unnamed[:5])}; known labels are {', '.join(named.values())}"
        free = [number for number in named if number not in found and number < int(unnamed[0])]
        if len(unnamed) > _MOST_UNNAMED:
            raise ValueError(f"{label.path}: {found_and_due}; it looks like an image: are images and labels swapped?")
        remedy = f"--values={unnamed[0]}={max(free, default=0)}"  # BraTS has 0, 1, 2 and 4: 4=3
        if unnamed[0] == raw.ignored:
            remedy = f"--values={unnamed[0]}=0 (dataset.json says ignore, but no voxel can be left out)"
        raise ValueError(f"{label.path}: {found_and_due}; name these too, or map them: {remedy}")
    table = np.array([meant.get(number, 0) for number in range(low, high + 1)], np.uint8)
    return table[whole.astype(np.int32) - low]


def _count(numbers: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return how many voxels have each whole number from low to high, slice by slice, as bincount takes memory."""
    slices = (numbers[..., index].astype(np.int64).ravel() - low for index in range(numbers.shape[2]))
    return np.asarray(sum(np.bincount(each, minlength=high - low + 1) for each in slices))


def _volumes(folder: Path, endings: tuple[str, ...] = SUFFIXES) -> list[tuple[str, Path]]:
    """Return name (without its ending, in whatever case) and path of the volumes of a folder, but the hidden ones."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and not path.is_dir()]
    found = [(stem_of(path.name), path) for path in files if path.name.lower().endswith(endings)]
    if not found:
        only = f", only {others}" if (others := sorted({path.suffix for path in files if path.suffix})) else ""
        raise FileNotFoundError(f"{folder}: contains no {', '.join(endings)} files{only}")
    return found


def _by_channel(folder: Path, ending: str, modality: Sequence[str]) -> dict[str, RawCase]:
    """Return the cases of a folder of nnU-Net's, an image per channel (CASE_0000, CASE_0001), by name."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for stem, path in _volumes(folder, (ending,)):
        match = re.fullmatch(r"(.+)_(\d{4})", stem)
        found[match[1] if match else stem][match[2] if match else path.name] = path
    due = [f"{number:04d}" for number in range(len(modality))]
    cases = {name: RawCase(name, tuple(images.values())) for name, images in sorted(found.items())}
    for name, images in found.items():
        if wrong := sorted(images.keys() ^ set(due)):
            expected = f"dataset.json lists {', '.join(modality)}: CASE_{due[0]}{ending} and so on"
            cases[name].problems.append(f"channel {', '.join(wrong)} missing or unexpected in {folder}; {expected}")
    return cases


def _names(content: object, key: str, path: Path) -> tuple[str, ...]:
    """Return the name of each number ("" for a gap), of {"0": "CT"} or {"CT": 0} (nnU-Net's labels since version 2)."""
    pairs = content.items() if isinstance(content, dict) else ()
    numbered = [(a, b) if str(a).isdecimal() else (b, a) for a, b in pairs]
    found = {str(number): str(name) for number, name in numbered if name != "ignore"}
    try:
        return by_number(found, key, path)
    except ValueError as error:  # such as regions, which are lists of numbers
        names = "; --names background FIRST SECOND ... names labels in its place" if key == "labels" else ""
        raise ValueError(f"{error}{names}") from error
