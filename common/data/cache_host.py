"""Held cases that are no single pair of tensors: one by one in memory or on disk, mixed, or prepared at every use."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.data.cache import HeldCases, Outline, Size, fill_cache, outline, padded
from common.data.preparation import PreparedCase
from common.data.tiers import Tier


@dataclass(frozen=True)
class HeldCase:
    """A prepared case in its place, and its outline.

    Args:
        name: of the case.
        image: [C, X, Y, Z] float16, in CPU memory, a mapped file, or on a device.
        label: [X, Y, Z] uint8, likewise.
        outline: its shape, padded to at least a crop, and its foreground.
    """

    name: str
    image: torch.Tensor
    label: torch.Tensor
    outline: Outline


def hold_case(case: PreparedCase, crop_size: Size, tier: Tier, device: torch.device) -> HeldCase:
    """Put a prepared, labelled case in its tier.

    Args:
        case: in CPU memory or a mapped file.
        crop_size: X, Y, Z in voxels.
        tier: "gpu" copies it to `device`, "ram" to CPU memory; "disk" (and "none") leave it as it is.
        device: of the batches.
    """
    assert case.label is not None
    image, label = case.image, case.label
    if tier == "gpu":
        image, label = image.to(device), label.to(device)
    elif tier == "ram":
        image, label = image.clone(), label.clone()
    return HeldCase(case.name, image, label, outline(case, crop_size))


@dataclass(frozen=True)
class CaseList:
    """Cases that each lie where they are: host memory, mapped files, or tensors of their own on the device.

    Args:
        cases: all on the host, or all on `device`.
        numbers: [cases] int64, global number of each case.
        device: where the crops are wanted.
    """

    cases: tuple[HeldCase, ...]
    numbers: np.ndarray
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cases."""
        return tuple(case.name for case in self.cases)

    @property
    def on_host(self) -> bool:
        """Whether the CPU copies the voxels."""
        return self.cases[0].image.device.type == "cpu"

    def outline(self, row: int) -> Outline:
        """Return the outline of one case."""
        return self.cases[row].outline

    def cut(
        self, rows: np.ndarray, starts: np.ndarray, flips: np.ndarray, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one crop per row (see `HeldCases.cut`)."""
        return cut_crops([self.cases[row] for row in rows], starts, flips, size, self.device)


@dataclass(frozen=True)
class LoadedCases:
    """Cases of which nothing is kept but the last few: each is loaded, say from its raw file, when used.

    Args:
        names: of the cases.
        numbers: [cases] int64, global number of each case.
        device: where the crops are wanted.
        load: from a row to its case on the host.
        keep: cases kept since they were used last; with fewer than a batch holds, they are loaded twice for it.
    """

    names: tuple[str, ...]
    numbers: np.ndarray
    device: torch.device
    load: Callable[[int], HeldCase]
    keep: int
    on_host: bool = True
    _recent: OrderedDict[int, HeldCase] = field(default_factory=OrderedDict, init=False, repr=False)

    def outline(self, row: int) -> Outline:
        """Return the outline of one case, for which it is loaded."""
        return self._case(row).outline

    def cut(
        self, rows: np.ndarray, starts: np.ndarray, flips: np.ndarray, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one crop per row (see `HeldCases.cut`)."""
        return cut_crops([self._case(row) for row in rows], starts, flips, size, self.device)

    def _case(self, row: int) -> HeldCase:
        if row not in self._recent:
            while len(self._recent) >= self.keep:
                self._recent.popitem(last=False)
            self._recent[row] = self.load(int(row))
        self._recent.move_to_end(row)
        return self._recent[row]


@dataclass(frozen=True)
class MixedCases:
    """Cases of which some are held in one way and some in another.

    Args:
        names: of the cases.
        numbers: [cases] int64, global number of each case.
        parts: what holds them, all with crops on the same device.
        part: [cases] int, which part holds each case.
        row: [cases] int, its row there.
    """

    names: tuple[str, ...]
    numbers: np.ndarray
    parts: tuple[HeldCases, ...]
    part: np.ndarray
    row: np.ndarray

    @property
    def device(self) -> torch.device:
        """Where the crops lie."""
        return self.parts[0].device

    @property
    def on_host(self) -> bool:
        """Whether the CPU copies the voxels of any part."""
        return any(part.on_host for part in self.parts)

    def outline(self, row: int) -> Outline:
        """Return the outline of one case."""
        part: HeldCases = self.parts[self.part[row]]
        return part.outline(self.row[row])

    def cut(
        self, rows: np.ndarray, starts: np.ndarray, flips: np.ndarray, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one crop per row (see `HeldCases.cut`), each from its part, in the order asked for."""
        crops: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(rows)
        for number, part in enumerate(self.parts):
            (asked,) = np.nonzero(self.part[rows] == number)
            if len(asked):
                images, labels = part.cut(self.row[rows[asked]], starts[asked], flips[asked], size)
                for place, image, label in zip(asked, images, labels, strict=True):
                    crops[place] = image, label
        made = [crop for crop in crops if crop is not None]
        return torch.stack([image for image, _ in made]), torch.stack([label for _, label in made])


def hold_cases(
    cases: Sequence[PreparedCase],
    tiers: Sequence[Tier],
    crop_size: Size,
    device: torch.device,
    numbers: np.ndarray | None = None,
) -> HeldCases:
    """Hold each prepared, labelled case in its tier, as `plan_cache` says.

    Args:
        cases: in CPU memory or mapped files.
        tiers: of each case: "gpu" in one resident cache on `device`, "ram" copied to CPU memory, "disk" as it is.
        crop_size: X, Y, Z in voxels.
        device: of the batches.
        numbers: global number of each case; by default 0, 1, 2, ...
    """
    numbers = np.arange(len(cases)) if numbers is None else numbers
    parts: list[HeldCases] = []
    part, row = np.zeros(len(cases), np.int64), np.zeros(len(cases), np.int64)
    for on_device in (True, False):
        here = [number for number, tier in enumerate(tiers) if (tier == "gpu") == on_device]
        if not here:
            continue
        part[here], row[here] = len(parts), np.arange(len(here))
        if on_device:
            parts.append(fill_cache([cases[each] for each in here], crop_size, device, numbers[here]))
        else:
            held = tuple(hold_case(cases[each], crop_size, tiers[each], device) for each in here)
            parts.append(CaseList(held, numbers[here], device))
    if len(parts) == 1:
        return parts[0]
    return MixedCases(tuple(case.name for case in cases), numbers, tuple(parts), part, row)


def cut_crops(
    cases: Sequence[HeldCase], starts: np.ndarray, flips: np.ndarray, size: Size, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut one crop from each case, image [N, C, X, Y, Z] float16 and label [N, 1, X, Y, Z] uint8 on `device`."""
    images = [case.image for case in cases]
    labels = [case.label[None] for case in cases]
    if images[0].device.type != "cpu":
        return _slice_there(images, starts, flips, size), _slice_there(labels, starts, flips, size)
    return _copy_here(images, starts, flips, size, device), _copy_here(labels, starts, flips, size, device)


def _slice_there(volumes: list[torch.Tensor], starts: np.ndarray, flips: np.ndarray, size: Size) -> torch.Tensor:
    crops = []
    for volume, start, flip in zip(volumes, starts.tolist(), flips.tolist(), strict=True):
        piece = volume[(slice(None), *(slice(first, first + side) for first, side in zip(start, size, strict=True)))]
        crops.append(padded(piece, np.array(size)).flip([axis + 1 for axis in range(3) if flip[axis]]))
    return torch.stack(crops)


def _copy_here(
    volumes: list[torch.Tensor], starts: np.ndarray, flips: np.ndarray, size: Size, device: torch.device
) -> torch.Tensor:
    """Copy the crops into one buffer, pinned for a GPU, and send it there; the host waits for nothing."""
    to_gpu = device.type == "cuda"
    buffer = torch.empty((len(volumes), volumes[0].shape[0], *size), dtype=volumes[0].dtype, pin_memory=to_gpu)
    for crop, volume, start, flip in zip(buffer.numpy(), volumes, starts.tolist(), flips.tolist(), strict=True):
        piece = volume.numpy()[
            (slice(None), *(slice(first, first + side) for first, side in zip(start, size, strict=True)))
        ]
        # A flipped crop is filled from its far end; the padding is then at its near one, as if padded before.
        target = crop[(slice(None), *(slice(None, None, -1 if flipped else 1) for flipped in flip))]
        if piece.shape != target.shape:
            target[...] = 0
        target[(slice(None), *(slice(0, side) for side in piece.shape[1:]))] = piece
    return buffer.to(device, non_blocking=to_gpu)
