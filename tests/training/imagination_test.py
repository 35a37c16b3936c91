"""Tests of what a world model is shown, and of what it is compared with."""

import dataclasses
from typing import Any

from absl.testing import absltest, parameterized
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.envs import delayed_recall, protocol
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import dreamer
from hkgraph.training import imagination

_LENGTH = 6  # Rows of an episode.


class _Adding:
  """Adds the action to what is observed; the reward is the action."""

  def reset(self, key):
    state = {
      'row': jnp.int32(0),
      'sum': jax.random.uniform(key, minval=1.0, maxval=2.0),
    }
    return state, protocol.restart(self.reward_spec(), state['sum'][None])

  def step(self, state, action):
    state = {'row': state['row'] + 1, 'sum': state['sum'] + action}
    over = state['row'] == _LENGTH - 1
    return state, protocol.transition(action, state['sum'][None], over)

  def observation_spec(self):
    return specs.Array((1,), np.float32)

  def action_spec(self):
    return specs.Array((), np.float32)

  def reward_spec(self):
    return specs.Array((), np.float32)

  def discount_spec(self):
    return protocol.discount_spec()


@dataclasses.dataclass(frozen=True)
class _Agent(agent_lib.Agent):
  foresee: Any


def _act(params, state, key, timestep, *, deterministic=False):
  """Acts by `bias + rows seen`; a sample adds noise."""
  seen = jnp.where(timestep.first(), 0, state.carry)
  action = params + state.statistics + seen
  if not deterministic:
    action += jax.random.normal(key, action.shape)
  output = agent_lib.ActorOutput(
    # The world model gets it in the policy's space, twice as large.
    action=2 * action,
    environment_action=action,
    log_prob=action,
    value=action,
  )
  return output, state.replace(carry=seen + 1)


def _foresee(params, timestep, action, key, num_context):
  """Knows the environment, but is wrong by `params` after the context."""
  del key
  x = timestep.observation
  change = jnp.concatenate([jnp.zeros_like(x[:1]), action[:-1, :, None] / 2])
  known = jnp.arange(len(x)) < num_context
  wrong = jnp.where(known, 0, params)[:, None]
  return dreamer.Foreseen(
    observation={
      'observation': x[:1] + jnp.cumsum(change, 0) + wrong[..., None]
    },
    target={'observation': x},
    reward=change[..., 0] + 2 * wrong,
    discount=jnp.full(timestep.reward.shape, 0.75),
  )


_AGENT = _Agent(
  init=None,
  initial_carry=lambda batch_size, key=None: jnp.full(batch_size, 100.0),
  act=_act,
  update=None,
  foresee=_foresee,
)
_PARAMS, _STATISTICS = 0.5, 2.0


def _imagine(agent=_AGENT, seed=0, **kwargs):
  return imagination.imagine(
    agent, _Adding(), _PARAMS, _STATISTICS, jax.random.key(seed), **kwargs
  )


class ImagineTest(parameterized.TestCase):
  def test_rows_and_actions_belong_together(self):
    got = _imagine(num_context=2, horizon=3)
    self.assertEqual((got.num_context, got.num_rows), (2, 5))
    # The action at row t is 2.5 + t, and leads into row t + 1.
    actions = _PARAMS + _STATISTICS + np.arange(4)
    np.testing.assert_allclose(got.reward, [np.nan, *actions], rtol=1e-6)
    x = got.observation['observation']
    self.assertEqual(x.shape, (5, 1))
    np.testing.assert_allclose(np.diff(x[:, 0]), actions, rtol=1e-5)
    wrong = np.array([0, 0, 1, 1, 1]) * _PARAMS
    np.testing.assert_allclose(
      got.imagined_observation['observation'], x + wrong[:, None], rtol=1e-5
    )
    np.testing.assert_allclose(
      got.imagined_reward, got.reward + 2 * wrong, rtol=1e-5
    )
    np.testing.assert_array_equal(got.discount, [np.nan, 1, 1, 1, 1])
    np.testing.assert_array_equal(got.imagined_discount, [np.nan] + [0.75] * 4)

  @parameterized.parameters(4, 5, 20)
  def test_rows_of_the_next_episode_are_left_out(self, horizon):
    got = _imagine(num_context=2, horizon=horizon)
    self.assertEqual(got.num_rows, _LENGTH)
    np.testing.assert_array_equal(got.discount, [np.nan, 1, 1, 1, 1, 0])
    self.assertLen(got.observation['observation'], _LENGTH)
    self.assertLen(got.imagined_reward, _LENGTH)

  def test_errors_are_means_of_either_part(self):
    got = _imagine(num_context=2, horizon=20).errors()
    self.assertEqual(list(got), ['observation', 'reward', 'continues'])
    np.testing.assert_allclose(got['observation'], (0, _PARAMS), atol=1e-5)
    np.testing.assert_allclose(got['reward'], (0, 2 * _PARAMS), atol=1e-5)
    # Of the four rows after the context, the last one terminates.
    np.testing.assert_allclose(got['continues'], (0.25, (3 * 0.25 + 0.75) / 4))

  def test_a_context_of_one_row_has_no_reward(self):
    got = _imagine(num_context=1, horizon=1)
    self.assertEqual(got.num_rows, 2)
    before, after = got.errors()['reward']
    self.assertTrue(np.isnan(before))
    self.assertAlmostEqual(after, 2 * _PARAMS, places=5)

  def test_keys_name_the_errors(self):
    got = dataclasses.replace(
      _imagine(num_context=2, horizon=2),
      observation={'reward': np.zeros((4, 2))},
      imagined_observation={
        'reward': np.array([[0, 0], [0, 2], [1, 3], [4, 4]])
      },
    )
    self.assertEqual(got.errors()['observation/reward'], (0.5, 3.0))

  @pytest.mark.heavy
  def test_seeds_and_samples(self):
    first, same, other = (_imagine(seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(
      first.observation['observation'], same.observation['observation']
    )
    self.assertNotEqual(
      first.observation['observation'][0], other.observation['observation'][0]
    )
    sampled = _imagine(deterministic=False)
    np.testing.assert_array_equal(
      sampled.observation['observation'][0], first.observation['observation'][0]
    )
    self.assertGreater(np.abs(sampled.reward - first.reward)[1:].min(), 1e-4)

  def test_wrong_input(self):
    with self.assertRaisesRegex(ValueError, 'ended after 6 rows.* at most 5'):
      _imagine(num_context=6)
    with self.assertRaisesRegex(ValueError, 'num_context'):
      _imagine(num_context=0)
    with self.assertRaisesRegex(ValueError, 'horizon'):
      _imagine(horizon=0)
    plain = agent_lib.Agent(
      init=None, initial_carry=_AGENT.initial_carry, act=_act, update=None
    )
    with self.assertRaisesRegex(ValueError, 'no world model.*DreamerV3'):
      _imagine(plain)

  @parameterized.parameters('float32', 'bfloat16')
  @pytest.mark.heavy
  def test_an_agent_with_a_world_model(self, dtype):
    config = dreamer.DreamerConfig(
      hidden_size=8,
      num_layers=1,
      recurrent_size=8,
      num_latents=2,
      num_classes=3,
      num_bins=11,
      dtype=dtype,
    )
    env = delayed_recall.DelayedRecall(3, 2)
    agent = dreamer.make_dreamer(
      env.observation_spec(), env.action_spec(), config
    )
    row = jax.tree.map(lambda x: x[None], env.reset(jax.random.key(0))[1])
    params = jax.jit(lambda key: agent.init(key, row).params)(jax.random.key(1))
    got = imagination.imagine(
      agent, env, params, {}, jax.random.key(2), num_context=2
    )
    self.assertEqual(got.num_rows, 5)
    x = got.observation['observation']
    np.testing.assert_array_equal(x.sum(axis=1), np.ones(5))
    self.assertEqual(got.imagined_observation['observation'].shape, x.shape)
    np.testing.assert_array_equal(got.discount, [np.nan, 1, 1, 1, 0])
    # Heads that have learned nothing: the reward 0, and even odds to go on.
    np.testing.assert_allclose(got.imagined_reward[1:], 0, atol=1e-6)
    np.testing.assert_allclose(got.imagined_discount[1:], 0.5)
    self.assertTrue(np.all(np.isfinite(list(got.errors().values()))))


if __name__ == '__main__':
  absltest.main()
