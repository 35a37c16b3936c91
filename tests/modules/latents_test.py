"""Mixtures with the uniform, and samples: exact, fair, with a gradient."""

from absl.testing import absltest, parameterized
import chex
import distrax
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import latents


def _softmax(x):
  x = np.exp(np.float64(x) - np.max(x, -1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


@jax.jit
def _draw(probs, key):
  return latents.straight_through_sample(distrax.Categorical(probs=probs), key)


class UnimixTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(0.0, 0.01, 0.5, 1.0)
  def test_numbers(self, unimix):
    logits = np.float32([[0, 1, 2], [-90, 0, 90]])
    expected = (1 - unimix) * _softmax(logits) + unimix / 3
    make = self.variant(lambda x: latents.unimix_categorical(x, unimix))
    distribution = make(logits)
    np.testing.assert_allclose(distribution.probs, expected, 1e-5, 1e-30)
    self.assertEqual(distribution.batch_shape, (2,))
    self.assertEqual(distribution.mode().dtype, jnp.int32)
    if unimix:
      np.testing.assert_allclose(
        distribution.logits, np.log(expected), 1e-5, 1e-6
      )
      least = (np.log(unimix / 3) - 1e-5) * np.ones((2, 3))
      np.testing.assert_array_less(least, distribution.logits)

  def test_gradients_are_finite(self):
    def kl(x, y):
      p, q = latents.unimix_categorical(x), latents.unimix_categorical(y)
      return jnp.sum(p.kl_divergence(q))

    x = jnp.asarray([1e4, 0.0, -1e4])
    grads = jax.jit(jax.grad(kl, (0, 1)))(x, -x)
    chex.assert_tree_all_finite(grads)

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_computes_in_float32(self, dtype):
    logits = jnp.asarray([0.3, -2.0, 5.0], dtype)
    distribution = latents.unimix_categorical(logits)
    expected = latents.unimix_categorical(logits.astype(jnp.float32))
    self.assertEqual(distribution.logits.dtype, jnp.float32)
    np.testing.assert_array_equal(distribution.logits, expected.logits)

  @parameterized.parameters(-0.1, 1.1, float('nan'))
  def test_out_of_range(self, unimix):
    with self.assertRaisesRegex(ValueError, r'`unimix` must be in \[0, 1\]'):
      latents.unimix_categorical(jnp.zeros(3), unimix)


class StraightThroughTest(chex.TestCase):
  @hypothesis.given(
    hnp.arrays(np.float32, (5, 7), elements=st.floats(0, 1, width=32)),
    st.integers(0, 2**31 - 1),
  )
  def test_one_hot_of_possible_classes(self, probs, seed):
    # About half of all classes are impossible, the ends among them.
    probs = np.where(np.round(probs * 1e4) % 2 == 0, 0, probs)
    probs[:, 3] += probs.sum(-1) == 0
    sample = np.asarray(_draw(probs, jax.random.key(seed)))
    self.assertTrue(np.all((sample == 0) | (sample == 1)))
    np.testing.assert_array_equal(sample.sum(-1), 1)
    self.assertTrue(np.all(probs[sample == 1] > 0))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1, 2, 32)
  def test_certain_classes(self, num_classes):
    probs = jnp.eye(num_classes)
    draw = self.variant(
      lambda p, key: latents.straight_through_sample(
        distrax.Categorical(probs=p), key
      )
    )
    for seed in range(5):
      np.testing.assert_array_equal(draw(probs, jax.random.key(seed)), probs)

  def test_the_largest_uniform_hits_a_possible_class(self):
    """Where rounding matters most: 1 - 2^-23, then impossible classes."""
    rng = np.random.default_rng(0)
    probs = np.float32(rng.random((1000, 32)) ** 8)
    probs[:, 20:] = 0
    distribution = distrax.Categorical(probs=jnp.asarray(probs))
    for u, expected in ((1 - 2.0**-23, 19), (0.0, 0)):
      sample = latents.straight_through(distribution, jnp.full(1000, u))
      index = np.argmax(sample, -1)
      np.testing.assert_array_equal(np.sum(sample, -1), 1)
      self.assertTrue(np.all(probs[np.arange(1000), index] > 0))
      self.assertEqual(np.bincount(index).argmax(), expected)

  @pytest.mark.heavy
  def test_numbers_may_be_given(self):
    distribution = latents.unimix_categorical(jnp.arange(24.0).reshape(2, 3, 4))
    key = jax.random.key(5)
    np.testing.assert_array_equal(
      latents.straight_through(distribution, latents.uniform(key, (2, 3))),
      latents.straight_through_sample(distribution, key),
    )
    # Classes end at .25, .75 and 1.
    distribution = distrax.Categorical(
      probs=jnp.asarray([[0.25, 0.5, 0.25]] * 5)
    )
    given = jnp.asarray([0.0, 0.24, 0.26, 0.74, 0.76])
    sample = latents.straight_through(distribution, given)
    np.testing.assert_array_equal(np.argmax(sample, -1), [0, 0, 1, 1, 2])

  def test_is_fair(self):
    probs = np.float32([[0.1, 0.2, 0, 0.7], [0.25, 0.25, 0.25, 0.25]])
    num = 20_000
    sample = _draw(np.tile(probs, (num, 1, 1)), jax.random.key(0))
    share = np.mean(sample, axis=0)
    # Five standard deviations of a share.
    bound = 5 * np.sqrt(probs * (1 - probs) / num) + 1e-9
    np.testing.assert_array_less(np.abs(share - probs), bound)
    # Rows are drawn apart: classes 3 and 0 meet as often as chance has it.
    both = np.mean(sample[:, 0, 3] * sample[:, 1, 0])
    self.assertLess(abs(both - 0.7 * 0.25), 5 * np.sqrt(0.25 / num))

  def test_keys(self):
    probs = jnp.full((64, 8), 1 / 8)
    a, b = (_draw(probs, jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(a, _draw(probs, jax.random.key(0)))
    self.assertGreater(np.sum(a != b), 0)

  @chex.variants(with_jit=True, without_jit=True)
  @pytest.mark.heavy
  def test_gradient_is_that_of_the_probabilities(self):
    weights = jax.random.normal(jax.random.key(2), (3, 2, 5))
    logits = jax.random.normal(jax.random.key(1), (3, 2, 5))

    def through_sample(logits):
      distribution = latents.unimix_categorical(logits)
      key = jax.random.key(0)
      sample = latents.straight_through_sample(distribution, key)
      return jnp.sum(weights * sample)

    def through_probs(logits):
      return jnp.sum(weights * latents.unimix_categorical(logits).probs)

    grad = self.variant(jax.grad(through_sample))(logits)
    expected = jax.grad(through_probs)(logits)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)
    self.assertGreater(np.abs(grad).min(), 0)

  @parameterized.parameters(
    (None, jnp.float32), (jnp.bfloat16,) * 2, (jnp.float32,) * 2
  )
  def test_dtype(self, dtype, expected):
    logits = jnp.zeros((3, 4), jnp.bfloat16)
    sample = latents.straight_through_sample(
      distrax.Categorical(logits=logits), jax.random.key(0), dtype=dtype
    )
    self.assertEqual(sample.dtype, expected)
    np.testing.assert_array_equal(jnp.sum(sample, -1), 1)


if __name__ == '__main__':
  absltest.main()
