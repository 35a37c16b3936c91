"""Cutting an update's data into minibatches, a new way each epoch."""

import jax
import jax.numpy as jnp

from hkgraph import types


def minibatch_size(size: int, num_minibatches: int, of: str = 'rows') -> int:
  """Computes the size of equal minibatches.

  Args:
    size: How much there is to divide.
    num_minibatches: Into how many.
    of: What is divided, for the error.

  Returns:
    `size // num_minibatches`.

  Raises:
    ValueError: If it does not divide.
  """
  if num_minibatches < 1 or size % num_minibatches:
    allowed = [n for n in range(1, size + 1) if size % n == 0]
    raise ValueError(
      f'{size} {of} do not divide into {num_minibatches} equal minibatches; '
      f'the number of minibatches must be one of {allowed}.'
    )
  return size // num_minibatches


def flatten_rows(tree: types.ArrayTree) -> types.ArrayTree:
  """Merges the axes of time and batch: leaves `[T, B, ...]` to `[T * B, ...]`.

  Args:
    tree: Any tree of arrays (typed keys too) with the same two leading axes.

  Returns:
    The tree, row `t * B + b` of it being what was at `[t, b]`.

  Raises:
    ValueError: If leaves differ in their leading axes, or lack them.
  """
  shapes = {x.shape[:2] for x in jax.tree.leaves(tree)}
  if len(shapes) > 1 or any(len(shape) < 2 for shape in shapes):
    raise ValueError(
      f'Leaves must agree in two leading axes, got {sorted(shapes)}.'
    )
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree
  )


def permuted_minibatches(
  key: types.Array,
  tree: types.ArrayTree,
  num_minibatches: int,
  axis: types.ArrayTree = 0,
) -> types.ArrayTree:
  """Deals the entries of an axis out to minibatches at random, each once.

  For a network with carry, whole environments are dealt out:
  `permuted_minibatches(key, (rows, carry), n, axis=(1, 0))` for rows `[T, B,
  ...]` and carry `[B, ...]`. For one without, rows are:
  `permuted_minibatches(key, flatten_rows(rows), n)`.

  Args:
    key: Gives the permutation, which all leaves share; consumed.
    tree: Any tree of arrays, typed keys too.
    num_minibatches: Must divide the axis.
    axis: Which axis to deal out, not negative: a number, or a tree of them of
      which `tree` continues the structure.

  Returns:
    The tree with a new leading axis of size `num_minibatches` on each leaf; the
    axis dealt out, now one further back, has the size of a minibatch.

  Raises:
    ValueError: If `num_minibatches` does not divide the axis, or the leaves
      differ in its size.
  """
  axes = jax.tree.broadcast(axis, tree)
  sizes = set(jax.tree.leaves(jax.tree.map(_axis_size, tree, axes)))
  if len(sizes) != 1:
    raise ValueError(
      f'Leaves must agree in the axis to deal out, got sizes {sorted(sizes)}.'
    )
  (size,) = sizes
  shape = num_minibatches, minibatch_size(size, num_minibatches)
  indices = _permutation(key, size).reshape(shape)

  def deal(x, axis):
    place = (slice(None),) * axis + (indices,)
    x = jnp.asarray(x).at[place].get(mode='promise_in_bounds')
    return jnp.moveaxis(x, axis, 0)

  return jax.tree.map(deal, tree, axes)


def _permutation(key: types.Array, size: int) -> types.Array:
  """The order of random numbers.

  Two of them are equal once in 2^33 / size^2 times, and then stay in order;
  `jax.random.permutation` sorts twice against that.
  """
  return jnp.argsort(jax.random.bits(key, (size,), jnp.uint32))


def _axis_size(x: types.Array, axis: int) -> int:
  if not 0 <= axis < x.ndim:
    raise ValueError(f'A leaf of shape {list(x.shape)} has no axis {axis}.')
  return x.shape[axis]
