"""Games of pgx that one player plays alone: MinAtar and 2048.

Koyamada et al. (2023, "Pgx: Hardware-Accelerated Parallel Game Simulators for
Reinforcement Learning"), https://github.com/sotetsuk/pgx.
"""

from typing import Any

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import packages, types
from hkgraph.envs import protocol, suites, wrappers


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """State of a game.

  Attributes:
    game: What pgx keeps.
    key: The typed key that the next transition will split.
  """

  game: Any
  key: jax.Array  # []


class Pgx:
  """A game of pgx for one player, without a time limit of ours.

  The mask of legal actions is not shown: an action that is not legal ends the
  game with a reward of -1, as it does in pgx. (In MinAtar all are legal.)
  MinAtar's sticky actions draw from the key in the state.
  """

  def __init__(self, game: Any):
    """Wraps a `pgx.Env` with one player."""
    self._game = game
    self._like = jax.eval_shape(self._open, jax.random.key(0))
    self._num_actions = self._like.legal_action_mask.shape[0]

  def reset(self, key: jax.Array) -> tuple[State, types.TimeStep]:
    """Opens a game. Consumes `key`."""
    next_key, init_key = jax.random.split(key)
    game = self._open(init_key)
    row = protocol.restart(self.reward_spec(), game.observation)
    return State(game=game, key=next_key), row

  def step(
    self, state: State, action: jax.Array
  ) -> tuple[State, types.TimeStep]:
    """Makes one transition.

    Args:
      state: The state that the last call returned.
      action: Number of an action. Shape `[]`.
    """
    next_key, step_key = jax.random.split(state.key)
    game = self._game.step(state.game, action, step_key)
    game = protocol.cast_like(game, self._like)
    row = protocol.transition(
      game.rewards[0], game.observation, game.terminated, game.truncated
    )
    return State(game=game, key=next_key), row

  def observation_spec(self) -> specs.BoundedArray:
    seen = self._like.observation
    limited = seen.dtype == np.bool_
    low, high = (0, 1) if limited else (-np.inf, np.inf)
    return suites.array_spec(seen.shape, seen.dtype, low, high, 'observation')

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(self._num_actions, name='action')

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return protocol.discount_spec()

  def _open(self, key):
    game = protocol.canonicalise(self._game.init(key))
    return game.replace(rewards=game.rewards.astype(jnp.float32))


def make(
  name: str, *, max_steps: int | None = None, **kwargs: Any
) -> protocol.Environment:
  """Makes a game for one player.

  Args:
    name: Its name in pgx, as `'minatar-breakout'`.
    max_steps: Transitions after which an episode is truncated; None is no
      limit besides the game's own.
    **kwargs: For the constructor of the game; in MinAtar
      `use_minimal_action_set=True` and `sticky_action_prob=0.1`.

  Raises:
    ImportError: If pgx is not installed.
    ValueError: If there is no such game, or it has more than one player.
  """
  pgx = packages.load('pgx')
  names = pgx.available_envs()
  alone = [n for n in names if n == '2048' or n.startswith('minatar-')]
  if name not in names:
    suites.check_name('pgx has no game', name, alone)
  game = pgx.make(name)
  if game.num_players != 1:
    raise ValueError(
      f'{name!r} has {game.num_players} players; the games of pgx for one '
      f'player are {", ".join(map(repr, alone))}'
    )
  env = Pgx(type(game)(**kwargs) if kwargs else game)
  return env if max_steps is None else wrappers.TimeLimit(env, max_steps)
