"""What the tests of the adapters share: a batch run, and one walked by hand."""

import functools

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.envs import protocol, wrappers

F, M, L = 0, 1, 2


def random_actions(spec, num_steps, num_envs, seed=0):
  """Uniform actions within their bounds. Shape `[T, B, ...]`."""
  rng = np.random.default_rng(seed)
  shape = (num_steps, num_envs, *spec.shape)
  if isinstance(spec, specs.DiscreteArray):
    return rng.integers(spec.num_values, size=shape).astype(spec.dtype)
  return rng.uniform(spec.minimum, spec.maximum, shape).astype(spec.dtype)


def run(env, actions, key):
  """Rows of `T + 1` moments of a batch, and its jitted step.

  Steps are single calls of one jitted function that gives its state away, as a
  training does.
  """
  batch = wrappers.vectorize(env, actions.shape[1])
  step = jax.jit(
    chex.assert_max_traces(batch.step, n=1), donate_argnums=0, keep_unused=True
  )
  chex.clear_trace_counter()
  state, row = jax.jit(batch.reset)(key)
  state = jax.tree.map(jnp.copy, state)
  rows = [row]
  for action in actions:
    state, row = step(state, action)
    rows.append(row)
  assert step._cache_size() == 1
  chex.assert_trees_all_equal_shapes_and_dtypes(*rows)
  assert not any(x.weak_type for x in jax.tree.leaves(rows))
  return jax.tree.map(lambda *x: np.stack(x), *rows)


def walk(reset, step, actions, key, limit=None):
  """The same rows as dicts, made by the functions of a suite.

  Args:
    reset: `key -> (state, observation)`.
    step: `(state, action) -> (state, observation, reward, terminated)`.
    actions: Shape `[T, B, ...]`.
    key: That of the batch. Each element splits off a key for every episode.
    limit: Transitions after which an episode is cut.
  """
  columns = []
  for b, next_key in enumerate(jax.random.split(key, actions.shape[1])):
    state, last, column = None, True, []
    for action in [None, *actions[:, b]]:
      if last:
        next_key, reset_key = jax.random.split(next_key)
        state, observation = reset(reset_key)
        count, last = 0, False
        column.append((F, 0.0, 1.0, observation))
        continue
      state, observation, reward, terminated = step(state, action)
      count += 1
      last = bool(terminated) or count == limit
      column.append((L if last else M, reward, 1.0 - terminated, observation))
    columns.append(column)
  names = ('step_type', 'reward', 'discount', 'observation')
  return {
    name: np.stack(
      [[np.asarray(row[i]) for row in column] for column in columns], axis=1
    )
    for i, name in enumerate(names)
  }


def with_keys(reset, step):
  """Functions for `walk`, of a suite that is given a key for every call."""

  def keyed_reset(key):
    next_key, reset_key = jax.random.split(key)
    state, observation = reset(reset_key)
    return (state, next_key), observation

  def keyed_step(state, action):
    state, key = state
    next_key, step_key = jax.random.split(key)
    state, *row = step(step_key, state, action)
    return (state, next_key), *row

  return jax.jit(keyed_reset), jax.jit(keyed_step)


def assert_rows(rows, expected, rtol=0.0):
  """Raises unless the rows are those that were walked by hand."""
  np.testing.assert_array_equal(rows.step_type, expected['step_type'])
  np.testing.assert_array_equal(rows.discount, expected['discount'])
  close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
  close(rows.reward, expected['reward'])
  close(
    rows.observation.astype(np.float32),
    expected['observation'].astype(np.float32),
  )


def assert_conforms(env, rows):
  """Raises unless every row conforms to the specs of its environment."""
  assert rows.step_type.dtype == np.int32
  assert rows.reward.dtype == rows.discount.dtype == np.float32
  pairs = (
    (env.observation_spec(), rows.observation),
    (env.reward_spec(), rows.reward),
    (env.discount_spec(), rows.discount),
  )
  for spec, tree in pairs:
    assert jax.tree.structure(spec) == jax.tree.structure(tree)
    for leaf, x in zip(
      jax.tree.leaves(spec), jax.tree.leaves(tree), strict=True
    ):
      for value in x.reshape(-1, *x.shape[2:]):
        leaf.validate(value)


def assert_is_single(env):
  """Raises unless `env` is one environment that takes typed keys only."""
  assert not hasattr(env, 'num_envs')
  state, _ = jax.eval_shape(env.reset, jax.random.key(0))
  keys = [
    x
    for x in jax.tree.leaves(state)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  ]
  assert len(keys) == 1
  protocol.check_key(jax.random.key(0))
