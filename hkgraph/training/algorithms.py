"""The learners by name: the one place that tells them apart.

Read without JAX, so that a command line can list them.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from hkgraph.learners import config as config_lib
from hkgraph.learners import dreamer_config


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A learner, as trainings need it.

  Attributes:
    name: What run folders and the command line call it.
    config: The class of its hyperparameters.
    make: `(env, network, config, normalize) -> Agent`, of what `train` takes;
      raises `ValueError` or `TypeError` if these do not go together.
  """

  name: str
  config: type
  make: Callable[[Any, Any, Any, bool], Any]


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


def _make_ppo(env, network, config, normalize):
  from hkgraph.learners import ppo

  network = _network(env, network, _policy_network, False, normalize)
  return ppo.make_ppo(network, config)


def _make_pqn(env, network, config, normalize):
  from hkgraph.learners import pqn
  from hkgraph.training import actions

  actions.check_discrete(env.action_spec(), 'pqn')
  network = _network(env, network, _q_network, True, normalize)
  agent = pqn.make_pqn(network, config)
  actions.check_number(network, env)
  return agent


def _make_dreamer(env, network, config, normalize):
  import haiku as hk

  from hkgraph.learners import dreamer

  if normalize:
    raise ValueError(
      'DreamerV3 squashes observations by symlog, so `normalize` has no '
      'meaning for it; leave it out'
    )
  cores = {'auto': None, 'gru': lambda: hk.GRU(config.sizes.recurrent_size)}
  if isinstance(network, str):
    if network not in cores:
      raise ValueError(
        'the network of DreamerV3 is the memory of its world model: '
        f"'auto' for that of the paper, 'gru' for an hk.GRU, or a graph; got "
        f'{network!r}'
      )
    network = cores[network]
  dreamer.check_reward(env.reward_spec())
  return dreamer.make_dreamer(
    env.observation_spec(), env.action_spec(), config, core=network
  )


def _network(env, network, of_graph, discrete, normalize):
  """The network of a graph or of a kind; another one is taken as it is."""
  from hkgraph.graph import spec as spec_lib
  from hkgraph.training import default_networks

  if isinstance(network, spec_lib.GraphSpec):
    return of_graph(network, env, normalize)
  if isinstance(network, str):
    return default_networks.make(network, env, discrete, normalize=normalize)
  return network


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


_PPO = Algorithm('ppo', config_lib.PPOConfig, _make_ppo)
_PQN = Algorithm('pqn', config_lib.PQNConfig, _make_pqn)
_DREAMER = Algorithm('dreamer', dreamer_config.DreamerConfig, _make_dreamer)
ALGORITHMS = {a.name: a for a in (_PPO, _PQN, _DREAMER)}
