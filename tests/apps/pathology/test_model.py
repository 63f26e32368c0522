import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from medspeed.apps.pathology.config import GUIDE, JITTER, Augmentation, PathologyConfig
from medspeed.apps.pathology.model import PathologyModel, binary_cross_entropy, choose, initialise_from, model_of
from medspeed.common.inference.model import save_weights
from medspeed.common.training.config import Parallel, decided
from medspeed.common.training.resolve import check_partitions
from medspeed.models.resnet18_fcn import resnet18_fcn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(config: PathologyConfig, count: int = 3200, ranks: int = 1, patch_size: int = 96) -> PathologyConfig:
    return choose(replace(config, patch_size=patch_size, mpp=0.5, patches_per_slide=400), count, CPU, ranks)


def test_small_and_large_sets_train_equally_long():
    for count in (320, 3200, 32_000):
        config = chosen(PathologyConfig(), count)
        each = count // decided(config.batch_size)
        each = min(each, 38)  # 1216 patches
        assert 150 <= decided(config.epochs) * each < 150 + each


def test_the_usual_run_is_validated_four_times_and_epochs_asked_for_are_of_all_patches():
    found = chosen(PathologyConfig(), 32_000)
    assert (found.patches_per_epoch, found.epochs, found.validate_every) == (1216, 4, 1)
    assert chosen(PathologyConfig(epochs=3), 32_000).patches_per_epoch == 32_000
    assert chosen(PathologyConfig(epochs=3, patches_per_epoch=640), 32_000).patches_per_epoch == 640
    assert chosen(PathologyConfig(patches_per_epoch=8), 32_000).patches_per_epoch == 32  # one batch
    assert chosen(GUIDE, 32_000).patches_per_epoch is None


def test_a_run_with_a_target_has_the_validations_that_must_hold_it():
    found = chosen(PathologyConfig(until="auc=0.9"), 32_000)
    assert (found.epochs, found.validate_every) == (4, 1)
    assert chosen(PathologyConfig(until="auc=0.9", patches_per_epoch=32_000), 32_000).epochs == 3
    assert chosen(PathologyConfig(until="auc=0.9", epochs=2), 32_000).epochs == 2  # what was asked for wins


def test_muon_trains_on_a_cpu_and_novograd_on_a_gpu():
    sized = PathologyConfig(patch_size=96, mpp=0.5, patches_per_slide=400)
    assert [choose(sized, 3200, device).optimizer for device in (CPU, CUDA)] == ["muon", "novograd"]
    assert choose(replace(sized, optimizer="adam"), 3200, CPU).optimizer == "adam"


def test_the_guide_jitters_colours_and_so_does_fast_on_a_gpu_but_not_on_a_cpu():
    """Real patches end better without, in the short trainings of a CPU: see benchmarks/LOG.md."""
    sized, none = PathologyConfig(patch_size=96), (0, 0, 0, 0)
    found = [choose(each, 3200, CPU).augmentation.jitter for each in (sized, replace(GUIDE, patch_size=96))]
    assert found == [none, JITTER]
    assert choose(sized, 3200, CUDA).augmentation.jitter == JITTER
    asked = replace(sized, augmentation=Augmentation(jitter=(0.1, 0.2, 0.3, 0.04)))
    assert choose(asked, 3200, CPU).augmentation == Augmentation((0.1, 0.2, 0.3, 0.04))


def test_a_set_smaller_than_a_batch_is_one_batch():
    assert chosen(PathologyConfig(), 12).batch_size == 12
    assert chosen(PathologyConfig(), 13, ranks=2).batch_size == 12  # equal shares, none beyond the set


def test_what_was_asked_for_wins():
    config = PathologyConfig(batch_size=10, epochs=3, validate_every=2, tile_size=1024, precision="fp32").optimized()
    config = replace(config, augmentation=Augmentation(JITTER))
    found = chosen(config)
    sizes = replace(config, patch_size=96, mpp=0.5, patches_per_slide=400, patches_per_epoch=3200)
    assert found == replace(sizes, parallel=Parallel(partitions=1))
    assert (model_of(found, CPU).tile_size, model_of(found, CPU).precision) == (1024, "fp32")


def test_a_tile_keeps_whole_cells_inside_its_halo():
    model = model_of(chosen(PathologyConfig(), patch_size=224), CPU)
    assert model.tile_size - 2 * 224 - (224 - 32) == model.core == 1024
    with pytest.raises(ValueError, match="tile_size 640: must be a multiple of 32, above 640 for patches of 224"):
        chosen(PathologyConfig(tile_size=640), patch_size=224)


@pytest.mark.parametrize("patch_size", [0, 16, 100])
def test_patches_that_the_stride_does_not_divide_are_refused(patch_size):
    with pytest.raises(ValueError, match=f"patch_size {patch_size}: must be a multiple of 32"):
        chosen(PathologyConfig(), patch_size=patch_size)
    with pytest.raises(ValueError, match=f"patch_size {patch_size}: must be a multiple of 32"):
        PathologyModel(patch_size, None, 1152, 1, "fp32")


@pytest.mark.parametrize("mpp", [0.0, -0.5, math.nan, 101.0])
def test_a_pixel_size_that_no_slide_has_is_refused(mpp):
    with pytest.raises(ValueError, match=rf"mpp {mpp}: must be between 0.05 and 100 um"):
        PathologyModel(224, mpp, 1152, 1, "fp32")


def test_a_model_whose_tiles_keep_nothing_is_refused():
    for tile_size in (320, 640, 1100):
        with pytest.raises(ValueError, match=f"tile_size {tile_size}: must be a multiple of 32, above 640"):
            PathologyModel(224, None, tile_size, 1, "fp32")


def test_the_guide_has_its_own_precision():
    assert chosen(GUIDE).precision == "fp32"
    assert choose(replace(GUIDE, patch_size=224), 5000, CUDA).precision == "fp16"


def test_ranks_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size 9"):
        check_partitions(chosen(PathologyConfig(batch_size=9), ranks=2), 2)


def test_monais_source_goes_by_rank():
    with pytest.raises(ValueError, match="1 ranks would not compute the same with MONAI's sources"):
        check_partitions(chosen(replace(GUIDE, parallel=Parallel(partitions=2), batch_size=8)), 1)


def test_a_model_of_an_undecided_configuration_is_the_programmers_mistake():
    with pytest.raises(AssertionError, match="not decided"):
        model_of(PathologyConfig(), CPU)


def torchvision_like(path: Path, **changes: torch.Tensor) -> Path:
    torch.manual_seed(1)
    weights = {name: torch.rand_like(value.float()) for name, value in resnet18_fcn(32).features.state_dict().items()}
    weights = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    torch.save({**weights, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000), **changes}, path)
    return path


def test_imagenet_weights_become_the_features(tmp_path: Path):
    network = resnet18_fcn(96)
    head = network.head.weight.clone()
    path = torchvision_like(tmp_path / "resnet18.pth")
    assert "features from" in initialise_from(network, path)
    stored = torch.load(path, weights_only=True)
    for name, value in network.features.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(value, stored[name])
    assert torch.equal(network.head.weight, head)


def test_our_own_weights_are_taken_whole(tmp_path: Path):
    torch.manual_seed(2)
    other, network = resnet18_fcn(96), resnet18_fcn(96)
    save_weights(tmp_path / "best.safetensors", other.state_dict(), {})
    assert "all from" in initialise_from(network, tmp_path / "best.safetensors")
    assert torch.equal(network.head.weight, other.head.weight)


def test_other_weights_are_refused(tmp_path: Path):
    network = resnet18_fcn(96)
    with pytest.raises(FileNotFoundError, match=r"none\.pth: no such weights file"):
        initialise_from(network, tmp_path / "none.pth")
    path = torchvision_like(tmp_path / "wide.pth", **{"conv1.weight": torch.zeros(64, 4, 7, 7)})
    with pytest.raises(ValueError, match=r"wide\.pth: not the weights .* size mismatch for conv1\.weight"):
        initialise_from(network, path)
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "part.pth")
    with pytest.raises(ValueError, match="Missing key"):
        initialise_from(network, tmp_path / "part.pth")


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "resnet18.pth").write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match=r"resnet18\.pth: cannot be loaded safely as a state dict"):
        initialise_from(resnet18_fcn(64), tmp_path / "resnet18.pth")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_by_hand(smoothing):
    logits, label = torch.tensor([2.0, -1.0, 0.5]).reshape(3, 1, 1, 1), torch.tensor([1.0, 0.0, 1.0])
    expected = 0.0
    for logit, truth in zip([2.0, -1.0, 0.5], [1.0, 0.0, 1.0], strict=True):
        target = 1 - smoothing if truth else smoothing
        p = 1 / (1 + math.exp(-logit))
        expected -= (target * math.log(p) + (1 - target) * math.log(1 - p)) / 3
    assert binary_cross_entropy(logits, label, smoothing).item() == pytest.approx(expected, rel=1e-6)


def test_binary_cross_entropy_of_equal_parts_averages_to_that_of_the_whole():
    logits, label = torch.randn(8, 1, 1, 1, generator=torch.Generator().manual_seed(0)), torch.arange(8.0) % 2
    loss = partial(binary_cross_entropy, smoothing=0.05)
    halves = (loss(logits[:4], label[:4]) + loss(logits[4:], label[4:])) / 2
    assert halves.item() == pytest.approx(loss(logits, label).item(), rel=1e-6)
    assert loss(logits.bfloat16(), label).dtype == torch.float32
