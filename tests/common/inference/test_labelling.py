"""Labels from logits, by hand."""

import json
from dataclasses import asdict

import torch

from common.inference.labelling import Labelling, Region, one_region_per_label, painted

TUMOUR = Labelling(
    ("background", "edema", "core", "rim"),
    (Region("TC", (2, 3), 2), Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3)),
    exclusive=False,
)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)


def test_exclusive_classes_take_the_highest_logit():
    two = torch.stack([column(0.5, 1.0, 2.0), column(0.5, 3.0, 1.0)])
    labelling = one_region_per_label(["background", "spleen"])
    assert labelling.channels == 2
    assert labelling.labels_of(two).flatten().tolist() == [0, 1, 0]
    assert labelling.labels_of(two[1:] - two[:1]).flatten().tolist() == [0, 1, 0]
    three = one_region_per_label(["background", "a", "b"])
    assert three.labels_of(torch.cat([two, 2 * two[:1]])).flatten().tolist() == [2, 1, 2]
    assert three.labels_of(two).dtype == torch.uint8


def test_nested_regions_are_painted_from_the_whole_to_the_rim():
    assert [TUMOUR.regions[number].name for number in TUMOUR.order()] == ["WT", "TC", "ET"]
    core, whole, rim = (-1.0, -1, 2, 2, 2, -1), (-1.0, 3, 3, 3, -1, -1), (-1.0, -1, -1, 9, -1, 1)
    logits = torch.stack([column(*core), column(*whole), column(*rim)])
    # Outside; whole only; whole and core; all; core where the whole is missed; rim by itself.
    assert TUMOUR.labels_of(logits).flatten().tolist() == [0, 1, 2, 3, 2, 3]
    assert TUMOUR.channels == 3


def test_a_logit_of_zero_is_outside():
    assert TUMOUR.labels_of(torch.zeros(3, 2, 2, 2)).sum() == 0


def test_rivals_take_the_highest_logit_whatever_their_order():
    rivals = [Region("a", (1,), 1), Region("b", (2,), 2)]
    one, other = column(1, 3, -1, -2), column(2, 1, 4, -1)
    assert painted([one, other], rivals).flatten().tolist() == [2, 1, 2, 0]
    assert painted([other, one], rivals[::-1]).flatten().tolist() == [2, 1, 2, 0]


def test_masks_are_the_members():
    labels = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    assert [region.mask(labels).tolist() for region in TUMOUR.regions] == [
        [False, False, True, True],
        [False, True, True, True],
        [False, False, False, True],
    ]


def test_json_keeps_everything():
    assert Labelling.from_json(json.loads(json.dumps(asdict(TUMOUR)))) == TUMOUR
