"""Tests of cutting data into minibatches."""

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.data import minibatches

T, B = 3, 6


def rows():
  """Leaves that tell where they come from: `100 t + b`."""
  t, b = jnp.mgrid[:T, :B]
  where = 100 * t + b
  return {'x': where, 'y': jnp.stack([where, -where], axis=-1)}


class PermutedMinibatchesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1, 2, 3, 6)
  def test_deals_out_whole_environments(self, n):
    carry = {'h': 10 * jnp.arange(B)[:, None], 'none': None}
    deal = self.variant(
      lambda key, tree: minibatches.permuted_minibatches(key, tree, n, (1, 0))
    )
    batch, carry_batch = deal(jax.random.key(0), (rows(), carry))
    chex.assert_shape(batch['x'], (n, T, B // n))
    chex.assert_shape(batch['y'], (n, T, B // n, 2))
    chex.assert_shape(carry_batch['h'], (n, B // n, 1))
    environment = np.asarray(batch['x'][:, 0])
    # Each once, with its own rows in order and its own carry.
    np.testing.assert_array_equal(np.sort(environment, None), np.arange(B))
    np.testing.assert_array_equal(
      batch['x'], environment[:, None] + 100 * np.arange(T)[:, None]
    )
    np.testing.assert_array_equal(batch['y'][..., 1], -batch['x'])
    np.testing.assert_array_equal(carry_batch['h'][..., 0], 10 * environment)

  @parameterized.parameters(1, 2, 9, 18)
  def test_deals_out_shuffled_rows(self, n):
    flat = minibatches.flatten_rows(rows())
    batch = minibatches.permuted_minibatches(jax.random.key(0), flat, n)
    chex.assert_shape(batch['x'], (n, T * B // n))
    np.testing.assert_array_equal(
      np.sort(batch['x'], None), np.sort(rows()['x'], None)
    )
    np.testing.assert_array_equal(batch['y'][..., 1], -batch['x'])

  @hypothesis.settings(max_examples=10)
  @hypothesis.given(
    seed=st.integers(0, 2**31), n=st.integers(1, 4), size=st.integers(1, 5)
  )
  @pytest.mark.heavy
  def test_every_entry_appears_once(self, seed, n, size):
    x = jnp.arange(n * size)
    batch = minibatches.permuted_minibatches(jax.random.key(seed), x, n)
    chex.assert_shape(batch, (n, size))
    np.testing.assert_array_equal(np.sort(batch, None), np.arange(n * size))

  def test_each_key_deals_anew(self):
    x = jnp.arange(64)
    first, again, other = (
      minibatches.permuted_minibatches(jax.random.key(seed), x, 4)
      for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    self.assertGreater(np.mean(first != other), 0.5)
    self.assertGreater(np.mean(first.ravel() != x), 0.5)

  def test_deals_out_keys(self):
    keys = jax.random.split(jax.random.key(0), (T, B))
    tree = {'key': keys, 'x': rows()['x']}
    batch = minibatches.permuted_minibatches(jax.random.key(1), tree, 3, 1)
    expected = keys[batch['x'] // 100, batch['x'] % 100]
    np.testing.assert_array_equal(
      jax.random.key_data(batch['key']), jax.random.key_data(expected)
    )
    flat = minibatches.flatten_rows(tree)
    np.testing.assert_array_equal(
      jax.random.key_data(flat['key'][B + 2]), jax.random.key_data(keys[1, 2])
    )

  def test_can_be_scanned(self):
    def epoch(total, key):
      tree = (rows(), jnp.arange(B))
      batches = minibatches.permuted_minibatches(key, tree, 2, (1, 0))
      return jax.lax.scan(
        lambda total, batch: (total + batch[0]['x'].sum(), None), total, batches
      )

    total, _ = jax.lax.scan(epoch, 0, jax.random.split(jax.random.key(0), 5))
    self.assertEqual(total, 5 * rows()['x'].sum())

  def test_case_k(self):
    message = r'6 environments.*4 equal.*\[1, 2, 3, 6\]'
    with self.assertRaisesRegex(ValueError, message):
      minibatches.minibatch_size(6, 4, 'environments')
    with self.assertRaisesRegex(ValueError, r'6 rows.*4 equal'):
      minibatches.permuted_minibatches(jax.random.key(0), rows(), 4, 1)
    with self.assertRaisesRegex(ValueError, '0 equal'):
      minibatches.minibatch_size(6, 0)
    self.assertEqual(minibatches.minibatch_size(6, 3), 2)

  @parameterized.named_parameters(
    ('sizes', (rows(), jnp.zeros(5)), (1, 0), r'\[5, 6\]'),
    ('no_axis', jnp.zeros(6), 1, r'\[6\] has no axis 1'),
    ('negative', jnp.zeros(6), -1, r'\[6\] has no axis -1'),
    ('empty', {}, 0, r'sizes \[\]'),
  )
  def test_refuses(self, tree, axis, message):
    with self.assertRaisesRegex(ValueError, message):
      minibatches.permuted_minibatches(jax.random.key(0), tree, 1, axis)


class FlattenRowsTest(chex.TestCase):
  def test_keeps_the_order(self):
    flat = minibatches.flatten_rows(rows())
    chex.assert_shape(flat['y'], (T * B, 2))
    self.assertEqual(flat['x'][2 * B + 5], 205)

  @parameterized.parameters(
    ([jnp.zeros((3, 2)), jnp.zeros((2, 3))],), ([jnp.zeros(6)],)
  )
  def test_refuses_leaves_that_differ(self, leaves):
    with self.assertRaisesRegex(ValueError, 'two leading axes'):
      minibatches.flatten_rows(leaves)


if __name__ == '__main__':
  absltest.main()
