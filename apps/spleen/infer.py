"""Segment scans with a trained run: NIfTI in, label NIfTI out on the input's own grid, with a picture of each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import parse_config


@dataclass(frozen=True)
class InferConfig:
    """What inference is told.

    Args:
        model: folder of a training run.
        input: a .nii.gz or .nii file, or a folder of them.
        output: folder for the label maps; must not be the input's.
        backend: tensorrt, onnxruntime, torch, or auto (an engine that fits this GPU, else the fastest that is here).
        precision: fp32, fp16, bf16 (torch only), or auto (the run's own with torch, else fp32).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a picture of each scan.
    """

    model: Path
    input: Path
    output: Path
    backend: Literal["auto", "tensorrt", "onnxruntime", "torch"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: str = "auto"
    overlays: bool = True

    def __post_init__(self) -> None:
        """Check the folders.

        Raises:
            ValueError: the output would overwrite the input.
        """
        folder = self.input if self.input.is_dir() else self.input.parent
        if self.output.resolve() == folder.resolve():
            raise ValueError(f"output {self.output}: must not be the folder of the input, whose files it would replace")


if __name__ == "__main__":
    CONFIG = parse_config(InferConfig, {}, description=__doc__)  # before torch: --help answers at once

import torch
from tqdm import tqdm

from apps.spleen.evaluate import predict_labels
from apps.spleen.model import SpleenModel, load_model
from common.data.preparation import prepare_volume
from common.data.volumes import read_volume, write_label
from common.files import write_json
from common.inference.predictors import Predictor, open_predictor
from common.observe.overlays import draw_overlay
from common.observe.run import choose_device, one_line_errors
from common.observe.timing import Clock


def main(config: InferConfig) -> int:
    """Segment every scan; return 0, or 1 where a scan could not be read (the others are done all the same)."""
    device = choose_device(config.device)
    model = load_model(config.model)
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
    print(f"{len(files)} scans, {opened.backend} {opened.precision} on {device}: {opened.reason}")
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
        print(f"{len(failed)} of {len(files)} scans could not be segmented: {', '.join(failed)}")
    return 1 if failed else 0


def segment(
    file: Path, config: InferConfig, model: SpleenModel, predictor: Predictor, device: torch.device, clock: Clock
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
            draw_overlay(
                picture,
                image,
                labels,
                volume.affine,
                names=model.labels,
                window=model.preparation.window,
                title=file.name,
            )


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


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG))
