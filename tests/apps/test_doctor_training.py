from dataclasses import replace

import pytest

from medspeed.apps.doctor import explanations
from medspeed.apps.doctor_training import Measured, Verdict
from medspeed.apps.doctor_training import diagnose as diagnosed
from medspeed.apps.spleen.config import RECIPES

HEALTHY = Measured(
    times={"waited": 2.0, "computed": 90.0, "saved": 1.0, "logged": 1.0, "validated": 6.0},
    batch={"disk": 0.01, "decode": 0.02, "preparation": 0.03, "augmentation": 0.04},
    step=1.0,
    workers=2,
    cores=2,
    doubled=1.9,
    other=0.95,
)


def diagnose(measured: Measured, recipe: str = "baseline") -> Verdict:
    return diagnosed(measured, explanations(RECIPES[recipe], "bf16"))


def with_times(**times):
    return replace(HEALTHY, times={**HEALTHY.times, **times})


def test_a_device_that_computes_is_healthy():
    verdict = diagnose(HEALTHY)
    assert (verdict.bound, verdict.gain) == ("nothing", 1.0)
    assert verdict.text == "healthy: the device computes 90% of the time"
    assert sum(verdict.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("part", "bound"), [("validated", "validation"), ("saved", "checkpointing"), ("logged", "logging")]
)
def test_what_takes_the_time_besides_computing_is_named(part, bound):
    verdict = diagnose(with_times(**{part: 100.0 + HEALTHY.times[part]}))
    assert verdict.bound == bound
    assert verdict.share == pytest.approx((100 + HEALTHY.times[part]) / 200)
    assert verdict.gain == pytest.approx(200 / (100 - HEALTHY.times[part]))
    assert verdict.text.startswith(f"{bound}: ")


@pytest.mark.parametrize("slow", ["disk", "decode", "preparation", "augmentation"])
def test_waiting_is_traced_to_what_makes_the_batches(slow):
    measured = with_times(waited=102.0)
    verdict = diagnose(replace(measured, batch={**measured.batch, slow: 5.0}))
    assert verdict.bound == slow
    assert verdict.gain == pytest.approx(2.04, abs=0.01)


def test_the_switch_to_turn_is_told_where_there_is_one():
    measured = replace(with_times(waited=102.0), batch={"decode": 5.0})
    assert "decoding; use --cache auto, which prepares each case once" in diagnose(measured).text
    assert "limited by file decoding (51% of the time; up to 2.0x faster)" in diagnose(measured, "fast").text


def test_workers_are_too_few_only_where_more_would_keep_up():
    starved = replace(with_times(waited=102.0), batch={"decode": 1.0, "preparation": 3.0}, workers=1, cores=8)
    assert diagnose(starved).bound == "workers"  # 4 of 8 cores would keep up
    assert diagnose(replace(starved, cores=2)).bound == "preparation"  # not even all cores would
    assert diagnose(replace(starved, workers=8)).bound == "preparation"  # all cores are at work already
    assert diagnose(replace(starved, workers=None)).bound == "preparation"  # there is nothing to raise


def test_a_step_that_hardly_grows_with_its_batch_is_too_small():
    verdict = diagnose(replace(HEALTHY, doubled=1.2))
    assert verdict.bound == "kernel launch"
    assert verdict.gain == pytest.approx(1 / (1 - 0.9 * 0.4))  # per sample 0.6 of the time, in 0.9 of the total
    assert "; raise --batch-size, or try --compile (" in verdict.text


def test_threads_that_gain_nothing_are_named():
    verdict = diagnose(replace(HEALTHY, single=1.05))
    assert verdict.bound == "threads"
    assert "; unset OMP_* and GOMP_*, or raise --batch-size" in verdict.text
    assert verdict.gain == pytest.approx(1 / (1 - 0.9 * (1 - 1.05 / 2)))  # at best each of the two does half


def test_threads_that_wait_for_each_other_are_named_though_a_batch_twice_as_large_takes_as_long():
    verdict = diagnose(replace(HEALTHY, doubled=1.0, single=0.2))
    assert verdict.bound == "threads"
    assert verdict.gain == pytest.approx(1 / (1 - 0.9 * (1 - 0.2 / 2)))


def test_a_faster_precision_is_named_with_its_gain():
    verdict = diagnose(replace(HEALTHY, other=0.5, single=1.05))
    assert verdict.bound == "compute"
    assert "; use --precision bf16 (" in verdict.text
    assert verdict.gain == pytest.approx(1 / (1 - 0.9 * 0.5))


def test_small_shares_are_left_alone_and_large_ones_come_first():
    assert diagnose(with_times(validated=16.0)).bound == "nothing"  # 14.5 percent
    assert diagnose(replace(with_times(validated=30.0), doubled=1.0)).bound == "validation"
