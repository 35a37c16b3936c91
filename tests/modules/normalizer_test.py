"""Case E."""

from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import delay as delay_lib
from hkgraph.modules import normalizer, stateful


def _moments(*values):
  x = np.array(values, np.float32)
  return normalizer.moments_of(x, np.ones(len(values), bool))


class MomentsTest(parameterized.TestCase):
  def test_merge(self):
    merged = normalizer.merge_moments(_moments(1, 3), _moments(5, 7, 9))
    self.assertEqual(int(merged.count), 5)
    self.assertAlmostEqual(float(merged.mean), 5.0, places=6)
    self.assertAlmostEqual(float(merged.variance * 5), 40.0, places=4)

  def test_far_off_features_keep_their_variance(self):
    rng = np.random.default_rng(0)
    moments = normalizer.empty_moments((), jnp.float32)
    samples = (10000 + rng.standard_normal((20, 500))).astype(np.float32)
    for x in samples:
      new = normalizer.moments_of(x, np.ones(500, bool))
      moments = normalizer.merge_moments(moments, new)
    np.testing.assert_allclose(
      moments.variance, np.var(samples.astype(float)), rtol=1e-3
    )
    np.testing.assert_allclose(
      moments.mean, np.mean(samples.astype(float)), rtol=1e-6
    )

  def test_large_counts_move_and_do_not_overflow(self):
    moments = _moments(0, 1).replace(count=jnp.uint32(2**31))
    hundred = normalizer.moments_of(
      np.ones(100, np.float32), np.ones(100, bool)
    )
    moved = normalizer.merge_moments(moments, hundred)
    self.assertEqual(int(moved.count), 2**31 + 100)
    full = moments.replace(count=jnp.uint32(2**32 - 50))
    self.assertEqual(
      int(normalizer.merge_moments(full, hundred).count), 2**32 - 1
    )

  def test_empty_sets_change_nothing(self):
    some = _moments(1, 3)
    none = normalizer.moments_of(np.full(3, np.nan), np.zeros(3, bool))
    for merged in (
      normalizer.merge_moments(some, none),
      normalizer.merge_moments(none, some),
    ):
      self.assertEqual(int(merged.count), 2)
      self.assertAlmostEqual(float(merged.mean), 2)
      self.assertAlmostEqual(float(merged.variance), 1)

  @hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    offset=st.sampled_from([0, -50, 3000]),
    seed=st.integers(0, 2**16),
  )
  @pytest.mark.heavy
  def test_any_partition_gives_the_moments_of_all(self, sizes, offset, seed):
    rng = np.random.default_rng(seed)
    sets = [offset + 3 * rng.standard_normal((n, 2)) for n in sizes]
    moments = normalizer.empty_moments((2,), jnp.float32)
    for x in sets:
      x = np.concatenate([x, np.full((2, 2), 1e30)]).astype(np.float32)
      mask = np.arange(len(x)) < len(x) - 2
      moments = normalizer.merge_moments(
        moments, normalizer.moments_of(x, mask)
      )
    every = np.concatenate(sets)
    self.assertEqual(int(moments.count), len(every))
    if len(every):
      np.testing.assert_allclose(moments.mean, every.mean(0), atol=2e-3)
      np.testing.assert_allclose(
        moments.variance, every.var(0), rtol=1e-2, atol=1e-3
      )


def _update(network, state, x, mask=None):
  is_first = np.zeros(x.shape[:2], bool)
  mask = np.ones(x.shape[:2], bool) if mask is None else mask
  return network.update_statistics({}, state, x, is_first, mask)


class NormalizerTest(parameterized.TestCase):
  def test_twenty_updates_find_mean_and_deviation(self):
    network = network_lib.transform(lambda x: normalizer.Normalizer()(x))
    rng = np.random.default_rng(0)
    _, state = network.init(jax.random.key(0), jnp.zeros((8, 1)))
    for _ in range(20):
      x = rng.normal(5, 2, (16, 8, 1)).astype(np.float32)
      state = _update(network, state, x)
    (moments,) = state.statistics['normalizer']['moments']
    self.assertEqual(int(moments.count), 20 * 16 * 8)
    self.assertAlmostEqual(float(moments.mean[0]), 5, delta=0.2)
    self.assertAlmostEqual(float(moments.variance[0]) ** 0.5, 2, delta=0.1)
    x = rng.normal(5, 2, (500, 1)).astype(np.float32)
    y, _ = network.apply({}, state, None, x, np.zeros(500, bool))
    self.assertAlmostEqual(float(np.mean(y)), 0, delta=0.2)
    self.assertAlmostEqual(float(np.std(y)), 1, delta=0.1)

  def test_frozen_but_for_updates(self):
    network = network_lib.transform(lambda x: normalizer.Normalizer()(x))
    x = np.random.default_rng(0).standard_normal((5, 4, 2)).astype(np.float32)
    is_first = np.zeros((5, 4), bool)
    _, state = network.init(jax.random.key(0), x[0])
    _, after = network.unroll({}, state, None, x, is_first)
    _, after = network.apply({}, after, None, x[0], is_first[0])
    jax.tree.map(
      np.testing.assert_array_equal, after.statistics, state.statistics
    )
    mask = np.arange(4) < 2
    masked = _update(network, state, x, np.broadcast_to(mask, (5, 4)))
    (moments,) = masked.statistics['normalizer']['moments']
    self.assertEqual(int(moments.count), 10)
    np.testing.assert_allclose(
      moments.mean, x[:, :2].mean((0, 1)), rtol=1e-5, atol=1e-6
    )

  def test_constant_features_are_finite(self):
    network = network_lib.transform(lambda x: normalizer.Normalizer()(x))
    _, state = network.init(jax.random.key(0), jnp.zeros((2, 1)))
    state = _update(network, state, np.full((3, 2, 1), 4.0, np.float32))
    x = np.array([[4.0], [1e6]], np.float32)
    y, _ = network.apply({}, state, None, x, np.zeros(2, bool))
    np.testing.assert_allclose(y, [[0], [10]], atol=1e-5)

  def test_trees_pass_other_dtypes(self):
    network = network_lib.transform(lambda x: normalizer.Normalizer()(x))
    x = {
      'f': np.full((3, 2, 1), 2.0, np.float32),
      'i': np.full((3, 2), 7, np.int32),
      'h': jnp.full((3, 2, 2), 2.0, jnp.bfloat16),
    }
    is_first = np.zeros((3, 2), bool)
    row = jax.tree.map(lambda x: x[0], x)
    _, state = network.init(jax.random.key(0), row)
    state = network.update_statistics({}, state, x, is_first, ~is_first)
    y, _ = network.unroll({}, state, None, x, is_first)
    np.testing.assert_array_equal(y['i'], x['i'])
    self.assertEqual(y['h'].dtype, jnp.bfloat16)
    np.testing.assert_allclose(y['f'], np.zeros((3, 2, 1)), atol=1e-6)

  def test_warm_start_and_clip(self):
    warm = normalizer.Moments(
      count=10, mean=np.array([1.0]), variance=np.array([4.0])
    )

    def fn(x):
      return normalizer.Normalizer(warm_start=warm, clip=2.0)(x)

    network = network_lib.transform(fn)
    x = np.array([[5.0], [3.0], [-99.0]], np.float32)
    _, state = network.init(jax.random.key(0), x)
    y, _ = network.apply({}, state, None, x, np.zeros(3, bool))
    np.testing.assert_allclose(y, [[2], [1], [-2]], rtol=1e-5)
    with self.assertRaisesRegex(ValueError, r'\[\(1,\)\]'):
      network.init(jax.random.key(0), np.zeros((3, 2), np.float32))

  def test_behind_a_delay(self):
    def fn(x):
      return normalizer.Normalizer()(delay_lib.Delay(1)(x))

    network = network_lib.transform(fn)
    x = np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    _, state = network.init(jax.random.key(0), x[0])
    state = _update(network, state, x)
    (moments,) = state.statistics['normalizer']['moments']
    self.assertAlmostEqual(float(moments.mean[0]), np.mean([0, 1, 2, 3]))

  def test_in_a_loop_all_rows_meet_the_frozen_statistics(self):
    class Loop(stateful.StatefulModule):
      def initial_carry(self, x):
        return jnp.zeros_like(x)

      def step(self, carry, x):
        y = normalizer.Normalizer()(carry + x)
        return y, y

    network = network_lib.transform(lambda x: Loop()(x))
    x = np.ones((4, 1, 1), np.float32)
    _, state = network.init(jax.random.key(0), x[0])
    state = _update(network, state, x)
    (moments,) = jax.tree.leaves(
      state.statistics, is_leaf=lambda x: isinstance(x, normalizer.Moments)
    )
    # Untouched statistics are the identity: the sums are 1, 2, 3, 4.
    self.assertAlmostEqual(float(moments.mean[0]), 2.5, places=4)
    self.assertAlmostEqual(float(moments.variance[0]), 1.25, places=4)

  @parameterized.parameters(dict(clip=0.0), dict(epsilon=0.0))
  def test_wrong_arguments(self, **kwargs):
    network = network_lib.transform(
      lambda x: normalizer.Normalizer(**kwargs)(x)
    )
    with self.assertRaisesRegex(ValueError, 'must be positive'):
      network.init(jax.random.key(0), jnp.zeros((1, 1)))


if __name__ == '__main__':
  absltest.main()
