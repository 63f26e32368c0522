"""The apps' own batches, training steps and validations, run on the fake device from tiny data made here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from PIL import Image

from medspeed.apps import parse_flags
from medspeed.benchmarks import harness
from medspeed.benchmarks.fake_cuda.device import FakeCuda, Operator, fake_cuda
from medspeed.common.data.batches import Batch
from medspeed.common.kernels import trust
from medspeed.common.run import Run
from medspeed.common.training.fit import Setup, train_step
from medspeed.common.training.state import TrainingState
from medspeed.common.training.steps import Steps
from medspeed.data_scripts.make_phantoms import write_set
from medspeed.data_scripts.painting import Scan

RATES = (0.010, 0.009)  # learning rates of the steps that are written down; one more comes before them, which sets up
VARIANTS: Mapping[str, Sequence[str]] = {  # what is counted of each app's recipe fast: flags by name
    "bf16": (),
    "fp16": ("--precision", "fp16"),
    "bf16 in 2 parts": ("--parallel.accumulate", "2"),
    "bf16, plain torch": ("--kernels", "torch"),
}
_SIDE, _CASES = 24, 5  # of a tiny volume; crops and windows are filled up with zeros
_PATCH, _TRAINING, _VALIDATION = 224, 256, 32
_NAMES = {
    "spleen": ("Spleen", ("CT",), ("background", "spleen")),
    "brats": ("Heads", ("FLAIR", "T1w", "T1gd", "T2w"), ("none", "edema", "non-enhancing tumor", "enhancing tumor")),
}  # fmt: skip


def flags_of(app: str, variant: str) -> Sequence[str]:
    """Return the flags of an app's variant; the batch of brats is one crop, which has no parts."""
    return (*VARIANTS[variant], *(("--batch-size", "2") if app == "brats" and "parts" in variant else ()))


class Opened(NamedTuple):
    """A training on the fake device, at the moment before it begins; `mode` writes down what runs."""

    mode: FakeCuda
    config: Any
    setup: Setup
    run: Run

    def steps(self) -> list[list[Operator]]:
        """Return what ran in steps at the `RATES`: the making of a batch (stage "batch"), then the rest ("train")."""
        setup, found = self.setup, list[list[Operator]]()
        scaler = torch.amp.GradScaler("cuda", enabled=setup.precision == "fp16")
        network, parts = setup.network.train(), self.config.parallel.accumulate
        given = setup.loss_function, setup.optimizer, scaler, setup.precision

        def compute(batch: Batch, rate: float | torch.Tensor) -> torch.Tensor:
            return train_step(network, batch, *given, rate, parts)

        rates = (RATES[0], *RATES)
        steps = Steps(compute, rates, TrainingState(self.run, network, setup.optimizer, scaler, len(rates)))
        for number in range(len(rates)):
            self.mode.operators, self.mode.stage = [], "batch"
            with closing(setup.batches.epoch(number)) as batches:
                batch = next(batches)
                assert batch.image.is_cuda  # which makes what is only drafted
            self.mode.stage = "train"
            steps(batch)
            found.append(self.mode.operators)
        return found[1:]

    def validation(self) -> list[Operator]:
        """Return what ran in a validation: of one case, or of a few patches; one before it sets up."""
        for _ in range(2):
            self.mode.operators, self.mode.stage = [], "validate"
            self.setup.validate(self.setup.network, lambda: None)
        return self.mode.operators


@contextmanager
def opened(app: str, data: Path, flags: Sequence[str] = ()) -> Iterator[Opened]:
    """Open an app's training by the recipe fast, in bf16 and with the sizes that it takes on a GPU.

    Fused kernels are trusted untried, unless the flags say --kernels torch: here nothing has values. What is prepared
    of the data, as `write_data` made them, is kept beside them.
    """
    words = ["--data", str(data), "--store", str(data.with_name("store")), "--device", "cuda", "--precision", "bf16"]
    words += ["--kernels", "fused"]  # as where they are trusted; on zeros they are equal, and no time is judged
    if app in _NAMES:
        usual = import_module(f"medspeed.apps.{app}.train").DEFAULTS["cuda"]
        words += ["--crop-size", str(list(usual.crop)), "--windows.size", str(list(usual.window))]
    config = parse_flags(app, [*words, *flags])
    every = mock.patch.object(trust, "choose", lambda trials, wish, *_: {t.name for t in trials if wish != "torch"})
    with fake_cuda() as mode, trust.trusting(), every, harness.opened(config) as (decided, setup, run):
        yield Opened(mode, decided, setup, run)


def write_data(app: str, folder: Path) -> Path:
    """Write tiny data that an app takes, for batches as large as on a GPU; return the folder."""
    folder.mkdir(parents=True)
    if app == "pathology":
        rows = ["image,label,split"]
        for number in range(_TRAINING + _VALIDATION):
            Image.new("RGB", (_PATCH, _PATCH), (number % 256, 64, 128)).save(folder / f"{number}.png")
            rows.append(f"{number}.png,{number % 2},{'train' if number < _TRAINING else 'val'}")
        (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        return folder
    name, modality, labels = _NAMES[app]
    truth = np.zeros((_SIDE,) * 3, np.uint8)
    for number in range(1, len(labels)):
        truth[4 * number : 4 * number + 4, 4:20, 4:20] = number
    image = np.squeeze(np.stack([np.int16(100) * truth + 10] * len(modality), 3))
    scan = Scan(image, truth, np.diag([1.5, 1.5, 2.0, 1.0]))
    about = {"name": name, "modality": dict(enumerate(modality)), "labels": dict(enumerate(labels))}
    scans = {str(case): lambda _: scan for case in range(_CASES)}
    return write_set(folder, scans, about, {"kind": "tiny", "seed": 0})
