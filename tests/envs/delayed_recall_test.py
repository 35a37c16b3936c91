"""Tests for `hkgraph.envs.delayed_recall`."""

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import delayed_recall, wrappers

F, M, L = 0, 1, 2


def _symbols(delay, num_cues, num_envs, num_rows):
  """What rows show, as numbers, and the cue. Shapes `[T, B]` and `[B]`."""
  env = delayed_recall.DelayedRecall(delay, num_cues)
  env = wrappers.Vectorize(env, num_envs)

  def body(state, _):
    state, row = env.step(state, jnp.zeros((num_envs,), jnp.int32))
    return state, (row.observation, state.env_state.cue)

  state, row = jax.jit(env.reset)(jax.random.key(11))
  _, (observation, cue) = jax.lax.scan(body, state, length=num_rows - 1)
  observation = np.concatenate([row.observation[None], observation])
  cue = np.concatenate([state.env_state.cue[None], cue])
  np.testing.assert_array_equal(np.sort(observation)[..., :-1], 0)
  np.testing.assert_array_equal(np.sort(observation)[..., -1], 1)
  return observation.argmax(-1), cue


class EpisodeTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1, 2, 8)
  def test_only_the_action_at_row_delay_counts(self, delay):
    env = delayed_recall.DelayedRecall(delay, num_cues=3)
    step = self.variant(env.step)
    first = self.variant(env.reset)(jax.random.key(4))
    cue = np.argmax(first[1].observation)
    for right in (True, False):
      (state, row), rows = first, [first[1]]
      for t in range(delay + 1):
        answer = cue if right == (t == delay) else (cue + 1) % 3
        state, row = step(state, jnp.int32(answer))
        rows.append(row)
      rows = jax.tree.map(lambda *x: np.stack(x).tolist(), *rows)
      self.assertEqual(rows.step_type, [F] + [M] * delay + [L])
      self.assertEqual(rows.discount, [1] * (delay + 1) + [0])
      self.assertEqual(rows.reward, [0] * (delay + 1) + [float(right)])

  @parameterized.parameters(
    ({'delay': 0}, '`delay` must be an integer from 1'),
    ({'delay': 1.5}, '`delay`'),
    ({'num_cues': 1}, '`num_cues` must be an integer from 2'),
  )
  def test_wrong_sizes(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      delayed_recall.make(**kwargs)

  def test_specs_follow_the_number_of_cues(self):
    env = delayed_recall.make(delay=3, num_cues=5)
    self.assertEqual(env.observation_spec().shape, (5,))
    self.assertEqual(env.action_spec().num_values, 5)


class InformationTest(chex.TestCase):
  """What one row tells of the cue, counted over 6000 episodes."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.num_envs = 6000
    # Rows 0..3 are one episode and row 4 is the cue of the next.
    cls.symbols, cls.cue = _symbols(2, 3, cls.num_envs, 5)
    # Five standard errors of a frequency near 1/9.
    cls.tolerance = 5 * np.sqrt(1 / 9 * 8 / 9 / cls.num_envs)

  def _joint(self, row_cue, row_shown):
    joint = np.zeros((3, 3))
    np.add.at(joint, (self.cue[row_cue], self.symbols[row_shown]), 1)
    return joint / self.num_envs

  def test_first_row_shows_the_cue(self):
    np.testing.assert_array_equal(self.symbols[0], self.cue[0])

  @parameterized.parameters(1, 2, 3)
  def test_every_later_row_is_independent_of_it(self, row):
    # Joint frequencies of 1/9 each: all symbols are as frequent as cues, and
    # no policy that sees one row is right more often than 1/3.
    np.testing.assert_allclose(self._joint(0, row), 1 / 9, atol=self.tolerance)

  def test_the_next_cue_is_independent_of_the_last(self):
    np.testing.assert_array_equal(self.symbols[4], self.cue[4])
    np.testing.assert_allclose(self._joint(0, 4), 1 / 9, atol=self.tolerance)

  def test_noise_of_two_rows_is_independent(self):
    joint = np.zeros((3, 3))
    np.add.at(joint, (self.symbols[1], self.symbols[2]), 1)
    np.testing.assert_allclose(
      joint / self.num_envs, 1 / 9, atol=self.tolerance
    )


class PolicyTest(chex.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    env = delayed_recall.DelayedRecall(delay=4, num_cues=4)
    env = wrappers.Vectorize(env, 2000)
    cls.first = jax.jit(env.reset)(jax.random.key(1))
    cls.step = staticmethod(jax.jit(env.step))

  def _accuracy(self, policy):
    """Mean reward at `LAST` rows of a policy of all observations so far."""
    (state, row), seen = self.first, []
    for _ in range(5):
      seen.append(row.observation)
      state, row = self.step(state, policy(seen))
    np.testing.assert_array_equal(row.step_type, types.StepType.LAST)
    return float(row.reward.mean())

  def test_memory_is_always_right(self):
    accuracy = self._accuracy(lambda seen: jnp.argmax(seen[0], axis=-1))
    self.assertEqual(accuracy, 1)

  @parameterized.parameters(0, 1)
  def test_present_row_alone_is_at_chance(self, shift):
    accuracy = self._accuracy(
      lambda seen: (jnp.argmax(seen[-1], axis=-1) + shift) % 4
    )
    error = 5 * np.sqrt(1 / 4 * 3 / 4 / 2000)
    self.assertAlmostEqual(accuracy, 1 / 4, delta=error)


if __name__ == '__main__':
  absltest.main()
