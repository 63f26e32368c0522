import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from medspeed.common.clock import Clock
from medspeed.common.export.deploy import quantise, table_of
from medspeed.common.export.export import Exported, Gate, ParityError, summary_of
from medspeed.common.export.export import export as export_network
from medspeed.common.export.onnx_model import export_onnx, in_half
from medspeed.common.files import sha256_of, write_json
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor
from medspeed.common.run import Run

Dices = Callable[..., Callable[[Predictor], float]]


class Record(NamedTuple):
    onnx: list[Exported]
    engines: list[Exported]
    no_engine: str | None


def export(
    network: nn.Module,
    folder: Path,
    evaluate: Callable[[Predictor], float],
    engine: Any = "auto",
    calibration: torch.Tensor | None = None,
) -> Record:
    (folder / "best.safetensors").write_bytes(b"weights")
    run = Run(folder, torch.device("cpu"), Clock(), resumed=True)
    gate = Gate(torch.rand(2, 1, 8, 8, 8), evaluate, "Dice on nothing", 2, metadata={"name": "t"})
    quantised = None if calibration is None else partial(quantise, windows=calibration)
    found = export_network(network, gate, run, engine, quantised)
    engines = [each for each in found if each.kind == "engine"]
    without = engines[0].reason if engines and not engines[0].precision else None
    return Record([each for each in found if each.kind == "onnx"], [] if without else engines, without)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "exports").iterdir()}


@pytest.fixture
def engine_on_cpu(fake_tensorrt: Callable[..., Any]) -> Any:
    """A stand-in TensorRT that is found on a GPU and runs."""
    return fake_tensorrt()


def test_all_is_exported_and_recorded(tmp_path: Path, tiny: nn.Module, dices: Dices):
    pytest.importorskip("tensorrt_rtx")
    if torch.cuda.is_available():
        pytest.skip("the engines run on a GPU; the test is about the record where they cannot")
    record = export(tiny, tmp_path, dices(0.9, 0.9004, 0.897), engine="tensorrt_rtx")
    assert names(tmp_path) == {
        f"model_{precision}{suffix}" for precision in ("fp32", "fp16") for suffix in (".onnx", ".plan", ".plan.json")
    }
    write_json(
        tmp_path / "record.json", {"onnx": [*map(asdict, record.onnx)], "engines": [*map(asdict, record.engines)]}
    )
    content = json.loads((tmp_path / "record.json").read_text())
    assert [entry["precision"] for entry in content["onnx"]] == ["fp32", "fp16"]
    for entry in (*content["onnx"], *content["engines"]):
        assert entry["sha256"] == sha256_of(Path(entry["path"]))
        assert entry["bytes"] == Path(entry["path"]).stat().st_size
    assert content["onnx"][0]["max_abs_diff"] <= 1e-5 < content["onnx"][1]["max_abs_diff"] <= 1e-2
    assert [entry["quality_delta"] for entry in content["onnx"]] == pytest.approx([0.0004, 0.003])
    assert [entry["reason"] for entry in content["onnx"]] == [None, None]
    for entry in content["engines"]:
        assert (entry["flavour"], entry["ran"]) == ("tensorrt_rtx", False)
        assert entry["reason"] == "not run here: no CUDA device in use"
    assert record.no_engine is None


def test_without_tensorrt_the_models_stay_and_one_line_says_why(
    tmp_path: Path, tiny: nn.Module, dices: Dices, monkeypatch: pytest.MonkeyPatch
):
    for flavour in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, flavour, None)
    record = export(tiny, tmp_path, dices(0.9))
    assert record.no_engine is not None
    assert record.no_engine.startswith("tensorrt_rtx is not installed: pip install -e '.[rtx]'")
    assert record.engines == []
    assert names(tmp_path) == {"model_fp32.onnx", "model_fp16.onnx"}


def test_engines_that_run_pass_the_same_gate(tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any):
    record = export(tiny, tmp_path, dices(0.9, 0.9, 0.9, 0.9003, 0.896))
    assert [engine.ran for engine in record.engines] == [True, True]
    assert [engine.reason for engine in record.engines] == [None, None]
    assert [engine.quality_delta for engine in record.engines] == pytest.approx([0.0003, 0.004])
    differences = [engine.max_abs_diff for engine in record.engines]
    assert differences == [model.max_abs_diff for model in record.onnx]  # the stand-in computes the same


def test_int8_comes_last_with_its_engine(tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any):
    record = export(tiny, tmp_path, dices(0.9, 0.9, 0.9, 0.892, 0.9, 0.9, 0.891), calibration=torch.rand(2, 1, 8, 8, 8))
    assert [model.precision for model in record.onnx] == ["fp32", "fp16", "int8"]
    assert record.onnx[2].quality_delta == pytest.approx(0.008)
    engine = record.engines[2]
    assert (engine.precision, engine.ran, engine.reason) == ("int8", True, None)
    assert engine.quality_delta == pytest.approx(0.009)
    assert engine.max_abs_diff == record.onnx[2].max_abs_diff
    assert engine.bytes == (tmp_path / "exports" / "model_int8.plan").stat().st_size


def test_refused_int8_model_has_no_engine(tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any):
    record = export(tiny, tmp_path, dices(0.9, 0.9, 0.9, 0.88, 0.9), calibration=torch.rand(2, 1, 8, 8, 8))
    assert record.onnx[2].path is None
    assert record.onnx[2].reason is not None
    assert "model_int8.onnx: validation quality 0.8800" in record.onnx[2].reason
    assert [engine.precision for engine in record.engines] == ["fp32", "fp16"]
    assert not any("int8" in name for name in names(tmp_path))


@pytest.mark.parametrize(("fail", "ran"), [("context", False), ("execute", True)])
def test_int8_engine_that_does_not_run_is_refused_alone(
    tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any, fail: str, ran: bool
):
    calls = []

    def evaluate(predict: Predictor) -> float:
        calls.append(predict)
        engine_on_cpu.fail = fail if len(calls) == 6 else ""  # torch, three ONNX models, two engines
        return 0.9

    record = export(tiny, tmp_path, evaluate, calibration=torch.rand(2, 1, 8, 8, 8))
    engine = record.engines[2]
    assert (engine.precision, engine.ran, engine.path, engine.bytes) == ("int8", ran, None, None)
    assert engine.reason is not None
    assert "model_int8.plan" in engine.reason
    assert [built.reason for built in record.engines[:2]] == [None, None]
    assert [model.reason for model in record.onnx] == [None, None, None]
    assert {name for name in names(tmp_path) if "int8" in name} == {"model_int8.onnx"}


@pytest.mark.parametrize(("fail", "why"), [("build", "TensorRT built no engine"), ("context", "cannot create")])
def test_engines_that_cannot_be_built_or_loaded_cost_no_run_its_end(
    tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any, fail: str, why: str
):
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "model_fp16.plan").write_bytes(b"of an earlier export")
    engine_on_cpu.fail = fail
    record = export(tiny, tmp_path, dices(0.9))
    assert [(engine.precision, engine.path, engine.ran) for engine in record.engines] == [
        ("fp32", None, False), ("fp16", None, False)
    ]  # fmt: skip
    assert all(why in (engine.reason or "") for engine in record.engines)
    assert names(tmp_path) == {"model_fp32.onnx", "model_fp16.onnx"}


def test_table_of_precisions():
    record = (
        Exported("onnx", "fp32", "a.onnx", "0", 3 * 2**20, 1.5e-6, 0.0),
        Exported("onnx", "fp16", reason="half precision: |x| reaches\n70000"),
        Exported("onnx", "int8", "c.onnx", "0", 2**20, 0.5, 0.0012),
        Exported("engine", "fp32", "a.plan", "0", 2**21, reason="no GPU"),
        Exported("engine", "int8", reason="not built"),
    )
    assert summary_of(record)["onnx"]["int8"]["path"] == "c.onnx"
    assert summary_of(record)["engine"] == {**asdict(record[3]), "int8": asdict(record[4])}
    assert table_of(record, {"fp32": 1.5, "int8": 0.25}).splitlines() == [
        "| export | MiB | s per window in ONNX Runtime | largest logit difference | quality change | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        "| onnx fp32 | 3.0 | 1.500 | 1.5e-06 | 0.0000 | kept |",
        "| onnx fp16 | — | — | — | — | half precision: \\|x\\| reaches 70000 |",
        "| onnx int8 | 1.0 | 0.250 | 0.5 | 0.0012 | kept |",
        "| engine fp32 | 2.0 | — | — | — | kept: no GPU |",
        "| engine int8 | — | — | — | — | not built |",
    ]
    assert "| 1.500 |" not in table_of(record, {})


def test_fp32_engine_that_computes_something_else_is_an_error(
    tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any
):
    engine_on_cpu.drift = 0.002
    with pytest.raises(ParityError, match=r"model_fp32\.plan: a logit differs by 0\.002"):
        export(tiny, tmp_path, dices(0.9))
    assert "model_fp32.plan" not in names(tmp_path)


def test_fp16_engine_with_another_dice_is_refused_alone(
    tmp_path: Path, tiny: nn.Module, dices: Dices, engine_on_cpu: Any
):
    record = export(tiny, tmp_path, dices(0.9, 0.9, 0.9, 0.9, 0.8))
    first, second = record.engines
    assert (first.ran, first.reason) == (True, None)
    assert (second.ran, second.path, second.sha256) == (True, None, None)
    assert second.reason is not None
    assert "model_fp16.plan: validation quality 0.8000, 0.9000 in PyTorch" in second.reason
    assert names(tmp_path) == {"model_fp32.onnx", "model_fp32.plan", "model_fp32.plan.json", "model_fp16.onnx"}


def test_network_that_half_precision_cannot_hold_stays_in_fp32(
    tmp_path: Path, overflowing: nn.Module, dices: Dices, engine_on_cpu: Any
):
    (tmp_path / "exports").mkdir()
    for old in ("model_fp16.onnx", "model_fp16.plan", "model_fp16.plan.json"):
        (tmp_path / "exports" / old).write_bytes(b"of an earlier export")
    record = export(overflowing, tmp_path, dices(0.9))
    fp32, fp16 = record.onnx
    assert fp32.reason is None
    assert fp32.max_abs_diff is not None
    assert fp16.path is None
    assert fp16.reason is not None
    assert "half precision: an activation of module 0 reaches" in fp16.reason
    assert [engine.precision for engine in record.engines] == ["fp32"]
    assert names(tmp_path) == {"model_fp32.onnx", "model_fp32.plan", "model_fp32.plan.json"}


def test_changed_dice_of_the_fp32_model_is_an_error(tmp_path: Path, tiny: nn.Module, dices: Dices):
    with pytest.raises(ParityError, match=r"model_fp32\.onnx: validation quality 0\.8980, 0\.9000 in PyTorch"):
        export(tiny, tmp_path, dices(0.9, 0.898), engine="none")
    assert names(tmp_path) == set()


def test_changed_dice_of_the_fp16_model_leaves_fp32(tmp_path: Path, tiny: nn.Module, dices: Dices):
    record = export(tiny, tmp_path, dices(0.9, 0.9, 0.89), engine="none")
    assert record.no_engine == "disabled"
    assert record.onnx[1].reason is not None
    assert "validation quality 0.8900" in record.onnx[1].reason
    assert names(tmp_path) == {"model_fp32.onnx"}


def test_why_the_range_is_checked_in_torch(tmp_path: Path, overflowing: nn.Module):
    """ONNX Runtime computes half precision wider on the CPU: what overflows on a GPU comes out finite there."""
    windows = torch.rand(1, 1, 8, 8, 8)
    path = export_onnx(overflowing, tmp_path / "model.onnx", (1, 8, 8, 8), "fp16", {})
    assert onnxruntime_predictor(path)(windows).isfinite().all()
    with torch.no_grad():
        assert not in_half(copy.deepcopy(overflowing))(windows).isfinite().all()


def test_a_model_has_no_final_name_until_it_is_judged(tmp_path: Path, tiny: nn.Module):
    """A run that is killed while the gate judges leaves nothing that inference would take."""
    there = []

    def evaluate(predictor: object) -> float:
        there.append({path.name for path in (tmp_path / "exports").glob("model_*")})
        return 0.9

    export(tiny, tmp_path, evaluate, engine="none")
    assert there == [set(), set(), {"model_fp32.onnx"}]
