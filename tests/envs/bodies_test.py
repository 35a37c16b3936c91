"""Tests for `hkgraph.envs.bodies`."""

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.envs import bodies

_SQUARE = 0.5 * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])  # Four places.


def _state(position, goal=(0.0, 0.0)):
  return bodies.State(
    position=jnp.array(position, jnp.float32),
    goal=jnp.array(goal, jnp.float32),
  )


def _actions(moves):
  return {f'body_{i}': jnp.float32(move) for i, move in enumerate(moves)}


def _rewards(row):
  return np.array([row.reward[f'body_{i}'] for i in range(len(row.reward))])


class StepTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(0.0, 0.5, 1.0)
  def test_moves_observations_and_rewards(self, weight):
    rng = np.random.default_rng(0)
    position, goal = rng.uniform(-1, 1, (4, 2)), np.array([0.3, -0.2])
    moves = rng.uniform(-1, 1, (4, 2))
    env = bodies.Bodies(4, shared_weight=weight)
    state, row = self.variant(env.step)(_state(position, goal), _actions(moves))
    after = position + 0.1 * moves
    mean = after.mean(axis=0)
    own = np.linalg.norm(after - (goal + _SQUARE), axis=-1)
    shared = np.linalg.norm(mean - goal)
    np.testing.assert_allclose(state.position, after, 1e-5)
    np.testing.assert_allclose(
      _rewards(row), -(1 - weight) * own - weight * shared, 1e-5, 1e-6
    )
    for i in range(4):
      np.testing.assert_allclose(
        row.observation[f'body_{i}'],
        np.concatenate([after[i], goal, mean]),
        1e-5,
        1e-6,
      )
    self.assertTrue(row.mid())
    self.assertEqual(row.discount, 1)

  def test_in_formation_all_rewards_are_0(self):
    goal = np.array([0.1, -0.4])
    env = bodies.Bodies(4)
    _, row = env.step(_state(_SQUARE + goal, goal), _actions(np.zeros((4, 2))))
    np.testing.assert_allclose(_rewards(row), 0, atol=1e-6)

  def test_one_body_astray_costs_every_other(self):
    position = _SQUARE + np.array([[0.4, 0], [0, 0], [0, 0], [0, 0]])
    _, row = bodies.Bodies(4).step(_state(position), _actions(np.zeros((4, 2))))
    # The mean is off by 0.4 / 4, of which half counts.
    np.testing.assert_allclose(
      _rewards(row), [-0.05 - 0.2, -0.05, -0.05, -0.05], 1e-5
    )
    for i in range(4):
      np.testing.assert_allclose(
        row.observation[f'body_{i}'][4:], [0.1, 0], atol=1e-6
      )

  def test_moves_are_clipped_and_the_arena_has_walls(self):
    env = bodies.Bodies(2)
    state, _ = env.step(
      _state([[0, 0], [1.95, -1.95]]), _actions([[9, -9], [1, -1]])
    )
    np.testing.assert_allclose(state.position, [[0.1, -0.1], [2, -2]], 1e-6)

  @parameterized.parameters(
    ({'num_bodies': 1}, '`num_bodies` must be an integer from 2'),
    ({'num_bodies': 2.0}, '`num_bodies`'),
    ({'shared_weight': 1.5}, '`shared_weight` must lie in'),
    ({'shared_weight': float('nan')}, '`shared_weight`'),
  )
  def test_wrong_settings(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      bodies.make(**kwargs)

  def test_eleven_bodies_keep_their_order(self):
    # As keys of a dict `body_10` sorts before `body_2`.
    position = np.linspace(-1, 1, 22).reshape(11, 2)
    _, row = bodies.Bodies(11).step(
      _state(position), _actions(np.zeros((11, 2)))
    )
    for i in range(11):
      np.testing.assert_allclose(
        row.observation[f'body_{i}'][:2], position[i], 1e-6, 1e-6
      )


class PolicyTest(chex.TestCase):
  def _returns(self, policy):
    """Mean return of every body over 64 episodes of 50 steps."""
    env = bodies.Bodies()
    step = jax.jit(jax.vmap(env.step))
    keys = jax.random.split(jax.random.key(0), 64)
    state, row = jax.jit(jax.vmap(env.reset))(keys)
    total = dict.fromkeys(row.reward, 0.0)
    for _ in range(50):
      state, row = step(state, policy(jax.device_get(row.observation)))
      total = {k: total[k] + np.mean(v) for k, v in row.reward.items()}
    return total

  def test_there_is_much_to_learn_for_every_body(self):
    rng = np.random.default_rng(0)

    def random(observation):
      return {k: rng.uniform(-1, 1, (64, 2)) for k in observation}

    def towards_place(observation):
      actions = {}  # Linear in what each body sees, but for the clip.
      for i in range(3):
        angle = 2 * np.pi * i / 3
        place = 0.5 * np.array([np.cos(angle), np.sin(angle)])
        seen = observation[f'body_{i}']
        error = seen[:, 2:4] + place - seen[:, :2]
        actions[f'body_{i}'] = np.clip(10 * error, -1, 1)
      return actions

    before, after = self._returns(random), self._returns(towards_place)
    for name in before:
      self.assertLess(before[name], -25)
      self.assertGreater(after[name], -6)


if __name__ == '__main__':
  absltest.main()
