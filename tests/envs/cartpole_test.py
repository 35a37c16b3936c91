"""Tests for `hkgraph.envs.cartpole`, against Gymnasium's CartPole-v1."""

from absl.testing import absltest, parameterized
import chex
import gymnasium
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.envs import cartpole, wrappers

_ENV = cartpole.CartPole()
_STEP = jax.jit(_ENV.step)
_LIMITS = np.array([2.4, np.inf, 12 * 2 * np.pi / 360, np.inf])


def _state(values):
  names = ('position', 'velocity', 'angle', 'angular_velocity')
  return cartpole.State(
    **{n: jnp.float32(v) for n, v in zip(names, values, strict=True)}
  )


def _gymnasium_step(env, observation, action):
  """One step of Gymnasium's environment from a state of our choice."""
  env.unwrapped.state = np.asarray(observation, np.float64)
  env.unwrapped.steps_beyond_terminated = None
  return env.step(int(action))


def _balance(observation):
  """A linear policy that holds the pole for much longer than 500 steps."""
  return int(np.dot(observation, [0.1, 0.3, 3.0, 1.0]) > 0)


class StepTest(chex.TestCase):
  @hypothesis.given(
    position=st.floats(-2.5, 2.5, width=32),
    velocity=st.floats(-4, 4, width=32),
    angle=st.floats(-0.25, 0.25, width=32),
    angular_velocity=st.floats(-4, 4, width=32),
    action=st.integers(0, 1),
  )
  def test_any_state_and_action(
    self, position, velocity, angle, angular_velocity, action
  ):
    values = np.array([position, velocity, angle, angular_velocity])
    gym = gymnasium.make('CartPole-v1', disable_env_checker=True).unwrapped
    observation, reward, terminated, _, _ = _gymnasium_step(gym, values, action)
    hypothesis.assume(np.all(np.abs(np.abs(gym.state) - _LIMITS) > 1e-6))
    _, row = _STEP(_state(values), jnp.int32(action))
    np.testing.assert_allclose(row.observation, observation, 1e-5, 1e-6)
    self.assertEqual(row.reward, reward)
    self.assertEqual(row.last(), terminated)
    self.assertEqual(row.discount, 1 - terminated)

  @parameterized.parameters(range(5))
  def test_random_episodes(self, seed):
    rng = np.random.default_rng(seed)
    gym = gymnasium.make('CartPole-v1')
    gym.reset(seed=seed)
    state, row = _ENV.reset(jax.random.key(seed))
    gym.unwrapped.state = np.asarray(row.observation, np.float64)
    length = 0
    while not row.last():  # Both run freely from the same first state.
      action = rng.integers(2)
      observation, reward, terminated, _, _ = gym.step(action)
      state, row = _STEP(state, jnp.int32(action))
      np.testing.assert_allclose(row.observation, observation, 1e-4, 1e-5)
      self.assertEqual((row.reward, row.last()), (reward, terminated))
      length += 1
    self.assertGreater(length, 5)

  @parameterized.parameters((0, 2.41), (0, -2.41), (2, 0.2097), (2, -0.2097))
  def test_each_limit_terminates_with_reward_1(self, index, value):
    inside = np.zeros(4)
    inside[index] = value * 0.99
    outside = np.zeros(4)
    outside[index] = value
    _, row = _STEP(_state(inside), jnp.int32(1))
    self.assertTrue(row.mid())
    _, row = _STEP(_state(outside), jnp.int32(1))
    self.assertTrue(row.last())
    self.assertEqual((row.reward, row.discount), (1, 0))


class ResetTest(chex.TestCase):
  def test_first_states_are_uniform_within_a_twentieth(self):
    env = wrappers.Vectorize(_ENV, 4000)
    _, rows = jax.jit(env.reset)(jax.random.key(0))
    chex.assert_shape(rows.observation, (4000, 4))
    self.assertLess(np.max(np.abs(rows.observation)), 0.05)
    # Of a uniform distribution on +-c: mean 0, standard deviation c / sqrt(3);
    # five standard errors.
    spread = 0.05 / np.sqrt(3)
    error = 5 * spread / np.sqrt(4000)
    np.testing.assert_allclose(rows.observation.mean(axis=0), 0, atol=error)
    np.testing.assert_allclose(rows.observation.std(axis=0), spread, atol=error)


class TimeLimitTest(chex.TestCase):
  def test_five_hundredth_transition_truncates_as_in_gymnasium(self):
    gym, env = gymnasium.make('CartPole-v1'), cartpole.make()
    step = jax.jit(env.step)
    gym.reset(seed=0)
    state, row = env.reset(jax.random.key(0))
    truncated = False
    for t in range(500):
      self.assertFalse(row.last() or truncated)
      action = _balance(row.observation)
      observation, _, terminated, truncated, _ = _gymnasium_step(
        gym, row.observation, action
      )
      state, row = step(state, jnp.int32(action))
      np.testing.assert_allclose(row.observation, observation, 1e-5, 1e-6)
      self.assertFalse(terminated)
      self.assertEqual(row.last(), t == 499)
      self.assertEqual(row.discount, 1)
    self.assertTrue(truncated)


if __name__ == '__main__':
  absltest.main()
