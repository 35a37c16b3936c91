"""The hyperparameters of DreamerV3, and its preset sizes. Needs no JAX."""

import dataclasses
import difflib

from hkgraph.learners import config as config_lib


@dataclasses.dataclass(frozen=True)
class DreamerSize:
  """How large the networks are.

  Attributes:
    hidden_size: Width of every hidden layer.
    num_layers: Hidden layers of encoder, decoder, actor and critic; the heads
      for reward and continuation have one.
    recurrent_size: Units of the gated recurrence.
    num_blocks: Blocks on the diagonal of its weights; 1 is dense.
    num_latents: Categorical variables of the stochastic state.
    num_classes: Classes of each.
    num_bins: Bins of the two-hot heads.
    num_channels: Of the first convolution; each later one has twice as many.
  """

  hidden_size: int
  num_layers: int
  recurrent_size: int
  num_blocks: int
  num_latents: int
  num_classes: int
  num_bins: int
  num_channels: int


# From '1m' on: the table of sizes of the published code.
SIZES = {
  'nano': DreamerSize(64, 1, 128, 1, 8, 8, 255, 8),
  'micro': DreamerSize(128, 2, 256, 1, 16, 8, 255, 8),
  '1m': DreamerSize(64, 3, 512, 8, 32, 4, 255, 4),
  '12m': DreamerSize(256, 3, 2048, 8, 32, 16, 255, 16),
}


@dataclasses.dataclass(frozen=True)
class DreamerConfig:
  """Hyperparameters of DreamerV3, checked when they are given.

  Attributes:
    num_envs: Environments that act side by side.
    num_steps: Transitions per environment and update, at least 1.
    total_updates: Updates of the whole training; `hkgraph.train` sets it.
    train_ratio: Gradient steps per update, at least 1.
    batch_size: Sequences per gradient step.
    sequence_length: Rows of each that are learned from, at least 2.
    burn_in: Rows before these, which warm the state and count in no loss; 0
      starts sequences from an empty state.
    horizon: Imagined steps, at least 1.
    capacity: Frames that the replay holds, of all environments together; at
      least one batch.
    discount: Discount per step, in [0, 1].
    lambda_: Mixing of the bootstraps in the returns, in [0, 1].
    learning_rate: Adam's step size for the world model, above 0.
    actor_learning_rate: The same for the actor.
    critic_learning_rate: The same for the critic.
    schedule: `'constant'`, or `'linear'`: the step sizes fall to 0 at
      `total_updates`.
    max_grad_norm: Global norm that no gradient of world model, actor or critic
      exceeds, above 0; `None` does not clip.
    entropy_cost: Weight of the actor's entropy, at least 0.
    free_nats: KL below which neither posterior nor prior is pulled, at least 0.
      Where a row tells less than that, the prior does not learn: choose less.
    reconstruction_cost: Weight of the decoder's loss, at least 0. What the
      latents tell costs up to `free_nats` nothing and then its weight; where
      observations vary by much less than 1, a weight well above 1 makes it
      worth its price.
    dynamics_cost: Weight of the KL that moves the prior, at least 0.
    representation_cost: Weight of the KL that moves the posterior, at least 0.
    unimix: Share of the uniform distribution in latents and discrete actions,
      in [0, 1).
    return_rate: How fast the range of the returns is tracked, in (0, 1].
    slow_rate: How fast the slow critic follows, in (0, 1].
    slow_cost: Weight of the pull towards the slow critic, at least 0.
    size: A preset, one of `SIZES`; the fields below, where given, override it.
    hidden_size: See `DreamerSize`, as the rest.
    num_layers: See `DreamerSize`.
    recurrent_size: See `DreamerSize`.
    num_blocks: See `DreamerSize`.
    num_latents: See `DreamerSize`.
    num_classes: See `DreamerSize`.
    num_bins: See `DreamerSize`.
    num_channels: See `DreamerSize`.
    dtype: What is computed in, `'float32'` or `'bfloat16'`; parameters, losses
      and the optimizer stay in float32.

  Raises:
    ValueError: If a value is out of its range.
  """

  num_envs: int = 16
  num_steps: int = 32
  total_updates: int | None = None
  train_ratio: int = 16
  batch_size: int = 16
  sequence_length: int = 32
  burn_in: int = 4
  horizon: int = 15
  capacity: int = 100_000
  discount: float = 0.99
  lambda_: float = 0.95
  learning_rate: float = 1e-3
  actor_learning_rate: float = 3e-4
  critic_learning_rate: float = 3e-4
  schedule: str = 'constant'
  max_grad_norm: float | None = 100.0
  entropy_cost: float = 3e-4
  free_nats: float = 1.0
  reconstruction_cost: float = 1.0
  dynamics_cost: float = 1.0
  representation_cost: float = 0.1
  unimix: float = 0.01
  return_rate: float = 0.01
  slow_rate: float = 0.02
  slow_cost: float = 1.0
  size: str = 'nano'
  hidden_size: int | None = None
  num_layers: int | None = None
  recurrent_size: int | None = None
  num_blocks: int | None = None
  num_latents: int | None = None
  num_classes: int | None = None
  num_bins: int | None = None
  num_channels: int | None = None
  dtype: str = 'float32'

  def __post_init__(self):
    check = config_lib
    for name in ('num_envs', 'num_steps', 'train_ratio', 'batch_size'):
      check.check_count(name, getattr(self, name))
    for name, minimum in (('horizon', 1), ('sequence_length', 2)):
      check.check_count(name, getattr(self, name), minimum)
    check.check_count('capacity', self.capacity)
    check.check_count('burn_in', self.burn_in, minimum=0)
    if self.total_updates is not None:
      check.check_count('total_updates', self.total_updates)
    for name in ('discount', 'lambda_'):
      check.check_number(name, getattr(self, name), 'in [0, 1]', 0, 1)
    for name in ('return_rate', 'slow_rate'):
      value = getattr(self, name)
      check.check_number(name, value, 'above 0 and at most 1', 0, 1, True)
    for name in ('learning_rate', 'actor_learning_rate'):
      check.check_above_zero(name, getattr(self, name))
    check.check_above_zero('critic_learning_rate', self.critic_learning_rate)
    if self.max_grad_norm is not None:
      check.check_above_zero('max_grad_norm', self.max_grad_norm)
    for name in (
      *('entropy_cost', 'free_nats', 'dynamics_cost'),
      *('representation_cost', 'reconstruction_cost', 'slow_cost'),
    ):
      check.check_number(name, getattr(self, name), 'at least 0', 0)
    check.check_number('unimix', self.unimix, 'in [0, 1]', 0, 1)
    if self.unimix == 1:
      raise ValueError(
        '`unimix` must be less than 1, got 1: nothing is learned'
      )
    check.check_choice('schedule', self.schedule, ('constant', 'linear'))
    check.check_choice('dtype', self.dtype, ('float32', 'bfloat16'))
    self._check_size()
    self._check_replay()

  @property
  def sizes(self) -> DreamerSize:
    """The preset, with what overrides it."""
    names = [field.name for field in dataclasses.fields(DreamerSize)]
    given = {name: getattr(self, name) for name in names}
    given = {name: x for name, x in given.items() if x is not None}
    return dataclasses.replace(SIZES[self.size], **given)

  @property
  def replayed_rows(self) -> int:
    """Rows of a replayed sequence."""
    return self.burn_in + self.sequence_length

  def _check_size(self):
    if not isinstance(self.size, str) or self.size not in SIZES:
      near = difflib.get_close_matches(str(self.size), SIZES, 1)
      hint = f'; did you mean {near[0]!r}?' if near else ''
      raise ValueError(
        f'`size` must be one of {", ".join(map(repr, SIZES))}, got '
        f'{self.size!r}{hint}'
      )
    sizes = self.sizes
    for field in dataclasses.fields(DreamerSize):
      config_lib.check_count(field.name, getattr(sizes, field.name))
    if sizes.num_bins < 2:
      raise ValueError(f'`num_bins` must be at least 2, got {sizes.num_bins}')
    if sizes.recurrent_size % sizes.num_blocks:
      raise ValueError(
        '`recurrent_size` must be a multiple of `num_blocks`, got '
        f'{sizes.recurrent_size} units and {sizes.num_blocks} blocks'
      )

  def _check_replay(self):
    rows = self.capacity // self.num_envs
    batch = self.batch_size * self.replayed_rows
    enough = self.num_envs * max(self.replayed_rows, -(-batch // self.num_envs))
    if rows < self.replayed_rows:
      raise ValueError(
        f'sequences of {self.burn_in} + {self.sequence_length} rows (`burn_in` '
        f'+ `sequence_length`) are longer than the {rows} rows that are stored '
        f'of each of {self.num_envs} environments; take a `capacity` of at '
        f'least {enough} frames, or shorter sequences'
      )
    if rows * self.num_envs < batch:
      raise ValueError(
        f'`capacity` must hold one batch, {self.batch_size} x '
        f'{self.replayed_rows} = {batch} frames, or {enough} of '
        f'{self.num_envs} environments, got {self.capacity}'
      )
