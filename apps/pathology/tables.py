"""Which patches the pathology app trains on, validates on and is judged on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apps.pathology.config import PathologyConfig
from apps.pathology.patch_lists import read_coordinates, read_patch_folder
from apps.pathology.patch_sampling import sample_patches, shortages
from apps.pathology.patch_table import PatchTable, cut_validation
from apps.pathology.plan import PATCH_SIZE, PATCHES_PER_SLIDE
from apps.pathology.slide_set import SlideEntry, read_slide_set, split_slides
from apps.pathology.view import ASSUMED_MPP, MPP_TOLERANCE
from common.data.slide_pool import SlidePool
from common.observe.run import Run
from common.training.dev_run import SAID, each_kind
from common.training.distributed import Ranks
from data_scripts.make_slides import SLIDES_VERSION, make_slides

_FEW = 16  # patches of each kind that a fast dev run takes
_SYNTHETIC = (8, 6)  # slides to train on, slides to scan and to score


@dataclass(frozen=True)
class Tables:
    """The patches of a run.

    Args:
        folder: of the data.
        name: of the data.
        synthetic: whether they are drawn, not scanned.
        mpp: um per pixel; None where the data do not say.
        training: those to train on.
        validation: those that choose the best weights.
        testing: those that only judge them; None where there are none.
    """

    folder: Path
    name: str
    synthetic: bool
    mpp: float | None
    training: PatchTable
    validation: PatchTable
    testing: PatchTable | None


def find_tables(config: PathologyConfig, run: Run, ranks: Ranks, pool: SlidePool) -> Tables:
    """Return the patches of --data; without it, make synthetic slides once and say loudly that they are.

    Raises:
        FileNotFoundError, ValueError: as from reading them.
    """
    folder = config.data
    if folder is None:
        made = config.store / "phantoms" / f"slides-{SLIDES_VERSION}"
        folder = ranks.once(lambda: make_slides(made, *_SYNTHETIC))
    tables = ranks.once(lambda: _of_both_kinds(_read(config, folder, run, pool), run))
    tables = replace(tables, mpp=config.mpp or tables.mpp)
    if config.fast_dev_run:
        run.say(SAID)
        tables = replace(
            tables,
            training=_few_patches(tables.training, config),
            validation=_few_patches(tables.validation, config),
            testing=None if tables.testing is None else _few_patches(tables.testing, config),
        )
    parts = {"training": tables.training, "validation": tables.validation, "testing": tables.testing}
    shown = ", ".join(f"{len(part)} {name}" for name, part in parts.items() if part is not None)
    size = f"{tables.training.size} pixels" + (f" of {tables.mpp:g} um" if tables.mpp else "")
    run.say(f"data: {tables.folder} ({tables.name}; patches of {size}: {shown})")
    if tables.synthetic:
        run.say(
            "SYNTHETIC DATA: these slides are drawn, and their figures say nothing about patients. For real ones:\n"
            "  python data_scripts/fetch_camelyon16.py --to data/camelyon16 --slides sample && "
            "python apps/pathology/train.py --data data/camelyon16"
        )
    return tables


def _read(config: PathologyConfig, folder: Path, run: Run, pool: SlidePool) -> Tables:
    if config.training_list is not None and config.validation_list is not None:
        return _listed(config, folder, config.training_list, config.validation_list, run, pool)
    return _labelled(config, folder) if (folder / "labels.csv").is_file() else _sampled(config, folder, run, pool)


def _few_slides(slides: Sequence[SlideEntry]) -> tuple[SlideEntry, ...]:
    """Return the first slide with and the first without tumour."""
    return tuple(slides[place] for place in each_kind([entry.tumour for entry in slides], 1))


def _few_patches(table: PatchTable, config: PathologyConfig) -> PatchTable:
    """Return a few patches of each kind, and a batch at least."""
    return table.take(np.array(each_kind(table.label.tolist(), max(_FEW, config.batch_size or 0)), np.int64))


def _of_both_kinds(tables: Tables, run: Run) -> Tables:
    """Refuse to train on, or to validate by, patches of one kind; leave testing by them out, and say so.

    Raises:
        ValueError: names the set and what it lacks.
    """
    for name, table in (("training", tables.training), ("validation", tables.validation)):
        if table.label.min() == table.label.max():
            kind = "tumour" if table.label.min() == 0 else "normal"
            raise ValueError(
                f"{tables.folder}: there is no {kind} patch among the {len(table)} for {name}, and no AUC without; add "
                f"some, or choose another --held_out or --seed"
            )
    testing = tables.testing
    if testing is not None and testing.label.min() == testing.label.max():
        run.say(f"testing: its {len(testing)} patches are of one kind, which has no AUC, so it is left out")
        return replace(tables, testing=None)
    return tables


def _pixel_size(files: Sequence[Path], run: Run, pool: SlidePool) -> float | None:
    """Return um per pixel of the slides, and say what reads them and whether their pixels differ."""
    sizes, readers = [], set()
    for file in files:
        with pool.use(file) as slide:
            sizes.append(slide.mpp)
            readers.add(slide.reader)
    known = sorted(size for size in sizes if size is not None)
    mpp = known[len(known) // 2] if known else None
    text = f"slides: read by {', '.join(sorted(readers))}"
    if len(known) < len(sizes):
        text += f"; {len(sizes) - len(known)} give no pixel size, and tissue is sought as if it were {ASSUMED_MPP} um"
    if known and known[-1] > (1 + MPP_TOLERANCE) * known[0]:
        text += (
            f"; ATTENTION: their pixels are {known[0]:g} to {known[-1]:g} um, and patches are taken as they are: the "
            "network learns several magnifications; train on slides of one"
        )
    run.say(text)
    return mpp


def _listed(
    config: PathologyConfig, folder: Path, training: Path, validation: Path, run: Run, pool: SlidePool
) -> Tables:
    first, second = read_coordinates(training, folder), read_coordinates(validation, folder, part="validation")
    mpp = _pixel_size(sorted({*first.files, *second.files}), run, pool)
    return Tables(folder, training.stem, False, mpp, first, second, None)


def _labelled(config: PathologyConfig, folder: Path) -> Tables:
    parts = read_patch_folder(folder)
    training, validation = parts["training"], parts.get("validation")
    if validation is None:
        training, validation = cut_validation(training, config.held_out, config.seed)
    return Tables(folder, folder.name, False, None, training, validation, parts.get("testing"))


def _sampled(config: PathologyConfig, folder: Path, run: Run, pool: SlidePool) -> Tables:
    kind = run.device.type
    size = config.patch_size or PATCH_SIZE[kind]
    per_slide = config.patches_per_slide or PATCHES_PER_SLIDE[kind]
    slides = read_slide_set(folder)
    training, validation = split_slides(slides.training, config.held_out, config.seed)
    if config.fast_dev_run:
        training, validation = _few_slides(training), _few_slides(validation)
        slides = replace(slides, testing=())
        per_slide = min(per_slide, max(_FEW, config.batch_size or 0))
    referenced = [entry for entry in slides.testing if not entry.tumour or entry.annotation or entry.mask]
    tables = [
        sample_patches(entries, per_slide, size, config.seed, pool, config.workers, run.leader) if entries else None
        for entries in (training, validation, referenced)
    ]
    for table in tables:
        if table is not None and (missing := shortages(table, per_slide)):
            lacking = ", ".join(f"{name} {count}" for name, count in missing.items())
            run.say(f"room for fewer patches than {per_slide} on some slides; missing: {lacking}")
    assert tables[0] is not None
    assert tables[1] is not None
    mpp = _pixel_size([entry.path for entry in (*training, *validation)], run, pool)
    return Tables(slides.folder, slides.name, slides.synthetic, mpp, tables[0], tables[1], tables[2])
