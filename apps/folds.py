"""Cross-validate: train every fold of an app's data, and tabulate each case as measured by the fold that held it out.

Run: medspeed folds APP --run FOLDER [--folds 5] [--groups GROUPS] [FLAGS OF medspeed train APP]

Each fold is a training run of its own, FOLDER/fold-0 and so on. The same command goes on after an interruption: it
skips folds that are finished, and resumes one that is not. --run is needed; --fold and --resume are set here.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from medspeed.apps import APPS, end_with_parent
from medspeed.common.config import config_content, config_from_yaml, flat, parse_config
from medspeed.common.flags import Parser
from medspeed.common.training.config import TrainingConfig, decided


def parse(arguments: Sequence[str]) -> TrainingConfig:
    """Parse the app and the flags of its training."""
    parser = Parser(description=__doc__, usage="%(prog)s APP --run FOLDER [--FLAG VALUE ...]")
    parser.add_argument("app", choices=APPS, help="whose `train --help` lists the flags")
    recipes = import_module(f"medspeed.apps.{parser.parse_args(arguments[:1]).app}.config").RECIPES
    folds = {name: replace(recipe, fold=0, folds=5) for name, recipe in recipes.items()}
    if any(word.split("=")[0] in ("--fold", "--resume") for word in arguments):  # or its configuration would be read
        parser.error("--fold and --resume are set here; drop them")
    about, _, again = (__doc__ or "").split("\n\n")
    config: TrainingConfig = parse_config(type(recipes["fast"]), folds, arguments[1:], f"{about} {again}")
    if config.run is None or config.fold != 0:
        twice = "--fold and --resume are set here; drop them, and fold, folds and resume from a --config file"
        parser.error("--run is missing" if config.run is None else twice)
    return config


if __name__ == "__main__":  # under `medspeed` the app is part of the program's name
    APP = sys.argv[0].removeprefix("medspeed folds ")
    CONFIG = parse([*([APP] if APP in APPS else []), *sys.argv[1:]])

import signal
from pathlib import Path
from subprocess import Popen
from typing import TypedDict

import yaml

from medspeed.common.console import say
from medspeed.common.data.dataset import SplitNames
from medspeed.common.files import from_json, hold, printable, read_as, read_object, write_json, write_text
from medspeed.common.inference.evaluation import say_means
from medspeed.common.inference.scores import Evaluation, Scores, write_measures
from medspeed.common.ranks import torchrun_place
from medspeed.common.run import STOP_SIGNALS, one_line_errors, take_signals
from medspeed.common.training.evaluate import Quality


class _Evaluated(TypedDict):
    tolerance_mm: float
    cases: dict[str, list[Scores]]
    refused: dict[str, str]


def main(config: TrainingConfig) -> Evaluation:
    """Train the folds that are missing, one after the other, and write the tables."""
    if torchrun_place()[1] > 1:
        raise ValueError("folds are trained one after the other, each by one process: start without torchrun")
    root = decided(config.run)
    root.mkdir(parents=True, exist_ok=True)
    hold(root / ".lock")
    path, given = root / "config.yaml", flat(config)
    begun = any(root.glob("fold-*/config.yaml"))  # otherwise a mistake ended it; or this is the folder of a single run
    if begun and not path.is_file():
        raise FileNotFoundError(f"{path}: missing beside folds; restore it, or choose another --run")
    if not path.is_file() and any(not each.name.startswith(".") for each in root.iterdir()):
        raise FileExistsError(f"{root}: the folder is not empty; choose another --run")  # tables would be overwritten
    kept = flat(config_from_yaml(type(config), path)) if path.is_file() else given
    free = {*config.RESUMABLE, "run"} - {"until"}
    free -= {"data"} if None in (given["data"], kept["data"]) else set()  # without it the next fold trains on phantoms
    for name in given.keys() - free if begun else {"fold"}:
        if given[name] != kept[name]:
            raise ValueError(f"{path}: has {name} {kept[name]}, not {given[name]}; repeat its flags, or change --run")
    content = {name: value for name, value in config_content(config).items() if name not in ("run", "resume")}
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    runs = [root / f"fold-{fold}" for fold in range(decided(config.folds))]
    for fold, run in enumerate(runs):
        _train(config.APP, fold, run)
    return tabulate(runs)


def _train(app: str, fold: int, run: Path) -> None:
    """Train a fold in a process that gets the signals of this one, and SIGTERM if this one is killed."""
    begun, done = ((run / name).is_file() for name in ("config.yaml", "summary.json"))
    say(f"fold {fold}: {'finished' if done else 'resumed' if begun else 'started'}, {run}", "result")
    if done:
        return
    for path in () if begun else run.glob(".*"):  # it was killed before it began
        path.unlink()
    words = ["--config", f"{run.parent}/config.yaml", "--fold", str(fold), "--resume" if begun else "--run", str(run)]
    program = [sys.executable, "-P", "-m", f"medspeed.apps.{app}.train", *words]
    program += {"--quiet", "--verbose"} & {*sys.argv}
    process = Popen(program, start_new_session=True, preexec_fn=end_with_parent)
    with take_signals((signal.SIGINT, *STOP_SIGNALS), lambda number, _: process.send_signal(number)):
        status = process.wait()
    if status:
        further = "; the same command goes on from there" * (run / "config.yaml").is_file()
        say(f"fold {fold} ended with status {status}{further}", "error")
        raise SystemExit(status if status > 0 else 128 - status)


def tabulate(runs: Sequence[Path]) -> Evaluation:
    """Print and write the means of each fold and of all cases; return the evaluation (of patches a fold is a case)."""
    root, found = runs[0].parent, [_evaluated(run) for run in runs]
    splits = [read_as(run / "split.json", SplitNames) for run in runs]
    fold_of, volumes = splits[0].get("fold_of", {}), any((run / "evaluation.json").is_file() for run in runs)
    for fold, split in enumerate(splits):
        if split.get("fold_of") != fold_of or {fold_of.get(name) for name in split["validation"]} != {fold}:
            raise ValueError(f"{runs[fold]}: its split is not that of fold-0; has the dataset changed? train all again")
        if volumes and {*found[fold].cases, *found[fold].refused} != {*split["validation"]}:
            raise ValueError(f"{runs[fold]}: evaluation.json lists other cases; remove summary.json and repeat")
        if split.get("bytes") != splits[0].get("bytes"):
            say(f"{runs[fold]}: its files had other sizes than fold-0's: the means mix versions of the data", "warning")
        if not split.get("held_out", True):
            say(f"{runs[fold]}: NOT HELD OUT: the weights of --init were trained on some of its cases", "warning")
    plans = [read_object(run / "plan.json") for run in runs]
    free = {*TrainingConfig.RESUMABLE, "run", "fold", "cache"}
    free |= {"epochs", "validate_every", "patches_per_epoch", "batch_size"}  # which follow from the number of cases
    for name in [name for name in plans[0].keys() - free if any(each.get(name) != plans[0][name] for each in plans)]:
        chosen = [each.get(name) for each in plans]
        say(f"{name} differs between the folds: {chosen}; did several versions or machines train them?", "warning")
    cases, refused = ({k: v for each in found for k, v in getattr(each, name).items()} for name in ("cases", "refused"))
    whole = replace(found[0], cases=cases, refused=refused)
    for name, why in refused.items():
        say(printable(f"{name}: left out of the means: {why}"), "warning")
    table = {run.name: _rows(each, "mean") for run, each in zip(runs, found, strict=True)}
    for name, rows in table.items():
        values = ([*row.values()] for row in rows)  # the third is of the first metric
        say(printable(f"{name}: {', '.join(f'{each[0]} {each[2] and round(each[2], 3)}' for each in values)}"))
    table |= {figure: _rows(whole, figure) for figure in ("mean", "low", "high")}
    whole.write(root)
    write_measures(root / "folds.csv", table, "fold")
    write_json(root / "folds.json", table)
    held = sum(len(split["validation"]) for split in splits)
    say(f"{held} of {len(fold_of)} cases held out once; means with 95 percent intervals, all in {root / 'folds.csv'}")
    say_means(whole)
    return whole


def _evaluated(run: Path) -> Evaluation:
    if (run / "evaluation.json").is_file():
        return Evaluation(**read_as(run / "evaluation.json", _Evaluated))
    quality = from_json(Quality, read_object(run / "summary.json").get("quality", {}))
    return Evaluation(0.0, {run.name: [{"label": "patches", **quality.per_case}]})


def _rows(found: Evaluation, figure: str) -> list[Scores]:
    """Return of each structure the number of cases that have its first metric, and a figure of each metric."""
    rows = []
    for label, metrics in found.summary.items():
        cases = next(iter(metrics.values()))["cases"]
        rows.append({"label": label, "cases": cases, **{name: each.get(figure) for name, each in metrics.items()}})
    return rows


if __name__ == "__main__":
    with one_line_errors():
        main(CONFIG)
