"""Environments of gymnasium, which run in Python beside the accelerator.

Towers et al. (2024, "Gymnasium: A Standard Interface for Reinforcement Learning
Environments"), https://github.com/Farama-Foundation/Gymnasium.

Such an environment is no pure function. A batch of it is stepped through
ordered `io_callback`s, so that it fits into the same compiled rollout as any
other; but its state stays on the host. What is passed around is a ticket, and a
ticket is used once: stepping an older state, or two states of one batch, is an
error.
"""

from typing import Any

import chex
from dm_env import specs
import jax
from jax import experimental
import jax.numpy as jnp
import numpy as np

from hkgraph import packages, types
from hkgraph.envs import protocol, suites

_FIRST, _MID, _LAST = (np.int32(x) for x in types.StepType)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """What stands for the state of a batch on the host.

  Attributes:
    ticket: Number of the last call, alike in all rows; int32.
    is_last: Whether the row that each environment shows is `LAST`.
  """

  ticket: jax.Array  # [B]
  is_last: jax.Array  # [B]


class _Specs:
  """The specs of one environment."""

  def __init__(self, observation: protocol.Spec, action: protocol.Spec):
    self._specs = observation, action

  def observation_spec(self) -> protocol.Spec:
    return self._specs[0]

  def action_spec(self) -> protocol.Spec:
    return self._specs[1]

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()


class Gymnasium(_Specs):
  """Stands for one environment on the host; only a batch of it runs.

  `wrappers.vectorize(env, num_envs)` makes the batch. `reset` and `step` of one
  raise `TypeError`, as does every wrapper of a single environment when used.
  """

  def __init__(self, name: str, **kwargs: Any):
    """Looks at an environment; `name` and `kwargs` are for `gymnasium.make`."""
    self._name, self._kwargs = name, kwargs
    env = self._make()
    super().__init__(
      suites.map_spaces(_observation_spec, env.observation_space),
      suites.map_spaces(_action_spec, env.action_space),
    )
    env.close()

  def vectorize(self, num_envs: int) -> 'GymnasiumBatch':
    """A batch of `num_envs` environments, at least 1."""
    return GymnasiumBatch(
      self._make,
      protocol.check_int('num_envs', num_envs),
      self.observation_spec(),
      self.action_spec(),
    )

  def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
    """Raises `TypeError`."""
    raise TypeError(
      f'{self._name!r} runs on the host and only as a batch; make one with '
      '`wrappers.vectorize(env, num_envs)`, and give a time limit as '
      '`max_steps` when the environment is made'
    )

  def step(
    self, state: Any, action: types.ArrayTree
  ) -> tuple[Any, types.TimeStep]:
    """Raises `TypeError`."""
    return self.reset(None)

  def _make(self):
    return packages.load('gymnasium').make(self._name, **self._kwargs)


class GymnasiumBatch(_Specs):
  """`num_envs` environments on the host, each of which resets itself.

  A batch has one set of environments, which the first reset makes; each reset
  begins anew with it, with seeds from its key. Rows do not depend on what was
  done before that reset. Actions outside of their bounds are clipped to them.
  Calls cannot be vmapped, and run in the order of the program.
  """

  def __init__(self, make: Any, num_envs: int, observation: Any, action: Any):
    """Takes a function that makes one environment, and its specs."""
    super().__init__(observation, action)
    self._make, self._num_envs = make, num_envs
    self._envs = None
    self._ticket = 0

  @property
  def num_envs(self) -> int:
    """The batch size `B`."""
    return self._num_envs

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode in every environment.

    Args:
      key: A typed key, from which every environment gets a seed. Consumed.

    Returns:
      The state and `FIRST` rows, `[B, ...]` on every leaf.

    Raises:
      TypeError: If `key` is not a single typed key.
    """
    protocol.check_key(key)
    seeds = jax.random.bits(key, (self._num_envs,), jnp.uint32)
    return self._call(self._host_reset, seeds)

  def step(
    self, state: State, action: types.ArrayTree
  ) -> tuple[State, types.TimeStep]:
    """Makes one transition, or the reset that is due, in every environment.

    Args:
      state: The state that the last call returned, and no other.
      action: Tree of the action spec's structure, `[B, ...]` on every leaf;
        without meaning where the last row was `LAST`.

    Returns:
      The new state and rows, `[B, ...]` on every leaf.

    Raises:
      ValueError: If the structure or a shape of `action` is wrong; outside of
        `jax.jit` also if a value is out of bounds.
      TypeError: If floats are given for integers or the reverse.
      RuntimeError: If the state is not the newest one; JAX wraps it.
    """
    spec = self.action_spec()
    action = protocol.check_action(spec, action, self._num_envs)
    protocol.check_action_range(spec, action, state.is_last)
    return self._call(self._host_step, state.ticket, action)

  def close(self) -> None:
    """Closes the environments; a later reset makes new ones."""
    if self._envs is not None:
      self._envs.close()
    self._envs = None

  def _call(self, function, *args):
    batch = (self._num_envs,)

    def like(spec):
      return jax.ShapeDtypeStruct((*batch, *spec.shape), spec.dtype)

    result = (
      jax.ShapeDtypeStruct(batch, jnp.int32),
      types.TimeStep(
        step_type=jax.ShapeDtypeStruct(batch, jnp.int32),
        reward=jax.ShapeDtypeStruct(batch, jnp.float32),
        discount=jax.ShapeDtypeStruct(batch, jnp.float32),
        observation=jax.tree.map(like, self.observation_spec()),
      ),
    )
    ticket, row = experimental.io_callback(
      function, result, *args, ordered=True
    )
    return State(ticket=ticket, is_last=row.last()), row

  def _host_reset(self, seeds):
    if self._envs is None:
      vector = packages.load('gymnasium').vector
      self._envs = vector.SyncVectorEnv(
        [self._make] * self._num_envs,
        autoreset_mode=vector.AutoresetMode.NEXT_STEP,
      )
    seeds = [int(seed) for seed in np.asarray(seeds)]
    observation, _ = self._envs.reset(seed=seeds)
    none = np.zeros(self._num_envs, bool)
    self._last = ~none  # As if an episode had ended just before.
    return self._row(observation, none, none, none)

  def _host_step(self, ticket, action):
    if self._envs is None or int(np.asarray(ticket)[0]) != self._ticket:
      raise RuntimeError(
        'the state of an environment on the host can be stepped only once, and '
        'only if nothing was reset since; keep one state per batch, and make '
        'another batch with `wrappers.vectorize` for another rollout'
      )
    action = _to_host(
      self.action_spec(), self._envs.single_action_space, action
    )
    observation, reward, terminated, truncated, _ = self._envs.step(action)
    return self._row(observation, reward, terminated, truncated)

  def _row(self, observation, reward, terminated, truncated):
    """Ticket and rows; after a `LAST` row comes a `FIRST` one."""
    first, self._last = self._last, terminated | truncated
    kind = np.where(self._last, _LAST, _MID)
    self._ticket = (self._ticket + 1) % 2**31
    row = types.TimeStep(
      step_type=np.where(first, _FIRST, kind),
      reward=np.where(first, 0, reward).astype(np.float32),
      discount=1 - np.asarray(terminated, np.float32),
      observation=jax.tree.map(
        lambda s, x: np.array(x, s.dtype), self.observation_spec(), observation
      ),
    )
    return np.full(self._num_envs, self._ticket, np.int32), row


def make(
  name: str, *, max_steps: int | None = None, **kwargs: Any
) -> Gymnasium:
  """Makes an environment of gymnasium, to be batched.

  Args:
    name: Its id in gymnasium, as `'CartPole-v1'`.
    max_steps: Transitions after which an episode is truncated; None is the
      limit that the environment is registered with.
    **kwargs: For `gymnasium.make`.

  Raises:
    ImportError: If gymnasium is not installed.
    ValueError: If there is no such environment, or one of its spaces is
      neither an array nor a dict of them.
  """
  gymnasium = packages.load('gymnasium')
  if ':' not in name:  # Else a module is imported that registers it.
    suites.check_name('gymnasium has no environment', name, gymnasium.registry)
  if max_steps is not None:
    kwargs['max_episode_steps'] = protocol.check_int('max_steps', max_steps)
  try:
    return Gymnasium(name, **{'disable_env_checker': True} | kwargs)
  except gymnasium.error.DependencyNotInstalled as error:
    raise ImportError(f'{name!r} needs more than gymnasium: {error}') from error
  except gymnasium.error.Error as error:
    raise ValueError(f'gymnasium cannot make {name!r}: {error}') from error


def _observation_spec(space) -> specs.Array:
  if hasattr(space, 'n') and not space.shape:  # Discrete.
    if space.start == 0:
      return specs.DiscreteArray(int(space.n), name='observation')
    return specs.BoundedArray(
      (), np.int32, space.start, space.start + space.n - 1, 'observation'
    )
  return _array_spec(space, 'observation')


def _action_spec(space) -> specs.Array:
  if hasattr(space, 'n') and not space.shape:
    return specs.DiscreteArray(int(space.n), name='action')
  return _array_spec(space, 'action')


def _array_spec(space, name: str) -> specs.Array:
  """Of a Box, MultiBinary or MultiDiscrete space."""
  if (
    space.shape is None or space.dtype is None or space.dtype.kind not in 'fiub'
  ):
    raise ValueError(
      f'`{name}` must be made of arrays of numbers, got the space {space}'
    )
  dtype = jax.dtypes.canonicalize_dtype(space.dtype)
  if hasattr(space, 'nvec'):
    low, high = space.start, space.start + space.nvec - 1
  else:
    low, high = getattr(space, 'low', 0), getattr(space, 'high', 1)
  return suites.array_spec(space.shape, dtype, low, high, name)


def _to_host(spec, space, action):
  """Actions as the spaces of gymnasium ask for them."""
  if isinstance(spec, dict):
    return {k: _to_host(spec[k], space[k], action[k]) for k in spec}
  action = np.asarray(action).astype(space.dtype)
  if isinstance(spec, specs.DiscreteArray):
    return action + space.start
  if hasattr(space, 'low'):
    return np.clip(action, space.low, space.high)
  return action
