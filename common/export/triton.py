"""A model repository for NVIDIA Triton: one exported model, its configuration, a client and their digests.

Source: Triton's model repository and model configuration guides (docs.nvidia.com/deeplearning/triton-inference-server)
and its published protobuf model_config.proto; the tests parse what is written here with that protobuf.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from medspeed.common.export.model_card import plain, write_package
from medspeed.common.export.onnx_model import OPSET, numbers, read_metadata
from medspeed.common.inference.predictors import with_exact_norms

QUEUE_MICROSECONDS = 2000  # a window takes a GPU tens of milliseconds: waiting a few percent of it costs nothing
_KEPT = ("weights_sha256", "precision", "labels", "regions", "window", "smallest")
"""What of the model's own metadata the server is told: `tritonclient` reads it back with get_model_config."""


def write_triton(
    repository: Path, name: str, model: Path, card: str, overlap: float = 0.25, pipeline: str | None = None
) -> Path:
    """Write and return `repository`/`name`: config.pbtxt, 1/model.onnx, a client, a README, the model card, digests.

    The configuration says what Triton cannot read from the model, and leaves the rest to the server: names and shapes
    of input and output, and the devices. The model's group normalisations are written out, since ONNX Runtime's own
    are not exact (`with_exact_norms`).

    Args:
        repository: folder that `tritonserver --model-repository` is given; it may hold other models.
        name: of the model there, a folder and part of a URL.
        model: a run's exports/model_*.onnx.
        card: the model card, for MODEL_CARD.md.
        overlap: of sliding windows, in the README's example.
        pipeline: inference.json, which segments whole scans of volumes (see `bundle.served_pipeline`).

    Raises:
        FileNotFoundError: there is no such model.
        FileExistsError: `repository`/`name` holds something.
        ValueError: the model is none that `export_onnx` wrote.
    """
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such file; if the parity gate rejected it, serve another --precision")
    metadata, content = read_metadata(model), with_exact_norms(model)
    kept = {key: metadata[key] for key in _KEPT if key in metadata}
    digest = hashlib.sha256(content).hexdigest()
    _, best, most = numbers(metadata["batch"])
    window = numbers(metadata["window"])
    readme = _README.format(
        name=name,
        opset=OPSET,
        most=most,
        overlap=overlap,
        rows="".join(f"- {key}: {plain(value)}\n" for key, value in kept.items()),
        window=", ".join(map(str, window)),
        sides=", ".join(map(str, window[1:])),
        scans=_SCANS if pipeline else "",
    )
    files: dict[str, str | bytes] = {
        "1/model.onnx": content,
        "config.pbtxt": _configuration(name, window, best, most, {**kept, "model_sha256": digest}),
        "client.py": _CLIENT.format(name=name),
        "README.md": readme,
        "MODEL_CARD.md": card,
    }
    if pipeline:
        files["inference.json"] = pipeline
    return write_package(repository / name, files)


def _configuration(name: str, window: tuple[int, ...], best: int, most: int, parameters: Mapping[str, str]) -> str:
    """Return the ModelConfig in protobuf's text format."""
    # Triton waits for a preferred size; of one window, or of the most, it need not be told.
    preferred = f"preferred_batch_size: [ {best} ] " if 1 < best < most else ""
    dims = ", ".join(map(str, window))
    rows = (
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}\n"
        for key, value in parameters.items()
    )
    return f"""name: {_quoted(name)}
backend: "onnxruntime"
max_batch_size: {most}
dynamic_batching {{ {preferred}max_queue_delay_microseconds: {QUEUE_MICROSECONDS} }}
model_warmup {{
  name: "zeros"
  batch_size: {best}
  inputs {{ key: "image" value {{ data_type: TYPE_FP32 dims: [ {dims} ] zero_data: true }} }}
}}
{"".join(rows)}"""


# Protobuf's text format takes JSON's escapes, and UTF-8 as it is.
_quoted = partial(json.dumps, ensure_ascii=False)

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
        image = InferInput("image", list(windows.shape), "FP32")
        image.set_data_from_numpy(windows.float().contiguous().cpu().numpy())
        answer = client.infer(model, [image], outputs=[InferRequestedOutput("logits")])
        return torch.from_numpy(answer.as_numpy("logits").copy()).to(windows.device)

    return predict
'''

_SCANS = """Whole scans: with `inference.json` MONAI prepares each scan, queries the server through `client.py`,
and writes a label map with the model's post-processing, the same that `medspeed infer` writes. It needs MONAI, nibabel,
scipy, fire and pytorch-ignite 0.5.5. In this folder, run:

```
python -m monai.bundle run --config_file inference.json --bundle_root . --url localhost:8001 \\
    --dataset_dir FOLDER --output_dir RESULTS
```

For windows of your own:
"""

_README = """# {name} on NVIDIA Triton

Input `image` FP32 [{window}], output `logits` FP32, each with a batch dimension of at most {most}; sides may range from
`smallest` to `window`. Not a medical device.

{rows}
## Serve

The parent folder is the model repository. The server needs an ONNX Runtime that supports opset {opset}. It uses a GPU
if there is one, and completes config.pbtxt from the model, as it does by default.

```
tritonserver --model-repository .. --model-control-mode explicit --load-model {name}
```

Verify the files first with `sha256sum --check SHA256SUMS`.

## Query

The server processes windows or patches; preparing a scan, sliding over it and mapping the result back is the client's.
{scans}
```python
import torch
from monai.inferers import sliding_window_inference

from client import triton_predictor

predict = triton_predictor("localhost:8001")
image = torch.zeros(1, {window})  # a prepared image, of any size
logits = sliding_window_inference(image, ({sides}), sw_batch_size={most}, predictor=predict, overlap={overlap:g})
```

A request contains at most {most} windows; the server batches simultaneous requests of several clients.
"""
