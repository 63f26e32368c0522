"""Which slides there are, and which files mark their tumour, in a folder that is laid out as one of these.

- MONAI's guide: {training,testing}/{images,annotations,masks};
- the challenge's release: training/{normal,tumor}, {training,testing}/lesion_annotations, testing/images;
- the public bucket: images, annotations, masks, evaluation, all slides side by side.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from medspeed.common.console import say
from medspeed.common.files import files_below, plural, printable, read_object, read_rows

SUFFIXES = (".bif", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff", ".vms", ".vmu")
MASK_ENDING = "_mask"  # of a mask's name, behind its slide's
_DUPLICATE = "test_049"  # of another slide. Source of this and of what follows: the README of the CAMELYON16 data
# Slides with tumour that is not marked.
_TRAINING_IN_PART = (10, 15, 18, 20, 25, 29, 33, 34, 44, 46, 51, 54, 55, 56, 67, 79, 85, 92, 95, 110)
_IN_PART = {"training": {f"tumor_{number:03d}" for number in _TRAINING_IN_PART}, "testing": {"test_114"}}
MARKED = """Camelyon16's slide of this name is partly annotated; if yours differs, write slides.json: {"name": "..."}"""
_PLACES = {"training": ("training/images", "training/normal", "training/tumor"), "testing": ("testing/images",)}


@dataclass(frozen=True)
class SlideEntry:
    """One slide: its name, its file, whether it has tumour, and the file that marks it."""

    name: str
    path: Path
    tumour: bool
    marks: Path | None  # where that is: an annotation (.xml), or a mask
    part: bool = False  # only a part of its tumour is marked: its lesions do not count in the FROC


@dataclass(frozen=True)
class SlideSet:
    """The slides of a folder by name, and its own name, from slides.json where there is one; `synthetic` are drawn."""

    name: str
    synthetic: bool
    training: tuple[SlideEntry, ...]  # they validate, too
    testing: tuple[SlideEntry, ...]  # those with tumour may come without marks


def is_slide(path: Path) -> bool:
    """Return whether a file is named like a slide: no mask, and not hidden, as "._name" that macOS leaves beside it."""
    name = path.stem.lower()
    return path.suffix.lower() in SUFFIXES and not name.startswith(".") and not name.endswith(MASK_ENDING)


def find_slides(path: Path) -> list[Path]:
    """Return the slides of a folder in order, or the one file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: outputs of two would have one folder, or a bad one; or the folder holds patches.
    """
    if path.is_file():
        if not path.stem.strip("."):
            raise ValueError(f"{path}: without its suffix the name is {path.stem!r}, no valid folder name: rename it")
        return [path]
    labels = (path.parent if path.name == "images" else path) / "labels.csv"
    if labels.is_file():
        remedy = "pass the slides they were cut from, or save the patches as PNG to score them"
        raise ValueError(f"{path}: contains patches ({labels}), not slides: {remedy}")
    files = sorted(file for file in path.glob("*") if is_slide(file))
    if not files:
        raise FileNotFoundError(f"{path}: no such file, or a folder without slides ({', '.join(SUFFIXES)})")
    below = (file for file in files_below(path) if is_slide(file) and file.is_file() and file.parent != path)
    others = [file for file in below if not (file.parent / "slide.json").exists()]  # but what scans wrote
    if others:
        say(f"{plural(len(others), 'slide')} in subfolders passed over, such as {printable(str(others[0]))}", "warning")
    names = [file.stem for file in files]
    if twice := sorted(file.name for file in files if names.count(file.stem) > 1):
        raise ValueError(f"{path}: {' and '.join(twice)} would share an output folder: rename one")
    return files


def slide_name(text: str) -> str:
    """Return a slide's name in lower case, without folder and suffix."""
    path = PurePosixPath(text.strip())
    return (path.stem if path.suffix.lower() in SUFFIXES else path.name).lower()


def read_slide_set(folder: Path) -> SlideSet:
    """Find the slides of a folder in one of Camelyon16's layouts, their annotations (.xml) and masks (_mask.tif).

    A training slide has tumour if its name begins with tumor_, none if with normal_. Of the test slides reference.csv
    says it; without one, those with an annotation have it, and there are none at all where none has one.

    Raises:
        FileNotFoundError: there are no training slides.
        ValueError: two slides share a name, one is named otherwise or not marked, or reference.csv is at fault.
    """
    training, testing = _slides(folder, "training"), _slides(folder, "testing")
    by_name: dict[str, Path] = {}
    for path in (*training, *testing):
        if (other := by_name.setdefault(path.stem.lower(), path)) is not path:
            pair = " and ".join(str(each.relative_to(folder)) for each in (other, path))
            raise ValueError(f"{folder}: {pair} have the same name; keep one of them")
    if not training:
        due = "training/images/*.tif, training/normal and training/tumor, or images/*.tif (the layouts of Camelyon16;"
        due += f" slides end in {', '.join(SUFFIXES)})"
        raise FileNotFoundError(f"{folder}: no such folder, or no training slides in it; expected {due}")
    reference = _reference(folder)
    about = read_object(folder / "slides.json", "remove it") if (folder / "slides.json").is_file() else {}
    name, synthetic = about.get("name", folder.resolve().name), about.get("synthetic", False)
    if not (isinstance(name, str) and isinstance(synthetic, bool)):
        raise ValueError(f"{folder / 'slides.json'}: name must be text, synthetic true or false; remove the file")
    own = synthetic or ("name" in about and name.lower() != "camelyon16")
    scored = (path for path in testing if own or path.stem.lower() != _DUPLICATE)
    tests = tuple(_entry(path, folder, "testing", own, reference) for path in scored)
    known = reference is not None or any(entry.tumour for entry in tests)
    entries = tuple(_entry(path, folder, "training", own, None) for path in training)
    return SlideSet(name, synthetic, entries, tests if known else ())


def _slides(folder: Path, half: str) -> list[Path]:
    """Return the slides to train on, or to test on: where all lie side by side, the latter are named test_..."""
    found = [path for place in _PLACES[half] for path in (folder / place).glob("*") if is_slide(path)]
    beside = filter(is_slide, (folder / "images").glob("*"))
    found += [path for path in beside if path.stem.lower().startswith("test_") == (half == "testing")]
    return sorted(found, key=lambda path: path.stem)


def _entry(path: Path, folder: Path, half: str, own: bool, reference: dict[str, bool] | None) -> SlideEntry:
    name, bases = path.stem.lower(), (folder / half, folder)
    outlines = (base / place / f"{path.stem}.xml" for base in bases for place in ("annotations", "lesion_annotations"))
    masks = (base / "masks" / f"{path.stem}{MASK_ENDING}.tif" for base in bases)
    annotation, mask = next(filter(Path.is_file, outlines), None), next(filter(Path.is_file, masks), None)
    if half == "testing":
        if reference is not None and name not in reference:
            raise ValueError(f"{folder}: reference.csv does not list {path.stem}; add it, or move the slide away")
        if reference is None and mask and not annotation:
            said = f"missing, and {mask.name} alone does not say whether {path.stem} has tumour"
            raise ValueError(f"{folder / 'reference.csv'}: {said}: list each test slide as NAME,Tumor or NAME,Normal")
        tumour = annotation is not None if reference is None else reference[name]
    else:
        tumour = name.startswith("tumor_")
        if not tumour and not name.startswith("normal_"):
            raise ValueError(f"{path}: a training slide must be named tumor_... if it has tumour, otherwise normal_...")
        if tumour and not (mask or annotation):
            said = f"neither an annotation ({path.stem}.xml) nor a mask ({path.stem}{MASK_ENDING}.tif) shows where"
            raise ValueError(f"{path}: {said} its tumour is; download one, or move the slide away")
    return SlideEntry(path.stem, path, tumour, annotation or mask, not own and name in _IN_PART[half])


def _reference(folder: Path) -> dict[str, bool] | None:
    """Return whether each slide that reference.csv names, in lower case, has tumour; None without such a file."""
    places = (folder / place / "reference.csv" for place in ("testing", "evaluation", "."))
    path = next(filter(Path.is_file, places), None)
    if path is None:
        return None
    found: dict[str, bool] = {}
    for where, row in read_rows(path):
        if [cell.strip().lower() for cell in row[:2]] == ["image", "type"]:  # the header of the public bucket's
            continue
        kind = row[1].strip().lower() if len(row) > 1 else ""
        if kind not in ("tumor", "normal"):
            raise ValueError(f"{where}: expected NAME,Tumor,... or NAME,Normal,..., found {str(row)[:100]}")
        if found.setdefault(slide_name(row[0]), kind == "tumor") != (kind == "tumor"):
            raise ValueError(f"{where}: an earlier line disagrees about {row[0]!r}; keep one of them")
    return found
