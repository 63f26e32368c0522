"""Which patches train, validate and judge: those that are listed, or drawn from slides, half of them tumour."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medspeed.apps.pathology.config import DEFAULTS, PathologyConfig
from medspeed.apps.pathology.patches.table import PatchTable, of_each_kind, read_coordinates, read_patch_folder
from medspeed.apps.pathology.slides.camelyon import MARKED, SlideEntry, read_slide_set
from medspeed.apps.pathology.slides.masks import ASSUMED_MPP, MPP_TOLERANCE, SlideMask, tissue_mask, tumour_mask
from medspeed.apps.pathology.slides.reader import Slide, open_slide
from medspeed.common.data.dataset import make_synthetic
from medspeed.common.data.folds import deal_folds, trained_before
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import read_object, write_json
from medspeed.common.run import Run
from medspeed.common.training.config import DEV_RUN, decided

_NEEDED = ("training", "validation")
_FEW = 16  # patches of each kind that a fast dev run takes
_SYNTHETIC = "slides-2"  # kind and version of those of data_scripts/make_slides.py
TUMOUR_SHARE = 0.5  # of a tumour patch's area, at least: its label is then beyond doubt
_PIXELS_PER_PATCH = 8  # along a side of a patch, of the mask that is looked at
_MASK_PIXELS = 2**26  # that a mask has at most: a coarser one is taken of larger slides
_PLACES = 2**21  # pixels of a mask that patches are drawn from at most, evenly spread


@dataclass(frozen=True)
class Tables:
    """The patches of a run, to train, to validate and, where there are some, to test; and where they are from."""

    folder: Path
    name: str
    synthetic: bool
    mpp: float | None  # um per pixel; None where the data do not say it
    parts: dict[str, PatchTable]
    per_slide: int | None = None  # None where patches are listed

    def about(self) -> dict[str, Any]:
        """Return what the summary of a run says of its data, and how many patches trained and validated it."""
        data = {"folder": str(self.folder), "name": self.name, "synthetic": self.synthetic}
        return {"data": data, "cases": {part: len(self.parts[part]) for part in _NEEDED}}


def find_tables(config: PathologyConfig, run: Run) -> Tables:
    """Return the patches of --data; without it, make synthetic slides once and say loudly that they are."""
    made = config.store / "phantoms" / _SYNTHETIC
    folder = config.data or run.ranks.once(lambda: make_synthetic(made, "make_slides"))
    read = _listed if config.lists else _labelled if (folder / "labels.csv").is_file() else _sampled
    tables = run.ranks.once(lambda: _checked(read(config, folder, run), config, run))
    tables, parts = replace(tables, mpp=config.mpp or tables.mpp), tables.parts
    if config.fast_dev_run:
        run.say(DEV_RUN, "warning")
        count = max(_FEW, config.batch_size or 0)
        parts |= {name: table.take(of_each_kind(table.label, count)) for name, table in parts.items()}
    shown = ", ".join(f"{len(table)} {name}" for name, table in parts.items())
    size = f"{parts['training'].size} pixels" + (f" of {tables.mpp:g} um" if tables.mpp else "")
    run.say(f"data: {tables.folder} ({tables.name}; patches of {size}: {shown})")
    if tables.synthetic:
        said = "SYNTHETIC DATA: these slides are drawn; results on them say nothing about patients. For real slides:"
        remedy = "medspeed data fetch-camelyon16 --to {0} --slides sample && medspeed train pathology --data {0}"
        run.say(f"{said}\n  {remedy.format('data/camelyon16')}", "warning")
    return tables


def keep_digests(tables: Tables, run: Run) -> None:
    """Keep digests of a run's patches (older runs: with file times); a ValueError says that it began with others."""
    path, digests = run.directory / "patches.json", {part: tables.parts[part].digest(times=False) for part in _NEEDED}
    kept = read_object(path) if run.resumed and path.is_file() else digests
    if any(kept.get(part) not in (each, tables.parts[part].digest()) for part, each in digests.items()):  # older: times
        remedy = "restore the files, or start a new run from its weights with --init"
        raise ValueError(f"{path}: the patches in --data have changed since the run began: it cannot resume; {remedy}")
    write_json(path, digests)


def hold_out(
    labels: np.ndarray, names: Sequence[str], config: PathologyConfig, run: Run, drawn: Sequence[str] | None = None
) -> np.ndarray:
    """Return which slides or patches validate, [N] bool: a share of those with tumour (label 1), and of those without.

    It depends on the seed and the names, not on their order. Of two or more of a kind, each side gets one at least; a
    single one trains; a ValueError says that neither kind has two. A new run keeps both sides in split.json, with what
    trained the weights of --init as far as their own split.json says. Without a fold, `drawn` may stand for the names.
    """
    path, record = run.directory / "split.json", dict[str, Any]()
    if config.fold is not None and run.planned:  # what divides them need not be there any more
        fold_of = read_object(path).get("fold_of", {})
        return np.array([fold_of.get(name) == config.fold for name in names])
    if config.fold is not None:
        contents = {name: (["tumour" if label else "normal"], 0) for name, label in zip(names, labels, strict=True)}
        record = {"fold": config.fold, **deal_folds(contents, decided(config.folds), config.groups, config.seed)}
        if (found := len({record["fold_of"][name] for name in np.array(names)[labels == 1]})) < decided(config.folds):
            raise ValueError(f"folds {config.folds}: only {found} hold out tumour; lower --folds")
        held = np.array([record["fold_of"][name] == config.fold for name in names])
    else:
        held = np.zeros(len(names), bool)
        keys = [hashlib.sha256(os.fsencode(f"{config.seed}:{name}")).digest() for name in drawn or names]
        for label in (0, 1):
            rows = sorted(np.flatnonzero(labels == label).tolist(), key=lambda row: (keys[row], names[row]))
            held[rows[: min(max(round(config.held_out * len(rows)), 1), len(rows) - 1)]] = True
        if not held.any():
            raise ValueError(f"found {len(names)} slides or patches; holding one out needs two of one label")
    sides = {part: np.array(names)[held == (part == "validation")].tolist() for part in _NEEDED}
    init = None if config.init is None or run.planned else config.init  # which may be a link to another run by now
    trained, warning = trained_before(init, None, sides["validation"]) if init else ([], "")
    if not run.planned:
        write_json(path, {**record, "held_out": "HELD" not in warning, "trained_before": trained, **sides})
    if "HELD" in warning:  # else nothing tells, as of weights of ImageNet
        run.say(warning, "warning")
    return held


def _listed(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    lists = decided(config.lists)
    parts = {part: read_coordinates(path, folder) for part, path in zip(_NEEDED, lists, strict=True)}
    if config.held_out != 0.25:
        run.say(f"--held-out {config.held_out:g} has no effect: the second list validates", "warning")
    if not run.resumed and (shared := {*parts["training"].files} & {*parts["validation"].files}):
        raise ValueError(f"{lists[0]} and {lists[1]}: both have patches of {min(shared).name}: keep a slide in one")
    for table in parts.values():
        for number, file in enumerate(table.files):
            # Beyond the slide it would be white, whatever its label says.
            level, corners = open_slide(file, config.reader).levels[0], table.corner[table.file == number]
            beyond = corners[((corners >= (level.width, level.height)) | (corners <= -table.size)).any(1)]
            if len(beyond):
                said = f"{tuple(beyond[0].tolist())}, but the slide has {level.width} x {level.height} pixels"
                raise ValueError(f"{file}: a patch is listed at {said}: does the list belong to another slide?")
    mpp = _pixel_size(sorted({file for table in parts.values() for file in table.files}), config, run)
    about = folder / "slides.json"
    synthetic = about.is_file() and bool(read_object(about, "remove it").get("synthetic"))
    return Tables(folder, lists[0].stem, synthetic, mpp, parts)


def _checked(tables: Tables, config: PathologyConfig, run: Run) -> Tables:
    """Refuse flags that the data do not heed, and patches of one kind; leave testing by such out, and say so."""
    if config.mpp and tables.mpp and abs(config.mpp / tables.mpp - 1) > MPP_TOLERANCE and not run.resumed:
        raise ValueError(f"mpp {config.mpp}: the pixels of the slides have {tables.mpp:g} um; drop the flag")
    size = tables.parts["training"].size
    for name, found in {"patch_size": size, "patches_per_slide": tables.per_slide}.items():
        if getattr(config, name) not in (None, found) and not run.resumed:
            raise ValueError(f"{name} {getattr(config, name)}: the data are patches already, of {size} pixels; drop it")
    for name, table in [*tables.parts.items()]:
        if table.label.min() != table.label.max():
            continue
        if name in _NEEDED:
            kind = "tumour" if table.label.min() == 0 else "normal"
            said = f"no {kind} patch among the {len(table)} for {name}, so there is no AUC"
            raise ValueError(f"{tables.folder}: {said}; add some, or another --seed if they are divided by it")
        run.say(f"testing: skipped, all {len(table)} patches have the same label, so there is no AUC")
        del tables.parts[name]
    return tables


def _labelled(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    parts = read_patch_folder(folder)
    if "validation" not in parts:
        training = parts["training"]
        if config.groups is None:
            run.say("patches are divided at random: a slide may have some on both sides; use medspeed folds --groups")
        names = [file.relative_to(folder).as_posix() for file in training.files]
        drawn = [f"{file.name}:[0, 0]" for file in training.files]  # which all versions divide them by
        held = hold_out(training.label, names, config, run, drawn)
        cut = {"training": training.take(~held), "validation": training.take(held)}
        parts = cut | {part: table for part, table in parts.items() if part not in cut}
    elif config.fold is not None:
        raise ValueError(f"{folder / 'labels.csv'}: has validation images in its column split; --fold needs it without")
    elif config.held_out != 0.25:
        run.say(f"--held-out {config.held_out:g} has no effect: labels.csv says which patches validate", "warning")
    return Tables(folder, folder.absolute().name, False, None, parts)


def _sampled(config: PathologyConfig, folder: Path, run: Run) -> Tables:
    usual = DEFAULTS[run.device.type]
    per_slide = config.patches_per_slide or usual["patches_per_slide"]
    config = replace(config, patch_size=config.patch_size or usual["patch_size"], patches_per_slide=per_slide)
    slides = read_slide_set(folder)
    labels = np.array([entry.tumour for entry in slides.training])
    held = hold_out(labels, [entry.name for entry in slides.training], config, run)
    rows = [np.flatnonzero(held == side) for side in (False, True)]
    testing = [entry for entry in slides.testing if not entry.tumour or entry.marks]
    if config.fast_dev_run:  # the first slide with and the first without tumour
        rows, testing = [part[of_each_kind(labels[part], 1)] for part in rows], []
    entries = {part: [slides.training[row] for row in some] for part, some in zip(_NEEDED, rows, strict=True)}
    files = [entry.path for part in _NEEDED for entry in entries[part]]
    mpp = _pixel_size(files, config, run, [entry.path for entry in testing])
    config, parts = replace(config, mpp=config.mpp or mpp), {}  # as the plan has it, from which an export draws again
    for part, some in (entries | ({"testing": testing} if testing else {})).items():
        if names := ", ".join(entry.name for entry in some if entry.part):
            run.say(f"only tumour is drawn from {names}: {MARKED}", "warning")
        table = parts[part] = sample_patches(some, config, run.ranks.leader)
        given = zip(table.files, np.bincount(table.file, minlength=len(table.files)), strict=True)
        if lacking := [f"{path.stem} {per_slide - count}" for path, count in given if count < per_slide]:
            run.say(f"some slides have room for fewer than {per_slide} patches; missing: {', '.join(lacking)}")
    return Tables(folder, slides.name, slides.synthetic, mpp, parts, per_slide)


def _pixel_size(files: Sequence[Path], config: PathologyConfig, run: Run, testing: Sequence[Path] = ()) -> float | None:
    """Return um per pixel of the slides, and say what reads them and whether their pixels, or tests', differ."""
    found = [(slide.mpp, slide.reader) for slide in (open_slide(file, config.reader) for file in files)]
    sizes, readers = zip(*found, strict=True)
    known, text = sorted(filter(None, sizes)), f"slides: read by {', '.join(sorted(set(readers)))}"
    if len(known) < len(sizes):
        assumed = config.mpp or (known[len(known) // 2] if known else ASSUMED_MPP)
        text += f"; {len(sizes) - len(known)} have no pixel size; tissue detection assumes {assumed:g} um"
    run.say(text)
    every = sorted(filter(None, (*known, *(open_slide(file, config.reader).mpp for file in testing))))
    if every and every[-1] > (1 + MPP_TOLERANCE) * every[0]:
        text = f"pixel sizes range from {every[0]:g} to {every[-1]:g} um and patches are not rescaled, so the network "
        run.say(f"{text}is trained or tested at several magnifications; take slides of a single one", "warning")
    return known[len(known) // 2] if known else None


def sample_patches(entries: Sequence[SlideEntry], config: PathologyConfig, progress: bool = False) -> PatchTable:
    """Draw patches from annotated slides: half of those of a slide with tumour show tumour, the others normal tissue.

    A tumour patch has its centre in the tumour, and tumour covers half of it at least. A normal patch has its centre
    in tissue, and there is no tumour in it nor within a patch's side around it; shares are counted to a pixel of the
    mask, an eighth of a patch or less (more on huge slides). No patch is drawn twice, none leaves the slide; of slides
    that are marked in part only tumour is drawn. What is drawn depends on the seed and the slide's name alone; where a
    slide has less room it gives fewer patches than `config` (size and patches per slide decided) says.

    Raises:
        FileNotFoundError: a slide, its mask or its annotation is missing.
        ValueError: one is damaged, a slide with tumour has neither, or there is no room for a single patch.
    """
    ordered, size = sorted(entries, key=lambda entry: entry.name), decided(config.patch_size)
    title = "drawing patches" if progress else ""
    pairs = map_in_threads(partial(_draw, config=config), ordered, title, config.workers)
    parts = [corners for pair in pairs for corners in pair]
    place = np.repeat(np.arange(len(parts)), [len(corners) for corners in parts])
    if not len(place):
        raise ValueError(f"{len(entries)} slides: no room for a patch of {size} pixels; choose a smaller --patch-size")
    files, file, label = tuple(entry.path for entry in ordered), place // 2, 1 - place % 2
    corner = np.concatenate(parts).astype(np.int32)
    return PatchTable(files, file.astype(np.int32), corner, label.astype(np.uint8), size)


def _draw(entry: SlideEntry, config: PathologyConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a slide's tumour and of its normal patches, each [M, 2] int64."""
    slide, named = open_slide(entry.path, config.reader), hashlib.sha256(os.fsencode(entry.name)).digest()[:8]
    generator = np.random.default_rng([config.seed, int.from_bytes(named)])
    base, size, per_slide = slide.levels[0], decided(config.patch_size), decided(config.patches_per_slide)
    wanted = per_slide // 2 if entry.tumour else 0
    positive = negative = np.empty((0, 2), np.int64)
    if entry.tumour:
        finest = max(1.0, size / _PIXELS_PER_PATCH, math.sqrt(base.width * base.height / _MASK_PIXELS))
        tumour = tumour_mask(entry, base.width, base.height, finest)
        sums = np.pad(tumour.mask, ((1, 0), (1, 0))).cumsum(0, np.int32)
        sums.cumsum(1, out=sums)  # of the pixels above and left of each corner, [H + 1, W + 1]
        centres = _centres(tumour)
        fitting = centres[_shares(sums, tumour.downsample, centres, size) >= TUMOUR_SHARE]
        positive = _pick(fitting, tumour.downsample, slide, size, wanted, generator)
    if not entry.part:
        tissue = tissue_mask(slide, assumed_mpp=config.mpp or ASSUMED_MPP)
        centres = _centres(tissue)
        if entry.tumour:
            # A patch, a patch's side around it, and the mask pixel within which `_pick` moves the centre.
            centres = centres[_shares(sums, tumour.downsample, centres, 3 * size + tissue.downsample) == 0]
        negative = _pick(centres, tissue.downsample, slide, size, per_slide - wanted, generator)
    return positive, negative


def _shares(sums: np.ndarray, downsample: float, centres: np.ndarray, side: float) -> np.ndarray:
    """Return which share of each square around centres [N, 2] a mask covers; squares are widened to its pixels."""
    first = np.floor((centres - side / 2) / downsample).astype(np.int64)
    behind = np.ceil((centres + side / 2) / downsample).astype(np.int64)
    most = np.array(sums.shape)[::-1] - 1
    (left, top), (right, bottom) = np.clip(first, 0, most).T, np.clip(behind, 0, most).T
    inside = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return np.asarray(inside / (behind - first).prod(1))


def _centres(where: SlideMask) -> np.ndarray:
    """Return the centres of pixels of a mask, evenly spread, [N, 2] float64 (x, y) in pixels of level 0."""
    places = np.flatnonzero(where.mask)
    places = places[:: -(-len(places) // _PLACES) or 1]
    return (np.stack(np.divmod(places, where.mask.shape[1])[::-1], 1) + 0.5) * where.downsample


def _pick(
    centres: np.ndarray, downsample: float, slide: Slide, size: int, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the corners, [M, 2] int64, of `count` patches (or all) whose centre is in a mask pixel of `centres`."""
    side = max(1, int(downsample))
    origins = np.floor(centres - downsample / 2).astype(np.int64) - size // 2
    most = np.array([slide.levels[0].width, slide.levels[0].height]) - size
    # Of pixels at an edge all of whose places lie within are taken, so that each number below names another patch.
    origins = origins[((origins >= 0) & (origins + side - 1 <= most)).all(1)]
    places = len(origins) * side**2
    numbers = generator.choice(places, min(count, places), replace=False) if places else np.empty(0, np.int64)
    pixel, within = np.divmod(numbers, side**2)
    return np.asarray(origins[pixel] + np.stack(np.divmod(within, side)[::-1], 1))
