"""Download a data set of the Medical Segmentation Decathlon: `python data_scripts/fetch_msd.py spleen --to DIR`.

The data sets are under CC-BY-SA 4.0. Source of the address and of the MD5 digests: `DecathlonDataset` in
monai/apps/datasets.py (MONAI 1.6).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_scripts.archives import extract_tar
from data_scripts.download import Patience, Remote, answer, download, locked, read_receipt, receipt_path
from data_scripts.partial import check_space
from data_scripts.transfer import check_url

BASE_URL = "https://msd-for-monai.s3-us-west-2.amazonaws.com"


@dataclass(frozen=True)
class MsdArchive:
    """One archive of the Decathlon: the folder in it, its digests (SHA-256 once somebody pins it), its app and size."""

    task: str
    md5: str
    app: str
    gigabytes: float
    sha256: str | None = None


ARCHIVES = {
    "spleen": MsdArchive("Task09_Spleen", "410d4a301da4e5b2f6f86ec3ddba524e", "spleen", 1.5),
    "brats": MsdArchive("Task01_BrainTumour", "240a19d752f0d9e9101544901065d872", "brats", 7.1),
}


def fetch(
    archive: MsdArchive,
    to: Path,
    *,
    base_url: str = BASE_URL,
    keep_archive: bool = False,
    patience: Patience | None = None,
) -> Path:
    """Download, check and unpack an archive; return the folder of the data set, at once where it is there already.

    Args:
        archive: which one.
        to: the folder that the data set's folder will lie in.
        base_url: the address of the folder with the archives.
        keep_archive: keep the tar file after it was unpacked.
        patience: how long to try.

    Raises:
        ValueError: the archive or what is in it is not a data set in MSD layout.
        FileExistsError: there is a folder of that name which is not a whole data set from this script.
        DownloadError: the download failed; the message says why and what to do.
        OSError: the disk cannot be written.
    """
    folder = to / archive.task
    tar = to / f"{archive.task}.tar"
    remote = Remote(f"{base_url.rstrip('/')}/{tar.name}", archive.md5, archive.sha256)
    with locked(to / f".{archive.task}.lock"):
        if folder.exists():
            _check_present(folder, tar, archive)
            print(f"{folder}: already there, all files of dataset.json present")
            return folder
        if tar.exists():
            print(f"{tar}: already there, its digest is checked")
        else:
            print(f"{remote.url} -> {tar} (about {archive.gigabytes} GB)")
        receipt = download(remote, tar, room=2.0, patience=patience)
        print(f"{tar}: {receipt.size} bytes, MD5 {receipt.md5} as published, SHA-256 {receipt.sha256}")
        check_space(to, receipt.size)
        extract_tar(tar, folder)
        if missing := missing_files(folder):
            raise ValueError(
                f"{folder}: dataset.json names {missing[0]}, which the archive lacks ({len(missing)} in all)"
            )
        if not keep_archive:
            tar.unlink()
    return folder


def missing_files(folder: Path) -> list[str]:
    """Return the files that dataset.json names (training images and labels, test images) and that are not there.

    Raises:
        ValueError: there is no dataset.json, or it has no training list.
    """
    listing = folder / "dataset.json"
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
        pairs = [(pair["image"], pair["label"]) for pair in content["training"]]
        names = [str(name) for pair in pairs for name in pair] + [str(name) for name in content.get("test", [])]
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{listing}: not the file list of an MSD data set ({type(error).__name__}: {error})"
        ) from error
    if not pairs:
        raise ValueError(f"{listing}: its training list is empty")
    return [name for name in names if not (folder / name).is_file()]


def _check_present(folder: Path, tar: Path, archive: MsdArchive) -> None:
    """Raise FileExistsError where `folder` is not what this script once unpacked, whole."""
    remedy = "move the folder away and run again"
    receipt = read_receipt(tar)
    if receipt is None:
        raise FileExistsError(f"{folder} is there, but no receipt {receipt_path(tar)} of its download: {remedy}")
    if receipt.md5 != archive.md5 or archive.sha256 not in (None, receipt.sha256):
        found = f"MD5 {receipt.md5}, SHA-256 {receipt.sha256}"
        raise FileExistsError(f"{folder} is there, but from another archive: {found}: {remedy}")
    if missing := missing_files(folder):
        raise FileExistsError(f"{folder} is there, but {missing[0]} is missing ({len(missing)} in all): {remedy}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Download a data set of the Medical Segmentation Decathlon.", allow_abbrev=False
    )
    parser.add_argument("dataset", choices=tuple(ARCHIVES))
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to put the data set in")
    parser.add_argument("--base-url", default=BASE_URL, metavar="URL", help="where the archives lie (a mirror)")
    parser.add_argument("--keep-archive", action="store_true", help="keep the tar file after it was unpacked")
    options = parser.parse_args(arguments)
    try:
        check_url(options.base_url)
    except ValueError as error:
        parser.error(f"argument --base-url: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 for an error, 130 where the user interrupts."""
    options = parse_options(arguments)
    archive = ARCHIVES[options.dataset]
    get = partial(fetch, archive, options.to, base_url=options.base_url, keep_archive=options.keep_archive)
    return answer("fetch_msd", get, archive.app)


if __name__ == "__main__":
    sys.exit(main())
