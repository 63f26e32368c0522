"""The hand-over of a trained segmentation network: ONNX models, engines, a Triton repository, a MONAI bundle."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common.data.cases import Case, read_dataset
from common.data.parallel import map_in_threads
from common.data.preparation import PreparedCase, prepare_case
from common.export.best import GATE_CASES, agreement, dice_on, engine_batch, export_network, say_exported
from common.export.bundle import write_bundle
from common.export.bundle_files import NetworkConfig
from common.export.export import ExportRecord, precision_table
from common.export.model_card import model_card
from common.export.options import ExportConfig
from common.export.tensorrt_engine import Batches
from common.export.triton import write_triton
from common.files import sha256_of, write_json
from common.inference.predictors import onnxruntime_predictor, weights_of
from common.inference.segmentation import SegmentationModel, sample_windows
from common.observe.run import Run, choose_device
from common.observe.timing import Clock, repeated

_CALIBRATION_CASES = 8
_SYNTHETIC_CASES = 3
_TIMED = 3  # windows, after one that sets up


@dataclass(frozen=True)
class Judges:
    """The cases that exports are judged and calibrated on.

    Args:
        gate: for the gate.
        calibration: for INT8; other cases where there are some.
        labelled: whether the gate compares Dice with their labels; else exports must agree with torch.
        origin: where they are from, in words.
    """

    gate: tuple[Case, ...]
    calibration: tuple[Case, ...]
    labelled: bool
    origin: str


def hand_over(
    app: str,
    config: ExportConfig,
    model: SegmentationModel,
    network: NetworkConfig,
    phantoms: Callable[[Path, int], Path],
    scratch: Path,
) -> Path:
    """Hand a run over in the form that the configuration names; return where it lies.

    Args:
        app: its name.
        config: which run, and what to make of it.
        model: the run's.
        network: the network as MONAI's own class and arguments, for a bundle.
        phantoms: makes so many synthetic cases in a folder, for a gate without data.
        scratch: folder for those.

    Raises:
        ParityError: the fp32 export does not compute what torch computes.
        FileNotFoundError, ValueError: the run, the data or the weights cannot be used.
    """
    run = Run(config.model, choose_device(config.device), Clock(), resumed=True)
    if config.to == "bundle":
        return write_bundle(config.destination(), config.model, model, network)
    if must_export(config):
        judges = find_judges(config, phantoms, scratch)
        run.say(f"gate: {judges.origin}")
        _export(app, config, model, judges, run)
    if config.to != "triton":
        return config.model / "exports"
    return serve(app, config, engine_batch(model), model.overlap)


def must_export(config: ExportConfig) -> bool:
    """Return whether models are to be made: for Triton only where they are missing, or of other weights."""
    served = config.model / "exports" / f"model_{config.precision}.onnx"
    return config.to != "triton" or config.int8 or weights_of(served) != sha256_of(config.model / "best.safetensors")


def serve(app: str, config: ExportConfig, batch: Batches, overlap: float = 0.25) -> Path:
    """Write the Triton repository of a run, with its model card; return the model's folder in it.

    Args:
        app: its name.
        config: which run, and where to.
        batch: windows in one call: the fewest, the number tuned for, the most.
        overlap: of sliding windows.

    Raises:
        FileExistsError: the folder holds something.
        ValueError: there is no model in this precision, as the gate refused it.
    """
    served = config.model / "exports" / f"model_{config.precision}.onnx"
    if not served.is_file():
        raise ValueError(f"{served}: the gate refused it (see above); serve another --precision")
    card = model_card(config.model)
    return write_triton(config.destination(), f"medspeed_{app}", served, batch=batch, card=card, overlap=overlap)


def find_judges(config: ExportConfig, phantoms: Callable[[Path, int], Path], scratch: Path) -> Judges:
    """Return the cases of --data, or of the run's own validation and training, or synthetic ones.

    Raises:
        FileNotFoundError, ValueError: the dataset cannot be read, or has no labelled case.
    """
    trained_on, split = _recorded(config.model)
    folder = config.data or trained_on
    if folder is None or not (folder / "dataset.json").is_file():
        if config.data is not None:
            raise FileNotFoundError(f"{config.data / 'dataset.json'}: no such file; --data takes a dataset's folder")
        made = read_dataset(phantoms(scratch, 2 * _SYNTHETIC_CASES)).cases
        origin = "the run's data are not at hand: exports must agree with torch on synthetic scans; --data judges them"
        return Judges(made[:_SYNTHETIC_CASES], made[_SYNTHETIC_CASES:], labelled=False, origin=origin)
    cases = tuple(case for case in read_dataset(folder, gaps=True).cases if case.label is not None)
    if not cases:
        raise ValueError(f"{folder}: no labelled case; the gate compares Dice with labels")
    named = {name: [case for case in cases if case.name in split.get(name, ())] for name in ("validation", "training")}
    own = trained_on is not None and folder.resolve() == trained_on.resolve()
    gate = tuple((named["validation"] if own else []) or cases)[:GATE_CASES]
    others = [case for case in (named["training"] if own else cases) if case not in gate]
    calibration = tuple(others or gate)[:_CALIBRATION_CASES]
    return Judges(gate, calibration, labelled=True, origin=f"Dice on {len(gate)} cases of {folder}")


def _export(app: str, config: ExportConfig, model: SegmentationModel, judges: Judges, run: Run) -> None:
    gate = _prepared(judges.gate, model, labelled=judges.labelled)
    calibration = None
    if config.makes_int8():
        cases = _prepared(judges.calibration, model, labelled=judges.labelled)
        calibration = sample_windows(cases, model, most=_CALIBRATION_CASES)
    evaluate = dice_on(judges.gate, gate, model, run) if judges.labelled else agreement(gate, model, run)
    network = model.build(config.model / "best.safetensors").to(run.device).eval()
    record = export_network(
        network,
        sample_windows(gate, model),
        evaluate,
        model,
        app,
        config.engine if config.to == "engine" else "none",
        run,
        calibration,
    )
    say_exported(record, run)
    conclude(record, judges.origin, sample_windows(gate, model, most=1), run)


def conclude(record: ExportRecord, origin: str, window: torch.Tensor, run: Run) -> None:
    """Say size, speed and difference of what was exported as a table, and keep all of it as `exports/exports.json`.

    Args:
        record: of the export.
        origin: what the gate judged on.
        window: one window, [1, C, *sides] float32; each model is timed on it in ONNX Runtime.
        run: whose export it is.
    """
    seconds = {}
    for model in record.onnx:
        if model.path is not None:
            predict = onnxruntime_predictor(Path(model.path))
            seconds[model.precision] = statistics.median(repeated(lambda: predict(window), _TIMED))  # noqa: B023 - at once
    run.say(precision_table(record, seconds))
    stored = {"gate": origin, "seconds per window in ONNX Runtime": seconds, **record.to_json()}
    write_json(run.directory / "exports" / "exports.json", stored)


def _prepared(cases: Sequence[Case], model: SegmentationModel, labelled: bool) -> list[PreparedCase]:
    def prepare(case: Case) -> PreparedCase:
        label = case.label if labelled else None
        return prepare_case(case.name, case.image, label, model.preparation, model.labelling.numbers)

    return map_in_threads(prepare, cases, "preparing cases for the gate")


def _recorded(run: Path) -> tuple[Path | None, dict[str, list[str]]]:
    """Return the folder that a run was trained on, and its split; nothing of an imported one."""
    summary, split = run / "summary.json", run / "split.json"
    if not (summary.is_file() and split.is_file()):
        return None, {}
    folder = json.loads(summary.read_text(encoding="utf-8"))["data"]["folder"]
    return Path(folder), json.loads(split.read_text(encoding="utf-8"))


def say_where(path: Path) -> None:
    """Print where the hand-over lies."""
    tqdm.write(f"written: {path}")
