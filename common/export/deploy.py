"""What the export script of an app does with a trained run: ONNX models, engines, a Triton repository or a bundle.

Source: Triton's model repository and model configuration guides (docs.nvidia.com/deeplearning/triton-inference-server)
and its published protobuf model_config.proto; the tests parse what is written here with that protobuf.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from medspeed.common.clock import Clock, repeated
from medspeed.common.data.dataset import Case, Split, SplitNames, make_synthetic, read_dataset
from medspeed.common.data.fingerprint import Fingerprint
from medspeed.common.data.preparation import PreparedCase, prepare_case, prepare_volume
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import read_volume
from medspeed.common.export.bundle import served_pipeline, write_volume_bundle
from medspeed.common.export.export import GATE_CASES, Exported, Exports, export_volumes, judge_on
from medspeed.common.export.gate import Judge
from medspeed.common.export.int8 import quantise as quantised
from medspeed.common.export.model_card import filled, model_card, read_if_there, write_package
from medspeed.common.export.onnx_model import OPSET, numbers, read_metadata
from medspeed.common.export.options import ExportConfig
from medspeed.common.files import check_digest, read_as, sha256_of, write_json
from medspeed.common.inference.evaluation import merged_split
from medspeed.common.inference.measure import read_figures
from medspeed.common.inference.model import Ensemble, VolumeModel, initialise, save_weights, write_model
from medspeed.common.inference.predict import sample_windows
from medspeed.common.inference.predictors import onnxruntime_predictor, read_onnx_metadata, with_exact_norms
from medspeed.common.ranks import choose_device
from medspeed.common.run import Run

Cases = tuple[Case, ...]
_CALIBRATION_CASES = 8
_SYNTHETIC_CASES = 3
_TIMED = 3  # windows, after one that sets up
_KEPT = ("weights_sha256", "precision", "labels", "regions", "window", "smallest")  # of metadata, in Triton's README


def export_run(app: str, task: str, config: ExportConfig, model: VolumeModel, phantoms: str | None) -> Path:
    """Hand the run of a segmentation over in the form that the configuration names; return where it lies.

    `task` is what its networks do, in a sentence without a full stop; `phantoms`, ct or mri, are the synthetic cases
    for a gate without data.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        FileNotFoundError, ValueError: the run, the data or the weights cannot be used.
    """
    if len(config.model) > 1:
        write_ensemble(config.run, app, model, config.model)
    if config.to == "bundle":
        return write_volume_bundle(config.destination, config.run, task, model)
    run, quantise = run_to_export(config), None
    if run is not None:
        trained = model.build(config.run / "best.safetensors").to(run.device).eval()
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            cases, others, origin = _find_cases(config, phantoms, Path(scratch) / "phantoms")
            if config.int8 or config.precision == "int8":
                windows = sample_windows(_prepared(others or cases, model), model, most=_CALIBRATION_CASES)
                quantise = partial(quantised, windows=windows)
            judge = judge_on(cases, _prepared(cases, model), model, run, origin)
            tell(export_volumes(trained, model, judge, app, config.engines, run, quantise), judge, run)
    return hand_over(app, task, config, model.overlap, served_pipeline(model))


def run_to_export(config: ExportConfig) -> Run | None:
    """Open the run on its device; None where nothing is to be made: a Triton repository of a model that is there."""
    if config.to == "triton" and not config.int8 and config.served.is_file():
        check_digest(config.run, config.served)
        weights = read_onnx_metadata(config.served).get("weights_sha256")
        if weights == sha256_of(config.run / "best.safetensors"):
            return None
    return Run(config.run, choose_device(config.device), Clock(), resumed=True)


def hand_over(app: str, task: str, config: ExportConfig, overlap: float = 0.25, pipeline: str | None = None) -> Path:
    """Return the folder of the exports, or write a Triton repository of one of them; see `write_triton`."""
    if config.to != "triton":
        return config.run / "exports"
    card = model_card(config.run, task)
    return write_triton(config.destination, f"medspeed_{app}", config.served, card, overlap, pipeline)


def write_triton(
    repository: Path, name: str, model: Path, card: str, overlap: float = 0.25, pipeline: str | None = None
) -> Path:
    """Write a model folder of a Triton repository, which may hold others, and return it: `triton/`, filled in.

    The configuration leaves to the server what it can read from the model, one of exports/model_*.onnx. Its group
    normalisations are in float64, since ONNX Runtime's are not exact in float32 (`with_exact_norms`). `pipeline` is the
    inference.json that segments whole scans of volumes (see `bundle.served_pipeline`).

    Raises:
        FileNotFoundError: there is no such model.
        FileExistsError: `repository`/`name` holds something.
        ValueError: the model is none that `export_onnx` wrote.
    """
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such file; if the parity gate rejected it, serve another --precision")
    metadata = read_metadata(model)
    window, (_, best, most) = numbers(metadata["window"]), numbers(metadata["batch"])
    kept = {key: metadata[key] for key in _KEPT if key in metadata}
    values = {"name": name, "window": window, "best": best, "most": most, "kept": kept, "opset": OPSET}
    values |= {"overlap": overlap, "pipeline": pipeline}
    files: dict[str, str | bytes] = {"1/model.onnx": with_exact_norms(model), "MODEL_CARD.md": card}
    for template in sorted(Path(__file__).with_name("triton").iterdir()):
        files[template.stem] = filled(template, values)
    return write_package(repository / name, files | ({"inference.json": pipeline} if pipeline else {}))


def tell(exports: Exports, judge: Judge, run: Run) -> None:
    """Say size, speed (of a window) and difference of exports as a table; keep all as `exports/exports.json`."""
    seconds = {}
    for model in exports:
        if model.kind == "onnx" and model.path is not None:
            predict = partial(onnxruntime_predictor(Path(model.path)), judge.windows[:1])
            seconds[model.precision] = statistics.median(repeated(predict, _TIMED))
    run.say(precision_table(exports, seconds), "result")
    rows = {kind: [asdict(each) for each in exports if each.kind == kind] for kind in ("onnx", "engine")}
    stored = {"gate": judge.origin, "seconds per window in ONNX Runtime": seconds, **rows}
    write_json(run.directory / "exports" / "exports.json", stored)


def precision_table(exports: Exports, seconds: Mapping[str, float]) -> str:
    """Return a Markdown table with a line for each precision, in MiB, `seconds` and logits; a dash is not known."""
    titles = "ONNX MiB", "engine MiB", "s per window in ONNX Runtime", "largest logit difference", "quality change"
    rows: list[Sequence[str]] = [("precision", *titles, "verdict"), ("---", *["---:"] * 5, "---")]
    engines = {each.precision: each for each in exports if each.kind == "engine"}
    for model in [each for each in exports if each.kind == "onnx"]:
        engine = engines.get(model.precision, Exported("engine"))
        verdict = model.reason or (f"kept; engine: {engine.reason}" if engine.reason else "kept")
        sizes = (each.bytes and each.bytes / 2**20 for each in (model, engine))
        values = *sizes, seconds.get(model.precision), model.max_abs_diff, model.quality_delta
        forms = zip(values, (".1f", ".1f", ".3f", ".2g", ".4f"), strict=True)
        numbers = ("—" if value is None else format(value, form) for value, form in forms)
        rows.append((model.precision, *numbers, " ".join(verdict.replace("|", "\\|").split())))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _find_cases(config: ExportConfig, phantoms: str | None, scratch: Path) -> tuple[Cases, Cases, str]:
    """Return the cases for the gate, others to calibrate INT8 on, and what they are in words.

    They are those of --data, or the run's own for validation and training, or synthetic ones without labels.
    """
    summary, split = (read_if_there(config.run / f"{name}.json") for name in ("summary", "split"))
    known = summary.get("data", {}).get("folder")
    own = Path(known) if known and split else None
    folder = config.data or own
    if folder is None or not (config.data or (folder / "dataset.json").is_file()):
        if phantoms is None:
            raise FileNotFoundError(f"{config.run}: the run's data are not available; pass a dataset with --data")
        folder = make_synthetic(scratch, "make_phantoms", phantoms, "--cases", str(2 * _SYNTHETIC_CASES))
        made = tuple(replace(case, label=None) for case in read_dataset(folder).cases)
        origin = "(synthetic scans, because the run's data are not available; pass --data for a Dice)"
        return made[:_SYNTHETIC_CASES], made[_SYNTHETIC_CASES:], origin
    gate = others = tuple(case for case in read_dataset(folder).cases if case.label is not None)
    if not gate:
        raise ValueError(f"{folder}: no labelled case; the parity gate needs labels to compute Dice")
    if own is not None and folder.resolve() == own.resolve():
        others = tuple(case for case in gate if case.name in split.get("training", ()))
        gate = tuple(case for case in gate if case.name in split.get("validation", ())) or gate
    gate = gate[:GATE_CASES]
    return gate, tuple(case for case in others if case not in gate)[:_CALIBRATION_CASES], f"of {folder}"


def _prepared(cases: Sequence[Case], model: VolumeModel) -> list[PreparedCase]:
    def prepare(case: Case) -> PreparedCase:
        if case.label is None:
            return prepare_volume(case.name, read_volume(case.image, model.preparation.channels), model.preparation)
        return prepare_case(case, model.preparation, model.labelling.numbers)

    return map_in_threads(prepare, cases, "preparing cases for the gate")


def write_ensemble(folder: Path, app: str, model: VolumeModel, runs: Sequence[Path]) -> None:
    """Write the run folder of an ensemble, new or empty: model.json, all weights in one file, and what its data were.

    `model` is what `load_models` returned for the runs.

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


def _read_names(path: Path) -> Split:
    content = read_as(path, SplitNames)
    training, validation = ([Case(name, Path(), None) for name in content[side]] for side in ("training", "validation"))
    return Split(tuple(training), tuple(validation), content.get("held_out", True), str(path))


def _data_of(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return "summary", "split" (by the names of cases: their dataset may have been moved) and "fingerprint"."""
    data = [read_if_there(run / "summary.json").get("data", {}) for run in runs]
    summary: dict[str, Any] = {"data": data[0] if all(each == data[0] for each in data) else {}}
    if any(each.get("synthetic") for each in data):
        summary["data"] = {**summary["data"], "synthetic": True}
    content: dict[str, dict[str, Any]] = {"summary": summary} if any(data) else {}
    if splits := [_read_names(run / "split.json") for run in runs if (run / "split.json").is_file()]:
        split = merged_split(splits)
        summary["cases"] = {"training": len(split.training), "validation": len(split.validation)}
        content["split"] = split.to_json()
    if all((run / "fingerprint.json").is_file() for run in runs):
        first = read_as(runs[0] / "fingerprint.json", Fingerprint, "restore or remove it")
        content["fingerprint"] = asdict(replace(first, scans=read_figures(*runs)))
    return content
