"""Trained runs: read, imported and opened; several, such as folds, as the mean of their logits in each window."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from medspeed.common.config import flat
from medspeed.common.console import say
from medspeed.common.files import from_json, printable, read_object, sha256_of
from medspeed.common.inference import AnyPrecision, Backend
from medspeed.common.inference.labels import Region, dice_counts
from medspeed.common.inference.model import (
    BROKEN,
    Trained,
    VolumeModel,
    first_line,
    initialise,
    save_weights,
    write_model,
)
from medspeed.common.inference.open_predictor import Ensemble, OpenedPredictor, open_predictor, repeating_predictor
from medspeed.common.inference.postprocessing import over_bars
from medspeed.common.inference.predictors import Predictor

Model = TypeVar("Model")
Find = Callable[..., Callable[..., nn.Module]]  # `medspeed.models.find_network`

_OWN = re.compile(r"\w+(\.\w+)*:\w+")  # the name of a network of the user's own
_SHARED = ("labelling", "preparation", "window_size", "overlap")


@dataclass(frozen=True)
class Member:
    """A network of an ensemble, the name of the run it is from, and the SHA-256 of its weights."""

    run: str
    sha256: str
    network: Callable[..., nn.Module]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class RunModel(VolumeModel):
    """The model of one run, or of an ensemble: what its networks share, the first of which is `network`."""

    members: tuple[Member, ...] = ()  # none of a single network

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts()  # whose arguments are checked

    def parts(self) -> list["RunModel"]:
        """Return the models of its networks, each by itself."""
        alone = (replace(self, network=each.network, arguments=each.arguments, members=()) for each in self.members)
        return [*alone] or [self]

    def build(self, weights: Path | None = None) -> nn.Module:
        """Return the network, or the `Ensemble` of all, with weights of a file; see `VolumeModel.build`."""
        if not self.members:
            return super().build(weights)
        network = Ensemble([part.build() for part in self.parts()])
        if weights is not None:
            initialise(network, weights, made_of=self.arguments)
        return network


def read_model(run: Path, app: str, kind: type[Model], find: Find | None = None) -> Model:
    """Read `model.json` from a run folder of an app, whose network `find` finds by name.

    Raises:
        FileNotFoundError: it is not a run folder.
        ValueError: the file is damaged or belongs to another app.
    """
    path = run / "model.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --model takes a run folder")
    if (run / "checkpoints").is_dir() and not (run / "summary.json").is_file():
        say(printable(f"{run}: its training has not ended; these are its best weights so far"), "warning")
    try:
        content = read_object(path)
        if (other := content.pop("app")) != app:
            raise ValueError(f"it belongs to the app {str(other)[:60]!r}")
        if find is not None:
            for each in (content, *content.get("members", ())):
                each["network"] = find(each["network"])
        return from_json(kind, content)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path}: not the model file of a run of {app} ({error})") from error


def load_models(runs: Sequence[Path], app: str, find: Find, network: str | None = None) -> RunModel:
    """Read the `model.json` of a volume app's run; of several, what they share, with the networks as its members.

    The file may be anybody's: a network of the user's own is imported only if the user names it, too, as `network`.
    Otherwise what was exported still runs, and `build` is refused with a PermissionError.

    Raises:
        FileNotFoundError: one is no run folder, or has no weights.
        ValueError: one is damaged or given twice, or models differ in labels, preparation, channels or windows.
    """
    given = find(network) if network else None

    def named(stored: str) -> Callable[..., nn.Module]:
        if given is not None and given.__name__ != stored:
            raise ValueError(f"its network is {stored}, not {network}: drop --network, or name the run's own")
        return given or (_refusing(stored) if _OWN.fullmatch(stored) else find(stored))

    models = [read_model(run, app, RunModel, named) for run in runs]
    if len(models) == 1:
        return models[0]
    members: list[Member] = []
    first = next((number for number, each in enumerate(models) if each.modality), 0)  # imported ones name no channels
    for run, model in zip(runs, models, strict=True):
        _check_shared(run, model, runs[first], models[first])
        weights = run / "best.safetensors"
        if not weights.is_file():
            raise FileNotFoundError(f"{weights}: no such weights file; train the run to its end, or leave it out")
        digest = sha256_of(weights)
        if digest in [each.sha256 for each in members]:
            raise ValueError(f"{run}: its weights are given twice; name each model once")
        members.append(Member(run.resolve().name, digest, model.network, model.arguments))
    say(printable(f"mean of {len(members)} models: {', '.join(map(str, runs))}"))
    batch = min(model.window_batch for model in models)  # an engine takes no more windows than it was built for
    shared = replace(models[0], modality=models[first].modality, members=tuple(members), window_batch=batch)
    if any(model.precision != shared.precision for model in models):
        shared = replace(shared, precision="fp32")
    if any(model.postprocessing != shared.postprocessing for model in models):
        say("no post-processing, since the models' own differ: infer takes --largest-component and --smallest-ml")
        return replace(shared, postprocessing=())
    return shared


def _refusing(name: str) -> Callable[..., nn.Module]:
    def refuse(*_: object, **__: object) -> nn.Module:
        remedy = f"if you trust it, pass --network {name}; its exported models need none (infer --backend onnxruntime)"
        raise PermissionError(f"network {name}: runs the code of this model's author: {remedy}")

    refuse.__name__ = name  # as model.json keeps it
    return refuse


def _check_shared(run: Path, model: RunModel, first_run: Path, first: RunModel) -> None:
    if model.members:
        names = ", ".join(each.run for each in model.members)
        raise ValueError(f"{run}: is an ensemble itself; name its models instead ({names})")
    due, shared = flat(first), (*_SHARED, *(["modality"] if model.modality else []))
    for name, value in flat(model).items():
        if name.partition(".")[0] in shared and value != due[name]:
            raise ValueError(
                f"{run}: {name} {value}, but {due[name]} in {first_run}: models must share labels, preparation, "
                "channels and windows to be averaged; leave it out, or train it with the flags of the other"
            )


def open_models(
    runs: Sequence[Path],
    model: RunModel,
    backend: Literal["auto", Backend] = "auto",
    precision: Literal["auto", AnyPrecision] = "auto",
    *,
    device: torch.device,
    pairs: list[torch.Tensor] | None = None,
) -> OpenedPredictor:
    """Open the runs of a model from `load_models` as `open_predictor` does, with one backend, as their mean logits.

    Where "auto" would choose not the same for all, since one has no engine or export, PyTorch runs them. On a GPU
    PyTorch's windows are repeated as CUDA graphs. `pairs` receives how runs agree in their windows: `pair_counts`.
    """
    parts = model.parts() if len(runs) > 1 else [model]

    def opened(backend: Literal["auto", Backend]) -> list[OpenedPredictor]:
        one = partial(open_predictor, backend=backend, precision=precision, device=device)
        return [one(*each) for each in zip(runs, parts, strict=True)]

    found = opened(backend)
    if len({(each.backend, each.precision) for each in found}) > 1:
        found = [replace(each, reason="the models have not the same exports") for each in opened("torch")]
    members = [each.predict for each in found]
    if found[0].backend == "torch" and device.type == "cuda":
        for number, part in enumerate(parts):
            about = " + ".join(f"{each.network.__name__} {each.arguments}" for each in part.members or (part,))
            about, line = f"{about} in {found[0].precision}", partial(say, kind="detail")
            members[number] = repeating_predictor(members[number], about, line)
    together = partial(compared_mean, members, model, [] if pairs is None else pairs)
    files = tuple(file for each in found for file in each.files)
    return replace(found[0], predict=members[0] if len(runs) == 1 else together, files=files)


def compared_mean(
    members: Sequence[Predictor], model: RunModel, pairs: list[torch.Tensor], windows: torch.Tensor
) -> torch.Tensor:
    """Return the mean of logits, one predictor at a time; `pairs` receives how well they agree (see `pair_counts`)."""
    labels, scheme = list[torch.Tensor](), model.labelling

    def noted(member: Predictor) -> torch.Tensor:
        logits = member(windows)
        some = logits[..., ::2, ::2, ::2].transpose(0, 1)  # enough, and an eighth of the work
        labels.append(scheme.labels_of(over_bars(some, scheme, model.postprocessing)))
        return logits

    mean = reduce(torch.add, map(noted, members)) / len(members)
    pairs.append(pair_counts(labels, scheme.regions))
    return mean


def pair_counts(labels: Sequence[torch.Tensor], regions: Sequence[Region]) -> torch.Tensor:
    """Return the counts of several label maps of the same voxels, each with each, added up; see `dice_counts`."""
    return torch.stack([dice_counts(one, other, regions) for one, other in combinations(labels, 2)]).sum(dim=0)


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several, that of all theirs."""
    digests = " ".join(map(sha256_of, files))
    return digests if len(files) == 1 else hashlib.sha256(digests.encode()).hexdigest()


def import_weights(
    run: Path, app: str, model: Trained, weights: Path, rename: Callable[[str], str] = lambda name: name
) -> None:
    """Create a run folder of an app with only weights and model, so that they can be used for inference and export.

    Raises:
        FileExistsError: the folder is not empty.
        FileNotFoundError, ValueError: as `load_weights` and `initialise` of the weights, or a network of ours does not
            take windows of the model's size; nothing is left behind.
    """
    if run.exists() and any(run.iterdir()):
        raise FileExistsError(f"{run}: not empty; --init creates a new run, so --model must be a new folder")
    if isinstance(model, VolumeModel) and not _OWN.fullmatch(model.network.__name__):  # it may not run on "meta"
        window = torch.empty(1, model.preparation.channels, *model.window_size, device="meta")
        try:
            given = tuple(model.build().eval().to("meta")(window).shape[2:])
            if given != model.window_size:
                raise ValueError(f"it gives logits of {given}")
        except BROKEN as error:
            said = f"the network does not take such windows ({first_line(error)})"
            raise ValueError(f"window_size {model.window_size}: {said}") from error
    network = model.build()
    initialise(network, weights, rename, made_of=getattr(model, "arguments", {}))
    save_weights(run / "best.safetensors", network.state_dict(), {"imported_sha256": sha256_of(weights)})
    write_model(run, app, model)
