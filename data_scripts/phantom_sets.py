"""Phantom sets on the disk: MSD layout, a case per thread, same bytes for same parameters, safe to interrupt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from isal import igzip

from common.files import atomic_path, write_json
from data_scripts.set_folder import MARKER, Parameters, claim, on_all_cores

_LIST = "dataset.json"
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
    claim(folder, _LIST, parameters)
    todo = [i for i, name in enumerate(names) if not all(path.exists() for path in _paths(folder, name))]
    if todo:
        _write_cases(folder, {i: names[i] for i in todo}, draw, f"{dataset['name']}: making phantoms", progress)
    if todo or not (folder / _LIST).exists():
        pairs = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in names]
        axes = "4D" if len(dataset["modality"]) > 1 else "3D"
        lists = {"numTraining": len(pairs), "numTest": 0, "training": pairs, "test": []}
        write_json(
            folder / _LIST,
            {**dataset, "tensorImageSize": axes, **lists, "synthetic": True, "phantom": parameters},
        )
    (folder / MARKER).unlink(missing_ok=True)
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

    on_all_cores(write_case, list(names), _MOST_WORKERS, description, "case", progress)


def _write_nifti(path: Path, voxels: npt.NDArray[Any], affine: npt.NDArray[np.float64]) -> None:
    """Write a .nii.gz whose bytes depend on nothing but voxels and affine (no time stamp, no file name)."""
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = b"synthetic phantom, not a patient"
    with atomic_path(path) as part:
        part.write_bytes(igzip.compress(image.to_bytes(), 1, mtime=0))


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / "imagesTr" / f"{name}.nii.gz", folder / "labelsTr" / f"{name}.nii.gz"
