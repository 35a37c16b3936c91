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
    for name in ('num_envs', 'num_steps', 'num_minibatches', 'num_epochs'):
      _check_count(name, getattr(self, name))
    for name in ('discount', 'lambda_'):
      _check_number(name, getattr(self, name), 'in [0, 1]', 0, 1)
    for name in ('value_cost', 'entropy_cost', 'weight_decay'):
      _check_number(name, getattr(self, name), 'at least 0', 0)
    for name in ('clip_epsilon', 'learning_rate'):
      _check_number(name, getattr(self, name), 'above 0', 0, above=True)
    for name in ('max_grad_norm', 'value_clip', 'target_kl'):
      if getattr(self, name) is not None:
        _check_number(name, getattr(self, name), 'above 0', 0, above=True)
    _check_choice(
      'normalise_advantages', self.normalise_advantages, (True, False)
    )
    if self.total_updates is not None:
      _check_count('total_updates', self.total_updates)
    _check_choice('schedule', self.schedule, ('constant', 'linear'))
    _check_choice(
      'advantage_mode', self.advantage_mode, ('combined', 'per_head')
    )
    _check_weights('advantage_weights', self.advantage_weights)
    self._check_together()

  def _check_together(self):
    if self.num_envs % self.num_minibatches:
      raise ValueError(
        f'`num_envs` must be a multiple of `num_minibatches`, got '
        f'{self.num_envs} environments and {self.num_minibatches} minibatches; '
        f'take {_nearest_divisor(self.num_envs, self.num_minibatches)} '
        'minibatches'
      )
    if self.schedule == 'linear' and self.total_updates is None:
      raise ValueError(
        "`schedule='linear'` falls to 0 at `total_updates`, got None; give "
        "the number of updates, or take `schedule='constant'`"
      )
    if self.advantage_weights and self.advantage_mode != 'combined':
      raise ValueError(
        "`advantage_weights` weigh the sum of `advantage_mode='combined'`, got "
        f'{self.advantage_mode!r}; leave one of them out'
      )


def _check_count(name: str, value: int):
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f'`{name}` must be a positive integer, got {value!r}')


def _check_number(
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


def _check_weights(name: str, value: Mapping[str, float] | None):
  if value is None:
    return
  if not isinstance(value, Mapping) or not value:
    raise ValueError(
      f'`{name}` must be a number for each reward, or None, got {value!r}'
    )
  for key, weight in value.items():
    _check_number(f'{name}[{key!r}]', weight, 'of any sign', -math.inf)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]):
  if not any(type(value) is type(c) and value == c for c in choices):
    allowed = ' or '.join(map(repr, choices))
    raise ValueError(f'`{name}` must be {allowed}, got {value!r}')


def _nearest_divisor(number: int, near: int) -> int:
  divisors = (d for d in range(1, number + 1) if number % d == 0)
  return min(divisors, key=lambda d: abs(d - near))
