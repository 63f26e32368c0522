"""Recipes baseline and guide: MONAI's datasets, loaders and transforms, on the CPU or by cuCIM, as in its script.

Source: MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py, backends numpy, cucim.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from monai import transforms as mt
from monai.data import DataLoader, Dataset

from medspeed.apps.pathology.config import Augmentation, PathologyConfig, Reader
from medspeed.apps.pathology.patches.augment import jitter_
from medspeed.apps.pathology.patches.table import PatchTable, opaque, read_image
from medspeed.apps.pathology.slides.reader import open_slide
from medspeed.common.data.batches import Batch, Batches
from medspeed.common.data.threads import map_in_threads
from medspeed.common.run import Run
from medspeed.common.training.config import decided
from medspeed.common.training.monai_batches import monai_batches

_opened = cache(open_slide)


class ColourJitterd(mt.RandomizableTransform):  # type: ignore[misc]
    """TorchVision's ColorJitter of one image in [0, 255]: brightness, contrast, saturation and hue, by so much."""

    def __init__(self, spreads: tuple[float, float, float, float]) -> None:
        super().__init__(prob=1.0)
        self.spreads = spreads

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the item with its "image" [3, Y, X] jittered."""
        *spreads, hue = self.spreads
        factors = [self.R.uniform(max(0.0, 1 - spread), 1 + spread) for spread in spreads]
        factors.append(self.R.uniform(-hue, hue))
        image = torch.as_tensor(data["image"]).as_subclass(torch.Tensor).float().contiguous() / 255
        jitter_(image[None], np.array([factors], np.float32), self.R.permutation(4)[None])
        return {**data, "image": image * 255}


def cpu_transforms(augmentation: Augmentation) -> list[Any]:
    """Return the script's random transforms of images in [0, 255], and its scaling from there to [-1, 1]."""
    return [
        ColourJitterd(decided(augmentation.jitter)),
        mt.RandFlipd("image", spatial_axis=-1, prob=0.5),
        mt.RandRotate90d("image", prob=0.5),
        mt.CastToTyped("image", dtype=np.float32),
        mt.RandZoomd("image", prob=0.5, min_zoom=augmentation.zoom[0], max_zoom=augmentation.zoom[1]),
        mt.CastToTyped("image", dtype=np.float32),
        mt.ScaleIntensityRanged("image", a_min=0.0, a_max=255.0, b_min=-1.0, b_max=1.0),
        mt.EnsureTyped("image"),
    ]


def monai_patches(table: PatchTable, config: PathologyConfig, run: Run) -> Batches:
    """Return this rank's batches of a decided configuration, each patch read and augmented by MONAI in each epoch."""
    rank, world = run.ranks.rank, run.ranks.world
    table = table.take(np.arange(rank, -(-len(table) // world) * world, world) % len(table))  # each as many
    batch_size = decided(config.batch_size) // world
    if len(table) < batch_size:
        raise ValueError(f"batch_size {batch_size}: only {len(table)} training patches; choose a smaller batch size")
    if table.whole:  # MONAI would stop at a bad one in the middle of an epoch, without its name
        files, title = [table.files[file] for file in table.file], "checking patches" if run.ranks.leader else ""
        with run.clock.stage("prepare"):
            map_in_threads(lambda file: read_image(file, table.size).shape, files, title, config.workers)
    reader = "PIL" if table.whole else ", ".join(sorted({_opened(file, config.reader).reader for file in table.files}))
    against = why_not_cucim(run.device) if config.recipe == "guide" else f"the recipe is {config.recipe}"
    how = f"patch by patch on the CPU ({against})" if against else "cuCIM on the GPU (cannot be seeded)"
    run.say(f"patches: read by {reader}, again in each epoch\naugmentation: {how}")
    on_cpu = cpu_transforms(config.augmentation) if against else []
    on_device = cucim_transform(config.augmentation) if not against else torch.Tensor.detach
    told: set[str] = set()

    def to_batch(items: dict[str, Any]) -> Batch:
        damaged = {name for name, count in zip(items["name"], items["damaged"], strict=True) if count}
        for name in sorted(damaged - told):
            run.say(f"{name}: DAMAGED TILES treated as white", "warning")
        told.update(damaged)
        tensors = (items[name].as_subclass(torch.Tensor) for name in ("image", "label"))
        image, label = (tensor.to(run.device, torch.float32, non_blocking=True) for tensor in tensors)
        return Batch(on_device(image), label.flatten(), tuple(items["name"]))

    how_many = {"batch_size": batch_size, "drop_last": True, "num_workers": config.workers or 0}
    dataset, generator = monai_dataset(table, on_cpu, config.reader), torch.Generator()
    loader = DataLoader(dataset, shuffle=True, generator=generator, **how_many)
    return monai_batches(loader, to_batch, config.seed * world + rank)


def monai_dataset(table: PatchTable, transforms: Sequence[Any], reader: Reader) -> Any:  # noqa: ANN401 - MONAI's
    """Return MONAI's dataset of the patches: of image files, or of regions of slides."""
    rows = list(zip((table.files[file] for file in table.file), table.corner.tolist(), table.label, strict=True))
    if table.whole:
        items = [
            {"image": str(file), "label": float(label), "name": file.stem, "damaged": 0} for file, _, label in rows
        ]
        load = mt.LoadImaged("image", "PILReader", ensure_channel_first=True, converter=opaque, reverse_indexing=False)
        return Dataset(items, mt.Compose([load, *transforms]))
    # Not PatchWSIDataset, which reads black where there is no slide or tile, and crashes at some files that we read.
    items = [{"image": (file, *corner), "label": float(label), "name": file.stem} for file, corner, label in rows]
    return Dataset(items, mt.Compose([partial(_region, size=table.size, reader=reader), *transforms]))


def _region(item: dict[str, Any], size: int, reader: Reader) -> dict[str, Any]:
    file, x, y = item["image"]
    slide = _opened(file, reader)
    image = torch.from_numpy(slide.read(x, y, size, size)).permute(2, 0, 1)
    return {**item, "image": image, "damaged": len(slide.damaged)}  # tiles so far, of the whole slide


def why_not_cucim(device: torch.device) -> str | None:
    """Return why cuCIM's kernels cannot run, None where they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("cupy") is None:
        return "cupy is not installed (pip install -e '.[gpu]')"
    import cupy

    return None if cupy.is_available() else "cupy finds no GPU"


def cucim_transform(augmentation: Augmentation) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the script's transforms of batches [B, 3, Y, X] on a GPU, drawn from generators that nobody can seed."""
    jitter = dict(zip(("brightness", "contrast", "saturation", "hue"), decided(augmentation.jitter), strict=True))
    steps = (
        mt.RandCuCIM(name="rand_color_jitter", prob=1.0, **jitter),
        mt.RandCuCIM(name="rand_image_flip", prob=0.5, spatial_axis=-1),
        mt.RandCuCIM(name="rand_image_rotate_90", prob=0.5, max_k=3, spatial_axis=(-2, -1)),
        lambda array: array.astype(np.float32),
        mt.RandCuCIM(name="rand_zoom", prob=0.5, min_zoom=augmentation.zoom[0], max_zoom=augmentation.zoom[1]),
        mt.CuCIM(name="scale_intensity_range", a_min=0.0, a_max=255.0, b_min=-1.0, b_max=1.0),
    )

    def transform(images: torch.Tensor) -> torch.Tensor:
        import cupy

        # Both libraries must use one stream: without it cuCIM would read what torch has not written yet.
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            array = cupy.from_dlpack(images.detach().to(torch.uint8))
            for step in steps:
                array = step(array)
            return torch.utils.dlpack.from_dlpack(cupy.ascontiguousarray(array, cupy.float32))

    return transform
