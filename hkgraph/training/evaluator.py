"""How well an agent does, over an exact number of episodes."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers
from hkgraph.learners import agent as agent_lib

Evaluate = Callable[..., 'Evaluation']


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Returns and lengths of `N` finished episodes.

  Attributes:
    returns: Undiscounted sums of rewards, summed over the keys of a dict.
      Shape `[N]`.
    lengths: Transitions. Shape `[N]`.
    returns_by_key: The returns of each key of a dict of rewards, `[N]` each;
      empty if the reward is an array.
    deterministic: Whether the mode of the policy acted, or a sample.
  """

  returns: np.ndarray
  lengths: np.ndarray
  returns_by_key: Mapping[str, np.ndarray]
  deterministic: bool

  @property
  def mean(self) -> float:
    """Mean return."""
    return float(np.mean(self.returns))

  @property
  def std(self) -> float:
    """Standard deviation of the return over episodes."""
    return float(np.std(self.returns))

  @property
  def mean_by_key(self) -> dict[str, float]:
    """Mean return of each key of a dict of rewards."""
    return {k: float(np.mean(v)) for k, v in self.returns_by_key.items()}

  def to_dict(self) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {
      'episodes': len(self.returns),
      'deterministic': self.deterministic,
      'mean_return': self.mean,
      'std_return': self.std,
      'mean_length': float(np.mean(self.lengths)),
      'mean_return_by_key': self.mean_by_key,
      'returns': self.returns.tolist(),
      'lengths': self.lengths.tolist(),
      'returns_by_key': {k: v.tolist() for k, v in self.returns_by_key.items()},
    }


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Progress:
  """Where an evaluation stands.

  Attributes:
    environment: State of the environments.
    timestep: The row that no action was taken at yet.
    carry: The network's carry before that row.
    key: Splits at every step.
    returns: Of the finished episodes of each environment, in order.
    lengths: Likewise.
    count: Finished episodes, also those beyond what is recorded.
    steps: Rows so far.
  """

  environment: Any
  timestep: types.TimeStep  # [B, ...]
  carry: types.ArrayTree  # [B, ...]
  key: chex.PRNGKey
  returns: types.ArrayTree  # [B, K]
  lengths: types.Array  # [B, K]
  count: types.Array  # [B]
  steps: types.Array  # []


def make_evaluator(
  agent: agent_lib.Agent,
  env: protocol.Environment,
  *,
  episodes: int = 100,
  batch_size: int | None = None,
  deterministic: bool = True,
  max_steps: int = 100_000,
) -> Evaluate:
  """Makes a compiled evaluation.

  Which episodes count is settled beforehand: the first `episodes /
  batch_size` of every environment, however long they take. (Whichever
  `episodes` end first would be the short ones.)

  Args:
    agent: The agent.
    env: A single environment.
    episodes: How many episodes `N`, at least 1.
    batch_size: Environments that run at once, at most `N`; None is `N`.
    deterministic: Whether the mode of the policy acts, or a sample.
    max_steps: Rows after which an evaluation gives up.

  Returns:
    A function `(params, statistics, key) -> Evaluation`. It consumes the key,
    and raises `RuntimeError` if an episode did not end within `max_steps`.
  """
  episodes = protocol.check_int('episodes', episodes)
  batch_size = episodes if batch_size is None else batch_size
  batch_size = min(protocol.check_int('batch_size', batch_size), episodes)
  max_steps = protocol.check_int('max_steps', max_steps)
  envs = wrappers.EpisodeStatistics(wrappers.vectorize(env, batch_size))
  quota = np.full(batch_size, episodes // batch_size, np.int32)
  quota[: episodes % batch_size] += 1
  wanted = np.arange(quota.max()) < quota[:, None]

  def act(params, statistics, key, progress):
    state = types.NetworkState(carry=progress.carry, statistics=statistics)
    output, state = agent.act(
      params, state, key, progress.timestep, deterministic=deterministic
    )
    return output.environment_action, state.carry

  def run(params, statistics, key):
    def step(progress):
      next_key, act_key = jax.random.split(progress.key)
      action, carry = act(params, statistics, act_key, progress)
      environment, timestep = envs.step(progress.environment, action)
      progress = progress.replace(
        environment=environment, timestep=timestep, carry=carry, key=next_key
      )
      return _record(progress)

    def unfinished(progress):
      due = jnp.any(progress.count < quota)
      return due & (progress.steps < max_steps)

    start = _start(agent, envs, key, int(quota.max()))
    end = lax.while_loop(unfinished, step, start)
    return end.returns, end.lengths, end.count

  compiled = jax.jit(run)

  def evaluate(params, statistics, key):
    returns, lengths, count = jax.device_get(compiled(params, statistics, key))
    _check_finished(np.minimum(count, quota).sum(), episodes, max_steps)
    by_key = returns if isinstance(returns, dict) else {'': returns}
    by_key = {k: v[wanted] for k, v in by_key.items()}
    return Evaluation(
      returns=sum(by_key.values()),
      lengths=lengths[wanted],
      returns_by_key=by_key if isinstance(returns, dict) else {},
      deterministic=deterministic,
    )

  return evaluate


def _start(agent, envs, key, quota: int) -> _Progress:
  env_key, carry_key, act_key = jax.random.split(key, 3)
  environment, timestep = envs.reset(env_key)

  def table(x):
    return jnp.zeros((envs.num_envs, quota), x.dtype)

  progress = _Progress(
    environment=environment,
    timestep=timestep,
    carry=agent.initial_carry(envs.num_envs, carry_key),
    key=act_key,
    returns=jax.tree.map(table, environment.episode_return),
    lengths=table(environment.episode_length),
    count=jnp.zeros((envs.num_envs,), jnp.int32),
    steps=jnp.int32(0),
  )
  return protocol.canonicalise(progress)


def _record(progress: _Progress) -> _Progress:
  """Writes down the episodes that the new row closes."""
  last = progress.timestep.last()
  slot = jnp.arange(progress.lengths.shape[1])[None]
  here = last[:, None] & (slot == progress.count[:, None])

  def write(table, x):
    return jnp.where(here, x[:, None], table)

  return progress.replace(
    returns=jax.tree.map(
      write, progress.returns, progress.environment.episode_return
    ),
    lengths=write(progress.lengths, progress.environment.episode_length),
    count=progress.count + last,
    steps=progress.steps + 1,
  )


def _check_finished(finished: int, episodes: int, max_steps: int) -> None:
  if finished < episodes:
    raise RuntimeError(
      f'{finished} of {episodes} episodes ended within {max_steps} steps; put '
      'the environment inside `TimeLimit`, or allow more `max_steps`'
    )
