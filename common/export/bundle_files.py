"""What every MONAI bundle of this project is made of: its files, weights that fit MONAI's class, its metadata.

Source: MONAI bundle specification (docs.monai.io, mb_specification).
"""

import io
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.export.digests import check_free, write_digests
from common.export.model_card import is_synthetic, model_card
from common.files import atomic_path, write_json, write_text

Config = dict[str, Any]
NetworkConfig = Mapping[str, Any]
"""A MONAI class as a bundle names it: "_target_" and every argument, such as {"_target_": "UNet", "in_channels": 1}."""
LICENCE = Path(__file__).parents[2] / "LICENSE"
IGNITE = "0.5.5"  # the version that the bundles are tested with; this project itself does not need it
_ROUNDING = 1e-4  # of the largest logit: what the order of sums may change


def finish_bundle(folder: Path, run: Path, configs: Mapping[str, Config], weights: Config, usage: str) -> Path:
    """Write the files of a bundle; its digests come last, so that one without them was not finished.

    Args:
        folder: the bundle's; empty, or to be made.
        run: whose model card becomes the README.
        configs: by name of the JSON file in configs/.
        weights: the state dict of the network that the configuration names.
        usage: how the bundle is run, in Markdown.
    """
    check_free(folder)
    readme = f"{model_card(run)}\n{usage}"
    for name, content in configs.items():
        write_json(folder / "configs" / f"{name}.json", content)
    stored = io.BytesIO()  # torch.save would write the temporary name of a file into it
    torch.save(weights, stored)
    with atomic_path(folder / "models" / "model.pt") as part:
        part.write_bytes(stored.getvalue())
    write_text(folder / "docs" / "README.md", readme)
    write_text(folder / "LICENSE", LICENCE.read_text(encoding="utf-8"))
    write_digests(folder)
    return folder


def twin_weights(
    ours: nn.Module, network: NetworkConfig, shape: Sequence[int], weights: Mapping[str, torch.Tensor] | None = None
) -> Config:
    """Return the weights as plain tensors, once MONAI's network computes with them what ours does.

    Args:
        ours: with the run's weights.
        network: what the bundle names.
        shape: [1, C, *sides] of the input on which both are compared.
        weights: by MONAI's names, where ours are called otherwise.

    Raises:
        ValueError: the weights do not fit `network`, or it computes something else.
    """
    from monai.bundle import ConfigParser  # here: it takes a second to load

    twin = ConfigParser({"network": dict(network)}).get_parsed_content("network").eval()
    named = ours.state_dict() if weights is None else weights
    plain = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    try:
        twin.load_state_dict(plain)
    except RuntimeError as error:
        problem = str(error).splitlines()[1].strip()
        raise ValueError(f"network {dict(network)}: the run's weights do not fit it ({problem})") from error
    example = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, due = twin(example), ours.cpu().eval()(example)
    same = found.shape[:2] == due.shape[:2] and found.numel() == due.numel()  # one number may be [1, 1] or [1, 1, 1, 1]
    if not same or float((found.flatten() - due.flatten()).abs().max()) > _ROUNDING * float(due.abs().max()):
        raise ValueError(
            f"network {dict(network)}: the run's weights fit it, but it computes something else: correct it"
        )
    return plain


def bundle_metadata(
    run: Path, version: str, task: str, data_type: str, packages: Mapping[str, str], image: Config, pred: Config
) -> Config:
    """Return metadata.json with the fields that MONAI's schema asks for.

    Args:
        run: whose data is described.
        version: of the bundle.
        task: what the network does.
        data_type: of the files.
        packages: versions of what is needed besides MONAI, torch and numpy.
        image: format of the network's input.
        pred: of its output.
    """
    synthetic = is_synthetic(run)
    kind = {None: "not recorded", True: "SYNTHETIC phantoms, no patient was scanned", False: "see docs/README.md"}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
        "meta_schema_20240725.json",
        "version": version,
        "changelog": {version: "written by medspeed"},
        "monai_version": metadata.version("monai"),
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": metadata.version("numpy"),
        "required_packages_version": dict(packages),
        "name": task,
        "task": task,
        "description": f"{task}; trained with medspeed. Not a medical device.",
        "authors": "the authors of medspeed, and who trained it",
        "copyright": "see LICENSE; the data's licence, where known, is in docs/README.md",
        "data_source": kind[synthetic],
        "data_type": data_type,
        "intended_use": "Research and engineering only; not a medical device, not for clinical use",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }


def bundle_usage(reader: str, files: str) -> str:
    """Return how a bundle is run, in Markdown.

    Args:
        reader: package that reads its files.
        files: what goes in and comes out, in a sentence.
    """
    return f"""## Use as a MONAI bundle

Needs MONAI, {reader}, fire and pytorch-ignite {IGNITE}; nothing of the project that trained it. In its folder:

    sha256sum --check SHA256SUMS
    python -m monai.bundle run --config_file configs/inference.json --bundle_root . --dataset_dir FOLDER \\
        --output_dir RESULTS

{files}
"""
