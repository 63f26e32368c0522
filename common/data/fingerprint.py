"""What a dataset's training cases look like, and the preparation that follows from it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import nibabel as nib
import numpy as np
import torch

from medspeed.common.data.cache import file_state
from medspeed.common.data.dataset import Case, Dataset
from medspeed.common.data.geometry import Shape, Spacing, box_above, triple
from medspeed.common.data.preparation import Preparation, read_case
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import Volume
from medspeed.common.files import from_json, plural, read_object, write_json

# As nnU-Net (dataset fingerprint extractor): every case has the same say, and the figures do not depend on chance.
VOXELS_PER_CASE = 10_000  # few are taken repeatedly
_OF_RARE = 10  # more of each label that has none among them
_FINGERPRINT_VERSION = 11
_REACH = 4  # times the width of all labels' window, that the window of one may go beyond it
_KNOWN_READ = 16  # cases of a dataset whose preparation is known
_SAMPLED = 100_000  # voxels of an image that its percentiles are of
AIR = -500.0  # HU: at or below it lies what surrounds a patient, of which there is more or less

Window = tuple[float, float]  # lower and upper HU


@dataclass(frozen=True)
class CaseFigures:
    """What a scan looks like, and how large its structures are."""

    spacing: Spacing  # along R, A, S, mm
    size: tuple[float, float, float]  # field of view along R, A, S, mm
    # Percentiles 5, 50 and 95 of its first channel: of CT above -500 HU; else of what is not 0, in standard deviations
    intensity: tuple[float, float, float]
    volumes_ml: tuple[float, ...] = ()  # by label number, that of the background 0; empty without a label map


@dataclass(frozen=True)
class Fingerprint:
    """What the training cases have in common."""

    modality: tuple[str, ...]  # one per channel, as `dataset.json` names it
    cases: int  # how many were read
    spacing: Spacing  # the median per axis R, A, S, mm
    shape: Shape  # the median per axis R, A, S, voxels of the file
    extent: Shape  # the same of the box around what is not 0 in the channels that were read: of CT all, else the first
    # Percentiles 0.5 and 99.5 of the voxels with a label above 0, pooled over the cases, or 10 and 90 of those with one
    # label, the lowest and highest, in the file's unit (CT: HU); None in some runs of earlier versions
    foreground: Window | None
    scans: tuple[CaseFigures, ...] = ()  # of those read, that scans are compared with when the model is used


def fingerprint(
    cases: Sequence[Case], dataset: Dataset, store: Path, known: Preparation | None = None, workers: int | None = None
) -> Fingerprint:
    """Measure training cases, which have labels: spacing, shape, foreground intensity.

    A folder, the `store`, keeps the figures; they are measured again when a file or a list has changed. Where the
    preparation of the dataset is known, at most 16 cases are read, evenly spread. What `read_case` refuses is a
    ValueError; so is that nothing is labelled.
    """
    if known is not None:
        cases = cases[:: -(-len(cases) // _KNOWN_READ)]
    sources = [[str(file.absolute()), *file_state(file)] for each in cases for file in (each.image, each.label) if file]
    key = [_FINGERPRINT_VERSION, list(dataset.modality), list(dataset.labels), sources]
    path = store / "fingerprint.json"
    with suppress(FileNotFoundError, ValueError):  # what is damaged is made again
        kept = read_object(path)
        if kept.get("key") == key:
            return from_json(Fingerprint, kept["fingerprint"])
    measured = map_in_threads(lambda case: _case_figures(case, dataset), cases, "measuring cases", workers)
    grids, samples_each, scans = zip(*measured, strict=True)
    samples = np.concatenate(samples_each)
    if not len(samples):
        raise ValueError(f"{dataset.folder}: no voxel of the training cases ({len(cases)}) has a label above 0")
    *channels, labels = samples.T
    each_label = [each[labels == label] for each in channels for label in np.unique(labels)]
    # In float64: between two values of int16 a percentile may overflow.
    own = [np.percentile(each.astype(float), [10, 90]) for each in each_label]
    pooled = np.stack([np.percentile(each.astype(float), [0.5, 99.5]) for each in channels])
    reach = _REACH * max(np.ptp(pooled), 1)  # rare labels are not cut off, nor does metal flatten the others
    bounds = np.clip([*pooled, *own], pooled.min() - reach, pooled.max() + reach)
    spacing, shape, extent = np.median(grids, axis=0)
    found = Fingerprint(
        modality=dataset.modality,
        cases=len(cases),
        spacing=tuple(spacing.tolist()),
        shape=triple(shape.round()),
        extent=triple(extent.round()),
        foreground=(float(bounds[:, 0].min()), float(bounds[:, 1].max())),
        scans=scans,
    )
    write_json(path, {"key": key, "fingerprint": asdict(found)}, flush=False)
    return found


def plan_preparation(
    dataset: Dataset,
    figures: Fingerprint,
    spacing: Spacing | None = None,
    window: Window | None = None,
    known: Preparation | None = None,
    finest: float = 0.0,
) -> tuple[Preparation, tuple[str, str]]:
    """Choose how cases are prepared: as asked, else as is known for the dataset, else from its fingerprint.

    Its modality decides the normalisation: a window (HU) for CT, z-scores for everything else. The spacing is in mm,
    along R, A, S; what is not asked is no finer than `finest`. A line each gives the reason; nonsense is a ValueError.
    """
    those, channels = plural(figures.cases, "measured case"), len(dataset.modality)
    source = "as asked" if spacing else "known for this dataset or --init" if known else f"median of {those}"
    if spacing is None:
        sides = known.spacing if known else [round(side, 2 if side >= 0.1 else 4) for side in figures.spacing]
        spacing = triple((max(side, finest) for side in sides), float)
        source += f", but no finer than {finest:g} mm, so that few crops cover a scan" * (min(spacing) == finest)
    line = f"spacing ({', '.join(f'{size:g}' for size in spacing)}) mm: {source}"
    if not is_ct(dataset):
        modality = ", ".join(dataset.modality)
        if window is not None:
            raise ValueError(f"window {window}: applies to CT only, and the modality is {modality}; drop it")
        said = f"normalization: z-score per channel over nonzero voxels (modality {modality}, not CT)"
        if "CT" in modality.upper().split(", "):
            said += "; it leaves CT little contrast in soft tissue: clip the CT of all scans first, as to -160 to 240"
        return Preparation(spacing, "zscore", None, channels), (line, said)
    source = "as asked" if window else "known for this dataset or --init"
    window = known.window if known and not window else window
    if window is None:
        assert figures.foreground is not None
        low, high = map(round, figures.foreground)
        window = float(low), float(max(high, low + 1))
        source = f"0.5 and 99.5 percentiles of the foreground of {those}, widened to 10 and 90 of each label"
    said = f"window ({window[0]:g}, {window[1]:g}) HU: {source}"
    return Preparation(spacing, "window", window, channels), (line, said)


def is_ct(dataset: Dataset) -> bool:
    """Return whether every channel of a dataset is CT."""
    return all(channel.strip().upper() == "CT" for channel in dataset.modality)


def scan_figures(volume: Volume, ct: bool) -> CaseFigures:
    """Return the figures of a scan [X, Y, Z] or [X, Y, Z, C], whatever its file's orientation."""
    spacing, shape = _along_ras(volume.affine, volume.voxels.shape[:3])
    first = volume.voxels.reshape(*volume.voxels.shape[:3], -1, order="F")[..., 0].ravel(order="K")
    values = first[np.linspace(0, first.size - 1, min(first.size, _SAMPLED)).astype(int)].astype(np.float64)
    values = values[values > AIR if ct else values != 0]
    if not len(values):
        values = np.array([AIR])  # as far outside as can be told
    elif not ct:
        values = (values - values.mean()) / (values.std() or 1)
    parts = spacing.round(4), (spacing * shape).round(2), np.percentile(values, [5, 50, 95]).round(3)
    return CaseFigures(*(triple(part, float) for part in parts))


def _case_figures(case: Case, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, CaseFigures]:
    """Return spacing, shape and extent [3, 3], intensities and label [N, C + 1] of some voxels, and the figures."""
    # Intensities choose the window of CT alone; of others the box around the first channel is enough.
    allowed = [number for number, name in enumerate(dataset.labels) if name]
    image, labels = read_case(case, len(dataset.modality), allowed, first_only=not is_ct(dataset))
    numbers = labels.ravel(order="F")  # as in the file, so that flattening copies nothing
    places = np.flatnonzero(numbers)
    chosen = places[np.linspace(0, len(places) - 1, VOXELS_PER_CASE * bool(len(places))).round().astype(int)]
    counts = np.bincount(numbers[places], minlength=len(dataset.labels))
    for rare in {*np.flatnonzero(counts).tolist()} - {*numbers[chosen].tolist()}:  # it lies between those chosen
        own = np.flatnonzero(numbers == rare)
        chosen = np.append(chosen, own[np.arange(_OF_RARE) * len(own) // _OF_RARE])
    filled = torch.from_numpy((image.voxels != 0).T.view(np.uint8)).reshape(-1, *image.voxels.shape[2::-1])
    box = box_above(filled, 0) or [(0, side) for side in filled.shape[1:]]
    extent = [stop - first for first, stop in reversed(box)]
    samples = np.column_stack((image.voxels.reshape(numbers.size, -1, order="F")[chosen], numbers[chosen]))
    volumes = tuple((counts * image.voxel_ml).round(9).tolist())
    figures = replace(scan_figures(image, is_ct(dataset)), volumes_ml=volumes)
    return _along_ras(image.affine, image.voxels.shape[:3], extent), samples, figures


def _along_ras(affine: np.ndarray, *shapes: Sequence[int]) -> np.ndarray:
    """Return the spacing in mm, and n shapes, by the axes R, A, S that the file's axes run along, [1 + n, 3]."""
    axes = nib.orientations.io_orientation(affine)[:, 0].argsort()
    return np.stack([np.linalg.norm(affine[:3, :3], axis=0), *shapes])[:, axes]
