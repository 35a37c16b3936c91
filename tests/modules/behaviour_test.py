"""Actor and critic on the features of a world model."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import behaviour, distributions

DISCRETE = specs.DiscreteArray(4)
SEVERAL = specs.BoundedArray((2,), np.int32, 0, (1, 3))
BODY = specs.BoundedArray((2,), np.float32, -2.0, 4.0)


def of(make, params=None, scale=1.0, features=None):
  """What a module makes of features, its parameters times `scale`."""
  module = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
  if features is None:
    features = np.random.default_rng(0).normal(size=(3, 2, 5))
  features = jnp.asarray(features)
  params = module.init(jax.random.key(0), features)
  params = jax.tree.map(lambda x: scale * x, params)
  return params, module.apply(params, features)


class ActorTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 0.01, 0.4)
  def test_mixture_of_one_choice(self, unimix):
    logits = np.array([[3.0, -1.0, 0.5, -200.0]], np.float32)
    # Without hidden layers the layer of the policy is all there is.
    module = hk.without_apply_rng(
      hk.transform(lambda x: behaviour.Actor(DISCRETE, [], unimix=unimix)(x))
    )
    params = {'actor/policy': {'w': np.eye(4, dtype=np.float32)}}
    params['actor/policy']['b'] = np.zeros(4, np.float32)
    policy = module.apply(params, jnp.asarray(logits))
    softmax = np.exp(logits) / np.exp(logits).sum()
    expected = (1 - unimix) * softmax + unimix / 4
    np.testing.assert_allclose(policy.probs, expected, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(
      policy.log_prob(jnp.asarray([1])), np.log(expected[:, 1]), rtol=1e-5
    )
    if unimix:
      # The least likely action, too, has an entropy and a gradient.
      np.testing.assert_allclose(
        policy.entropy(), -np.sum(expected * np.log(expected), -1), rtol=1e-4
      )

  def test_begins_near_uniform(self):
    _, policy = of(lambda: behaviour.Actor(DISCRETE, [6]))
    self.assertEqual(policy.batch_shape, (3, 2))
    np.testing.assert_allclose(policy.probs, 0.25, atol=0.02)

  def test_several_choices_are_mixed_each_by_its_own_number(self):
    make = lambda: behaviour.Actor(SEVERAL, [], unimix=0.2)  # noqa: E731
    _, policy = of(make, scale=1e6)
    # Two actions, padded to four; then four.
    probs = np.asarray(policy.distribution.probs)
    self.assertEqual(probs.shape, (3, 2, 2, 4))
    np.testing.assert_array_equal(probs[..., 0, 2:], 0)
    two, four = np.sort(probs[..., 0, :2]), np.sort(probs[..., 1, :])
    one = np.ones((3, 2, 1))
    np.testing.assert_allclose(two, one * [0.1, 0.9], rtol=1e-4)
    np.testing.assert_allclose(four, one * [0.05, 0.05, 0.05, 0.85], rtol=1e-4)
    action = distributions.sample(policy, jax.random.key(0))
    chex.assert_tree_all_finite(
      (policy.log_prob(action), policy.entropy(), policy.mode())
    )
    self.assertEqual(policy.log_prob(action).shape, (3, 2))

  @pytest.mark.heavy
  def test_gradients_beside_padding_are_finite(self):
    module = hk.without_apply_rng(
      hk.transform(lambda x: behaviour.Actor(SEVERAL, [])(x))
    )
    x = jnp.ones((1, 5))
    params = module.init(jax.random.key(0), x)

    def entropy(params):
      policy = module.apply(params, x)
      action = jnp.zeros((1, 2), jnp.int32)
      return jnp.sum(policy.entropy() + policy.log_prob(action))

    grads = jax.grad(entropy)(params)
    chex.assert_tree_all_finite(grads)
    self.assertGreater(jnp.abs(grads['actor/policy']['b']).min(), 1e-4)

  def test_impossible_choices_without_a_uniform_share(self):
    module = hk.without_apply_rng(
      hk.transform(lambda x: behaviour.Actor(DISCRETE, [], unimix=0.0)(x))
    )
    params = {'actor/policy': {'w': np.eye(4, dtype=np.float32)}}
    params['actor/policy']['b'] = np.zeros(4, np.float32)
    x = jnp.asarray([[0.0, 0.0, 0.0, -500.0]])

    def log_prob(params):
      return module.apply(params, x).log_prob(jnp.asarray([0])).sum()

    grads = jax.grad(log_prob)(params)
    np.testing.assert_allclose(
      grads['actor/policy']['b'], [2 / 3, -1 / 3, -1 / 3, 0], rtol=1e-5
    )

  def test_bounded_numbers_are_not_mixed(self):
    one, two = (
      of(lambda unimix=unimix: behaviour.Actor(BODY, [6], unimix=unimix))[1]
      for unimix in (0.0, 0.9)
    )
    self.assertIsInstance(one, distributions.TanhNormal)
    np.testing.assert_array_equal(one.loc, two.loc)
    np.testing.assert_array_equal(one.scale, two.scale)

  @pytest.mark.heavy
  def test_a_dict_of_heads(self):
    spec = {'mouth': DISCRETE, 'arm': BODY, 'legs': SEVERAL}
    params, policy = of(lambda: behaviour.Actor(spec, [6], unimix=0.5))
    self.assertEqual(set(policy), set(spec))
    # One layer for all: 4 of the arm, 6 of the legs, 4 of the mouth.
    self.assertEqual(params['actor/policy']['w'].shape, (6, 14))
    self.assertGreaterEqual(policy['mouth'].probs.min(), 0.125)
    np.testing.assert_array_equal(
      policy['legs'].distribution.probs[..., 0, 2:], 0
    )
    action = distributions.sample(policy, jax.random.key(0))
    self.assertEqual(action['arm'].shape, (3, 2, 2))

  @pytest.mark.heavy
  def test_policies_of_bfloat16_are_float32(self):
    features = jnp.ones((2, 5), jnp.bfloat16)
    module = hk.without_apply_rng(
      hk.transform(lambda x: behaviour.Actor(DISCRETE, [6])(x))
    )
    params = module.init(jax.random.key(0), features.astype(jnp.float32))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    policy = module.apply(params, features)
    self.assertEqual(policy.logits.dtype, jnp.float32)


class CriticTest(parameterized.TestCase):
  def test_begins_at_0(self):
    _, value = of(lambda: behaviour.Critic([6], num_bins=255))
    self.assertEqual(value.batch_shape, (3, 2))
    np.testing.assert_array_equal(value.mean(), 0)
    self.assertEqual(value.logits.shape, (3, 2, 255))


if __name__ == '__main__':
  absltest.main()
