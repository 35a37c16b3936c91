"""CartPole: balance a pole on a cart by pushing the cart left or right."""

import math

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers

_GRAVITY = 9.8  # m / s^2
_POLE_MASS = 0.1  # kg
_TOTAL_MASS = 1.1  # kg
_HALF_LENGTH = 0.5  # m
_POLE_MOMENT = _POLE_MASS * _HALF_LENGTH  # kg m
_FORCE = 10.0  # N
_TAU = 0.02  # s
_MAX_POSITION = 2.4  # m
_MAX_ANGLE = 12 * 2 * math.pi / 360  # rad


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """Where cart and pole are; float32."""

  position: jax.Array  # [], m
  velocity: jax.Array  # [], m / s
  angle: jax.Array  # [], rad, 0 is upright
  angular_velocity: jax.Array  # [], rad / s


class CartPole:
  """CartPole-v1 of Gymnasium, without its time limit.

  Equations of motion of Barto, Sutton and Anderson (1983, "Neuronlike adaptive
  elements that can solve difficult learning control problems"), corrected by
  Florian (2007), integrated by Euler steps of 0.02 s. The observation is
  position, velocity, angle and angular velocity. Action 1 pushes right, 0
  left. Every transition is worth 1, also the one that terminates: beyond 2.4 m
  or 12 degrees. Episodes begin uniformly within 0.05 of the origin.
  """

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode. Consumes `key`."""
    position, velocity, angle, angular_velocity = jax.random.uniform(
      key, (4,), jnp.float32, -0.05, 0.05
    )
    state = State(
      position=position,
      velocity=velocity,
      angle=angle,
      angular_velocity=angular_velocity,
    )
    return state, protocol.restart(self.reward_spec(), _observe(state))

  def step(
    self, state: State, action: jax.Array
  ) -> tuple[State, types.TimeStep]:
    """Pushes the cart for one time step.

    Args:
      state: Where cart and pole are.
      action: 0 (left) or 1 (right). Shape `[]`.
    """
    linear, angular = _accelerations(state, action)
    state = State(
      position=state.position + _TAU * state.velocity,
      velocity=state.velocity + _TAU * linear,
      angle=state.angle + _TAU * state.angular_velocity,
      angular_velocity=state.angular_velocity + _TAU * angular,
    )
    fell = jnp.abs(state.angle) > _MAX_ANGLE
    left = jnp.abs(state.position) > _MAX_POSITION
    return state, protocol.transition(
      jnp.float32(1), _observe(state), fell | left
    )

  def observation_spec(self) -> specs.BoundedArray:
    high = np.array(
      [2 * _MAX_POSITION, np.inf, 2 * _MAX_ANGLE, np.inf], np.float32
    )
    return specs.BoundedArray((4,), np.float32, -high, high, 'observation')

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(2, name='action')

  def reward_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()


def make(*, max_steps: int = 500) -> wrappers.TimeLimit:
  """CartPole-v1: truncated after `max_steps` transitions."""
  return wrappers.TimeLimit(CartPole(), max_steps)


def _observe(state: State) -> jax.Array:
  return jnp.stack(
    [state.position, state.velocity, state.angle, state.angular_velocity]
  )


def _accelerations(
  state: State, action: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Of the cart in m / s^2 and of the pole in rad / s^2."""
  sin, cos = jnp.sin(state.angle), jnp.cos(state.angle)
  force = jnp.where(action == 1, _FORCE, -_FORCE)
  centrifugal = _POLE_MOMENT * jnp.square(state.angular_velocity) * sin
  push = (force + centrifugal) / _TOTAL_MASS
  inertia = 4 / 3 - _POLE_MASS * jnp.square(cos) / _TOTAL_MASS
  angular = (_GRAVITY * sin - cos * push) / (_HALF_LENGTH * inertia)
  return push - _POLE_MOMENT * angular * cos / _TOTAL_MASS, angular
