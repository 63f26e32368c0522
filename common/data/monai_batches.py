"""Batches from MONAI's own datasets and loaders, for the recipes `baseline` and `guide`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from monai.data import CacheDataset, DataLoader, Dataset
from monai.data.utils import set_rnd
from monai.transforms import Compose

from common.data.batches import Batch
from common.data.cases import Case
from common.data.prefetch import ForwardingThreadDataLoader

MonaiSource = Literal["uncached", "cached"]
Transforms = Sequence[Callable[[Any], Any]]


class MonaiBatches:
    """Batches of MONAI's random crops; equal for the same (seed, epoch), so a run resumes at the start of an epoch.

    Args:
        cases: labelled training cases of this rank; each rank must have as many.
        transforms: from a case's files to the items "image" [C, X, Y, Z] and "label" [1, X, Y, Z], `crops_per_case` of
            them; with the source "cached" the deterministic ones at the front are cached, which happens now.
        source: "uncached" (Dataset, DataLoader) or "cached" (CacheDataset, ThreadDataLoader).
        crops_per_case: crops that MONAI takes of a case at once.
        batch_size: crops in one step of this rank.
        workers: loader processes, or threads that fill the cache; None takes MONAI's default.
        seed: of the order and of MONAI's random transforms; must differ between ranks.
        device: where batches go.

    Raises:
        ValueError: the batch is no multiple of the crops per case, which MONAI's loader takes together.
    """

    resumes_within_epoch = False

    def __init__(
        self,
        cases: Sequence[Case],
        transforms: Transforms,
        source: MonaiSource,
        *,
        crops_per_case: int,
        batch_size: int,
        workers: int | None,
        seed: int,
        device: torch.device,
    ) -> None:
        """Make the dataset and the loader."""
        self._cases_per_step, left = divmod(batch_size, crops_per_case)
        if left or not self._cases_per_step:
            raise ValueError(
                f"batch_size {batch_size}: must be a multiple of crops_per_case ({crops_per_case}) with the source "
                f"{source}"
            )
        self._device, self._seed, self._cases = device, seed, len(cases)
        self._loader = self._make_loader(monai_items(cases), Compose(list(transforms)), source, workers)

    @property
    def dataset(self) -> Any:  # noqa: ANN401 - MONAI's
        """MONAI's dataset."""
        return self._loader.dataset

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
            yield Batch(plain(image), plain(label), tuple(items["name"]))

    def _make_loader(
        self, items: list[dict[str, str]], chain: Compose, source: MonaiSource, workers: int | None
    ) -> Any:  # noqa: ANN401
        generator = torch.Generator()
        if source == "cached":
            dataset = CacheDataset(items, chain, cache_rate=1.0, num_workers=workers, copy_cache=False)
            return ForwardingThreadDataLoader(
                dataset, num_workers=0, batch_size=self._cases_per_step, shuffle=True, generator=generator
            )
        return DataLoader(
            Dataset(items, chain),
            num_workers=workers or 0,
            batch_size=self._cases_per_step,
            shuffle=True,
            generator=generator,
        )


def monai_items(cases: Sequence[Case]) -> list[dict[str, str]]:
    """Return the cases as MONAI's transforms want them."""
    return [{"image": str(case.image), "label": str(case.label), "name": case.name} for case in cases]


def plain(tensor: Any) -> torch.Tensor:  # noqa: ANN401 - a MetaTensor or a Tensor
    """Return a tensor without MONAI's metadata."""
    bare: torch.Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    return bare
