"""A loop of populations through time, with its derivative by hand.

The naive derivative of a delayed read scatters, saves a history per step and
adds up weight gradients step by step. Here the forward pass keeps one array
of activities per group, the transposed graph runs backwards over it, and each
weight's gradient is one product over all rows afterwards.

Arrays are population-major, `[P, T, B, n]`, so that what one population did
over time lies side by side.
"""

from collections.abc import Sequence
import functools
import itertools
import math

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import products
from hkgraph.graph import schedule as schedule_lib

Arrays = tuple[types.Array, ...]


# Derivatives that the output alone tells: the integrated input is not kept.
_FROM_OUTPUT = {
  None: None,
  jnp.tanh: lambda y: 1 - jnp.square(y),
  jax.nn.sigmoid: lambda y: y * (1 - y),
  jax.nn.relu: lambda y: (y > 0).astype(y.dtype),
}


def unroll(
  plan: schedule_lib.Schedule,
  block: int,
  weights: Arrays,
  biases: Arrays,
  drives: Sequence[types.Array | None],
  pasts: Arrays,
  age: types.Array,
) -> Arrays:
  """Runs a loop over a sequence.

  Args:
    plan: The schedule.
    block: Index of a block of the schedule, a loop without custom parts.
    weights: Of all packs. Shape `[E, in, out]`.
    biases: For each group of the block. Shape `[P, n]`.
    drives: What arrives from outside, for each group; None if nothing does.
      Shape `[P, T, B, n]`.
    pasts: The steps before, for each group, oldest first. Shape
      `[P, L, B, n]`.
    age: Rows of the same episode before each row. Shape `[T, B]`, int32.

  Returns:
    For each group a line: the past and then the activities. Shape
    `[P, L + T, B, n]`.
  """
  static = plan, block
  return _unroll(
    static, tuple(weights), tuple(biases), tuple(drives), tuple(pasts), age
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unroll(static, weights, biases, drives, pasts, age):
  return _forward(static, weights, biases, drives, pasts, age, keep=False)[0]


def _unroll_fwd(static, weights, biases, drives, pasts, age):
  # Nobody differentiates with respect to the carry as a rule; then its
  # gradient, as long as the longest delay, is not worked out.
  wanted = any(p.perturbed for p in pasts)
  weights, biases, drives, pasts, age = jax.tree.map(
    lambda x: x.value,
    (weights, biases, drives, pasts, age),
    is_leaf=lambda x: hasattr(x, 'perturbed'),
  )
  lines, inputs = _forward(
    static, weights, biases, drives, pasts, age, keep=True
  )
  present = tuple(() if d is None else None for d in drives)
  wanted = () if wanted else None  # Known while tracing: as structure.
  return lines, (weights, lines, inputs, age, present, wanted)


def _unroll_bwd(static, residuals, cotangents):
  weights, lines, inputs, age, absent, wanted = residuals
  loop = _Loop(static, lines, age)
  deltas, d_pasts = _backward(loop, weights, lines, inputs, cotangents, wanted)
  d_weights = _weight_gradients(loop, weights, lines, deltas)
  deltas = [d[:, n:] for d, n in zip(deltas, loop.lengths, strict=True)]
  d_biases = tuple(jnp.sum(d, (1, 2)) for d in deltas)
  d_drives = tuple(
    None if a == () else d for a, d in zip(absent, deltas, strict=True)
  )
  return d_weights, d_biases, d_drives, d_pasts, None


_unroll.defvjp(_unroll_fwd, _unroll_bwd, symbolic_zeros=True)


class _Loop:
  """Sizes that all passes over a loop share."""

  def __init__(self, static, lines, age):
    self.plan, index = static
    self.block = self.plan.blocks[index]
    self.local = {g: i for i, g in enumerate(self.block.groups)}
    self.groups = [self.plan.groups[g] for g in self.block.groups]
    self.lengths = [group.length for group in self.groups]
    self.num_rows, self.batch_size = age.shape
    self.age = age
    self.dtype = lines[0].dtype

  def turn(self, bucket, rows: int) -> int:
    """Members whose inputs are brought together at a time."""
    width = sum(r.fan_in * self.plan.groups[r.group].size for r in bucket.reads)
    return products.turn_size(
      len(bucket.members), rows * max(width, 1) * self.dtype.itemsize
    )

  def reader(self, arrays, slot, known):
    """Makes what `side_by_side` reads with, from arrays `[P, rows, B, n]`.

    Args:
      arrays: One for each group of the block.
      slot: Maps reads and a delay to a row of the array.
      known: Maps a delay to the batch elements that may read, `[B]`.
    """

    def column(reads, rows):
      x = arrays[self.local[reads.group]]
      delays = {d for row in reads.delay for d in row}
      if len(delays) == 1:
        # One row serves all: it is masked once.
        (delay,) = delays
        row = lax.dynamic_index_in_dim(x, slot(reads, delay), 1, False)
        row = jnp.where(known(delay)[None, :, None], row, 0)
        return row.at[rows['near']].get(mode='promise_in_bounds')
      delay = rows['delay']
      allowed = jax.vmap(jax.vmap(known))(delay)
      return _take(x, rows['near'], slot(reads, delay), allowed)

    def read(reads, rows):
      return products.by_columns(lambda rows: column(reads, rows), rows)

    return read

  def by_group(self, buckets, stacks):
    """`(g, [(bucket, stack), ...])` for each group, in order."""
    pairs = zip(buckets, stacks, strict=True)
    for g, part in itertools.groupby(pairs, lambda pair: pair[0].group):
      yield self.local[g], list(part)

  def run(self, buckets, product, finish, carry):
    """Runs the buckets of a group: at once if all are small, else in turns.

    Args:
      buckets: Pairs of a bucket and its weights.
      product: `(bucket, stack, carry, i, turn)` to `[turn, B, n]`.
      finish: `(y, p, carry)` to the carry with members `p` written; None
        stands for all members in order.
      carry: What is read and written.
    """
    turns = [self.turn(bucket, self.batch_size) for bucket, _ in buckets]
    if all(
      q == len(b.members) for q, (b, _) in zip(turns, buckets, strict=True)
    ):
      parts = [
        product(b, stack, carry, 0, len(b.members)) for b, stack in buckets
      ]
      order = sum((b.members for b, _ in buckets), ())
      y = products.join(parts, 0)
      if order != tuple(range(len(order))):
        y = y[jnp.argsort(jnp.array(order))]
      return finish(y, None, carry)
    for q, (bucket, stack) in zip(turns, buckets, strict=True):
      members = jnp.array(bucket.members)

      def body(i, carry, q=q, bucket=bucket, stack=stack, members=members):
        y = product(bucket, stack, carry, i, q)
        return finish(y, products.cut(members, i, q), carry)

      carry = products.repeat(body, len(bucket.members) // q, carry)
    return carry


def _forward(static, weights, biases, drives, pasts, age, keep):
  """Lines, and the integrated inputs of groups whose derivative needs them."""
  loop = _Loop(static, pasts, age)
  shape = loop.num_rows, loop.batch_size
  lines = tuple(_with_room(past, loop.num_rows) for past in pasts)

  def room(group, drive):
    if not keep or group.activation in _FROM_OUTPUT:
      return None
    if drive is not None:
      return drive  # Each row is overwritten once it has been read.
    return jnp.zeros((len(group.names), *shape, group.size), loop.dtype)

  inputs = tuple(map(room, loop.groups, drives))
  stacks = [
    products.bucket_weights(bucket, weights) for bucket in loop.block.inner
  ]

  def step(carry, t):
    age_t = lax.dynamic_index_in_dim(age, t, keepdims=False)
    for g, buckets in loop.by_group(loop.block.inner, stacks):
      carry = _forward_group(loop, g, buckets, biases, drives, carry, t, age_t)
    return carry, None

  carry = lines, inputs
  (lines, inputs), _ = lax.scan(step, carry, jnp.arange(loop.num_rows))
  return lines, inputs


def _forward_group(loop, g, buckets, biases, drives, carry, t, age_t):
  """One step of one group: `(lines, inputs)` with its members written."""
  group = loop.groups[g]
  lengths = loop.lengths

  def product(bucket, stack, lines, i, turn):
    def slot(reads, delay):
      return t + lengths[loop.local[reads.group]] - delay

    def known(delay):
      return age_t >= delay

    read = loop.reader(lines, slot, known)

    tables = products.tables_of(bucket)
    x = products.side_by_side(bucket, tables, read, i, turn)
    if x is None:
      return jnp.zeros((turn, loop.batch_size, group.size), loop.dtype)
    return jnp.einsum('qbk,qkj->qbj', x, products.cut(stack, i, turn))

  def finish(y, p, carry):
    lines, inputs = carry
    y += _members(biases[g], p)[:, None]
    if drives[g] is not None:
      y += _at(drives[g] if inputs[g] is None else inputs[g], p, t)
    # Read before it is overwritten, or the whole array would be copied.
    y = lax.optimization_barrier(y)
    out = y if group.activation is None else group.activation(y)
    lines = _put(lines, g, p, t + lengths[g], out.astype(loop.dtype))
    if inputs[g] is not None:
      inputs = _put(inputs, g, p, t, y)
    return lines, inputs

  return loop.run(
    buckets, lambda b, s, c, i, q: product(b, s, c[0], i, q), finish, carry
  )


def _is_zero(cotangent):
  return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _backward(loop, weights, lines, inputs, cotangents, wanted):
  """Gradients of the integrated inputs, and of the past if wanted.

  The former take the place of the cotangents, row by row, after the rows of
  the past. Shape `[P, L + T, B, n]`.
  """
  deltas = tuple(
    jnp.zeros(line.shape, loop.dtype) if _is_zero(ct) else ct.astype(loop.dtype)
    for line, ct in zip(lines, cotangents, strict=True)
  )
  stacks = [
    _transposed_weights(loop.plan, bucket, weights)
    for bucket in loop.block.transposed
  ]

  def step(deltas, t):
    for g, buckets in loop.by_group(loop.block.transposed, stacks):

      def finish(y, p, deltas, g=g):
        row = t + loop.lengths[g]
        if not _is_zero(cotangents[g]):
          y += _at(deltas[g], p, row)
        # Read before it is overwritten, or the whole array would be copied.
        y = lax.optimization_barrier(y)
        y = _through_activation(
          loop.groups[g].activation,
          lambda: _at(lines[g], p, row),
          lambda: _at(inputs[g], p, t),
          y,
        )
        return _put(deltas, g, p, row, y)

      def product(bucket, stack, deltas, i, turn):
        return _flow_back(loop, bucket, stack, deltas, t, i, turn)

      deltas = loop.run(buckets, product, finish, deltas)
    return deltas, None

  rows = jnp.arange(loop.num_rows)
  deltas, _ = lax.scan(step, deltas, rows, reverse=True)
  d_pasts = tuple(d[:, :n] for d, n in zip(deltas, loop.lengths, strict=True))
  if wanted is not None:
    d_pasts = _past_gradients(loop, stacks, deltas, d_pasts)
  return deltas, d_pasts


def _flow_back(loop, bucket, stack, deltas, t, i, turn):
  """What reaches members of a bucket at row `t` from the rows after it."""

  def row_of(delay):
    return jnp.clip(t + delay, 0, loop.num_rows - 1)

  def slot(reads, delay):
    return row_of(delay) + loop.lengths[loop.local[reads.group]]

  def known(delay):
    # A read by row `t + delay` counts if that row exists and knows row `t`.
    exists = row_of(delay) == t + delay
    return exists & (loop.age[row_of(delay)] >= delay)

  read = loop.reader(deltas, slot, known)
  tables = products.tables_of(bucket)
  x = products.side_by_side(bucket, tables, read, i, turn)
  if x is None:
    size = loop.plan.groups[bucket.group].size
    return jnp.zeros((turn, loop.batch_size, size), loop.dtype)
  return jnp.einsum('qbk,qjk->qbj', x, products.cut(stack, i, turn))


def _past_gradients(loop, stacks, deltas, d_pasts):
  """Adds to `d_pasts` what reaches the rows before the first."""
  lengths = loop.lengths

  def step(d_pasts, t):
    for bucket, stack in zip(loop.block.transposed, stacks, strict=True):
      g = loop.local[bucket.group]
      if not (bucket.reads and lengths[g]):
        continue
      count = len(bucket.members)
      y = _flow_back(loop, bucket, stack, deltas, t, 0, count)
      row = jnp.maximum(t + lengths[g], 0)
      y = jnp.where(t + lengths[g] >= 0, y, 0)
      members = jnp.array(bucket.members)
      y += _at(d_pasts[g], members, row)
      d_pasts = _put(d_pasts, g, members, row, y)
    return d_pasts, None

  before = jnp.arange(-max(lengths), 0)
  return lax.scan(step, d_pasts, before)[0]


def _through_activation(activation, output, integrated, y):
  if activation is None:
    return y
  if activation in _FROM_OUTPUT:
    return y * _FROM_OUTPUT[activation](output())
  return jax.vjp(activation, integrated())[1](y)[0]


def _weight_gradients(loop, weights, lines, deltas):
  """The gradient of each pack: one product per member, over all rows."""
  gradients = [jnp.zeros_like(w) for w in weights]
  for bucket in loop.block.inner:
    for reads in bucket.reads:
      g, h = loop.local[bucket.group], loop.local[reads.group]
      stack = _weight_gradient(
        loop,
        bucket,
        reads,
        (lines[h], deltas[g]),
        (loop.lengths[h], loop.lengths[g]),
      )
      shape = gradients[reads.pack].shape
      stack = stack.reshape(-1, *shape[1:])
      if reads.is_padded:
        real = [i for i, r in enumerate(sum(reads.rows, ())) if r >= 0]
        stack = stack[jnp.array(real)]
      gradients[reads.pack] = stack
  return tuple(gradients)


def _weight_gradient(loop, bucket, reads, arrays, lengths):
  """Shape `[m, F, in, out]`; a turn reads what fits, `span` rows at a time."""
  (line, delta), (length, room) = arrays, lengths
  n_in, n_out = line.shape[-1], delta.shape[-1]
  fan_in, num_rows = reads.fan_in, loop.num_rows
  each = loop.batch_size * fan_in * n_in * loop.dtype.itemsize
  turn = products.turn_size(len(bucket.members), num_rows * each)
  span = num_rows
  if turn == 1 and num_rows * each > products.SMALL:
    most = max(1, (products.SMALL // 2) // each)
    span = next(
      s for s in range(min(most, num_rows), 0, -1) if num_rows % s == 0
    )
  members = jnp.array(bucket.members)

  def one(i):
    near, delay = (
      products.cut(jnp.array(x), i, turn) for x in (reads.near, reads.delay)
    )
    p = products.cut(members, i, turn)

    def part(j, total):
      t = j * span
      age = lax.dynamic_slice_in_dim(loop.age, t, span)
      known = age[None, None] >= delay[..., None, None]  # [q, F, span, B]
      x = _spans(line, near, t + length - delay, span)
      x = jnp.where(known[..., None], x, 0)
      d = _spans(delta, p, jnp.full_like(p, t + room), span)
      x = x.reshape(turn, fan_in, span * loop.batch_size, n_in)
      d = d.reshape(turn, span * loop.batch_size, n_out)
      # The small one is turned over, the wide one stays as it lies.
      x = jnp.moveaxis(x, 1, 2).reshape(turn, -1, fan_in * n_in)
      return total + jnp.einsum('qjr,qrk->qjk', jnp.swapaxes(d, 1, 2), x)

    zero = jnp.zeros((turn, n_out, fan_in * n_in), loop.dtype)
    return products.repeat(part, num_rows // span, zero)

  count = len(bucket.members) // turn
  y = one(0) if count == 1 else lax.map(one, jnp.arange(count))
  y = y.reshape(len(bucket.members), n_out, fan_in, n_in)
  return jnp.transpose(y, (0, 2, 3, 1))


def _transposed_weights(plan, bucket, weights):
  """The same for a transposed bucket. Shape `[m, n, K]`."""
  n = plan.groups[bucket.group].size
  parts = []
  for reads in bucket.reads:
    kind = plan.kind((n, plan.groups[reads.group].size))
    stack = products.join([weights[i] for i in kind], 0)
    stack = products.with_zero(stack)[jnp.array(reads.rows)]  # [m, F, n, out]
    parts.append(jnp.moveaxis(stack, 2, 1).reshape(len(bucket.members), n, -1))
  return products.join(parts, 2)


def _take(line, near, slot, known):
  """`line[near, slot]` where it is known, else 0. `[q, F, B, n]`."""
  if math.prod(near.shape) == 1:
    start = near.reshape(()), slot.reshape(()), 0, 0
    x = lax.dynamic_slice(line, start, (1, 1, *line.shape[2:]))
  else:
    x = line.at[near, slot].get(mode='promise_in_bounds')
  return jnp.where(known[..., None], x, 0)


def _members(x, p):
  """Rows `p` of `x`; all if p is None."""
  if p is None:
    return x
  if p.shape[0] == 1:
    return lax.dynamic_slice_in_dim(x, p[0], 1)
  return x.at[p].get(mode='promise_in_bounds')


def _at(x, p, t):
  """Row `t` of members `p`, or of all. `[q, B, n]`."""
  if p is None:
    return lax.dynamic_index_in_dim(x, t, 1, keepdims=False)
  if p.shape[0] == 1:
    return lax.dynamic_slice(x, (p[0], t, 0, 0), (1, 1, *x.shape[2:]))[:, 0]
  x = lax.dynamic_index_in_dim(x, t, 1, keepdims=False)
  return x.at[p].get(mode='promise_in_bounds')


def _put(arrays, g, p, t, y):
  """`arrays` with row `t` of members `p` of the `g`-th written."""
  x = arrays[g]
  if p is None:
    x = lax.dynamic_update_slice(x, y[:, None], (0, t, 0, 0))
  elif p.shape[0] == 1:
    x = lax.dynamic_update_slice(x, y[:, None], (p[0], t, 0, 0))
  else:
    x = x.at[p, t].set(y, unique_indices=True, mode='promise_in_bounds')
  return (*arrays[:g], x, *arrays[g + 1 :])


def _spans(x, p, t, span):
  """`x[p, t : t + span]` for every pair of a table. `[..., span, B, n]`."""
  shape = (1, span, *x.shape[2:])

  def one(p, t):
    return lax.dynamic_slice(x, (p, t, 0, 0), shape)[0]

  for _ in range(p.ndim):
    one = jax.vmap(one)
  return one(p, t)


def _with_room(past, num_rows):
  """`past` and room for `num_rows` more: `[P, L + T, B, n]`."""
  # Two plain writes; fused, the way from the ring would be taken per element.
  past = lax.optimization_barrier(past)
  members, length, *rest = past.shape
  room = jnp.zeros((members, length + num_rows, *rest), past.dtype)
  return lax.dynamic_update_slice(room, past, (0, 0, 0, 0))
