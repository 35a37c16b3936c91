"""Two-hot numbers: case G, and a dense encoding in NumPy."""

import functools

from absl.testing import absltest, parameterized
import chex
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import twohot


def _encode(value, bins):
  """The dense two-hot encoding of one number, in float64."""
  bins = np.asarray(bins, np.float64)
  value = np.clip(np.float64(value), bins[0], bins[-1])
  above = max(1, int(np.searchsorted(bins, value)))
  weight = (value - bins[above - 1]) / (bins[above] - bins[above - 1])
  encoding = np.zeros(len(bins))
  encoding[above - 1], encoding[above] = 1 - weight, weight
  return encoding


def _log_softmax(x):
  x = np.asarray(x, np.float64)
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _weights(value, num_bins, limit):
  """The encoding that `log_prob` applies: its slope in each log-probability.

  log_prob = sum_k weight_k * logit_k - logsumexp, and equal logits have a
  softmax of 1 / K.
  """
  grad = jax.grad(lambda x: twohot.TwoHot(x, limit).log_prob(value))
  return grad(jnp.zeros(num_bins)) + 1 / num_bins


@functools.partial(jax.jit, static_argnums=2)
def _log_prob_and_mean(logits, value, limit):
  distribution = twohot.TwoHot(logits, limit)
  return distribution.log_prob(value), distribution.mean()


class BinsTest(parameterized.TestCase):
  @parameterized.parameters((2, 3.0), (5, 2.0), (41, 20.0), (254, 20.0), (255,))
  def test_antisymmetric(self, num_bins, limit=20.0):
    bins = twohot.two_hot_bins(num_bins, limit)
    x = np.linspace(-limit, limit, num_bins)
    np.testing.assert_allclose(
      bins, np.sign(x) * np.expm1(np.abs(x)), rtol=1e-12, atol=1e-12
    )
    np.testing.assert_array_equal(bins, -bins[::-1])
    self.assertTrue(np.all(np.diff(bins.astype(np.float32)) > 0))
    if num_bins % 2:
      self.assertEqual(bins[num_bins // 2], 0)

  @parameterized.parameters(
    (1, 20.0, '`num_bins`.*got 1'),
    (True, 20.0, '`num_bins`.*got True'),
    (5, 0.0, r'`limit`.*\(0, 80\], got 0.0'),
    (5, 81.0, '`limit`.*got 81.0'),
    (5, float('nan'), '`limit`.*got nan'),
  )
  def test_out_of_range(self, num_bins, limit, message):
    with self.assertRaisesRegex(ValueError, message):
      twohot.two_hot_bins(num_bins, limit)


class TwoHotTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @pytest.mark.heavy
  def test_case_g(self):
    weights = self.variant(lambda x: _weights(x, 5, 2.0))(1.0)
    np.testing.assert_allclose(
      weights, [0, 0, 0.418023, 0.581977, 0], atol=1e-6
    )
    # Decodes to 1: the probabilities are the weights.
    logits = jnp.log(jnp.asarray([1e-30, 1e-30, 0.418023, 0.581977, 1e-30]))
    mean = self.variant(lambda x: twohot.TwoHot(x, 2.0).mean())(logits)
    np.testing.assert_allclose(mean, 1, rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(2, 5, 40, 41, 254, 255)
  def test_equal_logits_decode_to_zero(self, num_bins):
    mean = self.variant(lambda x: twohot.TwoHot(x).mean())
    logits = jnp.broadcast_to(jnp.asarray([[0.0], [-3.3]]), (2, num_bins))
    np.testing.assert_array_equal(mean(logits), 0)

  def test_antisymmetric_logits_decode_to_opposites(self):
    logits = jax.random.normal(jax.random.key(0), (4, 255))
    mean = lambda x: twohot.TwoHot(x).mean()  # noqa: E731
    np.testing.assert_allclose(mean(logits[:, ::-1]), -mean(logits), rtol=1e-5)
    np.testing.assert_array_equal(mean(logits + logits[:, ::-1]), 0)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  @pytest.mark.heavy
  def test_beyond_the_ends(self, dtype):
    def total(logits, value):
      log_prob = twohot.TwoHot(logits).log_prob(value)
      return jnp.sum(log_prob), log_prob

    value = jnp.asarray([1e9, 3e38, jnp.inf, -1e9, -3e38, -jnp.inf])
    logits = jnp.tile(jnp.linspace(-30, 30, 255).astype(dtype), (6, 1))
    expected = _log_softmax(logits)[0, [-1] * 3 + [0] * 3]
    fn = self.variant(jax.grad(total, (0, 1), has_aux=True))
    grads, log_prob = fn(logits, value)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
    self.assertEqual(log_prob.dtype, jnp.float32)
    chex.assert_tree_all_finite(grads)
    np.testing.assert_array_equal(grads[1], 0)

  @hypothesis.given(
    st.sampled_from([(2, 3.0), (5, 2.0), (40, 20.0), (255, 20.0), (9, 30.0)]),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4),
    st.integers(0, 9),
  )
  def test_numpy(self, sizes, values, seed):
    num_bins, limit = sizes
    rng = np.random.default_rng(seed)
    logits = np.float32(3 * rng.standard_normal((len(values), num_bins)))
    bins = twohot.two_hot_bins(num_bins, limit)
    encoded = np.stack([_encode(x, bins) for x in values])
    log_prob, mean = _log_prob_and_mean(logits, np.float32(values), limit)
    np.testing.assert_allclose(
      log_prob,
      np.sum(encoded * _log_softmax(logits), axis=-1),
      rtol=1e-3,
      atol=1e-3,
    )
    probs = np.exp(_log_softmax(logits))
    expected = np.sum(probs * bins, axis=-1)
    np.testing.assert_allclose(mean, expected, 1e-4, 1e-5 * bins[-1])

  @parameterized.parameters((5, 2.0), (40, 20.0), (255, 20.0))
  def test_bins_and_what_is_beside_them(self, num_bins, limit):
    bins = np.float32(twohot.two_hot_bins(num_bins, limit))
    weights = jax.jit(jax.vmap(lambda x: _weights(x, num_bins, limit)))
    np.testing.assert_allclose(weights(bins), np.eye(num_bins), atol=1e-4)
    beside = np.concatenate([np.nextafter(bins, x) for x in (-9e9, 9e9)])
    expected = np.stack([_encode(x, bins) for x in beside])
    np.testing.assert_allclose(weights(beside), expected, atol=1e-4)

  def test_encoding_of_zero(self):
    for num_bins, expected in ((3, [0, 1, 0]), (4, [0, 0.5, 0.5, 0])):
      weights = jax.jit(lambda n=num_bins: _weights(0.0, n, 20.0))()
      np.testing.assert_allclose(weights, expected, atol=1e-6)

  def test_the_best_logits_decode_to_the_target(self):
    targets = jnp.asarray([-1234.5, -0.25, 0.0, 0.7, 88.0])
    weights = jax.jit(jax.vmap(lambda x: _weights(x, 255, 20.0)))(targets)
    decoded = twohot.TwoHot(jnp.log(jnp.maximum(weights, 1e-30))).mean()
    np.testing.assert_allclose(decoded, targets, rtol=1e-3, atol=1e-3)

  def test_gradient_is_that_of_cross_entropy(self):
    logits = jax.random.normal(jax.random.key(0), (7,))
    grad = jax.grad(lambda x: twohot.TwoHot(x, 2.0).log_prob(2.5))(logits)
    encoded = _encode(2.5, twohot.two_hot_bins(7, 2.0))
    probs = np.exp(_log_softmax(logits))
    np.testing.assert_allclose(grad, encoded - probs, atol=1e-5)

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  @pytest.mark.heavy
  def test_computes_in_float32(self, dtype):
    logits = jax.random.normal(jax.random.key(0), (3, 255)).astype(dtype)
    value = jnp.asarray([-7.0, 0.1, 30.0])
    narrow = twohot.TwoHot(logits)
    wide = twohot.TwoHot(logits.astype(jnp.float32))
    for a, b in (
      (narrow.log_prob(value), wide.log_prob(value)),
      (narrow.mean(), wide.mean()),
    ):
      self.assertEqual(a.dtype, jnp.float32)
      np.testing.assert_array_equal(a, b)

  @pytest.mark.heavy
  def test_leaves_have_the_axes_of_the_batch(self):
    logits = jax.random.normal(jax.random.key(0), (4, 3, 5))
    distribution = jax.jit(lambda x: twohot.TwoHot(x, 2.0))(logits)
    self.assertEqual(distribution.batch_shape, (4, 3))
    self.assertEqual(distribution.event_shape, ())
    row = jax.tree.map(lambda x: x[1], distribution)
    self.assertEqual(row.batch_shape, (3,))
    np.testing.assert_array_equal(row.mean(), distribution.mean()[1])
    np.testing.assert_array_equal(row.mode(), row.mean())
    mapped = jax.vmap(lambda d: d.log_prob(jnp.ones(3)))(distribution)
    np.testing.assert_allclose(
      mapped, distribution.log_prob(jnp.ones((4, 3))), rtol=1e-6
    )
    np.testing.assert_allclose(
      row.bins, twohot.two_hot_bins(5, 2.0), rtol=1e-12
    )

  def test_values_must_have_the_batch_s_shape(self):
    with self.assertRaises(AssertionError):
      twohot.TwoHot(jnp.zeros((4, 5))).log_prob(jnp.zeros((4, 1)))

  def test_samples(self):
    logits = jnp.asarray([[-jnp.inf, 0, -jnp.inf], [-jnp.inf, -jnp.inf, 0]])
    samples = twohot.TwoHot(logits, 1.0).sample(
      seed=jax.random.key(0), sample_shape=(3,)
    )
    expected = np.tile(np.float32([0, np.expm1(1)]), (3, 1))
    np.testing.assert_allclose(samples, expected, rtol=1e-6)


class TwoHotHeadTest(parameterized.TestCase):
  def _make(self, *args, **kwargs):
    net = hk.without_apply_rng(
      hk.transform(lambda x: twohot.TwoHotHead(*args, **kwargs)(x))
    )
    x = jax.random.normal(jax.random.key(1), (4, 3, 6))
    return net, jax.jit(net.init)(jax.random.key(0), x), x

  @parameterized.parameters(255, 254, 41)
  @pytest.mark.heavy
  def test_is_zero_at_first_and_learns(self, num_bins):
    net, params, x = self._make((8, 7), num_bins=num_bins)
    distribution = net.apply(params, x)
    self.assertEqual(distribution.logits.shape, (4, 3, num_bins))
    np.testing.assert_array_equal(distribution.mean(), 0)
    self.assertEqual(
      params['two_hot_head/perceptron/linear_1']['w'].shape, (8, 7)
    )

    def loss(params):
      return -jnp.mean(net.apply(params, x).log_prob(jnp.full((4, 3), 5.0)))

    # Uniform at first, whatever the target.
    np.testing.assert_allclose(loss(params), np.log(num_bins), rtol=1e-5)
    grads = jax.jit(jax.grad(loss))(params)
    self.assertGreater(jnp.abs(grads['two_hot_head/logits']['w']).max(), 0)

  def test_options_reach_the_layers(self):
    net, params, x = self._make(
      (2,), num_bins=5, limit=2.0, norm=False, activation=jnp.sign,
      w_init=jnp.ones,
    )  # fmt: skip
    self.assertNotIn('two_hot_head/perceptron/layer_norm', params)
    distribution = net.apply(params, x)
    np.testing.assert_array_equal(distribution.logits % 2, 0)
    np.testing.assert_allclose(distribution.bins[-1], np.expm1(2))

  def test_sizes(self):
    with self.assertRaisesRegex(ValueError, '`num_bins`'):
      self._make(num_bins=1)
    with self.assertRaisesRegex(ValueError, '`limit`'):
      self._make(limit=-1.0)


if __name__ == '__main__':
  absltest.main()
