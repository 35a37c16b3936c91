"""What PPO asks of a network, seen before anything is computed."""

from collections.abc import Mapping
from typing import Any

import distrax
import jax

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.learners import config as config_lib


def check_arguments(network: Any, config: Any) -> None:
  """Raises `TypeError` unless these are a network and a config of PPO."""
  if not isinstance(network, network_lib.Network):
    raise TypeError(
      '`network` must be a Network, as `hg.policy_network(graph.finalize(), '
      f'action_spec)` or `hg.transform(fn)` make it, got {network!r}'
    )
  if not isinstance(config, config_lib.PPOConfig):
    raise TypeError(
      f'`config` must be a PPOConfig, got {config!r}; write '
      '`hg.PPOConfig(num_envs=..., ...)`'
    )


def check_outputs(
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


def check_trajectory(
  trajectory: types.Trajectory, config: config_lib.PPOConfig
) -> None:
  """Raises `ValueError` unless a trajectory has the sizes of the config."""
  shape = trajectory.timestep.step_type.shape
  if shape != (config.num_steps + 1, config.num_envs):
    raise ValueError(
      f'`trajectory` must have {config.num_steps} + 1 rows of '
      f'{config.num_envs} environments, as `num_steps` and `num_envs` of the '
      f'config say, got step types of shape {shape}'
    )


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
