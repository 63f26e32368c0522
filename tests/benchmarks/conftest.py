"""Two small heads in MSD layout, 24 voxels of 1 mm a side, and how to run sides in this process."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from medspeed.benchmarks import harness
from medspeed.common.files import write_json

LABELS = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
AFFINE = np.array([[-1, 0, 0, 20], [0, -1, 0, 30], [0, 0, 1, -12], [0, 0, 0, 1.0]])  # LPS, as MSD's own scans


@pytest.fixture(scope="session")
def small_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Brains in the middle of the box; a ball of edema, in it non-enhancing, in it enhancing tumour, each brighter."""
    folder = tmp_path_factory.mktemp("heads")
    places = np.stack(np.meshgrid(*[np.arange(24)] * 3, indexing="ij"), -1)
    training = []
    for number in range(2):
        draw = np.random.default_rng(number)
        brain = np.linalg.norm(places - 11.5, axis=-1) < 11
        off_centre = np.linalg.norm(places - (9 + 2 * number, 12, 11), axis=-1)
        label = ((off_centre < 7).astype(np.uint8) + (off_centre < 5) + (off_centre < 3)).astype(np.uint8)
        image = draw.integers(80, 120, (24, 24, 24, 4)) + 60 * label[..., None]
        names = {}
        for key, kind, voxels in (("image", "imagesTr", image * brain[..., None]), ("label", "labelsTr", label)):
            path = folder / kind / f"head_{number}.nii.gz"
            path.parent.mkdir(exist_ok=True)
            nibabel.save(
                nibabel.Nifti1Image(voxels.astype(np.int16 if kind == "imagesTr" else np.uint8), np.eye(4)), path
            )
            names[key] = f"./{kind}/{path.name}"
        training.append(names)
    modality = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    write_json(
        folder / "dataset.json",
        {"name": "Heads", "modality": modality, "labels": LABELS, "training": training, "test": []},
    )
    return folder


@pytest.fixture
def in_this_process(monkeypatch):
    """Run here what has a process of its own: without its seconds of imports."""
    monkeypatch.setattr(harness, "in_a_process", lambda measured, *arguments: measured(*arguments))
