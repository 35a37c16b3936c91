"""Hyperparameters of the learners: plain values, read without JAX."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class PPOConfig:
  """Hyperparameters of PPO, checked when they are given.

  Attributes:
    num_envs: Environments per rollout, a multiple of `num_minibatches`.
    num_steps: Transitions per environment and rollout, at least 1.
    num_minibatches: Minibatches per epoch, at least 1.
    num_epochs: Passes over a rollout per update, at least 1.
    discount: Discount per step, in [0, 1].
    lambda_: Decay of the advantage's trace per step, in [0, 1].
    clip_epsilon: How far a ratio may leave 1 with effect, above 0.
    value_cost: Weight of the value loss, at least 0.
    entropy_cost: Weight of the entropy bonus, at least 0.
    learning_rate: Adam's step size at the first update, above 0.
    schedule: `'constant'`, or `'linear'`: the step size falls to 0 at
      `total_updates`.
    total_updates: Updates of the whole training; only `'linear'` reads it,
      and `hkgraph.train` sets it.
    max_grad_norm: Global norm that no gradient exceeds, above 0; `None` does
      not clip.
    weight_decay: Decay of the parameters per unit of learning rate, at least
      0.
    value_clip: How far a value may leave its old estimate with effect, above
      0 and in units of the return; `None` does not clip.
    target_kl: Estimated KL from the acting policy, in nats and above 0, at
      which an update stops to step; `None` never stops.
    normalise_advantages: Whether advantages get mean 0 and deviation 1 over
      the valid rows of the rollout.
    advantage_mode: `'combined'`: one advantage, the weighted sum over the
      rewards, drives the joint policy. `'per_head'`: each head of a dict of
      policies is driven by the advantage of its own key.
    advantage_weights: Weight of each reward in the sum of `'combined'`; `None`
      weighs all by 1.

  Raises:
    ValueError: If a value is out of its range.
  """

  num_envs: int = 16
  num_steps: int = 64
  num_minibatches: int = 4
  num_epochs: int = 4
  discount: float = 0.99
  lambda_: float = 0.95
  clip_epsilon: float = 0.2
  value_cost: float = 0.5
  entropy_cost: float = 0.01
  learning_rate: float = 3e-4
  schedule: str = 'constant'
  total_updates: int | None = None
  max_grad_norm: float | None = 0.5
  weight_decay: float = 0.0
  value_clip: float | None = None
  target_kl: float | None = None
  normalise_advantages: bool = True
  advantage_mode: str = 'combined'
  advantage_weights: Mapping[str, float] | None = None

  def __post_init__(self):
    _check_common(self)
    for name in ('value_cost', 'entropy_cost', 'weight_decay'):
      check_number(name, getattr(self, name), 'at least 0', 0)
    check_above_zero('clip_epsilon', self.clip_epsilon)
    for name in ('value_clip', 'target_kl'):
      if getattr(self, name) is not None:
        check_above_zero(name, getattr(self, name))
    check_choice(
      'normalise_advantages', self.normalise_advantages, (True, False)
    )
    check_choice(
      'advantage_mode', self.advantage_mode, ('combined', 'per_head')
    )
    _check_weights('advantage_weights', self.advantage_weights)
    if self.advantage_weights and self.advantage_mode != 'combined':
      raise ValueError(
        "`advantage_weights` weigh the sum of `advantage_mode='combined'`, got "
        f'{self.advantage_mode!r}; leave one of them out'
      )


@dataclasses.dataclass(frozen=True)
class PQNConfig:
  """Hyperparameters of PQN, checked when they are given.

  Attributes:
    num_envs: Environments per rollout, a multiple of `num_minibatches`.
    num_steps: Transitions per environment and rollout, at least 1.
    num_minibatches: Minibatches per epoch, at least 1.
    num_epochs: Passes over a rollout per update, at least 1.
    discount: Discount per step, in [0, 1].
    lambda_: Mixing of the bootstraps in the targets, in [0, 1].
    learning_rate: The optimizer's step size at the first update, above 0.
    schedule: `'constant'`, or `'linear'`: the step size falls to 0 at
      `total_updates`.
    total_updates: Updates of the whole training, which `'linear'` and the
      exploration read; `hkgraph.train` sets it.
    max_grad_norm: Global norm that no gradient exceeds, above 0; `None` does
      not clip.
    optimizer: `'radam'` or `'adam'`.
    epsilon_start: Share of random actions at the first update, in [0, 1].
    epsilon_finish: Share of random actions after the exploration, in [0, 1];
      also that of sampled actions in an evaluation.
    exploration_fraction: Share of `total_updates` in which epsilon goes
      straight from start to finish, above 0 and at most 1.
    burn_in: Rows at the start of each sequence that warm the carry and whose
      loss does not count, less than `num_steps`; 0 for a network without
      carry.

  Raises:
    ValueError: If a value is out of its range.
  """

  num_envs: int = 32
  num_steps: int = 32
  num_minibatches: int = 4
  num_epochs: int = 4
  discount: float = 0.99
  lambda_: float = 0.95
  learning_rate: float = 1e-3
  schedule: str = 'constant'
  total_updates: int | None = None
  max_grad_norm: float | None = 10.0
  optimizer: str = 'radam'
  epsilon_start: float = 1.0
  epsilon_finish: float = 0.05
  exploration_fraction: float = 0.2
  burn_in: int = 0

  def __post_init__(self):
    _check_common(self)
    check_choice('optimizer', self.optimizer, ('radam', 'adam'))
    for name in ('epsilon_start', 'epsilon_finish'):
      check_number(name, getattr(self, name), 'in [0, 1]', 0, 1)
    check_number(
      'exploration_fraction',
      self.exploration_fraction,
      'above 0 and at most 1',
      *(0, 1, True),
    )
    check_count('burn_in', self.burn_in, minimum=0)
    if self.burn_in >= self.num_steps:
      raise ValueError(
        f'`burn_in` must be less than `num_steps`, got {self.burn_in} and '
        f'{self.num_steps}: no row would be left to learn from'
      )


def _check_common(config: PPOConfig | PQNConfig):
  """Checks what the configs of all learners from rollouts have."""
  for name in ('num_envs', 'num_steps', 'num_minibatches', 'num_epochs'):
    check_count(name, getattr(config, name))
  for name in ('discount', 'lambda_'):
    check_number(name, getattr(config, name), 'in [0, 1]', 0, 1)
  check_above_zero('learning_rate', config.learning_rate)
  if config.max_grad_norm is not None:
    check_above_zero('max_grad_norm', config.max_grad_norm)
  if config.total_updates is not None:
    check_count('total_updates', config.total_updates)
  check_choice('schedule', config.schedule, ('constant', 'linear'))
  if config.num_envs % config.num_minibatches:
    near = _nearest_divisor(config.num_envs, config.num_minibatches)
    raise ValueError(
      f'`num_envs` must be a multiple of `num_minibatches`, got '
      f'{config.num_envs} environments and {config.num_minibatches} '
      f'minibatches; take {near} minibatches'
    )


def check_count(name: str, value: int, minimum: int = 1):
  if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
    kinds = {0: 'a non-negative integer', 1: 'a positive integer'}
    kind = kinds.get(minimum, f'an integer of at least {minimum}')
    raise ValueError(f'`{name}` must be {kind}, got {value!r}')


def check_number(
  name: str,
  value: float,
  allowed: str,
  low: float,
  high: float = math.inf,
  above: bool = False,
):
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not (
    number
    and math.isfinite(value)
    and low <= value <= high
    and not (above and value == low)
  ):
    raise ValueError(f'`{name}` must be a number {allowed}, got {value!r}')


def check_above_zero(name: str, value: float):
  check_number(name, value, 'above 0', 0, above=True)


def _check_weights(name: str, value: Mapping[str, float] | None):
  if value is None:
    return
  if not isinstance(value, Mapping) or not value:
    raise ValueError(
      f'`{name}` must be a number for each reward, or None, got {value!r}'
    )
  for key, weight in value.items():
    check_number(f'{name}[{key!r}]', weight, 'of any sign', -math.inf)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]):
  if not any(type(value) is type(c) and value == c for c in choices):
    allowed = ' or '.join(map(repr, choices))
    raise ValueError(f'`{name}` must be {allowed}, got {value!r}')


def _nearest_divisor(number: int, near: int) -> int:
  divisors = (d for d in range(1, number + 1) if number % d == 0)
  return min(divisors, key=lambda d: abs(d - near))
