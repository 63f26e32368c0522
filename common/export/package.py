"""What is handed over: a folder of files, with a SHA256SUMS that `sha256sum --check` reads."""

from collections.abc import Mapping
from pathlib import Path

from common.files import atomic_path, sha256_of, write_text

DIGESTS = "SHA256SUMS"


def write_package(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by their paths in the folder, and last their digests: without those it was not finished.

    Returns:
        `folder`; check it there with `sha256sum --check SHA256SUMS`.

    Raises:
        FileExistsError: the folder holds something, which would be mixed with what is handed over.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty; remove it, or choose another folder")
    for name, content in files.items():
        with atomic_path(folder / name) as part:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
    write_text(folder / DIGESTS, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in sorted(files)))
    return folder
