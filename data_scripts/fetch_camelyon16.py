"""Download slides of Camelyon16: `medspeed data fetch-camelyon16 --slides sample --to DIR`.

The slides and annotations are under CC0 (camelyon17.grand-challenge.org/Data). Source: Litjens et al.,
GigaScience 2018, https://doi.org/10.1093/gigascience/giy065; the bucket is in AWS's registry of open data.

Of the bucket (images/NAME.tif, annotations/NAME.xml, evaluation/reference.csv, and their MD5 digests in checksums.md5,
which has none itself) this script knows what others document: it ran on a local server only. Its masks are left
there: the annotations mark the tumour.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from medspeed.common.console import say
from medspeed.common.files import locked
from medspeed.common.flags import Parser, near
from medspeed.data_scripts import run_program
from medspeed.data_scripts.fetch import check_space, download, http_address, read_receipt, size_of

BASE_URL = "https://camelyon-dataset.s3.us-west-2.amazonaws.com/CAMELYON16"
CHECKSUMS = "checksums.md5"
# Two to train and two to validate: tumor_001 and tumor_101 are those of the short lists of MONAI's tutorial.
SAMPLE = ("normal_001", "normal_101", "tumor_001", "tumor_101")
_FILES = r"images/[\w-]+\.tif|annotations/[\w-]+\.xml|evaluation/reference\.csv"
_LINE = re.compile(rf"^([0-9a-fA-F]{{32}}) [ *](?:\./)?(?:CAMELYON16/)?({_FILES})\s*$", re.MULTILINE)
_NAMES = f"slides such as tumor_001; sample: {' '.join(SAMPLE)}; all: all 399, about 700 GB"
_MIRROR = "folder of checksums.md5 on a mirror"
PARSER = Parser(description="Download slides of Camelyon16.")
PARSER.add_argument("--slides", nargs="+", required=True, metavar="NAME", help=_NAMES)
PARSER.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for the slides")
PARSER.add_argument("--base-url", type=http_address, default=BASE_URL, metavar="URL", help=_MIRROR)


def fetch(slides: Sequence[str], to: Path, base_url: str = BASE_URL) -> Path:
    """Download slides with their annotations; return `to`, laid out as the bucket is.

    Slides are names such as tumor_001, "all" or "sample". Sizes are asked for and the disk space is checked before the
    first one. Files that are there with their receipts are not fetched again, interrupted ones are continued.

    Raises:
        ValueError: a slide is unknown, checksums.md5 lists none, or (a DownloadError) a download failed.
        OSError: the disk cannot be written.
    """
    with locked(to / ".camelyon16.lock"):
        download(f"{base_url}/{CHECKSUMS}", to / CHECKSUMS)
        files = choose(read_checksums(to / CHECKSUMS), slides)
        missing = [path for path, md5 in files.items() if not _is_here(to / path, md5)]
        say(f"{to}: {len(files) - len(missing)} of {len(files)} files already downloaded")
        if missing:
            _tell_size(missing, base_url, to)
        for number, path in enumerate(missing, 1):
            say(f"{number} of {len(missing)}: {path}")
            download(f"{base_url}/{path}", to / path, files[path])
    return to


def read_checksums(path: Path) -> dict[str, str]:
    """Return the MD5 digest of each slide and annotation that checksums.md5 names, by path.

    Other files that it lists are left out, as is any path that would leave the folder; no slide is a ValueError.
    """
    digests = {name: md5.lower() for md5, name in _LINE.findall(path.read_text(encoding="utf-8", errors="replace"))}
    if not any(name.startswith("images/") for name in digests):
        raise ValueError(f"{path}: lists no images/*.tif with an MD5 digest; delete it and run again, or use a mirror")
    return digests


def choose(digests: Mapping[str, str], slides: Sequence[str]) -> dict[str, str]:
    """Return the files of some slides and their digests: images and annotations; for test slides their reference.

    That tells which of them have tumour. A slide that is not among the digests is a ValueError, with names like it.
    """
    known = sorted(PurePosixPath(name).stem for name in digests if name.startswith("images/"))
    groups = {"all": known, "sample": SAMPLE}
    wanted = list(dict.fromkeys(name for slide in slides for name in groups.get(slide, [slide])))
    for name in wanted:
        if name not in known:
            raise ValueError(f"slide {name!r}: no such slide{near(name, known)}; there are {known[0]} to {known[-1]}")
    kinds = ("annotations/{}.xml", "images/{}.tif")
    paths = ["evaluation/reference.csv"] if any(name.startswith("test_") for name in wanted) else []
    paths += [kind.format(name) for name in wanted for kind in kinds]
    return {path: digests[path] for path in paths if path in digests}


def _is_here(path: Path, md5: str) -> bool:
    """Return whether a file lies there as it was downloaded; its bytes are not read again."""
    receipt = read_receipt(path)
    return path.is_file() and (receipt.get("md5"), receipt.get("size")) == (md5, path.stat().st_size)


def _tell_size(paths: Sequence[str], base_url: str, to: Path) -> None:
    """Print how much is to come, and raise DownloadError where the disk has no room for it."""
    with ThreadPoolExecutor(8) as pool:
        size = sum(pool.map(lambda path: size_of(f"{base_url}/{path}"), paths))
    there = [to / f"{path}{ending}" for path in paths for ending in ("", ".part")]
    here = sum(path.stat().st_size for path in there if path.is_file())
    say(f"{base_url} -> {to}: {len(paths)} files, {size / 1e9:.2f} GB, of which {here / 1e9:.2f} GB already downloaded")
    check_space(to, size - here)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 for an error, 130 where the user interrupts."""
    options = PARSER.parse_args(arguments)
    given, train = (options.slides, options.to, options.base_url), "next: medspeed train pathology --data"
    return run_program("fetch_camelyon16", lambda: f"{train} {shlex.quote(str(fetch(*given)))}", status=1)


if __name__ == "__main__":
    sys.exit(main())
