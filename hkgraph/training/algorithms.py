"""The learners by name: the one place that tells them apart.

Read without JAX, so that a command line can list them.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from hkgraph.learners import config as config_lib


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A learner, as trainings need it.

  Attributes:
    name: What run folders and the command line call it.
    config: The class of its hyperparameters.
    discrete: Whether its network gives a value to each of finitely many
      actions, instead of a policy and the value of a row.
    make: `(network, config) -> Agent`.
    graph_network: `(spec, env, normalize) -> Network`, of a graph with the
      outputs that the learner asks for.
  """

  name: str
  config: type
  discrete: bool
  make: Callable[[Any, Any], Any]
  graph_network: Callable[[Any, Any, bool], Any]


def of(config: Any) -> Algorithm:
  """Finds the algorithm of some hyperparameters.

  Raises:
    TypeError: If they are those of none.
  """
  for algorithm in ALGORITHMS.values():
    if isinstance(config, algorithm.config):
      return algorithm
  allowed = ' or '.join(a.config.__name__ for a in ALGORITHMS.values())
  raise TypeError(f'`config` must be a {allowed}, got {config!r}')


def _make_ppo(network, config):
  from hkgraph.learners import ppo

  return ppo.make_ppo(network, config)


def _make_pqn(network, config):
  from hkgraph.learners import pqn

  return pqn.make_pqn(network, config)


def _policy_network(spec, env, normalize):
  from hkgraph import network as network_lib

  reward_spec = env.reward_spec()
  value = 'value'
  if isinstance(reward_spec, Mapping):
    value = {key: f'value_{key}' for key in reward_spec}
  return network_lib.policy_network(
    spec, env.action_spec(), value=value, normalize=normalize
  )


def _q_network(spec, env, normalize):
  from hkgraph import network as network_lib

  return network_lib.q_network(spec, env.action_spec(), normalize=normalize)


_PPO = Algorithm(
  name='ppo',
  config=config_lib.PPOConfig,
  discrete=False,
  make=_make_ppo,
  graph_network=_policy_network,
)
_PQN = Algorithm(
  name='pqn',
  config=config_lib.PQNConfig,
  discrete=True,
  make=_make_pqn,
  graph_network=_q_network,
)
ALGORITHMS = {a.name: a for a in (_PPO, _PQN)}
