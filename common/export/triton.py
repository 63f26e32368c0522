"""A model repository for NVIDIA Triton: one exported model, and `triton/`, filled in: configuration, client, README.

Source: Triton's model repository and model configuration guides (docs.nvidia.com/deeplearning/triton-inference-server)
and its published protobuf model_config.proto; the tests parse what is written here with that protobuf.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from medspeed.common.export.model_card import filled, write_package
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
    _, best, most = numbers(metadata["batch"])
    values = {
        "name": name,
        "window": numbers(metadata["window"]),
        "best": best,
        "most": most,
        "kept": kept,
        "parameters": {**kept, "model_sha256": hashlib.sha256(content).hexdigest()},
        "delay": QUEUE_MICROSECONDS,
        "opset": OPSET,
        "overlap": overlap,
        "pipeline": pipeline,
        # Protobuf's text format takes JSON's escapes, and UTF-8 as it is.
        "quoted": partial(json.dumps, ensure_ascii=False),
    }
    files: dict[str, str | bytes] = {"1/model.onnx": content, "MODEL_CARD.md": card}
    for template in sorted(Path(__file__).with_name("triton").iterdir()):
        files[template.stem] = filled(template, values)
    if pipeline:
        files["inference.json"] = pipeline
    return write_package(repository / name, files)
