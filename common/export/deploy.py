"""What the export script of an app does with a trained run: ONNX models, engines, a Triton repository or a bundle."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from medspeed.common.clock import Clock, repeated
from medspeed.common.data.dataset import Case, make_synthetic, merged_split, read_dataset, read_names
from medspeed.common.data.fingerprint import Fingerprint
from medspeed.common.data.preparation import PreparedCase, prepare_case
from medspeed.common.data.threads import map_in_threads
from medspeed.common.export import ExportConfig
from medspeed.common.export.bundle import served_pipeline, write_volume_bundle
from medspeed.common.export.export import (
    GATE_CASES,
    Exported,
    ExportRecord,
    export_volumes,
    judge_on,
)
from medspeed.common.export.gate import Judge
from medspeed.common.export.int8 import quantiser
from medspeed.common.export.model_card import model_card, read_if_there
from medspeed.common.export.tensorrt_engine import EngineChoice
from medspeed.common.export.triton import write_triton
from medspeed.common.files import check_digest, read_as, sha256_of, write_json
from medspeed.common.inference.measure import read_figures
from medspeed.common.inference.model import Ensemble, VolumeModel, initialise, save_weights, write_model
from medspeed.common.inference.predict import sample_windows
from medspeed.common.inference.predictors import onnxruntime_predictor, read_onnx_metadata
from medspeed.common.ranks import choose_device
from medspeed.common.run import Run

Cases = tuple[Case, ...]
_CALIBRATION_CASES = 8
_SYNTHETIC_CASES = 3
_TIMED = 3  # windows, after one that sets up
_SECONDS = "s per window in ONNX Runtime"


def hand_over(
    app: str,
    task: str,
    config: ExportConfig,
    bundle: Callable[[], Path],
    export: Callable[[Run, EngineChoice, Path], tuple[ExportRecord, Judge]],
    overlap: float = 0.25,
    pipeline: str | None = None,
) -> Path:
    """Hand a run over in the form that the configuration names; return where it lies.

    Args:
        app: its name.
        task: what its networks do, in a sentence for the model card.
        config: which run, and what to make of it.
        bundle: writes the MONAI bundle; returns where it lies.
        export: exports behind the gate (with engines or without), with a folder for what it needs meanwhile.
        overlap: of sliding windows.
        pipeline: what a Triton client segments whole scans with; see `write_triton`.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        FileNotFoundError, ValueError: the run, the data or the weights cannot be used.
    """
    if config.to == "bundle":
        return bundle()
    if config.to != "triton" or config.int8 or not _is_exported(config):
        run = Run(config.run, choose_device(config.device), Clock(), resumed=True)
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            _tell(*export(run, config.engine if config.to == "engine" else "none", Path(scratch)), run)
    if config.to != "triton":
        return config.run / "exports"
    card = model_card(config.run, task)
    return write_triton(config.destination(), f"medspeed_{app}", config.served(), card, overlap, pipeline)


def export_run(app: str, task: str, config: ExportConfig, model: VolumeModel, phantoms: str) -> Path:
    """Hand the run of a segmentation over, as `hand_over` does; `phantoms`, ct or mri, judge a gate without data."""
    if len(config.model) > 1:
        write_ensemble(config.run, app, model, config.model)

    def export(run: Run, engine: EngineChoice, scratch: Path) -> tuple[ExportRecord, Judge]:
        trained = model.build(config.run / "best.safetensors").to(run.device).eval()
        cases, others, origin = _find_cases(config, phantoms, scratch / "phantoms")
        quantise = None
        if config.makes_int8():
            quantise = quantiser(sample_windows(_prepared(others or cases, model), model, most=_CALIBRATION_CASES))
        judge = judge_on(cases, _prepared(cases, model), model, run, origin)
        return export_volumes(trained, model, judge, app, engine, run, quantise), judge

    bundle = partial(write_volume_bundle, config.destination(), config.run, task, model)
    return hand_over(app, task, config, bundle, export, model.overlap, served_pipeline(model))


def _is_exported(config: ExportConfig) -> bool:
    """Return whether the model for Triton is there, of the run's weights; ValueError where it is not as recorded."""
    if not config.served().is_file():
        return False
    check_digest(config.run, config.served())
    return read_onnx_metadata(config.served()).get("weights_sha256") == sha256_of(config.run / "best.safetensors")


def _tell(record: ExportRecord, judge: Judge, run: Run) -> None:
    """Say size, speed and difference of what was exported as a table, and keep all of it as `exports/exports.json`.

    Each model is timed on one window in ONNX Runtime.
    """
    seconds = {}
    for model in record.onnx:
        if model.path is not None:
            predict = onnxruntime_predictor(Path(model.path))
            times = repeated(lambda: predict(judge.windows[:1]), _TIMED)  # noqa: B023 - it is called at once
            seconds[model.precision] = statistics.median(times)
    run.say(precision_table(record, seconds), "result")
    stored = {"gate": judge.origin, "seconds per window in ONNX Runtime": seconds, **asdict(record)}
    write_json(run.directory / "exports" / "exports.json", stored)


def precision_table(record: ExportRecord, seconds: Mapping[str, float]) -> str:
    """Return a Markdown table with a line for each precision, in MiB, `seconds` and logits; a dash is not known."""
    titles = "precision", "ONNX MiB", "engine MiB", _SECONDS, "largest logit difference", "quality change", "verdict"
    rows = [titles, ("---", *["---:"] * 5, "---")]
    engines = {engine.precision: engine for engine in record.engines}
    for model in record.onnx:
        engine = engines.get(model.precision, Exported(model.precision))
        verdict = model.reason or (f"kept; engine: {engine.reason}" if engine.reason else "kept")
        figures = (
            (model.bytes and model.bytes / 2**20, ".1f"),
            (engine.bytes and engine.bytes / 2**20, ".1f"),
            (seconds.get(model.precision), ".3f"),
            (model.max_abs_diff, ".2g"),
            (model.quality_delta, ".4f"),
        )
        numbers = ("—" if value is None else format(value, form) for value, form in figures)
        rows.append((model.precision, *numbers, " ".join(verdict.replace("|", "\\|").split())))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _find_cases(config: ExportConfig, phantoms: str, scratch: Path) -> tuple[Cases, Cases, str]:
    """Return the cases for the gate, others to calibrate INT8 on, and what they are in words.

    They are those of --data, or the run's own for validation and training, or synthetic ones without labels.

    Raises:
        FileNotFoundError, ValueError: the dataset cannot be read, or has no labelled case.
    """
    summary, split = (read_if_there(config.run / f"{name}.json") for name in ("summary", "split"))
    known = summary.get("data", {}).get("folder")
    trained_on = Path(known) if known and split else None
    folder = config.data or trained_on
    if folder is None or not (folder / "dataset.json").is_file():
        if config.data is not None:
            raise FileNotFoundError(f"{config.data / 'dataset.json'}: no such file; --data takes a dataset folder")
        folder = make_synthetic(scratch, "make_phantoms", phantoms, "--cases", str(2 * _SYNTHETIC_CASES))
        made = tuple(replace(case, label=None) for case in read_dataset(folder).cases)
        origin = "(synthetic scans, because the run's data are not available; pass --data for a Dice)"
        return made[:_SYNTHETIC_CASES], made[_SYNTHETIC_CASES:], origin
    cases = tuple(case for case in read_dataset(folder).cases if case.label is not None)
    if not cases:
        raise ValueError(f"{folder}: no labelled case; the parity gate needs labels to compute Dice")
    own = trained_on is not None and folder.resolve() == trained_on.resolve()
    validation, training = (
        [case for case in cases if own and case.name in split.get(part, ())] for part in ("validation", "training")
    )
    gate = tuple(validation or cases)[:GATE_CASES]
    others = [case for case in (training if own else cases) if case not in gate]
    return gate, tuple(others[:_CALIBRATION_CASES]), f"of {folder}"


def _prepared(cases: Sequence[Case], model: VolumeModel) -> list[PreparedCase]:
    prepare = partial(prepare_case, preparation=model.preparation, allowed=model.labelling.numbers)
    return map_in_threads(prepare, cases, "preparing cases for the gate")


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
