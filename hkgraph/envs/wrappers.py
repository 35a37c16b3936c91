"""Time limit, batch with automatic reset, and statistics of episodes.

The usual pile is `EpisodeStatistics(vectorize(TimeLimit(env, n), num_envs))`.
"""

import functools
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.envs import protocol


class _Wrapper:
  """Passes the specs of the wrapped environment on."""

  def __init__(self, env: protocol.Environment, *, batched: bool):
    if hasattr(env, 'num_envs') != batched:
      name, given = type(self).__name__, type(env).__name__
      raise ValueError(
        f'`{name}` wraps a batched environment, got the single {given}; batch '
        'it with `Vectorize` first'
        if batched
        else f'`{name}` wraps a single environment, got the batched {given}; '
        f'apply `{name}` to the environment inside it'
      )
    self._env = env

  def observation_spec(self) -> protocol.Spec:
    return self._env.observation_spec()

  def action_spec(self) -> protocol.Spec:
    return self._env.action_spec()

  def reward_spec(self) -> protocol.Spec:
    return self._env.reward_spec()

  def discount_spec(self) -> protocol.Spec:
    return self._env.discount_spec()


@chex.dataclass(frozen=True, mappable_dataclass=False)
class TimeLimitState:
  """State of `TimeLimit`.

  Attributes:
    env_state: State of the wrapped environment.
    num_steps: Transitions made in this episode, int32.
  """

  env_state: types.ArrayTree
  num_steps: jax.Array  # []


class TimeLimit(_Wrapper):
  """Truncates an episode: its `max_steps`-th transition leads to `LAST`.

  The discount of that transition is the environment's own: 1, which makes it a
  truncation, unless the environment terminated on the very same transition.
  """

  def __init__(self, env: protocol.Environment, max_steps: int):
    """Wraps a single environment.

    Args:
      env: A single environment.
      max_steps: Transitions in the longest episode, at least 1.

    Raises:
      ValueError: If `max_steps` is no positive integer or `env` is batched.
    """
    super().__init__(env, batched=False)
    self._max_steps = protocol.check_int('max_steps', max_steps)

  def reset(self, key: jax.Array) -> tuple[TimeLimitState, types.TimeStep]:
    """Opens an episode, with no transition made. Consumes `key`."""
    env_state, timestep = self._env.reset(key)
    return TimeLimitState(env_state=env_state, num_steps=jnp.int32(0)), timestep

  def step(
    self, state: TimeLimitState, action: types.ArrayTree
  ) -> tuple[TimeLimitState, types.TimeStep]:
    """Makes one transition, the last one if the limit is reached."""
    env_state, timestep = self._env.step(state.env_state, action)
    num_steps = state.num_steps + 1
    step_type = jnp.where(
      num_steps >= self._max_steps,
      jnp.int32(types.StepType.LAST),
      timestep.step_type,
    )
    state = TimeLimitState(env_state=env_state, num_steps=num_steps)
    return state, timestep.replace(step_type=step_type)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class VectorState:
  """State of `Vectorize`.

  Attributes:
    env_state: States of the environments.
    key: The key that the next episode of each will be made from.
    is_last: Whether the row that each environment shows is `LAST`.
  """

  env_state: types.ArrayTree  # [B, ...]
  key: jax.Array  # [B]
  is_last: jax.Array  # [B]


class Vectorize(_Wrapper):
  """Runs `num_envs` environments, each of which resets itself.

  The reset takes a step of its own (`dm_env`'s convention): the action at a
  `LAST` row is ignored, and the row that follows is `FIRST`. Each environment
  has a key of its own that only resets advance, so the n-th episode of
  environment b begins in the same state whatever happened before it. Resets
  are computed only in steps in which one is due.
  """

  def __init__(self, env: protocol.Environment, num_envs: int):
    """Wraps a single environment.

    Args:
      env: A single environment.
      num_envs: The batch size `B`, at least 1.

    Raises:
      ValueError: If `num_envs` is no positive integer or `env` is batched.
    """
    super().__init__(env, batched=False)
    self._num_envs = protocol.check_int('num_envs', num_envs)

  @property
  def num_envs(self) -> int:
    """The batch size `B`."""
    return self._num_envs

  def reset(self, key: jax.Array) -> tuple[VectorState, types.TimeStep]:
    """Opens an episode in every environment.

    Args:
      key: A typed key, split into one for each environment. Consumed.

    Returns:
      The state and `FIRST` rows, `[B, ...]` on every leaf.

    Raises:
      TypeError: If `key` is not a single typed key.
    """
    protocol.check_key(key)
    return jax.vmap(self._open)(jax.random.split(key, self._num_envs))

  def step(
    self, state: VectorState, action: types.ArrayTree
  ) -> tuple[VectorState, types.TimeStep]:
    """Makes one transition, or the reset that is due, in every environment.

    Args:
      state: The state that the last call returned.
      action: Tree of the action spec's structure, `[B, ...]` on every leaf;
        without meaning where the last row was `LAST`.

    Returns:
      The new state and rows, `[B, ...]` on every leaf.

    Raises:
      ValueError: If the structure or a shape of `action` is wrong; outside of
        `jax.jit` also if a value is out of bounds.
      TypeError: If floats are given for integers or the reverse.
    """
    spec = self.action_spec()
    action = protocol.check_action(spec, action, self._num_envs)
    protocol.check_action_range(spec, action, state.is_last)
    stepped = jax.vmap(self._advance)(state, action)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, stepped[0])
    due = jnp.any(state.is_last)
    if not isinstance(due, jax.core.Tracer):
      return self._reopen(state, stepped) if due else stepped
    # Outside of the vmap, within which both branches would run.
    return lax.cond(due, self._reopen, _keep, state, stepped)

  def _open(self, key):
    next_key, reset_key = jax.random.split(key)
    env_state, timestep = protocol.canonicalise(self._env.reset(reset_key))
    return self._state(env_state, next_key, timestep), timestep

  def _advance(self, state, action):
    env_state, timestep = protocol.canonicalise(
      self._env.step(state.env_state, action)
    )
    return self._state(env_state, state.key, timestep), timestep

  def _reopen(self, state, stepped):
    """Puts first moments in the place of those that follow a `LAST` row."""
    opened = jax.vmap(self._open)(state.key)
    chex.assert_trees_all_equal_shapes_and_dtypes(opened, stepped)

    def choose(is_last, new, old):
      return jax.tree.map(functools.partial(lax.select, is_last), new, old)

    return jax.vmap(choose)(state.is_last, opened, stepped)

  def _state(self, env_state, key, timestep):
    return VectorState(env_state=env_state, key=key, is_last=timestep.last())


def _keep(state, stepped):
  del state
  return stepped


def vectorize(
  env: protocol.Environment, num_envs: int
) -> protocol.BatchedEnvironment:
  """Makes the batch of an environment, whichever kind it is.

  An environment of pure functions is put inside `Vectorize`. One that lives on
  the host (`hkgraph.envs.gymnasium`) cannot be vmapped and brings a batch of
  its own, made by its method `vectorize(num_envs)`. Either way the next episode
  begins one step after a `LAST` row.

  Args:
    env: A single environment.
    num_envs: The batch size `B`, at least 1.

  Raises:
    ValueError: If `num_envs` is no positive integer or `env` is batched.
  """
  if hasattr(env, 'vectorize'):
    return env.vectorize(num_envs)
  return Vectorize(env, num_envs)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class StatisticsState:
  """State of `EpisodeStatistics`.

  Attributes:
    env_state: State of the wrapped environments.
    episode_return: Sum of the rewards of the episode up to and including the
      row that is shown; a dict if the reward is one.
    episode_length: Transitions of the episode up to that row, int32.
  """

  env_state: Any
  episode_return: types.ArrayTree  # [B]
  episode_length: jax.Array  # [B]


class EpisodeStatistics(_Wrapper):
  """Keeps return and length of the episode that each environment is in.

  At a `LAST` row the state holds those of the episode that it closes; at a
  `FIRST` row they are 0. Stacked beside the rows they are what
  `finished_episode_metrics` asks for.
  """

  def __init__(self, env: protocol.BatchedEnvironment):
    """Wraps a batched environment; raises `ValueError` if it is not one."""
    super().__init__(env, batched=True)

  @property
  def num_envs(self) -> int:
    """The batch size `B`."""
    return self._env.num_envs

  def reset(self, key: jax.Array) -> tuple[StatisticsState, types.TimeStep]:
    """Opens an episode in every environment. Consumes `key`."""
    env_state, timestep = self._env.reset(key)
    state = StatisticsState(
      env_state=env_state,
      episode_return=jax.tree.map(jnp.zeros_like, timestep.reward),
      episode_length=jnp.zeros((self.num_envs,), jnp.int32),
    )
    return state, timestep

  def step(
    self, state: StatisticsState, action: types.ArrayTree
  ) -> tuple[StatisticsState, types.TimeStep]:
    """Steps every environment and adds the new row to its episode."""
    env_state, timestep = self._env.step(state.env_state, action)
    first = timestep.first()
    total = jax.tree.map(jnp.add, state.episode_return, timestep.reward)
    state = StatisticsState(
      env_state=env_state,
      episode_return=jax.tree.map(
        lambda x: jnp.where(first, jnp.zeros_like(x), x), total
      ),
      episode_length=jnp.where(first, 0, state.episode_length + 1),
    )
    return state, timestep


def finished_episode_metrics(
  timestep: types.TimeStep,
  episode_return: types.ArrayTree,
  episode_length: jax.Array,
) -> types.Metrics:
  """Means over the episodes that ended in a stretch of rows.

  Args:
    timestep: Rows. Shape `[T, B]`.
    episode_return: `StatisticsState.episode_return` at these rows; an array or
      a dict. Shape `[T, B]`.
    episode_length: `StatisticsState.episode_length` at these rows. `[T, B]`.

  Returns:
    Scalars: `episodes`, the number of `LAST` rows; `episode_return`, the mean
    return, summed over the keys of a dict; `episode_return/KEY`, the mean of
    each key of a dict; `episode_length`, the mean length. Where `episodes` is
    0 the means are 0 and say nothing.
  """
  last = timestep.last()
  chex.assert_equal_shape(
    [last, episode_length, *jax.tree.leaves(episode_return)]
  )
  count = jnp.sum(last, dtype=jnp.int32)

  def mean(x):
    return jnp.sum(jnp.where(last, x, 0)) / jnp.maximum(count, 1)

  metrics = {'episodes': count, 'episode_length': mean(episode_length)}
  if not isinstance(episode_return, dict):
    return metrics | {'episode_return': mean(episode_return)}
  per_key = trees.map_heads(mean, episode_return=episode_return)
  metrics |= {f'episode_return/{k}': v for k, v in per_key.items()}
  return metrics | {'episode_return': sum(per_key.values())}
