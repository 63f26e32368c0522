"""The kernel of the crops against its twin; run by `test_crops.py` with Triton's interpreter."""

import numpy as np
import pytest
import torch

from medspeed.common.data import crops
from medspeed.common.data.crops import crop_table, crops_of_table, place_together
from medspeed.common.data.preparation import PreparedCase
from medspeed.common.kernels.crops_triton import gathered_crops

CPU = torch.device("cpu")
FLIPS = np.array([[False] * 3, [True, False, True], [False, True, False], [True] * 3])
CHANGES = np.array([[1, 0], [1.1, 0.05], [0.9, -0.1], [1.07, 0.02]], np.float32)


def placed(channels, size):
    """Two cases in one tensor, one of them smaller than a crop."""
    generator = torch.Generator().manual_seed(channels)
    cases = []
    for name, shape in (("a", (14, 12, 13)), ("b", (5, 9, 17))):
        image = torch.randn(channels, *shape, generator=generator).half()
        label = torch.randint(3, shape, generator=generator, dtype=torch.uint8)
        cases.append(PreparedCase(name, image, label, grid=None))  # type: ignore[arg-type]  # nobody looks at it
    return place_together(cases, size, CPU)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "size"), [(1, (6, 5, 4)), (4, (7, 9, 3)), (2, (11, 12, 13))])
def test_crops_are_those_of_the_twin(channels, size, dtype, channels_last, monkeypatch):
    held = placed(channels, size)
    cases = [held[0], held[1], held[0], held[1]]
    room = np.array([case.shape for case in cases]) - np.array(size)
    table = torch.from_numpy(crop_table(cases, room // 2, FLIPS, CHANGES, size))
    arguments = table, held[0].image, held[0].label, size, (dtype, channels_last)
    expected, expected_label = crops_of_table(*arguments)
    monkeypatch.setattr(crops, "trusts", lambda name, tensor: name == "crops")
    image, label = crops_of_table(*arguments)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    assert image.dtype == dtype
    assert image.stride() == torch.empty(image.shape, memory_format=layout).stride()
    assert (image - expected.to(dtype)).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    assert torch.equal(label, expected_label)


def test_the_operator_is_what_it_tells_the_compiler():
    case = placed(2, (4, 4, 4))[0]
    table = torch.tensor([[0, 156, 13, 1, 0]])
    for channels_last in (False, True):
        arguments = case.image, case.label, table, [4, 5, 6], torch.bfloat16, channels_last
        torch.library.opcheck(gathered_crops, arguments, test_utils=("test_schema", "test_faketensor"))
