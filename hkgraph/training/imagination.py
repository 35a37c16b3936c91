"""What a world model expects of an episode, beside what came of it."""

from collections.abc import Mapping
import dataclasses

import chex
import jax
from jax import lax
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers
from hkgraph.learners import agent as agent_lib
from hkgraph.training import actor


@dataclasses.dataclass(frozen=True)
class Imagination:
  """The first `T` rows of an episode, true and imagined.

  Reward and discount of a row belong to the transition into it, so those of
  row 0 are nobody's: they are not a number here.

  Attributes:
    num_context: Rows `N` that the agent saw; the others it imagined.
    observation: What was observed, by name. Images are `[T, H, W, C]`, all else
      vectors `[T, d]`, one-hot where it was the number of a class.
    imagined_observation: The same, as the agent has it.
    reward: Shape `[T]`.
    imagined_reward: Expected reward. Shape `[T]`.
    discount: 0 where the transition terminated the episode, else 1. `[T]`.
    imagined_discount: Probability that it did not. Shape `[T]`.
  """

  num_context: int
  observation: Mapping[str, np.ndarray]
  imagined_observation: Mapping[str, np.ndarray]
  reward: np.ndarray
  imagined_reward: np.ndarray
  discount: np.ndarray
  imagined_discount: np.ndarray

  @property
  def num_rows(self) -> int:
    """Rows `T`, context included."""
    return len(self.reward)

  def errors(self) -> dict[str, tuple[float, float]]:
    """Computes the mean absolute errors within and after the context.

    Returns:
      Two means for each observation by name, for `reward` and for `continues`.
      Observations of a dict are named `observation/KEY`. Not a number where
      there is no row, as for the reward in a context of one.
    """
    pairs = {
      _label(name): (x, self.imagined_observation[name])
      for name, x in self.observation.items()
    }
    pairs['reward'] = (self.reward, self.imagined_reward)
    pairs['continues'] = (self.discount, self.imagined_discount)
    return {
      name: (
        _mean_error(true[: self.num_context], imagined[: self.num_context]),
        _mean_error(true[self.num_context :], imagined[self.num_context :]),
      )
      for name, (true, imagined) in pairs.items()
    }


def imagine(
  agent: agent_lib.Agent,
  env: protocol.Environment,
  params: types.ArrayTree,
  statistics: types.ArrayTree,
  key: chex.PRNGKey,
  *,
  num_context: int = 5,
  horizon: int = 15,
  deterministic: bool = True,
) -> Imagination:
  """Acts in an episode, and foresees it from its first rows.

  The agent acts to the end of the episode, or for `num_context + horizon`
  rows, whichever is first. Then its world model follows the first
  `num_context` rows, and goes on without observations by the actions that were
  taken: open loop. Rows of a next episode are left out, as no world model
  foresees where an episode begins.

  Args:
    agent: An agent with a world model, as `make_dreamer` makes it.
    env: A single environment.
    params: Parameters of the agent.
    statistics: Statistics of the agent.
    key: A typed key. Consumed.
    num_context: Rows that the world model observes, at least 1.
    horizon: Rows that it foresees at most, at least 1.
    deterministic: Whether the mode of the policy acts, or a sample.

  Returns:
    What was, and what was expected.

  Raises:
    ValueError: If the agent has no world model, or if the episode ends within
      the context.
  """
  if not hasattr(agent, 'foresee'):
    raise ValueError(
      'this agent has no world model to imagine with; runs of DreamerV3 have '
      'one (`hkgraph train --algo dreamer`)'
    )
  num_context = protocol.check_int('num_context', num_context)
  horizon = protocol.check_int('horizon', horizon)
  act_key, foresee_key = jax.random.split(key)
  timestep, action = _first_episode(
    *_act(
      agent,
      wrappers.vectorize(env, 1),
      params,
      statistics,
      act_key,
      num_context + horizon,
      deterministic,
    )
  )
  num_rows = len(timestep.step_type)
  if num_rows <= num_context:
    raise ValueError(
      f'the episode ended after {num_rows} rows, so a context of {num_context} '
      'leaves nothing to foresee; take a context of at most '
      f'{num_rows - 1} rows, or another seed'
    )
  foresee = jax.jit(lambda *args: agent.foresee(*args, num_context))
  foreseen = foresee(params, timestep, action, foresee_key)
  return _compare(timestep, jax.device_get(foreseen), num_context)


def _act(agent, envs, params, statistics, key, num_rows, deterministic):
  """Rows `[T, 1, ...]` and the actions that were taken at them."""

  def run(params, statistics, key):
    def step(actor_state, key):
      timestep = actor_state.timestep
      state = types.NetworkState(carry=actor_state.carry, statistics=statistics)
      output, state = agent.act(
        params, state, key, timestep, deterministic=deterministic
      )
      environment, next_timestep = envs.step(
        actor_state.environment, output.environment_action
      )
      actor_state = actor_state.replace(
        environment=environment, timestep=next_timestep, carry=state.carry
      )
      return actor_state, (timestep, output.action)

    start_key, key = jax.random.split(key)
    start = actor.initial_actor_state(agent, envs, start_key)
    return lax.scan(step, start, jax.random.split(key, num_rows))[1]

  return jax.device_get(jax.jit(run)(params, statistics, key))


def _first_episode(timestep, action):
  """Leaves out what follows the first `LAST` row, on the host."""
  is_last = timestep.step_type[:, 0] == types.StepType.LAST
  end = int(np.argmax(is_last)) + 1 if is_last.any() else len(is_last)
  return jax.tree.map(lambda x: x[:end], (timestep, action))


def _compare(timestep, foreseen, num_context) -> Imagination:
  def values(x):
    return np.asarray(x, float)[:, 0]

  def into_rows(x):
    return np.concatenate([[np.nan], values(x)[1:]])

  return Imagination(
    num_context=num_context,
    observation=jax.tree.map(values, foreseen.target),
    imagined_observation=jax.tree.map(values, foreseen.observation),
    reward=into_rows(timestep.reward),
    imagined_reward=into_rows(foreseen.reward),
    discount=into_rows(timestep.discount),
    imagined_discount=into_rows(foreseen.discount),
  )


def _label(name: str) -> str:
  return name if name == 'observation' else f'observation/{name}'


def _mean_error(true: np.ndarray, imagined: np.ndarray) -> float:
  error = np.abs(true - imagined)
  error = error[~np.isnan(true)]
  return float(np.mean(error)) if error.size else float('nan')
