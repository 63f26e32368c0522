"""Unpack a tar archive that is not trusted: names and kinds are checked first, nothing leaves the folder."""

import re
import shutil
import tarfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Never

from tqdm import tqdm

from common.files import flush_to_disk

_CHUNK = 1 << 20  # bytes copied at once
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class UnsafeArchiveError(ValueError):
    """An archive that is refused; the message names the archive, the member and the reason."""


def extract_tar(
    archive: Path, folder: Path, *, max_members: int = 100_000, max_bytes: int = 1 << 36, progress: bool = True
) -> None:
    """Unpack the plain (not compressed) tar `archive`, all of which lies in one folder, to `folder`.

    `folder` appears only when whole, under the name it has in the archive. Only names and contents are taken over:
    no owner, mode, time or link. The files that macOS adds (`._name`) are left out. What a killed call left is removed;
    hold a lock where two processes may unpack to the same place.

    Args:
        archive: the tar file; check its digest before.
        folder: where its only top-level folder, of the same name, shall lie.
        max_members: more of them are refused.
        max_bytes: more bytes in all are refused, and always more than the archive itself has.
        progress: show a progress bar where standard error is a terminal.

    Raises:
        FileExistsError: `folder` is there.
        UnsafeArchiveError: a member is refused, or the archive is damaged; nothing of it stays.
        OSError: the disk is full or cannot be written; nothing of it stays.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there: move it away and run again")
    scratch = folder.with_name(f".{folder.name}.unpacking")
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True, mode=0o700)
    try:
        with _opened(archive) as tar:
            limit = min(max_bytes, archive.stat().st_size)
            members = _checked_members(archive, tar, folder.name, max_members, limit)
            _write_members(tar, members, scratch, f"unpacking {archive.name}", progress)
        if not (scratch / folder.name).is_dir():
            raise UnsafeArchiveError(f"{archive}: it does not hold a folder {folder.name}")
        (scratch / folder.name).replace(folder)
        flush_to_disk(folder.parent)
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a plain tar; every error of the format, also later, comes out as UnsafeArchiveError."""
    try:
        # Only "r:": a compressed archive could swell without bound while its members are listed.
        with tarfile.open(archive, "r:") as tar:
            yield tar
    except UnsafeArchiveError:
        raise
    # Headers that lie about numbers and lengths make tarfile raise more than its own errors.
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsafeArchiveError(f"{archive}: not a whole, plain tar archive ({reason})") from error


def _checked_members(
    archive: Path, tar: tarfile.TarFile, top: str, max_members: int, max_bytes: int
) -> dict[PurePosixPath, tarfile.TarInfo]:
    """Return the members to write by their path; refuse the whole archive for a single bad one."""
    members: dict[PurePosixPath, tarfile.TarInfo] = {}
    taken: dict[str, str] = {}  # path as the least exact file system sees it -> file, folder or parent (of a member)
    total = 0
    for count, member in enumerate(tar, start=1):
        # One by one as they are read, so that a bomb is stopped at the first header over the limit.
        total += max(member.size, 0)
        complaint = _complaint(member, top)
        if count > max_members:
            complaint = f"the archive has more than {max_members} members"
        elif total > max_bytes:
            complaint = f"the members claim more than {max_bytes} bytes"
        path = PurePosixPath(member.name)
        if complaint is None and not any(part.startswith("._") for part in path.parts):
            complaint = _clash(path, member.isdir(), taken)
            members[path] = member
        if complaint is not None:
            raise UnsafeArchiveError(f"{archive}: member {member.name!r}: {complaint}; nothing was unpacked")
    _check_end(archive, tar.offset or 0)
    return members


def _complaint(member: tarfile.TarInfo, top: str) -> str | None:
    """Return why a member is refused for its own sake, or None."""
    name = member.name
    path = PurePosixPath(name)
    if not name.isprintable():
        return "its name holds control characters or is not UTF-8"
    if "\\" in name or re.match(r"[A-Za-z]:", name):
        return "its name is a Windows path"
    if path.is_absolute():
        return "its name is absolute"
    if ".." in path.parts:
        return "its name leads out of the folder"
    if member.sparse is not None or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        return f"it is {_KINDS.get(member.type, 'neither a file nor a folder')}"
    if member.size < 0:
        return "its size is negative"
    if path.parts[:1] not in ((top,), (f"._{top}",)) and not (path == PurePosixPath() and member.isdir()):
        return f"it lies outside the folder {top}"
    return None


def _clash(path: PurePosixPath, is_folder: bool, taken: dict[str, str]) -> str | None:
    """Return why a path cannot stand beside those `taken`, which it joins, or None."""
    key, *parents = (unicodedata.normalize("NFC", str(p)).casefold() for p in (path, *path.parents))
    if taken.get(key, "parent") != "parent":
        return "its name comes twice"
    if any(taken.get(parent) == "file" for parent in parents) or (key in taken and not is_folder):
        return "it is a file and a folder at once"
    taken[key] = "folder" if is_folder else "file"
    for parent in parents:
        taken.setdefault(parent, "parent")
    return None


def _check_end(archive: Path, end: int) -> None:
    # tarfile takes a damaged header for the end of the archive, and leaves out what follows without a word.
    with archive.open("rb") as stream:
        stream.seek(end)
        if any(stream.read(tarfile.BLOCKSIZE)):
            raise UnsafeArchiveError(f"{archive}: damaged after byte {end}; nothing was unpacked")


def _write_members(
    tar: tarfile.TarFile, members: dict[PurePosixPath, tarfile.TarInfo], folder: Path, title: str, progress: bool
) -> None:
    """Write the checked members below `folder`, which holds nothing yet; each file is new and not a link."""
    total = sum(member.size for member in members.values())
    bar = tqdm(
        desc=title, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None if progress else True
    )
    with bar:
        for path, member in members.items():
            target = folder / path
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            try:
                _write_member(tar, member, target, bar)
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror}; nothing of the archive is unpacked", str(target)
                ) from error


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, bar: "tqdm[Never]") -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, "only files get here"
    with content, target.open("xb") as stream:
        while chunk := content.read(_CHUNK):
            stream.write(chunk)
            bar.update(len(chunk))
    flush_to_disk(target)
