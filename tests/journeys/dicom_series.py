"""Write a NIfTI file as a series of CT slices: `python dicom_series.py SCAN.nii.gz FOLDER`."""

import sys
from pathlib import Path

import nibabel
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.common.data.dicom_files import write_slices

if __name__ == "__main__":
    image = nibabel.as_closest_canonical(nibabel.load(sys.argv[1]))
    # DICOM's axes run to the left, the back and the head.
    affine = np.diag([-1, -1, 1, 1]) @ image.affine @ np.diag([-1, -1, 1, 1])
    voxels = np.asarray(image.dataobj)[::-1, ::-1]
    first = image.affine @ [image.shape[0] - 1, image.shape[1] - 1, 0, 1]
    x, y, z = np.linalg.norm(affine[:3, :3], axis=0)
    stored = np.clip(np.rint(voxels) + 1024, 0, 4095).astype(np.uint16).transpose(2, 1, 0)
    write_slices(
        Path(sys.argv[2]),
        np.ascontiguousarray(stored),
        origin=first[:3] * [-1, -1, 1],
        turn=[*(affine[:3, 0] / x), *(affine[:3, 1] / y)],
        step=affine[:3, 2],
        spacing=(y, x),
    )
