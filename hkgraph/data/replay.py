"""Replay of sequences on the device: a ring of rows over time.

Each row is stored once, in its own dtype. Sequences are read out of the ring
wherever they lie, so that they overlap freely and cross episodes.
"""

import chex
import jax
import jax.numpy as jnp

from hkgraph import types


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Replay:
  """The last `C` rows of `B` environments.

  Attributes:
    rows: Row `t` of the past, counted from the first ever added, lies at
      `t % C`; zeros where nothing was added yet.
    position: Where the next row goes, in `0..C-1`, int32.
    size: How many rows are stored, in `0..C`, int32.
  """

  rows: types.ArrayTree  # [C, B, ...]
  position: types.Array  # []
  size: types.Array  # []


def empty(row: types.ArrayTree, capacity: int) -> Replay:
  """Makes a replay without rows.

  Args:
    row: What a row looks like: a tree of arrays or of `jax.ShapeDtypeStruct`,
      shape `[B, ...]`.
    capacity: In frames, `B` of which make a row; rounded down to whole rows.

  Returns:
    A replay of `capacity // B` rows.

  Raises:
    ValueError: If leaves differ in `B`, or not a single row fits.
  """
  batch_sizes = {tuple(x.shape[:1]) for x in jax.tree.leaves(row)}
  if len(batch_sizes) != 1 or () in batch_sizes:
    raise ValueError(
      '`row` must have leaves that agree in a leading axis of environments, '
      f'got leading axes {sorted(batch_sizes)}.'
    )
  ((batch_size,),) = batch_sizes
  num_rows = capacity // batch_size if batch_size else 0
  if num_rows < 1:
    raise ValueError(
      f'`capacity` is in frames and must be at least {max(batch_size, 1)}, one '
      f'row of {batch_size} environments, got {capacity}.'
    )
  return Replay(
    rows=jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), row),
    position=jnp.zeros((), jnp.int32),
    size=jnp.zeros((), jnp.int32),
  )


def add(replay: Replay, rows: types.ArrayTree) -> Replay:
  """Writes rows over the oldest ones.

  In place where the replay is donated to the jitted function around; only
  bfloat16 leaves are copied once, by XLA for CPUs.

  Args:
    replay: Where to.
    rows: A tree like that of the replay, in order of time, shape `[T, B, ...]`;
      of more than `C` the last `C` are kept.

  Returns:
    The replay with the rows, the last of them right before `position`.

  Raises:
    ValueError: If leaves differ from the replay's in shape or dtype.
  """
  chex.assert_trees_all_equal_structs(rows, replay.rows)
  jax.tree.map(_check_leaf, rows, replay.rows)
  num_new = jax.tree.leaves(rows)[0].shape[0]
  chex.assert_tree_shape_prefix(rows, (num_new,))
  num_rows = _num_rows(replay)
  dropped = max(num_new - num_rows, 0)
  where = jnp.mod(replay.position + jnp.arange(dropped, num_new), num_rows)
  written = jax.tree.map(
    lambda ring, x: ring.at[where].set(
      x[dropped:], mode='promise_in_bounds', unique_indices=True
    ),
    replay.rows,
    rows,
  )
  return Replay(
    rows=written,
    position=jnp.mod(replay.position + num_new, num_rows),
    size=jnp.minimum(replay.size + num_new, num_rows),
  )


def can_sample(replay: Replay, length: int) -> types.Array:
  """Whether sequences of `length` rows can be drawn, bool, shape `[]`."""
  return replay.size >= length


def sample(
  replay: Replay, key: types.Array, batch_size: int, length: int
) -> types.ArrayTree:
  """Draws sequences of consecutive rows, uniformly and with replacement.

  All sequences of one environment that lie within the stored rows are equally
  likely, in all environments. They may cross episodes, but never the position
  of writing, where the newest row meets the oldest.

  Args:
    replay: Where from.
    key: Consumed.
    batch_size: Number of sequences.
    length: Number of rows of each, at most as many as are stored. Inside of
      jitted functions that number is unknown: ask `can_sample` there, for while
      there are too few, sequences go on into rows that are 0.

  Returns:
    A tree like that of the replay, shape `[length, batch_size, ...]`.

  Raises:
    ValueError: If `length` is not in `1..C`, or is known to exceed the number
      of rows that are stored.
  """
  num_rows = _num_rows(replay)
  if not 1 <= length <= num_rows:
    raise ValueError(
      f'`length` must be in 1..{num_rows}, the rows that the replay holds, got '
      f'{length}; give `empty` a larger `capacity`.'
    )
  traced = isinstance(replay.size, jax.core.Tracer)
  if not traced and length > replay.size:
    raise ValueError(
      f'`length` is {length}, but only {replay.size} rows are stored so far; '
      '`add` more, and ask `can_sample`.'
    )
  num_environments = jax.tree.leaves(replay.rows)[0].shape[1]
  num_starts = jnp.maximum(replay.size - length + 1, 1)
  # Drawn in one axis, which compiles fastest.
  choices = jnp.stack([jnp.int32(num_environments), num_starts])
  choices = jnp.repeat(choices, batch_size)
  drawn = jax.random.randint(key, choices.shape, 0, choices)
  environment, start = jnp.split(drawn, 2)
  start += replay.position - replay.size
  where = jnp.mod(start[None] + jnp.arange(length)[:, None], num_rows)
  environment = jnp.broadcast_to(environment, where.shape)
  return jax.tree.map(
    lambda ring: ring.at[where, environment].get(mode='promise_in_bounds'),
    replay.rows,
  )


def _num_rows(replay: Replay) -> int:
  return jax.tree.leaves(replay.rows)[0].shape[0]


def _check_leaf(x: types.Array, ring: types.Array) -> None:
  if x.shape[1:] != ring.shape[1:] or x.dtype != ring.dtype:
    raise ValueError(
      f'Rows must be {ring.dtype} of shape [T, '
      f'{", ".join(map(str, ring.shape[1:]))}] as in the replay, got {x.dtype} '
      f'of shape {list(x.shape)}.'
    )
