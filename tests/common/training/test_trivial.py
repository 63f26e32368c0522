"""What needs no learning, with answers by hand; the volumes have as many voxels as are looked at."""

import pytest
import torch

from medspeed.common.data.preparation import PreparedCase
from medspeed.common.inference.labels import Region
from medspeed.common.training.evaluate import without_learning

SIDE = 40
SPLEEN, WHOLE = Region("spleen", (1,), 1), Region("WT", (1, 2), 1)


def case(start, image=None, channels=1, number=1):
    """A cube of 10 voxels a side, from `start` along X, of a label."""
    label = torch.zeros(SIDE, SIDE, SIDE, dtype=torch.uint8)
    label[start : start + 10, 5:15, 5:15] = number
    image = torch.zeros(channels, SIDE, SIDE, SIDE) if image is None else image(label)
    return PreparedCase("a", image.half(), label, grid=None)  # type: ignore[arg-type]  # nobody looks at it


def test_a_structure_that_stands_out_is_found_by_its_intensities():
    def image(label):  # between what is darker and what is brighter, in the second of two channels
        noise = torch.rand(2, SIDE, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        noise[1] = torch.where(label == 1, 0.5, torch.where(noise[1] > 0.5, 0.8, 0.2))
        return noise

    training = [case(start, image) for start in (0, 12, 24)]
    found = without_learning(training, [case(30, image)], [SPLEEN])
    assert found == {"value": 1.0, "how": "spleen by intensity"}


def test_a_structure_that_lies_at_one_place_is_found_there():
    found = without_learning([case(10)] * 3, [case(15), case(10)], [SPLEEN])
    assert found == {"value": (0.5 + 1.0) / 2, "how": "spleen by position"}  # half of the first lies there


def test_a_case_does_not_tell_its_own_place():
    """Where none of the others has it lie 63,000 voxels of each, its own thousand among them: a Dice of 0.031."""
    found = without_learning([case(0), case(10)], [case(30)], [SPLEEN])
    assert found["how"] == "spleen by position"
    assert found["value"] == pytest.approx(2 * 1000 / (62_000 + 1000))


def test_each_region_has_its_own_rule_and_one_that_is_nowhere_counts_as_in_the_quality():
    training = [case(0, number=2), case(0, number=2)]
    found = without_learning(training, training[:1], [WHOLE, SPLEEN])
    assert found["value"] == pytest.approx(1.0 / 2)  # no spleen, but 64,000 voxels are said to be some
    assert found["how"].startswith("WT by position, spleen by ")


def test_large_cases_are_thinned_evenly():
    def twice(small):
        image, label = (each.repeat_interleave(2, dim=-1) for each in (small.image, small.label))
        return PreparedCase("a", image, label, grid=small.grid)

    found = without_learning([twice(case(10)), twice(case(10))], [twice(case(15))], [SPLEEN])
    assert found["value"] == 0.5
