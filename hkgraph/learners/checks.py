"""What the learners ask of a network, seen before anything is computed."""

from collections.abc import Mapping
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import optax

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.learners import config as config_lib


def check_arguments(
  network: Any, config: Any, config_class: type, optimizer: Any = None
) -> None:
  """Raises `TypeError` unless these are a network and a config of the class."""
  if not isinstance(network, network_lib.Network):
    raise TypeError(
      '`network` must be a Network, as `hg.policy_network(graph.finalize(), '
      'action_spec)`, `hg.q_network` or `hg.transform(fn)` make it, got '
      f'{network!r}'
    )
  check_config(config, config_class)
  if not isinstance(optimizer, optax.GradientTransformation | None):
    raise TypeError(
      '`optimizer` must be an optax.GradientTransformation, such as '
      f'`optax.adam(3e-4)`, got {optimizer!r}'
    )


def check_config(config: Any, config_class: type) -> None:
  """Raises `TypeError` unless `config` is one of the class."""
  if not isinstance(config, config_class):
    name = config_class.__name__
    raise TypeError(
      f'`config` must be a {name}, got {config!r}; write '
      f'`hg.{name}(num_envs=..., ...)`'
    )


def check_schedule(config: Any) -> None:
  """Raises `ValueError` if the step size falls to 0 at an unknown update."""
  if config.schedule == 'linear' and config.total_updates is None:
    raise ValueError(
      "`schedule='linear'` falls to 0 at `total_updates`, got None; give "
      "the number of updates, or take `schedule='constant'`"
    )


def check_exploration(config: config_lib.PQNConfig) -> None:
  """Raises `ValueError` if epsilon falls within an unknown time."""
  start, finish = config.epsilon_start, config.epsilon_finish
  if start != finish and config.total_updates is None:
    raise ValueError(
      f'epsilon goes from {start} to {finish} within `exploration_fraction` of '
      '`total_updates`, got None; give the number of updates, or make '
      '`epsilon_start` and `epsilon_finish` equal'
    )


def check_policy_value(
  outputs: Any, timestep: types.TimeStep, config: config_lib.PPOConfig
) -> None:
  """Checks that outputs, reward and advantage mode go together.

  Args:
    outputs: The network's outputs, or their shapes, for one row `[B, ...]`.
    timestep: The row.
    config: PPO's hyperparameters.

  Raises:
    TypeError: If the outputs are not a `PolicyValue` of distributions.
    ValueError: If values or advantages do not fit the reward.
  """
  if not isinstance(outputs, types.PolicyValue):
    raise TypeError(
      'the network of PPO must return `types.PolicyValue(policy=..., '
      f'value=...)`, got {type(outputs).__name__}'
    )
  _check_policy(outputs.policy)
  _check_value(outputs.value, timestep)
  _check_advantages(outputs.policy, timestep.reward, config)


def check_action_values(
  outputs: Any,
  timestep: types.TimeStep,
  carry: types.ArrayTree,
  config: config_lib.PQNConfig,
) -> None:
  """Checks that outputs are action values, and that the reward goes with them.

  Args:
    outputs: The network's outputs, or their shapes, for one row `[B, ...]`.
    timestep: The row.
    carry: The network's carry.
    config: PQN's hyperparameters.

  Raises:
    TypeError: If the outputs are not an array or a dict of arrays.
    ValueError: If shapes or keys do not fit, or a network without carry is to
      be warmed up.
  """
  heads = outputs if isinstance(outputs, Mapping) else {'': outputs}
  if not heads:
    raise ValueError('the network of PQN returned no action values, got {}')
  for key, q in heads.items():
    if not hasattr(q, 'shape'):
      raise TypeError(
        'the network of PQN must return action values, an array [B, A] or a '
        f'dict of them, got {type(q).__name__}; a network that returns '
        '`types.PolicyValue` is one for PPO'
      )
    _check_action_value(f'[{key!r}]' if key else '', q, timestep)
  if isinstance(timestep.reward, Mapping) and _keys(outputs) != _keys(
    timestep.reward
  ):
    raise ValueError(
      'rewards with keys need action values with the same keys, got values '
      f'{_describe(outputs)} for the reward {_describe(timestep.reward)}; let '
      'the environment add them up to one that all heads share'
    )
  if config.burn_in and not jax.tree.leaves(carry):
    raise ValueError(
      f'`burn_in` warms a carry, but this network has none, got '
      f'{config.burn_in}; leave it at 0'
    )


def check_trajectory(
  trajectory: types.Trajectory,
  config: config_lib.PPOConfig | config_lib.PQNConfig,
) -> None:
  """Raises `ValueError` unless a trajectory has the sizes of the config."""
  shape = trajectory.timestep.step_type.shape
  if shape != (config.num_steps + 1, config.num_envs):
    raise ValueError(
      f'`trajectory` must have {config.num_steps} + 1 rows of '
      f'{config.num_envs} environments, as `num_steps` and `num_envs` of the '
      f'config say, got step types of shape {shape}'
    )


def _check_action_value(name: str, q: Any, timestep: types.TimeStep) -> None:
  (batch_size,) = timestep.step_type.shape
  if len(q.shape) != 2 or q.shape[0] != batch_size or not q.shape[1]:
    raise ValueError(
      f'action values{name} must have shape ({batch_size}, A), one number for '
      f'each action in each row, got {tuple(q.shape)}'
    )
  if not jnp.issubdtype(q.dtype, jnp.floating):
    raise TypeError(f'action values{name} must be floats, got {q.dtype}')


def _check_policy(policy: Any) -> None:
  heads = policy.values() if isinstance(policy, Mapping) else [policy]
  for head in heads:
    if not isinstance(head, distrax.Distribution):
      raise TypeError(
        '`policy` must be a distrax distribution or a dict of them, got '
        f'{type(head).__name__}; make it with a policy head'
      )


def _check_value(value: types.ArrayTree, timestep: types.TimeStep) -> None:
  if jax.tree.structure(value) != jax.tree.structure(timestep.reward):
    raise ValueError(
      '`value` must hold one estimate for each reward, got '
      f'{_describe(value)} for the reward {_describe(timestep.reward)}'
    )
  shape = timestep.step_type.shape
  for leaf in jax.tree.leaves(value):
    if leaf.shape != shape:
      raise ValueError(
        f'`value` must have shape {shape}, one number for each row, got '
        f'{leaf.shape}; drop its last axis if that has size 1'
      )


def _check_advantages(
  policy: Any, reward: types.ArrayTree, config: config_lib.PPOConfig
) -> None:
  weights = config.advantage_weights
  if config.advantage_mode == 'per_head':
    if not isinstance(policy, Mapping) or _keys(policy) != _keys(reward):
      raise ValueError(
        "`advantage_mode='per_head'` needs one policy for each reward, got "
        f'policies {_describe(policy)} for the reward {_describe(reward)}; '
        "take `advantage_mode='combined'`"
      )
  elif weights is not None and _keys(weights) != _keys(reward):
    raise ValueError(
      '`advantage_weights` must have the keys of the reward, got weights '
      f'{_describe(weights)} for the reward {_describe(reward)}'
    )


def _keys(tree: Any) -> list[str] | None:
  return sorted(tree) if isinstance(tree, Mapping) else None


def _describe(tree: Any) -> str:
  keys = _keys(tree)
  return 'without keys' if keys is None else f'with keys {keys}'
