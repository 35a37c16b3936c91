"""Grid worlds of navix, which are those of MiniGrid.

Pignatelli et al. (2024, "NAVIX: Scaling MiniGrid Environments with JAX"),
https://github.com/epignatelli/navix, version 4; it needs Python 3.12.
"""

from typing import Any

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import packages, types
from hkgraph.envs import protocol, suites

_OBSERVATIONS = (
  'categorical',
  'categorical_first_person',
  'rgb',
  'rgb_first_person',
  'symbolic',
  'symbolic_first_person',
)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """State of a grid world.

  Attributes:
    world: What navix keeps, its typed key included.
    num_steps: Transitions made in this episode, int32.
  """

  world: Any
  num_steps: jax.Array  # []


class Navix:
  """A grid world of navix, without its automatic reset.

  Truncated after the `max_steps` of the environment.
  """

  def __init__(
    self, env: Any, *, flatten: bool = False, keep_pictures: bool = True
  ):
    """Wraps a `navix.Environment`.

    Args:
      env: The environment; whether it resets itself does not matter.
      flatten: Whether observations are made vectors.
      keep_pictures: Whether the state keeps the picture of the empty grid that
        navix draws at every reset. Only pictures are made from it, and it is
        most of the state.
    """
    self._env = env
    self._flatten = flatten
    self._keep_pictures = keep_pictures
    self._like = jax.eval_shape(self._open, jax.random.key(0))

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens an episode. Consumes `key`."""
    state, observation = self._open(key)
    return state, protocol.restart(self.reward_spec(), observation)

  def step(
    self, state: State, action: jax.Array
  ) -> tuple[State, types.TimeStep]:
    """Makes one transition.

    Args:
      state: The state that the last call returned.
      action: Number of an action. Shape `[]`.
    """
    moment = self._timestep(state)
    # The half of navix's `step` that never resets: `step` itself would have
    # its reset traced and compiled, too.
    moment = self._env._step(moment, action)
    state, observation = protocol.cast_like(self._split(moment), self._like)
    row = protocol.transition(
      jnp.asarray(moment.reward, jnp.float32),
      observation,
      moment.is_termination(),
      moment.is_truncation(),
    )
    return state, row

  def observation_spec(self) -> specs.Array:
    seen, space = self._like[1], self._env.observation_space
    low, high = np.asarray(space.minimum), np.asarray(space.maximum)
    if seen.dtype == np.int32:  # Categories: walls are -1, navix says from 0.
      low = np.minimum(low, -1)
    if self._flatten:
      low, high = low.min(), high.max()
    return suites.array_spec(seen.shape, seen.dtype, low, high, 'observation')

  def action_spec(self) -> specs.DiscreteArray:
    # Of NumPy, as the space's own arithmetic would be traced.
    num_actions = int(np.asarray(self._env.action_space.maximum)) + 1
    return specs.DiscreteArray(num_actions, name='action')

  def reward_spec(self) -> specs.Array:
    space = self._env.reward_space
    low, high = np.asarray(space.minimum), np.asarray(space.maximum)
    return suites.array_spec((), np.float32, low, high, 'reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()

  def _open(self, key):
    return protocol.canonicalise(self._split(self._env.reset(key)))

  def _split(self, moment) -> tuple[State, jax.Array]:
    """State and observation of a moment."""
    world = moment.state
    if not self._keep_pictures:
      world = world.replace(cache=None)
    observation = moment.observation
    if self._flatten:
      observation = jnp.ravel(observation)
    return State(world=world, num_steps=moment.t), observation

  def _timestep(self, state: State):
    """The moment that navix asks for; what it does not read is empty."""
    environment = _navix().environments.environment
    return environment.Timestep(
      t=state.num_steps,
      observation=None,
      action=None,
      reward=None,
      step_type=None,
      state=state.world,
    )


def make(
  name: str,
  *,
  observation: str = 'symbolic',
  flatten: bool = False,
  max_steps: int | None = None,
  **kwargs: Any,
) -> Navix:
  """Makes a grid world of navix.

  Args:
    name: Its name in navix, as `'Navix-Empty-5x5-v0'`.
    observation: Which of the functions in `navix.observations` is seen:
      `symbolic`, `categorical` or `rgb`, or each of them as
      `symbolic_first_person` and so on.
    flatten: Whether observations are made vectors.
    max_steps: Transitions after which an episode is truncated; None is the
      environment's own limit.
    **kwargs: For the constructor of the environment.

  Raises:
    ImportError: If navix is not installed.
    ValueError: If there is no such environment or observation.
  """
  navix = _navix()
  suites.check_name('navix has no environment', name, navix.registry())
  suites.check_name('navix has no observation', observation, _OBSERVATIONS)
  if max_steps is not None:
    kwargs['max_steps'] = protocol.check_int('max_steps', max_steps)
  function = getattr(navix.observations, observation)
  env = navix.make(
    name, observation_fn=function, disable_autoreset=True, **kwargs
  )
  pictures = observation.startswith('rgb')
  return Navix(env, flatten=flatten, keep_pictures=pictures)


def _navix():
  return packages.load('navix')
