"""Products of buckets: what the members read, side by side, times weights."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import schedule as schedule_lib

# Bytes of input that a turn of a loop over populations copies side by side:
# on a CPU what stays in the cache, elsewhere what does not fill the memory.
CACHE, SMALL, DEVICE = 2**19, 2**22, 2**28

Rows = dict[str, types.Array]


def turn_size(members: int, bytes_each: int) -> int:
  """How many members a turn takes: a divisor of their number."""
  if jax.default_backend() == 'cpu':
    whole, limit = SMALL, CACHE
  else:
    whole = limit = DEVICE
  if members * bytes_each <= whole:
    return members
  most = max(1, limit // bytes_each)
  return next(q for q in range(min(most, members), 0, -1) if members % q == 0)


def bucket_weights(
  bucket: schedule_lib.Bucket, weights: Sequence[types.Array]
) -> types.Array | None:
  """What a bucket's inputs, side by side, are multiplied by.

  Returns:
    Shape `[m, K, n]`, where `K` adds up fan-in times size over the reads;
    None if nothing is read.
  """
  parts = []
  for reads in bucket.reads:
    stack = rows_of(weights[reads.pack], reads)
    m = len(bucket.members)
    parts.append(stack.reshape(m, -1, stack.shape[-1]))
  return join(parts, 1)


def rows_of(stack: types.Array, reads: schedule_lib.Reads) -> types.Array:
  """The rows of a stack that reads go with, zeros for padding.

  Returns:
    Shape `[m * F, ...]`.
  """
  rows = sum(reads.rows, ())
  if rows[0] >= 0 and rows == tuple(range(rows[0], rows[0] + len(rows))):
    return lax.slice_in_dim(stack, rows[0], rows[0] + len(rows))
  return with_zero(stack)[jnp.array(rows)]


def side_by_side(
  bucket: schedule_lib.Bucket,
  tables: Sequence[Rows],
  read: Callable[[schedule_lib.Reads, Rows], types.Array],
  i: Any,
  turn: int,
) -> types.Array | None:
  """The inputs of the members of turn `i`, along the last axis.

  Args:
    bucket: The bucket.
    tables: For each of its reads, from where: arrays `[m, F, ...]`.
    read: Maps reads and their rows of the tables, `[q, F, ...]`, to what is
      read, side by side: `[q, ..., F * n]`.
    i: Number of the turn.
    turn: Members in a turn, `q`.

  Returns:
    Shape `[q, ..., K]`; None if nothing is read.
  """
  parts = [
    read(reads, {k: cut(v, i, turn) for k, v in table.items()})
    for reads, table in zip(bucket.reads, tables, strict=True)
  ]
  return join(parts, -1)


def tables_of(bucket: schedule_lib.Bucket) -> list[Rows]:
  """Who is read and how late, for each of the reads. Shape `[m, F]`."""
  return [
    {'near': jnp.array(reads.near), 'delay': jnp.array(reads.delay)}
    for reads in bucket.reads
  ]


def by_columns(read: Callable[[Rows], types.Array], rows: Rows) -> types.Array:
  """Reads one source of all members after the other, side by side.

  Args:
    read: Maps rows `[q, 1, ...]` to `[q, 1, ..., n]`.
    rows: From where, shape `[q, F, ...]`.

  Returns:
    Shape `[q, ..., F * n]`.
  """
  turn, fan_in = rows['near'].shape
  if turn > 1 or fan_in == 1:
    columns = [
      read({k: v[:, f : f + 1] for k, v in rows.items()})[:, 0]
      for f in range(fan_in)
    ]
    return join(columns, -1)

  def column(j):
    return read(
      {k: lax.dynamic_slice_in_dim(v, j, 1, 1) for k, v in rows.items()}
    )[:, 0]

  one = jax.eval_shape(column, 0)
  size = one.shape[-1]

  def put(j, x):
    return lax.dynamic_update_slice_in_dim(x, column(j), j * size, -1)

  wide = jnp.zeros((*one.shape[:-1], fan_in * size), one.dtype)
  return lax.fori_loop(0, fan_in, put, wide)


@jax.custom_vjp
def member_products(x: types.Array, w: types.Array) -> types.Array:
  """The product of each member's rows and its weights.

  Its derivative is by hand: what XLA makes of it moves whole sequences about.

  Args:
    x: Shape `[q, R, k]`, or `[R, k]` if all members read the same.
    w: Shape `[q, k, j]`.

  Returns:
    Shape `[q, R, j]`.
  """
  if x.ndim == 3:
    return jnp.einsum('qrk,qkj->qrj', x, w)
  turn = turn_size(w.shape[0], x.shape[0] * w.shape[2] * x.dtype.itemsize)

  def body(i, y):
    part = jnp.einsum('rk,qkj->qrj', x, cut(w, i, turn))
    return put(y, part, i, turn)

  y = jnp.zeros((w.shape[0], x.shape[0], w.shape[2]), x.dtype)
  return repeat(body, w.shape[0] // turn, y)


def _member_products_fwd(x, w):
  return member_products(x, w), (x, w)


def _member_products_bwd(residuals, d):
  x, w = residuals
  shared = x.ndim == 2
  each = d.shape[1] * (w.shape[1] + w.shape[2]) * d.dtype.itemsize
  turn = turn_size(w.shape[0], each)

  def weights(i, dw):
    # The delta is turned over, so that both are read along their rows.
    delta = jnp.swapaxes(cut(d, i, turn), 1, 2)
    if shared:
      part = jnp.einsum('qjr,rk->qjk', delta, x)
    else:
      part = jnp.einsum('qjr,qrk->qjk', delta, cut(x, i, turn))
    return put(dw, jnp.swapaxes(part, 1, 2), i, turn)

  def inputs(i, dx):
    return dx + jnp.einsum('qrj,qkj->rk', cut(d, i, turn), cut(w, i, turn))

  count = w.shape[0] // turn
  dw = repeat(weights, count, jnp.zeros_like(w))
  if shared:
    return repeat(inputs, count, jnp.zeros_like(x)), dw
  return jnp.einsum('qrj,qkj->qrk', d, w), dw


member_products.defvjp(_member_products_fwd, _member_products_bwd)


def repeat(body: Callable[..., Any], count: int, carry: Any) -> Any:
  """`fori_loop`, without a loop if there is but one turn."""
  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def cut(x: types.Array, i: Any, turn: int) -> types.Array:
  """Turn `i` of `x`, along its leading axis."""
  if turn == x.shape[0]:
    return x
  return lax.dynamic_slice_in_dim(x, i * turn, turn)


def put(y: types.Array, part: types.Array, i: Any, turn: int) -> types.Array:
  """`y` with turn `i` of its leading axis replaced."""
  if turn == y.shape[0]:
    return part
  return lax.dynamic_update_slice_in_dim(y, part, i * turn, 0)


def join(parts, axis):
  if not parts:
    return None
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def with_zero(stack):
  return jnp.pad(stack, [(0, 1)] + [(0, 0)] * (stack.ndim - 1))
