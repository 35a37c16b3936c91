"""The layers against NumPy."""

from absl.testing import absltest, parameterized
import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import perceptron


def _transform(*args, **kwargs):
  return hk.without_apply_rng(
    hk.transform(lambda x: perceptron.Perceptron(*args, **kwargs)(x))
  )


def _silu(x):
  return x / (1 + np.exp(-x))


class PerceptronTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(norm=(True, False), lead=((), (3,), (2, 3)))
  def test_numpy(self, norm, lead):
    net = _transform((5, 4), norm=norm)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*lead, 6)).astype(np.float32)
    params = net.init(jax.random.key(0), x)
    params = jax.tree.map(
      lambda p: np.float32(p + 0.1 * rng.standard_normal(p.shape)), params
    )
    h = x
    for end in ('', '_1'):
      layer = params[f'perceptron/linear{end}']
      h = h @ layer['w'] + layer.get('b', 0)
      self.assertEqual('b' in layer, not norm)
      if norm:
        h = h - h.mean(-1, keepdims=True)
        h = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 1e-3)
        scale = params[f'perceptron/layer_norm{end}']
        h = h * scale['scale'] + scale['offset']
      h = _silu(h)
    y = self.variant(net.apply)(params, x)
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-5)

  def test_activation(self):
    net = _transform((3,), activation=lambda x: 0 * x + 7)
    params = net.init(jax.random.key(0), jnp.ones((2, 3)))
    np.testing.assert_array_equal(net.apply(params, jnp.ones((2, 3))), 7)

  def test_no_layers(self):
    net = _transform(())
    x = jnp.arange(3.0)
    params = net.init(jax.random.key(0), x)
    self.assertEmpty(params)
    np.testing.assert_array_equal(net.apply(params, x), x)

  @parameterized.parameters(jnp.bfloat16, jnp.float32)
  @pytest.mark.heavy
  def test_dtype(self, dtype):
    net = _transform((4, 3))
    x = jnp.ones((2, 3), dtype)
    params = net.init(jax.random.key(0), x)
    self.assertEqual(net.apply(params, x).dtype, dtype)
    chex.assert_type(jax.tree.leaves(params), dtype)

  def test_sizes(self):
    with self.assertRaisesRegex(ValueError, r'`sizes`.*got \(4, 0\)'):
      _transform((4, 0)).init(jax.random.key(0), jnp.ones(3))


class FanAvgTest(parameterized.TestCase):
  @parameterized.parameters(((200, 100),), ((3, 3, 50, 150),))
  def test_variance(self, shape):
    draw = lambda init: (  # noqa: E731
      hk.transform(lambda: init(shape, jnp.float32)).apply(
        {}, jax.random.key(0)
      )
    )
    w = np.asarray(draw(perceptron.fan_avg), np.float64)
    self.assertEqual(w.shape, shape)
    pixels = np.prod(shape[:-2])
    variance = 2 / (pixels * (shape[-2] + shape[-1]))
    # The variance of 20,000 numbers strays by a hundredth.
    np.testing.assert_allclose(w.var(), variance, rtol=0.04)
    np.testing.assert_allclose(w.mean(), 0, atol=0.03 * variance**0.5)
    # Cut at two standard deviations of the normal that is cut.
    self.assertLessEqual(np.abs(w).max(), 2 * variance**0.5 / 0.8796)
    self.assertGreater(np.abs(w).max(), 2.2 * variance**0.5)
    haiku = draw(
      hk.initializers.VarianceScaling(1.0, 'fan_avg', 'truncated_normal')
    )
    np.testing.assert_allclose(w.var(), np.var(haiku), rtol=0.05)


if __name__ == '__main__':
  absltest.main()
