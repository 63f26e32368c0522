"""Scan slides with a trained run: probability maps, detections, outlines for QuPath and pictures; or score patches."""

from medspeed.apps.pathology.config import ScanConfig
from medspeed.common.config import parse_config

if __name__ == "__main__":
    CONFIG = parse_config(ScanConfig, {}, description=__doc__)  # before torch: --help answers at once

from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from medspeed.apps.pathology.model import load_model, normalised
from medspeed.apps.pathology.patches.table import AT_ONCE, IMAGES, read_image
from medspeed.apps.pathology.scan.scan import ProbabilityMap, View, choose_view, draw_heatmap, scan_slide, write_found
from medspeed.apps.pathology.slides.camelyon import find_slides, is_slide
from medspeed.apps.pathology.slides.masks import SlideMask, tissue_mask
from medspeed.apps.pathology.slides.reader import Slide, open_slide
from medspeed.common.clock import Stages
from medspeed.common.console import hides_bar, say
from medspeed.common.data.threads import map_in_threads
from medspeed.common.files import files_below, plural, printable, sha256_of
from medspeed.common.host_memory import keep_freed_memory
from medspeed.common.inference.folder_job import FolderJob, Item, Prediction, Predictions, Record
from medspeed.common.inference.measure import warn_of_training
from medspeed.common.inference.open_predictor import open_predictor
from medspeed.common.inference.scan_files import peak_memory
from medspeed.common.inference.scores import write_measures
from medspeed.common.ranks import choose_device
from medspeed.common.run import one_line_errors

_ALL_OVER = 0.95  # of a slide: glass or, in a region cut from a slide, tissue
_COARSER = 1.5  # times the pixels of the training: what lies between a slide's pixels was never seen


class Scanner:
    """The network of a run, opened on a device to scan slides or to score patches."""

    def __init__(self, config: ScanConfig) -> None:
        self.config, self.stages = config, defaultdict[str, Stages](Stages)
        self.model, self.device = load_model(config.model), choose_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.stride = config.stride if config.mode == "patches" else None
        self.opened = open_predictor(
            config.model, self.model, backend=config.backend, precision=config.precision, device=self.device
        )

    def say_how(self, what: str) -> None:
        """Say what is done and how, and what speaks against the run."""
        say(f"{what}, {self.opened.backend} {self.opened.precision} on {self.device}: {self.opened.reason}")
        warn_of_training(self.config.model)

    def score(self, files: list[Path]) -> Predictions:
        """Write `probabilities.csv` (image, probability of tumour) of square images, as large as those in training.

        What cannot be read is set aside; a ValueError says that nothing can be.
        """
        self.say_how(f"{len(files)} patches")
        output, given = self.config.output / "probabilities.csv", self.config.input
        if output.is_file() and not output.read_bytes().startswith(b"image,probability\n"):
            raise FileExistsError(f"{output}: already exists, not written by medspeed: choose another --output")
        output.parent.mkdir(parents=True, exist_ok=True)  # now, not when all are scored
        most = self.model.tile_batch if self.opened.backend == "tensorrt" else AT_ONCE
        found, failed = dict[str, list[dict[str, str]]](), dict[str, str]()

        def read(file: Path) -> np.ndarray | str:
            try:
                return read_image(file, self.model.patch_size)
            except ValueError as error:
                return printable(str(error))

        for start in tqdm(range(0, len(files), AT_ONCE), disable=hides_bar()):
            some = files[start : start + AT_ONCE]
            names = [file.relative_to(given if given.is_dir() else given.parent).as_posix() for file in some]
            images = dict(zip(names, map_in_threads(read, some), strict=True))
            if good := {name: image for name, image in images.items() if not isinstance(image, str)}:
                pixels = torch.from_numpy(np.stack([*good.values()]).transpose(0, 3, 1, 2))
                logits = [self.opened.predict(normalised(call.to(self.device))) for call in torch.split(pixels, most)]
                scores = [*zip(good, torch.cat(logits).sigmoid().flatten().tolist(), strict=True)]
                found |= {name: [{"probability": f"{score:.9g}"}] for name, score in scores if score == score}
                images |= {name: f"{name}: its score is NaN: use --precision fp32" for name, p in scores if p != p}
            failed |= {name: why for name, why in images.items() if isinstance(why, str)}
        if not found:
            raise ValueError(next(iter(failed.values())))
        write_measures(output, found, "image")
        for why in failed.values():
            say(printable(f"failed: {why}"), "warning")
        return Predictions({given.name: Prediction((output,), {"patches": len(found)})}, failed)

    def item(self, file: Path) -> Item[Path]:
        """Return a slide with the files that come out of it; its record is written last."""
        folder, names = self.config.output / file.stem, ("probability.tif", "detections.csv", "detections.geojson")
        picture = (folder / "heatmap.png",)
        outputs = (*(folder / name for name in names), *(picture if self.config.overlays else ()))
        return Item(file.stem, file, (file,), outputs, folder / "slide.json", picture)

    def identity(self) -> Record:
        """Return everything but the slide that determines the output."""
        file, config = self.opened.files[0], self.config
        options = {name: getattr(config, name) for name in ("mode", "reader", "overlays")}
        options |= {"stride": self.stride, "backend": self.opened.backend, "precision": self.opened.precision}
        return {"weights": {file.name: sha256_of(file)}, "model": asdict(self.model), "options": options}

    def read(self, item: Item[Path]) -> tuple[Slide, View, SlideMask]:
        """Return a slide, how the network sees it, and where it holds tissue."""
        with self.stages[item.name].stage("tissue", waits=False):
            slide = open_slide(item.source, self.config.reader)
            view, base = choose_view(slide, self.model.mpp), slide.levels[0]
            if max(base.width, base.height) <= view.span(self.model.patch_size) * view.downsample:
                what = f"{base.width} x {base.height} pixels is a patch, not a slide"
                raise ValueError(f"{item.source}: {what}: pass its whole slide, or PNG files to score patches")
            return slide, view, tissue_mask(slide, assumed_mpp=view.base_mpp)

    def scan(self, item: Item[Path], given: tuple[Slide, View, SlideMask]) -> tuple[Slide, View, ProbabilityMap]:
        """Run the network on the tissue of a slide."""
        (slide, view, tissue), batch = given, self.model.tile_batch
        if self.stride and self.opened.backend != "tensorrt":
            # As many pixels as a batch of tiles has; an engine takes no more images than it was built for.
            batch *= (self.model.tile_size // self.model.patch_size) ** 2
        with self.stages[item.name].stage("scan"):
            predict = self.opened.predict
            return slide, view, scan_slide(slide, self.model, predict, self.device, tissue, view, self.stride, batch)

    def write(self, item: Item[Path], scanned: tuple[Slide, View, ProbabilityMap]) -> Record:
        """Write what was found in a slide, and return what its record is to hold."""
        (slide, view, found), stage = scanned, partial(self.stages[item.name].stage, waits=False)
        with stage("write"):
            detections = write_found(item.outputs[:3], slide, found, view.base_mpp)
        for path in item.outputs[3:]:
            with stage("overlay"):
                draw_heatmap(path, slide, found)
        mpp, damaged, seen = self.model.mpp, sorted(slide.damaged), round((slide.mpp or 0.0) * view.downsample, 4)
        doubts = {
            "NO TISSUE found": not found.scanned.any(),
            "tissue all over: is its glass colored?": found.scanned.mean() > _ALL_OVER,
            f"{len(damaged)} DAMAGED TILES treated as white": damaged,
            "pixels of unknown size": not (mpp and slide.mpp),
            f"pixels of {seen} um, in training {mpp} um": mpp and seen > _COARSER * mpp,
        }
        return {
            "uncertain": [doubt for doubt, holds in doubts.items() if holds],
            "probability": float(found.values.max(initial=0)),
            "detections": detections,
            "tiles": found.tiles,
            "damaged_tiles": damaged,  # level, column, row
            "reader": slide.reader,
            "level": view.level,
            "mpp": slide.mpp,
            "size": slide.levels[0].base,
            "view": view.reason,
            "stride_px": found.stride,
            "peak_memory_mib": round(peak_memory() / 2**20),
            "device": str(self.device),
            "seconds": self.stages[item.name].seconds(),
        }


def main(config: ScanConfig) -> Predictions:
    """Scan every slide; one that cannot be read is set aside. A folder of images without slides is one of patches."""
    patches = find_patches(config.input)
    if patches and config.mode == "patches":
        raise ValueError(f"mode patches: only for slides; drop it to score the patches in {config.input}")
    slides = [] if patches else find_slides(config.input)
    scanner = Scanner(config)
    if patches:
        return scanner.score(patches)
    items = [scanner.item(file) for file in slides]
    job = FolderJob("slide", config.output, items, scanner.identity(), scanner.read, scanner.scan, scanner.write, _line)
    scanner.say_how(plural(len(job.share()), "slide"))
    return job.run(job.unfinished())


def find_patches(path: Path) -> list[Path]:
    """Return the images of patches (.png, .jpg, .jpeg, .bmp) in and below a folder, or the one; none beside slides."""
    files = sorted(files_below(path)) if path.is_dir() else [path] * path.is_file()
    if any(map(is_slide, files)):
        return []
    shown = (file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
    return [file for file in shown if file.suffix.lower() in IMAGES]


def _line(record: Record) -> str:
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
