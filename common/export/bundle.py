"""MONAI bundles of trained networks: they run with MONAI alone and give the same label maps, or probabilities.

Our preparation, windows and way back equal MONAI's own transforms and inferer (see `common.data.preparation`,
`common.inference.windows`, `common.inference.restore`), so that the bundle is a configuration of those and no code.

Source: MONAI bundle specification (docs.monai.io, mb_specification); configurations of the MONAI model zoo.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from common.data.preparation import Preparation
from common.export.bundle_files import (
    IGNITE,
    Config,
    NetworkConfig,
    bundle_metadata,
    bundle_usage,
    finish_bundle,
    twin_weights,
)
from common.inference.labelling import Labelling
from common.inference.segmentation import SegmentationModel

# On a plane that both grids share, MONAI's resampling takes 1e-15 of the neighbour too, and 0 would be foreground.
_WITHOUT_TRACES = "$lambda voxels: voxels * (voxels.abs() > 1e-10 * voxels.abs().max())"
_PATCH_BATCH = 16  # patches at once
_AXES = [["L", "R"], ["P", "A"], ["I", "S"]]


def write_bundle(
    folder: Path, run: Path, model: SegmentationModel, network: NetworkConfig, *, version: str = "1.0.0"
) -> Path:
    """Write a segmentation run as a MONAI bundle: configs/, models/model.pt, docs/README.md, LICENSE, SHA256SUMS.

    In the bundle, `python -m monai.bundle run --config_file configs/inference.json --bundle_root . --dataset_dir FOLDER
    --output_dir RESULTS` writes for each NIfTI file a label map of the same name, as torch in float32 gives it here.

    Args:
        folder: the bundle's; empty, or to be made.
        run: folder of the run, with best.safetensors and model.json.
        model: the run's.
        network: the network as MONAI's own class and arguments; the run's weights must fit it.
        version: of the bundle.

    Returns:
        `folder`.

    Raises:
        FileExistsError: `folder` holds something.
        FileNotFoundError: the run has no weights or no model.json.
        ValueError: the weights do not fit the model or `network`, or that computes something else.
    """
    configs = {"inference": _inference(model, network), "metadata": _segmentation_metadata(run, model, version)}
    shape = (1, model.preparation.channels, *model.window_size)
    weights = twin_weights(model.build(run / "best.safetensors"), network, shape)
    return finish_bundle(folder, run, configs, weights, _SEGMENTATION_USAGE)


def write_patch_bundle(
    folder: Path,
    run: Path,
    network: nn.Module,
    twin: NetworkConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    patch_size: int,
    version: str = "1.0.0",
) -> Path:
    """Write a classifier of patches as a MONAI bundle that scores a folder of PNG files into probabilities.csv.

    Args:
        folder: the bundle's; empty, or to be made.
        run: folder of the run, with model.json.
        network: ours with the run's weights, from [B, 3, Y, X] in [-1, 1] to one logit a patch.
        twin: the same network as MONAI's own class and arguments.
        weights: the run's, by the names that `twin` gives them.
        patch_size: side of a patch in pixels.
        version: of the bundle.

    Returns:
        `folder`.

    Raises:
        FileExistsError: `folder` holds something.
        FileNotFoundError: the run has no model.json.
        ValueError: the weights do not fit `twin`, or that computes something else.
    """
    sides = {"spatial_shape": [patch_size, patch_size], "dtype": "float32", "is_patch_data": True}
    colours = {"0": "red", "1": "green", "2": "blue"}
    image = {"type": "image", "format": "RGB", "num_channels": 3, **sides, "value_range": [-1, 1]}
    pred = {"type": "probabilities", "format": "classification", "num_channels": 1, "dtype": "float32"}
    described = bundle_metadata(
        run, version, "Classification of patches as tumour or normal", "PNG",
        {"pillow": metadata.version("pillow"), "pytorch-ignite": IGNITE},
        {**image, "channel_def": colours},
        {**pred, "spatial_shape": [1], "value_range": [0, 1], "is_patch_data": True, "channel_def": {"0": "tumour"}},
    )  # fmt: skip
    plain = twin_weights(network, twin, (1, 3, patch_size, patch_size), weights)
    configs = {"inference": _patch_inference(twin), "metadata": described}
    return finish_bundle(folder, run, configs, plain, _PATCH_USAGE)


def _inference(model: SegmentationModel, network: NetworkConfig) -> Config:
    """Return inference.json of a segmentation bundle."""
    inferer = {
        "_target_": "SlidingWindowInferer",
        "roi_size": list(model.window_size),
        "sw_batch_size": model.window_batch,
        "overlap": model.overlap,
    }
    before, after = _preprocessing(model.preparation), _postprocessing(model.labelling)
    return _evaluation(network, ("nii", "nii.gz"), 1, before, inferer, after)


def _patch_inference(network: NetworkConfig) -> Config:
    """Return inference.json of a patch bundle."""
    bounds = {"a_min": 0.0, "a_max": 255.0, "b_min": -1.0, "b_max": 1.0}
    convert = "$lambda image: image.convert('RGB')"
    before: list[Config] = [
        {
            "_target_": "LoadImaged",
            "keys": "image",
            "reader": "PILReader",
            "reverse_indexing": False,
            "converter": convert,
        },
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "ScaleIntensityRanged", "keys": "image", **bounds},
    ]
    after = [{"_target_": "Activationsd", "keys": "pred", "sigmoid": True}]
    config = _evaluation(network, ("png",), _PATCH_BATCH, before, {"_target_": "SimpleInferer"}, after)
    saver = {
        "_target_": "ClassificationSaver",
        "output_dir": "@output_dir",
        "filename": "probabilities.csv",
        "batch_transform": "$lambda batch: [item['image'].meta for item in batch]",
        "output_transform": "$lambda output: [item['pred'] for item in output]",
    }
    return {**config, "handlers": [saver], "evaluator": {**config["evaluator"], "val_handlers": "@handlers"}}


def _evaluation(
    network: NetworkConfig,
    suffixes: Sequence[str],
    batch: int,
    before: list[Config],
    inferer: Config,
    after: list[Config],
) -> Config:
    """Return what goes over a folder of files, with the names that the MONAI model zoo gives its parts."""
    found = " + ".join(f"glob.glob(os.path.join(@dataset_dir, '*.{suffix}'))" for suffix in suffixes)
    return {
        "imports": ["$import glob", "$import os", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$os.path.join(@bundle_root, 'scans')",
        "output_dir": "$os.path.join(@bundle_root, 'results')",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "scans": f"$sorted({found})",
        "network_def": dict(network),
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": before},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': scan} for scan in @scans]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": batch, "num_workers": 0},
        "inferer": inferer,
        "postprocessing": {"_target_": "Compose", "transforms": after},
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "amp": False,
        },
        "initialize": [
            "$@network.load_state_dict(torch.load(os.path.join(@bundle_root, 'models', 'model.pt'), "
            "map_location=@device, weights_only=True))"
        ],
        "run": ["$@evaluator.run()"],
    }


def _preprocessing(preparation: Preparation) -> list[Config]:
    """Return the transforms that equal our preparation."""
    crop = {"_target_": "CropForegroundd", "keys": "image", "source_key": "image", "allow_smaller": True}
    if preparation.window is not None:
        low, high = preparation.window
        bounds = {"a_min": low, "a_max": high, "b_min": 0.0, "b_max": 1.0, "clip": True}
        intensities = [{"_target_": "ScaleIntensityRanged", "keys": "image", **bounds}, crop]
    else:
        # The crop comes first: after it, what lies below the mean is negative, and 0 no longer only the background.
        normalise = {"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True, "channel_wise": True}
        intensities = [{**crop, "select_fn": "$lambda voxels: voxels != 0"}, normalise]
    return [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": _AXES},
        {"_target_": "Spacingd", "keys": "image", "pixdim": list(preparation.spacing), "mode": "bilinear"},
        {"_target_": "Lambdad", "keys": "image", "func": _WITHOUT_TRACES},
        *intensities,
    ]


def _postprocessing(labelling: Labelling) -> list[Config]:
    """Return the transforms that carry logits to the file's grid, take the labels there and write them."""
    return [
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True}
        if labelling.exclusive
        else {"_target_": "Lambdad", "keys": "pred", "func": f"$lambda logits: {painting(labelling)}"},
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "",
            "output_dtype": "uint8",
            "separate_folder": False,
            "resample": False,
        },
    ]


def painting(labelling: Labelling) -> str:
    """Return `Labelling.labels_of` for regions as one expression over `logits` [K, X, Y, Z], a MONAI tensor [1, ...].

    Regions of few members paint over those of many, and of rivals (equally many members) the highest logit wins.
    """
    regions = labelling.regions
    expression = "torch.zeros_like(logits[:1])"
    for _, group in groupby(labelling.order(), key=lambda number: len(regions[number].members)):
        rivals = list(group)
        paints = [float(regions[number].paints) for number in rivals]
        if len(rivals) == 1:
            found, paint = f"logits[{rivals[0]}:{rivals[0] + 1}]", str(paints[0])
        else:
            found = f"logits[{rivals}].amax(0, keepdim=True)"
            paint = f"torch.tensor({paints}, device=logits.device)[logits[{rivals}].argmax(0, keepdim=True)]"
        expression = f"torch.where({found} > 0, {paint}, {expression})"
    return expression


def _segmentation_metadata(run: Path, model: SegmentationModel, version: str) -> Config:
    """Return metadata.json of a segmentation bundle."""
    names = [region.name for region in model.labelling.regions]
    outputs = ["background", *names] if model.labelling.exclusive else names
    window, channels = model.preparation.window, model.preparation.channels
    image = {
        "type": "image",
        "format": "hounsfield" if window else "magnitude",
        "num_channels": channels,
        "spatial_shape": list(model.window_size),
        "dtype": "float32",
        "value_range": [0, 1] if window else [],
        "is_patch_data": True,
        "channel_def": {str(number): f"channel {number} of the file" for number in range(channels)},
    }
    pred = {
        "type": "logits",
        "format": "segmentation",
        "num_channels": model.labelling.channels,
        "spatial_shape": list(model.window_size),
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": True,
        "channel_def": {str(number): name for number, name in enumerate(outputs)},
    }
    task = f"Segmentation of {', '.join(names)}"
    packages = {"nibabel": metadata.version("nibabel"), "pytorch-ignite": IGNITE}
    return bundle_metadata(run, version, task, "NIfTI", packages, image, pred)


_SEGMENTATION_USAGE = bundle_usage(
    "nibabel",
    "The folder holds .nii.gz or .nii files; RESULTS gets a label map (.nii.gz) of each name and grid.",
)
_PATCH_USAGE = bundle_usage(
    "pillow",
    "The folder holds .png files of the network's size; RESULTS/probabilities.csv gets `file,probability` for each.",
)
