"""The data that travels between environments, networks and learners.

Arrays above the modules are time-major: `T` rows of `B` environments. The
reward and the discount of a row belong to the transition *into* it, and a
`LAST` row is followed by a `FIRST` row of the next episode (`dm_env`).
"""

from typing import Any

import chex
import dm_env
import jax
import jax.numpy as jnp

Array = jax.Array
ArrayTree = Any
Metrics = dict[str, Array]
StepType = dm_env.StepType


@chex.dataclass(frozen=True, mappable_dataclass=False)
class TimeStep:
  """A row: what an environment shows at one moment.

  Attributes:
    step_type: `FIRST` (0), `MID` (1) or `LAST` (2), int32.
    reward: Reward of the transition into the row; an array or a dict of them.
    discount: 0 if the transition into the row terminated the episode, else 1;
      so `LAST` with discount 1 is a truncation.
    observation: Any tree of arrays.
  """

  step_type: Array  # [...]
  reward: ArrayTree  # [...]
  discount: Array  # [...]
  observation: ArrayTree  # [..., *observation_shape]

  def first(self) -> Array:
    """Whether the row opens an episode. Shape of `step_type`, bool."""
    return self.step_type == jnp.int32(StepType.FIRST)

  def mid(self) -> Array:
    """Whether the row is inside an episode. Shape of `step_type`, bool."""
    return self.step_type == jnp.int32(StepType.MID)

  def last(self) -> Array:
    """Whether the row closes an episode. Shape of `step_type`, bool."""
    return self.step_type == jnp.int32(StepType.LAST)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class NetworkState:
  """All that a network remembers.

  Attributes:
    carry: Per batch element, reset where a row is `FIRST`.
    statistics: Without a batch axis; `apply` and `unroll` never change them.
  """

  carry: ArrayTree  # [B, ...] on every leaf
  statistics: ArrayTree


@chex.dataclass(frozen=True, mappable_dataclass=False)
class PolicyValue:
  """What an actor-critic network says about a row.

  Attributes:
    policy: A distrax distribution over actions, or a dict of them, one per
      head.
    value: Estimate of the return that follows the row; an array, or a dict
      with the keys of the reward.
  """

  policy: Any
  value: ArrayTree  # [...]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Trajectory:
  """`T` transitions between `T + 1` rows, as an actor met them.

  Attributes:
    timestep: Rows `0..T`; the last one is the bootstrap row.
    action: What the policy drew at rows `0..T-1`, in the policy's own space
      (before any squashing). Meaningless at `LAST` rows.
    log_prob: Log-density of `action`; a dict if the policy is one.
    value: Value estimates of rows `0..T`.
    carry: The network's carry before row 0.
  """

  timestep: TimeStep  # [T + 1, B, ...]
  action: ArrayTree  # [T, B, ...]
  log_prob: ArrayTree  # [T, B]
  value: ArrayTree  # [T + 1, B]
  carry: ArrayTree  # [B, ...]
