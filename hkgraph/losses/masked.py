"""Means over the rows that count.

Numbers outside of a mask may be anything, also not finite.
"""

import chex
import jax
import jax.numpy as jnp

from hkgraph import types


def mean(x: types.Array, mask: types.Array) -> types.Array:
  """Averages `x` over the rows of `mask`; 0 if there are none.

  Args:
    x: Shape `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.

  Returns:
    A scalar.
  """
  chex.assert_equal_shape([x, mask])
  chex.assert_type(mask, bool)
  return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(jnp.sum(mask), 1)


def centre(x: types.Array, mask: types.Array) -> types.Array:
  """Subtracts the mean over the rows of `mask`.

  It does so twice: the first mean is rounded, which would be all that is left
  of rows that are equal, and a division by their deviation would magnify it.

  Args:
    x: Shape `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.

  Returns:
    Shape `[...]`; 0 outside of the mask.
  """
  for _ in range(2):
    x = jnp.where(mask, x - mean(x, mask), 0)
  return x


def variance(x: types.Array, mask: types.Array) -> types.Array:
  """Averages the squared distance of `x` from its mean over the rows of `mask`.

  Args:
    x: Shape `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.

  Returns:
    A scalar; 0 for fewer than two rows.
  """
  return mean(jnp.square(centre(x, mask)), mask)


def explained_variance(
  value: types.Array, target: types.Array, mask: types.Array
) -> types.Array:
  """Computes the share of the targets' variance that the values account for.

  Args:
    value: Shape `[...]`.
    target: Shape `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.

  Returns:
    `1 - Var(target - value) / Var(target)`, a scalar, at most 1; 0 where the
    targets do not vary beyond rounding.
  """
  chex.assert_equal_shape([value, target, mask])
  both = jnp.stack([target, target - value])
  total, remaining = jax.vmap(variance, (0, None))(both, mask)
  rounding = jnp.square(4 * jnp.finfo(target.dtype).eps)
  varies = total > rounding * mean(jnp.square(target), mask)
  residual = remaining / jnp.where(varies, total, 1)
  return jnp.where(varies, 1 - residual, 0)
