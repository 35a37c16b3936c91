"""Rollouts: which rows they hold, and from where a network goes on."""

import functools

from absl.testing import absltest
import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import wrappers
from hkgraph.learners import config as config_lib
from hkgraph.learners import ppo
from hkgraph.modules import distributions
from hkgraph.training import actor
from tests.learners import fakes

T, B = 9, 4
CONFIG = config_lib.PPOConfig(num_envs=B, num_steps=T)


class Acting:
  """An agent in front of environments, and its rollout, compiled."""

  def __init__(self, network, env, statistics=False):
    env = wrappers.Vectorize(env, B)
    self.network = network
    self.env = wrappers.EpisodeStatistics(env) if statistics else env
    self.agent = ppo.make_ppo(network, CONFIG)
    self.rollout = jax.jit(
      lambda learner_state, actor_state: actor.rollout(
        self.agent, self.env, learner_state, actor_state, T
      )
    )

  def start(self, seed=0):
    learner_key, actor_key = jax.random.split(jax.random.key(seed))
    learner_state = self.agent.init(learner_key, actor.example_rows(self.env))
    return learner_state, actor.initial_actor_state(
      self.agent, self.env, actor_key
    )


@functools.cache
def two_rollouts():
  """A recurrent agent's state, and two trajectories in a row."""
  acting = Acting(fakes.recurrent(), fakes.Episodes(), statistics=True)
  learner_state, states = acting.start()
  states, *one = acting.rollout(learner_state, states)
  _, *two = acting.rollout(learner_state, states)
  return acting, learner_state, one, two


class ExampleRowsTest(absltest.TestCase):
  def test_they_are_alike_and_nothing_is_reset(self):
    env = wrappers.Vectorize(fakes.Episodes(), B)
    _, shown = env.reset(jax.random.key(0))
    rows = actor.example_rows(env)
    chex.assert_trees_all_equal_shapes_and_dtypes(rows, shown)
    self.assertTrue(rows.first().all())
    # All that a program computes for them is zeros.
    text = jax.jit(lambda: actor.example_rows(env)).lower().as_text()
    self.assertNotIn('stablehlo.while', text)
    self.assertNotIn('random', text)
    self.assertNotIn('stablehlo.add', text)


class RolloutTest(absltest.TestCase):
  def test_shapes(self):
    _, _, (trajectory, _), _ = two_rollouts()
    chex.assert_tree_shape_prefix(trajectory.timestep, (T + 1, B))
    chex.assert_shape(trajectory.value, (T + 1, B))
    chex.assert_shape([trajectory.action, trajectory.log_prob], (T, B))
    chex.assert_tree_shape_prefix(trajectory.carry, (B,))

  def test_last_row_is_the_next_first_row(self):
    _, _, (one, _), (two, _) = two_rollouts()
    row = lambda tree, t: jax.tree.map(lambda x: x[t], tree)  # noqa: E731
    chex.assert_trees_all_equal(row(one.timestep, T), row(two.timestep, 0))
    # Valued twice from the same carry: once as bootstrap, once as it is met.
    np.testing.assert_allclose(one.value[T], two.value[0], rtol=1e-6)

  def test_network_meets_every_row_once(self):
    acting, learner_state, (one, _), (two, _) = two_rollouts()
    state = types.NetworkState(
      carry=one.carry, statistics=learner_state.statistics
    )
    for trajectory in one, two:
      timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
      outputs, state = acting.network.unroll(
        learner_state.params,
        state,
        None,
        timestep.observation,
        timestep.first(),
      )
      np.testing.assert_allclose(
        outputs.value, trajectory.value[:-1], rtol=1e-5, atol=1e-6
      )
      np.testing.assert_allclose(
        outputs.policy.log_prob(trajectory.action),
        trajectory.log_prob,
        rtol=1e-5,
      )
      if trajectory is one:
        np.testing.assert_allclose(state.carry['h'], two.carry['h'], rtol=1e-5)

  def test_carry_is_reset_before_a_first_row(self):
    _, _, (trajectory, _), _ = two_rollouts()
    first = np.asarray(trajectory.timestep.first())
    x, h = np.asarray(trajectory.timestep.observation), np.zeros(B)
    self.assertTrue(first[1:-1].any())
    for t in range(T):
      h = np.where(first[t], 0, h) + x[t]
    _, _, _, (following, _) = two_rollouts()
    np.testing.assert_allclose(following.carry['h'], h, rtol=1e-5, atol=1e-6)

  def test_rewards_belong_to_the_row_they_lead_to(self):
    # `Episodes` pays the observation where action 1 was taken at it.
    _, _, (trajectory, _), _ = two_rollouts()
    timestep = jax.tree.map(np.asarray, trajectory.timestep)
    paid = timestep.observation[:-1] * np.asarray(trajectory.action)
    expected = np.where(timestep.step_type[1:] == 0, 0, paid)
    np.testing.assert_allclose(timestep.reward[1:], expected, rtol=1e-6)

  def test_actions_are_drawn_anew(self):
    acting, learner_state, _, _ = two_rollouts()
    _, states = acting.start()
    seen = []
    for _ in range(2):
      next_states, trajectory, _ = acting.rollout(learner_state, states)
      seen.append(np.asarray(trajectory.action))
      # Only the key goes on: what else the actions depend on stays.
      states = states.replace(key=next_states.key)
    self.assertFalse((seen[0] == seen[1]).all())
    self.assertFalse((seen[0] == seen[0][0]).all())

  def test_episodes(self):
    _, _, (one, episodes), (two, later) = two_rollouts()
    total, length = np.zeros(B), np.zeros(B, int)
    for trajectory, seen in (one, episodes), (two, later):
      timestep = jax.tree.map(np.asarray, trajectory.timestep)
      for t in range(T):
        first = timestep.step_type[t + 1] == 0
        total = np.where(first, 0, total + timestep.reward[t + 1])
        length = np.where(first, 0, length + 1)
        np.testing.assert_allclose(
          seen['episode_return'][t], total, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(seen['episode_length'][t], length)


class Echo(fakes.Episodes):
  """Shows the action that it was given."""

  def step(self, state, action):
    state, timestep = super().step(state, action)
    return state, timestep.replace(observation=action)

  def action_spec(self):
    return specs.BoundedArray((), np.float32, -2.0, 4.0)


class Squashed(distributions.distrax.Normal):
  """Actions `1 + 3 tanh(u)`, `u` normal."""

  def to_environment(self, value):
    return 1 + 3 * jnp.tanh(value)


def squashed(params, x):
  policy = Squashed(loc=params['theta'] * x, scale=jnp.ones_like(x))
  return types.PolicyValue(policy=policy, value=params['v'] * x)


class ActionSpaceTest(absltest.TestCase):
  def test_environment_gets_its_own_action_and_the_learner_the_policy_s(self):
    acting = Acting(fakes.memoryless(squashed), Echo())
    _, trajectory, episodes = acting.rollout(*acting.start())
    shown = np.asarray(trajectory.timestep.observation[1:])
    expected = 1 + 3 * np.tanh(trajectory.action)
    inside = ~np.asarray(trajectory.timestep.first()[1:])
    np.testing.assert_allclose(shown[inside], expected[inside], rtol=1e-5)
    self.assertEmpty(episodes)

  def test_values_without_memory(self):
    acting = Acting(fakes.memoryless(squashed), Echo())
    _, trajectory, _ = acting.rollout(*acting.start())
    np.testing.assert_allclose(
      trajectory.value, 0.2 * trajectory.timestep.observation, rtol=1e-6
    )


class InitialActorStateTest(absltest.TestCase):
  def test_may_be_donated_and_is_not_weak(self):
    class Aliased:
      """A reset whose leaves share buffers and are weak."""

      def reset(self, key):
        del key
        reward = jnp.zeros(B) + 0.0
        timestep = types.TimeStep(
          step_type=jnp.zeros(B, jnp.int32),
          reward=reward,
          discount=jnp.full(B, 1.0),
          observation=reward,
        )
        return {'shown': reward, 'weak': jnp.asarray(1.0)}, timestep

    agent = ppo.make_ppo(fakes.recurrent(), CONFIG)
    state = actor.initial_actor_state(agent, Aliased(), jax.random.key(0))
    self.assertFalse(
      any(getattr(x, 'weak_type', False) for x in jax.tree.leaves(state))
    )
    donate = jax.jit(
      lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0
    )
    chex.assert_shape(donate(state).timestep.observation, (B,))


if __name__ == '__main__':
  absltest.main()
