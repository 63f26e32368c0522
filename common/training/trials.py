"""What fused kernels are tried with before they are trusted: batches of the run itself, and logits of their size."""

from functools import cache
from itertools import chain, count

import torch
from torch import Tensor

from medspeed.common.data import crops
from medspeed.common.data.batches import Batches
from medspeed.common.inference.model import VolumeModel
from medspeed.common.kernels.trust import Trial, trial_of, trusting
from medspeed.common.training import losses
from medspeed.common.training.config import decided
from medspeed.common.training.losses import build_loss
from medspeed.common.training.setup import dtype_of
from medspeed.common.training.volume_config import SegmentationConfig


def volume_trials(
    config: SegmentationConfig, model: VolumeModel, batches: Batches, ranks: int, device: torch.device
) -> list[Trial]:
    """Return the trials of a decided run: of its loss, and of what makes its batches where they lie on the device."""
    each, dtype, scheme = decided(config.batch_size) // ranks, dtype_of(config.precision), model.labelling
    size, layout = (
        decided(config.crop_size),
        torch.channels_last_3d if config.channels_last else torch.contiguous_format,
    )
    about = f"{each} x {scheme.channels} x {list(size)}, {config.loss}, {dtype}, {layout}"
    loss = build_loss(config.loss, regions=() if scheme.exclusive else scheme.regions)  # type: ignore[arg-type]

    @cache
    def example() -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn((each, scheme.channels, *size), generator=generator, device=device).to(dtype)
        label = torch.randint(len(scheme.labels), (each, 1, *size), generator=generator, device=device)
        return logits.contiguous(memory_format=layout).requires_grad_(), label.to(torch.uint8)

    def work() -> list[Tensor]:
        logits, label = example()
        value = loss(logits, label)
        (gradient,) = torch.autograd.grad(value * label.numel(), logits)  # in fp16 else too small to be compared
        return [value.detach(), gradient]

    found = [] if config.loss.startswith("monai_") else [trial_of(losses.FUSED, work, _tolerance(dtype), about)]
    return [*found, *batch_trials(crops.FUSED, batches, dtype, about)]


def batch_trials(name: str, batches: Batches, dtype: torch.dtype, about: str) -> list[Trial]:
    """Return the trial of a kernel that makes batches for a network of this dtype, if all they need is on the device.

    Here `about` says which batches they are.
    """
    if not batches.made_on_device:
        return []
    streams = [chain.from_iterable(map(batches.epoch, count())) for _ in range(2)]

    def made(stream: int) -> list[Tensor]:
        batch = next(streams[stream])
        return [batch.image.to(dtype), batch.label]

    def fused() -> list[Tensor]:
        with trusting(name):
            return made(0)

    return [Trial(name, fused, lambda: made(1), _tolerance(dtype), about)]


def _tolerance(dtype: torch.dtype) -> float:
    return max(1e-4, 2 * torch.finfo(dtype).eps)
