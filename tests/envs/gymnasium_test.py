"""Tests for `hkgraph.envs.gymnasium`, on the real package."""

import functools
import importlib.util

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import envs
from hkgraph.envs import wrappers
from tests.envs import adapters

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('gymnasium') is None,
  reason='needs hkgraph[gymnasium]',
)

_KEY = jax.random.key(5)


def _by_hand(name, actions, key, **kwargs):
  """Rows of single environments, each reset by hand after its end."""
  import gymnasium

  seeds = jax.random.bits(key, (actions.shape[1],), jnp.uint32)
  columns = []
  for b, seed in enumerate(seeds):
    env = gymnasium.make(name, **kwargs)
    column = [(adapters.F, 0.0, 1.0, env.reset(seed=int(seed))[0])]
    for action in actions[:, b]:
      if column[-1][0] == adapters.L:
        column.append((adapters.F, 0.0, 1.0, env.reset()[0]))
        continue
      observation, reward, terminated, truncated, _ = env.step(action)
      kind = adapters.L if terminated or truncated else adapters.M
      column.append((kind, reward, 1.0 - terminated, observation))
    columns.append(column)
  names = ('step_type', 'reward', 'discount', 'observation')
  return {
    name: np.array([[row[i] for row in column] for column in columns])
    .swapaxes(0, 1)
    .astype(np.float32)
    for i, name in enumerate(names)
  }


class CartPoleTest(parameterized.TestCase):
  @parameterized.parameters(None, 5)
  def test_rows_are_those_of_single_environments(self, limit):
    env = envs.make('gymnasium:CartPole-v1', max_steps=limit)
    actions = adapters.random_actions(env.action_spec(), 60, 3)
    rows = adapters.run(env, actions, _KEY)
    kwargs = {} if limit is None else {'max_episode_steps': limit}
    expected = _by_hand('CartPole-v1', actions, _KEY, **kwargs)
    adapters.assert_rows(rows, expected)
    adapters.assert_conforms(env, rows)
    last = rows.step_type == adapters.L
    self.assertGreater(last.sum(), 4)
    if limit is None:
      self.assertEqual(set(rows.discount[last]), {0})
    else:
      self.assertEqual(set(np.flatnonzero(last[:, 0]) % 6), {5})
      self.assertEqual(set(rows.discount[last]), {1})

  def test_one_rollout_compiles_once_and_goes_on_where_it_ended(self):
    env = envs.make('gymnasium:CartPole-v1')
    actions = adapters.random_actions(env.action_spec(), 40, 2)
    batch = wrappers.EpisodeStatistics(wrappers.vectorize(env, 2))

    @functools.partial(jax.jit, donate_argnums=0)
    def rollout(state, actions):
      def step(state, action):
        state, row = batch.step(state, action)
        return state, (row, state.episode_length)

      return jax.lax.scan(step, state, actions)

    state, first = jax.jit(batch.reset)(_KEY)
    state, (once, _) = rollout(state, actions[:20])
    state, (again, length) = rollout(state, actions[20:])
    self.assertEqual(rollout._cache_size(), 1)
    rows = jax.tree.map(
      lambda x, y, z: np.concatenate([x[None], y, z]), first, once, again
    )
    adapters.assert_rows(rows, _by_hand('CartPole-v1', actions, _KEY))
    np.testing.assert_array_equal(length[again.step_type == adapters.F], 0)

  def test_rows_depend_on_nothing_before_the_reset(self):
    env = envs.make('gymnasium:CartPole-v1')
    batch = wrappers.vectorize(env, 2)
    action = jnp.zeros(2, jnp.int32)

    def three():
      state, row = batch.reset(_KEY)
      rows = [row]
      for _ in range(2):
        state, row = batch.step(state, action)
        rows.append(row)
      return rows

    chex.assert_trees_all_equal(three(), three())
    state, other = batch.reset(jax.random.key(6))
    self.assertFalse(np.any(three()[0].observation == other.observation))
    batch.close()
    chex.assert_trees_all_equal(three()[0], batch.reset(_KEY)[1])

  def test_a_state_is_stepped_once(self):
    batch = wrappers.vectorize(envs.make('gymnasium:CartPole-v1'), 2)
    action = jnp.zeros(2, jnp.int32)
    old, _ = batch.reset(_KEY)
    batch.step(old, action)
    with self.assertRaisesRegex(RuntimeError, 'stepped only once'):
      jax.block_until_ready(batch.step(old, action))

  def test_nothing_runs_on_the_host_while_shapes_are_asked_for(self):
    batch = wrappers.vectorize(envs.make('gymnasium:CartPole-v1'), 2)
    state, row = jax.eval_shape(batch.reset, _KEY)
    self.assertEqual(row.observation.shape, (2, 4))
    self.assertIsNone(batch._envs)

  def test_one_alone_cannot_run(self):
    env = envs.make('gymnasium:CartPole-v1')
    self.assertFalse(hasattr(env, 'num_envs'))
    with self.assertRaisesRegex(TypeError, '`wrappers.vectorize'):
      env.reset(_KEY)
    with self.assertRaisesRegex(TypeError, 'give a time limit as `max_steps`'):
      wrappers.vectorize(wrappers.TimeLimit(env, 3), 2).reset(_KEY)

  def test_wrong_keys_and_actions(self):
    batch = wrappers.vectorize(envs.make('gymnasium:CartPole-v1'), 2)
    with self.assertRaisesRegex(TypeError, 'jax.random.key'):
      batch.reset(jax.random.PRNGKey(0))
    state, _ = batch.reset(_KEY)
    with self.assertRaisesRegex(ValueError, r'shape \(2,\)'):
      batch.step(state, jnp.zeros(3, jnp.int32))
    with self.assertRaisesRegex(ValueError, 'between 0 and 1'):
      batch.step(state, jnp.array([0, 2]))


class PendulumTest(absltest.TestCase):
  def test_rows_are_those_of_single_environments(self):
    env = envs.make('gymnasium:Pendulum-v1', max_steps=4)
    self.assertEqual(env.action_spec().shape, (1,))
    self.assertEqual(env.action_spec().maximum, 2)
    actions = adapters.random_actions(env.action_spec(), 10, 2)
    rows = adapters.run(env, actions, _KEY)
    expected = _by_hand('Pendulum-v1', actions, _KEY, max_episode_steps=4)
    adapters.assert_rows(rows, expected, 1e-6)
    adapters.assert_conforms(env, rows)


@functools.cache
def _register():
  """A task of dicts: sees two arrays, and is paid what it was told to do."""
  import gymnasium
  from gymnasium import spaces

  class Told(gymnasium.Env):
    observation_space = spaces.Dict(
      {
        'image': spaces.Box(0, 255, (2, 2), np.uint8),
        'place': spaces.Discrete(3, start=5),
      }
    )
    action_space = spaces.Dict(
      {
        'push': spaces.Box(-1.0, 2.0, (2,), np.float32),
        'turn': spaces.Discrete(4, start=10),
      }
    )

    def reset(self, *, seed=None, options=None):
      super().reset(seed=seed)
      return {'image': np.full((2, 2), 7, np.uint8), 'place': np.int64(6)}, {}

    def step(self, action):
      reward = 100 * action['turn'] + action['push'].sum()
      return *self.reset()[:1], float(reward), True, True, {}

  gymnasium.register('Told-v0', Told)


class SpacesTest(parameterized.TestCase):
  def test_dicts_bounds_and_first_numbers(self):
    _register()
    env = envs.make('gymnasium:Told-v0')
    spec = env.observation_spec()
    self.assertEqual(spec['image'].dtype, np.uint8)
    self.assertEqual((spec['place'].minimum, spec['place'].maximum), (5, 7))
    self.assertEqual(env.action_spec()['turn'].num_values, 4)
    batch = wrappers.vectorize(env, 2)
    state, row = batch.reset(_KEY)
    self.assertEqual(row.observation['image'].dtype, jnp.uint8)
    action = {
      'push': jnp.array([[0.5, 1.0], [-9.0, 9.0]]),
      'turn': jnp.array([0, 3]),
    }
    _, row = jax.jit(batch.step)(state, action)
    # What is out of bounds is brought within them: -1 and 2.
    expected = [100 * 10 + 0.5 + 1.0, 100 * 13 - 1 + 2]
    np.testing.assert_array_equal(row.reward, expected)
    # A termination comes before a truncation.
    np.testing.assert_array_equal(row.discount, 0)
    np.testing.assert_array_equal(row.step_type, adapters.L)

  @parameterized.parameters(
    ('CartPole', {}, "did you mean 'CartPole-v.'"),
    ('cartpole-v1', {}, "did you mean .*'CartPole-v1'"),
    ('gymnasium:Nope-v0', {}, 'cannot make .gymnasium:Nope-v0'),
    ('CartPole-v1', {'max_steps': 0}, '`max_steps` must be an integer from 1'),
  )
  def test_wrong_names_and_settings(self, name, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      envs.make(f'gymnasium:{name}', **kwargs)


if __name__ == '__main__':
  absltest.main()
