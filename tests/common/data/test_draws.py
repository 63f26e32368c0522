import numpy as np

from common.data.draws import keyed_uniforms


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
