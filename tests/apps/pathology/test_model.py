from dataclasses import replace

import pytest
import torch

from apps.pathology.config import GUIDE, PathologyConfig
from apps.pathology.model import choose, model_of
from common.training.config import Parallel, decided
from common.training.resolve import check_partitions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(config: PathologyConfig, count: int = 3200, ranks: int = 1, patch_size: int = 96) -> PathologyConfig:
    return choose(config, patch_size, 0.5, count, 400, CPU, ranks)


def test_small_and_large_sets_train_equally_long():
    for count in (320, 3200, 32_000):
        config = chosen(PathologyConfig(), count)
        each = count // decided(config.batch_size)
        assert 400 <= decided(config.epochs) * each < 400 + each


def test_a_set_smaller_than_a_batch_is_one_batch():
    assert chosen(PathologyConfig(), 12).batch_size == 12
    assert chosen(PathologyConfig(), 13, ranks=2).batch_size == 12  # equal shares, none beyond the set


def test_what_was_asked_for_wins():
    config = PathologyConfig(batch_size=10, epochs=3, validate_every=2, tile_size=1024, precision="fp32")
    found = chosen(config)
    sizes = replace(config, patch_size=96, mpp=0.5, patches_per_slide=400)
    assert found == replace(sizes, parallel=Parallel(partitions=1))
    assert (model_of(found, CPU).tile_size, model_of(found, CPU).precision) == (1024, "fp32")


def test_a_tile_keeps_whole_cells_inside_its_halo():
    model = model_of(chosen(PathologyConfig(), patch_size=224), CPU)
    assert model.tile_size - 2 * 224 - (224 - 32) == model.core == 1024
    with pytest.raises(ValueError, match="tile_size 640: must be above 640 for patches of 224 pixels"):
        chosen(PathologyConfig(tile_size=640), patch_size=224)


def test_patches_that_the_stride_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="patches of 100 pixels: sides must be multiples of 32"):
        chosen(PathologyConfig(), patch_size=100)


def test_the_guide_has_its_own_precision():
    assert chosen(GUIDE).precision == "fp32"
    assert choose(GUIDE, 224, None, 5000, None, CUDA).precision == "fp16"


def test_ranks_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size 9"):
        check_partitions(chosen(PathologyConfig(batch_size=9), ranks=2), 2)


def test_monais_source_goes_by_rank():
    with pytest.raises(ValueError, match="1 ranks would not compute the same with MONAI's sources"):
        check_partitions(chosen(replace(GUIDE, parallel=Parallel(partitions=2), batch_size=8)), 1)


def test_a_model_of_an_undecided_configuration_is_the_programmers_mistake():
    with pytest.raises(AssertionError, match="not decided"):
        model_of(PathologyConfig(), CPU)
