"""Phantom sets on the disk: MSD layout, one case per thread, the same bytes for the same parameters, safe to interrupt.

`dataset.json` is written last, so that a folder that has one is whole. Until then `unfinished.json` holds the
parameters: a second run with the same ones goes on where the first one stopped, others are refused.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from isal import igzip
from tqdm import tqdm

from common.files import atomic_path, write_json

Parameters = dict[str, str | int | None]
_MARKER = "unfinished.json"
_MOST_WORKERS = 16  # a case of MSD's size takes about half a gigabyte while it is made


@dataclass(frozen=True)
class Scan:
    """An image and its label [X, Y, Z] uint8 on one grid, with the affine [4, 4] to RAS mm.

    `image`: int16, [X, Y, Z] or, with several channels, [X, Y, Z, C].
    """

    image: npt.NDArray[np.int16]
    label: npt.NDArray[np.uint8]
    affine: npt.NDArray[np.float64]


def write_set(
    folder: Path,
    names: Sequence[str],
    draw: Callable[[int], Scan],
    dataset: dict[str, Any],
    parameters: Parameters,
    progress: bool = True,
) -> Path:
    """Write the cases that are missing, then `dataset.json`; return the folder.

    Args:
        folder: where the set goes; new, empty, or holding this very set, whole or unfinished.
        names: the cases' names without suffix.
        draw: makes the case of an index, the same each time; called from several threads.
        dataset: the entries of `dataset.json` besides the list of cases: name, description, modality, labels, licence;
            several modalities make "tensorImageSize" 4D.
        parameters: all that decides the set's bytes; kept in `dataset.json` under "phantom".
        progress: whether to show a progress bar with the time left.

    Raises:
        ValueError: the folder holds something else.
    """
    _claim(folder, parameters)
    todo = [i for i, name in enumerate(names) if not all(path.exists() for path in _paths(folder, name))]
    if todo:
        _write_cases(folder, {i: names[i] for i in todo}, draw, f"{dataset['name']}: making phantoms", progress)
    if todo or not (folder / "dataset.json").exists():
        pairs = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in names]
        axes = "4D" if len(dataset["modality"]) > 1 else "3D"
        lists = {"numTraining": len(pairs), "numTest": 0, "training": pairs, "test": []}
        write_json(
            folder / "dataset.json",
            {**dataset, "tensorImageSize": axes, **lists, "synthetic": True, "phantom": parameters},
        )
    (folder / _MARKER).unlink(missing_ok=True)
    return folder


def _write_cases(
    folder: Path, names: dict[int, str], draw: Callable[[int], Scan], description: str, progress: bool
) -> None:
    """Draw and write cases on all cores; the first failure stops the rest and is raised."""

    def write_case(index: int) -> None:
        scan = draw(index)
        image, label = _paths(folder, names[index])
        _write_nifti(image, scan.image, scan.affine)
        _write_nifti(label, scan.label, scan.affine)

    workers = min(os.cpu_count() or 1, len(names), _MOST_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(write_case, index) for index in names]
        try:
            for job in tqdm(as_completed(jobs), description, len(jobs), unit="case", disable=not progress):
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def _write_nifti(path: Path, voxels: npt.NDArray[Any], affine: npt.NDArray[np.float64]) -> None:
    """Write a .nii.gz whose bytes depend on nothing but voxels and affine (no time stamp, no file name)."""
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = b"synthetic phantom, not a patient"
    with atomic_path(path) as part:
        part.write_bytes(igzip.compress(image.to_bytes(), 1, mtime=0))


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / "imagesTr" / f"{name}.nii.gz", folder / "labelsTr" / f"{name}.nii.gz"


def _claim(folder: Path, parameters: Parameters) -> None:
    """Mark the folder as this set's own, or refuse it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to write the phantoms to")
    whole, begun = folder / "dataset.json", folder / _MARKER
    held = _parameters(whole) if whole.exists() else _parameters(begun)
    if held == parameters:
        return
    if held is not None:
        changed = ", ".join(
            f"{key} {held.get(key)!r} instead of {value!r}"
            for key, value in parameters.items()
            if held.get(key) != value
        )
        raise ValueError(f"{folder} holds another phantom set ({changed}): name another folder, or delete that one")
    # hidden files are no content: a killed run may leave the part it was writing, a desktop its own notes
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    if others:
        raise ValueError(f"{folder} holds other files ({sorted(others)[0]}): name a new or empty folder")
    write_json(begun, parameters)


def _parameters(path: Path) -> Parameters | None:
    """Return the parameters a set was made with; None where the file is missing or not ours."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    held = content.get("phantom") if path.name != _MARKER and isinstance(content, dict) else content
    return held if isinstance(held, dict) else None
