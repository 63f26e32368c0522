"""The digests of what is handed over: a SHA256SUMS that `sha256sum --check` reads."""

from pathlib import Path

from common.files import sha256_of, write_text

DIGESTS = "SHA256SUMS"


def write_digests(folder: Path) -> Path:
    """Write the SHA-256 of every file below a folder; where it is missing, the hand-over was not finished.

    Returns:
        `folder`/SHA256SUMS; check it there with `sha256sum --check SHA256SUMS`.
    """
    path = folder / DIGESTS
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file() and file != path)
    write_text(path, "".join(f"{sha256_of(folder / name)}  {name}\n" for name in files))
    return path


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something already.

    Raises:
        FileExistsError: it is not empty; what lies there would be mixed with what is handed over.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty; remove it, or choose another folder")
