"""What a dataset's training cases look like, and the preparation that follows from it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

from common.data.cases import Case, Dataset
from common.data.geometry import box_above
from common.data.parallel import map_in_threads
from common.data.preparation import Preparation
from common.data.sources import SourceDigests, read_kept
from common.data.volumes import check_same_grid, read_header, read_volume
from common.files import write_json

# The MONAI fast-training tutorial's own figures (acceleration/fast_training_tutorial.ipynb), by the name that the
# dataset gives itself: MSD Task09 is a "Spleen". They spare reading its voxels.
KNOWN_CT = {"Spleen": Preparation(spacing=(1.5, 1.5, 2.0), normalisation="window", window=(-57.0, 164.0))}
# As nnU-Net (dataset fingerprint extractor): every case has the same say, and the figures do not depend on chance.
VOXELS_PER_CASE = 10_000
_FINGERPRINT_VERSION = 3

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Intensity:
    """One channel's voxels with a label above 0, in the file's unit (CT: HU), pooled over the cases."""

    percentile_0_5: float
    percentile_99_5: float
    mean: float
    std: float


@dataclass(frozen=True)
class Fingerprint:
    """What the training cases have in common.

    Attributes:
        modality: one per channel, as `dataset.json` names it.
        cases: how many were read.
        spacing: the median per axis R, A, S, mm.
        shape: the median per axis R, A, S, voxels of the file.
        extent: the same of the box around what is not 0, by the first channel where it is no CT; the shape where only
            headers were read.
        intensity: of the foreground, one per channel that was read (of CT all, else the first); None where only headers
            were read.
        label_fractions: of all voxels, one per label number; None where only headers were read.
    """

    modality: tuple[str, ...]
    cases: int
    spacing: Triple
    shape: tuple[int, int, int]
    extent: tuple[int, int, int]
    intensity: tuple[Intensity, ...] | None
    label_fractions: tuple[float, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Fingerprint":
        """Return what `to_json` was made from."""
        intensity, fractions = content["intensity"], content["label_fractions"]
        return cls(
            modality=tuple(content["modality"]),
            cases=content["cases"],
            spacing=tuple(content["spacing"]),
            shape=tuple(content["shape"]),
            extent=tuple(content["extent"]),
            intensity=intensity and tuple(Intensity(**channel) for channel in intensity),
            label_fractions=fractions and tuple(fractions),
        )


def fingerprint(
    cases: Sequence[Case],
    dataset: Dataset,
    store: Path | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> Fingerprint:
    """Measure the training cases: spacing, shape, foreground intensity, share of each label.

    Image and label must share a grid, and labels be of the dataset's list. For a dataset whose preparation is known
    (`KNOWN_CT`) only headers are read; the rest is then checked when the cases are prepared.

    Args:
        cases: the training cases, with labels; validation cases stay unseen.
        dataset: gives modality and labels.
        store: a folder that keeps the figures; they are measured again when a file or a list has changed.
        workers: cases in work at the same time; by default one per core that this process may use.
        progress: show a progress bar.

    Raises:
        ValueError: a file is damaged, image and label differ in geometry, a label is not listed, nothing is labelled.
    """
    if known_preparation(dataset) is not None:
        grids = map_in_threads(lambda case: _ras_grid(*read_header(case.image)), cases, "headers", workers, progress)
        return _summary(dataset, [(spacing, shape, shape) for spacing, shape in grids], None, None)
    if store is None:
        return _measure(cases, dataset, workers, progress)
    digests = SourceDigests(store)
    files = [file for case in cases for file in (case.image, case.label) if file is not None]
    key = {
        "version": _FINGERPRINT_VERSION,
        "modality": list(dataset.modality),
        "labels": list(dataset.labels),
        "sources": map_in_threads(digests.sha256, files, "sources", workers, progress=False),
    }
    path = store / "fingerprint.json"
    kept = read_kept(path)
    if kept.get("key") == key:
        return Fingerprint.from_json(kept["fingerprint"])
    measured = _measure(cases, dataset, workers, progress)
    digests.save()
    write_json(path, {"key": key, "fingerprint": measured.to_json()}, flush=False)
    return measured


def known_preparation(dataset: Dataset) -> Preparation | None:
    """Return the published preparation of a dataset that is known by name and modality, else None."""
    return KNOWN_CT.get(dataset.name) if _is_ct(dataset) else None


def plan_preparation(
    dataset: Dataset, figures: Fingerprint, spacing: Triple | None = None, window: tuple[float, float] | None = None
) -> Preparation:
    """Choose how cases are prepared: from the known figures of the dataset, else from its fingerprint.

    Args:
        dataset: its modality decides the normalisation: a window for CT, z-scores for everything else.
        figures: what `fingerprint` returned.
        spacing: wanted instead of the choice, mm, axes R, A, S.
        window: wanted instead of the choice, HU, CT only.

    Raises:
        ValueError: a wanted value makes no sense, or none can be chosen.
    """
    chosen_window, _ = _choose_window(dataset, figures, window)
    return Preparation(
        spacing=_choose_spacing(dataset, figures, spacing)[0],
        normalisation="zscore" if chosen_window is None else "window",
        window=chosen_window,
        channels=len(dataset.modality),
    )


def explain_preparation(
    dataset: Dataset, figures: Fingerprint, spacing: Triple | None = None, window: tuple[float, float] | None = None
) -> tuple[str, ...]:
    """Say in one line each what `plan_preparation` chooses for the same arguments, and why."""
    return _choose_spacing(dataset, figures, spacing)[1], _choose_window(dataset, figures, window)[1]


def _choose_spacing(dataset: Dataset, figures: Fingerprint, wanted: Triple | None) -> tuple[Triple, str]:
    known = known_preparation(dataset)
    if wanted is not None:
        spacing, why = wanted, "as asked"
    elif known is not None:
        spacing, why = known.spacing, f"the MONAI fast-training recipe's for {dataset.name}"
    else:
        right, anterior, superior = figures.spacing
        spacing = (round(right, 2), round(anterior, 2), round(superior, 2))
        why = f"the median of {figures.cases} training cases"
    return spacing, f"spacing ({', '.join(f'{size:g}' for size in spacing)}) mm: {why}"


def _choose_window(
    dataset: Dataset, figures: Fingerprint, wanted: tuple[float, float] | None
) -> tuple[tuple[float, float] | None, str]:
    known = known_preparation(dataset)
    modality = ", ".join(dataset.modality)
    if not _is_ct(dataset):
        if wanted is not None:
            raise ValueError(f"window {wanted}: only CT has one, and the modality is {modality}; leave it out")
        return None, f"z-score per channel over the voxels that are not 0: the modality is {modality}, not CT"
    if wanted is not None:
        (low, high), why = wanted, "as asked"
    elif known is not None and known.window is not None:
        (low, high), why = known.window, f"the MONAI fast-training recipe's for {dataset.name}"
    else:
        assert figures.intensity is not None, "only headers were read"
        low = float(round(min(channel.percentile_0_5 for channel in figures.intensity)))
        high = float(round(max(channel.percentile_99_5 for channel in figures.intensity)))
        why = f"0.5 and 99.5 percentiles of the foreground of {figures.cases} training cases"
    text = f"window ({low:g}, {high:g}) HU"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{text}: the lower bound must lie below the upper one ({why})")
    return (low, high), f"{text}: {why}"


def _is_ct(dataset: Dataset) -> bool:
    return all(channel.strip().upper() == "CT" for channel in dataset.modality)


@dataclass(frozen=True)
class _CaseFigures:
    spacing: np.ndarray  # [3] mm, R, A, S
    shape: np.ndarray  # [3] voxels, R, A, S
    extent: np.ndarray  # [3] voxels, R, A, S
    label_counts: np.ndarray  # [K] voxels of each label number
    samples: np.ndarray  # [N, C] intensities of at most VOXELS_PER_CASE foreground voxels


def _measure(cases: Sequence[Case], dataset: Dataset, workers: int | None, progress: bool) -> Fingerprint:
    measured = map_in_threads(lambda case: _case_figures(case, dataset), cases, "fingerprint", workers, progress)
    samples = np.concatenate([case.samples for case in measured])
    if not len(samples):
        raise ValueError(f"{dataset.folder}: no voxel of {len(cases)} training cases has a label above 0")
    counts = np.sum([case.label_counts for case in measured], axis=0)
    low, high = np.percentile(samples, [0.5, 99.5], axis=0)
    intensity = zip(low.tolist(), high.tolist(), samples.mean(0).tolist(), samples.std(0).tolist(), strict=True)
    return _summary(
        dataset,
        [(case.spacing, case.shape, case.extent) for case in measured],
        tuple(Intensity(*channel) for channel in intensity),
        tuple((counts / counts.sum()).tolist()),
    )


def _summary(
    dataset: Dataset,
    grids: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    intensity: tuple[Intensity, ...] | None,
    label_fractions: tuple[float, ...] | None,
) -> Fingerprint:
    spacing, shape, extent = (np.median(figures, axis=0) for figures in zip(*grids, strict=True))
    return Fingerprint(
        modality=dataset.modality,
        cases=len(grids),
        spacing=tuple(spacing.tolist()),
        shape=tuple(shape.round().astype(int).tolist()),
        extent=tuple(extent.round().astype(int).tolist()),
        intensity=intensity,
        label_fractions=label_fractions,
    )


def _case_figures(case: Case, dataset: Dataset) -> _CaseFigures:
    assert case.label is not None, "training cases have labels"
    # Intensities choose the window of CT alone; of others the box around the first channel is enough.
    image = read_volume(case.image, len(dataset.modality), first_only=not _is_ct(dataset))
    label = read_volume(case.label)
    check_same_grid(image, label)
    # Voxels in the order of the file, so that flattening copies nothing.
    numbers = label.voxels.ravel(order="F")
    places = np.flatnonzero(numbers != 0)
    values, counts = np.unique(numbers[places], return_counts=True)
    label_counts = dict(zip(values.tolist(), counts.tolist(), strict=True)) | {0: numbers.size - len(places)}
    named = {number: name for number, name in enumerate(dataset.labels) if name}
    unlisted = sorted(number for number in set(label_counts) - set(named) if label_counts[number])
    if unlisted:
        listed = ", ".join(f"{number} {name}" for number, name in named.items())
        raise ValueError(f"{case.label}: found the labels {unlisted}; dataset.json lists {listed}")
    chosen = places[np.linspace(0, len(places) - 1, min(len(places), VOXELS_PER_CASE)).astype(int)]
    spacing, shape = _ras_grid(image.voxels.shape, image.affine)
    _, extent = _ras_grid(_extent(image.voxels), image.affine)
    return _CaseFigures(
        spacing,
        shape,
        extent,
        np.array([label_counts.get(number, 0) for number in range(len(dataset.labels))]),
        image.voxels.reshape(numbers.size, -1, order="F")[chosen].astype(np.float64),
    )


def _extent(voxels: np.ndarray) -> tuple[int, ...]:
    """Return the sides of the box around all voxels [X, Y, Z] or [X, Y, Z, C] that are not 0; a voxel if none is."""
    box = box_above(torch.from_numpy((voxels != 0).T.view(np.uint8)).reshape(-1, *voxels.shape[2::-1]), 0)
    return tuple(stop - first for first, stop in reversed(box)) if box is not None else (1, 1, 1)


def _ras_grid(shape: tuple[int, ...], affine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return spacing in mm and shape in voxels by the axes R, A, S that the file's axes run along."""
    axes = nib.orientations.io_orientation(affine)[:, 0].argsort()
    return np.linalg.norm(affine[:3, :3], axis=0)[axes], np.array(shape[:3])[axes]
