"""An agent in a batch of environments: how trajectories are made."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.envs import protocol, wrappers

Agent = Any  # A `learners.agent.Agent`, whichever learner made it.
LearnerState = Any  # A `learners.agent.LearnerState`.


@chex.dataclass(frozen=True, mappable_dataclass=False)
class ActorState:
  """What one rollout leaves to the next.

  Attributes:
    environment: The environment's state.
    timestep: The row that no action was taken at yet.
    carry: The network's carry before that row.
    key: Typed key that the next rollout splits.
  """

  environment: types.ArrayTree
  timestep: types.TimeStep  # [B, ...]
  carry: types.ArrayTree  # [B, ...]
  key: chex.PRNGKey


def example_rows(env: protocol.BatchedEnvironment) -> types.TimeStep:
  """Rows as `env` shows them, but for their numbers: what `Agent.init` takes.

  Nothing is reset for them: they cost no compilation.

  Args:
    env: A batched environment.

  Returns:
    `FIRST` rows, 0 everywhere. Shape `[B, ...]`.
  """
  _, timestep = jax.eval_shape(env.reset, jax.random.key(0))
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), timestep)


def initial_actor_state(
  agent: Agent, env: protocol.BatchedEnvironment, key: chex.PRNGKey
) -> ActorState:
  """Resets the environments and puts the agent in front of them.

  Args:
    agent: An agent whose `init` has been called.
    env: A batched environment.
    key: A typed key. Consumed.

  Returns:
    The state before the first rollout. No two leaves share a buffer and none
    is weakly typed, so it can be donated and compiles its callers once.
  """
  env_key, carry_key, actor_key = jax.random.split(key, 3)
  environment, timestep = env.reset(env_key)
  state = ActorState(
    environment=environment,
    timestep=timestep,
    carry=agent.initial_carry(timestep.step_type.shape[0], carry_key),
    key=actor_key,
  )
  return jax.tree.map(jnp.copy, protocol.canonicalise(state))


def rollout(
  agent: Agent,
  env: protocol.BatchedEnvironment,
  learner_state: LearnerState,
  actor_state: ActorState,
  num_steps: int,
) -> tuple[ActorState, types.Trajectory, dict[str, Any]]:
  """Acts for `num_steps` steps in every environment.

  Row `T` is valued here as the bootstrap and met again as row 0 of the next
  rollout. So its carry is thrown away here, and the carry that is handed on is
  the one before it.

  Args:
    agent: The agent.
    env: A batched environment that begins new episodes by itself.
    learner_state: Whose parameters and statistics act; the number of its
      updates decides how much an agent with a schedule explores.
    actor_state: Where the last rollout ended.
    num_steps: Transitions per environment `T`, at least 1.

  Returns:
    The new actor state; the trajectory of rows `0..T`; and, of an
    `EpisodeStatistics`, `episode_return` and `episode_length` at rows `1..T`,
    shape `[T, B]`, else an empty dict.
  """
  keys = jax.random.split(actor_state.key, 2 + num_steps)
  next_key, value_key, action_keys = keys[0], keys[1], keys[2:]

  def act(state, key):
    environment, timestep, carry = state
    output, network_state = agent.act(
      learner_state.params,
      types.NetworkState(carry=carry, statistics=learner_state.statistics),
      key,
      timestep,
      num_updates=learner_state.num_updates,
    )
    row = (timestep, output.action, output.log_prob, output.value)
    return output, network_state.carry, (row, _episodes(environment))

  def step(state, key):
    output, carry, row = act(state, key)
    environment, timestep = env.step(state[0], output.environment_action)
    return (environment, timestep, carry), row

  def last(state):
    _, _, ((timestep, *decision, value), episodes) = act(state, value_key)
    # Nothing is done here: so that no sample is drawn for it, either.
    nothing = jax.tree.map(jnp.zeros_like, decision)
    return (timestep, *nothing, value), episodes

  state = (actor_state.environment, actor_state.timestep, actor_state.carry)
  state, (rows, episodes) = trees.scan(step, state, action_keys, last)
  environment, timestep, carry = state
  timesteps, *decisions, values = rows
  actions, log_probs = jax.tree.map(lambda x: x[:-1], decisions)
  trajectory = types.Trajectory(
    timestep=timesteps,
    action=actions,
    log_prob=log_probs,
    value=values,
    carry=actor_state.carry,
  )
  actor_state = ActorState(
    environment=environment, timestep=timestep, carry=carry, key=next_key
  )
  return actor_state, trajectory, jax.tree.map(lambda x: x[1:], episodes)


def _episodes(environment: types.ArrayTree) -> dict[str, Any]:
  if not isinstance(environment, wrappers.StatisticsState):
    return {}
  return {
    'episode_return': environment.episode_return,
    'episode_length': environment.episode_length,
  }
