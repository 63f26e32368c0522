"""MONAI bundles of trained networks, which run with MONAI alone and give the same results; models for Triton.

A bundle is `bundle/`, filled in. Three of its transforms want a reason. Lambdad after Spacingd: on a plane that both
grids share, MONAI's resampling takes 1e-15 of the neighbour too, and 0 would be foreground. CropForegroundd before
NormalizeIntensityd: after it what lies below the mean is negative, and 0 no longer only the background. Expressions
after Invertd: of equally large components KeepLargestConnectedComponentd keeps any.

Source: MONAI bundle specification (docs.monai.io, mb_specification); configurations of the MONAI model zoo; Triton's
model repository and configuration guides (docs.nvidia.com/deeplearning/triton-inference-server) and its published
protobuf model_config.proto, with which the tests parse what is written here.
"""

import io
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medspeed.common.export.model_card import filled, model_card, read_if_there, write_package
from medspeed.common.export.onnx_model import OPSET, read_metadata
from medspeed.common.inference.labels import LabelScheme, painting_order
from medspeed.common.inference.model import VolumeModel
from medspeed.common.inference.postprocessing import ROUNDING, logit_bars
from medspeed.common.inference.predictors import with_exact_norms
from medspeed.common.inference.runs import RunModel

NetworkConfig = Mapping[str, Any]
"""A MONAI class as a bundle names it: "_target_" and every argument, such as {"_target_": "UNet", "in_channels": 1}."""
LICENCE = Path(__file__).parents[2] / "LICENSE"
_VOLUMES = Path(__file__).with_name("bundle")
_KEPT = ("weights_sha256", "precision", "labels", "regions", "window", "smallest")  # of metadata, in Triton's README
_ROUNDING = 1e-4  # of the largest logit: what the order of sums may change


def write_volume_bundle(folder: Path, run: Path, task: str, model: RunModel) -> Path:
    """Write a segmentation run as a MONAI bundle that writes NAME.nii.gz for each NAME.nii(.gz) (see `write_bundle`).

    The run's weights must fit MONAI's own class and arguments, which its network has as the attribute `monai`.

    Raises:
        ValueError: it has no such attribute.
    """
    if model.members:
        raise ValueError(f"{run}: an ensemble cannot be a MONAI bundle; use --to onnx, engine or triton")
    labelling, network = model.labelling, model.build(run / "best.safetensors")
    named = getattr(network, "monai", None)
    if named is None:
        raise ValueError(
            f"network {model.network.__name__}: a bundle needs a class of MONAI's: set the module's attribute `monai` "
            'to {"_target_": "UNet", "in_channels": 1, ...}, or export with --to onnx, engine or triton'
        )
    regions = [region.name for region in labelling.regions]
    logits = ["background", *labelling.labels[1:]] if labelling.exclusive else regions
    values = {
        **_pipeline(model),
        "network": named,
        "task": f"Segmentation of {', '.join(regions)}",
        "image_names": {number: f"channel {number} of the file" for number in range(model.preparation.channels)},
        # MONAI would take what begins so for code or a reference, not for a name.
        "logit_names": {n: f"label {name}" if name[:1] in tuple("$@%") else name for n, name in enumerate(logits)},
    }
    shape = (1, model.preparation.channels, *model.window_size)
    return write_bundle(folder, run, task, _VOLUMES, values, network, shape)


def served_pipeline(model: VolumeModel) -> str:
    """Return a bundle's configs/inference.json whose network is `client.triton_predictor`, on a Triton server."""
    return _json(_VOLUMES / "inference.json", {**_pipeline(model), "network": None})


def _pipeline(model: VolumeModel) -> dict[str, Any]:
    bars, paint = logit_bars(model.labelling, model.postprocessing), painting(model.labelling)
    for number in {*range(1, len(bars))} - {*model.labelling.numbers} if model.labelling.exclusive else ():
        bars[number] = 1e4  # an unused number never wins
    return {"model": model, "painting": f"$lambda logits: {paint}", "rounding": ROUNDING, "bars": bars}


def _json(template: Path, values: Mapping[str, Any]) -> str:
    return json.dumps(json.loads(filled(template, values)), indent=2) + "\n"


def write_bundle(
    folder: Path,
    run: Path,
    task: str,
    templates: Path,
    values: Mapping[str, Any],
    network: nn.Module,
    shape: Sequence[int],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a MONAI bundle and return its folder: configs/, models/model.pt, docs/README.md, LICENSE, SHA256SUMS.

    `values` are what the `templates`, a folder of inference.json, metadata.json and usage.md, name; "network" is
    MONAI's own class and arguments. `weights` are the run's, by the names of that class, by default as in `network`,
    which is ours with the run's weights. On an input of a `shape` [1, C, *sides] the two must compute the same.

    Raises:
        FileExistsError: `folder` holds something.
        RuntimeError, ValueError: the weights do not fit MONAI's class, or that computes something else.
    """
    from monai.bundle import ConfigParser  # here: it takes a second to load

    twin = ConfigParser({"network": dict(values["network"])}).get_parsed_content("network").eval()
    plain = {name: value.detach().cpu().contiguous() for name, value in (weights or network.state_dict()).items()}
    twin.load_state_dict(plain)
    example = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, due = twin(example), network.cpu().eval()(example)
    same = found.shape[:2] == due.shape[:2] and found.numel() == due.numel()  # one number may be [1, 1] or [1, 1, 1, 1]
    if not same or float((found.flatten() - due.flatten()).abs().max()) > _ROUNDING * float(due.abs().max()):
        raise ValueError(f"network {dict(values['network'])}: takes the weights but computes other results: correct it")
    stored = io.BytesIO()  # torch.save would write the temporary name of a file into it
    torch.save(plain, stored)
    synthetic = read_if_there(run / "summary.json").get("data", {}).get("synthetic")  # None where it is not known
    known = {**values, "synthetic": synthetic, "version": metadata.version}
    usage = (templates / "usage.md").read_text(encoding="utf-8")
    configs = {f"configs/{name}": _json(templates / name, known) for name in ("inference.json", "metadata.json")}
    files = {"docs/README.md": f"{model_card(run, task)}\n{usage}", "LICENSE": LICENCE.read_text(encoding="utf-8")}
    return write_package(folder, {**configs, "models/model.pt": stored.getvalue(), **files})


def painting(labelling: LabelScheme) -> str:
    """Return `LabelScheme.labels_of` for regions as one expression over `logits` [K, X, Y, Z], a MONAI tensor [1, ...].

    Regions of few members paint over those of many, and of rivals (equally many members) the highest logit wins.
    """
    expression = "torch.zeros_like(logits[:1])"
    for rivals in painting_order(labelling.regions):
        found, paint = f"logits[{rivals[0]}:{rivals[0] + 1}]", str(float(labelling.regions[rivals[0]].value))
        if len(rivals) > 1:
            paints = [float(labelling.regions[number].value) for number in rivals]
            found = f"logits[{rivals}].amax(0, keepdim=True)"
            paint = f"torch.tensor({paints}, device=logits.device)[logits[{rivals}].argmax(0, keepdim=True)]"
        expression = f"torch.where({found} > 0, {paint}, {expression})"
    return expression


def write_triton(
    repository: Path, name: str, model: Path, card: str, overlap: float = 0.25, pipeline: str | None = None
) -> Path:
    """Write a model folder of a Triton repository, which may hold others, and return it: `triton/`, filled in.

    The configuration leaves to the server what it can read from the model, one of exports/model_*.onnx. Its group
    normalisations are written out, since ONNX Runtime's own are not exact (`with_exact_norms`). `pipeline` is the
    inference.json that segments whole scans of volumes (see `served_pipeline`).

    Raises:
        FileNotFoundError: there is no such model.
        FileExistsError: `repository`/`name` holds something.
        ValueError: the model is none that `export_onnx` wrote.
    """
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such file; if the parity gate rejected it, serve another --precision")
    metadata = read_metadata(model)
    window, (_, best, most) = (tuple(map(int, metadata[name].split())) for name in ("window", "batch"))
    kept = {key: metadata[key] for key in _KEPT if key in metadata}
    values = {"name": name, "window": window, "best": best, "most": most, "kept": kept, "opset": OPSET}
    values |= {"overlap": overlap, "pipeline": pipeline}
    files: dict[str, str | bytes] = {"1/model.onnx": with_exact_norms(model), "MODEL_CARD.md": card}
    for template in sorted(Path(__file__).with_name("triton").iterdir()):
        files[template.stem] = filled(template, values)
    return write_package(repository / name, files | ({"inference.json": pipeline} if pipeline else {}))
