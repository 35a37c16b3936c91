"""Tests for `hkgraph.envs.pgx`, on the real package."""

import importlib.util

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import envs
from tests.envs import adapters

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('pgx') is None, reason='needs hkgraph[pgx]'
)


def _by_hand(actions, key, limit=None):
  import pgx

  game = pgx.make('minatar-breakout')

  def reset(key):
    state = game.init(key)
    return state, state.observation

  def step(key, state, action):
    state = game.step(state, action, key)
    return state, state.observation, state.rewards[0], state.terminated

  return adapters.walk(*adapters.with_keys(reset, step), actions, key, limit)


class BreakoutTest(parameterized.TestCase):
  @parameterized.parameters(None, 5)
  @pytest.mark.heavy
  def test_rows_are_those_of_the_game_played_by_hand(self, limit):
    env = envs.make('pgx:minatar-breakout', max_steps=limit)
    actions = adapters.random_actions(env.action_spec(), 60, 2)
    key = jax.random.key(3)
    rows = adapters.run(env, actions, key)
    adapters.assert_rows(rows, _by_hand(actions, key, limit))
    adapters.assert_conforms(env, rows)
    last = rows.step_type == adapters.L
    self.assertGreater(last.sum(), 3)
    if limit is None:
      # The ball that is lost is seen, and costs the whole future.
      self.assertTrue(np.all(rows.discount[last] == 0))
      self.assertTrue(np.all(rows.step_type[1:][last[:-1]] == adapters.F))
    else:
      self.assertEqual(list(np.flatnonzero(last[:, 0])[:1]), [limit])
      self.assertIn(1, rows.discount[last])

  def test_specs(self):
    env = envs.make('pgx:minatar-breakout')
    adapters.assert_is_single(env)
    self.assertEqual(env.action_spec().num_values, 3)
    self.assertEqual(env.observation_spec().shape, (10, 10, 4))
    self.assertEqual(env.observation_spec().dtype, bool)

  def test_settings_are_those_of_the_game(self):
    env = envs.make('pgx:minatar-breakout', use_minimal_action_set=False)
    self.assertEqual(env.action_spec().num_values, 6)

  def test_sticky_actions_depend_on_the_key_alone(self):
    env = envs.make('pgx:minatar-breakout', sticky_action_prob=1.0)
    state, _ = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    still, _ = step(state, jnp.int32(0))
    moved, _ = step(state, jnp.int32(1))  # Sticks to the last one, which is 0.
    self.assertEqual(still.game._pos, moved.game._pos)


class NamesTest(parameterized.TestCase):
  def test_those_that_are_listed_have_one_player_and_no_other_has(self):
    import pgx

    with self.assertRaisesRegex(ValueError, 'one player are') as caught:
      envs.make('pgx:tic_tac_toe')
    listed = str(caught.exception).split('one player are')[1]
    for name in ('2048', 'minatar-asterix', 'minatar-seaquest'):
      self.assertIn(repr(name), listed)
      self.assertEqual(pgx.make(name).num_players, 1)
    for name in ('connect_four', 'hex', 'kuhn_poker'):
      self.assertNotIn(name, listed)

  @parameterized.parameters(
    ('breakout', "no game 'breakout'; did you mean 'minatar-breakout'"),
    ('minatar-brakout', "did you mean 'minatar-breakout'"),
    ('bridge_bidding', 'there are|did you mean'),
    ('', "there are '2048', 'minatar-asterix'"),
    ('chess', "'chess' has 2 players"),
  )
  def test_wrong_names(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      envs.make(f'pgx:{name}')

  @pytest.mark.heavy
  def test_2048_ends_with_an_action_that_is_not_legal(self):
    env = envs.make('pgx:2048')
    state, _ = env.reset(jax.random.key(0))
    legal = np.asarray(state.game.legal_action_mask)
    step = jax.jit(env.step)
    while legal.all():
      state, _ = step(state, jnp.int32(0))
      legal = np.asarray(state.game.legal_action_mask)
    _, row = step(state, jnp.int32(int(np.flatnonzero(~legal)[0])))
    self.assertEqual(row.step_type, adapters.L)
    self.assertEqual(row.discount, 0)
    self.assertEqual(row.reward, -1)


if __name__ == '__main__':
  absltest.main()
