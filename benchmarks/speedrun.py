"""The speedrun: how long the guide and fast take, each from nothing, to the quality that the guide ends with.

Run: python benchmarks/speedrun.py TASK [--seeds 5] [--output FILE.json] [-- FLAGS of our train.py]

TASK is spleen-small (our phantoms), spleen-guide (phantoms around the real label maps in --labels; the guide's network,
spacing and crops on both sides), brats or pathology; benchmarks/speedrun.yaml has their sizes. The target is set first:
the lowest validation Dice (AUC) of the guide's seeds after its stated epochs. Then both sides run in turn, each a
process of its own with empty caches, until three validations in a row are at the target; the clock runs from the start
of the process to the third. A seed of the guide that got there while the target was set does not run again. What they
claim is checked by other code: the saved weights segment the validation cases file to file, and MONAI's metric judges
the masks (pathology: SciPy's ranks judge the patches). A seed of ours that never arrives counts as infinite. The guide
gets twice its epochs; where a seed has not arrived then, the ratio is a lower bound. With --target none is set first,
and with --sides fast the guide does not run. With --whole there is no target: both train for all their stated epochs.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from medspeed.common.flags import Parser

Json = dict[str, Any]
HELD = 3  # validations in a row that must reach a target
TASKS: dict[str, Json] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

PARSER = Parser(description=__doc__)
PARSER.add_argument("task", choices=TASKS)
PARSER.add_argument("--data", type=Path, help="dataset folder; synthetic data by default")
PARSER.add_argument("--labels", type=Path, help="real label maps for spleen-guide, such as MSD's Task09_Spleen")
PARSER.add_argument("--seeds", type=int, help="number of runs of each side, with seeds 0, 1, ...")
PARSER.add_argument("--sides", choices=("both", "guide", "fast"), default="both", help="what runs")
PARSER.add_argument("--target", type=float, help="Dice or AUC to reach, instead of what the guide ends with")
PARSER.add_argument("--whole", action="store_true", help="compare what the whole trainings end with")
PARSER.add_argument("--warm", action="store_true", help="run fast a second time with each seed, its caches filled")
PARSER.add_argument("--output", type=Path, help="JSON file for the record")


def parse_options(words: Sequence[str] = ()) -> tuple[Namespace, list[str]]:
    """Parse the command line; return the options, and the flags of our train.py after `--`."""
    words = list(words or sys.argv[1:])
    end = words.index("--") if "--" in words else len(words)
    given = PARSER.parse_args(words[:end])
    if given.whole and given.target is not None:
        PARSER.error("--whole trains to no target; leave out --target, or --whole")
    if given.labels and "cases" not in TASKS[given.task]:
        PARSER.error(f"--labels: {given.task} has its own data; only spleen-guide takes label maps")
    if given.warm and given.sides == "guide":
        PARSER.error("--warm: the guide keeps nothing; use --sides both or fast")
    if given.sides == "fast" and given.target is None and not given.whole:
        PARSER.error("--sides fast: the guide sets no target then, so pass --target")
    if "cases" in TASKS[given.task] and not given.data and not given.labels:
        PARSER.error(f"{given.task}: pass the real label maps (--labels), or phantoms made around them (--data)")
    if given.task.startswith("real-") and not given.data:
        PARSER.error(f"{given.task}: pass real data (--data)")
    return given, words[end + 1 :]


if __name__ == "__main__":
    parse_options()  # now, so that --help does not wait for torch

import math
import shlex
import statistics
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import mannwhitneyu

from medspeed.apps import parse_flags
from medspeed.apps.pathology.patches.table import decode
from medspeed.apps.pathology.patches.tables import Tables, find_tables
from medspeed.benchmarks.harness import call, guide_of, make_data, write_lists
from medspeed.benchmarks.sides import dices
from medspeed.common.clock import Clock
from medspeed.common.console import set_verbosity
from medspeed.common.data.dataset import read_dataset, split_cases
from medspeed.common.files import read_object, write_json
from medspeed.common.inference.model import load_weights
from medspeed.common.run import Run, environment, one_line_errors


@one_line_errors()
def main() -> None:
    """Set the target, run the seeds, and print and write what they took."""
    given, flags = parse_options()
    set_verbosity("silent")  # of what draws and judges patches
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    record: Json = {"task": given.task, **TASKS[given.task], "flags": flags, "environment": about}
    record["capability"] = torch.backends.cpu.get_cpu_capability()
    seeds = range(given.seeds or record["seeds"])
    sides = ["guide"] * (given.sides != "fast") + ["fast", *["warm"] * given.warm] * (given.sides != "guide")
    runs: dict[str, list[Json]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="speedrun-") as made:
        folder = Path(made)
        around = "cases" in record and given.labels
        more = ("--cases", record["cases"], "--labels", given.labels.resolve()) if around else ()
        data = given.data or make_data(record["app"], "small", folder / "data", *more)
        course = Course(folder, data.resolve(), record, flags)
        known = math.inf if given.whole else given.target
        ends = [] if known is not None else [course.guide(seed, math.inf, False)["curve"][-1][-1] for seed in seeds]
        target = math.floor(1000 * min(ends)) / 1000 if known is None else known
        record["target"] = None if given.whole else {"value": target, "the guide's seeds": ends}
        print(f"target: {target:g}", f"(the guide's seeds: {', '.join(f'{end:.4f}' for end in ends)})" * bool(ends))
        for seed in seeds:
            for side in sides:
                run = course.guide(seed, target) if side == "guide" else course.fast(seed, target, side)
                runs[side].append(run)
                shown = ", ".join(f"{name} {run[name]}" for name in ("held", "seconds", "steps", "judged anew"))
                print(f"seed {seed}, {side}: {shown}", flush=True)
            record |= {"summary": summary_of(runs, target), "runs": runs}
            if given.output is not None:  # after each, so that an interrupted run keeps the seeds before
                write_json(given.output, record)
    print(*(f"{name}: {value}" for name, value in record["summary"].items()), sep="\n")


def summary_of(runs: Mapping[str, Sequence[Json]], target: float) -> Json:
    """Return medians and spreads over the seeds of each side, and the median of how many times as fast as the guide."""
    found, seconds, whole = Json(), dict[str, list[float]](), math.isinf(target)
    for side, each in runs.items():
        seconds[side] = [run["seconds"] if run["held"] or whole or side == "guide" else math.inf for run in each]
        three = {"median": statistics.median(seconds[side]), "least": min(seconds[side]), "most": max(seconds[side])}
        arrived = {
            "arrived": f"{sum(run['held'] for run in each)} of {len(each)}",
            "at the target when judged anew": f"{sum(run['judged anew'] >= target for run in each)} of {len(each)}",
        }
        found[side] = {
            **({"judged anew": [run["judged anew"] for run in each]} if whole else arrived),
            "seconds": {name: round(value, 2) if math.isfinite(value) else None for name, value in three.items()},
            "steps": [run["steps"] for run in each],
            "seconds of each stage, median": {
                stage: round(statistics.median(run["stages"][stage] for run in each), 2) for stage in each[0]["stages"]
            },
        }
    if {"guide", "fast"} <= seconds.keys() and not whole:
        ratio = statistics.median(a / b for a, b in zip(seconds["guide"], seconds["fast"], strict=True))
        found["ratio, median"] = f"{'' if all(run['held'] for run in runs['guide']) else '>= '}{ratio:.2f}"
    return found


def arrival(run: Json, target: float) -> Json | None:
    """Return what a run of the guide had taken when three validations in a row were at a target; None if never."""
    reached = [value >= target for *_, value in run["curve"]]
    ends = (end for end in range(HELD, len(reached) + 1) if all(reached[end - HELD : end]))
    return next(({**run, **run["at"][end - 1], "held": True} for end in ends), None)


@dataclass(frozen=True)
class Course:
    """Where the sides run: a folder for what they make, raw files, one of `TASKS`, further flags of our train.py."""

    folder: Path
    data: Path
    task: Json
    flags: Sequence[str]

    def guide(self, seed: int, target: float, judge: bool = True) -> Json:
        """Return what the guide took to a target, and what its weights are worth; to infinity, its stated epochs."""
        first = self.folder / f"guide-{seed}-{math.inf}"
        if first.exists() and (found := arrival(read_object(first / "run.json"), target)):
            return self._judged(first, seed, found)
        run, epochs, most = self.folder / f"guide-{seed}-{target}", self.task["epochs"], 1 if math.isinf(target) else 2
        words = ["--data", self.data, "--seed", seed, "--epochs", epochs, "--most", most * epochs, "--until", target]
        words += ["--to", run, *shlex.split(self.task["guide"]), *self._parts(seed)]
        call(f"benchmarks/peers/{self.task['app']}_guide.py", *words)
        found = read_object(run / "run.json")
        return self._judged(run, seed, found) if judge else found

    def fast(self, seed: int, target: float, name: str) -> Json:
        """Return what fast took to a target, to infinity all its epochs; a store belongs to a seed."""
        run, metric = self.folder / f"{name}-{seed}", self.task["metric"]
        words = ["--data", self.data, "--run", run, "--store", self.folder / f"store-{seed}", "--seed", seed]
        words += ["--until", f"{metric}={min(target, 1):g}", "--engine", "none", *shlex.split(self.task["fast"])]
        call(f"apps/{self.task['app']}/train.py", *words, *self.flags, *([] if metric == "auc" else self._parts(seed)))
        summary = read_object(run / "summary.json")
        end, seconds = summary["target"], summary["seconds"]
        stages = {stage: seconds.get(stage, 0.0) for stage in ("start", "prepare", "cache", "compile", "train")}
        stages["validate"] = round(end["seconds"] - sum(stages.values()), 3)  # and what lies between the stages
        found = {"held": end["held"], "seconds": end["seconds"], "steps": summary["steps"], "stages": stages}
        return self._judged(run, seed, found)

    def _parts(self, seed: int) -> Sequence[object]:
        """Return the flags of what trains and what validates: names of cases, or the patches that ours draws."""
        if self.task["metric"] == "dice":
            path = self.folder / "split.json"
            write_json(path, split_cases(read_dataset(self.data), self.task.get("split", "0.2:0")).to_json())
            return ["--split", path]
        return write_lists(self._tables(seed), self.folder)

    def _tables(self, seed: int) -> Tables:
        words = shlex.split(f"--data '{self.data}' --seed {seed} {self.task['fast']}")
        config = parse_flags("pathology", [*words, *self.flags])
        return find_tables(config, Run(self.folder, torch.device("cpu"), Clock(), False))

    def _judged(self, run: Path, seed: int, found: Json) -> Json:
        """Return what a run took, with the Dice (AUC) of its weights by code that neither side trains with."""
        guide, patches = guide_of(self.task["app"]), self.task["metric"] == "auc"
        words = ["--data", self.data, "--device", "cpu", *shlex.split(self.task["guide"])]
        words += self._parts(seed) if patches else []
        given = guide.parse_flags(list(map(str, words)))
        value = self._auc(self._network(run, given), seed) if patches else self._dice(run, given)
        return {**found, "judged anew": round(value, 4)}

    def _auc(self, network: torch.nn.Module, seed: int) -> float:
        """Return the AUC of the guide's network on validation patches that our reader decodes, by SciPy's ranks."""
        table = self._tables(seed).parts["validation"]
        order, pixels = (np.concatenate(each) for each in zip(*decode(table), strict=True))
        with torch.inference_mode():
            scores = [network(torch.from_numpy(each[None] / np.float32(127.5) - 1)).item() for each in pixels]
        tumour, found = table.label[order].astype(bool), np.array(scores)
        return float(mannwhitneyu(found[tumour], found[~tumour]).statistic / (tumour.sum() * (~tumour).sum()))

    def _network(self, run: Path, given: Namespace) -> torch.nn.Module:
        """Return the guide's network with the weights of a run, the guide's or ours."""
        network: torch.nn.Module = guide_of(self.task["app"]).make_network(**given.network)
        network.load_state_dict(load_weights(next(run.glob("best.*"))))
        return network.eval()

    def _dice(self, run: Path, given: Namespace) -> float:
        guide, images, masks = guide_of(self.task["app"]), run / "judged", run / "masks"
        names = read_object(self.folder / "split.json")["validation"]
        cases = [case for case in read_dataset(self.data).cases if case.name in names]
        images.mkdir()
        for case in cases:
            (images / case.image.name).symlink_to(case.image)
        if (run / "best.pt").exists():  # the guide's
            guide.infer(sorted(images.iterdir()), self._network(run, given), masks, given)
        else:
            script = f"apps/{self.task['app']}/infer.py"
            call(script, "--model", run, "--input", images, "--output", masks, "--no-overlays")
        labels = [case.label for case in cases if case.label is not None]
        return float(dices([masks / case.image.name for case in cases], labels, guide.REGIONS).mean())


if __name__ == "__main__":
    main()
