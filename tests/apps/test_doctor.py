"""The doctor finds what was planted: each case slows one thing down, in the real app on real (small) phantoms."""

import builtins
import io
import json
import os
import re
import sys
import time
from dataclasses import replace
from importlib import import_module
from typing import Any

import nibabel
import numpy as np
import pytest
from monai.transforms import RandomizableTransform, SpatialPadd, Transform

from medspeed.apps import APPS, doctor, doctor_training, parse_flags
from medspeed.apps.spleen import guide
from medspeed.apps.spleen import train as spleen_train
from medspeed.apps.spleen.config import RECIPES, SpleenConfig
from medspeed.common.data.dataset import read_dataset, split_cases
from medspeed.common.training.fit import Log
from medspeed.common.training.volume_config import Windows
from medspeed.data_scripts.make_phantoms import make_phantoms
from medspeed.data_scripts.make_slides import make_slides
from tests.apps.test_fast_dev_run import SMALL

TINY: dict[str, Any] = {
    "split": "0.25:0",
    "spacing": (4.0, 4.0, 4.0),
    "channels": (4, 8),
    "crop_size": (32, 32, 32),
    "windows": Windows(size=(32, 32, 32)),
    "batch_size": 4,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """What is slow here would keep up on a machine of many cores, which the doctor then says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.fixture
def fast(phantoms, store):
    return SpleenConfig(data=phantoms, store=store, **TINY)


@pytest.fixture
def uncached(phantoms, store):
    """MONAI's way: everything anew in each epoch, by the process that trains."""
    return replace(RECIPES["baseline"], data=phantoms, store=store, workers=None, precision="fp32", **TINY)


def bound(config):
    verdict, _, _ = doctor.examine(config)
    return verdict.bound


class Fixed(Transform):  # type: ignore[misc] # monai has no types
    def __call__(self, data):
        time.sleep(0.2)
        return data


class Random(RandomizableTransform):  # type: ignore[misc]
    def __call__(self, data):
        time.sleep(0.2)
        return data


def slowed(monkeypatch, target, name, seconds):
    plain = getattr(target, name)

    def slow(*arguments, **keywords):
        time.sleep(seconds)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(target, name, slow)


def test_what_was_stored_before_tells_nothing_of_the_time_to_prepare_the_others(fast, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_TRAINING", 1)
    first, again = (doctor.examine(replace(fast, store=tmp_path))[2]["prepare"] for _ in range(2))
    assert (first is not None, again) == (True, None)


@pytest.mark.slow
def test_a_slow_disk(uncached, monkeypatch):
    """A disk that takes 0.2 s to bring a file whose last reading is more than 0.1 s ago: no memory holds it."""
    plain = builtins.open
    read: dict[str, float] = {}

    def slow(file, *arguments, **keywords):
        if str(file).endswith(".nii.gz"):
            if time.monotonic() - read.get(str(file), 0.0) > 0.1:
                time.sleep(0.2)
            read[str(file)] = time.monotonic()
        return plain(file, *arguments, **keywords)

    monkeypatch.setattr(builtins, "open", slow)
    monkeypatch.setattr(io, "open", slow)
    assert bound(uncached) == "disk"


def with_one_more(transform, monkeypatch):
    """Put a transform behind the deterministic ones."""
    plain = guide.transforms

    def more(*given):
        chain = plain(*given)
        drawn = next(place for place, each in enumerate(chain) if isinstance(each, SpatialPadd))
        return [*chain[:drawn], transform, *chain[drawn:]]

    monkeypatch.setattr(guide, "transforms", more)


@pytest.mark.slow
def test_a_slow_transform(uncached, monkeypatch):
    with_one_more(Fixed(), monkeypatch)
    assert bound(uncached) == "preparation"


@pytest.mark.slow
def test_a_slow_random_transform_also_of_cached_cases(uncached, monkeypatch):
    with_one_more(Random(), monkeypatch)
    assert bound(replace(uncached, cache="monai")) == "augmentation"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 on what MONAI's loader does
def test_starved_workers(uncached, monkeypatch):
    with_one_more(Random(), monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(512)))
    assert bound(replace(uncached, workers=1)) == "workers"


@pytest.mark.slow
def test_a_tiny_batch(fast, monkeypatch):
    """Each step costs 150 ms, whatever its batch, as launches do."""
    monkeypatch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "1000")  # a busy machine is slow enough to save in between
    slowed(monkeypatch, sys.modules["medspeed.common.training.fit"], "train_step", 0.15)
    slowed(monkeypatch, doctor_training, "train_step", 0.15)
    tiny = replace(fast, batch_size=1, crop_size=(8, 8, 8), precision="fp32", epochs=500, validate_every=100)
    assert bound(tiny) == "kernel launch"


@pytest.mark.slow
def test_a_slow_validation(fast, monkeypatch):
    plain = spleen_train.setup

    def set_up(*given):
        setup = plain(*given)

        def validate(network, check):
            time.sleep(1)
            return setup.validate(network, check)

        return replace(setup, validate=validate)

    monkeypatch.setattr(spleen_train, "setup", set_up)
    assert bound(replace(fast, epochs=24, validate_every=1)) == "validation"


@pytest.mark.slow
def test_heavy_logging(fast, monkeypatch):
    slowed(monkeypatch, Log, "step", 0.3)
    assert bound(fast) == "logging"


@pytest.mark.slow
def test_a_storm_of_checkpoints(fast, monkeypatch):
    slowed(
        monkeypatch, sys.modules["medspeed.common.training.state"], "save_checkpoint", 0.1
    )  # a disk in memory would take no time
    assert bound(fast) == "checkpointing"


@pytest.mark.slow
def test_what_computes_but_could_be_faster(fast, monkeypatch):
    """Each step in fp32 costs 0.1 s for each crop on top, as on a device that computes bf16 and is not asked to."""

    def slow(plain):
        def step(network, batch, loss, optimizer, scaler, precision, *rest):
            time.sleep(0.1 * len(batch.image) if precision == "fp32" else 0.0)
            return plain(network, batch, loss, optimizer, scaler, "fp32", *rest)  # no processor's bf16 is judged

        return step

    fit = sys.modules["medspeed.common.training.fit"]
    slowly = slow(fit.train_step)
    monkeypatch.setattr(fit, "train_step", slowly)
    monkeypatch.setattr(doctor_training, "train_step", slowly)
    monkeypatch.setattr("medspeed.apps.doctor.choose_precision", lambda *given: "bf16")
    verdict, measured, _ = doctor.examine(replace(fast, precision="fp32"))
    assert verdict.bound == "compute"
    assert "; use --precision bf16 (" in verdict.text
    assert verdict.gain > 1.1  # by how much is the machine's choice
    assert (measured.other or measured.step) < measured.step


@pytest.mark.slow
def test_the_fast_recipe_is_healthy(store, tmp_path, capsys, monkeypatch):
    # How long a step, a layout or the disk takes is the machine's choice, and the load's; the cases above test those.
    healthy = {"computed": 9.0, "waited": 0.3, "saved": 0.3, "logged": 0.1, "validated": 0.3}
    monkeypatch.setattr(doctor, "step_times", lambda *given: (1.0, 1.9, None, None))
    monkeypatch.setattr(doctor, "_times", lambda *given: healthy)
    given = ["--app", "spleen", "--json", str(tmp_path / "found.json"), "--", "--store", str(store)]
    assert doctor.main(given) == 0
    assert "VERDICT: healthy" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"]["bound"] == "nothing"
    assert found["estimate"]["train"] == 10.0
    assert {check["name"] for check in found["machine"]} >= {"torch", "bf16", "disk"}


def test_the_cases_that_are_judged_have_something_to_find(tmp_path, store):
    """With empty ones alone there would be nothing to validate."""
    data = make_phantoms("ct", tmp_path / "data", 10)
    held = split_cases(read_dataset(data), "0.4:0").validation
    for number, case in enumerate(held):
        label = nibabel.load(case.label)
        voxels = np.asarray(label.dataobj) * np.uint8(number >= len(held) - 2)
        nibabel.save(nibabel.Nifti1Image(voxels, label.affine), case.label)
    doctor.cut_short(SpleenConfig(data=data, split="0.4:0", store=store), tmp_path)
    assert json.loads((tmp_path / "split.json").read_text())["validation"] == [case.name for case in held[-2:]]
    fold = SpleenConfig(data=data, fold=0, folds=3, groups="(.*)", store=store)
    short, *ratios, covered = doctor.cut_short(fold, tmp_path)
    assert (short.fold, covered) == (None, ratios[0])
    few = replace(fold, cache="smart:2", epochs=30)
    assert doctor.cut_short(few, tmp_path)[3] == 2 / 7  # an epoch has two cases, not all seven
    split = json.loads((tmp_path / "split.json").read_text())
    counts = [ratio * len(split[part]) for ratio, part in zip(ratios, ("training", "validation"), strict=True)]
    assert counts == pytest.approx([7, 3])  # of ten cases, as a third is held out


def test_without_an_app_the_machine_is_looked_at_alone(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "+ torch: " in out
    assert "VERDICT" not in out


@pytest.mark.slow
@pytest.mark.parametrize(("app", "recipe"), [("brats", "fast"), ("pathology", "fast"), ("pathology", "guide")])
def test_every_app_is_examined(app, recipe, heads, store, tmp_path, monkeypatch):
    monkeypatch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "30")  # 45 MB of the network for patches
    data = heads if app == "brats" else make_slides(tmp_path / "slides", 4, 2, 1024)
    more = ["--batch_size", "4", "--patches_per_slide", "12"] if app == "pathology" else []
    config = parse_flags(
        app,
        ["--recipe", recipe, "--data", str(data), "--store", str(store), "--device", "cpu", *SMALL[app], *more],
    )
    verdict, measured, estimate = doctor.examine(config)
    assert verdict.text
    assert min(measured.batch.values()) > 0
    assert (estimate["train"] or 0) > 0


def test_the_switches_are_flags_of_the_app():
    for app in APPS:
        for recipe in import_module(f"medspeed.apps.{app}.config").RECIPES:
            config = parse_flags(app, ["--recipe", recipe])
            for bound, text in doctor.explanations(config, "bf16").items():
                flags = re.findall(r"--([\w-]+)", text)
                assert flags or (bound in ("decode", "augmentation") and recipe == "fast")
                assert all(hasattr(config, flag.replace("-", "_")) for flag in flags), text


def test_a_mistyped_flag_of_the_app_ends_with_status_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--app", "spleen", "--", "--epohcs", "3"])
    assert "did you mean --epochs?" in capsys.readouterr().err
