"""Steps with loss scaling, and in parts, as `test_steps.py` has them in bf16."""

import pytest

from tests.gpu_shape.test_steps import APPS, OPEN

pytestmark = pytest.mark.slow
VARIANTS = ("fp16", "bf16 in 2 parts")


@pytest.fixture(scope="module")
def found(guarded):
    return guarded(*VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("app", APPS)
def test_a_step_costs_no_more_and_waits_for_nothing(found, app, variant):
    for guard in ("bus", "costs", "steady", "precision"):
        assert bool(found[f"{app} {variant}"][guard]) == ((guard, app) in OPEN), guard
