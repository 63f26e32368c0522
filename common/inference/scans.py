"""Segment scans: files or DICOM in, label maps on the input's own grid out, streamed, measured, and resumed."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import combinations
from zlib import crc32

import numpy as np
import torch

from medspeed.common.clock import Stages
from medspeed.common.console import say
from medspeed.common.data.dataset import stem_of
from medspeed.common.data.dicom import DicomSeries
from medspeed.common.data.fingerprint import scan_figures
from medspeed.common.data.geometry import Shape
from medspeed.common.data.label_files import write_label
from medspeed.common.data.preparation import prepare_volume
from medspeed.common.data.threads import usable_cores
from medspeed.common.data.volumes import Volume
from medspeed.common.files import plural, printable, write_json
from medspeed.common.host_memory import free_memory, keep_freed_memory
from medspeed.common.inference.folder_job import FolderJob, Item, Predictions, Record
from medspeed.common.inference.labels import LabelScheme, dice_of_counts
from medspeed.common.inference.measure import Measures, measure, read_figures, warn_of_training, with_doubts
from medspeed.common.inference.model import VolumeModel, model_content
from medspeed.common.inference.options import InferConfig
from medspeed.common.inference.postprocessing import (
    Postprocessing,
    Steps,
    cleaned_together,
    connected_components,
    foreground,
    over_bars,
)
from medspeed.common.inference.predict import predict_logits, restore_labels, window_starts
from medspeed.common.inference.predictors import Predictor, with_room
from medspeed.common.inference.runs import RunModel, digest_of, open_models, pair_counts
from medspeed.common.inference.scan_files import Scan, find_scans, peak_memory, read_scan, say_plan, scan_bytes
from medspeed.common.inference.scores import write_measures
from medspeed.common.observe.overlays import draw_overlay, oriented_scan
from medspeed.common.ranks import choose_device, torchrun_place

ScanItem = Item[Scan]
Found = tuple[Volume, np.ndarray, list[float]]

_PER_THREAD = 2**27  # bytes of room for each thread that reads or writes
_OPTIONS = ("flips", "fit_windows", "overlays", "keep_patient")  # they change what comes out


def segment_scans(config: InferConfig, model: RunModel, scans: list[Scan] | None = None) -> Predictions:
    """Segment every scan; one that cannot be is set aside, and the others are done all the same.

    Under torchrun each process takes its share of the scans: those of the input, unless they are given.

    Raises:
        FileNotFoundError: there is no scan, or the run lacks what is to run it.
        FileExistsError: an output is there that no run into this folder wrote.
        ValueError: two scans would share their outputs, or an option does not fit the run or this host.
        OSError: the output folder cannot be written.
    """
    scans = find_scans(config.input, model.preparation.channels, model.modality) if scans is None else scans
    segmenter = Segmenter(config, model)
    job = segmenter.job(scans)
    opened, share = segmenter.opened, job.share()
    say(f"{plural(len(share), 'scan')}, {opened.backend} {opened.precision} on {segmenter.device}: {opened.reason}")
    for item in share:
        for note in item.source.notes if isinstance(item.source, DicomSeries) else ():
            say(printable(f"{item.name}: {note}"), "warning")
    warn_of_training(*config.model, flips=config.flips)
    left = job.unfinished()
    if len(left) > 1:
        say_plan([item.source for item in left], model, segmenter.device, job.in_flight, job.room)
    return job.run(left)


class Segmenter:
    """A model, opened on a device to segment scans; for the errors see `segment_scans`."""

    def __init__(self, config: InferConfig, model: RunModel) -> None:
        self.config, self.model = config, model
        self.began, self.stages = time.perf_counter(), defaultdict[str, Stages](Stages)
        self.device = choose_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.pairs: list[torch.Tensor] = []  # how well the predictions of the scan that is computed agree
        wanted = "torch" if config.fit_windows and config.backend == "auto" else config.backend, config.precision
        self.opened = open_models(config.model, model, *wanted, device=self.device, pairs=self.pairs)
        if config.fit_windows and self.opened.backend != "torch":
            needs = f"{self.opened.backend} needs windows of one size"
            raise ValueError(f"fit_windows: {needs}; drop it, or use --backend torch")
        self.weights, self.cases = digest_of(self.opened.files), read_figures(*config.model)
        rank, ranks, _ = torchrun_place()
        process = "" if ranks == 1 else f"-{rank}"
        self.tables = [config.output / name for name in ("measurements.csv", f"timings{process}.json")]

    @property
    def cleaning(self) -> Steps:
        """What is removed: as the flags say, else as the model says."""
        largest, smallest = self.config.largest_component, self.config.smallest_ml
        if largest is None and smallest is None:
            return self.model.postprocessing
        return clean_by_hand(self.model.labelling, bool(largest), smallest or 0.0)

    def job(self, scans: Sequence[Scan]) -> FolderJob[Scan, Volume, Found]:
        """Return the job of segmenting the scans into the output folder."""
        options = {name: getattr(self.config, name) for name in _OPTIONS}
        options["cleaning"] = [asdict(step) for step in self.cleaning]
        room = free_memory() // 2 // torchrun_place()[1]  # the rest is for windows, and files in the system's cache
        identity = {
            "weights": {self.opened.files[0].name: self.weights},
            "model": model_content(self.model),
            "cases": crc32(repr(self.cases).encode()),
            "options": {**options, "backend": self.opened.backend, "precision": self.opened.precision},
        }
        return FolderJob(
            kind="scan",
            folder=self.config.output,
            items=[self.item(scan) for scan in scans],
            identity=identity,
            read=self.read,
            compute=self.compute,
            write=self.write,
            line=_line,
            tables=self.write_tables,
            table_files=self.tables,
            threads=max(1, min(max(2, usable_cores() - 2), room // _PER_THREAD)),
            need=lambda item: scan_bytes(item.source, self.model)[0],
            room=room,
        )

    def item(self, scan: Scan) -> ScanItem:
        """Return a scan with the files that come out of it: its label map, DICOM-SEG and picture."""
        name, output = scan.name, self.config.output
        picture = (output / f"{stem_of(scan.name)}.png",)
        names = (f"{name}.nii.gz", f"{name}.dcm") if isinstance(scan, DicomSeries) else (name,)
        outputs = (*(output / each for each in names), *(picture if self.config.overlays else ()))
        parts = [each.files for each in scan.channels or [scan]] if isinstance(scan, DicomSeries) else [(scan,)]
        files = tuple(file for part in parts for file in part)
        return Item(name, scan, files, outputs, output / "records" / f"{name}.json", picture)

    def read(self, item: ScanItem) -> Volume:
        """Read a scan, if it is of the kind that the model was trained on."""
        scan, preparation = item.source, self.model.preparation
        fits = preparation.normalisation == "window"
        if isinstance(scan, DicomSeries) and (scan.modality == "CT") != fits:
            wanted = "CT (a window in HU)" if fits else "scans other than CT (z-scores)"
            raise ValueError(f"{item.name}: its modality is {scan.modality}, the model was trained on {wanted}")
        with self.stages[item.name].stage("decode", waits=False):
            return read_scan(scan, preparation.channels)

    def compute(self, item: ScanItem, volume: Volume) -> Found:
        """Return a scan, its labels [X, Y, Z] uint8 on its own grid, and the agreement (see `with_doubts`)."""
        labels = with_room(partial(self.labels, item.name, volume), self.opened.predict, self.device)
        pairs = [pair.cpu() for pair in self.pairs]  # of ensembles' windows, and of flips
        return volume, labels, dice_of_counts(torch.stack(pairs).sum(dim=0)).tolist() if pairs else []

    def labels(self, name: str, volume: Volume, device: torch.device, predictor: Predictor) -> np.ndarray:
        """Return the labels of a scan, computed on a device but for the windows."""
        stage, model = self.stages[name].stage, self.model
        self.pairs.clear()
        with stage("prepare"):
            case = prepare_volume(name, volume, model.preparation, device, torch.float32)
        image, window = case.image.to(device, torch.float32), model.window_size
        if self.config.fit_windows:
            window = fitted_window(image.shape[1:], window, model.overlap)
        with stage("windows"):
            logits = flipped_logits(image, predictor, model, window, self.config.flips, self.pairs)
        with stage("restore"):
            return restore_labels(logits, case.grid, model.labelling, model.postprocessing)

    def write(self, item: ScanItem, found: Found) -> Record:
        """Clean, write, measure and draw the labels of a scan; return its measurements and seconds."""
        (volume, labels, agreement), config, labelling = found, self.config, self.model.labelling
        stage = partial(self.stages[item.name].stage, waits=False)
        with stage("clean"):
            labels = clean_labels(labels, labelling, volume.voxel_ml, self.cleaning)
        with stage("write"):
            if isinstance(item.source, DicomSeries):
                from medspeed.common.inference.dicom_seg import write_seg  # here: it takes a second to load

                regions, version = labelling.regions, self.weights[:12]
                write_seg(item.outputs[1], labels, item.source, regions, version, config.keep_patient)
            write_label(item.outputs[0], labels, volume.affine)  # last: a segmentation may be refused
        with stage("measure"):
            figures = scan_figures(volume, self.model.preparation.normalisation == "window")
            measures = measure(labels, volume.affine, labelling.regions)
            there = np.atleast_1d(volume.voxels.any(axis=(0, 1, 2)))
            empty = np.flatnonzero(~there).tolist()
            measured = with_doubts(measures, labelling.regions, figures, self.cases, agreement, empty)
        if config.overlays:
            with stage("overlay"):
                image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
                shown = oriented_scan(image, labels, volume.affine, window=self.model.preparation.window)
                draw_overlay(item.outputs[-1], shown, labelling.labels, item.name)
        doubts = [*dict.fromkeys(doubt for each in measured for doubt in each.uncertain.split("; ") if doubt)]
        rows, seconds = [asdict(each) for each in measured], self.stages[item.name].seconds()
        return {"measures": rows, "uncertain": doubts, "seconds": seconds}

    def write_tables(self, records: dict[str, Record]) -> None:
        """Write `measurements.csv` and the seconds of all finished scans."""
        table, timings = self.tables
        names = [f"{each.run}:{each.sha256[:12]}" for each in self.model.members] or [self.weights[:12]]
        tag = {"model": " ".join(names)}
        rows = {name: [{**each, **tag} for each in record["measures"]] for name, record in records.items()}
        write_measures(table, rows, columns=[*(each.name for each in fields(Measures)), "model"])
        content = {
            "backend": self.opened.backend,
            "precision": self.opened.precision,
            **tag,
            "seconds": {name: record["seconds"] for name, record in records.items()},
            "scans in this run": sum("write" in each.seconds() for each in self.stages.values()),
            "seconds of this run": round(time.perf_counter() - self.began, 3),
            "peak_memory_mib": round(peak_memory() / 2**20),
        }
        write_json(timings, content)


def flipped_logits(
    image: torch.Tensor, predictor: Predictor, model: VolumeModel, window: Shape, flips: str, pairs: list[torch.Tensor]
) -> torch.Tensor:
    """Return the mean of `predict_logits` over all combinations of flips of some axes ("xyz"), or it alone.

    `pairs` receives how well these agree (see `pair_counts`).
    """
    total = predict_logits(image, predictor, model, window)
    if not flips:
        return total
    axes = ["xyz".index(letter) + 1 for letter in flips]

    def labels_of(logits: torch.Tensor) -> torch.Tensor:
        return model.labelling.labels_of(over_bars(logits, model.labelling, model.postprocessing))

    labels = [labels_of(total)]
    for mirror in [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]:
        logits, back = predict_logits(image.flip(mirror), predictor, model, window), [axis - 1 for axis in mirror]
        labels.append(labels_of(logits).flip(back))
        for mean, each in zip(total, logits, strict=True):  # one at a time: a copy of many takes gigabytes
            mean += each.flip(back)
    pairs.append(pair_counts(labels, model.labelling.regions))
    return total.div_(len(labels))


def fitted_window(shape: Sequence[int], most: Shape, overlap: float) -> Shape:
    """Return the window that covers an image of `shape` with the least computed twice, no side above that of `most`.

    Per axis there are as few windows as with `most`, and they are as short as they can be. For a network that takes any
    sides which divide as those of `most` do (by the power of two that they have in common).
    """
    divisor = math.gcd(*most) & -math.gcd(*most)
    sides = []
    for length, side in zip(shape, most, strict=True):
        count = len(window_starts(length, side, overlap))
        fits = (short for short in range(divisor, side, divisor) if len(window_starts(length, short, overlap)) <= count)
        sides.append(next((short for short in fits if count > 1 or short >= length), side))
    return sides[0], sides[1], sides[2]


def clean_by_hand(labelling: LabelScheme, largest: bool, smallest_ml: float) -> Steps:
    """Return one cleaning of all structures; none where it would keep everything."""
    groups = cleaned_together(labelling) if largest or smallest_ml else []
    return tuple(Postprocessing(tuple(region.name for region in some), largest, smallest_ml) for some in groups)


def clean_labels(labels: np.ndarray, labelling: LabelScheme, voxel_ml: float, steps: Steps) -> np.ndarray:
    """Return a label map [X, Y, Z] uint8 in which unwanted components are background; the given one stays."""
    steps = tuple(step for step in steps if step.largest or step.smallest_ml)
    cleaned = labels.copy(order="K") if steps else labels
    inside = cleaned[foreground(labels)]
    for step in steps:
        parts = connected_components(np.isin(inside, step.numbers(labelling)))
        inside[~step.kept(np.bincount(parts[parts > 0], minlength=1), voxel_ml)[parts]] = 0
    return cleaned


def _line(record: Record) -> str:
    seconds = (f"{name} {seconds:.3f} s" for name, seconds in record["seconds"].items())
    doubts = "; ".join(record["uncertain"])
    return ", ".join([*([f"UNCERTAIN: {doubts}"] if doubts else []), *seconds])
