"""Segment scans: NIfTI in, label NIfTI out on the input's own grid, with a picture of each."""

from pathlib import Path

import torch
from tqdm import tqdm

from common.data.preparation import prepare_volume
from common.data.volumes import read_volume, write_label
from common.files import write_json
from common.inference.options import InferConfig
from common.inference.predictors import Predictor, open_predictor
from common.inference.segmentation import SegmentationModel, predict_labels
from common.observe.host_memory import keep_freed_memory
from common.observe.overlays import draw_overlay
from common.observe.run import choose_device
from common.observe.timing import Clock


def segment_scans(config: InferConfig, model: SegmentationModel) -> int:
    """Segment every scan; return 0, or 1 where a scan could not be read (the others are done all the same)."""
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    files = find_scans(config.input)
    exact = "fp32" if config.precision == "auto" else config.precision
    opened = open_predictor(
        config.model,
        lambda: model.build(config.model / "best.safetensors"),
        backend=config.backend,
        precision=exact,
        torch_precision=model.precision if config.precision == "auto" else None,
        device=device,
    )
    tqdm.write(f"{len(files)} scans, {opened.backend} {opened.precision} on {device}: {opened.reason}")
    timings, failed = {}, {}
    bar = tqdm(files, unit="scan", disable=len(files) == 1)
    for file in bar:
        clock = Clock()
        try:
            segment(file, config, model, opened.predict, device, clock)
        except (ValueError, FileNotFoundError) as error:
            failed[file.name] = str(error)
            tqdm.write(f"set aside: {error}")
            continue
        timings[file.name] = clock.stages()
        tqdm.write(f"{file.name}: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in clock.stages().items()))
    write_json(
        config.output / "timings.json", {"backend": opened.backend, "precision": opened.precision, "seconds": timings}
    )
    if failed:
        tqdm.write(f"{len(failed)} of {len(files)} scans could not be segmented: {', '.join(failed)}")
    return 1 if failed else 0


def segment(
    file: Path, config: InferConfig, model: SegmentationModel, predictor: Predictor, device: torch.device, clock: Clock
) -> None:
    """Segment one scan: decode, prepare, windows, restore, write, draw."""
    with clock.stage("decode"):
        volume = read_volume(file, model.preparation.channels)
    with clock.stage("prepare"):
        case = prepare_volume(file.name, volume, model.preparation, device, torch.float32)
    labels = predict_labels(case, predictor, model, device, clock)
    with clock.stage("write"):
        write_label(config.output / file.name, labels, volume.affine)
    if config.overlays:
        with clock.stage("overlay"):
            image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
            picture = config.output / f"{file.name.split('.nii')[0]}.png"
            names, window = model.labelling.labels, model.preparation.window
            draw_overlay(picture, image, labels, volume.affine, names=names, window=window, title=file.name)


def find_scans(path: Path) -> list[Path]:
    """Return the NIfTI files of a folder in order, or the one file.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*.nii*") if file.suffixes[-1] in {".gz", ".nii"} and file.name[0] != ".")
    if not files:
        raise FileNotFoundError(f"{path}: no such file, or a folder without .nii.gz or .nii files")
    return files
