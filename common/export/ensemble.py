"""Several trained runs as one run folder, which is exported, handed over and used as that of a single model is."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from medspeed.common.data.dataset import merged_split, read_names
from medspeed.common.data.fingerprint import Fingerprint
from medspeed.common.export.model_card import read_if_there
from medspeed.common.files import read_as, write_json
from medspeed.common.inference.members import Ensemble
from medspeed.common.inference.model import VolumeModel, initialise, save_weights, write_model
from medspeed.common.inference.uncertain import read_figures


def write_ensemble(folder: Path, app: str, model: VolumeModel, runs: Sequence[Path]) -> None:
    """Write the run folder of an ensemble: model.json, all weights in one file, and what its data were.

    Args:
        folder: to be made, or empty.
        app: whose runs they are.
        model: what `load_models` returned for the runs.
        runs: their folders.

    Raises:
        FileExistsError: the folder holds something.
        ValueError: a file is damaged, or weights do not fit; nothing is left behind.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; --output of several models must be a new folder")
    network = model.build()
    assert isinstance(network, Ensemble), model
    for part, run, member in zip(network.members, runs, model.members, strict=True):
        initialise(part, run / "best.safetensors", made_of=member.arguments)
    data = _data_of(runs)
    digests = " ".join(member.sha256 for member in model.members)
    save_weights(folder / "best.safetensors", network.state_dict(), {"members": digests})
    write_model(folder, app, model)
    for name, content in data.items():
        write_json(folder / f"{name}.json", content)


def _data_of(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return "summary", "split" (by the names of cases: their dataset may have been moved) and "fingerprint"."""
    data = [read_if_there(run / "summary.json").get("data", {}) for run in runs]
    summary: dict[str, Any] = {"data": data[0] if all(each == data[0] for each in data) else {}}
    if any(each.get("synthetic") for each in data):
        summary["data"] = {**summary["data"], "synthetic": True}
    content: dict[str, dict[str, Any]] = {"summary": summary} if any(data) else {}
    if splits := [read_names(run / "split.json") for run in runs if (run / "split.json").is_file()]:
        split = merged_split(splits)
        summary["cases"] = {"training": len(split.training), "validation": len(split.validation)}
        content["split"] = split.to_json()
    if all((run / "fingerprint.json").is_file() for run in runs):
        first = read_as(runs[0] / "fingerprint.json", Fingerprint, "restore or remove it")
        content["fingerprint"] = asdict(replace(first, scans=read_figures(*runs)))
    return content
