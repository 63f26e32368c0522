"""A model repository for NVIDIA Triton: one exported model, its configuration, a client and their digests.

Source: Triton's model repository and model configuration guides (docs.nvidia.com/deeplearning/triton-inference-server)
and its published protobuf model_config.proto; the tests parse what is written here with that protobuf.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.export.digests import check_free, write_digests
from common.export.onnx_model import read_metadata
from common.files import atomic_path, sha256_of, write_text
from common.inference.onnx_norms import with_exact_norms
from common.inference.tensorrt_runtime import EngineManifest, read_manifest, verified_plan

QUEUE_MICROSECONDS = 2000  # a window takes a GPU tens of milliseconds: waiting a few percent of it costs nothing
_FLOAT = 1  # onnx.TensorProto.FLOAT
_KEPT = ("weights_sha256", "precision", "labels", "regions", "window", "smallest")
"""What of the model's own metadata the server is told: `tritonclient` reads it back with get_model_config."""


@dataclass(frozen=True)
class _Tensor:
    """Name of an input or output, and its shape without the batch; -1 for a free side."""

    name: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class _Served:
    """The model as the configuration describes it."""

    image: _Tensor
    logits: _Tensor
    metadata: dict[str, str]
    backend: Literal["onnxruntime", "tensorrt"]
    kind: Literal["KIND_AUTO", "KIND_GPU"]
    needs: str


def write_triton(
    repository: Path,
    name: str,
    model: Path,
    *,
    batch: tuple[int, int, int],
    card: str = "",
    instances: int = 1,
    overlap: float = 0.25,
) -> Path:
    """Write `repository`/`name` for Triton: config.pbtxt, 1/model.onnx or 1/model.plan, a client, a README, digests.

    An ONNX model's group normalisations are written out, since ONNX Runtime's own are not exact (`with_exact_norms`).
    The server's ONNX Runtime takes a GPU where it has one.

    Args:
        repository: folder that `tritonserver --model-repository` is given; it may hold other models.
        name: of the model there.
        model: a run's exports/model_*.onnx, or exports/model_*.plan with its manifest and its ONNX model beside it.
        batch: windows in one call: the fewest, which must be 1, the number tuned for, the most.
        card: the model card, for MODEL_CARD.md; "" writes none.
        instances: copies of the model on each device that work at the same time.
        overlap: of sliding windows, in the README's example.

    Returns:
        `repository`/`name`.

    Raises:
        FileNotFoundError: the model, the manifest of a plan or the ONNX model beside it is missing.
        FileExistsError: `repository`/`name` holds something.
        ValueError: an argument is out of its bounds, the model is none that `export_onnx` wrote, or the plan is one
            that Triton cannot run.
    """
    _check_arguments(name, model, batch, instances)
    folder = repository / name
    check_free(folder)
    manifest = _checked_plan(model, batch) if model.suffix == ".plan" else None
    served = _served(model, manifest)
    content = with_exact_norms(model) if manifest is None else verified_plan(model, manifest)
    with atomic_path(folder / "1" / f"model{model.suffix}") as part:
        part.write_bytes(content)
    digest = sha256_of(folder / "1" / f"model{model.suffix}")
    write_text(folder / "config.pbtxt", _configuration(name, served, batch, instances, digest))
    write_text(folder / "client.py", _CLIENT.format(name=name, image=served.image.name, logits=served.logits.name))
    write_text(folder / "README.md", _readme(name, served, batch, overlap))
    if card:
        write_text(folder / "MODEL_CARD.md", card)
    write_digests(folder)
    return folder


def _check_arguments(name: str, model: Path, batch: tuple[int, int, int], instances: int) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"name {name!r}: letters, digits, `_`, `.` and `-` only, since it is a folder and part of a URL"
        )
    if not 1 == batch[0] <= batch[1] <= batch[2]:
        raise ValueError(f"batch {batch}: 1 = fewest <= best <= most is needed; Triton passes single windows on too")
    if instances < 1:
        raise ValueError(f"instances {instances}: at least 1 is needed")
    if model.suffix not in {".onnx", ".plan"}:
        raise ValueError(f"{model}: Triton is given an .onnx or a .plan of a run's exports")
    if not model.is_file():
        raise FileNotFoundError(f"{model} is missing: export the model first")


def _checked_plan(plan: Path, batch: tuple[int, int, int]) -> EngineManifest:
    """Return the manifest of a plan that Triton can serve."""
    manifest = read_manifest(plan)
    if manifest.flavour != "tensorrt":
        raise ValueError(
            f"{plan}: an engine of {manifest.flavour}, which Triton's TensorRT backend cannot load; serve "
            f"{manifest.onnx} instead, or build the engine with full TensorRT (--engine tensorrt)"
        )
    if manifest.batch[0] > 1 or batch[2] > manifest.batch[2]:
        raise ValueError(
            f"batch {batch}: {plan} takes {manifest.batch[0]} to {manifest.batch[2]} windows in one call; choose "
            "within them, or build the engine for more"
        )
    if not (plan.parent / manifest.onnx).is_file():
        raise FileNotFoundError(
            f"{plan.parent / manifest.onnx} is missing: the names and shapes of {plan.name} are read from it"
        )
    return manifest


def _served(model: Path, manifest: EngineManifest | None) -> _Served:
    """Return what the configuration says of a model; an engine has the names and shapes of its ONNX model."""
    onnx_path = model if manifest is None else model.parent / manifest.onnx
    metadata = read_metadata(onnx_path)
    image, logits, opset = _read_tensors(onnx_path)
    if manifest is not None:
        needs = (
            f"an image with TensorRT {manifest.version}, which built the engine, and a GPU of compute capability "
            f"{' or '.join(manifest.targets)}"
        )
        return _Served(image, logits, metadata, "tensorrt", "KIND_GPU", needs)
    return _Served(image, logits, metadata, "onnxruntime", "KIND_AUTO", f"an ONNX Runtime that knows opset {opset}")


def _read_tensors(path: Path) -> tuple[_Tensor, _Tensor, int]:
    """Return input and output of an ONNX model with a free batch size and float32 on both sides, and its opset."""
    import onnx  # here, as in the export: only a hand-over needs it

    model: Any = onnx.load_model(str(path), load_external_data=False)
    tensors = []
    for values, what in ((model.graph.input, "input"), (model.graph.output, "output")):
        kinds = [value.type.tensor_type for value in values]
        if len(kinds) != 1 or kinds[0].elem_type != _FLOAT or kinds[0].shape.dim[0].dim_value:
            raise ValueError(f"{path}: one float32 {what} with a free batch size is needed; export the model again")
        dims = tuple(side.dim_value or -1 for side in kinds[0].shape.dim[1:])
        tensors.append(_Tensor(values[0].name, dims))
    return tensors[0], tensors[1], next(each.version for each in model.opset_import if not each.domain)


def _configuration(name: str, served: _Served, batch: tuple[int, int, int], instances: int, digest: str) -> str:
    """Return the ModelConfig in protobuf's text format."""
    # Triton waits for a preferred size; of one window, or of the most, it need not be told.
    preferred = f"  preferred_batch_size: [ {batch[1]} ]\n" if 1 < batch[1] < batch[2] else ""
    window = ", ".join(served.metadata["window"].split())
    parameters = {name: served.metadata[name] for name in _KEPT if name in served.metadata} | {"model_sha256": digest}
    return f"""name: {_quoted(name)}
backend: "{served.backend}"
max_batch_size: {batch[2]}
input [ {_tensor(served.image)} ]
output [ {_tensor(served.logits)} ]
instance_group [ {{ kind: {served.kind} count: {instances} }} ]
version_policy {{ latest {{ num_versions: 1 }} }}
dynamic_batching {{
{preferred}  max_queue_delay_microseconds: {QUEUE_MICROSECONDS}
}}
model_warmup [
  {{
    name: "zeros"
    batch_size: {batch[1]}
    inputs {{
      key: {_quoted(served.image.name)}
      value {{ data_type: TYPE_FP32 dims: [ {window} ] zero_data: true }}
    }}
  }}
]
""" + "".join(
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}\n"
        for key, value in parameters.items()
    )


def _tensor(tensor: _Tensor) -> str:
    dims = ", ".join(str(side) for side in tensor.dims)
    return f"{{ name: {_quoted(tensor.name)} data_type: TYPE_FP32 dims: [ {dims} ] }}"


def _quoted(text: str) -> str:
    """Return a string literal of protobuf's text format, which takes JSON's escapes, and UTF-8 as it is."""
    return json.dumps(text, ensure_ascii=False)


def _readme(name: str, served: _Served, batch: tuple[int, int, int], overlap: float) -> str:
    image, logits, window = served.image, served.logits, served.metadata["window"].split()
    rows = "".join(f"- {key}: `{served.metadata[key]}`\n" for key in _KEPT if key in served.metadata)
    return _README.format(
        name=name,
        backend=served.backend,
        needs=served.needs,
        most=batch[2],
        overlap=f"{overlap:g}",
        rows=rows,
        image=image.name,
        image_dims=list(image.dims),
        logits=logits.name,
        logits_dims=list(logits.dims),
        window=", ".join(window),
        sides=", ".join(window[1:]),
    )


_CLIENT = '''"""Windows in, logits out: the model `{name}` on a Triton server as one function.

Needs: pip install "tritonclient[grpc]" torch
"""

from collections.abc import Callable

import torch
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput


def triton_predictor(url: str = "localhost:8001", model: str = "{name}") -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from windows [B, C, *sides] float32 to logits [B, K, *sides] float32 on their device."""
    client = InferenceServerClient(url)

    def predict(windows: torch.Tensor) -> torch.Tensor:
        image = InferInput("{image}", list(windows.shape), "FP32")
        image.set_data_from_numpy(windows.float().contiguous().cpu().numpy())
        answer = client.infer(model, [image], outputs=[InferRequestedOutput("{logits}")])
        return torch.from_numpy(answer.as_numpy("{logits}").copy()).to(windows.device)

    return predict
'''

_README = """# {name} on NVIDIA Triton

Input `{image}` FP32 {image_dims}, output `{logits}` FP32 {logits_dims}, each behind a batch of at most {most}
(-1: a free side). Not a medical device.

{rows}
## Serve

The folder above this one is the model repository; the server needs {needs}.

```
tritonserver --model-repository .. --model-control-mode explicit --load-model {name}
```

Backend: {backend}. Check the files first with `sha256sum --check SHA256SUMS`: an engine is native code.

## Ask

The server computes windows, or patches; preparing a scan, sliding over it and the way back to its grid are the
client's. `client.py` beside this file is all that it takes besides:

```python
import torch
from monai.inferers import sliding_window_inference

from client import triton_predictor

predict = triton_predictor("localhost:8001")
image = torch.zeros(1, {window})  # a prepared image, of any size
logits = sliding_window_inference(image, ({sides}), sw_batch_size={most}, predictor=predict, overlap={overlap})
```

In this project `common.inference.windows.sliding_windows` takes the same `predict`. A request holds at most {most}
windows; the server joins what several clients ask for at the same time into one call.
"""
