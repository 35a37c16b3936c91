"""Decoders: losses by hand, shapes, and images that cannot be made."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import decoders


def _array(shape, dtype=np.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


SPEC = {
  'vector': _array((3,)),
  'number': specs.BoundedArray((), np.int32, 0, 9),
  'grid': _array((2, 7, 8), np.uint8),
  'image': _array((8, 16, 2), np.uint8),
  'floats': _array((8, 8, 1)),
}


def _make(spec, lead=(2, 3), dtype=np.float32, **kwargs):
  kwargs = {'hidden_sizes': (6,), 'channels': (5, 4, 3)} | kwargs
  net = hk.without_apply_rng(
    hk.transform(lambda x: decoders.Decoder(spec, **kwargs)(x))
  )
  x = jax.random.normal(jax.random.key(1), (*lead, 4), dtype)
  params = jax.jit(net.init)(jax.random.key(0), x)
  return jax.jit(net.apply), params, x


def _observation(lead):
  rng = np.random.default_rng(0)
  return {
    'vector': np.float32(100 * rng.standard_normal((*lead, 3))),
    'number': rng.integers(0, 9, lead).astype(np.int32),
    'grid': rng.integers(0, 255, (*lead, 2, 7, 8)).astype(np.uint8),
    'image': rng.integers(0, 255, (*lead, 8, 16, 2)).astype(np.uint8),
    'floats': np.float32(rng.random((*lead, 8, 8, 1))),
  }


def _symlog(x):
  return np.sign(x) * np.log1p(np.abs(x))


class PredictionTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_numbers(self):
    prediction = decoders.Prediction(
      values={
        'a': jnp.asarray([[1.0, 0.0], [0.0, -1.0]]),
        'b': jnp.full((2, 8, 8, 1), 0.25),
      },
      kinds=(
        decoders.LeafKind(shape=(2,), scale=None),
        decoders.LeafKind(shape=(8, 8, 1), scale=255.0),
      ),
    )
    observation = {
      # Symlogs 1, 2 and 0, -1.
      'a': jnp.asarray([[np.e - 1, np.e**2 - 1], [0.0, 1 - np.e]]),
      'b': jnp.stack([jnp.full((8, 8, 1), n, jnp.uint8) for n in (0, 255)]),
    }
    loss = self.variant(lambda p, x: p.loss(x))(prediction, observation)
    expected = [4 + 64 * 0.25**2, 0 + 64 * 0.75**2]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    mean = self.variant(lambda p: p.mean())(prediction)
    np.testing.assert_allclose(
      mean['a'], [[np.e - 1, 0], [0, 1 - np.e]], rtol=1e-5
    )
    np.testing.assert_allclose(mean['b'], np.full((2, 8, 8, 1), 255 / 4))

  def test_shapes_must_agree(self):
    kind = decoders.LeafKind(shape=(2,), scale=None)
    prediction = decoders.Prediction(values=jnp.zeros((3, 2)), kinds=(kind,))
    for wrong in (jnp.zeros(2), {'a': jnp.zeros((3, 2))}):
      with self.assertRaises(AssertionError):
        prediction.loss(wrong)


class DecoderTest(chex.TestCase):
  @parameterized.parameters(((),), ((3,),), ((2, 3),))
  @pytest.mark.heavy
  def test_every_leaf_and_row(self, lead):
    apply, params, x = _make(SPEC, lead)
    prediction = apply(params, x)  # Leaves the jitted function as it is.
    observation = _observation(lead)
    mean = jax.jit(lambda p: p.mean())(prediction)
    chex.assert_trees_all_equal_shapes(mean, observation)
    v = jax.device_get(prediction.values)
    errors = {
      key: np.square(v[key] - _symlog(np.float32(observation[key])))
      for key in ('vector', 'number', 'grid')
    }
    errors['image'] = np.square(v['image'] - observation['image'] / 255)
    errors['floats'] = np.square(v['floats'] - observation['floats'])
    expected = sum(e.reshape(*lead, -1).sum(-1) for e in errors.values())
    loss = jax.jit(lambda p, x: p.loss(x))(prediction, observation)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    for key in ('image', 'floats'):
      self.assertTrue(np.all((v[key] > 0) & (v[key] < 1)))
    np.testing.assert_allclose(mean['image'], 255 * v['image'], rtol=1e-5)
    np.testing.assert_allclose(mean['floats'], v['floats'])

  @pytest.mark.heavy
  def test_rows_do_not_mix(self):
    apply, params, x = _make(SPEC)
    all_rows = apply(params, x)
    for i in np.ndindex(x.shape[:2]):
      alone = apply(params, x[i])
      chex.assert_trees_all_close(
        alone.values,
        jax.tree.map(lambda v, i=i: v[i], all_rows.values),
        rtol=1e-4,
        atol=1e-5,
      )

  def test_vector_in_numpy(self):
    spec = (_array((2,)), _array((2, 2)))
    apply, params, x = _make(spec, (3,))
    hidden = params['decoder/perceptron/linear']['w']
    h = np.asarray(x) @ hidden
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1)[:, None] + 1e-3)
    h = h / (1 + np.exp(-h))
    y = h @ params['decoder/vectors']['w']  # Biases are 0 at first.
    first, second = apply(params, x).values
    np.testing.assert_allclose(first, y[:, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
      second, y[:, 2:].reshape(3, 2, 2), rtol=1e-4, atol=1e-5
    )

  @parameterized.parameters((4,), (5,))
  @pytest.mark.heavy
  def test_image_grows_from_the_smallest_grid(self, kernel_size):
    apply, params, x = _make(
      _array((8, 24, 2), np.uint8), channels=(5, 4, 3), kernel_size=kernel_size
    )
    self.assertEqual(params['decoder/grid']['w'].shape, (4, 1 * 3 * 5))
    sizes = [
      params[f'decoder/conv2_d_transpose{end}']['w'].shape
      for end in ('', '_1', '_2')
    ]
    k = (kernel_size,) * 2
    self.assertEqual(sizes, [(*k, 4, 5), (*k, 3, 4), (*k, 2, 3)])
    self.assertNotIn('decoder/perceptron/linear', params)
    values = apply(params, x).values
    self.assertEqual(values.shape, (2, 3, 8, 24, 2))
    # Every pixel hears of the features.
    slopes = jax.jit(jax.jacobian(lambda x: apply(params, x).values))(x[0, 0])
    self.assertTrue(np.all(np.any(slopes != 0, axis=-1)))

  @pytest.mark.heavy
  def test_learns(self):
    spec = {'v': _array((2,)), 'i': _array((8, 8, 1), np.uint8)}
    apply, params, x = _make(spec, (2,), channels=(8, 8))
    x = jnp.stack([jnp.ones(4), -jnp.ones(4)])
    target = {
      'v': jnp.asarray([[100.0, -3.0], [0.0, 7.0]]),
      'i': jnp.zeros((2, 8, 8, 1), jnp.uint8).at[0, :4].set(255),
    }

    def loss(params):
      return jnp.mean(apply(params, x).loss(target))

    @jax.jit
    def descend(params):
      def body(params, _):
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), value

      return jax.lax.scan(body, params, None, 200)

    params, losses = descend(params)
    self.assertLess(losses[-1], 0.05 * losses[0])
    mean = apply(params, x).mean()
    np.testing.assert_allclose(mean['v'], target['v'], rtol=0.3, atol=0.3)
    bright, dark = np.mean(mean['i'][0, :4]), np.mean(mean['i'][1])
    self.assertGreater(bright, 200)
    self.assertLess(dark, 55)

  @pytest.mark.heavy
  def test_half_precision(self):
    apply, params, x = _make(SPEC, dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(params), jnp.bfloat16)
    prediction = apply(params, x)
    chex.assert_type(jax.tree.leaves(prediction.values), jnp.bfloat16)
    self.assertEqual(prediction.loss(_observation((2, 3))).dtype, jnp.float32)

  @parameterized.parameters(
    (_array((7, 9, 3), np.uint8), None),  # Too small for an image.
    (_array((8, 8, 1), np.int32), None),  # Integers of any size.
    (_array((8, 8), np.uint8), None),
    (_array((8, 8, 1), np.bool_), 1.0),
    (_array((8, 8, 1), jnp.bfloat16), 1.0),
    (_array((8, 8, 1), np.uint8), 255.0),
  )
  def test_what_is_an_image(self, spec, scale):
    apply, params, x = _make(spec, (2,))
    prediction = jax.eval_shape(apply, params, x)
    self.assertEqual(prediction.kinds[0].scale, scale)
    self.assertEqual(prediction.values.shape, (2, *spec.shape))

  @parameterized.parameters(
    ((10, 12, 3), 3, r'10 x 12 .* multiples of 8; 16 x 16 or at most 1 `ch'),
    ((9, 16, 1), 2, r'multiples of 4; 12 x 16 would fit'),
    ((16, 16, 1), 5, r'multiples of 32; 32 x 32 or at most 4 `channels`'),
  )
  def test_images_that_cannot_be_made(self, shape, num_layers, message):
    with self.assertRaisesRegex(ValueError, message):
      _make(_array(shape, np.uint8), channels=(2,) * num_layers)

  def test_wrong_arguments(self):
    for spec in ({}, ()):
      with self.assertRaisesRegex(ValueError, 'nothing to predict'):
        _make(spec)
    with self.assertRaisesRegex(TypeError, 'a shape and a dtype.*got 3'):
      _make((3,))
    for name in ('hidden_sizes', 'channels'):
      with self.assertRaisesRegex(ValueError, f'`{name}`'):
        _make(_array((3,)), **{name: (0,)})
    with self.assertRaisesRegex(ValueError, '`kernel_size`'):
      _make(_array((3,)), kernel_size=0)


if __name__ == '__main__':
  absltest.main()
