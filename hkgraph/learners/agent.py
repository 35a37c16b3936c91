"""What every learner makes: an agent of pure functions."""

from collections.abc import Callable
import dataclasses

import chex
import optax

from hkgraph import types
from hkgraph.modules import distributions


@chex.dataclass(frozen=True, mappable_dataclass=False)
class LearnerState:
  """All that a learner changes.

  Attributes:
    params: The network's parameters.
    statistics: The network's statistics, `NetworkState.statistics`.
    opt_state: The optimizer's state.
    key: Typed key that the next update splits.
    num_updates: Number of updates that were applied, int32.
  """

  params: types.ArrayTree
  statistics: types.ArrayTree
  opt_state: optax.OptState
  key: chex.PRNGKey
  num_updates: types.Array  # []


@chex.dataclass(frozen=True, mappable_dataclass=False)
class ActorOutput:
  """What an agent decides at a row.

  Attributes:
    action: The action in the policy's own space, as the learner wants it back.
    environment_action: The same action as the environment takes it.
    log_prob: Log-density of `action`; a dict if the policy is one.
    value: Estimate of the return that follows the row.
  """

  action: types.ArrayTree  # [B, ...]
  environment_action: types.ArrayTree  # [B, ...]
  log_prob: types.ArrayTree  # [B]
  value: types.ArrayTree  # [B]


def decide(
  decision: types.PolicyValue, key: chex.PRNGKey, deterministic: bool
) -> ActorOutput:
  """Takes the mode of a policy, or a sample by `key`, which is consumed."""
  policy = decision.policy
  if deterministic:
    action = distributions.mode(policy)
  else:
    action = distributions.sample(policy, key)
  return ActorOutput(
    action=action,
    environment_action=distributions.to_environment(policy, action),
    log_prob=distributions.log_prob(policy, action),
    value=decision.value,
  )


@dataclasses.dataclass(frozen=True)
class Agent:
  """Pure functions that act and learn; none has ever seen an environment.

  All can be jitted, vmapped over seeds and donated to.

  Attributes:
    init: `(key, timestep) -> LearnerState`, from one row `[B, ...]`.
    initial_carry: `(batch_size, key=None) -> carry`, after `init`.
    act: `(params, state, key, timestep, *, deterministic=False,
      num_updates=None) -> (ActorOutput, NetworkState)`, on one row `[B, ...]`.
      `num_updates` is what a schedule of the exploration reads; None stands for
      its end.
    update: `(learner_state, trajectory) -> (learner_state, metrics)`.
  """

  init: Callable[..., LearnerState]
  initial_carry: Callable[..., types.ArrayTree]
  act: Callable[..., tuple[ActorOutput, types.NetworkState]]
  update: Callable[..., tuple[LearnerState, types.Metrics]]
