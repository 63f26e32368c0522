"""Which patches the pathology app trains on, validates on and is judged on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medspeed.apps.pathology.config import DEFAULTS, PathologyConfig, Reader
from medspeed.apps.pathology.patches.draw import sample_patches
from medspeed.apps.pathology.patches.table import PatchTable, read_coordinates, read_patch_folder
from medspeed.apps.pathology.scan.scan import ASSUMED_MPP, MPP_TOLERANCE
from medspeed.apps.pathology.slides.camelyon import SlideEntry, read_slide_set
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.data.dataset import make_synthetic
from medspeed.common.data.folds import deal_folds
from medspeed.common.files import read_object, write_json
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.setup import DEV_RUN

_FEW = 16  # patches of each kind that a fast dev run takes
_SYNTHETIC = "slides-2"  # kind and version of those of data_scripts/make_slides.py


@dataclass(frozen=True)
class Tables:
    """The patches of a run: to train on, to choose the best weights by and, where there are some, to judge them only.

    Args:
        folder: of the data, and their name.
        synthetic: whether they are drawn, not scanned.
        mpp: um per pixel; None where the data do not say.
        per_slide: patches wanted of each slide; None where they are listed.
    """

    folder: Path
    name: str
    synthetic: bool
    mpp: float | None
    training: PatchTable
    validation: PatchTable
    testing: PatchTable | None
    per_slide: int | None = None

    def about(self) -> dict[str, Any]:
        """Return what the summary of a run says of its data, and how many patches trained and validated it."""
        data = {"folder": str(self.folder), "name": self.name, "synthetic": self.synthetic}
        return {"data": data, "cases": {"training": len(self.training), "validation": len(self.validation)}}

    def parts(self) -> dict[str, PatchTable]:
        """Return the tables that there are, by name."""
        found = {"training": self.training, "validation": self.validation, "testing": self.testing}
        return {name: table for name, table in found.items() if table is not None}


def find_tables(config: PathologyConfig, run: Run) -> Tables:
    """Return the patches of --data; without it, make synthetic slides once and say loudly that they are."""
    made = config.store / "phantoms" / _SYNTHETIC
    folder = config.data or run.ranks.once(lambda: make_synthetic(made, "make_slides"))
    tables = run.ranks.once(lambda: _of_both_kinds(_read(config, folder, run), run))
    tables = replace(tables, mpp=config.mpp or tables.mpp)
    if config.fast_dev_run:
        run.say(DEV_RUN, "warning")
        count = max(_FEW, config.batch_size or 0)
        few = {name: table.take(_of_each_kind(table.label, count)) for name, table in tables.parts().items()}
        tables = replace(tables, **few)  # type: ignore[arg-type]
    shown = ", ".join(f"{len(table)} {name}" for name, table in tables.parts().items())
    size = f"{tables.training.size} pixels" + (f" of {tables.mpp:g} um" if tables.mpp else "")
    run.say(f"data: {tables.folder} ({tables.name}; patches of {size}: {shown})")
    if tables.synthetic:
        run.say(
            "SYNTHETIC DATA: these slides are drawn; results on them say nothing about patients. For real slides:\n"
            "  medspeed data fetch-camelyon16 --to data/camelyon16 --slides sample && "
            "medspeed train pathology --data data/camelyon16",
            "warning",
        )
    return tables


def keep_digests(tables: Tables, run: Run) -> None:
    """Keep the digests of the patches of a run; a ValueError says that a resumed run began with others."""
    path = run.directory / "patches.json"
    digests = {"training": tables.training.digest(), "validation": tables.validation.digest()}
    if run.resumed and path.is_file() and read_object(path) != digests:
        raise ValueError(
            f"{path}: the patches in --data have changed since the run began, so it cannot resume; restore the files, "
            "or start a new run from its weights with --init"
        )
    write_json(path, digests)


def hold_out(labels: np.ndarray, names: Sequence[str], fraction: float, seed: int) -> np.ndarray:
    """Return which slides or patches validate, [N] bool: a share of those with tumour (label 1), and of those without.

    It depends on the seed and on the N names, not on their order. Where there are two or more of a kind, each side
    gets one at least; a single one trains.

    Raises:
        ValueError: there are fewer than two of either kind.
    """
    held = np.zeros(len(names), bool)
    keys = [hashlib.sha256(f"{seed}:{name}".encode()).digest() for name in names]
    for label in (0, 1):
        rows = sorted(np.flatnonzero(labels == label).tolist(), key=keys.__getitem__)
        held[rows[: min(max(round(fraction * len(rows)), 1), len(rows) - 1)] if rows else []] = True
    if not held.any():
        raise ValueError(f"found {len(names)} for training; holding one out needs two with tumour or two without")
    return held


def _held(labels: np.ndarray, names: Sequence[str], config: PathologyConfig, run: Run) -> np.ndarray:
    """Return which validate, as `hold_out` does, or those of a fold, kept as `split.json`."""
    if config.fold is None:
        return hold_out(labels, names, config.held_out, config.seed)
    contents = {name: (["tumour" if label else "normal"], 0) for name, label in zip(names, labels, strict=True)}
    record = deal_folds(contents, decided(config.folds), config.groups, config.seed)
    held = np.array([record["fold_of"][name] == config.fold for name in names])
    sides = {part: np.array(names)[held == (part == "validation")].tolist() for part in ("training", "validation")}
    write_json(run.directory / "split.json", {"fold": config.fold, "held_out": True, **record, **sides})
    return held


def _read(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    if config.lists is None and (folder / "labels.csv").is_file():
        return _labelled(config, folder, run)
    if config.lists is None:
        return _sampled(config, folder, run)
    training, validation = map(read_coordinates, config.lists, (folder, folder), ("training", "validation"))
    for table in (training, validation):
        _require_within(table, config.reader)
    mpp = _pixel_size(sorted({*training.files, *validation.files}), config.reader, run)
    return Tables(folder, config.lists[0].stem, False, mpp, training, validation, None)


def _require_within(table: PatchTable, reader: Reader) -> None:
    """Raise a ValueError where a patch lies beyond its slide: it would be white, whatever its label says."""
    for number, file in enumerate(table.files):
        level, corners = open_slide(file, reader).levels[0], table.corner[table.file == number]
        beyond = corners[((corners >= (level.width, level.height)) | (corners <= -table.size)).any(1)]
        if len(beyond):
            raise ValueError(
                f"{file}: a patch is listed at {tuple(beyond[0].tolist())}, but the slide has {level.width} x "
                f"{level.height} pixels: does the list belong to another slide?"
            )


def _of_both_kinds(tables: Tables, run: Run) -> Tables:
    """Refuse to train on, or to validate by, patches of one kind; leave testing by them out, and say so."""
    for name, table in tables.parts().items():
        if table.label.min() != table.label.max():
            continue
        if name == "testing":
            run.say(f"testing: skipped, all {len(table)} patches have the same label, so there is no AUC")
            return replace(tables, testing=None)
        kind = "tumour" if table.label.min() == 0 else "normal"
        raise ValueError(
            f"{tables.folder}: no {kind} patch among the {len(table)} for {name}, so there is no AUC; add some, or "
            "choose another --held-out or --seed"
        )
    return tables


def _labelled(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    parts = read_patch_folder(folder)
    training, validation = parts["training"], parts.get("validation")
    if validation is not None and config.fold is not None:
        raise ValueError(f"{folder / 'labels.csv'}: has validation images in its column split; --fold needs it without")
    if validation is None:
        # Patches of one slide may come on both sides, unless --groups tells which slide they are from.
        name = "{0.name}:[0, 0]" if config.fold is None else "{1}"
        names = [name.format(file, file.relative_to(folder).as_posix()) for file in training.files]
        held = _held(training.label, names, config, run)
        training, validation = training.take(~held), training.take(held)
    return Tables(folder, folder.name, False, None, training, validation, parts.get("testing"))


def _sampled(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    usual = DEFAULTS[run.device.type]
    per_slide = config.patches_per_slide or usual["patches_per_slide"]
    config = replace(config, patch_size=config.patch_size or usual["patch_size"], patches_per_slide=per_slide)
    slides = read_slide_set(folder)
    labels = np.array([entry.tumour for entry in slides.training])
    held = _held(labels, [entry.name for entry in slides.training], config, run)
    rows = [np.flatnonzero(held == side) for side in (False, True)]
    testing = [entry for entry in slides.testing if not entry.tumour or entry.annotation or entry.mask]
    if config.fast_dev_run:  # the first slide with and the first without tumour
        rows, testing = [part[_of_each_kind(labels[part], 1)] for part in rows], []
    training, validation = ([slides.training[row] for row in part] for part in rows)

    def drawn(entries: Sequence[SlideEntry]) -> PatchTable:
        table = sample_patches(entries, config, run.leader)
        given = zip(table.files, np.bincount(table.file, minlength=len(table.files)), strict=True)
        if lacking := [f"{path.stem} {per_slide - count}" for path, count in given if count < per_slide]:
            run.say(f"some slides have room for fewer than {per_slide} patches; missing: {', '.join(lacking)}")
        return table

    tables = drawn(training), drawn(validation), drawn(testing) if testing else None
    mpp = _pixel_size([entry.path for entry in (*training, *validation)], config.reader, run)
    return Tables(slides.folder, slides.name, slides.synthetic, mpp, *tables, per_slide=per_slide)


def _pixel_size(files: Sequence[Path], reader: Reader, run: Run) -> float | None:
    """Return um per pixel of the slides, and say what reads them and whether their pixels differ."""
    found = [(slide.mpp, slide.reader) for slide in (open_slide(file, reader) for file in files)]
    sizes, readers = zip(*found, strict=True)
    known, text = sorted(filter(None, sizes)), f"slides: read by {', '.join(sorted(set(readers)))}"
    if len(known) < len(sizes):
        text += f"; {len(sizes) - len(known)} have no pixel size; tissue detection assumes {ASSUMED_MPP} um"
    if known and known[-1] > (1 + MPP_TOLERANCE) * known[0]:
        text += (
            f"; WARNING: pixel sizes range from {known[0]:g} to {known[-1]:g} um and patches are not rescaled, so the "
            "network learns several magnifications; train on slides of a single one"
        )
    run.say(text)
    return known[len(known) // 2] if known else None


def _of_each_kind(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the first `count` of each label (0, 1), in order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in (0, 1)]))
