"""Make a set of synthetic slides: haematoxylin and eosin, lymph nodes with and without metastases, as in Camelyon16."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from data_scripts.set_folder import Parameters
from data_scripts.slide_sets import BYTES_PER_PIXEL, entries, write_slides
from data_scripts.slides_lattice import MPP

SLIDES_VERSION = 1  # raised when the same parameters give other slides
DEFAULT_SIZE = 3072  # px, 1.5 mm
SMALLEST, LARGEST = 512, 65535  # px: room for a lesion, and the longest side of a JPEG
_REFERENCE = "medspeed, data_scripts/make_slides.py"
_LICENCE = "Apache-2.0, as the program that drew them; synthetic, not for clinical use"
_EXAMPLES = """examples:
  python data_scripts/make_slides.py --to data/slides
  python data_scripts/make_slides.py --to data/slides --training 40 --testing 20 --seed 1
  python data_scripts/make_slides.py --to data/large --training 2 --testing 2 --size 20000

what is written (the layout of Camelyon16; tiled TIFF pyramids of 256 px tiles, levels halved):
  DIR/training/images/{normal,tumor}_NNN.tif    DIR/testing/images/test_NNN.tif
  DIR/*/annotations/STEM.xml                    outlines of the metastases, as ASAP writes them
  DIR/*/masks/STEM_mask.tif                     1 = tumour, on the pixels of the image
  DIR/testing/reference.csv                     stem, Tumor or Normal, type, micro or macro
  DIR/slides.json                               written last: a folder that has it is whole
"""


def make_slides(
    folder: Path,
    training: int = 8,
    testing: int = 6,
    size: int = DEFAULT_SIZE,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make a set of synthetic slides of lymph nodes in the layout of Camelyon16; return its folder.

    Half of the slides have metastases, drawn so that their nuclei tell and their colour does not. The same parameters
    give the same bytes, on any number of cores, with the same packages on the same kind of processor; each slide
    depends on (seed, its kind, its number) alone. A set that is already there is left as it is, an unfinished one is
    finished. Memory: BYTES_PER_PIXEL for each pixel of the slides in work, of which there is one per core, fewer where
    they would take more than 8 GiB.

    Args:
        folder: where the set goes.
        training: how many training slides, half of them normal.
        testing: how many test slides, every other one with tumour.
        size: side of a slide at level 0 in px of 0.5 um.
        seed: draws everything.
        progress: whether to show a progress bar.

    Raises:
        ValueError: fewer than two training or test slides, a size out of bounds, a negative seed, or `folder` holds
            something else.
    """
    for name, number in (("training", training), ("testing", testing)):
        if number < 2:
            raise ValueError(f"--{name} {number}: at least 2 slides have to be made, one with tumour and one without")
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"--size {size}: must be {SMALLEST} to {LARGEST} px")
    if seed < 0:
        raise ValueError(f"--seed {seed}: must be 0 or more")
    parameters: Parameters = {
        "kind": "slides",
        "version": SLIDES_VERSION,
        "training": training,
        "testing": testing,
        "size": size,
        "seed": seed,
    }
    about = {
        "name": "LymphNodePhantoms",
        "description": "Synthetic slides of lymph nodes with outlined metastases; no patient was biopsied",
        "reference": _REFERENCE,
        "licence": _LICENCE,
    }
    return write_slides(folder, entries(training, testing), size, seed, about, parameters, progress)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__} Same seed, same bytes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="DIR", help="new or empty folder for the set")
    add("--training", type=int, default=8, metavar="N", help="how many training slides, half with tumour (default 8)")
    add("--testing", type=int, default=6, metavar="N", help="how many test slides, half with tumour (default 6)")
    add(
        "--size",
        type=int,
        default=DEFAULT_SIZE,
        metavar="PX",
        help=f"side of a slide in pixels of {MPP} um (default {DEFAULT_SIZE}); takes about {BYTES_PER_PIXEL} bytes of "
        "memory per pixel",
    )
    add("--seed", type=int, default=0, metavar="S", help="same seed, same bytes (default 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 after one line on what to change."""
    options = make_parser().parse_args(arguments)
    try:
        folder = make_slides(options.to, options.training, options.testing, options.size, options.seed)
    except (ValueError, FileNotFoundError) as error:
        print(re.sub(r"\s*\n\s*", " ", f"make_slides.py: error: {error}"), file=sys.stderr)
        return 2
    print(f"{folder}: synthetic slides in the layout of Camelyon16, seed {options.seed}; not for clinical use")
    return 0


if __name__ == "__main__":
    sys.exit(main())
