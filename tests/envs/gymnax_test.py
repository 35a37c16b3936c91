"""Tests for `hkgraph.envs.gymnax`, on the real package."""

import importlib.util
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import envs
from tests.envs import adapters

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec('gymnax') is None, reason='needs hkgraph[gymnax]'
  ),
  # gymnax before 1.0 asks for 64 bits.
  pytest.mark.filterwarnings('ignore:Explicitly requested dtype'),
  # gymnax before 1.0 has rewards and actions in each other's shapes.
  pytest.mark.filterwarnings('ignore:scatter inputs have incompatible types'),
]


def _cartpole_by_hand(actions, key, limit=None):
  import gymnax

  env, params = gymnax.make('CartPole-v1')

  def reset(key):
    observation, state = env.reset_env(key, params)
    return state, observation

  def step(key, state, action):
    observation, state, reward, *_ = env.step_env(key, state, action, params)
    # Where an episode ends is read off the observation: gymnax's own flag
    # counts, or does not count, a time limit in it.
    fell = jnp.abs(observation[2]) > 12 * math.pi / 180
    left = jnp.abs(observation[0]) > 2.4
    return state, observation, reward, fell | left

  return adapters.walk(*adapters.with_keys(reset, step), actions, key, limit)


class CartPoleTest(parameterized.TestCase):
  @parameterized.parameters(None, 5, 12)
  def test_rows_are_those_of_the_environment_run_by_hand(self, limit):
    env = envs.make('gymnax:CartPole-v1', max_steps=limit)
    actions = adapters.random_actions(env.action_spec(), 80, 2)
    key = jax.random.key(1)
    rows = adapters.run(env, actions, key)
    adapters.assert_rows(rows, _cartpole_by_hand(actions, key, limit), 1e-5)
    adapters.assert_conforms(env, rows)
    last = rows.step_type == adapters.L
    self.assertGreater(last.sum(), 2)
    np.testing.assert_array_equal(
      rows.step_type[1:][last[:-1]], np.full(last[:-1].sum(), adapters.F)
    )
    if limit == 5:
      self.assertEqual(set(np.flatnonzero(last[:, 0]) % 6), {5})
      self.assertEqual(set(rows.discount[last]), {1})
    if limit is None:
      self.assertEqual(set(rows.discount[last]), {0})

  def test_own_limit_truncates(self):
    env = envs.make('gymnax:CartPole-v1', params={'x_threshold': math.inf,
                    'theta_threshold_radians': math.inf})  # fmt: skip
    step = jax.jit(lambda m: env.step(m[0], jnp.int32(0)))
    moment = jax.lax.fori_loop(
      0, 499, lambda i, m: step(m), step(env.reset(jax.random.key(0)))
    )
    self.assertEqual(moment[1].step_type, adapters.L)
    self.assertEqual(moment[1].discount, 1)
    self.assertEqual(moment[0].num_steps, 500)

  def test_specs(self):
    env = envs.make('gymnax:CartPole-v1')
    adapters.assert_is_single(env)
    self.assertEqual(env.action_spec().num_values, 2)
    spec = env.observation_spec()
    self.assertEqual((spec.shape, spec.dtype), ((4,), np.float32))
    np.testing.assert_allclose(spec.maximum[0], 4.8)


class OthersTest(parameterized.TestCase):
  @parameterized.parameters(
    ('Pendulum-v1', (3,), np.float32),  # Actions are vectors.
    ('FourRooms-misc', (4,), np.int32),  # Rewards were booleans.
    ('Catch-bsuite', (10, 5), np.float32),
    ('DiscountingChain-bsuite', (2,), np.float32),
  )
  def test_rows_conform(self, name, shape, dtype):
    env = envs.make(f'gymnax:{name}', max_steps=4)
    actions = adapters.random_actions(env.action_spec(), 10, 2)
    rows = adapters.run(env, actions, jax.random.key(0))
    self.assertEqual(rows.observation.shape, (11, 2, *shape))
    self.assertEqual(rows.observation.dtype, dtype)
    adapters.assert_conforms(env, rows)
    self.assertEqual(list(rows.step_type[:6, 0]), [0, 1, 1, 1, 2, 0])
    self.assertEqual(set(rows.discount.ravel()), {1})

  @parameterized.parameters(
    ('cartpole', {}, "no environment 'cartpole'; did you mean 'CartPole-v1'"),
    ('Breakout', {}, "did you mean 'Breakout-MinAtar'"),
    ('', {}, "there are 'Acrobot-v1', "),
    ('CartPole-v1', {'max_steps': 0}, '`max_steps` must be an integer from 1'),
    (
      'CartPole-v1',
      {'params': {'gravitiy': 1.0}},
      "no parameter 'gravitiy'; did you mean 'gravity'",
    ),
  )
  def test_wrong_names_and_settings(self, name, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      envs.make(f'gymnax:{name}', **kwargs)


if __name__ == '__main__':
  absltest.main()
