"""Delayed recall: name, `n` steps later, the cue seen at the first row."""

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """State of `DelayedRecall`.

  Attributes:
    key: Draws the noise of the rows to come.
    cue: The right answer, int32.
    row: Number of the row that is shown; the cue is row 0. int32.
  """

  key: jax.Array  # []
  cue: jax.Array  # []
  row: jax.Array  # []


class DelayedRecall:
  """A cue, then noise; the action `delay` rows after the cue must name it.

  Every row shows one of `num_cues` one-hot vectors. That of row 0 is the cue,
  all later ones are drawn afresh and independently, so neither a single row
  nor its magnitude tells cue from noise, and the row at which the answer is
  due holds nothing about it. The action taken at row `delay` is the answer:
  the transition out of it terminates the episode with reward 1 if the action
  is the cue and else 0. All other actions and rewards are without effect and 0.

  A policy without memory is right with probability `1 / num_cues` (chance).
  """

  def __init__(self, delay: int = 8, num_cues: int = 4):
    """Sets the task.

    Args:
      delay: Rows from the cue to the answer, at least 1. An episode has
        `delay + 1` transitions.
      num_cues: How many cues there are, at least 2; also the number of actions
        and the size of the observation.

    Raises:
      ValueError: If either is no integer or too small.
    """
    self._delay = protocol.check_int('delay', delay)
    self._num_cues = protocol.check_int('num_cues', num_cues, minimum=2)

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode by showing its cue. Consumes `key`."""
    cue, key = self._draw(key)
    state = State(key=key, cue=cue, row=jnp.int32(0))
    return state, protocol.restart(self.reward_spec(), self._show(cue))

  def step(
    self, state: State, action: jax.Array
  ) -> tuple[State, types.TimeStep]:
    """Shows noise, and judges the answer if it was due.

    Args:
      state: The state that the last call returned.
      action: Number of a cue, `0..num_cues - 1`. Shape `[]`.
    """
    due = state.row == self._delay
    reward = (due & (action == state.cue)).astype(jnp.float32)
    noise, key = self._draw(state.key)
    timestep = protocol.transition(reward, self._show(noise), due)
    return state.replace(key=key, row=state.row + 1), timestep

  def observation_spec(self) -> specs.BoundedArray:
    shape = (self._num_cues,)
    return specs.BoundedArray(shape, np.float32, 0.0, 1.0, 'observation')

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(self._num_cues, name='action')

  def reward_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()

  def _draw(self, key):
    next_key, draw_key = jax.random.split(key)
    # Cheaper than `randint`, and biased by no more than num_cues / 2^32.
    bits = jax.random.bits(draw_key, (), jnp.uint32)
    return (bits % jnp.uint32(self._num_cues)).astype(jnp.int32), next_key

  def _show(self, symbol):
    return jax.nn.one_hot(symbol, self._num_cues, dtype=jnp.float32)


def make(*, delay: int = 8, num_cues: int = 4) -> DelayedRecall:
  """`DelayedRecall`, whose episodes end by themselves."""
  return DelayedRecall(delay, num_cues)
