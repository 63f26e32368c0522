"""Which patches the pathology app trains on, validates on and is judged on."""

from dataclasses import dataclass
from pathlib import Path

from apps.pathology.config import PathologyConfig
from apps.pathology.patch_lists import read_coordinates, read_patch_folder
from apps.pathology.patch_sampling import sample_patches, shortages
from apps.pathology.patch_table import PatchTable, cut_validation
from apps.pathology.plan import PATCH_SIZE, PATCHES_PER_SLIDE
from apps.pathology.slide_set import read_slide_set, split_slides
from apps.pathology.view import ASSUMED_MPP
from common.data.slide_pool import SlidePool
from common.observe.run import Run
from common.training.distributed import Ranks
from data_scripts.make_slides import SLIDES_VERSION, make_slides

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
    if config.training_list is not None and config.validation_list is not None:
        tables = _listed(config, folder, config.training_list, config.validation_list)
    elif (folder / "labels.csv").is_file():
        tables = _labelled(config, folder)
    else:
        tables = _sampled(config, folder, run, pool)
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


def _listed(config: PathologyConfig, folder: Path, training: Path, validation: Path) -> Tables:
    first, second = read_coordinates(training, folder), read_coordinates(validation, folder, part="validation")
    return Tables(folder, training.stem, False, None, first, second, None)


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
    referenced = [entry for entry in slides.testing if not entry.tumour or entry.annotation or entry.mask]
    tables = [
        sample_patches(entries, per_slide, size, config.seed, pool) if entries else None
        for entries in (training, validation, referenced)
    ]
    for table in tables:
        if table is not None and (missing := shortages(table, per_slide)):
            lacking = ", ".join(f"{name} {count}" for name, count in missing.items())
            run.say(f"room for fewer patches than {per_slide} on some slides; missing: {lacking}")
    assert tables[0] is not None
    assert tables[1] is not None
    with pool.use(training[0].path) as slide:
        mpp = slide.mpp
        unknown = "" if mpp else f"; they give no pixel size, tissue is sought as if it were {ASSUMED_MPP} um"
        run.say(f"slides: read by {slide.reader}{unknown}")
    return Tables(slides.folder, slides.name, slides.synthetic, mpp, tables[0], tables[1], tables[2])
