"""Whether a learner of action values can serve an environment."""

from collections.abc import Mapping
from typing import Any

from dm_env import specs
import jax
import numpy as np

from hkgraph import network as network_lib
from hkgraph.envs import protocol, wrappers
from hkgraph.training import actor


def check_discrete(action_spec: protocol.Spec, name: str) -> None:
  """Checks that actions are one number from `0` to `A - 1` each.

  Args:
    action_spec: A spec, or a dict with one for each head.
    name: Of the learner, for the error.

  Raises:
    ValueError: If a spec is another one.
  """
  for spec in jax.tree.leaves(action_spec):
    if (
      not isinstance(spec, specs.BoundedArray)
      or not np.issubdtype(spec.dtype, np.integer)
      or spec.shape
      or spec.minimum != 0
    ):
      raise ValueError(
        f'{name!r} learns the values of finitely many actions, numbered from '
        f'0, but the action spec is {spec}; use PPO (`PPOConfig`, `--algo '
        'ppo`), or let the environment number its actions'
      )


def check_number(network: network_lib.Network, env: Any) -> None:
  """Checks that a network has a value for each action of an environment.

  Outputs that are no action values at all are left to the learner's checks.

  Raises:
    ValueError: If heads or numbers of actions differ.
  """

  timestep = actor.example_rows(wrappers.vectorize(env, 1))

  def run(key):
    params, state = network.init(key, timestep.observation)
    outputs, _ = network.apply(
      params, state, key, timestep.observation, timestep.first()
    )
    return outputs

  outputs = jax.eval_shape(run, jax.random.key(0))
  given, wanted = _by_head(outputs), _by_head(env.action_spec())
  if not all(getattr(q, 'shape', ()) for q in given.values()):
    return
  given = {key: q.shape[-1] for key, q in given.items()}
  wanted = {key: int(spec.maximum) + 1 for key, spec in wanted.items()}
  if given != wanted:
    raise ValueError(
      f'the network must give {_describe(wanted)} action values, as the '
      f'action spec says, got {_describe(given)}'
    )


def _by_head(tree: Any) -> dict[str, Any]:
  return dict(tree) if isinstance(tree, Mapping) else {'': tree}


def _describe(sizes: dict[str, int]) -> str:
  return str(sizes['']) if set(sizes) == {''} else str(sizes)
