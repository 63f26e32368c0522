"""Cleaning of label maps: the largest connected part of a structure, and no parts that are too small to be one."""

import cc3d
import numpy as np

from common.inference.labelling import Labelling

_CONNECTIVITY = 26  # voxels that share a corner belong together


def clean_labels(
    labels: np.ndarray, labelling: Labelling, voxel_ml: float, *, largest: bool = False, smallest_ml: float = 0.0
) -> np.ndarray:
    """Return a label map without the connected parts that are not wanted; they become background.

    Labels that exclude each other are cleaned one by one. Where regions overlap, as those of a tumour do, a part is a
    connected part of all of them together: cleaned apart, an inner region could lose what the outer one keeps.

    Args:
        labels: [X, Y, Z] uint8; it is left as it is.
        labelling: what the labels stand for.
        voxel_ml: volume of a voxel.
        largest: keep only the part of the most voxels.
        smallest_ml: parts below it are dropped; 0 keeps all.
    """
    fewest = int(np.ceil(smallest_ml / voxel_ml))
    if not (largest or fewest > 1) or not labels.any():
        return labels
    if not labelling.exclusive:
        return np.where(_kept(labels > 0, largest, fewest), labels, np.uint8(0))
    cleaned = np.zeros_like(labels)
    for region in labelling.regions:
        (number,) = region.members
        cleaned[_kept(labels == number, largest, fewest)] = number
    return cleaned


def _kept(mask: np.ndarray, largest: bool, fewest: int) -> np.ndarray:
    """Return the part of a mask that is wanted, bool [X, Y, Z]."""
    parts = cc3d.connected_components(mask, connectivity=_CONNECTIVITY)
    voxels = np.bincount(parts.ravel(order="K"))
    voxels[0] = 0
    wanted = voxels >= max(1, fewest)
    if largest and len(voxels) > 1:
        wanted &= np.arange(len(voxels)) == voxels.argmax()
    found: np.ndarray = wanted[parts]
    return found
