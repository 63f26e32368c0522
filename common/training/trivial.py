"""What segments volumes without learning: a range of intensities, or where a structure usually lies."""

from collections.abc import Sequence
from typing import Any

import torch

from medspeed.common.data.preparation import PreparedCase
from medspeed.common.inference.labels import Region, case_dice

MOST_CASES = 16  # of the training that rules are made from
_SIDE = 40  # voxels of a case that are looked at, along each axis, evenly spread
_LEVELS = 64  # of intensities, and of the share of cases


def without_learning(
    training: Sequence[PreparedCase], validation: Sequence[PreparedCase], regions: Sequence[Region]
) -> dict[str, Any]:
    """Return under "value" the mean Dice of simple rules on the validation cases, on their working grid; and "how".

    By its rule, a region is where one channel lies in a range of intensities, or where a share in a range of the other
    training cases have it (the box of each case being a unit cube): what has the highest Dice on the training cases.
    """
    count, sampled = len(training), [_sampled(case, regions) for case in (*training, *validation)]
    image, mask = (torch.stack(part) for part in zip(*sampled, strict=True))  # [N, C, V] and [N, R, V]
    low, high = image[:count].amin((0, 2))[:, None], image[:count].amax((0, 2))[:, None]
    share = mask[:count].float().mean(0).expand(mask.shape).clone()
    share[:count] = (count * share[:count] - mask[:count].float()) / max(count - 1, 1)  # of the others
    features = torch.cat([(image - low) / (high - low).clamp(min=1e-6), share], dim=1)
    levels = (features * _LEVELS).clamp(0, _LEVELS - 1).byte()
    found, how = torch.zeros_like(mask[count:]), []
    for number, region in enumerate(regions):
        rows = [*range(image.shape[1]), image.shape[1] + number]
        row, first, last = _best_range(levels[:count, rows], mask[:count, number])
        found[:, number] = (levels[count:, rows[row]] >= first) & (levels[count:, rows[row]] <= last)
        how.append(f"{region.name} by {'position' if rows[row] == rows[-1] else 'intensity'}")
    true = mask[count:]
    counts = torch.stack([(found & true).sum(2), found.sum(2) + true.sum(2)], dim=2)
    return {"value": sum(map(case_dice, counts)) / len(counts), "how": ", ".join(how)}


def _sampled(case: PreparedCase, regions: Sequence[Region]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return voxels of a case, image [C, V] float32 and masks [R, V] bool, at the same places of every case's box."""
    assert case.label is not None
    x, y, z = ((torch.arange(_SIDE) * side + side // 2) // _SIDE for side in case.label.shape)
    places = x[:, None, None], y[:, None], z
    label, image = case.label[places].flatten(), case.image[:, *places].flatten(1)
    return image.float(), torch.stack([region.mask(label) for region in regions])


def _best_range(levels: torch.Tensor, mask: torch.Tensor) -> tuple[int, int, int]:
    """Return the row of levels [N, F, V] uint8, and the first and last level, where the Dice with [N, V] is highest."""
    rows = levels.transpose(0, 1)
    inside, size = (
        torch.stack([torch.bincount(each.flatten(), minlength=_LEVELS) for each in part]).cumsum(1)
        for part in ([row[mask] for row in rows], rows)
    )
    # Of all [F, first, last]; a cumulative sum starts with the counts of level 0.
    hits, sizes = (each[:, None] - torch.nn.functional.pad(each, (1, 0))[:, :-1, None] for each in (inside, size))
    dice = (2 * hits / (sizes + mask.sum()).clamp(min=1)).triu()
    row, place = divmod(int(dice.argmax()), _LEVELS**2)
    return row, *divmod(place, _LEVELS)
