"""The DICOM series of a study in, one label map out: that of the same channels in a 4-D NIfTI."""

import nibabel
import numpy as np
import pytest
import torch

from medspeed.apps.brats.infer import main
from medspeed.common.data.preparation import Preparation
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import read_object
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.model import VolumeModel, save_weights
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.runs import import_weights, load_models
from medspeed.models import find_network
from medspeed.models.segresnet3d import segresnet3d
from tests.common.data.dicom_files import write_slices

NAMES = ("FLAIR", "T1w", "t1gd", "T2w")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = {"filters": 8, "blocks_down": (1, 1), "dropout": 0.0}
    preparation = Preparation((2.0, 2.0, 3.0), "zscore", None, 4)
    labelling = one_region_per_label(("background", "tumor"))
    model = VolumeModel(segresnet3d, arguments, labelling, preparation, (32, 32, 16), 1, 0.25, "fp32", modality=NAMES)
    torch.manual_seed(5)
    save_weights(folder / "drawn.safetensors", model.build().state_dict(), {})
    import_weights(folder / "run", "brats", model, folder / "drawn.safetensors")
    return folder / "run"


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    """A folder of four MRI series of a study, in another order than the model's, and their values [X, Y, Z, C]."""
    folder, rng = tmp_path_factory.mktemp("study"), np.random.default_rng(0)
    stored = [rng.integers(1, 1000, (10, 36, 40)).astype(np.uint16) for _ in NAMES]

    def says(text):
        def change(_, image):
            image.Modality, image.RescaleIntercept, image.SeriesDescription = "MR", 0, text

        return change

    for name, values in reversed([*zip(NAMES, stored, strict=True)]):
        write_slices(folder / f"series {name}", values, change=says(f"AX {name} TRA"), study="1.2.3.4")
    return folder, np.stack([values.T for values in stored], axis=3)


def test_a_study_gives_the_mask_of_the_same_channels_in_a_file(run, channels, tmp_path):
    study, values = channels
    out = {}
    affine = np.array([[-0.7, 0, 0, 10], [0, -0.8, 0, 20], [0, 0, 2.5, 30], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(values.astype(np.int16), affine), tmp_path / "a.nii.gz")
    for name, scan in (("file", tmp_path / "a.nii.gz"), ("study", study)):
        found = main(InferConfig(run, scan, tmp_path / name, device="cpu", backend="torch", overlays=False))
        assert found.status == 0
        (path,) = (tmp_path / name).glob("*.nii.gz")
        out[name] = read_volume(path)
    assert out["file"].voxels.any()
    assert np.array_equal(out["study"].voxels, out["file"].voxels)
    np.testing.assert_allclose(out["study"].affine, affine, atol=1e-5)
    (seg,) = (tmp_path / "study").glob("study-*.dcm")
    assert seg.is_file()
    (record,) = (tmp_path / "study" / "records").glob("*.json")
    assert read_object(record)["mark"]["input"][0] == values[0, 0].size  # a file of any channel that changes counts


def test_a_study_that_lacks_a_channel_is_set_aside_by_name(run, channels, tmp_path, capsys):
    study, _ = channels
    few = tmp_path / "few"
    few.mkdir()
    for name in NAMES[1:]:
        (few / name).symlink_to(study / f"series {name}")
    assert main(InferConfig(run, few, tmp_path / "out", device="cpu", backend="torch")).status == 1
    assert "of its 3 series, flair: none; each channel must match exactly one" in capsys.readouterr().out


def test_the_names_of_channels_are_kept_in_model_json(run):
    assert load_models([run], "brats", find_network).modality == NAMES
