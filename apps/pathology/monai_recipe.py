"""Recipes baseline and guide: MONAI's datasets, loaders and transforms, patch by patch on the CPU, as in its script.

Source: MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py, backend numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import DataLoader, Dataset, PatchWSIDataset
from monai.data.utils import set_rnd
from monai.transforms import (
    CastToTyped,
    Compose,
    EnsureTyped,
    LoadImaged,
    RandFlipd,
    RandomizableTransform,
    RandRotate90d,
    RandZoomd,
    ScaleIntensityRanged,
)

from apps.pathology.image_jitter import ADJUST
from apps.pathology.patch_store import IMAGES
from apps.pathology.patch_table import PatchTable
from common.data.batches import Batch
from common.data.colour import ColourJitter
from common.data.monai_batches import plain


class ImageColourJitterd(RandomizableTransform):  # type: ignore[misc]
    """The colour jitter of one image by itself, as TorchVision's ColorJitter on a tensor in [0, 255].

    Args:
        settings: the largest changes.
    """

    def __init__(self, settings: ColourJitter) -> None:
        super().__init__(prob=1.0)
        self.settings = settings

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the item with its "image" [3, Y, X] jittered."""
        settings = self.settings
        spreads = (settings.brightness, settings.contrast, settings.saturation)
        amounts = [self.R.uniform(max(0.0, 1 - spread), 1 + spread) for spread in spreads]
        amounts.append(self.R.uniform(-settings.hue, settings.hue))
        image = plain(torch.as_tensor(data["image"])).float() / 255
        for part in self.R.permutation(len(ADJUST)):
            image = ADJUST[part](image, amounts[part])
        return {**data, "image": image * 255}


def training_transforms(settings: ColourJitter, zoom: tuple[float, float]) -> list[Any]:
    """Return the script's random transforms, from images in [0, 255] to [-1, 1]."""
    return [
        ImageColourJitterd(settings),
        RandFlipd("image", spatial_axis=-1, prob=0.5),
        RandRotate90d("image", prob=0.5),
        CastToTyped("image", dtype=np.float32),
        RandZoomd("image", prob=0.5, min_zoom=zoom[0], max_zoom=zoom[1]),
        *validation_transforms(),
    ]


def validation_transforms() -> list[Any]:
    """Return the script's scaling from [0, 255] to [-1, 1]."""
    return [
        CastToTyped("image", dtype=np.float32),
        ScaleIntensityRanged("image", a_min=0.0, a_max=255.0, b_min=-1.0, b_max=1.0),
        EnsureTyped("image"),
    ]


class MonaiPatchBatches:
    """Batches read and augmented by MONAI, each patch anew in each epoch; equal for the same (seed, epoch).

    Args:
        table: the training patches of this rank.
        transforms: see `training_transforms`.
        reader: of the slides, "cucim", "openslide" or "tifffile".
        batch_size: patches in one step of this rank.
        workers: loader processes.
        seed: of the order and of MONAI's random transforms; must differ between ranks.
        device: where batches go.
        on_device: transforms of a whole batch there, where the loader's leave it in [0, 255].
    """

    resumes_within_epoch = False

    def __init__(
        self,
        table: PatchTable,
        transforms: Sequence[Any],
        reader: str,
        batch_size: int,
        workers: int | None,
        seed: int,
        device: torch.device,
        on_device: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
    ) -> None:
        """Make the dataset and the loader."""
        self._seed, self._device, self._on_device = seed, device, on_device
        if len(table) < batch_size:
            raise ValueError(f"batch_size {batch_size}: there are {len(table)} training patches; choose a smaller one")
        self._loader = DataLoader(
            monai_dataset(table, transforms, reader),
            num_workers=workers or 0,
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator(),
        )

    @property
    def dataset(self) -> Any:  # noqa: ANN401 - MONAI's
        """MONAI's dataset."""
        return self._loader.dataset

    @property
    def steps_per_epoch(self) -> int:
        """Batches in each epoch."""
        return len(self._loader)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch; `first_step` is 0, or the end where nothing is left to yield."""
        if first_step == self.steps_per_epoch:
            return
        assert first_step == 0, "this source resumes at the start of an epoch only"
        seed = self._seed * 1_000_003 + number
        self._loader.generator.manual_seed(seed)
        set_rnd(self._loader.dataset, seed)
        for items in self._loader:
            image = self._on_device(plain(items["image"]).to(self._device, torch.float32, non_blocking=True))
            label = plain(items["label"]).to(self._device, torch.float32, non_blocking=True).flatten()
            yield Batch(image, label, tuple(items["name"]))


def monai_dataset(table: PatchTable, transforms: Sequence[Any], reader: str) -> Any:  # noqa: ANN401 - MONAI's
    """Return MONAI's dataset of the patches: of image files, or of regions of slides."""
    names = [table.files[file] for file in table.file]
    if table.files[0].suffix.lower() in IMAGES:
        items = [
            {"image": str(file), "label": float(label), "name": file.stem}
            for file, label in zip(names, table.label, strict=True)
        ]
        load = LoadImaged("image", reader="PILReader", ensure_channel_first=True, reverse_indexing=False)
        return Dataset(items, Compose([load, *transforms]))
    items = [
        {"image": str(file), "location": [int(y), int(x)], "label": float(label)}
        for file, (x, y), label in zip(names, table.corner, table.label, strict=True)
    ]
    return PatchWSIDataset(
        items,
        patch_size=table.size,
        patch_level=0,
        center_location=False,
        reader=reader,
        transform=_Chain([_named, *transforms]),
    )


class _Chain(Compose):  # type: ignore[misc]
    """A Compose that is true without being counted.

    PatchWSIDataset asks for each patch whether it has a transform; MONAI 1.6's Compose counts itself to answer, for
    which it makes a flat copy, which seeds all of the transforms anew from the clock.
    """

    def __bool__(self) -> bool:
        return True


def _named(item: dict[str, Any]) -> dict[str, Any]:
    """Return a patch with its slide's name, which the dataset keeps in the image's metadata alone."""
    return {**item, "name": Path(item["image"].meta["path"]).stem}
