"""The rungs are what they say, and their figures become tables and pictures."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from medspeed.apps import APPS, parse_flags
from medspeed.benchmarks import ladder
from medspeed.benchmarks.harness import attempt, in_a_process, trained
from medspeed.benchmarks.ladder import RUNGS, beside, climb, climbed, markdown
from medspeed.common.config import flat
from medspeed.data_scripts.make_phantoms import make_phantoms

# What a rung of the climb may not change: else it would not be its technique that is measured.
EQUAL = {
    "data",
    "store",
    "device",
    "seed",
    "batch_size",
    "epochs",
    "accumulate",
    "partitions",
    "crop_size",
    "patch_size",
}


CLIMBED = sorted(RUNGS.keys() & set(APPS))  # an app need not have a ladder


def changed(one, other):
    return {name for name, value in flat(one).items() if value != flat(other)[name]}


@pytest.mark.parametrize("app", CLIMBED)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_climb_goes_from_the_baseline_to_fast_with_equal_batches(app, kind):
    rungs = climb(app, kind, Path("data"), Path("store"))
    configs = list(rungs.values())
    assert len(configs) >= 6
    for config in configs:
        assert not changed(configs[0], config) & EQUAL
    assert 1 <= (configs[0].workers or 0) <= 8
    for before, config in itertools.pairwise(configs):
        assert changed(before, config)
    first, last = configs[0], configs[-1]
    assert (first.recipe, first.precision, last.recipe) == ("baseline", "fp32", "fast")
    fed = [getattr(config, "source", getattr(config, "cache", None)) for config in (first, last)]
    assert fed in (["uncached", "resident"], ["uncached", "auto"])
    recipe = parse_flags(app, ["--recipe", "fast"])
    assert changed(recipe, last) <= {"data", "store", "device", "engine", *RUNGS["all"]["equal"]}
    guide = next(config for name, config in rungs.items() if "the guide" in name)
    assert guide.learning_rate == parse_flags(app, ["--recipe", "guide"]).learning_rate


@pytest.mark.parametrize("app", CLIMBED)
def test_single_changes_change_what_their_names_say(app):
    *_, fast = climb(app, "cpu", Path("data"), Path("store")).values()
    for name, config in beside(app, fast, Path("ram")).items():
        assert not isinstance(config, str)
        different = changed(fast, config)
        assert different, name
        if "(--" in name:
            flag = name.partition("(--")[2].split()[0].rstrip(",)").replace("-", "_")
            assert {flag, flag.removeprefix("no_"), f"{flag}.name"} & different, name


def test_without_a_ram_disk_its_rung_says_so_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "RAM_DISK", tmp_path / "none")
    monkeypatch.setattr(ladder, "in_a_process", lambda measured, config: rung(0.1, 0.5))
    found = ladder.measure("spleen", Path("data"), "cpu", 1, 1, tmp_path)
    (missing,) = [each for each in found["beside"].values() if isinstance(each, str)]
    assert missing == f"there is no {tmp_path / 'none'}"
    assert len(found["beside"]) > 3
    assert missing in markdown({**found, "metric": "Dice"})


def test_a_part_that_fails_says_why():
    assert str(attempt(lambda: in_a_process(divmod, 1, 0))).startswith("failed: ZeroDivisionError: ")


def rung(seconds, dice, **more):
    return {
        "s per step": seconds, "waited, percent": 10.0, "first epoch, s": 9.0, "Dice": dice,
        "peak memory, MiB": 700, "prepare and cache, s": 2.0, "samples per s": 4 / seconds, "s per validation": 0.5,
        "compile, s": 0.0, "precision": "fp32",
        "curve": [[10.0, 0.1], [20.0, dice]], **more,
    }  # fmt: skip


def test_a_rungs_ratios_are_the_medians_over_the_rounds():
    seconds = ((0.4, 0.1), (0.4, 0.2), (0.6, 0.2))
    found = climbed([{"a": rung(a, 0.5), "b": rung(b, 0.75), "c": "failed: no"} for a, b in seconds])
    assert (found["b"]["s per step"], found["b"]["to the rung before"], found["b"]["to the first"]) == (
        0.2, "3.00x", "3.00x",
    )  # fmt: skip
    assert (found["a"]["to the rung before"], found["a"]["to the first"], found["c"]) == ("", "1.00x", "failed: no")


def test_a_rung_after_a_failed_one_has_its_ratio_to_the_baseline():
    found = climbed([{"a": rung(0.4, 0.5), "b": "failed: no", "c": rung(0.1, 0.75)}])
    assert (found["c"]["to the rung before"], found["c"]["to the first"]) == ("", "4.00x")


CLIMB = {"baseline": rung(0.4, 0.5), "broken": "failed: ValueError: no", "fast": rung(0.1, 0.75)}
RECORD = {
    "app": "spleen",
    "epochs": 6,
    "metric": "Dice",
    "climb": climbed([CLIMB]),
    "beside": climbed([{"fast itself": rung(0.1, 0.1), "slower": rung(0.2, 0.1), "not here": "failed: OSError: full"}]),
    "absent": {"CUDA graphs": "there is no GPU"},
}


def test_the_table_has_every_rung_and_its_ratios():
    text = markdown(RECORD)
    assert "| baseline | 0.4 |  | 1.00x | 10 | 2 | 9 | 0.5 | 700 |" in text
    assert "| fast | 0.1 |  | 4.00x | 10 | 2 | 9 | 0.75 | 700 |" in text
    assert "| broken | failed: ValueError: no |  |" in text
    assert "| slower | 0.2 | 0.50x | 0.5 | 0 | 700 |" in text
    assert "| not here | failed: OSError: full |  |" in text
    assert "| CUDA graphs | there is no GPU |" in text


@pytest.mark.slow
def test_a_rung_trains_and_tells_what_it_took(tmp_path):
    data = make_phantoms("ct", tmp_path / "data", 5)
    *_, config = climb("spleen", "cpu", data, tmp_path / "store").values()
    found = trained(replace(config, epochs=3, validate_every=1))
    assert found["steps"] == 3 * 4  # four cases of four crops, four at a time
    assert len(found["curve"]) == 3
    assert found["curve"][-1][1] == found["Dice"]
    assert 0 < found["computed, s per step"] <= found["s per step"] < found["first epoch, s"]
    assert json.dumps(found)
