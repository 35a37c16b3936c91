"""Tests for `hkgraph.envs.wrappers`, on an environment of a few lines."""

import functools

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers

F, M, L = 0, 1, 2
_NAN = np.float32(np.nan)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  count: jax.Array
  nonce: jax.Array
  over: jax.Array


class Fuse:
  """Shows the number of transitions made; pays the action; 0 terminates.

  After its end it pays NaN and shows NaN, which nobody must ever see.
  """

  def __init__(self, fuse=1000, heads=None):
    self._fuse = fuse
    self._heads = heads

  def reset(self, key):
    nonce = jax.random.key_data(key)[0].astype(jnp.float32)
    state = State(count=0, nonce=nonce, over=False)  # Python scalars: weak.
    observation = jnp.stack([jnp.asarray(0.0), nonce])
    return state, protocol.restart(self.reward_spec(), observation)

  def step(self, state, action):
    count = state.count + 1
    over = (count >= self._fuse) | (action == 0)
    reward = jnp.where(state.over, _NAN, action.astype(jnp.float32))
    seen = jnp.where(state.over, _NAN, jnp.float32(count))
    if self._heads:
      reward = {name: (i + 1) * reward for i, name in enumerate(self._heads)}
    state = state.replace(count=count, over=over)
    observation = jnp.stack([seen, state.nonce])
    return state, protocol.transition(reward, observation, over)

  def observation_spec(self):
    return specs.Array((2,), np.float32)

  def action_spec(self):
    return specs.BoundedArray((), np.int32, 0, 9)

  def reward_spec(self):
    spec = specs.Array((), np.float32)
    return dict.fromkeys(self._heads, spec) if self._heads else spec

  def discount_spec(self):
    return protocol.discount_spec()


@functools.cache
def _vector(fuse, num_envs, limit=100, heads=None):
  """The usual pile of wrappers and its jitted functions."""
  env = wrappers.TimeLimit(Fuse(fuse, heads), limit)
  env = wrappers.EpisodeStatistics(wrappers.Vectorize(env, num_envs))
  return env, jax.jit(env.reset), jax.jit(env.step)


def _rollout(env, actions, seed=0):
  """States and rows of `T + 1` moments, stacked."""
  _, reset, step = env
  moments = [reset(jax.random.key(seed))]
  for action in jnp.asarray(actions):
    moments.append(step(moments[-1][0], action))
  return jax.tree.map(lambda *x: np.stack(x), *map(_without_keys, moments))


def _without_keys(carry):
  def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

  return jax.tree.map(lambda x: None if is_key(x) else x, carry)


def _reference(actions, fuse, limit):
  """The convention of rows, walked one environment at a time."""
  num_steps, batch = actions.shape
  shape = (num_steps + 1, batch)
  out = {
    'step_type': np.full(shape, F),
    'reward': np.zeros(shape),
    'discount': np.ones(shape),
    'count': np.zeros(shape),
    'total': np.zeros(shape),
  }
  for b in range(batch):
    count, total, last = 0, 0, False
    for t in range(1, num_steps + 1):
      if last:
        count, total, last = 0, 0, False
        continue
      action = actions[t - 1, b]
      count, total = count + 1, total + action
      terminated = action == 0 or count >= fuse
      last = terminated or count >= limit
      out['step_type'][t, b] = L if last else M
      out['reward'][t, b] = action
      out['discount'][t, b] = 0 if terminated else 1
      out['count'][t, b] = count
      out['total'][t, b] = total
  return out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scan(fuse, limit, actions):
  """Moments 1 to `T` of three environments under all wrappers."""
  env, _, _ = _vector(fuse, 3, limit)

  def body(state, action):
    moment = env.step(state, action)
    return moment[0], moment

  return jax.lax.scan(body, env.reset(jax.random.key(0))[0], actions)[1]


class TimeLimitTest(chex.TestCase):
  @parameterized.parameters(
    # Fuse, limit: step types and discounts of the rows of one episode.
    (9, 3, [F, M, M, L], [1, 1, 1, 1]),  # Cut.
    (2, 3, [F, M, L], [1, 1, 0]),  # Terminated before.
    (3, 3, [F, M, M, L], [1, 1, 1, 0]),  # Terminated on that very transition.
    (9, 1, [F, L], [1, 1]),
  )
  def test_one_episode(self, fuse, limit, step_types, discounts):
    env = wrappers.TimeLimit(Fuse(fuse), limit)
    step = jax.jit(env.step)
    state, row = env.reset(jax.random.key(0))
    rows = [row]
    while not rows[-1].last():
      state, row = step(state, jnp.int32(1))
      rows.append(row)
    self.assertEqual([int(r.step_type) for r in rows], step_types)
    self.assertEqual([int(r.discount) for r in rows], discounts)

  @parameterized.parameters(0, -3, 2.0, True)
  def test_limit_must_be_a_positive_integer(self, limit):
    with self.assertRaisesRegex(ValueError, '`max_steps` must be an integer'):
      wrappers.TimeLimit(Fuse(), limit)


class VectorizeFunctionTest(absltest.TestCase):
  def test_pure_functions_are_vmapped(self):
    self.assertIsInstance(wrappers.vectorize(Fuse(), 2), wrappers.Vectorize)

  def test_what_brings_its_own_batch_is_asked_for_it(self):
    class Host:
      def vectorize(self, num_envs):
        return ('own batch', num_envs)

    self.assertEqual(wrappers.vectorize(Host(), 3), ('own batch', 3))

  def test_a_batch_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'wraps a single environment'):
      wrappers.vectorize(wrappers.vectorize(Fuse(), 2), 2)


class VectorizeTest(chex.TestCase):
  def test_case_l_three_observations(self):
    _, rows = _rollout(_vector(2, 2), np.ones((5, 2), np.int32))
    for b in range(2):
      self.assertEqual(list(rows.step_type[:, b]), [F, M, L, F, M, L])
      # The true final observation is a row of its own.
      self.assertEqual(list(rows.observation[:, b, 0]), [0, 1, 2, 0, 1, 2])
      self.assertEqual(list(rows.discount[:, b]), [1, 1, 0, 1, 1, 0])
      self.assertEqual(list(rows.reward[:, b]), [0, 1, 1, 0, 1, 1])

  def test_case_l_cut_at_the_fifth_transition(self):
    _, rows = _rollout(_vector(99, 1, limit=5), np.ones((11, 1), np.int32))
    self.assertEqual(
      list(rows.step_type[:, 0]), [F, M, M, M, M, L, F, M, M, M, M, L]
    )
    self.assertEqual(list(rows.discount[:, 0]), [1] * 12)

  @parameterized.parameters((1, 2), (2, 1), (2, 3), (3, 3), (9, 3))
  @hypothesis.given(
    actions=hnp.arrays(np.int32, (11, 3), elements=st.integers(0, 4))
  )
  def test_agrees_with_a_walk_over_single_environments(
    self, fuse, limit, actions
  ):
    state, rows = _scan(fuse, limit, actions)
    expected = _reference(actions, fuse, limit)
    expected = {k: v[1:] for k, v in expected.items()}
    np.testing.assert_array_equal(rows.step_type, expected['step_type'])
    np.testing.assert_array_equal(rows.reward, expected['reward'])
    np.testing.assert_array_equal(rows.discount, expected['discount'])
    np.testing.assert_array_equal(rows.observation[..., 0], expected['count'])
    np.testing.assert_array_equal(state.episode_length, expected['count'])
    np.testing.assert_array_equal(state.episode_return, expected['total'])

  def test_resets_run_only_in_steps_in_which_one_is_due(self):
    resets = []

    class Counted(Fuse):
      def reset(self, key):
        jax.debug.callback(lambda _: resets.append(1), key)
        return super().reset(key)

    batch = wrappers.Vectorize(Counted(2), 3)
    step = jax.jit(batch.step)
    state, _ = jax.jit(batch.reset)(jax.random.key(0))
    counts = []
    for _ in range(6):
      state, _ = jax.block_until_ready(step(state, jnp.ones(3, jnp.int32)))
      jax.effects_barrier()
      counts.append(len(resets) - 3)
    self.assertEqual(counts, [0, 0, 3, 3, 3, 6])  # Rows 3 and 6 are FIRST.

  def test_compiled_or_not_the_rows_are_the_same(self):
    actions = np.array([[1, 2], [0, 1], [1, 0], [2, 2]], np.int32)
    env = wrappers.Vectorize(wrappers.TimeLimit(Fuse(3), 2), 2)
    step, state = jax.jit(env.step), env.reset(jax.random.key(0))[0]
    loose = state
    for action in actions:
      state, row = step(state, action)
      loose, loose_row = env.step(loose, action)
      chex.assert_trees_all_equal(row, loose_row)
    np.testing.assert_array_equal(
      jax.random.key_data(state.key), jax.random.key_data(loose.key)
    )

  def test_action_at_last_rows_is_ignored(self):
    actions = np.ones((8, 2), np.int32)
    garbage = actions.copy()
    garbage[2::3] = 99  # Rows 2, 5 are LAST, and no other.
    chex.assert_trees_all_equal(
      _rollout(_vector(2, 2), actions), _rollout(_vector(2, 2), garbage)
    )

  def test_episodes_and_environments_have_keys_of_their_own(self):
    _, rows = _rollout(_vector(1, 4), np.ones((7, 4), np.int32))
    nonces = np.asarray(rows.observation[..., 1])
    np.testing.assert_array_equal(nonces[0::2], nonces[1::2])  # One episode.
    self.assertLen(np.unique(nonces), 4 * 4)

  def test_next_episode_depends_on_nothing_that_happened_before(self):
    long, short = np.ones((6, 2), np.int32), np.zeros((6, 2), np.int32)
    _, long = _rollout(_vector(4, 2), long)
    _, short = _rollout(_vector(4, 2), short)  # 0 terminates at once.
    np.testing.assert_array_equal(long.observation[5], short.observation[2])

  def test_same_key_same_rows_other_key_other_rows(self):
    actions = np.ones((5, 2), np.int32)
    _, once = _rollout(_vector(2, 2), actions)
    _, again = _rollout(_vector(2, 2), actions)
    _, other = _rollout(_vector(2, 2), actions, seed=1)
    chex.assert_trees_all_equal(once, again)
    same = once.observation[..., 1] == other.observation[..., 1]
    self.assertFalse(np.any(same))

  def test_vmap_over_seeds_equals_the_single_runs(self):
    env, reset, step = _vector(2, 2)
    keys = jax.random.split(jax.random.key(5), 3)
    action = jnp.array([[1, 2], [0, 1], [1, 0]], jnp.int32)
    state, _ = jax.jit(jax.vmap(env.reset))(keys)
    _, rows = jax.jit(jax.vmap(env.step))(state, action)
    for i in range(3):
      _, row = step(reset(keys[i])[0], action[i])
      chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], rows), row)

  def test_weak_types_of_an_environment_compile_nothing_twice(self):
    chex.clear_trace_counter()
    env = wrappers.EpisodeStatistics(wrappers.Vectorize(Fuse(2), 2))
    step = jax.jit(chex.assert_max_traces(env.step, n=1))
    moment = env.reset(jax.random.key(0))
    for _ in range(4):
      moment = step(moment[0], jnp.ones(2, jnp.int32))
    leaves = jax.tree.leaves(_without_keys(moment))
    self.assertFalse(any(x.weak_type for x in leaves))

  @parameterized.parameters(True, False)
  def test_state_and_row_can_be_donated(self, jit_reset):
    env, jitted_reset, _ = _vector(2, 2)
    reset = jitted_reset if jit_reset else env.reset
    step = jax.jit(
      lambda carry, a: env.step(carry[0], a), donate_argnums=0, keep_unused=True
    )
    carry = reset(jax.random.key(0))
    for _ in range(4):
      carry = step(carry, jnp.ones(2, jnp.int32))
    self.assertEqual(list(carry[1].step_type), [M, M])

  @parameterized.parameters(0, -1, 1.5, True, None)
  def test_num_envs_must_be_a_positive_integer(self, num_envs):
    with self.assertRaisesRegex(ValueError, '`num_envs` must be an integer'):
      wrappers.Vectorize(Fuse(), num_envs)

  def test_wrong_actions_and_keys_are_named(self):
    env = wrappers.Vectorize(Fuse(), 3)
    state, _ = env.reset(jax.random.key(0))
    with self.assertRaisesRegex(ValueError, r'shape \(3,\).*got \(2,\)'):
      jax.jit(env.step)(state, jnp.ones(2, jnp.int32))
    with self.assertRaisesRegex(TypeError, 'int32, got float32'):
      jax.jit(env.step)(state, jnp.ones(3, jnp.float32))
    with self.assertRaisesRegex(ValueError, r'between 0 and 9, got \[10\]'):
      env.step(state, jnp.array([0, 10, 9]))
    with self.assertRaisesRegex(TypeError, 'jax.random.key'):
      env.reset(jax.random.PRNGKey(0))

  def test_environment_whose_step_changes_a_dtype_is_refused(self):
    class Changing(Fuse):
      def step(self, state, action):
        state, row = super().step(state, action)
        return state.replace(count=jnp.float32(state.count)), row

    env = wrappers.Vectorize(Changing(), 2)
    state, _ = env.reset(jax.random.key(0))
    with self.assertRaisesRegex(AssertionError, 'float32'):
      env.step(state, jnp.ones(2, jnp.int32))

  def test_wrong_nesting_is_refused(self):
    batch = wrappers.Vectorize(Fuse(), 2)
    with self.assertRaisesRegex(ValueError, '`TimeLimit` wraps a single'):
      wrappers.TimeLimit(batch, 5)
    with self.assertRaisesRegex(ValueError, '`Vectorize` wraps a single'):
      wrappers.Vectorize(batch, 2)
    with self.assertRaisesRegex(ValueError, '`EpisodeStatistics` wraps a bat'):
      wrappers.EpisodeStatistics(Fuse())

  def test_specs_and_size_pass_through(self):
    env, _, _ = _vector(2, 2, heads=('a', 'b'))
    self.assertEqual(env.num_envs, 2)
    self.assertEqual(env.observation_spec().shape, (2,))
    self.assertEqual(env.action_spec().maximum, 9)
    self.assertEqual(list(env.reward_spec()), ['a', 'b'])
    self.assertEqual(env.discount_spec(), protocol.discount_spec())


class EpisodeStatisticsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_last_row_holds_the_finished_episode_and_first_row_nothing(self):
    env = wrappers.EpisodeStatistics(wrappers.Vectorize(Fuse(3), 1))
    state, _ = self.variant(env.reset)(jax.random.key(0))
    returns, lengths = [state.episode_return[0]], [state.episode_length[0]]
    for action in (2, 3, 4, 9, 5):
      state, _ = self.variant(env.step)(state, jnp.array([action], jnp.int32))
      returns.append(state.episode_return[0])
      lengths.append(state.episode_length[0])
    # Rewards into the rows: F 0, M 2, M 3, L 4, F 0, M 5.
    self.assertEqual(returns, [0, 2, 2 + 3, 2 + 3 + 4, 0, 5])
    self.assertEqual(lengths, [0, 1, 2, 3, 0, 1])

  def test_dict_rewards_keep_one_return_each(self):
    env = _vector(2, 2, heads=('left', 'right'))
    state, rows = _rollout(env, np.array([[1, 2], [3, 4], [9, 9]], np.int32))
    left = np.array([[0, 0], [1, 2], [4, 6], [0, 0]])
    np.testing.assert_array_equal(state.episode_return['left'], left)
    np.testing.assert_array_equal(state.episode_return['right'], 2 * left)
    self.assertEqual(list(rows.step_type[:, 0]), [F, M, L, F])


def _rows(step_type):
  step_type = jnp.array(step_type, jnp.int32)
  zeros = jnp.zeros(step_type.shape)
  return types.TimeStep(
    step_type=step_type, reward=zeros, discount=zeros, observation=zeros
  )


class FinishedEpisodeMetricsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_case_j_none_finished(self):
    returns = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    metrics = self.variant(wrappers.finished_episode_metrics)(
      _rows([[F], [M], [M], [M]]), returns, jnp.array([[0], [1], [2], [3]])
    )
    self.assertEqual(
      {k: float(v) for k, v in metrics.items()},
      {'episodes': 0, 'episode_return': 0, 'episode_length': 0},
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_case_j_5_and_7_finished_one_still_running(self):
    metrics = self.variant(wrappers.finished_episode_metrics)(
      _rows([[M, M, M], [L, M, M], [F, L, M]]),
      jnp.array([[4.0, 5.0, 90.0], [5.0, 6.0, 91.0], [0.0, 7.0, np.nan]]),
      jnp.array([[1, 3, 90], [2, 4, 91], [0, 5, 92]]),
    )
    self.assertEqual(metrics['episodes'], 2)
    self.assertEqual(metrics['episode_return'], (5 + 7) / 2)
    self.assertEqual(metrics['episode_length'], (2 + 5) / 2)
    chex.assert_rank(list(metrics.values()), 0)

  @chex.variants(with_jit=True, without_jit=True)
  def test_dict_gives_each_key_and_the_total(self):
    left = jnp.array([[1.0, 2.0], [3.0, 9.0]])
    metrics = self.variant(wrappers.finished_episode_metrics)(
      _rows([[L, L], [L, M]]),
      {'left': left, 'right': 10 * left},
      jnp.ones((2, 2), jnp.int32),
    )
    mean = (1 + 2 + 3) / 3
    self.assertEqual(metrics['episode_return/left'], mean)
    self.assertEqual(metrics['episode_return/right'], 10 * mean)
    self.assertEqual(metrics['episode_return'], 11 * mean)

  def test_shapes_must_agree(self):
    with self.assertRaises(AssertionError):
      wrappers.finished_episode_metrics(
        _rows([[L], [M]]), jnp.zeros((2, 2)), jnp.zeros((2, 1), jnp.int32)
      )


if __name__ == '__main__':
  absltest.main()
