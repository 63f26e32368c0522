"""The two sides of a comparison: the guide's script, and the app itself with the guide's network; what judges both."""

import shlex
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

import medspeed
from medspeed.apps import parse_flags
from medspeed.apps.pathology.model import load_model
from medspeed.apps.pathology.patches.tables import find_tables
from medspeed.apps.pathology.scan.scan import ProbabilityMap, choose_view, find_detections, write_detections_csv
from medspeed.apps.pathology.slides.camelyon import read_slide_set
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.benchmarks import GUIDES
from medspeed.benchmarks.harness import DTYPES, WHOLE, Figures, guide_of, write_lists
from medspeed.common.clock import Clock, seconds_of
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import write_json
from medspeed.common.inference import Precision
from medspeed.common.inference.model import load_weights
from medspeed.common.inference.predictors import computes_bf16
from medspeed.common.inference.scan_files import peak_memory
from medspeed.common.run import Run
from medspeed.common.training.setup import choose_precision

Scores = dict[str, tuple[list[float], list[float]]]  # of the guide and of fast


@dataclass(frozen=True)
class Task:
    """The comparison of an app's guide with ours, or ours alone; `folder` is for what they make."""

    app: str
    data: Path
    device: torch.device
    rounds: int
    cases: int
    both: bool
    folder: Path

    known = property(lambda self: GUIDES[self.app])  # what `guides.yaml` has of the app
    guide = property(lambda self: guide_of(self.app))  # the script of `benchmarks/peers`
    train = property(lambda self: import_module(f"medspeed.apps.{self.app}.train").main)  # of ours
    chosen = property(lambda self: choose_precision("auto", self.device))  # what fast takes here
    usual = property(lambda self: "fp16" if self.device.type == "cuda" else "fp32")  # the guide's

    @property
    def half(self) -> str | None:
        """The guide's half precision; None where the processor would only emulate it."""
        return "fp16" if self.device.type == "cuda" else "bf16" if computes_bf16(self.device) else None

    @property
    def precisions(self) -> list[Precision]:
        """The precisions in which fast is measured: those that the device computes."""
        every: tuple[Precision, ...] = ("fp32", "bf16", self.chosen)
        return [each for each in dict.fromkeys(every) if each != "bf16" or computes_bf16(self.device)]

    def scans(self) -> list[Path]:
        """Return the scans to infer from, half as many as cases; slides with tumour and without in turn."""
        if self.app != "pathology":
            return [case.image for case in read_dataset(self.data).cases[: max(1, self.cases // 2)]]
        testing = read_slide_set(self.data).testing
        kinds = [[entry.path for entry in testing if entry.tumour is tumour] for tumour in (True, False)]
        return [path for pair in zip_longest(*kinds) for path in pair if path][: max(2, self.cases // 2)]

    def config(self, flags: str, precision: Precision | None = None) -> Any:  # noqa: ANN401 - the app's configuration
        """Return the configuration of ours with further flags; volumes with so many cases."""
        words = ["--data", self.data, "--store", self.folder / "store", "--device", self.device, "--engine", "none"]
        if self.app != "pathology":
            names = [case.name for case in read_dataset(self.data).cases[: self.cases]]
            split = self.folder / "split.json"
            words += ["--split", split]
            write_json(split, {"training": names, "validation": names[:1], "held_out": False})
        words += ["--precision", precision or self.chosen, *shlex.split(f"{self.known['fast']} {flags}")]
        return parse_flags(self.app, list(map(str, words)))

    def ways(self, config: Any) -> dict[str, Namespace]:  # noqa: ANN401 - the app's configuration
        """Return what the guide's script is told, with our data and batch; by its ways to load, in words for a row."""
        words = ["--data", str(self.data), "--device", str(self.device), *shlex.split(self.known["guide"])]
        if self.app != "pathology":
            words += ["--split", config.split, "--crop", *map(str, config.crop_size)]
            return {"": self.guide.parse_flags([*words, "--batch", str(config.batch_size // self.known["crops"])])}
        tables = find_tables(config, Run(self.folder, self.device, Clock(), resumed=False))
        reader = open_slide(read_slide_set(self.data).training[0].path).reader  # which ours takes, too
        words += ["--patch", str(config.patch_size), "--reader", reader]
        ways = dict[str, Namespace]()
        for kind, each in (("patches", 1), ("regions", 9)):  # patches in each item of the guide's dataset
            own = [*words, "--batch", str(config.batch_size // each), *write_lists(tables, self.folder, each)]
            ways[f" (guide: {kind}, workers)"] = self.guide.parse_flags(own)
            ways[f" (guide: {kind}, thread)"] = self.guide.parse_flags([*own, "--workers", "0"])
        return ways


def guide_epoch(task: Task, given: Namespace) -> Figures:
    """Return what a step of the guide takes in its second epoch, with the making of the batch."""
    network, how = task.guide.make_network(**given.network).to(task.device), DTYPES.get(task.usual)
    step, _ = task.guide.peers.make_step(network, given.rate, task.guide.make_loss(), how)
    loader = task.guide.training_loader(given)

    def epoch() -> int:
        return len([step(item["image"].to(task.device), item["label"].to(task.device)) for item in loader])

    steps = epoch()  # which starts processes
    return {WHOLE: seconds_of(epoch) / steps}


def guide_inference(task: Task, given: Namespace) -> Figures:
    """Run the guide's inference; return its seconds, its process's peak memory, MiB, and the folder of its answers."""
    to, guide = Path(tempfile.mkdtemp(dir=task.folder)), task.guide  # MONAI is loaded before the clock runs

    def infer() -> None:
        network = guide.make_network(**given.network).to(task.device)
        network.load_state_dict(load_weights(task.folder / "run" / "best.safetensors"))
        guide.infer(task.scans(), network, to, given)

    return {"s": seconds_of(infer), "MiB": peak_memory() / 2**20, "to": to}


def fast_inference(task: Task, way: str) -> Figures:
    """Run ours, as `infer.py` does it; return what `guide_inference` does."""
    to, how = Path(tempfile.mkdtemp(dir=task.folder)), {"overlays": False, **task.known["ways"][way]}

    def infer() -> None:
        run, scans, device = task.folder / "run", task.folder / "scans", str(task.device)
        found = medspeed.predict(run, scans, to, quiet=True, device=device, **how)
        assert not found.failed, found.failed

    return {"s": seconds_of(infer), "MiB": peak_memory() / 2**20, "to": to}


def dices(some: Sequence[Path], others: Sequence[Path], regions: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return the Dice of each region in each pair of files of label maps, [N, R]; 1 where it is in neither."""
    from monai.metrics import compute_dice  # here, where no side is timed

    found = []
    for paths in zip(some, others, strict=True):
        voxels = [read_volume(path).voxels.astype(np.int64) for path in paths]
        pair = [torch.from_numpy(np.stack([np.isin(each, of) for of in regions.values()])[None]) for each in voxels]
        found.append(compute_dice(*pair, include_background=True, ignore_empty=False)[0].numpy())
    return np.stack(found)


def judge_masks(task: Task, guide: Path, fast: Path) -> Scores:
    """Return the mean Dice of both sides' masks, and the least of ours to the guide's."""
    labels = {case.image: case.label for case in read_dataset(task.data).cases if case.label is not None}
    theirs, ours = ([folder / file.name for file in task.scans()] for folder in (guide, fast))
    truth, regions = [labels[file] for file in task.scans()], task.guide.REGIONS
    means = [float(dices(masks, truth, regions).mean()) for masks in (theirs, ours)]
    least = float(dices(ours, theirs, regions).min())
    return {"Dice of these masks": (means[:1], means[1:]), "least Dice of a mask to the guide's": ([], [least])}


def judge_maps(task: Task, guide: Path, fast: Path) -> Scores:
    """Return FROC and slide AUC of both sides' scans; the guide's maps are written as ours are, to be judged alike."""
    model, to = load_model(task.folder / "run"), guide / "scans"
    for file in task.scans():
        values, slide = np.load(guide / f"{file.stem}.npy").astype(np.float32), open_slide(file)
        level, view = slide.levels[0], choose_view(slide, model.mpp)
        found = ProbabilityMap(values, round(level.width / values.shape[1]), values > 0, 0)
        write_detections_csv(to / file.stem / "detections.csv", find_detections(found, view.base_mpp))
        about = {"name": file.stem, "probability": float(values.max(initial=0)), "mpp": slide.mpp}
        write_json(to / file.stem / "slide.json", {**about, "size": [level.width, level.height]})
    theirs, ours = (medspeed.evaluate(each, task.data, app="pathology", quiet=True) for each in (to, fast))
    scores = {"FROC of these scans": "froc", "slide AUC of these scans": "slide_auc"}
    return {what: ([getattr(theirs, key)], [getattr(ours, key)]) for what, key in scores.items()}
