"""Noise is drawn anew at each row, and again the same in a replay."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import samplers

X = np.zeros((6, 4, 3), np.float32)
FIRST = np.random.default_rng(0).random((6, 4)) < 0.3


class GaussianNoiseTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.network = network_lib.transform(
      lambda x: samplers.GaussianNoise(2.0)(x)
    )
    _, self.state = self.network.init(jax.random.key(0), X[0])

  def test_apply_and_unroll_agree_bit_for_bit(self):
    y, end = self.network.unroll({}, self.state, None, X, FIRST)
    state = self.state
    for t in range(6):
      row, state = self.network.apply({}, state, None, X[t], FIRST[t])
      np.testing.assert_array_equal(row, y[t])
    jax.tree.map(
      lambda a, b: self.assertTrue(bool(jnp.all(a == b))), state, end
    )

  @pytest.mark.heavy
  def test_any_part_of_the_batch_replays(self):
    y, _ = self.network.unroll({}, self.state, None, X, FIRST)
    part = jnp.array([3, 1])
    carry = jax.tree.map(lambda x: x[part], self.state.carry)
    again, _ = self.network.unroll(
      {}, self.state.replace(carry=carry), None, X[:, part], FIRST[:, part]
    )
    np.testing.assert_array_equal(again, y[:, part])

  @pytest.mark.heavy
  def test_draws_are_normal_and_differ(self):
    x = np.zeros((100, 10, 10), np.float32)
    _, state = self.network.init(jax.random.key(1), x[0])
    y, _ = self.network.unroll({}, state, None, x, np.ones((100, 10), bool))
    self.assertGreater(len(np.unique(y)), 9900)
    self.assertAlmostEqual(float(np.mean(y)), 0, delta=0.1)
    self.assertAlmostEqual(float(np.std(y)), 2, delta=0.1)

  def test_other_seeds_other_noise(self):
    carries = [
      self.network.initial_carry(4, key)
      for key in (jax.random.key(1), jax.random.key(2))
    ]
    ys = [
      self.network.apply({}, self.state.replace(carry=c), None, X[0], FIRST[0])
      for c in carries
    ]
    self.assertFalse(np.any(np.asarray(ys[0][0]) == np.asarray(ys[1][0])))

  def test_negative_scale(self):
    network = network_lib.transform(lambda x: samplers.GaussianNoise(-1.0)(x))
    with self.assertRaisesRegex(ValueError, 'non-negative, got -1'):
      network.init(jax.random.key(0), X[0])


if __name__ == '__main__':
  absltest.main()
