"""Segment scans: NIfTI or DICOM in, label maps on the input's own grid out, streamed, measured, and resumed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.data.preparation import prepare_volume
from common.data.volumes import Volume, write_label
from common.files import locked, sha256_of, write_json
from common.inference.cleaning import clean_labels
from common.inference.measures import Measures, measure, write_measures
from common.inference.memory_plan import free_bytes, most_bytes, window_bytes
from common.inference.options import InferConfig
from common.inference.predictors import OpenedPredictor, open_predictor, ran_file
from common.inference.scan_files import Scan, find_scans
from common.inference.segmentation import SegmentationModel, predict_labels
from common.inference.stream import BAD_INPUT, IN_FLIGHT, streamed
from common.observe.host_memory import keep_freed_memory, peak_memory
from common.observe.overlays import draw_overlay
from common.observe.run import choose_device, torchrun_place
from common.observe.timeline import Timeline, draw_timeline

_RECORDS = "records"
"""Folder, in the output's, of a file for each finished scan: where it is and fits, the scan is not done again."""


@dataclass(frozen=True)
class Job:
    """What all scans are segmented with.

    Args:
        config: what the user asked for.
        model: the network's.
        opened: what runs it.
        device: where windows are computed.
        identity: all but the scan that decides what comes out.
        timeline: who did what when.
    """

    config: InferConfig
    model: SegmentationModel
    opened: OpenedPredictor
    device: torch.device
    identity: dict[str, Any]
    timeline: Timeline

    def record(self, scan: Scan) -> Path:
        """Return the file that says that a scan is finished."""
        return self.config.output / _RECORDS / f"{scan.name}.json"

    def mark(self, scan: Scan) -> dict[str, Any]:
        """Return all that decides what comes out for a scan."""
        return {**self.identity, "scan": scan.stamp()}


def segment_scans(config: InferConfig, model: SegmentationModel) -> int:
    """Segment every scan; return 0, or 1 where a scan could not be segmented (the others are done all the same).

    Under torchrun each process takes its share of the scans.
    """
    rank, ranks, _ = torchrun_place()
    everyone = find_scans(config.input)
    scans = everyone[rank::ranks]
    job = open_job(config, model)
    opened = job.opened
    tqdm.write(f"{len(scans)} scans, {opened.backend} {opened.precision} on {job.device}: {opened.reason}")
    for scan in scans:
        for note in scan.series.notes if scan.series is not None else ():
            tqdm.write(f"{scan.name}: {note}")
    left = [scan for scan in scans if not _is_finished(scan, job)]
    if len(left) < len(scans):
        tqdm.write(f"{len(scans) - len(left)} scans kept: they were finished with the same weights and options")
    failed = segment_all(left, job)
    with locked(config.output / _RECORDS / ".lock"):  # of several processes the last one finds the records of all
        _summarise(job, everyone)
    if failed:
        tqdm.write(f"{len(failed)} of {len(scans)} scans could not be segmented: {', '.join(failed)}")
    return 1 if failed else 0


def open_job(config: InferConfig, model: SegmentationModel) -> Job:
    """Open the model on the device, and note what decides what comes out."""
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
    ran = ran_file(config.model, opened)
    options = ("flips", "largest_component", "smallest_ml", "overlays", "keep_patient")
    identity = {
        "weights": {ran.name: sha256_of(ran)},
        "model": json.loads(json.dumps(asdict(model))),  # type: ignore[call-overload]  # a dataclass of the app
        "options": {
            **{name: getattr(config, name) for name in options},
            "backend": opened.backend,
            "precision": opened.precision,
        },
    }
    return Job(config, model, opened, device, identity, Timeline())


def segment_all(scans: Sequence[Scan], job: Job) -> list[str]:
    """Segment the scans, three in flight; return the names of those that could not be."""
    if len(scans) > 1:
        _say_plan(scans, job)
    failed = []
    bar = tqdm(total=len(scans), unit="scan", disable=len(scans) < 2)
    with bar:
        for scan, done in streamed(
            scans, lambda each: _read(each, job), lambda each, volume: _compute(each, volume, job),
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


def _read(scan: Scan, job: Job) -> Volume:
    with job.timeline.of(scan.name, "read").stage("decode"):
        return scan.read(job.model.preparation.channels)


def _compute(scan: Scan, volume: Volume, job: Job) -> tuple[Volume, np.ndarray]:
    """Prepare a scan, apply the network, and bring its labels back to the scan's grid."""
    stages = job.timeline.of(scan.name, "compute", waits=True)
    with stages.stage("prepare"):
        case = prepare_volume(scan.name, volume, job.model.preparation, job.device, torch.float32)
    labels = predict_labels(case, job.opened.predict, job.model, job.device, stages, job.config.flips)
    return volume, labels


def _write(scan: Scan, volume: Volume, labels: np.ndarray, job: Job) -> dict[str, float]:
    """Clean, write, measure and draw; the record, which says that all is there, comes last."""
    config, labelling, output = job.config, job.model.labelling, job.config.output
    stages = job.timeline.of(scan.name, "write")
    mark = job.mark(scan)
    with stages.stage("clean"):
        voxel = abs(float(np.linalg.det(volume.affine[:3, :3]))) / 1000
        labels = clean_labels(
            labels, labelling, voxel, largest=config.largest_component, smallest_ml=config.smallest_ml
        )
    with stages.stage("write"):
        write_label(output / scan.label_name, labels, volume.affine)
        if scan.series is not None:
            _write_seg(scan, labels, job)
    with stages.stage("measure"):
        measures = measure(labels, volume.affine, labelling.regions)
    if config.overlays:
        with stages.stage("overlay"):
            image = volume.voxels if volume.voxels.ndim == 3 else volume.voxels[..., 0]
            names, window = labelling.labels, job.model.preparation.window
            picture = output / f"{scan.stem}.png"
            draw_overlay(picture, image, labels, volume.affine, names=names, window=window, title=scan.name)
    seconds = job.timeline.seconds(scan.name)
    write_json(
        job.record(scan),
        {"scan": scan.name, "measures": [asdict(each) for each in measures], "seconds": seconds, "mark": mark},
    )
    return seconds


def _write_seg(scan: Scan, labels: np.ndarray, job: Job) -> None:
    from common.inference.dicom_seg import write_seg  # here, since few need it and it takes a second to load

    assert scan.series is not None
    (digest,) = job.identity["weights"].values()
    write_seg(
        job.config.output / f"{scan.name}.dcm",
        labels,
        scan.series,
        job.model.labelling.regions,
        algorithm="medspeed",
        version=digest[:12],
        keep_patient=job.config.keep_patient,
    )


def _say_plan(scans: Sequence[Scan], job: Job) -> None:
    """Say how much memory the scans will take, and warn where there is less."""
    together, largest = most_bytes(scans, job.model)
    network = window_bytes(job.model)
    free = free_bytes(job.device)
    tqdm.write(
        f"plan: at most {IN_FLIGHT} scans in memory, {together / 2**30:.1f} GiB with the largest ({largest}), and "
        f"{network / 2**30:.1f} GiB for the windows; {free / 2**30:.1f} GiB free"
    )
    if together + network > free:
        tqdm.write("WARNING: that may be more than there is; segment the largest scans one by one, or on another host")


def _is_finished(scan: Scan, job: Job) -> bool:
    record = job.record(scan)
    if not record.is_file() or not (job.config.output / scan.label_name).is_file():
        return False
    try:
        return bool(json.loads(record.read_text(encoding="utf-8")).get("mark") == job.mark(scan))
    except BAD_INPUT:
        return False


def _summarise(job: Job, scans: Sequence[Scan]) -> None:
    """Write the measurements and seconds of all finished scans, and the picture of what this process did."""
    records = [json.loads(job.record(scan).read_text(encoding="utf-8")) for scan in scans if job.record(scan).is_file()]
    output = job.config.output
    write_measures(
        output / "measurements.csv",
        [(each["scan"], [Measures(**found) for found in each["measures"]]) for each in records],
    )
    spans = job.timeline.spans()
    write_json(
        output / "timings.json",
        {
            "backend": job.opened.backend,
            "precision": job.opened.precision,
            "seconds": {each["scan"]: each["seconds"] for each in records},
            "scans in this run": len({span.case for span in spans if span.lane == "write"}),
            "seconds of this run": round(job.timeline.now(), 3),
            "peak_memory_mib": round(peak_memory() / 2**20),
        },
    )
    if len({span.case for span in spans}) > 1:
        draw_timeline(output / "timeline.png", spans)
