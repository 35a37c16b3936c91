"""Recurrent cores of Haiku as encoders."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import encoding, history, stateful


class RecurrentEncoder(encoding.Encoder):
  """Any `hk.RNNCore`, reset where an episode begins.

    h_t, y_t = core(encoder(x_t), initial if is_first_t else h_{t-1})

  The encoder of the inputs runs once on a whole sequence, and only the core is
  scanned; a core with a method `unroll(inputs, state, is_first)`, such as
  `GraphCore`, runs sequences by itself. If the core gives a dict, as
  `GraphCore` does, its entries are joined in the order of their keys.
  """

  def __init__(
    self,
    core: hk.RNNCore,
    encoder: Any = None,
    *,
    output: str | None = None,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      core: An `hk.GRU`, `hk.LSTM`, `hk.VanillaRNN`, `GraphCore`, ...
      encoder: From observations to what the core reads: an `Encoder`, with
        carry or without, or a module or function that takes `[B, ...]` and
        `[T, B, ...]`. None gives the core the observations.
      output: For a core that gives a dict, the entry to take.
      name: Name of the module.

    Raises:
      TypeError: if `core` is no `hk.RNNCore` or `encoder` cannot be called.
    """
    super().__init__(name=name)
    if not isinstance(core, hk.RNNCore):
      raise TypeError(
        f'`core` must be an hk.RNNCore, such as hk.GRU(64), got {core!r}'
      )
    if encoder is not None and not callable(encoder):
      raise TypeError(
        '`encoder` must be an Encoder, or a module or function from '
        f'observations to the inputs of the core, got {encoder!r}'
      )
    self.core = core
    self.encoder = encoder
    self.output = output

  def initial_carry(self, obs_shape: Any, dtype: Any) -> Any:
    """The core's initial state, and the encoder's carry if it has one."""
    batch_size = jax.tree.leaves(obs_shape)[0]
    carry = {'core': self.core.initial_state(batch_size)}
    if isinstance(self.encoder, encoding.Encoder):
      carry['encoder'] = self.encoder.initial_carry(obs_shape, dtype)
    return carry

  def __call__(
    self, carry: Any, obs: Any, is_first: types.Array
  ) -> tuple[Any, types.Array]:
    carry = dict(carry)
    if isinstance(self.encoder, encoding.Encoder):
      carry['encoder'], x = self.encoder(carry['encoder'], obs, is_first)
    elif self.encoder is None:
      x = jax.tree.map(encoding.as_float, obs)
    else:
      x = self.encoder(obs)
    advance = self._unroll if jnp.ndim(is_first) == 2 else self._step
    y, carry['core'] = advance(x, carry['core'], is_first)
    return carry, self._features(y)

  @hk.transparent
  def _step(self, x, state, is_first):
    initial = self.core.initial_state(is_first.shape[0])
    return self.core(x, reset_state(is_first, state, initial))

  @hk.transparent
  def _unroll(self, x, state, is_first):
    if hasattr(self.core, 'unroll') and _has_unroll(self.core):
      with stateful.rows_scope(stateful.Rows(is_first)):
        return self.core.unroll(x, state, is_first)
    initial = self.core.initial_state(is_first.shape[1])

    def body(state, row):
      x, is_first = row
      y, state = self.core(x, reset_state(is_first, state, initial))
      return state, y

    state, y = hk.scan(body, state, (x, is_first))
    return y, state

  def _features(self, y):
    if self.output is None:
      return encoding.join(y)
    if not isinstance(y, dict) or self.output not in y:
      given = sorted(y) if isinstance(y, dict) else 'no dict'
      raise ValueError(
        f'`output` must name an entry of what the core gives, {given}; got '
        f'{self.output!r}'
      )
    return y[self.output]


def _has_unroll(core: hk.RNNCore) -> bool:
  # `GraphCore` walks its connections one step at a time on this path.
  return getattr(core, 'path', None) != 'general'


def reset_state(is_first: types.Array, state: Any, initial: Any) -> Any:
  """The state of a core, reset where an episode begins.

  Args:
    is_first: Shape `[B]`, bool.
    state: Tree of arrays and histories. Shape `[B, ...]`.
    initial: What to reset to; like `state`.

  Returns:
    Tree like `state`.
  """

  def is_history(x):
    return isinstance(x, history.History)

  def reset(now, new):
    if is_history(now):  # Its values need not be touched.
      return history.reset(now, is_first)
    return stateful.reset_carry(is_first, now, new)

  return jax.tree.map(reset, state, initial, is_leaf=is_history)
