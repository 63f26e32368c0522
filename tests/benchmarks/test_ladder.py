import itertools
import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from apps.opening import APPS as APPS_OPENED
from benchmarks.ladder_figures import draw_ladder
from benchmarks.ladder_rungs import _EQUAL, ABSENT, beside, climb
from benchmarks.ladder_tables import markdown
from benchmarks.ladder_worker import climb_rung
from common.config import config_to_yaml
from data_scripts.make_phantoms import make_ct_phantoms

APPS = ("spleen", "brats", "pathology")
SIZES = {"spleen": "crop_size", "brats": "crop_size", "pathology": "patch_size"}
# What a rung of the climb may not change: else it would not be its technique that is measured.
EQUAL = ("data", "store", "device", "seed", "batch_size", "epochs", "accumulate", "partitions")


def changed(one, other):
    return {field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)}


@pytest.mark.parametrize("app", APPS)
def test_the_climb_goes_from_the_baseline_to_fast_with_equal_batches(app):
    rungs = climb(app, "cpu", Path("data"), Path("store"))
    assert len({rung.name for rung in rungs}) == len(rungs) >= 6
    for rung in rungs:
        assert not changed(rungs[0].config, rung.config) & {*EQUAL, SIZES[app]}
    assert 1 <= (rungs[0].config.workers or 0) <= 8
    for before, rung in itertools.pairwise(rungs):
        assert changed(before.config, rung.config)
    first, last = rungs[0].config, rungs[-1].config
    assert (first.recipe, first.precision, last.recipe) == ("baseline", "fp32", "fast")
    assert (getattr(first, "source"), getattr(last, "source")) == ("uncached", "resident")  # noqa: B009 - each app's own
    recipe = APPS_OPENED[app].parse(["--recipe", "fast"])
    assert changed(recipe, last) <= {"data", "store", "device", "engine", *_EQUAL}
    guide = next(rung.config for rung in rungs if "the guide" in rung.name)
    assert guide.learning_rate == APPS_OPENED[app].parse(["--recipe", "guide"]).learning_rate


@pytest.mark.parametrize("app", APPS)
def test_single_changes_change_what_their_names_say(app):
    fast = climb(app, "cpu", Path("data"), Path("store"))[-1].config
    rungs = beside(app, fast, Path("ram"))
    assert len({rung.name for rung in rungs}) == len(rungs)
    for rung in rungs:
        different = changed(fast, rung.config)
        assert different or rung.why_not, rung.name
        if "(--" in rung.name:
            flag = rung.name.partition("(--")[2].split()[0].rstrip(",)")
            assert flag in different or rung.why_not, rung.name


@pytest.mark.parametrize("app", APPS)
def test_on_a_gpu_the_sizes_are_the_recipes_own(app):
    rungs = climb(app, "cuda", Path("data"), Path("store"))
    assert not changed(rungs[0].config, rungs[-1].config) & {*EQUAL, SIZES[app]}


def test_what_is_absent_says_why():
    assert all(why and where in ("cpu", "any") for where, why in ABSENT.values())


def rung(name, seconds, dice, **more):
    return {
        "rung": name, "s per step": seconds, "waited, percent": 10.0, "first epoch, s": 9.0, "Dice": dice,
        "peak memory, MiB": 700, "prepare and cache, s": 2.0, "samples per s": 4 / seconds, "s per validation": 0.5,
        "compile, s": 0.0,
        "curves": [[[10.0, 0.1], [20.0, dice]]], **more,
    }  # fmt: skip


RECORD = {
    "app": "spleen",
    "epochs": 6,
    "climb": [
        rung("baseline", 0.4, 0.5),
        {"rung": "broken", "failed": "ValueError: no"},
        rung("fast", 0.1, 0.75, **{"times as fast as the rung before": 4.0}),
    ],
    "fast, short": rung("fast", 0.1, 0.1),
    "beside": {"slower": rung("slower", 0.2, 0.1), "not here": "there is no /dev/shm"},
    "datasets": {
        "Dataset": {"first epoch, filling included, s": 2.0, "later epochs, s": 2.0},
        "ours": {"first epoch, filling included, s": 1.0, "later epochs, s": 0.1},
        "LMDBDataset": "needs the package lmdb",
    },
    "loaders": {"ours": {"s per step": 0.05}},
    "networks and steps": {"unet": {"s per step": 0.1, "parameters": 5}},
    "fast, short, again": rung("fast", 0.1, 0.1),
    "ranks, on the CPU": {"failed": "RuntimeError: no"},
    "absent": {"CUDA graphs": "there is no GPU"},
}


def test_the_table_has_every_rung_and_its_ratios():
    text = markdown(RECORD)
    assert "epochs, seconds to 0.68 |" in text  # nine tenths of fast's 0.75
    assert "| baseline | 0.4 |  | 1.00x | 10% | 2 s | 9 s | 0.500 | not reached | 700 MiB |" in text
    assert "| fast | 0.1 | 4.00x | 4.00x | 10% | 2 s | 9 s | 0.750 | 2, 20 s | 700 MiB |" in text
    assert "| broken | failed: ValueError: no |" in text
    assert "| slower | 0.2 | 0.50x | 0.5 | 0 s | 700 MiB |" in text
    assert "| not here | there is no /dev/shm |" in text
    assert "| ours | 1.0 | 0.1 |" in text
    assert "| LMDBDataset | needs the package lmdb |  |" in text
    assert "Failed: RuntimeError: no" in text
    assert "- CUDA graphs: there is no GPU" in text


def test_the_figures_are_drawn(tmp_path):
    draw_ladder(tmp_path, RECORD)
    for name in ("ladder.png", "time.png", "datasets.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_rung_trains_and_tells_what_it_took(tmp_path):
    data = make_ct_phantoms(tmp_path / "data", 5, progress=False)
    config = climb("spleen", "cpu", data, tmp_path / "store")[-1].config
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    found = climb_rung("spleen", tmp_path / "config.yaml", 3, 1)
    assert found["steps"] == 3 * 4  # four cases of four crops, four at a time
    assert len(found["curve"]) == 3
    assert found["curve"][-1][1] == found["Dice"]
    assert 0 < found["s per step"] < found["first epoch, s"]
    assert json.dumps(found)
    assert asdict(config)["engine"] == "none"
