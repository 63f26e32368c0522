import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from medspeed.common.export import export as gates
from medspeed.common.export.export import (
    HALF_BOUND,
    QUALITY_BOUNDS,
    Gate,
    ParityError,
    Reference,
    check_predictor,
    take_reference,
    volume_gate,
)
from medspeed.common.export.onnx_model import export_onnx
from medspeed.common.inference.predictors import Predictor, onnxruntime_predictor, torch_predictor

Dices = Callable[..., Callable[[Predictor], float]]
UNET = (1, 1, 16, 16, 16)


def shifted(reference: Reference, by: float) -> Predictor:
    """A predictor that finds the reference logits of a window, plus a constant."""

    def predict(windows: torch.Tensor) -> torch.Tensor:
        rows = [next(i for i, known in enumerate(reference.gate.windows) if torch.equal(known, w)) for w in windows]
        return reference.logits[rows] + by

    return predict


def steady(predict: Predictor) -> float:
    return 0.9


@pytest.fixture
def reference(tiny: nn.Module) -> Reference:
    return take_reference(tiny, Gate(torch.rand(4, 1, 8, 8, 8), steady, ""))


@pytest.mark.parametrize(("precision", "least", "most"), [("fp32", 0, 1e-5), ("fp16", 1e-6, 2e-2)])
def test_exports_of_a_network_pass(
    network: nn.Module, windows: torch.Tensor, exported: Path, dices: Dices, precision: str, least: float, most: float
):
    reference = take_reference(network, Gate(windows, dices(0.9, 0.9005, shape=UNET), ""))
    assert network.training
    predict = onnxruntime_predictor(exported / f"model_{precision}.onnx")
    difference, change = check_predictor(reference, predict, precision, "it")  # type: ignore[arg-type]
    assert least <= difference <= most
    assert change == pytest.approx(0.0005)


def test_the_reference_is_torch_in_evaluation_mode(network: nn.Module, windows: torch.Tensor, dices: Dices):
    reference = take_reference(network, Gate(windows, dices(0.75, shape=UNET), ""))
    with torch.no_grad():
        expected = copy.deepcopy(network).eval()(windows)
    torch.testing.assert_close(reference.logits, expected)
    assert reference.quality == 0.75


def test_the_export_of_other_weights_is_refused(
    network: nn.Module, windows: torch.Tensor, exported: Path, dices: Dices
):
    other = copy.deepcopy(network)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 0.05
    reference = take_reference(other, Gate(windows, dices(0.9, shape=UNET), ""))
    path = exported / "model_fp32.onnx"
    with pytest.raises(ParityError, match=r"model_fp32\.onnx: a logit differs by .* \(bound 0\.001\)"):
        check_predictor(reference, onnxruntime_predictor(path), "fp32", str(path))


@pytest.mark.parametrize(("by", "fine"), [(0.0009, True), (-0.0011, False), (math.nan, False), (math.inf, False)])
def test_bound_of_the_logits(reference: Reference, by: float, fine: bool):
    if fine:
        difference, _ = check_predictor(reference, shifted(reference, by), "fp32", "it")
        assert difference == pytest.approx(by, rel=1e-3)
    else:
        with pytest.raises(ParityError, match="it: a logit differs by"):
            check_predictor(reference, shifted(reference, by), "fp32", "it", (1, 2, 3))


@pytest.mark.parametrize(("by", "fine"), [(0.045, True), (0.055, False)])
def test_the_bound_grows_with_logits_above_a_hundred(reference: Reference, by: float, fine: bool):
    """Rounding in fp32 does: of logits of 10,000 it is 0.001 itself."""
    large = reference._replace(logits=reference.logits * (5000 / reference.logits.abs().amax()))
    if fine:
        check_predictor(large, shifted(large, by), "fp32", "it")
    else:
        with pytest.raises(ParityError, match=r"it: a logit differs by .* \(bound 0\.05\)"):
            check_predictor(large, shifted(large, by), "fp32", "it")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_bad_batch_size_is_enough(reference: Reference, size: int):
    def predict(windows: torch.Tensor) -> torch.Tensor:
        return shifted(reference, math.nan if len(windows) == size else 0)(windows)

    with pytest.raises(ParityError, match="a logit differs by nan"):
        check_predictor(reference, predict, "fp32", "it", (1, 2, 3))


@pytest.mark.parametrize(("precision", "share"), [("fp16", 0.1), ("int8", 0.5)])
def test_logits_in_fp16_and_int8_may_be_off_by_a_share_of_the_largest(
    reference: Reference, precision: Any, share: float
):
    """Where the network finds nothing, zeros would find the same: the quality alone would not tell."""
    most = share * float(reference.logits.abs().max())
    assert check_predictor(reference, shifted(reference, 0.9 * most), precision, "it", (2,))[0] > 0.8 * most
    for bad in (1.1 * most, math.nan, math.inf):
        with pytest.raises(ParityError, match=r"a logit differs by (\d|nan|inf)"):
            check_predictor(reference, shifted(reference, bad), precision, "it", (2,))
    with pytest.raises(ParityError, match="a logit differs by"):
        check_predictor(reference, lambda windows: 0 * shifted(reference, 0)(windows), precision, "it", (2,))


def test_of_one_case_the_gate_tells_a_network_that_mixes_a_batch(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gates, "sample_windows", lambda *_: torch.rand(1, 1, 8, 8, 8))
    model: Any = SimpleNamespace(labelling=SimpleNamespace(labels=["no", "left lung", ""], regions=()), window_batch=1)
    gate = volume_gate((), (), model, "spleen", mock.Mock(), "of one case")
    assert gate.metadata == {"name": "medspeed spleen", "labels": '["no", "left lung", ""]', "regions": "[]"}
    reference = take_reference(tiny, replace(gate, evaluate=steady))
    mixing = torch_predictor(copy.deepcopy(tiny).eval())
    with pytest.raises(ParityError, match="a logit differs by"):
        check_predictor(reference, lambda windows: 0.7 * mixing(windows) + 0.3 * mixing(windows).mean(0), "fp32", "it")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_bound_of_the_dice(tiny: nn.Module, dices: Dices, precision: str, sign: int):
    for part, fine in ((0.9, True), (1.1, False)):
        changed = 0.8 + sign * part * QUALITY_BOUNDS[precision]
        reference = take_reference(tiny, Gate(torch.rand(1, 1, 8, 8, 8), dices(0.8, changed), ""))
        predict = torch_predictor(copy.deepcopy(tiny).eval())
        if fine:
            check_predictor(reference, predict, precision, "it", (1,))  # type: ignore[arg-type]
        else:
            with pytest.raises(ParityError, match=r"it: validation quality .*, 0\.8000 in PyTorch"):
                check_predictor(reference, predict, precision, "it", (1,))  # type: ignore[arg-type]


def test_a_dice_that_is_no_number_is_refused(reference: Reference):
    unknown = reference._replace(gate=replace(reference.gate, evaluate=lambda predict: math.nan))
    with pytest.raises(ParityError, match="validation quality nan"):
        check_predictor(unknown, shifted(reference, 0), "fp32", "it", (2,))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_window_goes_through_at_every_batch_size(tiny: nn.Module, count: int):
    reference = take_reference(tiny, Gate(torch.rand(count, 1, 8, 8, 8), steady, ""))
    seen: list[list[int]] = []

    def predict(windows: torch.Tensor) -> torch.Tensor:
        rows = [next(i for i, known in enumerate(reference.gate.windows) if torch.equal(known, w)) for w in windows]
        seen.append(rows)
        return reference.logits[rows]

    check_predictor(reference, predict, "fp32", "it", (1, 2, 3))
    for size in (1, 2, 3):
        batches = [rows for rows in seen if len(rows) == size]
        assert {row for rows in batches for row in rows} == set(range(count))
    assert {len(rows) for rows in seen} == {1, 2, 3}


def half_range(network: nn.Module, windows: torch.Tensor) -> float:
    """The largest activation, where half precision can hold them all."""
    reference = take_reference(network, Gate(windows, steady, ""))
    check_predictor(reference, torch_predictor(copy.deepcopy(network).eval()), "fp16", "it")
    return max(value.item() for value in reference.activations.values())


def test_half_range_is_the_largest_activation(tiny: nn.Sequential):
    windows = torch.rand(3, 1, 8, 8, 8) * torch.tensor([1.0, 5.0, 2.0]).view(3, 1, 1, 1, 1)
    with torch.no_grad():
        first = tiny[0](windows)
        last = tiny(windows)
        expected = max(float(first.abs().max()), float(last.abs().max()))
    assert half_range(tiny, windows) == pytest.approx(expected)
    assert tiny.training
    assert next(tiny.parameters()).dtype == torch.float32
    assert not any(module._forward_hooks for module in tiny.modules())


def test_half_range_is_that_of_true_half(network: nn.Module, windows: torch.Tensor):
    true_half = copy.deepcopy(network).eval().half()
    seen: list[float] = []
    for module in true_half.modules():
        module.register_forward_hook(lambda module, inputs, output: seen.append(float(output.abs().max())))
    with torch.no_grad():
        true_half(windows.half())
    assert half_range(network, windows) == pytest.approx(max(seen), rel=5e-3)


def test_weights_that_half_precision_cannot_hold_are_refused(tiny: nn.Sequential, tmp_path: Path):
    """By their activations, or where these are small, by the logits of the export."""
    with torch.no_grad():
        next(tiny[2].parameters()).view(-1)[0] = 1e5
    windows = torch.rand(1, 1, 8, 8, 8)
    with pytest.raises(ParityError, match="activation of module 2 reaches"):
        half_range(tiny, 100 * windows)
    reference = take_reference(tiny, Gate(1e-3 * windows, steady, ""))
    predict = onnxruntime_predictor(export_onnx(tiny, tmp_path / "m.onnx", (1, 8, 8, 8), "fp16", {}))
    with pytest.raises(ParityError, match=r"it: a logit differs by (inf|nan)"):
        check_predictor(reference, predict, "fp16", "it", (1,))


def test_large_activations_are_refused_by_the_name_of_their_module(overflowing: nn.Module, dices: Dices):
    reference = take_reference(overflowing, Gate(torch.rand(2, 1, 8, 8, 8), dices(0.9), ""))
    with pytest.raises(ParityError, match=r"it: half precision: an activation of module 0 reaches .* \(bound 32768"):
        check_predictor(reference, torch_predictor(overflowing.eval()), "fp16", "it")
    assert reference.logits.abs().max() < 10  # fp32 computes it without ado


def test_the_bound_of_activations_is_below_the_end_of_half_precision():
    network = nn.Sequential(nn.Identity())
    assert half_range(network, torch.full((1, 1, 2, 2, 2), HALF_BOUND)) == HALF_BOUND
    for value in (HALF_BOUND + 32, -40000.0, 1e9, math.nan):
        with pytest.raises(ParityError, match="activation of module 0 reaches"):
            half_range(network, torch.full((1, 1, 2, 2, 2), value))
