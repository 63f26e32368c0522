"""The apps' steps on a GPU, as their operators say it without one; and whether the guards find what is planted."""

import pytest

from tests.gpu_shape.guards import GUARDS
from tests.gpu_shape.plants import PLANTS

APPS = ("brats", "pathology", "spleen")
# What is not so yet, by guard and app.
OPEN: dict[tuple[str, str], str] = {}


def known(guard: str, app: str) -> object:
    reason = OPEN.get((guard, app))
    return pytest.param(guard, app, marks=[pytest.mark.xfail(strict=True, reason=reason)] if reason else [])


@pytest.fixture(scope="module")
def found(guarded):
    return guarded("bf16", "plants")


@pytest.mark.parametrize(("guard", "app"), [known(guard, app) for guard in GUARDS for app in APPS])
def test_a_step_in_bf16_is_as_a_gpu_wants_it(found, guard, app):
    assert not found[f"{app} bf16"][guard]


@pytest.mark.parametrize("app", APPS)
def test_a_validation_costs_no_more(found, app):
    assert not found[f"{app} validation"]["costs"]


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_is_found(found, name):
    guard, word, _ = PLANTS[name]
    said = set(found[name].get(guard, ())) - set(found["nothing"].get(guard, ()))
    assert any(word in each for each in said), found[name]


def test_without_a_fault_the_other_guards_are_silent(found):
    assert not any(found["nothing"].values())
