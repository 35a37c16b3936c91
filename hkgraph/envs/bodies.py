"""Bodies: points that each find their place in a formation around a goal."""

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers

_ARENA = 2.0  # Positions stay within +-2 in both directions.
_RADIUS = 0.5  # Of the formation.
_SPEED = 0.1  # Distance that an action of 1 covers.


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """Where everything is; float32."""

  position: jax.Array  # [num_bodies, 2]
  goal: jax.Array  # [2]


class Bodies:
  """`num_bodies` points in the plane, with one goal between them.

  Body `i` has its place on a regular polygon around the goal, at angle
  `2 pi i / num_bodies` and distance 0.5; which place is its own a body must
  learn, for it is shown only its position, the goal and the mean position of
  all bodies, six numbers. Its action moves it by 0.1 times the action. With
  the distances measured after the move, the reward of body `i` is

    -(1 - shared_weight) * |position_i - place_i|
      - shared_weight * |mean position - goal|,

  whose second term all share and any one can spoil. All rewards are 0 exactly
  when every body is in its place. Bodies start uniformly in [-1, 1]^2, the
  goal lies in [-0.5, 0.5]^2. Nothing terminates: put it inside `TimeLimit`.

  Observations, actions and rewards are dicts with the keys `body_0`,
  `body_1`, ...
  """

  def __init__(self, num_bodies: int = 3, *, shared_weight: float = 0.5):
    """Sets the task.

    Args:
      num_bodies: How many bodies, at least 2.
      shared_weight: Weight of the shared error, in [0, 1].

    Raises:
      ValueError: If either is out of range.
    """
    num_bodies = protocol.check_int('num_bodies', num_bodies, minimum=2)
    if not 0 <= shared_weight <= 1:
      raise ValueError(
        f'`shared_weight` must lie in [0, 1], got {shared_weight!r}'
      )
    self._names = tuple(f'body_{i}' for i in range(num_bodies))
    self._shared_weight = shared_weight
    angle = 2 * np.pi * np.arange(num_bodies) / num_bodies
    offset = _RADIUS * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    self._offset = offset.astype(np.float32)

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode. Consumes `key`."""
    shape = (len(self._names) + 1, 2)
    points = jax.random.uniform(key, shape, jnp.float32, -1, 1)
    state = State(position=points[:-1], goal=0.5 * points[-1])
    return state, protocol.restart(self.reward_spec(), self._observe(state))

  def step(
    self, state: State, action: dict[str, jax.Array]
  ) -> tuple[State, types.TimeStep]:
    """Moves every body.

    Args:
      state: Where everything is.
      action: A move for every body, clipped to [-1, 1]. Shape `[2]` each.
    """
    move = jnp.stack([action[name] for name in self._names])
    position = state.position + _SPEED * jnp.clip(move, -1, 1)
    state = state.replace(position=jnp.clip(position, -_ARENA, _ARENA))
    return state, protocol.transition(
      self._reward(state), self._observe(state), jnp.bool_(False)
    )

  def observation_spec(self) -> dict[str, specs.BoundedArray]:
    return self._each(
      specs.BoundedArray((6,), np.float32, -_ARENA, _ARENA, 'observation')
    )

  def action_spec(self) -> dict[str, specs.BoundedArray]:
    return self._each(
      specs.BoundedArray((2,), np.float32, -1.0, 1.0, name='action')
    )

  def reward_spec(self) -> dict[str, specs.Array]:
    return self._each(specs.Array((), np.float32, name='reward'))

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()

  def _each(self, spec):
    return dict.fromkeys(self._names, spec)

  def _observe(self, state):
    shared = jnp.concatenate([state.goal, jnp.mean(state.position, axis=0)])
    own = zip(self._names, state.position, strict=True)
    return {name: jnp.concatenate([here, shared]) for name, here in own}

  def _reward(self, state):
    error = state.position - state.goal[None] - self._offset
    own = jnp.linalg.norm(error, axis=-1)
    mean_position = jnp.mean(state.position, axis=0)
    shared = jnp.linalg.norm(mean_position - state.goal)
    weight = self._shared_weight
    reward = -(1 - weight) * own - weight * shared
    return dict(zip(self._names, reward, strict=True))


def make(
  *, num_bodies: int = 3, shared_weight: float = 0.5, max_steps: int = 50
) -> wrappers.TimeLimit:
  """`Bodies`, truncated after `max_steps` transitions."""
  env = Bodies(num_bodies, shared_weight=shared_weight)
  return wrappers.TimeLimit(env, max_steps)
