import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.draws import keyed_uniforms, partition_cases


def test_round_0_deals_in_turn():
    assert [partition_cases(7, 3, number).tolist() for number in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


@given(st.data(), st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_each_case_is_in_exactly_one_partition_and_sizes_differ_by_one_at_most(data, count, seed, round):
    partitions = data.draw(st.integers(1, count))
    dealt = [partition_cases(count, partitions, number, seed, round) for number in range(partitions)]
    assert sorted(np.concatenate(dealt).tolist()) == list(range(count))
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.dtype == np.int64 for part in dealt)


def test_rounds_and_seeds_deal_anew_and_the_same_ones_alike():
    first = partition_cases(50, 2, 0, seed=1, round=1)
    assert first.tolist() == partition_cases(50, 2, 0, seed=1, round=1).tolist()
    others = [partition_cases(50, 2, 0, seed=seed, round=round) for seed, round in [(1, 0), (1, 2), (2, 1)]]
    for other in others:
        # 25 of 50 drawn at random share 12.5 +- 1.8 with any other 25
        assert 5 <= len(set(first.tolist()) & set(other.tolist())) <= 20


@pytest.mark.parametrize(
    ("partitions", "number", "said"),
    [
        (4, 0, "partitions 4: between 1 and the 3 cases"),
        (0, 0, "partitions 0: between 1"),
        (3, 3, "partition 3: between 0 and 2"),
        (3, -1, "partition -1: between 0 and 2"),
    ],
)
def test_what_cannot_be_dealt_is_refused(partitions, number, said):
    with pytest.raises(ValueError, match=said):
        partition_cases(3, partitions, number)


def test_keyed_uniforms_are_uniform_and_keyed():
    n = 20_000
    draws = keyed_uniforms(3, 1, np.arange(n), np.zeros(n, dtype=np.int64), 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.allclose(draws.mean(0), 0.5, atol=0.01)
    assert np.allclose(draws.var(0), 1 / 12, atol=0.005)
    assert abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.03
    assert np.array_equal(draws[5:6], keyed_uniforms(3, 1, np.array([5]), np.array([0]), 4))
    assert not np.array_equal(draws[5:6], keyed_uniforms(3, 2, np.array([5]), np.array([0]), 4))
