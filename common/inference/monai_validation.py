"""Validation the guides' way: MONAI's transforms and `sliding_window_inference`."""

from collections.abc import Callable, Sequence

import torch
from monai.data import CacheDataset, Dataset
from monai.inferers import sliding_window_inference
from monai.transforms import Compose
from torch import nn

from common.data.cases import Case
from common.data.monai_batches import MonaiSource, Transforms, monai_items, plain
from common.inference.predictors import torch_predictor
from common.inference.quality import dice_counts
from common.inference.segmentation import SegmentationModel


class MonaiValidation:
    """The Dice counts of validation cases on the working grid.

    Args:
        cases: labelled cases.
        transforms: from a case's files to "image" [C, X, Y, Z] and "label" [1, X, Y, Z]; all deterministic.
        source: with "cached" the cases are prepared now and kept.
        model: windows and labels.
        workers: threads that fill the cache.
        device: where the network lies.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        transforms: Transforms,
        source: MonaiSource,
        model: SegmentationModel,
        workers: int | None,
        device: torch.device,
    ) -> None:
        """Make the dataset."""
        chain, items = Compose(list(transforms)), monai_items(cases)
        cached = source == "cached"
        self._dataset = CacheDataset(items, chain, num_workers=workers) if cached else Dataset(items, chain)
        self._model, self._device = model, device

    def __call__(self, network: nn.Module, check: Callable[[], None]) -> list[torch.Tensor]:
        """Return [R, 2] of each case (see `dice_counts`); `check` is called before each case."""
        model = self._model
        predictor = torch_predictor(network.eval(), model.precision)
        counts = []
        for index in range(len(self._dataset)):
            check()
            item = self._dataset[index]
            image = plain(item["image"]).to(self._device, torch.float32)[None]
            with torch.no_grad():
                logits = sliding_window_inference(
                    image, model.window_size, model.window_batch, predictor, overlap=model.overlap
                )
            truth = plain(item["label"]).to(self._device, torch.uint8)[0]
            counts.append(dice_counts(model.labelling.labels_of(logits[0]), truth, model.labelling.regions))
        return counts
