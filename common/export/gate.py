"""The gate: an export is kept only if it computes what torch computes, in logits and in validation quality."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

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
class Judge:
    """What exports are judged on."""

    windows: torch.Tensor  # [N, C, *sides] float32, N >= 1, real ones of the size to export, on the CPU
    evaluate: Callable[[Predictor], float]  # quality, in [0, 1], of a predictor of windows on the network's device
    origin: str  # which quality, and on what, in words: "Dice on 3 validation cases"


class Reference(NamedTuple):
    """What torch computes in fp32, the measure of every export."""

    judge: Judge
    logits: torch.Tensor  # [N, K, *sides] of its windows, on the CPU
    quality: float
    activations: dict[str, torch.Tensor]  # the largest absolute value of each module's output, in the order of calls


def take_reference(network: nn.Module, judge: Judge) -> Reference:
    """Return what a network computes in fp32; the network itself, on any device and in any mode, is left as it is."""
    copied = copy.deepcopy(network).float().eval()
    quality, largest = judge.evaluate(torch_predictor(copied)), dict[str, torch.Tensor]()

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            value = output.abs().amax()  # hands NaN on
            largest[name] = torch.maximum(largest.get(name, value), value)

    for name, module in copied.named_modules():
        module.register_forward_hook(partial(note, name or "(the whole network)"))
    predict = torch_predictor(copied.cpu())
    return Reference(judge, torch.cat([predict(window[None]) for window in judge.windows]), quality, largest)


def check_half_range(reference: Reference) -> None:
    """Check that half precision can hold what each module of the network computes, with room for other scans.

    ONNX Runtime cannot tell: on the CPU it computes fp16 models in wider numbers.

    Raises:
        ParityError: an activation is not finite or too large; the error names the first such module.
    """
    for name, value in reference.activations.items():
        if not value.item() <= HALF_BOUND:
            raise ParityError(
                f"half precision: an activation of module {name} reaches {value.item():.6g} "
                f"(bound {HALF_BOUND:g}; the largest half-precision number is 65504)"
            )


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

    Raises:
        ParityError: a bound does not hold; it begins with the export's name.
    """
    windows, differences = reference.judge.windows, []
    for size in batch_sizes:
        order = torch.arange(math.ceil(len(windows) / size) * size) % len(windows)  # the first fill up the last batch
        for some in order.reshape(-1, size):
            differences.append((predict(windows[some].to(device)).cpu() - reference.logits[some]).abs().amax())
    difference = float(torch.stack(differences).amax())  # amax, unlike max of floats, hands NaN on
    bound = LOGIT_BOUND if precision == "fp32" else math.inf
    if not (difference <= bound and math.isfinite(difference)):
        raise ParityError(f"{name}: a logit differs by {difference:.3g} from PyTorch in fp32 (bound {bound:g})")
    quality = reference.judge.evaluate(predict)
    change = abs(quality - reference.quality)
    if not change <= QUALITY_BOUNDS[precision]:
        raise ParityError(
            f"{name}: validation quality {quality:.4f}, {reference.quality:.4f} in PyTorch in fp32: "
            f"a change of {change:.4f} (bound {QUALITY_BOUNDS[precision]})"
        )
    return difference, change
