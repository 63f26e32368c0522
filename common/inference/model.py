"""A trained network as used for inference: its description, `model.json`, and the weights beside it."""

import hashlib
import inspect
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from medspeed.common.data.preparation import Preparation
from medspeed.common.files import atomic_path, write_json
from medspeed.common.inference import Precision
from medspeed.common.inference.labels import LabelScheme
from medspeed.common.inference.postprocessing import Steps

NOTE = "medspeed"  # name of the metadata that stand beside the tensors of a safetensors file, as JSON
_MOST = 4096  # of a window's side, a window batch, a network's channels
# What a network raises that is built of wrong arguments, or does not take an image.
BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# What torch.load raises for a file that holds no tensors, or one that asks to run code.
UNREADABLE = (*BROKEN, pickle.UnpicklingError, EOFError)
Trained = Any  # a `VolumeModel`, or an app's own: it has `precision`, and `build(weights)` returns the network


@dataclass(frozen=True)
class VolumeModel:
    """Everything inference needs to know about a volume segmentation network: the content of `model.json`."""

    network: Callable[..., nn.Module]  # function that builds it from the channels of image and logits; stored by name
    arguments: Mapping[str, Any]  # further arguments of that function, by name
    labelling: LabelScheme  # meaning of the logits
    preparation: Preparation  # how a scan is turned into the network's input
    window_size: tuple[int, int, int]  # X, Y, Z in voxels of the working grid
    window_batch: int  # windows computed at once
    overlap: float  # fraction of a window that its neighbour shares
    precision: Precision  # used in training, and for inference in PyTorch
    postprocessing: Steps = ()  # steps, as chosen on validation cases
    modality: tuple[str, ...] = ()  # name of each channel, as in dataset.json; nothing in files that do not name them

    def __post_init__(self) -> None:
        given = self.arguments.values()
        sizes = [side for each in given for side in (each if isinstance(each, (list, tuple)) else [each])]
        small = all(abs(size) <= _MOST for size in sizes if isinstance(size, (int, float)))
        names = {region.name for region in self.labelling.regions}
        unknown = {name for step in self.postprocessing for name in step.structures} - names
        for name, value, holds, bound in (
            ("postprocessing", sorted(unknown), not unknown, f"of the structures {sorted(names)}"),
            ("arguments", dict(self.arguments), small, f"numbers of at most {_MOST}"),
            ("window_size", self.window_size, all(1 <= side <= _MOST for side in self.window_size), f"1 to {_MOST}"),
            ("window_batch", self.window_batch, 1 <= self.window_batch <= _MOST, f"1 to {_MOST}"),
            ("overlap", self.overlap, 0 <= self.overlap < 1, "in [0, 1)"),
        ):
            if not holds:
                raise ValueError(f"{name} {value}: must be {bound}")

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network with weights of a file, or random ones; a ValueError says what does not fit."""
        try:
            network = self.network(self.preparation.channels, self.labelling.channels, **self.arguments)
        except BROKEN as error:
            raise ValueError(f"model.json: invalid arguments {dict(self.arguments)} ({first_line(error)})") from error
        if weights is not None:
            initialise(network, weights, made_of={**self.arguments, "classes": self.labelling.channels})
        return network


def arguments_of(build: Callable[..., nn.Module], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network's function: those given that are not None, and its own defaults where JSON can.

    One that the function does not take is a ValueError.
    """
    takes = {name: each.default for name, each in [*inspect.signature(build).parameters.items()][2:]}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen.keys() - takes.keys():
        only = f"network {build.__name__} takes {', '.join(takes) or 'no sizes'} only"
        field = name if name == "channels" else f"network.{name}"  # as `--help` has it
        raise ValueError(f"{field} {chosen[name]}: {only}; drop the flag, or pass null where a recipe sets it")
    return {name: value for name, value in takes.items() if isinstance(value, int | float | str | tuple)} | chosen


def write_model(run: Path, app: str, model: Trained) -> None:
    """Write `model.json` into a run folder."""
    write_json(run / "model.json", {"app": app, **model_content(model)})


def model_content(model: Trained) -> dict[str, Any]:
    """Return the fields of a model as JSON content, with networks by name; empty tuples are left out."""
    content = {name: value for name, value in asdict(model).items() if value != ()}
    for each in (content, *content.get("members", ())):
        if "network" in each:
            each["network"] = each["network"].__name__
    return content


def save_weights(path: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a state dict, with a digest, as one safetensors file, atomically; equal input gives equal bytes.

    The bytes go from the tensors to the file; safetensors' own `save` would copy all of them twice in memory.
    """
    ordered = sorted(weights.items(), key=lambda each: (-each[1].element_size(), each[0]))  # so that each is aligned
    tensors = {name: value.detach().cpu().contiguous() for name, value in ordered}
    note = json.dumps(metadata | {"sha256": _digest(tensors)}, sort_keys=True)
    header, end = dict[str, Any]({"__metadata__": {NOTE: note}}), 0
    for name, value in tensors.items():
        kind = str(value.dtype)[6:].upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")
        header[name] = {"dtype": kind, "shape": [*value.shape], "data_offsets": [end, end := end + value.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as part, part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(value.reshape(-1).view(torch.uint8).numpy().data for value in tensors.values())


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a state dict from a .safetensors file, or from a .pt or .pth file such as that of a MONAI bundle.

    A file that is damaged, or holds anything but tensors, is a ValueError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as stream:
                recorded = json.loads((stream.metadata() or {}).get(NOTE, "{}")).get("sha256")
            weights = load_file(path)
        except (SafetensorError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: truncated, or not a safetensors file ({first_line(error)})") from error
        if recorded is not None and recorded != _digest(weights):
            raise ValueError(f"{path}: the file has changed since it was written; restore a copy, or train again")
        return weights
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:  # torch does not look at their checksums
                if any(part.CRC for part in parts.infolist()) and (damaged := parts.testzip()):
                    raise ValueError(f"{damaged} in it is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, OSError, zipfile.BadZipFile, zlib.error) as error:
        use = "restore a copy, or use a .safetensors file or a .pt file that holds only tensors"
        raise ValueError(f"{path}: cannot be loaded safely as a state dict ({first_line(error)}); {use}") from error
    content = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path}: expected a state dict of tensors, found {type(content).__name__}")
    return {name.removeprefix("module."): value for name, value in content.items()}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]


def initialise(
    network: nn.Module,
    path: Path,
    rename: Callable[[str], str] = lambda name: name,
    made_of: Mapping[str, Any] | None = None,
) -> None:
    """Initialize a network, made of some arguments, with the weights of a file (see `load_weights`).

    A ValueError says which names (after `rename`) or shapes differ, and what the network is `made_of`.
    """
    weights = {rename(name): value for name, value in load_weights(path).items()}
    own, given = ({name: tuple(each.shape) for name, each in some.items()} for some in (network.state_dict(), weights))
    if own != given:
        missing, extra = sorted(own.keys() - given.keys())[:3], sorted(given.keys() - own.keys())[:3]
        shared = sorted(name for name in own.keys() & given.keys() if own[name] != given[name])
        shapes = [f"{name} {given[name]} instead of {own[name]}" for name in shared[:3]]
        arguments = ", ".join(f"{name} {value}" for name, value in (made_of or {}).items())
        remedy = f"; the network was built with {arguments}: pass what the weights were trained with" if made_of else ""
        raise ValueError(f"{path}: does not fit; missing {missing}, unexpected {extra}, wrong shape {shapes}{remedy}")
    network.load_state_dict(weights)
