"""Scan slides with a trained run: maps of tumour probability, detections and outlines for QuPath, a picture of each."""

from apps.pathology.options import ScanConfig
from common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(ScanConfig, {}, description=__doc__)  # before torch: --help answers at once

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from apps.pathology.heatmap import draw_heatmap
from apps.pathology.model import PathologyModel, load_model
from apps.pathology.outputs import find_detections, write_detections_csv, write_geojson, write_probability_tif
from apps.pathology.scan import ProbabilityMap, dense_scan, patch_scan
from apps.pathology.slide_set import MASK_ENDING
from apps.pathology.tissue import TissueMask, tissue_mask
from apps.pathology.view import View, choose_view
from common.data.slides import Slide, open_slide
from common.files import sha256_of, write_json
from common.inference.predictors import OpenedPredictor, open_predictor, ran_file
from common.observe.host_memory import keep_freed_memory, peak_memory
from common.observe.run import choose_device, one_line_errors, torchrun_place, wait_for_all
from common.observe.timing import Clock

SUFFIXES = {".bif", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff", ".vms", ".vmu"}
RECORD = "slide.json"
"""Of a slide's folder, written last: where it is and fits, the slide is finished."""
OUTPUTS = (RECORD, "probability.tif", "detections.csv", "detections.geojson", "heatmap.png")


@dataclass(frozen=True)
class Scanner:
    """What all slides are scanned with."""

    config: ScanConfig
    model: PathologyModel
    opened: OpenedPredictor
    device: torch.device
    identity: dict[str, Any]  # all but the slide that decides what comes out


def main(config: ScanConfig) -> int:
    """Scan every slide; return 0, or 1 where one could not be read (the others are done all the same).

    Under torchrun each process takes its share of the slides.
    """
    scanner = _open_scanner(config)
    rank, ranks, _ = torchrun_place()
    files = find_slides(config.input)[rank::ranks]
    opened = scanner.opened
    tqdm.write(f"{len(files)} slides, {opened.backend} {opened.precision} on {scanner.device}: {opened.reason}")
    failed = []
    for file in tqdm(files, unit="slide", disable=len(files) == 1):
        folder = config.output / file.stem
        try:
            mark = {**scanner.identity, "slide": [file.stat().st_size, file.stat().st_mtime_ns]}
            if _is_finished(folder / RECORD, mark):
                tqdm.write(f"{file.name}: kept, it was finished with the same weights and options")
            else:
                _scan_slide(file, folder, scanner, mark)
        except (ValueError, FileNotFoundError, PermissionError) as error:
            failed.append(file.name)
            tqdm.write(f"set aside: {error}")
    if failed:
        tqdm.write(f"{len(failed)} of {len(files)} slides could not be scanned: {', '.join(failed)}")
    wait_for_all()
    return 1 if failed else 0


def find_slides(path: Path) -> list[Path]:
    """Return the slides of a folder in order, or the one file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two slides have one name, so that their outputs would have one folder.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if file.suffix.lower() in SUFFIXES and _is_slide(file))
    if not files:
        raise FileNotFoundError(f"{path}: no such file, or a folder without slides ({', '.join(sorted(SUFFIXES))})")
    names = [file.stem for file in files]
    twice = sorted(file.name for file in files if names.count(file.stem) > 1)
    if twice:
        raise ValueError(f"{path}: {' and '.join(twice)} would share a folder of outputs: rename one")
    return files


def _is_slide(file: Path) -> bool:
    return not file.name.startswith(".") and not file.stem.lower().endswith(MASK_ENDING)


def _open_scanner(config: ScanConfig) -> Scanner:
    """Read the model, open it on the device, and note the weights and options that decide what comes out."""
    model, device = load_model(config.model), choose_device(config.device, torchrun_place()[2])
    if device.type == "cpu":
        keep_freed_memory()
    weights = config.model / "best.safetensors"
    opened = open_predictor(
        config.model,
        lambda: model.build(weights),
        backend=config.backend,
        precision="fp32" if config.precision == "auto" else config.precision,
        torch_precision=model.precision if config.precision == "auto" else None,
        device=device,
    )
    ran = ran_file(config.model, opened)
    options = {
        "mode": config.mode,
        "stride": config.stride if config.mode == "patches" else None,
        "backend": opened.backend,
        "precision": opened.precision,
        "reader": config.reader,
        "overlays": config.overlays,
    }
    identity = {"weights": {ran.name: sha256_of(ran)}, "model": asdict(model), "options": options}
    return Scanner(config, model, opened, device, identity)


def _is_finished(record: Path, mark: dict[str, Any]) -> bool:
    """Return whether a slide's record is there and of the same slide, weights and options."""
    try:
        return bool(json.loads(record.read_text(encoding="utf-8")).get("mark") == mark)
    except (ValueError, FileNotFoundError):  # damaged, or none
        return False


def _scan_slide(file: Path, folder: Path, scanner: Scanner, mark: dict[str, Any]) -> None:
    """Scan one slide: tissue, tiles, outputs, and its record last."""
    clock = Clock()
    with open_slide(file, scanner.config.reader) as slide:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*(folder / name for name in OUTPUTS), *folder.glob(".part-*")):  # of other options, or a killed run
            old.unlink(missing_ok=True)
        view, size = choose_view(slide, scanner.model.mpp), (slide.levels[0].width, slide.levels[0].height)
        tqdm.write(f"{file.name}: {slide.reader}, {view.reason}")
        with clock.stage("tissue"):
            tissue = tissue_mask(slide, assumed_mpp=view.base_mpp)
        with clock.stage("scan"):
            found = _scan(slide, scanner, tissue, view)
        with clock.stage("write"):
            detections = find_detections(found, view.base_mpp)
            write_probability_tif(folder / "probability.tif", found, slide.mpp, slide.name)
            write_detections_csv(folder / "detections.csv", detections)
            write_geojson(folder / "detections.geojson", found, size)
        if scanner.config.overlays:
            with clock.stage("overlay"):
                draw_heatmap(folder / "heatmap.png", slide, found)
        damaged = slide.damaged_tiles
        record = {
            "name": slide.name,
            "probability": float(found.values.max(initial=0)),
            "detections": len(detections.scores),
            "tiles": found.tiles,
            "damaged_tiles": [list(tile) for tile in damaged],  # level, column, row
            "reader": slide.reader,
            "level": view.level,
            "mpp": slide.mpp,
            "size": size,
            "seen_mpp": view.seen_mpp,
            "view": view.reason,
            "stride_px": found.stride,
            "peak_memory_mib": round(peak_memory() / 2**20),
            "device": str(scanner.device),
            "seconds": clock.stages(),
            "mark": mark,
        }
    write_json(folder / RECORD, record)
    tqdm.write(
        f"{file.name}: probability {record['probability']:.3f}, {len(detections.scores)} detections, "
        f"peak memory {record['peak_memory_mib']} MiB, "
        + (f"{len(damaged)} DAMAGED TILES taken as white, " if damaged else "")
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.stages().items())
    )


def _scan(slide: Slide, scanner: Scanner, tissue: TissueMask, view: View) -> ProbabilityMap:
    model, predict = scanner.model, scanner.opened.predict
    if scanner.config.mode == "dense":
        return dense_scan(slide, model, predict, scanner.device, tissue, view)
    # As many pixels as a batch of tiles has; an engine takes no more images than it was built for.
    batch = model.tile_batch
    if scanner.opened.backend != "tensorrt":
        batch *= (model.tile_size // model.patch_size) ** 2
    stride = scanner.config.stride
    return patch_scan(slide, model, predict, scanner.device, tissue, view, stride=stride, batch=batch)


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG))
