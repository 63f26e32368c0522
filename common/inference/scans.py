"""Segment scans: NIfTI or DICOM in, label maps on the input's own grid out, streamed, measured, and resumed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.data.preparation import prepare_volume
from common.data.volumes import Volume, write_label
from common.files import locked, sha256_of, write_json
from common.inference.cleaning import clean_labels
from common.inference.measures import measure
from common.inference.memory_plan import say_plan
from common.inference.options import InferConfig
from common.inference.predictors import OpenedPredictor, open_predictor, ran_file
from common.inference.scan_files import Scan, find_scans
from common.inference.scan_records import Records
from common.inference.segmentation import SegmentationModel, predict_labels
from common.inference.stream import streamed
from common.observe.host_memory import keep_freed_memory, peak_memory
from common.observe.overlays import draw_overlay
from common.observe.run import choose_device, torchrun_place, wait_for_all
from common.observe.timeline import Timeline, draw_timeline

Marked = tuple[Volume, dict[str, Any]]
"""A scan's voxels, and all that decides what comes out, taken before they were read."""


@dataclass(frozen=True)
class Job:
    """What all scans are segmented with.

    Args:
        config: what the user asked for.
        model: the network's.
        opened: what runs it.
        device: where windows are computed.
        records: of the output folder.
        timeline: who did what when.
    """

    config: InferConfig
    model: SegmentationModel
    opened: OpenedPredictor
    device: torch.device
    records: Records
    timeline: Timeline


def segment_scans(config: InferConfig, model: SegmentationModel) -> int:
    """Segment every scan; return 0, or 1 where a scan could not be segmented (the others are done all the same).

    Under torchrun each process takes its share of the scans.
    """
    rank, ranks, _ = torchrun_place()
    everyone = find_scans(config.input)
    scans = everyone[rank::ranks]
    job = open_job(config, model)
    opened, records = job.opened, job.records
    tqdm.write(f"{len(scans)} scans, {opened.backend} {opened.precision} on {job.device}: {opened.reason}")
    for scan in scans:
        for note in scan.series.notes if scan.series is not None else ():
            tqdm.write(f"{scan.name}: {note}")
    left = [scan for scan in scans if records.finished(scan) is None]
    if len(left) < len(scans):
        tqdm.write(f"{len(scans) - len(left)} scans kept: they were finished with the same weights and options")
    records.clear(left)
    if len(left) > 1:
        say_plan(left, model, job.device)
    try:
        failed = segment_all(left, job)
    finally:
        with locked(records.lock):  # of several processes the last one finds the records of all
            _summarise(job, everyone, "" if ranks == 1 else f"-{rank}")
    if failed:
        tqdm.write(f"{len(failed)} of {len(scans)} scans could not be segmented: {', '.join(failed)}")
    wait_for_all()
    return 1 if failed else 0


def open_job(config: InferConfig, model: SegmentationModel) -> Job:
    """Open the model on the device, and note what decides what comes out.

    Raises:
        OSError: the output folder cannot be written.
    """
    device = choose_device(config.device, torchrun_place()[2])
    if device.type == "cpu":
        keep_freed_memory()
    exact = "fp32" if config.precision == "auto" else config.precision
    weights = config.model / "best.safetensors"
    opened = open_predictor(
        config.model,
        lambda: model.build(weights),
        backend=config.backend,
        precision=exact,
        torch_precision=model.precision if config.precision == "auto" else None,
        device=device,
    )
    if config.fit_windows and opened.backend != "torch":
        raise ValueError(
            f"fit_windows: {opened.backend} takes windows of one size; use --backend torch, or leave it out"
        )
    ran = ran_file(config.model, opened)
    options = ("flips", "fit_windows", "largest_component", "smallest_ml", "overlays", "keep_patient")
    identity = {
        "weights": {ran.name: sha256_of(ran)},
        "model": json.loads(json.dumps(asdict(model))),  # type: ignore[call-overload]  # a dataclass of the app
        "options": {
            **{name: getattr(config, name) for name in options},
            "backend": opened.backend,
            "precision": opened.precision,
        },
    }
    records = Records(config.output, identity, config.overlays)
    with locked(records.lock):  # a folder that cannot be written is told now
        return Job(config, model, opened, device, records, Timeline())


def segment_all(scans: Sequence[Scan], job: Job) -> list[str]:
    """Segment the scans, three in flight; return the names of those that could not be."""
    failed = []
    with tqdm(total=len(scans), unit="scan", disable=len(scans) < 2) as bar:
        for scan, done in streamed(
            scans, lambda each: _read(each, job), lambda each, read: _compute(each, read, job),
            lambda each, found: _write(each, *found, job),
        ):  # fmt: skip
            bar.update()
            if isinstance(done, Exception):
                failed.append(scan.name)
                tqdm.write(f"set aside: {done}")
            else:
                times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in done.items())
                tqdm.write(f"{scan.name}: {times}")
    return failed


def _read(scan: Scan, job: Job) -> Marked:
    mark = job.records.mark(scan)
    fits = job.model.preparation.normalisation == "window"
    if scan.series is not None and (scan.series.modality == "CT") != fits:
        wanted = "CT, by its window in HU" if fits else "other scans than CT, by z-scores"
        raise ValueError(f"{scan.name}: its modality is {scan.series.modality}, the model was trained on {wanted}")
    with job.timeline.of(scan.name, "read").stage("decode"):
        return scan.read(job.model.preparation.channels), mark


def _compute(scan: Scan, read: Marked, job: Job) -> tuple[Marked, np.ndarray]:
    """Prepare a scan, apply the network, and bring its labels back to the scan's grid."""
    stages, config = job.timeline.of(scan.name, "compute", waits=True), job.config
    try:
        with stages.stage("prepare"):
            case = prepare_volume(scan.name, read[0], job.model.preparation, job.device, torch.float32)
        return read, predict_labels(
            case, job.opened.predict, job.model, job.device, stages, config.flips, config.fit_windows
        )
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise ValueError(f"{scan.name}: {error}") from error


def _write(scan: Scan, read: Marked, labels: np.ndarray, job: Job) -> dict[str, float]:
    """Clean, write, measure and draw; the record, which says that all is there, comes last."""
    (volume, mark), config, labelling, records = read, job.config, job.model.labelling, job.records
    stages = job.timeline.of(scan.name, "write")
    records.begin(scan)
    with stages.stage("clean"):
        voxel = abs(float(np.linalg.det(volume.affine[:3, :3]))) / 1000
        labels = clean_labels(
            labels, labelling, voxel, largest=config.largest_component, smallest_ml=config.smallest_ml
        )
    with stages.stage("write"):
        write_label(records.label(scan), labels, volume.affine)
        if scan.series is not None:
            _write_seg(scan, labels, job)
    with stages.stage("measure"):
        measures = measure(labels, volume.affine, labelling.regions)
    if config.overlays:
        with stages.stage("overlay"):
            image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
            names, window, picture = labelling.labels, job.model.preparation.window, records.picture(scan)
            draw_overlay(picture, image, labels, volume.affine, names=names, window=window, title=scan.name)
    seconds = job.timeline.seconds(scan.name)
    records.finish(scan, mark, measures, seconds)
    return seconds


def _write_seg(scan: Scan, labels: np.ndarray, job: Job) -> None:
    from common.inference.dicom_seg import write_seg  # here, since few need it and it takes a second to load

    assert scan.series is not None
    (digest,) = job.records.identity["weights"].values()
    write_seg(
        job.records.seg(scan),
        labels,
        scan.series,
        job.model.labelling.regions,
        algorithm="medspeed",
        version=digest[:12],
        keep_patient=job.config.keep_patient,
    )


def _summarise(job: Job, scans: Sequence[Scan], process: str) -> None:
    """Write the measurements and seconds of all finished scans, and the picture of what this process did."""
    spans = job.timeline.spans()
    write_json(
        job.config.output / f"timings{process}.json",
        {
            "backend": job.opened.backend,
            "precision": job.opened.precision,
            "seconds": job.records.write_tables(scans),
            "scans in this run": len({span.case for span in spans if span.lane == "write"}),
            "seconds of this run": round(job.timeline.now(), 3),
            "peak_memory_mib": round(peak_memory() / 2**20),
        },
    )
    if len({span.case for span in spans}) > 1:
        draw_timeline(job.config.output / f"timeline{process}.png", spans)
