"""The recipes `baseline` and `guide`: MONAI's datasets, transforms and loaders only, in the guides' own order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from monai.data import CacheDataset, DataLoader, Dataset
from monai.data.utils import set_rnd
from monai.inferers import sliding_window_inference
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    EnsureTyped,
    FgBgToIndicesd,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandCropByPosNegLabeld,
    ScaleIntensityRanged,
    Spacingd,
    SpatialPadd,
)
from torch import nn

from apps.spleen.config import SpleenConfig
from apps.spleen.plan import SpleenPlan
from common.data.batches import Batch
from common.data.cases import Case
from common.data.prefetch import ForwardingThreadDataLoader
from common.data.preparation import Preparation
from common.inference.quality import dice_counts, mean_dice
from common.training.precision import autocast

_KEYS = ("image", "label")
_AXES = (("L", "R"), ("P", "A"), ("I", "S"))


class MonaiBatches:
    """Batches of MONAI's random crops; equal for the same (seed, epoch), so a run resumes at the start of an epoch."""

    resumes_within_epoch = False

    def __init__(self, cases: Sequence[Case], plan: SpleenPlan, config: SpleenConfig, device: torch.device) -> None:
        """Make the dataset, which for the source "cached" fills its cache now, and the loader.

        Raises:
            ValueError: the batch is no multiple of the crops per case, which MONAI's loader takes together.
        """
        self._cases_per_step, left = divmod(plan.batch_size, config.crops_per_case)
        if left or not self._cases_per_step:
            raise ValueError(
                f"batch_size {plan.batch_size}: must be a multiple of crops_per_case ({config.crops_per_case}) "
                f"with the source {config.source}"
            )
        self._device, self._seed, self._cases = device, config.seed, len(cases)
        self._loader = self._make_loader(cases, plan, config)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch; the last one may be smaller."""
        return -(-self._cases // self._cases_per_step)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch; `first_step` is 0, or the end where nothing is left to yield."""
        if first_step == self.steps_per_epoch:
            return
        assert first_step == 0, "this source resumes at the start of an epoch only"
        seed = self._seed * 1_000_003 + number
        self._loader.generator.manual_seed(seed)
        set_rnd(self._loader.dataset, seed)
        for items in self._loader:
            image = items["image"].to(self._device, torch.float32, non_blocking=True)
            label = items["label"].to(self._device, torch.uint8, non_blocking=True)
            yield Batch(_plain(image), _plain(label), tuple(items["name"]))

    def _make_loader(self, cases: Sequence[Case], plan: SpleenPlan, config: SpleenConfig) -> Any:  # noqa: ANN401
        cached = config.source == "cached"
        fixed = deterministic_transforms(plan.model.preparation, self._device if cached else None)
        chain = Compose([*fixed, *random_crops(plan.crop_size, config.crops_per_case)])
        items, generator = monai_items(cases), torch.Generator()
        if cached:
            dataset = CacheDataset(items, chain, cache_rate=1.0, num_workers=config.workers, copy_cache=False)
            return ForwardingThreadDataLoader(
                dataset, num_workers=0, batch_size=self._cases_per_step, shuffle=True, generator=generator
            )
        return DataLoader(
            Dataset(items, chain),
            num_workers=config.workers or 0,
            batch_size=self._cases_per_step,
            shuffle=True,
            generator=generator,
        )


class MonaiValidation:
    """Validation the guides' way: cached deterministic transforms and `sliding_window_inference`."""

    def __init__(self, cases: Sequence[Case], plan: SpleenPlan, config: SpleenConfig, device: torch.device) -> None:
        """Prepare the cases, which for the source "cached" happens now."""
        cached = config.source == "cached"
        chain = Compose(deterministic_transforms(plan.model.preparation, device if cached else None))
        items = monai_items(cases)
        self._dataset = CacheDataset(items, chain, num_workers=config.workers) if cached else Dataset(items, chain)
        self._model, self._device = plan.model, device

    def __call__(self, network: nn.Module, check: Callable[[], None]) -> float:
        """Return the mean foreground Dice on the working grid; `check` is called before each case."""
        network.eval()
        counts = []
        for index in range(len(self._dataset)):
            check()
            item = self._dataset[index]
            image = _plain(item["image"]).to(self._device, torch.float32)[None]
            with torch.no_grad(), autocast(self._model.precision, self._device):
                logits = sliding_window_inference(
                    image, self._model.window_size, self._model.window_batch, network, overlap=0.25
                )
            truth = _plain(item["label"]).to(self._device, torch.uint8)[0]
            counts.append(dice_counts(logits[0].argmax(0), truth, len(self._model.labels)))
        return mean_dice(counts)


def monai_items(cases: Sequence[Case]) -> list[dict[str, str]]:
    """Return the cases as MONAI's transforms want them."""
    return [{"image": str(case.image), "label": str(case.label), "name": case.name} for case in cases]


def deterministic_transforms(preparation: Preparation, device: torch.device | None) -> list[Callable[[Any], Any]]:
    """Return the transforms whose result is the same every time, in the guide's order; cached on `device` if given."""
    if preparation.window is not None:
        low, high = preparation.window
        normalise = ScaleIntensityRanged("image", low, high, 0.0, 1.0, clip=True)
    else:
        normalise = NormalizeIntensityd("image", nonzero=True, channel_wise=True)
    chain = [
        LoadImaged(_KEYS),
        EnsureChannelFirstd(_KEYS),
        Orientationd(_KEYS, axcodes="RAS", labels=_AXES),
        Spacingd(_KEYS, pixdim=preparation.spacing, mode=("bilinear", "nearest")),
        normalise,
        CropForegroundd(_KEYS, source_key="image", allow_smaller=True),
    ]
    return chain if device is None else [*chain, EnsureTyped(_KEYS, device=device, track_meta=False)]


def random_crops(crop_size: tuple[int, int, int], crops: int) -> list[Callable[[Any], Any]]:
    """Return the guide's random transforms; volumes smaller than a crop are padded first (our addition)."""
    return [
        SpatialPadd(_KEYS, crop_size),
        FgBgToIndicesd("label", image_key="image"),
        RandCropByPosNegLabeld(
            _KEYS,
            label_key="label",
            spatial_size=crop_size,
            pos=1,
            neg=1,
            num_samples=crops,
            fg_indices_key="label_fg_indices",
            bg_indices_key="label_bg_indices",
        ),
    ]


def _plain(tensor: Any) -> torch.Tensor:  # noqa: ANN401 - a MetaTensor or a Tensor
    plain: torch.Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    return plain
