"""Which patches there are: tables of them, those that labels.csv or NCRF list, and their pixels, decoded."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from medspeed.apps.pathology.config import Reader
from medspeed.apps.pathology.slides.camelyon import is_slide, slide_name
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.console import Kind, say
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import files_below, read_rows

_PARTS = {"train": "training", "val": "validation", "valid": "validation", "test": "testing"}
_PARTS |= {part: part for part in _PARTS.values()}
_LABELS = {"0": 0, "1": 1}
IMAGES = {".png", ".jpg", ".jpeg", ".bmp"}  # of TIFF files, only labels.csv says that they are no slides
AT_ONCE = 256  # patches that are decoded in one go, and that a network computes in one call
_LONGEST = 4096  # pixels of a patch's side
# MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py: regions, grid and patches.
REGION, GRID, PATCH_SIZE = 768, 3, 224


@dataclass(frozen=True, eq=False)
class PatchTable:
    """Squares of slides, or image files of one patch each."""

    files: tuple[Path, ...]
    file: np.ndarray  # [N] int32, index into `files`
    corner: np.ndarray  # [N, 2] int32, (x, y) of the upper left corner in pixels of level 0; (0, 0) of image files
    label: np.ndarray  # [N] uint8, 1 for tumour
    size: int  # side of a patch in pixels
    whole: bool = False  # each file is the image of a patch

    def __len__(self) -> int:
        return len(self.file)

    def take(self, rows: np.ndarray) -> "PatchTable":
        """Return the patches of some rows, [M] integers or [N] bool, in that order; `files` stays as it is."""
        return replace(self, file=self.file[rows], corner=self.corner[rows], label=self.label[rows])

    def digest(self, times: bool = True) -> str:
        """Return the SHA-256 of what decides pixels and labels; files count by name, size and `times` of change."""
        found = hashlib.sha256(f"{self.size} {len(self)}\n".encode())
        for path in self.files:
            status = path.stat()
            how = "image " * (self.whole and path.suffix.lower() not in IMAGES)  # in old stores read as a slide
            changed = f" {status.st_mtime_ns}" if times else ""
            found.update(os.fsencode(f"{path.name}\0{how}{status.st_size}{changed}\n"))
        for array in (self.file, self.corner, self.label):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def of_each_kind(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the first `count` patches with tumour and of as many without, or of all there are, sorted."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in (0, 1)]))


def read_patch_folder(folder: Path) -> dict[str, PatchTable]:
    """Read the patches that labels.csv lists: a header with image, label and, where they are divided, split.

    An image is named relative to the folder or to its `images`; its label is 1 for tumour, else 0; its split is train,
    val (or valid, validation) or test. All images are squares as large as the first; whoever decodes them checks it.
    The tables "training", "validation" and "testing" that have patches are returned; without a split all train.

    Raises:
        FileNotFoundError: labels.csv or an image is missing.
        ValueError: a line, which the message names, is at fault; or no image trains, or the first is none.
    """
    path = folder / "labels.csv"
    parts: dict[str, dict[Path, int]] = {part: {} for part in _PARTS.values()}
    rows = read_rows(path)
    header = [name.strip().lower() for name in next(rows, ("", []))[1]]
    if [header.count(name) for name in ("image", "label", "split")] not in ([1, 1, 1], [1, 1, 0]):
        raise ValueError(f"{path}: the header is {','.join(header)}; expected image,label or image,label,split")
    for where, cells in rows:
        row = {name: cell.strip() for name, cell in zip(header, [*cells, *[""] * len(header)], strict=False)}
        image, split = _labelled_image(row, folder, where), row.get("split", "train").lower()
        if split not in _PARTS:
            raise ValueError(f"{where}: split {row['split']!r}: expected one of {', '.join(_PARTS)}")
        if any(image in images for images in parts.values()):
            raise ValueError(f"{where}: {image.name} is listed twice; list it once")
        parts[_PARTS[split]][image] = _LABELS[row["label"]]
    if not parts["training"]:
        raise ValueError(f"{path}: no training images; expected some with split `train`, or no column `split`")
    size = len(read_image(next(iter(parts["training"]))))
    tables = {}
    for part, labels in parts.items():
        if labels:
            file, corner = np.arange(len(labels), dtype=np.int32), np.zeros((len(labels), 2), np.int32)
            tables[part] = PatchTable(tuple(labels), file, corner, np.array([*labels.values()], np.uint8), size, True)
    return tables


def _labelled_image(row: dict[str, str], folder: Path, where: str) -> Path:
    name, label = row["image"], row["label"]
    if label not in _LABELS:
        raise ValueError(f"{where}: label {label!r}: expected 0 or 1 (tumour)")
    if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{where}: image {name!r}: expected a path inside the folder")
    if Path(name).suffix.lower() not in (*IMAGES, ".tif", ".tiff"):
        raise ValueError(f"{where}: image {name!r}: save it as PNG, JPEG, BMP or TIFF")
    for image in (folder / name, folder / "images" / name):
        if image.is_file():
            return image
    raise FileNotFoundError(f"{where}: {name} is missing in {folder} and in its folder images")


def decode(
    table: PatchTable, reader: Reader = "auto", workers: int | None = None, tell: Callable[[str, Kind], None] = say
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows, of one slide or of several images, and their patches [M, 3, S, S] uint8; tell of damaged tiles."""
    order, size = np.argsort(table.file, kind="stable"), table.size
    for group in [order] if table.whole else np.split(order, np.flatnonzero(np.diff(table.file[order])) + 1):
        slide = None if table.whole else open_slide(table.files[table.file[group[0]]], reader)
        for rows in np.split(group, range(AT_ONCE, len(group), AT_ONCE)):
            if slide is None:
                files = [table.files[file] for file in table.file[rows]]
                pixels = np.stack(map_in_threads(partial(read_image, size=size), files, workers=workers))
            else:
                pixels = slide.read_many(table.corner[rows].astype(np.int64), (size, size), workers=workers)
            yield rows, pixels.transpose(0, 3, 1, 2)
        if slide is not None and slide.damaged:
            tell(f"{slide.path.name}: {len(slide.damaged)} DAMAGED TILES treated as white", "warning")


def read_image(file: Path, size: int | None = None) -> np.ndarray:
    """Return a square image, of this side if given, [S, S, 3] uint8; a ValueError says that it is none."""
    try:
        with Image.open(file) as image:
            width, height = image.size
            if width == height == (size or width) <= _LONGEST:
                return np.asarray(opaque(image))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # it may say too many pixels
        raise ValueError(f"{file}: cannot be read as an image ({error})") from error
    due = f"{size} x {size} like the network or the first patch" if size else f"squares of up to {_LONGEST}"
    raise ValueError(f"{file}: {width} x {height} pixels, expected {due}")


def opaque(image: Image.Image) -> Image.Image:
    """Return an image in RGB; what is transparent is white, as glass is, and what a slide never scanned.

    A ValueError says that it has more than 8 bits.
    """
    if image.mode.startswith(("I", "F")) or ";16" in str(getattr(image, "tile", "")).replace("BGR;16", ""):
        raise ValueError(f"pixels of mode {image.mode}, expected 8 bits: save it as an 8-bit RGB PNG")
    on_white = Image.new("RGBA", image.size, "white")
    seen = Image.alpha_composite(on_white, image.convert("RGBA")) if image.has_transparency_data else image
    return seen.convert("RGB")


def read_coordinates(path: Path, images: Path) -> PatchTable:
    """Read regions of slides by their centres, each cut into 3 x 3 patches of 224 pixels as MONAI's GridSplit does.

    It is a CSV without a header (NCRF's lists as MONAI's guide has them): slide, x and y of the centre at level 0, then
    the flags of the patches, 1 for tumour, column by column: the guide reads them transposed. A slide is named with or
    without folder and suffix, in any case; it lies in, or anywhere below, the folder `images`.

    Raises:
        FileNotFoundError: slides of the list are missing.
        ValueError: the list is empty or a line of it is damaged.
    """
    regions = dict[tuple[str, int, int], list[int]]()
    for where, row in read_rows(path):
        place, labels = _region(row, where)
        if regions.setdefault(place, labels) != labels:
            raise ValueError(f"{where}: an earlier line disagrees about {place}; keep one of them")
    if not regions:
        raise ValueError(f"{path}: lists no regions")
    names = list(dict.fromkeys(name for name, *_ in regions))
    step = (REGION - PATCH_SIZE) // (GRID - 1)
    offsets = np.array([(column * step, row * step) for row in range(GRID) for column in range(GRID)])
    centres = np.array([centre for _, *centre in regions])
    flags = np.array([*regions.values()], np.uint8).reshape(-1, GRID, GRID)
    file = np.repeat(np.array([names.index(name) for name, *_ in regions], np.int32), GRID**2)
    corner = (centres[:, None] - REGION // 2 + offsets).reshape(-1, 2).astype(np.int32)
    return PatchTable(_find(names, images, path), file, corner, flags.transpose(0, 2, 1).reshape(-1), PATCH_SIZE)


def _region(row: list[str], where: str) -> tuple[tuple[str, int, int], list[int]]:
    """Return slide, x and y of a region's centre at level 0; and the labels of its patches column by column."""
    if len(row) != 3 + GRID**2:
        raise ValueError(f"{where}: {len(row)} columns; expected {3 + GRID**2}: slide,x,y,flags")
    try:
        flags = [_LABELS[flag.strip()] for flag in row[3:]]
        name, x, y = slide_name(row[0]), int(row[1]), int(row[2])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{where}: expected whole numbers and flags of 0 or 1, found {error}") from error
    if not 0 <= min(x, y) <= max(x, y) < 2**31 - REGION:
        raise ValueError(f"{where}: ({x}, {y}) is not a valid position")
    return (name, x, y), flags


def _find(names: list[str], images: Path, path: Path) -> tuple[Path, ...]:
    there: dict[str, Path] = {}
    for file in sorted(files_below(images)) if images.is_dir() else []:
        if is_slide(file) and there.setdefault(file.stem.lower(), file) is not file and file.stem.lower() in names:
            raise ValueError(f"{images}: {there[file.stem.lower()]} and {file} share a name; keep one of them")
    if missing := [name for name in names if name not in there]:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise FileNotFoundError(f"{path}: {len(missing)} of {len(names)} slides are not in {images}: {shown}")
    return tuple(there[name] for name in names)
