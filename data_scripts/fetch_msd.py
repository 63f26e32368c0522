"""Download a data set of the Medical Segmentation Decathlon: `python data_scripts/fetch_msd.py spleen --to DIR`.

The data sets are under CC-BY-SA 4.0. Source of the address and of the MD5 digests: `DecathlonDataset` in
monai/apps/datasets.py (MONAI 1.6).
"""

import argparse
import json
import shutil
import sys
import tarfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from common.files import flush_to_disk
from data_scripts.fetch import check_space, download, http_address, locked, read_receipt, run_command

BASE_URL = "https://msd-for-monai.s3-us-west-2.amazonaws.com"
_MOST_MEMBERS = 100_000  # of an archive; the largest of the Decathlon has 2,000


@dataclass(frozen=True)
class MsdArchive:
    """One archive of the Decathlon: the folder in it, the digest of its bytes (as `download` takes), its app, size."""

    task: str
    digest: str
    app: str
    gigabytes: float


ARCHIVES = {
    "spleen": MsdArchive("Task09_Spleen", "410d4a301da4e5b2f6f86ec3ddba524e", "spleen", 1.5),
    "brats": MsdArchive("Task01_BrainTumour", "240a19d752f0d9e9101544901065d872", "brats", 7.1),
}


def fetch(archive: MsdArchive, to: Path, base_url: str = BASE_URL, keep_archive: bool = False) -> Path:
    """Download, check and unpack an archive; return the folder of the data set, at once where it is there already.

    Args:
        archive: which one.
        to: the folder that the data set's folder will lie in.
        base_url: the address of the folder with the archives.
        keep_archive: keep the tar file after it was unpacked.

    Raises:
        ValueError: the archive or what is in it is not a data set in MSD layout.
        FileExistsError: there is a folder of that name which is not a whole data set from this script.
        DownloadError: the download failed; the message says why and what to do.
        OSError: the disk cannot be written.
    """
    folder, tar = to / archive.task, to / f"{archive.task}.tar"
    url = f"{base_url}/{tar.name}"
    with locked(to / f".{archive.task}.lock"):
        if folder.exists():
            receipt = read_receipt(tar)
            missing = missing_files(folder) if (folder / "dataset.json").exists() else ["dataset.json"]
            if missing or archive.digest not in (receipt.get("md5"), receipt.get("sha256")):
                found = f"{len(missing)} files are missing {missing[:1]}, its receipt says MD5 {receipt.get('md5')}"
                raise FileExistsError(f"{folder} is not what {url} holds ({found}): move it away and run again")
            print(f"{folder}: already there, all files of dataset.json present")
            return folder
        there = f"{tar}: already there, its digest is checked"
        print(there if tar.exists() else f"{url} -> {tar} (about {archive.gigabytes} GB)")
        receipt = download(url, tar, archive.digest, room=2.0)
        print(f"{tar}: {receipt['size']} bytes, MD5 {receipt['md5']} as published, SHA-256 {receipt['sha256']}")
        check_space(to, receipt["size"])
        unpack(tar, folder)
        if not keep_archive:
            tar.unlink()
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a plain (not compressed) tar, all of which lies in one folder, to `folder`, which appears only when whole.

    Check the archive's digest before. The files that macOS adds (`._name`) are left out; owners, modes and times are
    not taken over.

    Args:
        archive: the tar file.
        folder: must not be there; it has the name of the archive's only top-level folder.

    Raises:
        ValueError: the archive is damaged, holds more than plain files below that folder, or is no whole data set.
        OSError: the disk is full or cannot be written. In both cases nothing of the archive stays.
    """
    scratch = folder.with_name(f".{folder.name}.unpacking")
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir(mode=0o700)
    try:
        with tarfile.open(archive, "r:") as tar:
            members = list(_checked_members(tar, folder.name, archive.stat().st_size))
            tar.extractall(scratch, tqdm(members, f"unpacking {archive.name}", disable=None), filter="data")
        if missing := missing_files(scratch / folder.name):
            raise ValueError(f"dataset.json names {missing[0]}, which it lacks ({len(missing)} in all)")
        for path in scratch.rglob("*"):
            flush_to_disk(path)
        (scratch / folder.name).replace(folder)
        flush_to_disk(folder.parent)
    # Headers that lie about numbers and lengths make tarfile raise more than its own errors.
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{archive}: not unpacked: {error}; delete it and run again, or use a mirror") from error
    finally:
        shutil.rmtree(scratch)


def missing_files(folder: Path) -> list[str]:
    """Return the files that dataset.json names (training images and labels, test images) and that are not there.

    Raises:
        ValueError: there is no dataset.json, or it has no training list.
    """
    listing = folder / "dataset.json"
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
        names = [str(pair[key]) for pair in content["training"] for key in ("image", "label")]
        tests = [str(name) for name in content.get("test", [])]
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = f"{listing}: not the file list of an MSD data set ({type(error).__name__}: {error})"
        raise ValueError(said) from error
    if not names:
        raise ValueError(f"{listing}: its training list is empty")
    return [name for name in names + tests if not (folder / name).is_file()]


def _checked_members(tar: tarfile.TarFile, top: str, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield what is to be unpacked of an archive of `size` bytes, without modes and times.

    What is refused goes beyond tarfile's filter "data", which checks each name again.

    Raises:
        ValueError: a member is neither a file nor a folder below `top`, comes twice where letters of either case are
            the same, or claims bytes that the archive has not; or the archive is damaged.
    """
    taken: set[str] = set()
    total = 0
    for count, member in enumerate(tar, 1):
        path, total = PurePosixPath(member.name), total + member.size
        name = unicodedata.normalize("NFC", str(path)).casefold()
        inside = path.parts[:1] == (top,) and ".." not in path.parts and "\\" not in member.name
        if member.size < 0 or total > size or count > _MOST_MEMBERS:
            raise ValueError(f"member {member.name!r}: more members or bytes than an archive of {size} bytes can hold")
        if any(part.startswith("._") for part in path.parts) or (not path.parts and member.isdir()):
            continue
        if not (inside and member.name.isprintable() and (member.isfile() or member.isdir()) and not member.issparse()):
            raise ValueError(f"member {member.name!r}: expected a plain file or a folder below {top}")
        if name in taken:
            raise ValueError(f"member {member.name!r}: its name comes twice")
        taken.add(name)
        yield member.replace(mode=None, mtime=None, deep=False)  # type: ignore[arg-type]  # as documented
    # tarfile takes a damaged header for the end of the archive, and leaves out what follows without a word.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if any(tar.fileobj.read(tarfile.BLOCKSIZE)):
        raise ValueError(f"damaged after byte {tar.offset}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Download a data set of the Medical Segmentation Decathlon.", allow_abbrev=False
    )
    parser.add_argument("dataset", choices=tuple(ARCHIVES))
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to put the data set in")
    parser.add_argument(
        "--base-url", type=http_address, default=BASE_URL, metavar="URL", help="where the archives lie (a mirror)"
    )
    parser.add_argument("--keep-archive", action="store_true", help="keep the tar file after it was unpacked")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 for an error, 130 where the user interrupts."""
    options = parse_options(arguments)
    archive = ARCHIVES[options.dataset]
    return run_command(
        "fetch_msd", partial(fetch, archive, options.to, options.base_url, options.keep_archive), archive.app
    )


if __name__ == "__main__":
    sys.exit(main())
