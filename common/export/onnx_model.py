"""Export of a network to ONNX: one file, any batch size, fp32 or fp16 inside, float32 in and out."""

import copy
import logging
import re
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from medspeed.common.files import atomic_path
from medspeed.common.inference.predictors import onnx_errors, read_onnx_metadata
from medspeed.common.run import STOP_SIGNALS, take_signals

Window = tuple[int, ...]  # shape (C, *sides) of one window: C, X, Y, Z of a volume or C, Y, X of an image
_SIZES, _BATCH = r"\d{1,6}( \d{1,6}){2,3}", r"\d{1,6} \d{1,6} \d{1,6}"
OPSET = 21  # the first in which group normalisation is one operator


def in_half(network: nn.Module) -> nn.Module:
    """Return a network, changed in place to half precision, that takes and gives float32."""
    network.half().register_forward_pre_hook(lambda module, given: given[0].half())
    network.register_forward_hook(lambda module, given, logits: logits.float())
    return network


def export_onnx(
    network: nn.Module,
    path: Path,
    window: Window,
    precision: Literal["fp32", "fp16"],
    metadata: Mapping[str, str],
    smallest: Window | None = None,
    batch: int = 1,
) -> Path:
    """Write a network as an ONNX model from `image` [batch, C, *sides] to `logits` [batch, K, *sides], both float32.

    Returns `path`, which is written whole or not at all. A copy of the network, the plain module, is exported, in
    evaluation mode; `precision` is that of its weights and activations. The same weights give the same bytes, and no
    path of this machine is in them. The arguments behind it, from `window` on, are kept as metadata.

    Sides in which `window` and `smallest`, by default the same, differ are free. An engine is tuned for `batch` windows
    in one call, and takes 1 to this many, or to 4. What is no valid ONNX is a ValueError.
    """
    import onnx  # here, as torch.onnx: only the end of a run needs them
    from torch import _dynamo  # noqa: F401 - a signal that interrupts its import later would end in an error of torch

    copied = copy.deepcopy(network).cpu().float().eval()
    model = _traced(in_half(copied) if precision == "fp16" else copied, window, smallest or window)
    graph = model.graph  # without what torch notes beside each part: stack traces with this machine's paths
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    figures = {"window": window, "smallest": smallest or window, "batch": (1, batch, max(4, batch))}
    words = {name: " ".join(map(str, values)) for name, values in figures.items()}
    onnx.helper.set_model_props(model, {**metadata, "precision": precision, **words})
    with atomic_path(path) as part, onnx_errors(path):
        onnx.save_model(model, str(part))
        onnx.checker.check_model(str(part), full_check=True)
    return path


def _traced(module: nn.Module, window: Window, smallest: Window) -> Any:  # noqa: ANN401 - a class of an untyped module
    example = torch.zeros(2, *window)  # two, since torch would take a batch of one for a constant
    sides = enumerate(zip(smallest, window, strict=True), 1)
    free = {axis: torch.export.Dim(f"side{axis}", min=least) for axis, (least, most) in sides if least != most}
    # What the exporter says on every export and nobody can act on: no torchvision here; its own deprecated LeafSpec.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    came: list[int] = []  # signals wait: torch loses what a handler raises in a callback, or makes an error of it
    held = take_signals((*STOP_SIGNALS, signal.SIGINT), lambda number, _: came.append(number))
    try:
        with held, warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            program = torch.onnx.export(
                module,
                (example,),
                input_names=["image"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")} | free,),
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        for number in came[:1]:
            signal.raise_signal(number)
    assert program is not None
    return program.model_proto


def read_metadata(path: Path) -> dict[str, str]:
    """Return the `metadata_props` of a model that `export_onnx` wrote; a ValueError says that the file is none."""
    found = read_onnx_metadata(path)
    for name, kind in {"precision": r"fp32|fp16|int8", "window": _SIZES, "smallest": _SIZES, "batch": _BATCH}.items():
        if not re.fullmatch(kind, found.get(name, "")):
            raise ValueError(f"{path}: no `{name}` in its metadata: the model was not exported by medspeed")
    return found
