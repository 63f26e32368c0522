"""Several trained runs as one run folder, which is exported, handed over and used as that of a single model is."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from medspeed.common.data.dataset import merged_split, read_dataset, read_split
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
        ValueError: weights are damaged or do not fit; nothing is left behind.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; --output of several models must be a new folder")
    network = model.build()
    assert isinstance(network, Ensemble), model
    for part, run, member in zip(network.members, runs, model.members, strict=True):
        initialise(part, run / "best.safetensors", made_of=member.arguments)
    summaries = [read_if_there(run / "summary.json") for run in runs]
    digests = " ".join(member.sha256 for member in model.members)
    save_weights(folder / "best.safetensors", network.state_dict(), {"members": digests})
    write_model(folder, app, model)
    if all((run / "fingerprint.json").is_file() for run in runs):
        first = read_as(runs[0] / "fingerprint.json", Fingerprint, "restore or remove it")
        write_json(folder / "fingerprint.json", asdict(replace(first, scans=read_figures(*runs))))
    _write_data(folder, runs, [summary.get("data", {}) for summary in summaries])


def _write_data(folder: Path, runs: Sequence[Path], data: Sequence[dict[str, Any]]) -> None:
    """Write the ensemble's summary.json, and its split.json where all were trained on one dataset, which is there."""
    summary: dict[str, Any] = {"data": data[0] if all(each == data[0] for each in data) else {}}
    if any(each.get("synthetic") for each in data):
        summary["data"] = {**summary["data"], "synthetic": True}
    if "folder" in summary["data"]:
        with suppress(OSError, ValueError):  # the dataset was moved or changed since
            dataset = read_dataset(Path(summary["data"]["folder"]))
            split = merged_split([read_split(dataset, run / "split.json") for run in runs])
            summary["cases"] = {"training": len(split.training), "validation": len(split.validation)}
            write_json(folder / "split.json", split.to_json())
    if any(data):
        write_json(folder / "summary.json", summary)
