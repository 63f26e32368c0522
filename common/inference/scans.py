"""Segment scans: NIfTI or DICOM in, label maps on the input's own grid out, streamed, measured, and resumed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common.clock import keep_freed_memory, peak_memory
from common.data.dicom import DicomSeries
from common.data.preparation import prepare_volume
from common.data.volumes import Volume, write_label
from common.files import sha256_of, write_json
from common.inference.folder_job import FolderJob, Item, Record
from common.inference.measure import Measures, clean_labels, measure, write_measures
from common.inference.model import VolumeModel, model_content
from common.inference.open_predictor import OpenedPredictor, open_predictor
from common.inference.options import InferConfig
from common.inference.predict import predict_labels
from common.inference.scan_files import Scan, find_scans, read_scan, say_plan, stem_of
from common.observe.overlays import draw_overlay
from common.observe.plots import Timeline, draw_timeline
from common.ranks import choose_device, torchrun_place

ScanItem = Item[Scan]
ScanJob = FolderJob[Scan, Volume, tuple[Volume, np.ndarray]]


def segment_scans(config: InferConfig, model: VolumeModel) -> int:
    """Segment every scan; return 0, or 1 where a scan could not be segmented (the others are done all the same).

    Under torchrun each process takes its share of the scans.

    Raises:
        FileNotFoundError: there is no scan, or the run lacks what is to run it.
        FileExistsError: an output is there that no run into this folder wrote.
        ValueError: two scans would share their outputs, or an option does not fit the run or this host.
        OSError: the output folder cannot be written.
    """
    scans = find_scans(config.input)
    segmenter = open_segmenter(config, model)
    job = segmenter.job(scans)
    opened, share = segmenter.opened, job.share()
    tqdm.write(f"{len(share)} scans, {opened.backend} {opened.precision} on {segmenter.device}: {opened.reason}")
    for item in share:
        for note in item.source.notes if isinstance(item.source, DicomSeries) else ():
            tqdm.write(f"{item.name}: {note}")
    left = job.unfinished()
    if len(left) > 1:
        say_plan([item.source for item in left], model, segmenter.device)
    return job.run(left)


@dataclass(frozen=True)
class Segmenter:
    """What all scans are segmented with.

    Args:
        config: what the user asked for.
        model: the network's.
        opened: what runs it.
        device: where windows are computed.
        identity: weights, model and options: all but the scan that decides what comes out.
        timeline: who did what when.
    """

    config: InferConfig
    model: VolumeModel
    opened: OpenedPredictor
    device: torch.device
    identity: Record
    timeline: Timeline

    def job(self, scans: Sequence[Scan]) -> ScanJob:
        """Return the job of segmenting the scans into the output folder."""
        return FolderJob(
            "scan",
            self.config.output,
            [self.item(scan) for scan in scans],
            self.identity,
            self.read,
            self.compute,
            self.write,
            lambda record: ", ".join(f"{name} {seconds:.3f} s" for name, seconds in record["seconds"].items()),
            self.write_tables,
        )

    def item(self, scan: Scan) -> ScanItem:
        """Return a scan with the files that come out of it: its label map, DICOM-SEG and picture."""
        name, output = scan.name, self.config.output
        picture, record = output / f"{stem_of(scan)}.png", output / "records" / f"{name}.json"
        pictures = (picture,) if self.config.overlays else ()
        if isinstance(scan, Path):
            return Item(name, scan, (scan,), (output / name, *pictures), record, (picture,))
        outputs = (output / f"{name}.nii.gz", output / f"{name}.dcm", *pictures)
        return Item(name, scan, scan.files, outputs, record, (picture,))

    def read(self, item: ScanItem) -> Volume:
        """Read a scan, if it is of the kind that the model was trained on."""
        scan, preparation = item.source, self.model.preparation
        fits = preparation.normalisation == "window"
        if isinstance(scan, DicomSeries) and (scan.modality == "CT") != fits:
            wanted = "CT, by its window in HU" if fits else "other scans than CT, by z-scores"
            raise ValueError(f"{item.name}: its modality is {scan.modality}, the model was trained on {wanted}")
        with self.timeline.stage(item.name, "read", "decode"):
            return read_scan(scan, preparation.channels)

    def compute(self, item: ScanItem, volume: Volume) -> tuple[Volume, np.ndarray]:
        """Prepare a scan, apply the network, and bring its labels [X, Y, Z] uint8 back to the scan's grid."""
        stage, config, model = partial(self.timeline.stage, item.name, "compute", waits=True), self.config, self.model
        with stage("prepare"):
            case = prepare_volume(item.name, volume, model.preparation, self.device, torch.float32)
        labels = predict_labels(case, self.opened.predict, model, self.device, stage, config.flips, config.fit_windows)
        return volume, labels

    def write(self, item: ScanItem, found: tuple[Volume, np.ndarray]) -> Record:
        """Clean, write, measure and draw the labels of a scan; return its measurements and seconds."""
        (volume, labels), config, labelling = found, self.config, self.model.labelling
        stage = partial(self.timeline.stage, item.name, "write")
        with stage("clean"):
            voxel_ml = abs(float(np.linalg.det(volume.affine[:3, :3]))) / 1000
            labels = clean_labels(
                labels, labelling, voxel_ml, largest=config.largest_component, smallest_ml=config.smallest_ml
            )
        with stage("write"):
            write_label(item.outputs[0], labels, volume.affine)
            if isinstance(item.source, DicomSeries):
                self._write_seg(item.outputs[1], item.source, labels)
        with stage("measure"):
            measures = measure(labels, volume.affine, labelling.regions)
        if config.overlays:
            with stage("overlay"):
                image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
                names, window = labelling.labels, self.model.preparation.window
                draw_overlay(
                    item.outputs[-1], image, labels, volume.affine, names=names, window=window, title=item.name
                )
        return {"measures": [asdict(each) for each in measures], "seconds": self.timeline.seconds(item.name)}

    def write_tables(self, records: dict[str, Record]) -> None:
        """Write `measurements.csv` and the seconds of all finished scans, and the picture of what this process did."""
        rank, ranks, _ = torchrun_place()
        process, spans, output = "" if ranks == 1 else f"-{rank}", self.timeline.spans(), self.config.output
        rows = [(name, [Measures(**each) for each in record["measures"]]) for name, record in records.items()]
        write_measures(output / "measurements.csv", rows)
        write_json(
            output / f"timings{process}.json",
            {
                "backend": self.opened.backend,
                "precision": self.opened.precision,
                "seconds": {name: record["seconds"] for name, record in records.items()},
                "scans in this run": len({span.case for span in spans if span.lane == "write"}),
                "seconds of this run": round(self.timeline.now(), 3),
                "peak_memory_mib": round(peak_memory() / 2**20),
            },
        )
        if len({span.case for span in spans}) > 1:
            draw_timeline(output / f"timeline{process}.png", spans)

    def _write_seg(self, path: Path, series: DicomSeries, labels: np.ndarray) -> None:
        from common.inference.dicom_seg import write_seg  # here, since few need it and it takes a second to load

        (digest,) = self.identity["weights"].values()
        write_seg(
            path,
            labels,
            series,
            self.model.labelling.regions,
            algorithm="medspeed",
            version=digest[:12],
            keep_patient=self.config.keep_patient,
        )


def open_segmenter(config: InferConfig, model: VolumeModel) -> Segmenter:
    """Open the model on the device, and note what decides what comes out.

    Raises:
        FileNotFoundError: the run lacks what is to run it.
        ValueError: an option does not fit the run or this host.
    """
    device = choose_device(config.device, torchrun_place()[2])
    if device.type == "cpu":
        keep_freed_memory()
    opened = open_predictor(config.model, model, backend=config.backend, precision=config.precision, device=device)
    if config.fit_windows and opened.backend != "torch":
        raise ValueError(
            f"fit_windows: {opened.backend} takes windows of one size; use --backend torch, or leave it out"
        )
    names = ("flips", "fit_windows", "largest_component", "smallest_ml", "overlays", "keep_patient")
    options = {name: getattr(config, name) for name in names}
    identity = {
        "weights": {opened.file.name: sha256_of(opened.file)},
        "model": model_content(model),
        "options": {**options, "backend": opened.backend, "precision": opened.precision},
    }
    return Segmenter(config, model, opened, device, identity, Timeline())
