import warnings

import pytest
from monai.data import SmartCacheDataset

from common.data.smart import smart_indices, smart_replaced


def test_the_smart_cache_of_the_guide():
    """Source: the docstring of monai.data.SmartCacheDataset: 5 images, 4 in the cache, a quarter replaced."""
    table = [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 1], [4, 5, 1, 2], [5, 1, 2, 3]]
    replaced = smart_replaced(5, 4, 0.25)
    assert [(smart_indices(5, 4, replaced, epoch) + 1).tolist() for epoch in range(5)] == table


@pytest.mark.parametrize(
    ("count", "held", "rate"), [(5, 4, 0.25), (10, 4, 0.5), (7, 3, 0.1), (6, 4, 1.0), (9, 8, 0.5), (4, 4, 0.3)]
)
def test_the_smart_cache_is_that_of_monai(count, held, rate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI warns where all cases are held
        theirs = SmartCacheDataset(
            list(range(count)), None, rate, cache_num=held, shuffle=False, progress=False, num_replace_workers=1
        )
    theirs.start()
    replaced = smart_replaced(count, held, rate)
    for epoch in range(6):
        assert smart_indices(count, held, replaced, epoch).tolist() == [theirs[i] for i in range(held)]
        if replaced:
            theirs.update_cache()
    theirs.shutdown()


@pytest.mark.parametrize("held", [0, 6])
def test_a_smart_cache_of_more_than_all_or_of_none_is_refused(held):
    with pytest.raises(ValueError, match=f"smart cache of {held} cases: between 1 and the 5 cases"):
        smart_indices(5, held, 1, 0)


def test_how_many_cases_are_replaced():
    assert [smart_replaced(5, 4, 0.25), smart_replaced(10, 4, 0.3), smart_replaced(4, 4, 0.3)] == [1, 2, 0]
    for rate in (0, 1.1):
        with pytest.raises(ValueError, match=rf"replace_rate {rate}: above 0 and at most 1"):
            smart_replaced(5, 4, rate)
