"""A model repository for NVIDIA Triton: one exported model, and `triton/`, filled in: configuration, client, README.

Source: Triton's model repository and model configuration guides (docs.nvidia.com/deeplearning/triton-inference-server)
and its published protobuf model_config.proto; the tests parse what is written here with that protobuf.
"""

from pathlib import Path

from medspeed.common.export.model_card import filled, write_package
from medspeed.common.export.onnx_model import OPSET, numbers, read_metadata
from medspeed.common.inference.predictors import with_exact_norms

QUEUE_MICROSECONDS = 2000  # a window takes a GPU tens of milliseconds: waiting a few percent of it costs nothing
_KEPT = ("weights_sha256", "precision", "labels", "regions", "window", "smallest")  # in the README


def write_triton(
    repository: Path, name: str, model: Path, card: str, overlap: float = 0.25, pipeline: str | None = None
) -> Path:
    """Write and return `repository`/`name`: config.pbtxt, 1/model.onnx, a client, a README, the model card, digests.

    The configuration leaves to the server what it can read from the model. The model's group normalisations are
    written out, since ONNX Runtime's own are not exact (`with_exact_norms`).

    Args:
        repository: folder that `tritonserver --model-repository` is given; it may hold other models.
        name: of the model there, a folder and part of a URL.
        model: a run's exports/model_*.onnx.
        card: the model card.
        overlap: of sliding windows, in the README's example.
        pipeline: inference.json, which segments whole scans of volumes (see `bundle.served_pipeline`).

    Raises:
        FileNotFoundError: there is no such model.
        FileExistsError: `repository`/`name` holds something.
        ValueError: the model is none that `export_onnx` wrote.
    """
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such file; if the parity gate rejected it, serve another --precision")
    metadata = read_metadata(model)
    _, best, most = numbers(metadata["batch"])
    values = {
        "name": name,
        "window": numbers(metadata["window"]),
        "best": best,
        "most": most,
        "kept": {key: metadata[key] for key in _KEPT if key in metadata},
        "delay": QUEUE_MICROSECONDS,
        "opset": OPSET,
        "overlap": overlap,
        "pipeline": pipeline,
    }
    files: dict[str, str | bytes] = {"1/model.onnx": with_exact_norms(model), "MODEL_CARD.md": card}
    for template in sorted(Path(__file__).with_name("triton").iterdir()):
        files[template.stem] = filled(template, values)
    if pipeline:
        files["inference.json"] = pipeline
    return write_package(repository / name, files)
