"""State of modules: which of it is whose, when it is reset, and in what time.

Haiku keeps one bag of state. This file alone decides which of it is *carry*
(per batch element, reset at `is_first`) and which is *statistics* (no batch
axis, changed only by `update_statistics`), and tells a module whether its
input is one step `[B, ...]` or a sequence `[T, B, ...]`.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import contextvars
import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types

_CARRY = 'carry'


@dataclasses.dataclass(frozen=True)
class Rows:
  """What the modules of a network know about the rows they are given.

  Attributes:
    is_first: Whether a row opens an episode. Shape `[B]` in a single step and
      `[T, B]` in a sequence, bool.
    mask: Rows that count as data while statistics are updated, shape of
      `is_first`; None in every other pass.
    frozen: While statistics are updated, the state before the update: what
      the forward pass goes on to use. None in every other pass.
    called: Names of the stateful modules that have seen these rows.
  """

  is_first: types.Array
  mask: types.Array | None = None
  frozen: Mapping[str, Mapping[str, Any]] | None = None
  called: set[str] = dataclasses.field(default_factory=set, compare=False)

  @property
  def is_sequence(self) -> bool:
    return self.is_first.ndim == 2

  @property
  def batch_size(self) -> int:
    return self.is_first.shape[-1]


_ROWS: contextvars.ContextVar[Rows | None] = contextvars.ContextVar(
  'rows', default=None
)


class NoRowsError(ValueError):
  """A module that keeps state was called outside `hkgraph.transform`."""


@contextlib.contextmanager
def rows_scope(rows: Rows) -> Iterator[None]:
  """Makes `rows` what `current_rows` returns inside the `with` block."""
  token = _ROWS.set(rows)
  try:
    yield
  finally:
    _ROWS.reset(token)


def current_rows() -> Rows:
  """Returns the `Rows` of the running pass.

  Raises:
    NoRowsError: outside a function given to `hkgraph.transform`.
  """
  rows = _ROWS.get()
  if rows is None:
    raise NoRowsError(
      'a module that keeps state was called outside `hkgraph.transform`, so '
      'nothing tells it where episodes begin; wrap the function with '
      '`hkgraph.transform` instead of `hk.transform_with_state`'
    )
  return rows


def scan_rows(
  step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, x: Any
) -> tuple[Any, Any]:
  """Runs `step` through time, each call seeing its own row as current.

  Args:
    step: `(carry, x) -> (carry, y)` on one row, `[B, ...]`; may call modules.
    carry: The carry before the first row.
    x: Tree of inputs. Shape `[T, B, ...]`.

  Returns:
    The carry after the last row, and `y` stacked to `[T, B, ...]`.
  """
  rows = current_rows()

  def body(carry, row):
    is_first, mask, x = row
    with rows_scope(Rows(is_first, mask, rows.frozen)):
      return step(carry, x)

  return hk.scan(body, carry, (rows.is_first, rows.mask, x))


def batch_apply(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """Makes `fn`, which knows one leading axis only, take sequences too.

  Args:
    fn: A function of a tree of arrays `[N, ...]`, say a convolution.

  Returns:
    The same function of `[B, ...]` or, in a sequence, of `[T, B, ...]`.
  """

  def apply(x):
    return hk.BatchApply(fn)(x) if current_rows().is_sequence else fn(x)

  return apply


def split_state(state: Mapping[str, Mapping[str, Any]]) -> types.NetworkState:
  """Splits Haiku state into carry and statistics.

  State of modules that are not ours (say `hk.BatchNorm`) counts as
  statistics.
  """
  carry, statistics = hk.data_structures.partition(
    lambda module, name, value: name == _CARRY, state
  )
  return types.NetworkState(carry=carry, statistics=statistics)


def merge_state(state: types.NetworkState) -> Mapping[str, Mapping[str, Any]]:
  """The inverse of `split_state`."""
  return hk.data_structures.merge(state.carry, state.statistics)


def get_carry(initial: Any) -> Any:
  """The current module's carry; `initial` if there is none yet."""
  return hk.get_state(_CARRY, (), jnp.float32, lambda *_: initial)


def set_carry(carry: Any) -> None:
  """Replaces the current module's carry. `get_carry` must come before."""
  hk.set_state(_CARRY, carry)


def reset_carry(is_first: types.Array, carry: Any, initial: Any) -> Any:
  """Takes `initial` for the batch elements that begin an episode.

  Typed keys go on through a reset: a fresh episode has fresh noise.

  Args:
    is_first: Shape `[B]`, bool.
    carry: Tree of arrays. Shape `[B, ...]`.
    initial: Tree like `carry`.

  Returns:
    Tree like `carry`.
  """

  def reset(now, new):
    if jnp.issubdtype(now.dtype, jax.dtypes.prng_key):
      return now
    mask = jnp.reshape(is_first, is_first.shape + (1,) * (now.ndim - 1))
    return jnp.where(mask, new, now)

  return jax.tree.map(reset, carry, initial)


def initial_keys(batch_size: int) -> types.Array:
  """Keys for the noise of each batch element, to be kept in the carry.

  They are drawn when the network is initialised. Later calls only give
  something of the right shape for `reset_carry`, which keeps the old keys.

  Returns:
    Typed keys. Shape `[B]`.
  """
  key = hk.next_rng_key() if hk.running_init() else jax.random.key(0)
  return jax.random.split(key, batch_size)


def get_statistics(name: str, initial: Any) -> tuple[Any, Any]:
  """Returns `(frozen, latest)` statistics of the current module.

  The forward pass uses `frozen`. They differ only while statistics are
  updated; then `latest` is what further rows are merged into.
  """
  latest = hk.get_state(name, (), jnp.float32, lambda *_: initial)
  frozen = current_rows().frozen
  if frozen is None:
    return latest, latest
  return frozen[hk.experimental.current_name()][name], latest


def set_statistics(name: str, value: Any) -> None:
  """Replaces statistics; to be called only where `Rows.frozen` is given."""
  if current_rows().frozen is None:
    raise ValueError('statistics change only during `update_statistics`')
  hk.set_state(name, value)


class StatefulModule(hk.Module):
  """A module that remembers: the author writes one step and its first carry.

  Subclasses implement `initial_carry` and `step`; the base class keeps the
  carry in Haiku state, resets it where an episode begins, and runs sequences.
  Override `unroll` where a sequence can be had without a loop.
  """

  def initial_carry(self, x: Any) -> Any:
    """The carry at the beginning of an episode.

    Args:
      x: One step's input, for its shapes and dtypes. Shape `[B, ...]`.

    Returns:
      Tree of arrays. Shape `[B, ...]`.
    """
    raise NotImplementedError

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    """Maps `(carry, x)` to `(carry, y)` for one row, `[B, ...]`."""
    raise NotImplementedError

  def reset(self, carry: Any, x: Any) -> Any:
    """The carry with those batch elements reset whose row is first."""
    return reset_carry(current_rows().is_first, carry, self.initial_carry(x))

  def unroll(self, carry: Any, x: Any) -> tuple[Any, Any]:
    """Maps a carry and a sequence `[T, B, ...]` to `(carry, y)`."""
    return scan_rows(lambda c, x: self.step(self.reset(c, x), x), carry, x)

  def __call__(self, x: Any) -> Any:
    """Advances by one row `[B, ...]`, or by a sequence `[T, B, ...]`."""
    rows = current_rows()
    if self.module_name in rows.called:
      raise ValueError(
        f'{self.module_name!r} was called twice on the same rows, which has no '
        'meaning for a module that remembers; make two modules, or call one '
        'on inputs put side by side'
      )
    rows.called.add(self.module_name)
    first = jax.tree.map(lambda x: x[0], x) if rows.is_sequence else x
    carry = get_carry(self.initial_carry(first))
    if rows.is_sequence:
      carry, y = self.unroll(carry, x)
    else:
      carry, y = self.step(self.reset(carry, x), x)
    set_carry(carry)
    return y
