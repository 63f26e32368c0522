"""Scan slides with a trained run: probability maps, detections, outlines for QuPath and pictures; or score patches."""

from medspeed.apps.pathology.config import ScanConfig
from medspeed.common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(ScanConfig, {}, description=__doc__)  # before torch: --help answers at once

from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from medspeed.apps.pathology.model import load_model
from medspeed.apps.pathology.scan.outputs import (
    draw_heatmap,
    find_detections,
    write_detections_csv,
    write_geojson,
    write_probability_tif,
)
from medspeed.apps.pathology.scan.scan import ProbabilityMap, View, choose_view, scan_slide
from medspeed.apps.pathology.slides.camelyon import SUFFIXES, is_slide
from medspeed.apps.pathology.slides.masks import SlideMask, tissue_mask
from medspeed.apps.pathology.slides.reader import SlidePool
from medspeed.common.console import say
from medspeed.common.files import plural, sha256_of
from medspeed.common.host_memory import keep_freed_memory, peak_memory
from medspeed.common.inference.folder_job import FolderJob, Item
from medspeed.common.inference.open_predictor import open_predictor
from medspeed.common.inference.predictions import Predictions, Record
from medspeed.common.inference.uncertain import warn_of_training
from medspeed.common.observe.plots import Timeline
from medspeed.common.ranks import choose_device, torchrun_place
from medspeed.common.run import one_line_errors

_COARSER = 1.5  # times the pixels of the training: what lies between a slide's pixels was never seen


class Scanner:
    """The network of a run, opened on a device to scan slides."""

    def __init__(self, config: ScanConfig, pool: SlidePool) -> None:
        self.config, self.pool, self.timeline = config, pool, Timeline()
        self.model, self.device = load_model(config.model), choose_device(config.device, torchrun_place()[2])
        if self.device.type == "cpu":
            keep_freed_memory()
        self.stride = config.stride if config.mode == "patches" else None
        self.opened = open_predictor(
            config.model, self.model, backend=config.backend, precision=config.precision, device=self.device
        )

    def item(self, file: Path) -> Item[Path]:
        """Return a slide with the files that come out of it; its record is written last."""
        folder, names = self.config.output / file.stem, ("probability.tif", "detections.csv", "detections.geojson")
        picture = (folder / "heatmap.png",)
        outputs = (*(folder / name for name in names), *(picture if self.config.overlays else ()))
        return Item(file.stem, file, (file,), outputs, folder / "slide.json", picture)

    def identity(self) -> Record:
        """Return everything but the slide that determines the output."""
        options = {
            "mode": self.config.mode,
            "stride": self.stride,
            "backend": self.opened.backend,
            "precision": self.opened.precision,
            "reader": self.config.reader,
            "overlays": self.config.overlays,
        }
        file = self.opened.file
        return {"weights": {file.name: sha256_of(file)}, "model": asdict(self.model), "options": options}

    def read(self, item: Item[Path]) -> tuple[View, SlideMask]:
        """Return how the network sees a slide, and where it holds tissue."""
        with self.pool.use(item.source) as slide, self.timeline.stage(item.name, "read", "tissue"):
            view, base = choose_view(slide, self.model.mpp), slide.levels[0]
            if max(base.width, base.height) <= view.span(self.model.patch_size) * view.downsample:
                raise ValueError(
                    f"{item.source}: {base.width} x {base.height} pixels is a patch, not a slide: pass the "
                    "slide it was cut from"
                )
            return view, tissue_mask(slide, assumed_mpp=view.base_mpp)

    def scan(self, item: Item[Path], given: tuple[View, SlideMask]) -> tuple[View, ProbabilityMap]:
        """Run the network on the tissue of a slide."""
        view, tissue = given
        batch = self.model.tile_batch
        if self.stride and self.opened.backend != "tensorrt":
            # As many pixels as a batch of tiles has; an engine takes no more images than it was built for.
            batch *= (self.model.tile_size // self.model.patch_size) ** 2
        predict = self.opened.predict
        with self.pool.use(item.source) as slide, self.timeline.stage(item.name, "compute", "scan", waits=True):
            return view, scan_slide(slide, self.model, predict, self.device, tissue, view, self.stride, batch)

    def write(self, item: Item[Path], scanned: tuple[View, ProbabilityMap]) -> Record:
        """Write what was found in a slide, and return what its record is to hold."""
        (view, found), stage = scanned, partial(self.timeline.stage, item.name, "write")
        tif, csv, geojson, *picture = item.outputs
        with self.pool.use(item.source) as slide:
            size = slide.levels[0].width, slide.levels[0].height
            with stage("write"):
                detections = find_detections(found, view.base_mpp)
                write_probability_tif(tif, found, slide.mpp, slide.name)
                write_detections_csv(csv, detections)
                write_geojson(geojson, found, size)
            for path in picture:
                with stage("overlay"):
                    draw_heatmap(path, slide, found)
        mpp, damaged = self.model.mpp, [list(tile) for tile in self.pool.damaged.get(item.source, ())]
        doubts = {
            "NO TISSUE found, nothing scanned": not found.tiles,
            f"{len(damaged)} DAMAGED TILES treated as white": damaged,
            "pixels of unknown size": bool(mpp) and slide.mpp is None,
            f"pixels of {slide.mpp} um, in training {mpp} um": mpp and slide.mpp and slide.mpp > _COARSER * mpp,
        }
        return {
            "uncertain": [doubt for doubt, holds in doubts.items() if holds],
            "probability": float(found.values.max(initial=0)),
            "detections": len(detections),
            "tiles": found.tiles,
            "damaged_tiles": damaged,  # level, column, row
            "reader": slide.reader,
            "level": view.level,
            "mpp": slide.mpp,
            "size": size,
            "seen_mpp": view.seen_mpp,
            "view": view.reason,
            "stride_px": found.stride,
            "peak_memory_mib": round(peak_memory() / 2**20),
            "device": str(self.device),
            "seconds": self.timeline.seconds(item.name),
        }


def main(config: ScanConfig) -> Predictions:
    """Scan every slide; one that cannot be read is set aside, and the others are done all the same.

    Under torchrun each process takes its share of the slides. A folder of images without slides is one of patches,
    which are scored.
    """
    from medspeed.apps.pathology.patches.score import find_patches, score_patches  # here: they load what trains

    if patches := find_patches(config.input):
        return score_patches(patches, config)
    with closing(SlidePool(config.reader)) as pool:
        scanner = Scanner(config, pool)
        items = [scanner.item(file) for file in find_slides(config.input)]
        identity, opened = scanner.identity(), scanner.opened
        job = FolderJob("slide", config.output, items, identity, scanner.read, scanner.scan, scanner.write, _line)
        share = len(job.share())
        say(f"{plural(share, 'slide')}, {opened.backend} {opened.precision} on {scanner.device}: {opened.reason}")
        warn_of_training(config.model)
        return job.run(job.unfinished())


def find_slides(path: Path) -> list[Path]:
    """Return the slides of a folder in order, or the one file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two slides have one name, so that their outputs would have one folder; a name is none of a folder;
            or the folder holds patches.
    """
    if path.is_file():
        if not path.stem.strip("."):
            raise ValueError(f"{path}: without its suffix the name is {path.stem!r}, no valid folder name: rename it")
        return [path]
    labels = (path.parent if path.name == "images" else path) / "labels.csv"
    if labels.is_file():
        raise ValueError(
            f"{path}: contains patches ({labels}), not slides: pass the slides they were cut from, or save the patches "
            "as PNG to score them"
        )
    files = sorted(file for file in path.glob("*") if is_slide(file))
    if not files:
        raise FileNotFoundError(f"{path}: no such file, or a folder without slides ({', '.join(SUFFIXES)})")
    names = [file.stem for file in files]
    twice = sorted(file.name for file in files if names.count(file.stem) > 1)
    if twice:
        raise ValueError(f"{path}: {' and '.join(twice)} would share an output folder: rename one")
    return files


def _line(record: Record) -> str:
    """Return what the record of a slide says."""
    parts = [
        f"{record['reader']}, {record['view']}, probability {record['probability']:.3f}",
        f"{plural(record['detections'], 'detection')}, peak memory {record['peak_memory_mib']} MiB",
        *(f"UNCERTAIN: {doubt}" for doubt in record["uncertain"]),
        *(f"{name} {seconds:.2f} s" for name, seconds in record["seconds"].items()),
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG).status)
