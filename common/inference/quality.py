"""Quality of a segmentation: Dice from counts that stay on the device until they are read."""

from collections.abc import Sequence

import torch

from common.inference.labelling import Region


def dice_counts(prediction: torch.Tensor, truth: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
    """Count, for each region, the voxels that Dice is made of; the host does not wait for the device.

    Counts of parts of one case may be added up; counts of several cases are stacked and read together at the end.

    Args:
        prediction: labels [X, Y, Z] (or any one shape), integers.
        truth: labels of the same shape, on the same device.
        regions: R structures, each of one label or of several.

    Returns:
        int64 [R, 2] on the device: voxels in both masks; voxels in the one plus voxels in the other.

    Raises:
        ValueError: the shapes differ.
    """
    if prediction.shape != truth.shape:
        raise ValueError(
            f"the prediction {tuple(prediction.shape)} and the truth {tuple(truth.shape)} must have one shape: "
            "restore the prediction to the grid of the truth first"
        )
    counts = []
    for region in regions:
        predicted, true = region.mask(prediction), region.mask(truth)
        both = torch.count_nonzero(predicted & true)
        counts.append(torch.stack([both, torch.count_nonzero(predicted) + torch.count_nonzero(true)]))
    return torch.stack(counts)


def dice_of_counts(counts: torch.Tensor) -> torch.Tensor:
    """Return Dice = 2 |A and B| / (|A| + |B|) of counts [..., 2] as float64 [...], NaN where both masks are empty."""
    return 2 * counts[..., 0].double() / counts[..., 1].double()


def dice_per_region(prediction: torch.Tensor, truth: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
    """Return the Dice of each region, float64 [R] on the labels' device, in [0, 1].

    A region that is in neither mask has no Dice: NaN. A region that is predicted but not in the truth has Dice 0
    (`monai.metrics.DiceMetric` leaves such cases out at its defaults, which hides false findings).

    Args:
        prediction: labels [X, Y, Z] (or any one shape), integers.
        truth: labels of the same shape, on the same device.
        regions: R structures, each of one label or of several.

    Raises:
        ValueError: the shapes differ.

    Source:
        Equal to `monai.metrics.DiceMetric(include_background=False)` where the truth holds the region.
    """
    return dice_of_counts(dice_counts(prediction, truth, regions))


def mean_dice(counts: Sequence[torch.Tensor]) -> float:
    """Return the mean over cases of the mean over regions; waits for the device, once.

    Args:
        counts: of each case, as `dice_counts` gives them, [R, 2].

    Returns:
        The mean Dice in [0, 1]; regions and cases without a Dice are left out, NaN where nothing is left.
    """
    if not counts:
        return float("nan")
    cases = dice_of_counts(torch.stack(tuple(counts))).nanmean(dim=1)
    return float(cases.nanmean())
