"""Health check of this machine, and what limits the speed of a training on it.

Run: medspeed doctor [--app NAME] [--json FILE] [-- FLAGS OF medspeed train NAME]

It checks the machine. With --app it also runs a short training in a temporary folder, and reports the bottleneck, the
possible speed-up and the flag that fixes it. The exit status is 1 if a check fails or there is a bottleneck.
"""

from collections.abc import Sequence
from pathlib import Path

from medspeed.apps import APPS, open_training, parse_flags
from medspeed.common.config import replaced, wait_longer
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("--app", choices=APPS, help="also run a short training of this app (else machine check only)")
PARSER.add_argument("--json", type=Path, help="write all results to this JSON file")
PARSER.add_argument("flags", nargs="*", help="flags of the app's train.py, after --")
if __name__ == "__main__":
    PARSER.parse_args()  # before torch is loaded: --help answers at once
    wait_longer()  # as trainings do

import sys
import tempfile
from dataclasses import asdict, replace
from typing import Any

from medspeed.apps.doctor_machine import check_machine
from medspeed.apps.doctor_training import Bound, Measured, Verdict, batch_parts, diagnose, step_times
from medspeed.common.console import say
from medspeed.common.data.dataset import read_dataset, split_cases
from medspeed.common.data.threads import usable_cores
from medspeed.common.files import read_json_lines, write_json
from medspeed.common.ranks import choose_device
from medspeed.common.run import Run, one_line_errors
from medspeed.common.training.config import TrainingConfig, decided
from medspeed.common.training.fit import fit
from medspeed.common.training.setup import choose_precision, start_run
from medspeed.common.training.volume_config import SegmentationConfig

_STEPS = 24  # of the short training, at least; its first epoch does not count
_TRAINING, _VALIDATION = 8, 2  # cases of it
_SIGNS = {"good": "+", "note": " ", "warning": "!", "error": "X"}
_HOST = ("waited", "saved", "logged")  # what the host does between the steps


def explanations(config: TrainingConfig, precision: str) -> dict[Bound, str]:
    """Return what each bound is, and what to turn where this configuration has something to turn."""
    flag = "--cache auto" if isinstance(config, SegmentationConfig) else "--source resident"
    ours: bool = getattr(config, "ours", getattr(config, "source", "resident") == "resident")
    gain = "caches cases if all fit" if ours else "prepares each case once and augments whole batches on the device"
    kept, made = f"; use {flag}, which {gain}", "" if ours else f"; use {flag}, which {gain}"
    larger = "raise --batch-size" if config.compile else "raise --batch-size, or try --compile"
    late, local = "training waits for batches", "write the run to a local disk (--run)"
    return {
        "disk": f"{late}, limited by the disk{kept}",
        "decode": f"{late}, limited by file decoding{made}",
        "preparation": f"{late}, limited by deterministic transforms{kept}",
        "augmentation": f"{late}, limited by random transforms{made}",
        "workers": f"{late}: too few workers; raise --workers",
        "validation": "validation takes long; raise --validate-every",
        "checkpointing": f"writing checkpoints takes long; {local}",
        "logging": f"logging takes long; {local}",
        "kernel launch": f"the steps are too small: most of their time is independent of the batch size; {larger}",
        "threads": f"one thread is as fast as all: they wait for each other; unset OMP_* and GOMP_*, or {larger}",
        "compute": f"the device is busy, but another precision is faster; use --precision {precision}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, and print what is found; return the exit status."""
    options = PARSER.parse_args(arguments)
    if options.flags and not options.app:
        PARSER.error(f"{options.flags[0]}: flags of a training need --app")
    if options.json is not None and options.json.is_dir():
        PARSER.error(f"--json {options.json}: is a folder; give a file")
    config = parse_flags(options.app, options.flags) if options.app else None
    device = choose_device(config.device if config else "auto")
    checks = check_machine(config.store if config else TrainingConfig.store.expanduser(), device)
    for check in checks:
        line = f"{_SIGNS[check.state]} {check.name}: {check.text}"
        say(line, "note" if check.state in ("good", "note") else "warning")
    found: dict[str, Any] = {"machine": [check._asdict() for check in checks]}
    well = not any(check.state == "error" for check in checks)
    if config is not None:
        verdict, measured, estimate = examine(config)
        found |= {"verdict": asdict(verdict), "measured": asdict(measured), "estimate": estimate}
        well = well and verdict.bound == "nothing"
        shares = ", ".join(f"{name} {share:.0%}" for name, share in verdict.shares.items())
        parts = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in measured.batch.items())
        say(f"training time: {shares}")
        say(f"one batch, single-threaded, in ms: {parts}; one step {1000 * measured.step:.1f}")
        first = "preparation not timed, since the cases tried were stored"
        if estimate["prepare"] is not None:
            first = f"about {estimate['prepare']:.0f} s of preparation (none if stored)"
        say(f"the whole run: {first}, {estimate['train']:.0f} s of training and validation")
        say(f"VERDICT: {verdict.text}", "result")
    if options.json is not None:
        write_json(options.json, found)
    return 0 if well else 1


def examine(config: TrainingConfig) -> tuple[Verdict, Measured, dict[str, float | None]]:
    """Train a little, and return the verdict, what it rests on, and the seconds that the whole run is likely to take.

    The run's folder is a temporary one, its prepared cases stay in the store. Volumes of a large dataset are cut to a
    few, so where all of them would lie is not judged: a run prints that. Seconds to prepare are None where the few were
    stored before.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        short, training, validation, covered = cut_short(config, Path(folder))
        stored = _entries(config.store)
        short = replace(short, run=Path(folder) / "run", resume=None, engine="none", profile="nothing", until=None)
        short = replaced(short, {"fast_dev_run": False, "parallel.partitions": None})
        with start_run(short) as run:
            whole, setup = open_training(short, run)
            per_epoch = setup.batches.steps_per_epoch
            epochs = max(2, 1 + -(-_STEPS // per_epoch))
            fit(replace(setup, judges_init=False), replace(whole, epochs=epochs, validate_every=epochs), run)
            auto = choose_precision("auto", run.device)
            step, doubled, other, single = step_times(setup, auto, whole.parallel.accumulate)
            parts, workers = batch_parts(setup.batches, getattr(config, "cache", "auto").partition(":")[0])
        planned, every = whole.epochs, whole.validate_every
        passes = planned if config.epochs else max(1, round(planned / training))  # a plan goes by steps
        validations = -(-passes // every) if config.validate_every else planned // every
        times = _times(run, passes * covered * per_epoch, validations * validation)
        keeps = training > 1 and getattr(config, "ours", False)  # what is prepared, of which a few cases are tried
        made = not keeps or _entries(config.store) > stored
        prepared = round(run.clock.seconds().get("prepare", 0.0) * training, 1) if made else None
    measured = Measured(times, parts, step, workers, usable_cores(), doubled=doubled, other=other, single=single)
    verdict = diagnose(measured, explanations(config, auto))
    return verdict, measured, {"prepare": prepared, "train": round(sum(times.values()), 1)}


def _entries(store: Path) -> int:
    """Return how many prepared cases a store holds."""
    return sum(1 for _ in store.rglob("*.safetensors"))


def cut_short(config: TrainingConfig, folder: Path) -> tuple[TrainingConfig, float, float, float]:
    """Return a configuration of a few of the cases, and how many times as many there are to train and validate on.

    The third number is how many times as many are in one of the epochs that --epochs counts: `smart:8` has but 8.
    """
    if not isinstance(config, SegmentationConfig) or config.data is None:
        return config, 1.0, 1.0, 1.0  # it is small already
    split = config.split if config.fold is None else str(1 / decided(config.folds))  # as many as a fold holds out
    whole = split_cases(read_dataset(config.data), split)
    sized = sorted(whole.validation, key=lambda case: case.label.stat().st_size if case.label else 0)  # empty first
    some = replace(whole, training=whole.training[:_TRAINING], validation=tuple(sized[-_VALIDATION:]))
    write_json(folder / "split.json", some.to_json())
    cache = "smart" if config.cache.startswith("smart") else config.cache
    ratios = len(whole.training) / len(some.training), len(whole.validation) / len(some.validation)
    held, count = config.caching().cases if config.epochs and cache == "smart" else None, len(whole.training)
    in_epoch = count if held is None else min(held * (config.parallel.partitions or 1), count)
    short = replace(config, split=str(folder / "split.json"), cache=cache, fold=None, folds=None, groups=None)
    return short, *ratios, in_epoch / len(some.training)


def _times(run: Run, steps: float, validations: float) -> dict[str, float]:
    """Return the seconds of the whole training, by what they go to, from those of the short one's later epochs.

    On a GPU the host waits, saves and logs while the device computes: only what the device does not hide counts.
    """
    records = read_json_lines(run.directory / "metrics.jsonl")[1:]
    spent = {name: sum(record[name] for record in records) for name in ("computed", *_HOST, "seconds")}
    host = sum(spent[name] for name in _HOST)
    idle = max(0.0, spent.pop("seconds") + spent["logged"] - spent["computed"])
    shown = 1.0 if run.device.type == "cpu" or not host else min(1.0, idle / host)
    more = steps / sum(len(record["losses"]) for record in records)
    times = {name: seconds * more * (shown if name in _HOST else 1.0) for name, seconds in spent.items()}
    return times | {"validated": run.clock.seconds().get("validate", 0.0) * validations}


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
