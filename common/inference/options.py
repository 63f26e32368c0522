"""What the inference and evaluation scripts of each app are told; without torch, so that --help answers at once."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from medspeed.common.files import atomic_path
from medspeed.common.inference import TOLERANCE, AnyPrecision, Backend

DEFINITIONS = """
All is measured on the grid of the files, in mm by their affine: Dice, NSD (surface Dice at --tolerance), HD95, ASSD,
volumes, and connected components (26 neighbors), found if 10 percent of their voxels overlap. If both masks are
empty, Dice and distances are undefined and left out of the means; if one is, Dice and NSD are 0, HD95 and ASSD the
diagonal of the image. A missing prediction is listed, left out of the means, and ends the program with status 1; a
prediction without a reference is listed. docs/evaluate.md defines each metric."""
"""The metrics of an evaluation, as the help shows them; surfaces, distances and percentiles are MONAI's."""

DOUBTS = """
A scan is UNCERTAIN, in its line and in measurements.csv, if its label map is empty; if the volume of a structure, the
voxel spacing, the field of view or the intensities are far outside the range of the training cases; if flips or models
disagree (a Dice below 0.7)."""


@dataclass(frozen=True)
class InferConfig:
    """The configuration of inference.

    Args:
        model: run folder, trained or imported (`medspeed export --init`); demo (spleen): small, trained on phantoms.
            Several run folders, or a folder of folds: the mean of their logits, as if they were one model.
        input: a .nii.gz, .nii, .nrrd or .mha file, a folder of them (label maps keep the format), or a folder of DICOM
            series (of several channels: t1, t1ce, t2 and flair of a study, by SeriesDescription or folder name).
        output: folder for the label maps, other than the input's.
        backend: tensorrt, onnxruntime, torch or auto (an engine that fits this GPU, else the fastest one available).
        precision: fp32, fp16, bf16 (torch only), int8 (exported models only) or auto (as trained with torch, else
            fp32).
        device: auto, cpu, cuda or cuda:N.
        overlays: draw a picture of each scan.
        flips: test-time augmentation: axes (of x, y, z = R, A, S) to flip; logits are averaged. xyz takes 8 times as
            long.
        fit_windows: fit the windows to each scan (torch only): never more windows, but smaller ones with less overlap;
            1.2 to 1.6 times as fast, with slightly different label maps.
        largest_component: keep only the largest connected component of each structure; by default as the model says.
        smallest_ml: remove connected components smaller than this volume in ml; 0 keeps all. This and
            --largest-component replace the model's own cleaning.
        keep_patient: copy patient data from DICOM into the DICOM-SEG, as a PACS needs; blank by default.
        network: your.module:function of a model that was trained with a network of your own: its code runs.
    """

    model: tuple[Path, ...]
    input: Path
    output: Path
    backend: Literal["auto", Backend] = "auto"
    precision: Literal["auto", AnyPrecision] = "auto"
    device: str = "auto"
    overlays: bool = True
    flips: str = ""
    fit_windows: bool = False
    largest_component: bool | None = None
    smallest_ml: float | None = None
    keep_patient: bool = False
    network: str | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError where the output would overwrite the input, or another field is out of its bounds."""
        object.__setattr__(self, "model", model_folders(self.model))
        if self.output.resolve() == (self.input if self.input.is_dir() else self.input.parent).resolve():
            raise ValueError(f"output {self.output}: must not be the input folder, whose files would be replaced")
        if self.output.is_file():
            raise ValueError(f"output {self.output}: is a file; it must be a folder, which is created")
        if set(self.flips) - set("xyz") or len(set(self.flips)) != len(self.flips):
            raise ValueError(f"flips {self.flips!r}: must be some of the letters x, y and z, each at most once")
        if not 0 <= (self.smallest_ml or 0.0) < float("inf"):
            raise ValueError(f"smallest_ml {self.smallest_ml}: must be a volume in ml; 0 keeps all")


@dataclass(frozen=True)
class EvaluateConfig:
    """What an evaluation is told: two folders to compare, or a trained run and a dataset.

    Args:
        predictions: folder of label maps (.nii.gz, .nii, .nrrd, .mha), such as `medspeed infer` writes.
        references: folder of label maps of the same names; a dataset.json one folder up names the labels.
        model: instead of predictions: folder of a training run, or several, which first segment the dataset.
        data: instead of references: dataset with labels; if the run was trained on it, only its validation cases.
        labels: structures with their label numbers, such as WT=1+2+3 ET=3; without them, those of the run or of
            dataset.json, or every number.
        output: folder for the tables and label maps; without it, that of the predictions, or RUN/evaluation.
        tolerance: of the NSD, mm.
        network: your.module:function of a model that was trained with a network of your own: its code runs.
    """

    predictions: Path | None = None
    references: Path | None = None
    model: tuple[Path, ...] = ()
    data: Path | None = None
    labels: tuple[str, ...] = ()
    output: Path | None = None
    tolerance: float = TOLERANCE
    network: str | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError where there are not two things to compare, or another value cannot be."""
        if self.model:
            object.__setattr__(self, "model", model_folders(self.model))
        given = [name for name in ("predictions", "references", "model", "data") if getattr(self, name)]
        if given not in (["predictions", "references"], ["model", "data"]):
            raise ValueError(f"expected --predictions and --references, or --model and --data, found {given or 'none'}")
        if self.network and not self.model:
            raise ValueError(f"network {self.network}: only with --model")
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance {self.tolerance}: must be a distance in mm, 0 or more")
        if wrong := [each for each in self.labels if not re.fullmatch(r".+=\d+(\+\d+)*", each)]:
            raise ValueError(f"labels {wrong[0]}: must be NAME=NUMBER or NAME=NUMBER+NUMBER, such as WT=1+2+3")
        if len({each.rpartition("=")[0] for each in self.labels}) < len(self.labels):
            raise ValueError(f"labels {' '.join(self.labels)}: must have a name of its own for each structure")


def model_folder(model: Path) -> Path:
    """Return the folder of a run; for "demo", unless it is there, a copy of the demo weights that takes exports."""
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - of an unknown user it raises nothing
    if model == Path("demo") and not model.exists():
        folder = Path("~/.cache/medspeed/demo").expanduser()
        for shipped in (files("medspeed") / "demo").iterdir():
            content, copy = shipped.read_bytes(), folder / shipped.name
            if not copy.is_file() or copy.read_bytes() != content:
                with atomic_path(copy) as part:
                    part.write_bytes(content)
    return folder.resolve() if folder.is_symlink() else folder  # `latest` may move


def model_folders(models: Path | Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders of runs; a folder of folds (fold-0, ...) means all. A ValueError names an unfinished one."""
    found: list[Path] = []
    for folder in map(model_folder, [models] if isinstance(models, Path) else models):
        folds = [] if (folder / "model.json").exists() or (folder / "environment.json").exists() else _folds(folder)
        for fold in folds:
            if not (fold / "summary.json").is_file():
                raise ValueError(f"model {fold}: not finished; repeat `medspeed folds`, or name the folds to use")
        found += folds or [folder]
    if not found:
        raise ValueError("model: needs a run folder, or several")
    return tuple(found)


def _folds(folder: Path) -> list[Path]:
    """Return the runs of a cross-validation, also those that are still missing; none of another folder."""
    config = folder / "config.yaml"  # as `medspeed folds` wrote it
    given = re.search(r"^folds: (\d{1,3})$", config.read_text(encoding="utf-8"), re.M) if config.is_file() else None
    if given:
        return [folder / f"fold-{number}" for number in range(int(given[1]))]
    return sorted(folder.glob("fold-[0-9]*"), key=lambda fold: (len(fold.name), fold.name))
