from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apps.pathology.config import GUIDE, PathologyConfig
from apps.pathology.plan import PathologyPlan, decide, plan_run
from common.training.distributed import Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DIGESTS = ("a", "b")


def plan_for(config: PathologyConfig, count: int = 3200, ranks: int = 1, patch_size: int = 96) -> PathologyPlan:
    return plan_run(config, patch_size, 0.5, count, DIGESTS, CPU, ranks)


def test_small_and_large_sets_train_equally_long():
    for count in (320, 3200, 32_000):
        plan = plan_for(PathologyConfig(), count)
        steps = plan.epochs * (count // plan.batch_size)
        assert 400 <= steps < 400 + count // plan.batch_size


def test_a_set_smaller_than_a_batch_is_one_batch():
    assert plan_for(PathologyConfig(), 12).batch_size == 12
    assert plan_for(PathologyConfig(), 13, ranks=2).batch_size == 12  # equal shares, none beyond the set


def test_what_was_asked_for_wins():
    config = PathologyConfig(batch_size=10, epochs=3, validate_every=2, tile_size=1024, precision="fp32")
    plan = plan_for(config)
    assert (plan.batch_size, plan.epochs, plan.validate_every) == (10, 3, 2)
    assert (plan.model.tile_size, plan.model.precision) == (1024, "fp32")


def test_a_tile_keeps_whole_cells_inside_its_halo():
    model = plan_for(PathologyConfig(), patch_size=224).model
    assert model.tile_size - 2 * 224 - (224 - 32) == model.core == 1024
    with pytest.raises(ValueError, match="tile_size 640: must be above 640 for patches of 224 pixels"):
        plan_for(PathologyConfig(tile_size=640), patch_size=224)


def test_patches_that_the_stride_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="patches of 100 pixels: sides must be multiples of 32"):
        plan_for(PathologyConfig(), patch_size=100)


def test_the_guide_has_its_own_precision():
    assert plan_for(GUIDE).model.precision == "fp32"
    assert plan_run(GUIDE, 224, None, 5000, DIGESTS, CUDA).model.precision == "fp16"


def test_ranks_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size 9"):
        plan_for(PathologyConfig(batch_size=9), ranks=2)


def test_a_plan_survives_json():
    import json
    from dataclasses import asdict

    plan = plan_for(PathologyConfig())
    assert PathologyPlan.from_json(json.loads(json.dumps(asdict(plan)))) == plan


def test_a_resumed_run_keeps_its_plan_and_refuses_other_patches(tmp_path):
    said: list[str] = []
    run: Any = SimpleNamespace(directory=tmp_path, resumed=False, device=CPU, say=said.append)
    config = PathologyConfig()
    first = decide(plan_for(config), config, run, Ranks())
    assert any(line.startswith("batch_size 32: chosen for this cpu") for line in said)
    run.resumed = True
    again = plan_for(replace(config, batch_size=8))
    assert decide(again, config, run, Ranks()) == first
    with pytest.raises(ValueError, match="the run began with other patches"):
        decide(replace(again, patches=("a", "other")), config, run, Ranks())
