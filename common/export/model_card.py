"""The model card of a run: what it is, what it was trained and judged on, its limits, its digests; in Markdown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_object, sha256_of

Json = dict[str, Any]
_WEIGHTS = "best.safetensors"
_VERSIONS = ("torch", "monai", "numpy", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx")
_TASKS = {
    "spleen": "Segmentation of structures in CT volumes (or one other channel) by sliding windows",
    "brats": "Segmentation of overlapping regions in MRI volumes of several channels by sliding windows",
    "pathology": "Classification of patches of whole-slide images as tumour or normal",
}


@dataclass(frozen=True)
class _Run:
    """The files of a run's folder; a file that is not there is empty."""

    folder: Path
    model: Json
    summary: Json
    split: Json
    environment: Json
    dataset: Json

    @property
    def preparation(self) -> Json:
        """How a scan becomes the network's input; empty for patches."""
        return dict(self.model.get("preparation", {}))


def model_card(run: Path) -> str:
    """Return the model card of a run.

    It holds what the run's own files say (model.json, summary.json, split.json, environment.json) and the licence
    that the dataset states, while the dataset still lies where it was; what is not known is called so. No path, host
    or user is in it.

    Args:
        run: folder of a run; of a run made from foreign weights, model.json and the weights are enough.

    Raises:
        FileNotFoundError: there is no model.json.
        ValueError: one of the files is no JSON object.
    """
    if not (run / "model.json").is_file():
        raise FileNotFoundError(f"{run / 'model.json'}: no such file; a model card is made of a training run's folder")
    summary = _read(run / "summary.json")
    data = summary.get("data", {}).get("folder")
    read = _Run(
        run,
        _read(run / "model.json"),
        summary,
        _read(run / "split.json"),
        _read(run / "environment.json"),
        _read(Path(data) / "dataset.json") if data else {},
    )
    parts = (_head, _data, _quality, _limits, _preparation, _usage, _licence, _files, _versions)
    return "\n".join(part(read) for part in parts)


def is_synthetic(run: Path) -> bool | None:
    """Return whether a run was trained on phantoms; None where it does not say."""
    found: bool | None = _read(run / "summary.json").get("data", {}).get("synthetic")
    return found


def _read(path: Path) -> Json:
    return read_object(path, "restore it, or remove it from the run") if path.is_file() else {}


def _labels(run: _Run) -> list[str]:
    """Return the names of the label numbers, background first; none for a classifier."""
    return list(run.model.get("labels", run.model.get("labelling", {}).get("labels", [])))


def _head(run: _Run) -> str:
    app = run.model.get("app", "unknown")
    lines = [f"# Model card: medspeed {app}", "", f"{_TASKS.get(app, 'A model of the medspeed project')}.", ""]
    if _labels(run):
        numbered = (f"{number} {name}" for number, name in enumerate(_labels(run)) if name)
        lines += [f"Labels: {', '.join(numbered)}.", ""]
    regions = run.model.get("labelling", {}).get("regions", [])
    if regions:
        made = (f"{each['name']} of {', '.join(map(str, each['members']))}" for each in regions)
        lines += [f"Regions, which may overlap, by label number: {'; '.join(made)}.", ""]
    return "\n".join([*lines, "**Not a medical device. For research and engineering only; not for clinical use.**", ""])


def _data(run: _Run) -> str:
    data, cases = run.summary.get("data", {}), run.summary.get("cases", {})
    lines = ["## Data", ""]
    if not run.summary:
        return "\n".join(
            [*lines, "Not known: the weights did not come from a training run that this folder records.", ""]
        )
    lines.append(f"- Dataset: {data.get('name', 'not recorded')}")
    lines.append(f"- Kind: {_kind(data.get('synthetic'))}")
    lines.append(f"- Used: {', '.join(f'{count} {part}' for part, count in cases.items()) or 'not recorded'}")
    if "description" in run.split:
        lines.append(f"- Split: {str(run.split['description']).split(' named in ')[0]}")  # a path may follow
    if run.summary.get("held_out") is False:
        lines.append("- NOT HELD OUT: the cases that judge it were trained on")
    return "\n".join([*lines, ""])


def _kind(synthetic: bool | None) -> str:
    if synthetic is None:
        return "not recorded"
    return "SYNTHETIC phantoms, drawn by a program; no patient was scanned" if synthetic else "not synthetic"


def _quality(run: _Run) -> str:
    quality, lines = run.summary.get("quality"), ["## Quality", ""]
    if not quality:
        return "\n".join([*lines, "Not evaluated here.", ""])
    lines += [
        f"{quality['name']}; weights selected on: {quality['selected_on']}.",
        "",
        "| figure | value |",
        "|---|---|",
    ]
    per_case = quality.get("per_case", {})
    rows = {"mean": quality["value"], **quality.get("per_region", {})}
    if quality.get("per_region"):
        rows |= {"worst case": min(per_case.values()), "cases": len(per_case)} if per_case else {}
    else:
        rows = per_case or rows  # a classifier's figures stand where a segmentation's cases do
    lines += [f"| {name} | {_figure(value)} |" for name, value in rows.items()]
    if quality["selected_on"] == "validation":
        lines += ["", "The weights were chosen on validation cases: figures on those are a little too good."]
    if run.summary.get("data", {}).get("synthetic"):
        lines += ["", "These figures were reached on phantoms, and say nothing about patients."]
    return "\n".join([*lines, ""])


def _figure(value: float | None) -> str:
    return "no case holds it" if value is None else (str(value) if isinstance(value, int) else f"{value:.4f}")


def _limits(run: _Run) -> str:
    limits = [
        "Population, scanners, protocols and ages of the training data are not recorded: how well it works on others "
        "is unknown.",
        "Nothing tells the user when an input is unlike the training data.",
    ]
    synthetic = run.summary.get("data", {}).get("synthetic")
    if synthetic:
        limits.insert(0, "Trained on synthetic phantoms alone: it has seen no patient, and is a demonstration.")
    elif synthetic is None:
        limits.insert(0, "What it was trained on is not recorded.")
    preparation = run.preparation
    if preparation.get("window"):
        low, high = preparation["window"]
        limits.append(
            f"Intensities outside {low:g} to {high:g} (Hounsfield units in CT) look alike to it; scans in other units "
            "give wrong results without a warning."
        )
    elif preparation:
        limits.append(
            "Voxels of 0 count as background: of scans whose background is not 0 (not skull-stripped, offset), mean "
            "and deviation of the intensities are wrong. The channels must come in the order of the training data."
        )
    if preparation:
        limits.append(
            f"It works at a spacing of {_spacing(preparation)}: finer structures are lost. Orientation and spacing are "
            "the file's own word: a wrong affine gives wrong results without a warning."
        )
    if "patch_size" in run.model:
        mpp = run.model.get("mpp")
        limits.append(f"Pixel size of the training patches: {f'{mpp:g} um' if mpp else 'not known'}; stains as there.")
    return "\n".join(["## Limits", "", *(f"- {limit}" for limit in limits), ""])


def _spacing(preparation: Json) -> str:
    return " x ".join(f"{side:g}" for side in preparation["spacing"]) + " mm"


def _preparation(run: _Run) -> str:
    preparation, steps = run.preparation, []
    if preparation:
        window = preparation.get("window")
        steps += [
            f"channels: {preparation.get('channels', 1)}; turned to R, A, S",
            f"resampled linearly to {_spacing(preparation)}",
            f"intensities {window[0]:g} to {window[1]:g} scaled to 0 to 1 and clipped; cropped to what lies above"
            if window
            else "cropped to the voxels other than 0; of these, each channel less its mean, by its deviation",
        ]
    if "window_size" in run.model:
        sides = " x ".join(map(str, run.model["window_size"]))
        steps.append(f"sliding windows of {sides} voxels, overlap {run.model.get('overlap', 0):g}; logits averaged")
        steps.append("logits interpolated linearly to the grid of the file, then the label of each voxel")
    if "patch_size" in run.model:
        side = run.model["patch_size"]
        steps.append(f"RGB patches of {side} x {side} pixels, 0 to 255 scaled to -1 to 1; sigmoid of the logit")
    return "\n".join(["## Preparation", "", *(f"- {step}" for step in steps or ["not recorded"]), ""])


def _usage(run: _Run) -> str:
    app = run.model.get("app", "APP")
    command = f"python apps/{app}/infer.py --model RUN --input FOLDER --output RESULTS"
    return "\n".join(
        ["## Use", "", "From the project's own folder, with the folder of this run:", "", f"    {command}", ""]
    )


def _licence(run: _Run) -> str:
    stated = run.dataset.get("licence", run.dataset.get("license"))
    data = f"the dataset states: {stated}" if stated else "not recorded here; ask its source before you share the model"
    return "\n".join(["## Licence", "", "- Program: Apache-2.0", f"- Data: {data}", ""])


def _files(run: _Run) -> str:
    """List what is there, by what it is now, and not by what the summary remembers."""
    exports = sorted(file for kind in ("onnx", "plan") for file in (run.folder / "exports").glob(f"model_*.{kind}"))
    found = [file for file in (run.folder / _WEIGHTS, *exports) if file.is_file()]
    rows = [f"| {file.relative_to(run.folder).as_posix()} | `{sha256_of(file)}` |" for file in found]
    return "\n".join(["## Files", "", "| file | sha256 |", "|---|---|", *rows, ""])


def _versions(run: _Run) -> str:
    versions = run.environment.get("versions", {})
    known = {"Python": run.environment.get("python"), **{name: versions.get(name) for name in _VERSIONS}}
    rows = [f"- {name} {version}" for name, version in known.items() if version]
    if run.environment.get("git"):
        rows.append(f"- medspeed revision {run.environment['git']}")
    if run.summary.get("seed") is not None:
        rows.append(
            f"- recipe {run.summary.get('recipe')}, seed {run.summary['seed']}, {run.summary.get('steps')} steps"
        )
    return "\n".join(["## Versions", "", *(rows or ["Not recorded."]), ""])
