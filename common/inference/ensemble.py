"""Inference with several trained runs, such as the folds of a cross-validation: their logits are averaged per window.

A scan is read, prepared, cut into windows, restored and written once, however many models there are.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from medspeed.common.config import flat
from medspeed.common.console import say
from medspeed.common.files import printable, sha256_of
from medspeed.common.inference.labels import LabelScheme, pair_counts
from medspeed.common.inference.members import Member, mean_of
from medspeed.common.inference.model import Find, VolumeModel, load_model, read_note
from medspeed.common.inference.open_predictor import OpenedPredictor, open_predictor
from medspeed.common.inference.options import AnyPrecision, Backend
from medspeed.common.inference.predictors import Predictor

_SHARED = ("labelling", "preparation", "window_size", "overlap")


def load_models(runs: Sequence[Path], app: str, find: Find, network: str | None = None) -> VolumeModel:
    """Read the `model.json` of a run; of several, what they have in common, with the networks as its members.

    Raises:
        FileNotFoundError: one is no run folder, or has no weights.
        ValueError: one is damaged or given twice, or models differ in labels, preparation, channels or windows; says.
    """
    models = [load_model(run, app, find, network) for run in runs]
    if len(models) == 1:
        return models[0]
    members: list[Member] = []
    first = next((number for number, each in enumerate(models) if each.modality), 0)  # older runs do not name channels
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
    precision, postprocessing = models[0].precision, models[0].postprocessing
    if any(model.precision != precision for model in models):
        precision = "fp32"
    if any(model.postprocessing != postprocessing for model in models):
        postprocessing = ()
        say("no post-processing, since the models' own differ: choose with --largest-component or --smallest-ml")
    shared = replace(models[0], modality=models[first].modality, members=tuple(members))
    batch = min(model.window_batch for model in models)  # an engine takes no more windows than it was built for
    return replace(shared, precision=precision, postprocessing=postprocessing, window_batch=batch)


def _check_shared(run: Path, model: VolumeModel, first_run: Path, first: VolumeModel) -> None:
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
    model: VolumeModel,
    *,
    backend: Literal["auto", Backend] = "auto",
    precision: Literal["auto", AnyPrecision] = "auto",
    device: torch.device,
) -> OpenedPredictor:
    """Open a run as `open_predictor` does; of several each, with one backend, as the mean of their logits.

    Where "auto" would choose not the same for all, since one has no engine or export, PyTorch runs them.

    Args:
        runs: their folders.
        model: what `load_models` returned for them.
        backend: see `open_predictor`, as for the others and the errors.
        precision: "auto" is that of the training, and fp32 where the runs' differ.
        device: where the windows lie.
    """
    if len(runs) == 1:
        return open_predictor(runs[0], model, backend=backend, precision=precision, device=device)
    trained = [replace(model, network=each.network, arguments=each.arguments, members=()) for each in model.members]

    def opened(backend: Literal["auto", Backend]) -> list[OpenedPredictor]:
        one = partial(open_predictor, backend=backend, precision=precision, device=device)
        return [one(*each) for each in zip(runs, trained, strict=True)]

    found = opened(backend)
    if len({(each.backend, each.precision) for each in found}) > 1:
        found = [replace(each, reason="the models have not the same exports") for each in opened("torch")]
    members, others = tuple(each.predict for each in found), tuple(each.file for each in found[1:])
    return replace(found[0], predict=partial(mean_of, members), others=others, members=members)


def compared_mean(
    members: Sequence[Predictor], scheme: LabelScheme, pairs: list[torch.Tensor], windows: torch.Tensor
) -> torch.Tensor:
    """Return the mean logits of predictors as `mean_of` does; `pairs` receives how well they agree (`pair_counts`)."""
    labels: list[torch.Tensor] = []

    def noted(member: Predictor, windows: torch.Tensor) -> torch.Tensor:
        logits = member(windows)
        labels.append(scheme.labels_of(logits[..., ::2, ::2, ::2].transpose(0, 1)))  # enough, and an eighth of the work
        return logits

    mean = mean_of([partial(noted, member) for member in members], windows)
    pairs.append(pair_counts(labels, scheme.regions))
    return mean


def digest_of(opened: OpenedPredictor) -> str:
    """Return the SHA-256 of the numbers that are computed with: of our weights what was checked as they were opened.

    Of several models it is that of their digests, in their order.
    """
    digests = []
    for file in (opened.file, *opened.others):
        checked = read_note(file).get("sha256") if file.suffix == ".safetensors" else None
        digests.append(checked or sha256_of(file))
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
