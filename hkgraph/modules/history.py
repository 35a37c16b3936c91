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
    position: The slot that the next value takes, below `L`.
    age: Values written in this episode, at most `L`: it never overflows.
  """

  values: types.ArrayTree  # [B, L, ...]
  position: types.Array  # [B], int32
  age: types.Array  # [B], int32


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
  return History(
    values=values,
    position=jnp.zeros(batch_size, jnp.int32),
    age=jnp.zeros(batch_size, jnp.int32),  # Its own: both may be donated.
  )


def reset(history: History, is_first: types.Array) -> History:
  """Forgets what came before, where `is_first` (`[B]`, bool) is set."""
  return history.replace(age=jnp.where(is_first, 0, history.age))


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
  known = history.age >= delay

  def take(values, initial):
    slot = jnp.mod(history.position - delay, values.shape[1])
    value = jax.vmap(lambda v, s: v[s])(values, slot)
    mask = jnp.reshape(known, known.shape + (1,) * (value.ndim - 1))
    return jnp.where(mask, value, initial)

  return jax.tree.map(take, history.values, initial)


def write(history: History, value: types.ArrayTree) -> History:
  """Appends one step's value, `[B, ...]`, over the oldest."""

  length = length_of(history)
  batch = jnp.arange(history.position.shape[0])

  def put(values, value):
    if length == 1:
      return value[:, None].astype(values.dtype)
    return values.at[batch, history.position].set(
      value.astype(values.dtype), unique_indices=True, mode='promise_in_bounds'
    )

  return History(
    values=jax.tree.map(put, history.values, value),
    position=jnp.mod(history.position + 1, length),
    age=jnp.minimum(history.age + 1, length),
  )


def last(history: History) -> types.ArrayTree:
  """The value that was written last, `[B, ...]`, of whatever episode."""
  slot = jnp.mod(history.position - 1, length_of(history))
  return jax.tree.map(
    lambda values: jax.vmap(lambda v, s: v[s])(values, slot), history.values
  )


def of_rows(
  history: History, values: types.ArrayTree, is_first: types.Array
) -> History:
  """The histories after each row of a sequence, for a batch of all rows.

  Args:
    history: Before row 0.
    values: What was written at each row. Shape `[T, B, ...]`.
    is_first: Rows that open an episode. Shape `[T, B]`, bool.

  Returns:
    A history of `T * B` elements, row `t` of element `b` at `t * B + b`; equal
    to that which writing row by row leaves, but for where its ring begins.
  """
  num_rows, batch_size = is_first.shape
  length = length_of(history)
  rows = jnp.arange(1, num_rows + 1)[:, None] + jnp.arange(length)[None]

  def windows(past, values):
    line = jnp.concatenate([past, values.astype(past.dtype)])
    window = jnp.moveaxis(line[rows], 1, 2)
    return window.reshape(num_rows * batch_size, length, *past.shape[2:])

  age = jnp.minimum(age_of_rows(history, is_first) + 1, length)
  return History(
    values=jax.tree.map(windows, past(history), values),
    position=jnp.zeros(num_rows * batch_size, jnp.int32),
    age=age.reshape(-1),
  )


def length_of(history: History) -> int:
  """The longest delay that can be read, `L`."""
  return jax.tree.leaves(history.values)[0].shape[1]


def age_of_rows(history: History, is_first: types.Array) -> types.Array:
  """How many rows of the same episode precede each row of a sequence.

  Args:
    history: Before row 0.
    is_first: Shape `[T, B]`, bool.

  Returns:
    0 at a first row; where the episode began before row 0, what is beyond `L`
    is not counted. Shape `[T, B]`, int32.
  """
  row = jnp.arange(is_first.shape[0], dtype=jnp.int32)[:, None]
  began = jax.lax.cummax(jnp.where(is_first, row, -1), axis=0)
  return jnp.where(began >= 0, row - began, row + history.age[None])


def past(history: History) -> types.ArrayTree:
  """The last `L` values in order of time, oldest first. Shape `[L, B, ...]`.

  Values from before the episode are whatever the slots hold.
  """

  def order(values):
    length = values.shape[1]
    slot = jnp.arange(length)[None] + history.position[:, None]
    slot = jnp.mod(slot, length)
    return jnp.swapaxes(jax.vmap(lambda v, s: v[s])(values, slot), 0, 1)

  return jax.tree.map(order, history.values)


def extend(
  history: History, values: types.ArrayTree, is_first: types.Array
) -> History:
  """The history after a sequence: what writing row by row would leave.

  Args:
    history: Before row 0.
    values: The last `L` values, of the sequence or of before, oldest first.
      Shape `[L, B, ...]`.
    is_first: Rows of the sequence that open an episode. Shape `[T, B]`.
  """
  length = length_of(history)
  position = jnp.mod(history.position + is_first.shape[0], length)
  row = jnp.mod(jnp.arange(length)[None] - position[:, None], length)

  def place(values):
    values = jnp.swapaxes(values, 0, 1)
    return jax.vmap(lambda v, r: v[r])(values, row)

  age = age_of_rows(history, is_first)[-1] + 1
  return History(
    values=jax.tree.map(place, values),
    position=position,
    age=jnp.minimum(age, length),
  )
