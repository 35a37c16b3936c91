"""From what `train` takes to functions that run."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import envs
from hkgraph import network as network_lib
from hkgraph.envs import protocol, wrappers
from hkgraph.graph import spec as spec_lib
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import config as config_lib
from hkgraph.learners import ppo
from hkgraph.training import actor

Update = Callable[[Any], tuple[Any, Any]]


def build(
  env: protocol.Environment | str,
  network: network_lib.Network | spec_lib.GraphSpec,
  config: config_lib.PPOConfig,
  *,
  normalize: bool = False,
) -> tuple[protocol.Environment, agent_lib.Agent]:
  """Makes environment and agent of what `train` takes."""
  if isinstance(env, str):
    env = envs.make(env)
  if isinstance(network, spec_lib.GraphSpec):
    reward_spec = env.reward_spec()
    value = 'value'
    if isinstance(reward_spec, Mapping):
      value = {key: f'value_{key}' for key in reward_spec}
    network = network_lib.policy_network(
      network, env.action_spec(), value=value, normalize=normalize
    )
  return env, ppo.make_ppo(network, config)


def make_update(
  agent: agent_lib.Agent,
  env: protocol.Environment,
  config: config_lib.PPOConfig,
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
    learner_key, actor_key, row_key = jax.random.split(key, 3)
    learner_state = agent.init(learner_key, envs_.reset(row_key)[1])
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
