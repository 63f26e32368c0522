"""The series of an MRI study as the channels of one scan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from medspeed.common.data.dicom import DicomSeries, read_series
from medspeed.common.data.dicom_slices import sequence_of
from medspeed.common.data.volumes import Volume, check_same_grid


def group_channels(found: Sequence[DicomSeries], channels: Sequence[str]) -> tuple[DicomSeries, ...]:
    """Return a scan of each study (StudyInstanceUID): of its series those that are the channels, in their order.

    A series is the channel that its SeriesDescription names, or else its folder: t1, t1ce (T1 with contrast), t2 or
    flair. A scan with a channel that no series or several are has that as its problem.

    Raises:
        ValueError: the channels are not such, each once.
    """
    wanted = [sequence_of(name) for name in channels]
    if not wanted or "" in wanted or len(set(wanted)) < len(wanted):
        names = ", ".join(channels) or "without names, of an older version"
        raise ValueError(
            f"the model's channels ({names}): DICOM series are matched to t1, t1ce, t2 and flair, each once; combine "
            "the series into a 4-D NIfTI"
        )
    studies: dict[str, list[DicomSeries]] = {}
    for series in found:
        studies.setdefault(series.study, []).append(series)
    return tuple(_scan(*study, wanted) for study in sorted(studies.items()))


def _scan(study: str, series: Sequence[DicomSeries], wanted: Sequence[str]) -> DicomSeries:
    named = {name: [each for each in series if each.sequence == name] for name in wanted}
    unclear = [
        f"{name} is {' and '.join(s.name for s in each) or 'none'}" for name, each in named.items() if len(each) != 1
    ]
    parts = tuple(each[0] for each in named.values() if each)
    problems = [f"{each.name}: {each.problem}" for each in parts if each.problem]
    if unclear:
        said = f"of its {len(series)} series, {'; '.join(unclear)}; each channel must be one"
        problems = [f"{said}: name them in SeriesDescription or folders, leave out the others, or write a 4-D NIfTI"]
    notes = [f"{each.name}: {note}" for each in parts for note in each.notes]
    if left := len(series) - len(parts):
        notes.append(f"{left} other series of the study left out: no channel of the model")
    return replace((*parts, *series)[0], name=study, channels=parts, problem="; ".join(problems), notes=tuple(notes))


def read_channels(scan: DicomSeries) -> Volume:
    """Read the channels of a scan into one volume, [X, Y, Z, C]; affine and path as of `read_series`.

    Raises:
        ValueError: as `read_series`; or the series do not lie on one grid.
    """
    if scan.problem:
        raise ValueError(f"{scan.name}: {scan.problem}")
    first, *others = parts = [read_series(each) for each in scan.channels]
    try:
        for other in others:
            check_same_grid(first, other)
    except ValueError:
        names = ", ".join(each.name for each in scan.channels)
        raise ValueError(f"{scan.name}: {names} are not on one grid: register and resample them first") from None
    voxels = np.empty((*first.voxels.shape, len(parts)), np.result_type(*(part.voxels for part in parts)), order="F")
    for number, part in enumerate(parts):
        voxels[..., number] = part.voxels
    return Volume(voxels, first.affine, Path(scan.name))
