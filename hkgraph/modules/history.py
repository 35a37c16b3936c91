"""What was written `k` steps ago in the same episode, for trees of arrays.

A ring per batch element: a write touches one slot, a reset touches none (the
counter says which slots belong to the episode), and histories of different
ages stack along the batch.
"""


import chex
import jax
import jax.numpy as jnp

from hkgraph import types


@chex.dataclass(frozen=True, mappable_dataclass=False)
class History:
  """The last `L` values of each batch element.

  Attributes:
    values: Slot `s` of batch element `b` is `values[b, s]`.
    count: Values written in this episode. From `L` on only its remainder
      counts, so it stays below `2 L` and never overflows.
  """

  values: types.ArrayTree  # [B, L, ...]
  count: types.Array  # [B], int32


def empty(value: types.ArrayTree, length: int) -> History:
  """A history that reads as initial everywhere.

  Args:
    value: One step's value, for shapes and dtypes. Shape `[B, ...]`.
    length: The longest delay that can be read, at least 1.
  """
  values = jax.tree.map(
    lambda x: jnp.zeros((x.shape[0], length, *x.shape[1:]), x.dtype), value
  )
  batch_size = jax.tree.leaves(value)[0].shape[0]
  return History(values=values, count=jnp.zeros(batch_size, jnp.int32))


def reset(history: History, is_first: types.Array) -> History:
  """Forgets what came before, where `is_first` (`[B]`, bool) is set."""
  return history.replace(count=jnp.where(is_first, 0, history.count))


def read(
  history: History, delay: int, initial: types.ArrayTree
) -> types.ArrayTree:
  """The value written `delay` writes ago, or `initial` before the first.

  Args:
    history: Of length at least `delay`.
    delay: At least 1; 1 is the last value written.
    initial: Tree of arrays that broadcast to `[B, ...]`.

  Returns:
    Tree like one value. Shape `[B, ...]`.
  """
  known = history.count >= delay

  def take(values, initial):
    slot = jnp.mod(history.count - delay, values.shape[1])
    value = jax.vmap(lambda v, s: v[s])(values, slot)
    mask = jnp.reshape(known, known.shape + (1,) * (value.ndim - 1))
    return jnp.where(mask, value, initial)

  return jax.tree.map(take, history.values, initial)


def write(history: History, value: types.ArrayTree) -> History:
  """Appends one step's value, `[B, ...]`, over the oldest."""

  def put(values, value):
    slot = jnp.mod(history.count, values.shape[1])
    rows = jnp.arange(values.shape[0])
    return values.at[rows, slot].set(value.astype(values.dtype))

  length = jax.tree.leaves(history.values)[0].shape[1]
  return History(
    values=jax.tree.map(put, history.values, value),
    count=_wrap(history.count + 1, length),
  )


def age_of_rows(count: types.Array, is_first: types.Array) -> types.Array:
  """How many rows of the same episode precede each row of a sequence.

  Args:
    count: Rows of the episode before row 0. Shape `[B]`, int32.
    is_first: Shape `[T, B]`, bool.

  Returns:
    0 at a first row. Shape `[T, B]`, int32.
  """
  row = jnp.arange(is_first.shape[0], dtype=jnp.int32)[:, None]
  began = jax.lax.cummax(jnp.where(is_first, row, -1), axis=0)
  return jnp.where(began >= 0, row - began, row + count[None])


def past(history: History) -> types.ArrayTree:
  """The last `L` values in order of time, oldest first. Shape `[L, B, ...]`.

  Values from before the episode are whatever the slots hold.
  """

  def order(values):
    length = values.shape[1]
    slot = jnp.mod(history.count[:, None] + jnp.arange(length)[None], length)
    return jnp.swapaxes(jax.vmap(lambda v, s: v[s])(values, slot), 0, 1)

  return jax.tree.map(order, history.values)


def from_past(values: types.ArrayTree, count: types.Array) -> History:
  """The inverse of `past`.

  Args:
    values: The last `L` values, oldest first. Shape `[L, B, ...]`.
    count: Values written in the episode. Shape `[B]`, int32.
  """

  def place(values):
    length = values.shape[0]
    row = jnp.mod(jnp.arange(length)[None] - count[:, None], length)
    values = jnp.swapaxes(values, 0, 1)
    return jax.vmap(lambda v, r: v[r])(values, row)

  length = jax.tree.leaves(values)[0].shape[0]
  return History(values=jax.tree.map(place, values), count=_wrap(count, length))


def _wrap(count: types.Array, length: int) -> types.Array:
  return jnp.where(count < length, count, length + jnp.mod(count, length))
