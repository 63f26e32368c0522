"""Runs steps on the fake device, which must be loaded before torch, and writes down what the guards find."""

import sys
from pathlib import Path

from medspeed.benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()  # before torch is loaded

from medspeed.benchmarks.fake_cuda.costs import TABLE, total
from medspeed.benchmarks.fake_cuda.steps import VARIANTS, Opened, flags_of, opened, write_data
from medspeed.common.files import read_object, write_json
from tests.gpu_shape.guards import GUARDS, Steps, exceeded
from tests.gpu_shape.plants import PLANTS

Findings = dict[str, list[str]]  # by guard
_TINY = ("--channels", "[4,8]", "--crop_size", "[16,16,16]", "--windows.size", "[16,16,16]")


def findings(steps: Steps, budget: dict[str, int]) -> Findings:
    return {name: list(guard(steps, budget))[:5] for name, guard in GUARDS.items()}


def of_apps(folder: Path, variants: list[str]) -> dict[str, Findings]:
    found = {}
    for app, table in read_object(TABLE).items():
        data = write_data(app, folder / app / "data")
        for variant in variants:
            with opened(app, data, flags_of(app, variant)) as training:
                found[f"{app} {variant}"] = findings(training.steps(), table[variant])
                if variant == "bf16":
                    costs = total(training.validation())
                    found[f"{app} validation"] = {"costs": list(exceeded(costs, table["validation"]))}
    return found


def of_plants(folder: Path) -> dict[str, Findings]:
    with opened("spleen", write_data("spleen", folder / "tiny" / "data"), _TINY) as training:
        sound = training.steps()
        budget = total(sound[1])
        found = {"nothing": findings(sound, budget)}
        for name, (_, _, plant) in PLANTS.items():
            with plant(training.setup):
                found[name] = _planted(training, budget)
    return found


def _planted(training: Opened, budget: dict[str, int]) -> Findings:
    try:
        return findings(training.steps(), budget)
    except Exception as error:
        training.setup.optimizer.zero_grad(set_to_none=True)
        return {"raised": [f"{type(error).__name__}: {error}"]}


if __name__ == "__main__":
    folder, parts = Path(sys.argv[1]), sys.argv[2:]
    found = of_apps(folder, [part for part in parts if part in VARIANTS])
    write_json(folder / "found.json", {**found, **(of_plants(folder) if "plants" in parts else {})})
