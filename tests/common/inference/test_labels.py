"""Labels from logits by hand; Dice by hand and against MONAI."""

import json
import math
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot
from torch.utils._python_dispatch import TorchDispatchMode

from medspeed.common.files import from_json
from medspeed.common.inference.labels import (
    LabelScheme,
    Region,
    case_dice,
    dice_counts,
    dice_of_counts,
    mean_dice,
    one_region_per_label,
    painted,
    painting_order,
)

TUMOUR = LabelScheme(
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
    assert labelling.labels_of(column(-0.1, 0, 0.1)[None]).flatten().tolist() == [0, 0, 1]
    three = one_region_per_label(["background", "a", "b"])
    assert three.labels_of(torch.cat([two, 2 * two[:1]])).flatten().tolist() == [2, 1, 2]
    assert three.labels_of(torch.zeros(3, 2, 1, 1)).sum() == 0  # where they are equal, the lower one
    assert three.labels_of(two).dtype == torch.uint8


@pytest.mark.parametrize(("labels", "members", "value"), [(2, (), 1), (2, (1, 2), 1), (2, (1,), 2), (300, (1,), 256)])
def test_regions_of_numbers_that_there_are_not_are_refused(labels, members, value):
    regions = Region("good", (1,), 1), Region("bad", members, value)
    with pytest.raises(ValueError, match="each needs its own name and numbers of the"):
        LabelScheme(("",) * labels, regions, exclusive=False)


def test_regions_of_one_name_are_refused():
    with pytest.raises(ValueError, match="each needs its own name"):
        LabelScheme(("background", "a", "b"), (Region("x", (1,), 1), Region("x", (2,), 2)), exclusive=True)


def test_a_number_that_is_left_out_has_a_channel_but_no_region():
    gap = one_region_per_label(["background", "", "liver"])
    assert [region.name for region in gap.regions] == ["liver"]
    assert (gap.channels, gap.numbers) == (3, (0, 2))
    assert gap.labels_of(torch.stack([column(0, 1), column(-1, -1), column(1, 0)])).flatten().tolist() == [2, 0]


def test_nested_regions_are_painted_from_the_whole_to_the_rim():
    assert [TUMOUR.regions[number].name for (number,) in painting_order(TUMOUR.regions)] == ["WT", "TC", "ET"]
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
    assert painted(rivals, [one, other].__getitem__).flatten().tolist() == [2, 1, 2, 0]
    assert painted(rivals[::-1], [other, one].__getitem__).flatten().tolist() == [2, 1, 2, 0]


def test_masks_are_the_members():
    labels = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    assert [region.mask(labels).tolist() for region in TUMOUR.regions] == [
        [False, False, True, True],
        [False, True, True, True],
        [False, False, False, True],
    ]


def test_json_keeps_everything():
    assert from_json(LabelScheme, json.loads(json.dumps(asdict(TUMOUR)))) == TUMOUR


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1)


def classes(count: int) -> tuple[Region, ...]:
    """One region for each label below `count` but the background."""
    return one_region_per_label([str(number) for number in range(count)]).regions


def test_by_hand():
    prediction, truth = labels(0, 1, 1, 2, 2, 2), labels(0, 1, 2, 2, 2, 0)
    assert dice_counts(prediction, truth, classes(3)).tolist() == [[1, 3], [2, 6]]
    assert dice_of_counts(dice_counts(prediction, truth, classes(3))).tolist() == pytest.approx([2 / 3, 2 / 3])


def test_empty_masks():
    dice = dice_of_counts(dice_counts(labels(0, 2, 0, 4), labels(0, 0, 3, 4), classes(6))).tolist()
    assert math.isnan(dice[0])  # in neither mask
    assert dice[1] == 0  # predicted, not in the truth
    assert dice[2] == 0  # in the truth, not predicted
    assert dice[3] == 1
    assert math.isnan(dice[4])
    assert case_dice(dice_counts(labels(0), labels(0), classes(3))) == 1.0  # nothing is there, and nothing was found
    assert case_dice(dice_counts(labels(2), labels(0), classes(3))) == 0.0


@given(st.integers(0, 2**31), st.integers(2, 5), st.sampled_from([torch.uint8, torch.int64]))
@settings(deadline=None, max_examples=40)
def test_equals_monai_where_the_truth_holds_the_class(seed: int, count: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    # Few voxels, so that a class is often missing from the truth, the prediction, or both.
    prediction, truth = torch.randint(0, count, (2, 3, 2, 2), generator=generator).to(dtype)
    metric = DiceMetric(include_background=False)
    expected = metric(one_hot(prediction[None, None], count), one_hot(truth[None, None], count))
    assert isinstance(expected, torch.Tensor)
    ours = dice_of_counts(dice_counts(prediction, truth, classes(count)))
    present = torch.tensor([bool((truth == label).any()) for label in range(1, count)])
    torch.testing.assert_close(ours[present], expected[0].double()[present], rtol=1e-6, atol=0)
    assert expected[0][~present].isnan().all()
    if present.all():
        assert mean_dice([dice_counts(prediction, truth, classes(count))]) == pytest.approx(float(metric.aggregate()))


def test_counts_of_parts_add_up():
    generator = torch.Generator().manual_seed(0)
    prediction, truth = torch.randint(0, 3, (2, 8, 6, 6), generator=generator)
    parts = sum(dice_counts(p, t, classes(3)) for p, t in zip(prediction.split(3), truth.split(3), strict=True))
    assert torch.equal(
        dice_of_counts(torch.as_tensor(parts)), dice_of_counts(dice_counts(prediction, truth, classes(3)))
    )


def test_mean_over_cases_leaves_out_what_has_no_dice():
    perfect, nothing = (
        dice_counts(labels(1, 2), labels(1, 2), classes(3)),
        dice_counts(labels(0, 0), labels(0, 0), classes(3)),
    )
    half = dice_counts(labels(1, 0), labels(0, 2), classes(3))  # a false finding and a missed one
    only_first = dice_counts(labels(1, 0), labels(1, 0), classes(3))
    assert mean_dice([perfect, half]) == 0.5
    assert mean_dice([perfect, nothing, half]) == 0.5
    assert mean_dice([only_first, half]) == 0.5  # the second class of the first case has no Dice
    assert math.isnan(mean_dice([nothing]))
    assert math.isnan(mean_dice([]))


def test_a_region_may_be_made_of_several_labels():
    whole, rim = Region("WT", (1, 2, 3), 1), Region("ET", (3,), 3)
    counts = dice_counts(labels(0, 1, 2, 3, 3), labels(1, 2, 0, 3, 1), (whole, rim))
    assert counts.tolist() == [[3, 8], [1, 3]]


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        dice_counts(labels(0, 1), labels(0, 1, 1), classes(2))


class RefuseWaits(TorchDispatchMode):
    """Fails where the host would have to wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_counting_reads_nothing_back():
    with RefuseWaits():
        counts = dice_counts(labels(0, 1, 2), labels(0, 1, 1), classes(3))
        dice_of_counts(counts)
    with RefuseWaits(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        mean_dice([counts])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_counting_does_not_wait_for_the_device():
    prediction, truth = torch.randint(0, 3, (2, 8, 8, 8), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = dice_counts(prediction, truth, classes(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(counts.cpu(), dice_counts(prediction.cpu(), truth.cpu(), classes(3)))


def test_the_masks_of_many_regions_are_never_all_in_memory():
    """All 200 would take five times what is allowed here; in a process of its own, whose peak is its own."""
    program = (
        "import resource, torch; from medspeed.common.inference.labels import *; made = one_region_per_label\n"
        "labels = torch.zeros(160, 160, 160, dtype=torch.uint8); scheme = made(['', *map(str, range(1, 101))])\n"
        "dice_counts(labels[:9], labels[:9], scheme.regions)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); dice_counts(labels, labels, scheme.regions)\n"
        "assert peak() - before < 40 * labels.numel(), (peak() - before) / labels.numel()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
