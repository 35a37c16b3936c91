"""World models of observations of all kinds."""

import functools

from absl.testing import absltest, parameterized
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import rssm, world_model

T, B, A, S, K = 3, 2, 2, 2, 3
SPEC = {
  'pose': specs.Array((2,), np.float32),
  'eye': specs.Array((8, 8, 3), np.uint8),
  'kind': specs.DiscreteArray(4),
  'count': specs.Array((), np.int32),
  'grid': specs.Array((2, 3), np.bool_),
}
SCALAR = specs.Array((), np.float32)


def make(spec, core=lambda: rssm.GatedCell(4, 4)):
  def fns():
    model = world_model.WorldModel(
      spec,
      core(),
      num_latents=S,
      num_classes=K,
      hidden_size=4,
      num_layers=1,
      num_bins=5,
      num_channels=2,
      unimix=0.0,
    )

    def everything(observation, action_tm1, is_first, key):
      state = model.initial(is_first.shape[1])
      observed = model.observe(state, observation, action_tm1, is_first, key)
      features = observed.features
      return (
        model.decode(features),
        model.reward(features),
        model.continues(features),
      )

    names = 'initial observe imagine follow reward continues decode prepare'
    return everything, {name: getattr(model, name) for name in names.split()}

  return network_lib.methods(fns)


def observation(spec=SPEC, seed=0):
  rng = np.random.default_rng(seed)

  def draw(spec):
    shape = (T, B, *spec.shape)
    if isinstance(spec, specs.DiscreteArray):
      return jnp.int32(rng.integers(spec.num_values, size=shape))
    if np.issubdtype(spec.dtype, np.floating):
      return jnp.float32(100 * rng.normal(size=shape))
    high = 2 if spec.dtype == np.bool_ else 250
    return jnp.asarray(rng.integers(high, size=shape), spec.dtype)

  return jax.tree.map(draw, spec, is_leaf=lambda x: not isinstance(x, dict))


def rows():
  action_tm1 = jnp.float32(np.random.default_rng(1).normal(size=(T, B, A)))
  is_first = np.zeros((T, B), bool)
  is_first[0] = True
  return action_tm1, jnp.asarray(is_first)


@functools.cache
def model():
  """One of all kinds; its latents are, in effect, the most likely ones."""
  init, fns = make(SPEC)
  key = jax.random.key
  params = jax.jit(init)(key(0), observation(), *rows(), key(1))

  def decide(path, x):
    name = jax.tree_util.keystr(path)
    is_logits = 'posterior_output' in name or 'prior_output' in name
    return x * 1e4 if is_logits else x

  params = jax.tree_util.tree_map_with_path(decide, params)
  return params, fns, jax.jit(fns['observe'])


def observe(given, seed=2):
  params, fns, apply = model()
  state = fns['initial']({}, B)
  return apply(params, state, given, *rows(), jax.random.key(seed))


class ObservationTest(parameterized.TestCase):
  def test_what_is_seen_of_each_kind(self):
    seen = world_model.observed_specs(SPEC)
    self.assertEqual(
      {key: (x.shape, x.dtype) for key, x in seen.items()},
      {
        'count': ((1,), np.float32),
        'eye': ((8, 8, 3), np.uint8),
        'grid': ((6,), np.float32),
        'kind': ((4,), np.float32),
        'pose': ((2,), np.float32),
      },
    )
    (seen,) = world_model.observed_specs(SCALAR).values()
    self.assertEqual(seen.shape, (1,))

  @parameterized.parameters(
    ((8, 8, 1), np.bool_, None, True),
    ((8, 8, 1), np.float32, 1.0, True),
    ((8, 8, 1), np.float32, 2.0, False),
    ((8, 8, 1), np.float32, None, False),
    ((9, 8, 2), np.uint8, None, True),
    ((9, 8, 2), np.uint8, 255, True),
    ((9, 8, 2), np.uint8, 10, False),
    ((7, 8, 2), np.uint8, None, False),
    ((8, 8, 1), np.int32, None, False),
    ((8, 8), np.uint8, None, False),
  )
  def test_what_is_an_image(self, shape, dtype, maximum, is_image):
    spec = specs.Array(shape, dtype)
    if maximum is not None:
      spec = specs.BoundedArray(shape, dtype, 0, maximum)
    (seen,) = world_model.observed_specs(spec).values()
    size = (int(np.prod(shape)),)
    self.assertEqual(seen.shape, shape if is_image else size)

  def test_prepared_as_decoder_and_encoder_read_it(self):
    params, fns, _ = model()
    given = observation()
    prepared = fns['prepare'](params, given)
    self.assertEqual(list(prepared), sorted(SPEC))
    np.testing.assert_array_equal(prepared['kind'], np.eye(4)[given['kind']])
    np.testing.assert_array_equal(prepared['count'][..., 0], given['count'])
    np.testing.assert_array_equal(
      prepared['grid'], given['grid'].reshape(T, B, 6)
    )
    self.assertEqual(prepared['eye'].dtype, jnp.uint8)
    np.testing.assert_array_equal(prepared['eye'], given['eye'])

  @parameterized.parameters(*SPEC)
  @pytest.mark.heavy
  def test_each_key_is_seen(self, key):
    one, two = observation(), observation()
    changed = observation(seed=3)[key][1]
    two[key] = two[key].at[1].set(changed)
    one, two = observe(one), observe(two)
    difference = jnp.abs(one.posterior.logits - two.posterior.logits)
    np.testing.assert_array_equal(difference[0], 0)
    self.assertGreater(difference[1].max(), 1e-2)

  def test_order_of_a_dict_does_not_matter(self):
    given = observation()
    one, two = observe(given), observe(dict(reversed(given.items())))
    np.testing.assert_array_equal(one.features, two.features)

  def test_large_numbers_are_squashed(self):
    given = observation()
    given['pose'] = given['pose'] * 1e6
    self.assertTrue(jnp.all(jnp.isfinite(observe(given).features)))


class HeadsTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_an_untrained_model_foresees_nothing(self):
    params, fns, _ = model()
    features = observe(observation()).features
    np.testing.assert_array_equal(fns['reward'](params, features).mean(), 0)
    continues = fns['continues'](params, features)
    np.testing.assert_array_equal(continues.probs, 0.5)
    self.assertEqual(continues.batch_shape, (T, B))

  @pytest.mark.heavy
  def test_decoded_observations(self):
    params, fns, _ = model()
    given = observation()
    prepared = fns['prepare'](params, given)
    prediction = fns['decode'](params, observe(given).features)
    mean = prediction.mean()
    for key, x in prepared.items():
      self.assertEqual(mean[key].shape, x.shape, key)
    # Squared errors of symlogs, and of brightness in the unit interval.
    expected = np.zeros((T, B))
    for key, x in prepared.items():
      x = np.asarray(x, np.float64)
      value = np.asarray(prediction.values[key], np.float64)
      x = x / 255 if key == 'eye' else np.sign(x) * np.log1p(np.abs(x))
      expected += np.square(value - x).reshape(T, B, -1).sum(-1)
    np.testing.assert_allclose(prediction.loss(prepared), expected, rtol=1e-4)


class ImagineTest(parameterized.TestCase):
  def start(self):
    observed = observe(observation())
    return observed.states, observed.features.reshape(T * B, -1)

  def test_a_policy_reads_features_and_keys_of_its_own(self):
    params, fns, _ = model()
    state, start = self.start()

    def policy(features, key):
      noise = jax.random.normal(key, (T * B, A))
      return noise + features[:, :1], (noise, features)

    features, (noise, read) = fns['imagine'](
      params, state, start, policy, 4, jax.random.key(5)
    )
    self.assertEqual(features.shape, (4, *start.shape))
    np.testing.assert_array_equal(read[0], start)
    np.testing.assert_array_equal(read[1:], features[:-1])
    self.assertEqual(np.unique(noise).size, noise.size)
    # These actions again: the same rows.
    action = noise + read[:, :, :1]
    followed = fns['follow'](params, state, start, action, jax.random.key(6))
    np.testing.assert_allclose(followed, features, rtol=1e-4, atol=1e-5)


class WrongInputTest(parameterized.TestCase):
  @parameterized.parameters(
    ((9, 8, 3), '9 x 8 cannot be made.*multiples of 2; 10 x 8'),
    ((11, 13, 1), '11 x 13 cannot be made.*12 x 14'),
  )
  def test_images_that_the_decoder_cannot_make(self, shape, message):
    spec = {'eye': specs.Array(shape, np.uint8)}
    with self.assertRaisesRegex(ValueError, message):
      init, _ = make(spec)
      init(jax.random.key(0), observation(spec), *rows(), jax.random.key(1))

  @parameterized.parameters((8, 10), (16, 16), (64, 48), (80, 72))
  def test_images_that_it_can(self, *size):
    spec = {'eye': specs.Array((*size, 3), np.uint8)}
    init, fns = make(spec)
    given = jax.eval_shape(lambda: observation(spec))
    params = jax.eval_shape(
      init, jax.random.key(0), given, *rows(), jax.random.key(1)
    )
    features = jax.ShapeDtypeStruct((T, B, 4 + S * K), np.float32)
    decoded = jax.eval_shape(fns['decode'], params, features)
    self.assertEqual(decoded.values['eye'].shape, (T, B, *size, 3))

  @parameterized.parameters(
    ({'a': {'b': SCALAR}}, "not nested, got {'b': .* for 'a'"),
    ((SCALAR, SCALAR), 'or a dict of them.*got .* for .observation'),
    (None, 'got None'),
    (specs.StringArray(()), 'bools, integers or floats, got StringArray'),
    (specs.Array((2,), np.complex64), 'bools, integers or floats.*complex'),
  )
  def test_observations_of_another_kind(self, spec, message):
    with self.assertRaisesRegex(TypeError, message):
      world_model.observed_specs(spec)

  def test_no_core(self):
    with self.assertRaisesRegex(TypeError, '`core` must be an hk.RNNCore'):
      init, _ = make(SCALAR, core=lambda: hk.Linear(3))
      init(jax.random.key(0), observation(SCALAR), *rows(), jax.random.key(1))


if __name__ == '__main__':
  absltest.main()
