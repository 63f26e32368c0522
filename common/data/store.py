"""Prepared cases on disk: made once, checked and memory-mapped on every later start."""

import errno
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from common.data.cases import Case
from common.data.entries import UnusableEntryError, read_entry, write_entry
from common.data.geometry import working_grid
from common.data.parallel import map_in_threads
from common.data.preparation import PREPARATION_VERSION, Preparation, PreparedCase, prepare_case
from common.data.sources import SourceDigests
from common.data.volumes import read_header
from common.files import locked

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_GIB = 2**30


def prepared_cases(
    cases: Sequence[Case],
    preparation: Preparation,
    classes: int | tuple[int, ...],
    folder: Path,
    *,
    device: torch.device = _CPU,
    workers: int | None = None,
    progress: bool = True,
) -> list[PreparedCase]:
    """Return the cases prepared, from the folder where they lie there and are sound, else prepared now and kept there.

    An entry stands for the content of its source files, one preparation, one code version and one number of classes; a
    stale or damaged one is made anew, which is logged. Processes may share the folder: each entry is made by one of
    them and replaced whole. A folder keeps one entry per case name, so datasets, and preparations that are in use at
    the same time, had better have folders of their own.

    Args:
        cases: what to prepare; labels, where there are any, travel with the images.
        preparation: spacing, normalisation, window.
        classes: labels must lie in range(classes), or be among those given.
        folder: made if needed; holds NAME.safetensors for each case.
        device: where volumes are resampled; the result lies in CPU memory in any case.
        workers: cases in work at the same time; by default one per core that this process may use.
        progress: show progress bars.

    Returns:
        One prepared case each, in the order of `cases`; the tensors are memory-mapped files.

    Raises:
        OSError: the folder cannot be written, or has no room; the entries already there are kept.
        ValueError: a source file is damaged or does not fit its label (see `prepare_case`).
    """
    digests = SourceDigests(folder)

    def check(case: Case) -> PreparedCase | None:
        return _sound_entry(case, _key(case, preparation, classes, digests), folder)

    def make(case: Case) -> PreparedCase:
        return _made_entry(case, _key(case, preparation, classes, digests), preparation, classes, folder, device)

    try:
        present = [case for case in dict.fromkeys(cases) if _entry_path(case, folder).exists()]
        checked = map_in_threads(check, present, "checking prepared cases", workers, progress)
        entries = {case: entry for case, entry in zip(present, checked, strict=True) if entry is not None}
        missing = [case for case in dict.fromkeys(cases) if case not in entries]
        _check_space(missing, preparation, folder)
        made = map_in_threads(make, missing, "preparing cases", workers, progress)
    finally:
        digests.save()
    entries |= zip(missing, made, strict=True)
    return [entries[case] for case in cases]


def _sound_entry(case: Case, key: str, folder: Path) -> PreparedCase | None:
    try:
        return read_entry(_entry_path(case, folder), case.name, key)
    except (FileNotFoundError, UnusableEntryError):
        return None  # whoever holds the entry's lock looks again, and logs the reason


def _made_entry(
    case: Case, key: str, preparation: Preparation, classes: int | tuple[int, ...], folder: Path, device: torch.device
) -> PreparedCase:
    path = _entry_path(case, folder)
    with _lock(case, folder):
        try:
            return read_entry(path, case.name, key)  # another process made it while this one waited
        except FileNotFoundError:
            pass
        except UnusableEntryError as reason:
            _log.warning("%s: prepared again: %s", path, reason)
        prepared = prepare_case(case.name, case.image, case.label, preparation, classes, device)
        with _errors_name(folder):
            write_entry(path, prepared, key)
        # Read back, not passed on: mapped pages are the disk's, so that a dataset larger than memory can be prepared.
        return read_entry(path, case.name, key, check=False)


def _entry_path(case: Case, folder: Path) -> Path:
    return folder / f"{case.name}.safetensors"


def _key(case: Case, preparation: Preparation, classes: int | tuple[int, ...], digests: SourceDigests) -> str:
    """Return all that decides the prepared voxels; as JSON, so that a stale entry can say what has changed."""
    decisive = {
        "image": digests.sha256(case.image),
        "label": digests.sha256(case.label) if case.label is not None else None,
        "classes": classes,
        "version": PREPARATION_VERSION,
        **asdict(preparation),
    }
    return json.dumps(decisive, sort_keys=True)


@contextmanager
def _lock(case: Case, folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time make an entry; the lock of a process that dies is released."""
    path = folder / "locks" / f"{case.name}.lock"
    with ExitStack() as stack:
        with _errors_name(folder):
            stack.enter_context(locked(path))
        yield


def _check_space(missing: Sequence[Case], preparation: Preparation, folder: Path) -> None:
    """Refuse to begin what the disk cannot hold; an upper bound, since the foreground crop is not known yet."""
    if not missing:
        return
    with _errors_name(folder):
        folder.mkdir(parents=True, exist_ok=True)
    needed = sum(prepared_bytes(case, preparation) for case in missing)
    replaced = sum(path.stat().st_size for case in missing if (path := _entry_path(case, folder)).exists())
    free = shutil.disk_usage(folder).free
    if needed - replaced > free:
        raise OSError(
            errno.ENOSPC,
            f"{folder}: {len(missing)} prepared cases need up to {needed / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are "
            "free; make room or choose another folder",
        )


def prepared_bytes(case: Case, preparation: Preparation) -> int:
    """Return the most bytes that a case can take once prepared: its working grid, from the header, uncropped."""
    shape, affine = read_header(case.image)
    voxels = math.prod(working_grid(shape[:3], affine, preparation.spacing).shape)
    return voxels * (2 * preparation.channels + (case.label is not None))  # float16 and uint8


@contextmanager
def _errors_name(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{folder}: prepared cases cannot be written: {error.strerror}; make room or choose another folder",
        ) from error


def store_folder(root: Path, dataset: Path, preparation: Preparation | None = None) -> Path:
    """Return the folder below `root` for what is kept of one dataset folder, and of one preparation if given."""
    key = json.dumps([str(dataset.resolve()), preparation and asdict(preparation)])
    return root / f"{dataset.resolve().name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
