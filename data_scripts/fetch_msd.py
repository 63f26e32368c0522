"""Download a dataset of the Medical Segmentation Decathlon: `medspeed data fetch-msd spleen --to DIR`.

The data sets are under CC-BY-SA 4.0. Source of the address and of the MD5 digests: `DecathlonDataset` in
monai/apps/datasets.py (MONAI 1.6).
"""

import shlex
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from medspeed.common.console import hides_bar, say
from medspeed.common.data.dataset import read_dataset
from medspeed.common.files import locked
from medspeed.common.flags import Parser
from medspeed.data_scripts import run_program, whole_folder
from medspeed.data_scripts.fetch import check_space, download, http_address, read_receipt

BASE_URL = "https://msd-for-monai.s3-us-west-2.amazonaws.com"
ARCHIVES = {  # by the app that trains on it: the folder in the archive, and the archive's MD5
    "spleen": ("Task09_Spleen", "410d4a301da4e5b2f6f86ec3ddba524e"),
    "brats": ("Task01_BrainTumour", "240a19d752f0d9e9101544901065d872"),
}
_MIRROR = "folder of the archives on a mirror"
PARSER = Parser(description="Download a dataset of the Medical Segmentation Decathlon.")
PARSER.add_argument("dataset", choices=tuple(ARCHIVES))
PARSER.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for the dataset")
PARSER.add_argument("--base-url", type=http_address, default=BASE_URL, metavar="URL", help=_MIRROR)
PARSER.add_argument("--keep-archive", action="store_true", help="keep the tar file after unpacking")


def fetch(task: str, md5: str, to: Path, base_url: str = BASE_URL, keep_archive: bool = False) -> Path:
    """Download, check and unpack an archive; return the folder of the data set, at once where it is there already.

    `task` is the name of the archive, which has that MD5, and of the folder in it, which is put into `to`.

    Raises:
        ValueError: the archive or what is in it is not a data set in MSD layout, or (a DownloadError) did not arrive.
        OSError: the disk cannot be written, or there is a folder of that name with anything else.
    """
    folder, tar = to / task, to / f"{task}.tar"
    url = f"{base_url}/{tar.name}"
    with locked(to / f".{task}.lock"):
        if folder.exists():
            try:
                if (found := read_receipt(tar).get("md5")) != md5:
                    raise ValueError(f"its receipt has MD5 {found}")
                read_dataset(folder)
            except (ValueError, OSError) as error:
                raise FileExistsError(f"{folder} differs from {url} ({error}): move it away and run again") from error
            say(f"{folder}: already downloaded, all files of dataset.json present")
            return folder
        say(f"{tar}: already downloaded, verifying its checksum" if tar.exists() else f"{url} -> {tar}")
        receipt = download(url, tar, md5, room=2.0)
        say(f"{tar}: {receipt['size']} bytes, MD5 {receipt['md5']} matches the published one")
        check_space(to, receipt["size"])
        unpack(tar, folder)
        if not keep_archive:
            tar.unlink()
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a plain (not compressed) tar, whose digest was checked, to `folder`, which appears only when whole.

    It has the name of the archive's top-level folder. The files that macOS adds (`._name`) are left out. ValueError
    where the archive is damaged, holds what would leave its folder, or is no whole data set: then nothing of it stays.
    """
    try:
        with whole_folder(folder) as place, tarfile.open(archive, "r:") as tar:
            members = [member for member in tar if "/._" not in f"/{member.name}"]
            tar.extractall(place.parent, tqdm(members, f"unpacking {archive.name}", disable=hides_bar()), filter="data")
            read_dataset(place)
    except (tarfile.TarError, ValueError, FileNotFoundError, RecursionError) as error:
        raise ValueError(f"{archive}: not unpacked: {error}; delete it and run again, or use a mirror") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 for an error, 130 where the user interrupts."""
    options = PARSER.parse_args(arguments)
    given = *ARCHIVES[options.dataset], options.to, options.base_url, options.keep_archive
    train = f"next: medspeed train {options.dataset} --data"
    return run_program("fetch_msd", lambda: f"{train} {shlex.quote(str(fetch(*given)))}", status=1)


if __name__ == "__main__":
    sys.exit(main())
