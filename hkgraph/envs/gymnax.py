"""Environments of gymnax: classic control, bsuite, MinAtar and others.

Lange (2022, "gymnax: A JAX-based Reinforcement Learning Environment Library"),
https://github.com/RobertTLange/gymnax. Versions 0.0.9 and 1.0 are understood.
"""

from collections.abc import Mapping
from typing import Any

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import packages, types
from hkgraph.envs import protocol, suites, wrappers


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """State of an environment.

  Attributes:
    env_state: What gymnax keeps.
    key: The typed key that the next transition will split.
  """

  env_state: Any
  key: jax.Array  # []


class Gymnax:
  """An environment of gymnax, without its automatic reset.

  Whatever ends an episode here is a termination: a time limit has to be set
  out of reach in `params`.
  """

  def __init__(self, env: Any, params: Any):
    """Wraps a `gymnax` environment with its parameters."""
    self._env = env
    self._params = params
    self._like = jax.eval_shape(self._open, jax.random.key(0))
    self._specs = _specs(env, params, self._like[0])

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode. Consumes `key`."""
    next_key, reset_key = jax.random.split(key)
    observation, env_state = self._open(reset_key)
    row = protocol.restart(self.reward_spec(), observation)
    return State(env_state=env_state, key=next_key), row

  def step(
    self, state: State, action: jax.Array
  ) -> tuple[State, types.TimeStep]:
    """Makes one transition.

    Args:
      state: The state that the last call returned.
      action: As the action spec says.
    """
    next_key, step_key = jax.random.split(state.key)
    observation, env_state, reward, over, _ = self._env.step_env(
      step_key, state.env_state, action, self._params
    )
    observation, env_state = protocol.cast_like(
      (observation, env_state), self._like
    )
    reward = jnp.reshape(jnp.asarray(reward, jnp.float32), ())
    row = protocol.transition(
      reward, observation, jnp.reshape(jnp.asarray(over, bool), ())
    )
    return State(env_state=env_state, key=next_key), row

  def observation_spec(self) -> protocol.Spec:
    return self._specs[0]

  def action_spec(self) -> protocol.Spec:
    return self._specs[1]

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()

  def _open(self, key):
    return protocol.canonicalise(self._env.reset_env(key, self._params))


def make(
  name: str,
  *,
  max_steps: int | None = None,
  params: Mapping[str, Any] | None = None,
  **kwargs: Any,
) -> protocol.Environment:
  """Makes an environment of gymnax.

  The time limit is counted here, so that it truncates: gymnax before 1.0
  counts it among the terminations, and its own is therefore set one step
  further. (DiscountingChain shows its time as a fraction of that.)

  Args:
    name: Its name in gymnax, as `'CartPole-v1'`.
    max_steps: Transitions after which an episode is truncated; None is the
      `max_steps_in_episode` of the environment's parameters, if they have it.
    params: Parameters of the environment that shall differ from the default
      ones, by name.
    **kwargs: For the constructor of the environment.

  Raises:
    ImportError: If gymnax is not installed.
    ValueError: If there is no such environment or parameter.
  """
  gymnax = packages.load('gymnax')
  suites.check_name('gymnax has no environment', name, gymnax.registered_envs)
  env, defaults = gymnax.make(name, **kwargs)
  for field in params or {}:
    suites.check_name(f'{name} has no parameter', field, vars(defaults))
  values = defaults.replace(**(params or {}))
  own = getattr(values, 'max_steps_in_episode', None)
  if max_steps is None and own is None:
    return Gymnax(env, values)
  limit = protocol.check_int(
    'max_steps', int(own) if max_steps is None else max_steps
  )
  if own is not None:
    beyond = 0 if hasattr(env, 'is_truncated') else 1
    values = values.replace(max_steps_in_episode=limit + beyond)
  return wrappers.TimeLimit(Gymnax(env, values), limit)


def _specs(env, params, seen) -> tuple[protocol.Spec, protocol.Spec]:
  """Specs of observation and action; shapes and dtypes are those seen."""
  space = env.observation_space(params)

  def leaf(inner, seen):
    low, high = _bounds(inner)
    return suites.array_spec(seen.shape, seen.dtype, low, high, 'observation')

  spaces = suites.map_spaces(lambda x: x, space)
  if jax.tree.structure(spaces) != jax.tree.structure(seen):
    spaces = jax.tree.map(lambda x: None, seen)
  observation = jax.tree.map(leaf, spaces, seen, is_leaf=lambda x: x is None)
  return observation, suites.map_spaces(_action_spec, env.action_space(params))


def _bounds(space) -> tuple[Any, Any]:
  if hasattr(space, 'n'):
    return 0, space.n - 1
  return getattr(space, 'low', -np.inf), getattr(space, 'high', np.inf)


def _action_spec(space) -> specs.Array:
  if hasattr(space, 'n'):
    return specs.DiscreteArray(int(space.n), name='action')
  low, high = _bounds(space)
  return suites.array_spec(space.shape, space.dtype, low, high, 'action')
