"""Tests for `hkgraph.envs.navix`, on the real package."""

import importlib.util

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import envs
from tests.envs import adapters

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('navix') is None, reason='needs hkgraph[navix]'
)

_NAME = 'Navix-Empty-Random-5x5-v0'


def _by_hand(actions, key, limit):
  """Rows by navix's own step, which would defer a reset of its own."""
  import navix

  env = navix.make(_NAME, max_steps=limit)

  def reset(key):
    moment = env.reset(key)
    return moment, moment.observation

  def step(moment, action):
    moment = env.step(moment, action)
    terminated = moment.is_termination()
    return moment, moment.observation, moment.reward, terminated

  return adapters.walk(jax.jit(reset), jax.jit(step), actions, key, limit)


class EmptyTest(parameterized.TestCase):
  @parameterized.parameters(25, 5)
  def test_rows_are_those_of_the_environment_run_by_hand(self, limit):
    env = envs.make(f'navix:{_NAME}', max_steps=limit)
    # Of seven actions only turning and walking leads anywhere.
    actions = adapters.random_actions(env.action_spec(), 150, 2) % 3
    key = jax.random.key(4)
    rows = adapters.run(env, actions, key)
    adapters.assert_rows(rows, _by_hand(actions, key, limit))
    adapters.assert_conforms(env, rows)
    last = rows.step_type == adapters.L
    # Some are cut, and some reach the goal, which is worth 1.
    self.assertEqual(set(rows.discount[last]), {0, 1})
    np.testing.assert_array_equal(rows.reward[last], 1 - rows.discount[last])
    np.testing.assert_array_equal(
      rows.step_type[1:][last[:-1]], np.full(last[:-1].sum(), adapters.F)
    )

  def test_specs(self):
    env = envs.make('navix:Navix-Empty-5x5-v0')
    adapters.assert_is_single(env)
    self.assertEqual(env.action_spec().num_values, 7)
    spec = env.observation_spec()
    self.assertEqual((spec.shape, spec.dtype), ((5, 5, 3), np.uint8))
    self.assertEqual(env.reward_spec().minimum, -1)

  def test_specs_can_be_read_within_jit(self):
    env = envs.make('navix:Navix-Empty-5x5-v0', flatten=True)
    seen = []

    def read(x):
      seen.append((env.action_spec(), env.observation_spec()))
      return x

    jax.jit(read)(0)
    self.assertEqual(seen, [(env.action_spec(), env.observation_spec())])

  def test_flat_observations_are_the_same_numbers(self):
    key = jax.random.key(0)
    square = envs.make(f'navix:{_NAME}')
    flat = envs.make(f'navix:{_NAME}', flatten=True)
    (_, row), (_, flat_row) = square.reset(key), flat.reset(key)
    np.testing.assert_array_equal(
      np.ravel(row.observation), flat_row.observation
    )
    self.assertEqual(flat.observation_spec().shape, (75,))
    self.assertEqual(flat_row.observation.dtype, jnp.uint8)

  @parameterized.parameters(('rgb', (40, 40, 3)), ('categorical', (5, 5)))
  def test_other_observations(self, observation, shape):
    env = envs.make(f'navix:{_NAME}', observation=observation, max_steps=3)
    rows = adapters.run(env, np.full((5, 1), 2, np.int32), jax.random.key(0))
    self.assertEqual(rows.observation.shape[2:], shape)
    adapters.assert_conforms(env, rows)

  def test_pictures_are_in_the_state_only_if_they_are_seen(self):
    def size(**kwargs):
      env = envs.make('navix:Navix-Empty-5x5-v0', **kwargs)
      state, _ = jax.eval_shape(env.reset, jax.random.key(0))
      return sum(x.size for x in jax.tree.leaves(state))

    self.assertGreater(size(observation='rgb'), 10 * size())

  @parameterized.parameters(
    ('Empty-5x5', {}, "did you mean 'Navix-Empty-5x5-v0'"),
    ('navix-empty-5x5-v0', {}, "did you mean 'Navix-Empty-5x5-v0'"),
    (
      'Navix-Empty-5x5-v0',
      {'observation': 'symbol'},
      "no observation 'symbol'; did you mean 'symbolic'",
    ),
    ('Navix-Empty-5x5-v0', {'max_steps': 0}, '`max_steps` must be'),
  )
  def test_wrong_names_and_settings(self, name, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      envs.make(f'navix:{name}', **kwargs)


if __name__ == '__main__':
  absltest.main()
