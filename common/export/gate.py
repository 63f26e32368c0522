"""The gate: an export is kept only if it computes what torch computes, in logits and in validation quality."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from medspeed.common.export.onnx_model import Window
from medspeed.common.inference import ModelPrecision
from medspeed.common.inference.predictors import Predictor, torch_predictor

LOGIT_BOUND = 1e-3
"""Most that a logit may differ from torch in fp32."""
QUALITY_BOUNDS = {"fp32": 0.001, "fp16": 0.005, "int8": 0.01}
"""Most that the validation quality may change."""
HALF_BOUND = 32768.0
"""Largest activation in half precision, whose numbers end at 65504: another scan may bring twice as much."""
BATCH_SIZES = (1, 2, 3)


class ParityError(ValueError):
    """An export that does not compute what torch computes; it must not be used."""


@dataclass(frozen=True, eq=False)
class Gate:
    """What exports are judged on, and what they are to take."""

    windows: torch.Tensor  # [N, C, *sides] float32, N >= 1, real ones of the size to export, on the CPU
    evaluate: Callable[[Predictor], float]  # quality, in [0, 1], of a predictor of windows on the network's device
    origin: str  # which quality, and on what, in words: "Dice on 3 validation cases"
    batch: int = 1  # as for `smallest` and `metadata` see `export_onnx`
    smallest: Window | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Reference(NamedTuple):
    """What torch computes in fp32, the measure of every export."""

    gate: Gate
    logits: torch.Tensor  # [N, K, *sides] of its windows, on the CPU
    quality: float
    activations: dict[str, torch.Tensor]  # the largest absolute value of each module's output, in the order of calls


def take_reference(network: nn.Module, gate: Gate) -> Reference:
    """Return what a network computes in fp32; the network itself, on any device and in any mode, is left as it is."""
    copied = copy.deepcopy(network).float().eval()
    quality, largest = gate.evaluate(torch_predictor(copied)), dict[str, torch.Tensor]()

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            value = output.abs().amax()  # hands NaN on
            largest[name] = torch.maximum(largest.get(name, value), value)

    for name, module in copied.named_modules():
        module.register_forward_hook(partial(note, name or "(the whole network)"))
    predict = torch_predictor(copied.cpu())
    return Reference(gate, torch.cat([predict(window[None]) for window in gate.windows]), quality, largest)


def check_predictor(
    reference: Reference,
    predict: Predictor,
    precision: ModelPrecision,
    name: str,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Return the largest difference of a logit from torch, in batches of each size, and the change of the quality.

    `predict` takes windows on `device`; the precision chooses the bounds: in fp16 and int8 logits need only be finite.
    In fp16 the network's activations must fit, too: on the CPU ONNX Runtime computes in wider numbers, and cannot tell.

    Raises:
        ParityError: a bound does not hold; it begins with the export's name, and names the first module out of bounds.
    """
    for module, value in reference.activations.items() if precision == "fp16" else ():
        if not value.item() <= HALF_BOUND:
            raise ParityError(
                f"{name}: half precision: an activation of module {module} reaches {value.item():.6g} "
                f"(bound {HALF_BOUND:g}; the largest half-precision number is 65504)"
            )
    windows, differences = reference.gate.windows, []
    for size in batch_sizes:
        order = torch.arange(math.ceil(len(windows) / size) * size) % len(windows)  # the first fill up the last batch
        for some in order.reshape(-1, size):
            differences.append((predict(windows[some].to(device)).cpu() - reference.logits[some]).abs().amax())
    difference = float(torch.stack(differences).amax())  # amax, unlike max of floats, hands NaN on
    bound = LOGIT_BOUND if precision == "fp32" else math.inf
    if not (difference <= bound and math.isfinite(difference)):
        raise ParityError(f"{name}: a logit differs by {difference:.3g} from PyTorch in fp32 (bound {bound:g})")
    quality = reference.gate.evaluate(predict)
    change = abs(quality - reference.quality)
    if not change <= QUALITY_BOUNDS[precision]:
        raise ParityError(
            f"{name}: validation quality {quality:.4f}, {reference.quality:.4f} in PyTorch in fp32: "
            f"a change of {change:.4f} (bound {QUALITY_BOUNDS[precision]})"
        )
    return difference, change
