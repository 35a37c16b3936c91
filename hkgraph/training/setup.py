"""From what `train` takes to functions that run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import envs
from hkgraph.envs import protocol, wrappers
from hkgraph.graph import builder
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import config as config_lib
from hkgraph.learners import dreamer_config
from hkgraph.training import actor, algorithms

Config = (
  config_lib.PPOConfig | config_lib.PQNConfig | dreamer_config.DreamerConfig
)
Update = Callable[[Any], tuple[Any, Any]]


def build(
  env: protocol.Environment | str,
  network: Any,
  config: Config,
  *,
  normalize: bool = False,
) -> tuple[protocol.Environment, agent_lib.Agent]:
  """Makes environment and agent of what `train` takes.

  Raises:
    TypeError: If `env` is no environment, or `network` a graph that is not
      finished.
    ValueError: If environment and network do not serve the algorithm of
      `config`, or the environment's rows are not as its specs say.
  """
  algorithm = algorithms.of(config)
  if isinstance(env, str):
    env = envs.make(env)
  protocol.check_environment(env)
  if isinstance(network, builder.PopulationGraph):
    raise TypeError(
      '`network` is a graph that is still being built; give what its '
      '`finalize()` returns'
    )
  return env, algorithm.make(env, network, config, normalize)


def make_update(
  agent: agent_lib.Agent,
  env: protocol.Environment,
  config: Config,
  key: jax.Array,
) -> tuple[Update, Any]:
  """Makes the compiled update, and the state before the first one.

  Args:
    agent: The agent.
    env: A single environment.
    config: Its `num_envs` and `num_steps` are the size of a rollout.
    key: A typed key. Consumed.

  Returns:
    A function `((learner_state, actor_state)) -> (same, metrics)` that is
    given its argument to keep, and the first argument.
  """
  envs_ = wrappers.EpisodeStatistics(wrappers.vectorize(env, config.num_envs))

  def start(key):
    learner_key, actor_key = jax.random.split(key)
    learner_state = agent.init(learner_key, actor.example_rows(envs_))
    actor_state = actor.initial_actor_state(agent, envs_, actor_key)
    return learner_state, actor_state

  def update(state):
    learner_state, actor_state = state
    actor_state, trajectory, episodes = actor.rollout(
      agent, envs_, learner_state, actor_state, config.num_steps
    )
    learner_state, metrics = agent.update(learner_state, trajectory)
    rows = jax.tree.map(lambda x: x[1:], trajectory.timestep)
    metrics |= wrappers.finished_episode_metrics(rows, **episodes)
    return (learner_state, actor_state), metrics

  # Copied, as no two leaves may share a buffer that is given away.
  state = jax.tree.map(jnp.copy, jax.jit(start)(key))
  return jax.jit(update, donate_argnums=0), state
