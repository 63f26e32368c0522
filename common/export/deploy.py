"""What the export script of an app does with a trained run: ONNX models, engines, a Triton repository or a bundle."""

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from medspeed.common.clock import Clock, repeated
from medspeed.common.data.dataset import Case, Split, SplitNames, make_synthetic, read_dataset
from medspeed.common.data.fingerprint import Fingerprint
from medspeed.common.data.preparation import PreparedCase, prepare_case, prepare_volume
from medspeed.common.data.threads import map_in_threads
from medspeed.common.data.volumes import read_volume
from medspeed.common.export.bundle import served_pipeline, write_triton, write_volume_bundle
from medspeed.common.export.export import GATE_CASES, Exports, Gate, export, volume_gate
from medspeed.common.export.model_card import model_card, read_if_there
from medspeed.common.export.onnx_model import read_metadata
from medspeed.common.export.options import ExportConfig
from medspeed.common.files import DIGESTS, atomic_path, read_as, write_json
from medspeed.common.inference.evaluation import merged_split
from medspeed.common.inference.measure import read_figures
from medspeed.common.inference.model import Trained, VolumeModel, initialise, save_weights, write_model
from medspeed.common.inference.open_predictor import Ensemble, check_digest, unfit
from medspeed.common.inference.predict import sample_windows
from medspeed.common.inference.predictors import onnx_errors, onnxruntime_predictor
from medspeed.common.inference.runs import RunModel
from medspeed.common.ranks import choose_device
from medspeed.common.run import Run

Cases = tuple[Case, ...]
# From a run, a folder for scratch and whether INT8 is wanted to the gate, and the windows that INT8 is calibrated on.
OpenGate = Callable[[Run, Path, bool], tuple[Gate, torch.Tensor | None]]
_CALIBRATION_CASES = 8
_SYNTHETIC_CASES = 3
# Quantised: they hold nearly all of the arithmetic and of the bytes, and TensorRT fuses what follows them as it likes.
_CONVOLUTIONS = ["Conv", "ConvTranspose"]
_TIMED = 3  # windows, after one that sets up


def export_run(app: str, task: str, config: ExportConfig, model: RunModel, phantoms: str | None) -> Path:
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

    def open_gate(run: Run, scratch: Path, int8: bool) -> tuple[Gate, torch.Tensor | None]:
        cases, others, origin = _find_cases(config, phantoms, scratch / "phantoms")
        few = others or cases  # gone before the gate's own are prepared
        windows = sample_windows(_prepared(few, model), model, most=_CALIBRATION_CASES) if int8 else None
        gate = volume_gate(cases, _prepared(cases, model), model, app, run, origin)
        if model.members:
            digests = " ".join(member.sha256 for member in model.members)
            gate = replace(gate, metadata={**gate.metadata, "members": digests})
        return gate, windows

    return hand_over(app, task, config, model, open_gate)


def hand_over(app: str, task: str, config: ExportConfig, model: Trained, open_gate: OpenGate) -> Path:
    """Export a run, unless the model that Triton is to serve is there; return the exports' folder or the repository's.

    For the arguments and errors see `export_run` and `write_triton`.
    """
    served = config.run / "exports" / f"model_{config.precision}.onnx"
    weights, made = config.run / "best.safetensors", False
    if config.to == "triton" and not (config.int8 or config.data) and served.is_file():
        check_digest(config.run, served)
        passed = f"exports/{served.name}" in read_if_there(config.run / DIGESTS)  # the gate
        made = passed and weights.is_file() and unfit(served, weights) is None
    if not made:
        run = Run(config.run, choose_device(config.device), Clock(), resumed=True)
        network = model.build(weights).to(run.device).eval()
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            gate, windows = open_gate(run, Path(scratch), config.int8 or config.precision == "int8")
            int8 = None if windows is None else partial(quantise, windows=windows)
            exports = export(network, gate, run, config.engine if config.to == "engine" else "none", int8)
            _tell(exports, gate, run)
            if config.to == "engine" and not any(each.path for each in exports if each.kind == "engine"):
                raise ValueError(f"{config.run}: no engine could be built: see the table")
    if config.to != "triton":
        return served.parent
    card = model_card(config.run, task)
    pipeline = served_pipeline(model) if isinstance(model, VolumeModel) else None
    return write_triton(config.destination, f"medspeed_{app}", served, card, getattr(model, "overlap", 0.25), pipeline)


def _tell(exports: Exports, gate: Gate, run: Run) -> None:
    """Say size, speed (of a window) and difference of exports as a table; keep all as `exports/exports.json`."""
    models = ((each.precision, Path(each.path)) for each in exports if each.kind == "onnx" and each.path)
    opened = ((name, partial(onnxruntime_predictor(path), gate.windows[:1])) for name, path in models)
    seconds = {name: statistics.median(repeated(predict, _TIMED)) for name, predict in opened}
    run.say(table_of(exports, seconds), "result")
    rows = {kind: [asdict(each) for each in exports if each.kind == kind] for kind in ("onnx", "engine")}
    stored = {"gate": gate.origin, "seconds per window in ONNX Runtime": seconds, **rows}
    write_json(run.directory / "exports" / "exports.json", stored)


def table_of(exports: Exports, seconds: Mapping[str, float]) -> str:
    """Return a Markdown table of exports, in MiB, `seconds` of the ONNX models, and logits; a dash is not known."""
    titles = "export", "MiB", "s per window in ONNX Runtime", "largest logit difference", "quality change", "verdict"
    rows: list[Sequence[str]] = [titles, ("---", *["---:"] * 4, "---")]
    for each in exports:
        took = seconds.get(each.precision) if each.kind == "onnx" else None
        values = each.bytes and each.bytes / 2**20, took, each.max_abs_diff, each.quality_delta
        forms = zip(values, (".1f", ".3f", ".2g", ".4f"), strict=True)
        numbers = ("—" if value is None else format(value, form) for value, form in forms)
        verdict = ": ".join(filter(None, ("kept" if each.path else "", each.reason)))
        rows.append((f"{each.kind} {each.precision}".strip(), *numbers, " ".join(verdict.replace("|", "\\|").split())))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _find_cases(config: ExportConfig, phantoms: str | None, scratch: Path) -> tuple[Cases, Cases, str]:
    """Return the cases for the gate, others to calibrate INT8 on, and what they are in words.

    They are those of --data, or the run's own for validation and training, or synthetic ones without labels.
    """
    summary, split = (read_if_there(config.run / f"{name}.json") for name in ("summary", "split"))
    known = summary.get("data", {}).get("folder")
    own = Path(known) if known and split else None
    folder = config.data or own
    if folder is None or not (config.data or os.path.isfile(folder / "dataset.json")):  # noqa: PTH113 - see `read_if_there`
        if phantoms is None:
            raise FileNotFoundError(f"{config.run}: the run's data are not available; pass a dataset with --data")
        folder = make_synthetic(scratch, "make_phantoms", phantoms, "--cases", str(2 * _SYNTHETIC_CASES))
        made = tuple(replace(case, label=None) for case in read_dataset(folder).cases)
        origin = "(synthetic scans, because the run's data are not available; pass --data for a Dice)"
        return made[:_SYNTHETIC_CASES], made[_SYNTHETIC_CASES:], origin
    gate = others = read_dataset(folder).cases
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


def quantise(fp32: Path, int8: Path, windows: torch.Tensor) -> None:
    """Write an fp32 model of `export_onnx` with convolutions in INT8: symmetric scales, per channel for the weights.

    Ranges of activations are the least and the largest value over all windows [N, C, *sides] float32, N >= 1, real ones
    as the network is to see them, which go through one at a time; entropy or percentiles need all activations at once,
    and are no better. Nor is the fp16 model a better start: ONNX Runtime replaces a scale in half precision below
    6.1e-5 by 1. The file is written whole or not at all; the same model and windows give the same bytes.

    Source:
        Placement: TensorRT documentation, "Q/DQ Placement Recommendations" (inputs of weighted operators, not outputs).
    """
    import onnx  # here, as torch.onnx: only the end of a run needs them
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    metadata = read_metadata(fp32)
    assert metadata["precision"] == "fp32"
    with onnx_errors(fp32):
        model: Any = onnx.load(str(fp32))
    # The model is simplified, as torch's exporter leaves it; else the quantiser logs an advice.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    feeds = ({model.graph.input[0].name: window[None].float().cpu().contiguous().numpy()} for window in windows)
    with atomic_path(int8) as part, onnx_errors(fp32):
        quantize_static(
            model,
            part,
            SimpleNamespace(get_next=lambda: next(feeds, None)),  # all that a CalibrationDataReader does
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_CONVOLUTIONS,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,  # TensorRT-RTX refuses biases in int32
                "OpTypesToExcludeOutputQuantization": _CONVOLUTIONS,
            },
        )
        quantised: Any = onnx.load(str(part))
        onnx.helper.set_model_props(quantised, {**metadata, "precision": "int8"})
        onnx.save_model(quantised, str(part))
        onnx.checker.check_model(str(part), full_check=True)


def write_ensemble(folder: Path, app: str, model: RunModel, runs: Sequence[Path]) -> None:
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
    data = [read_if_there(run / "summary.json").get("data", {}) for run in runs]
    shared = data[0] if all(each == data[0] for each in data) else {}
    shared = shared | ({"synthetic": True} if any(each.get("synthetic") for each in data) else {})
    summary: dict[str, Any] = {"data": shared}
    content: dict[str, dict[str, Any]] = {"summary": summary} if any(data) else {}
    if splits := [_read_names(run / "split.json") for run in runs if (run / "split.json").is_file()]:
        split = merged_split(splits)
        summary["cases"] = {"training": len(split.training), "validation": len(split.validation)}
        before = {name for run in runs for name in read_if_there(run / "split.json").get("trained_before", ())}
        known = {"held_out": split.held_out and len(splits) == len(runs), "trained_before": sorted(before)}
        content["split"] = split.to_json() | known
    flips: list[Any] = [(read_if_there(run / "plan.json").get("crops") or {}).get("flips") for run in runs]
    if None not in flips:  # what all have seen
        content["plan"] = {"crops": {"flips": "".join(sorted(set.intersection(*map(set, flips))))}}
    if all((run / "fingerprint.json").is_file() for run in runs):
        first = read_as(runs[0] / "fingerprint.json", Fingerprint, "restore or remove it")
        content["fingerprint"] = asdict(replace(first, scans=read_figures(*runs)))
    digests = " ".join(member.sha256 for member in model.members)
    save_weights(folder / "best.safetensors", network.state_dict(), {"members": digests})
    write_model(folder, app, model)
    for name, each in content.items():
        write_json(folder / f"{name}.json", each)


def _read_names(path: Path) -> Split:
    """Read a split by the names of its cases, since their dataset may have been moved."""
    content = read_as(path, SplitNames)
    training, validation = ([Case(name, Path(), None) for name in content[side]] for side in ("training", "validation"))
    return Split(tuple(training), tuple(validation), content.get("held_out", True), str(path))
