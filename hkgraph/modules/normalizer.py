"""Normalisation by running statistics that stand still during an update."""

from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import stateful

_MAX_COUNT = 2**32 - 1


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Moments:
  """Count, mean and population variance of samples.

  Attributes:
    count: uint32; stands still at `2**32 - 1`, where further samples weigh as
      in an exponential average.
    mean: float32, or the samples' dtype where that is wider.
    variance: As `mean`, at least 0.
  """

  count: types.Array  # []
  mean: types.Array  # [...]
  variance: types.Array  # [...]


def empty_moments(shape: tuple[int, ...], dtype: Any) -> Moments:
  """Moments of no samples: mean 0 and variance 1, that is, no change."""
  dtype = jnp.promote_types(dtype, jnp.float32)
  return Moments(
    count=jnp.zeros((), jnp.uint32),
    mean=jnp.zeros(shape, dtype),
    variance=jnp.ones(shape, dtype),
  )


def moments_of(x: types.Array, mask: types.Array) -> Moments:
  """Moments over the leading axes, in two passes so that no digits cancel.

  Args:
    x: Samples. Shape `[*mask.shape, ...]`.
    mask: Which samples count, bool.

  Returns:
    Moments of shape `x.shape[mask.ndim:]`.
  """
  x, mask = jnp.asarray(x), jnp.asarray(mask)
  axes = tuple(range(mask.ndim))
  empty = empty_moments(x.shape[mask.ndim :], x.dtype)
  x = x.astype(empty.mean.dtype)
  mask = jnp.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim))
  count = jnp.sum(mask, dtype=jnp.uint32)
  divisor = jnp.maximum(count, 1).astype(x.dtype)
  mean = jnp.sum(x, axes, where=mask) / divisor
  centred = jnp.where(mask, x - mean[(None,) * len(axes)], 0)
  # What rounding left of the mean, so that far-off features stay exact.
  rest = jnp.sum(centred, axes) / divisor
  variance = jnp.sum(jnp.square(centred), axes) / divisor - jnp.square(rest)
  return Moments(
    count=count, mean=mean + rest, variance=jnp.maximum(variance, 0)
  )


def merge_moments(a: Moments, b: Moments) -> Moments:
  """Moments of the union of two sets of samples.

  The parallel rule of Chan, Golub & LeVeque (1979), written as increments of
  `a`, so that a large `a` is not rounded away. An empty set changes nothing.
  """
  room = jnp.uint32(_MAX_COUNT) - a.count
  count = a.count + jnp.minimum(b.count, room)
  total = jnp.maximum(count, 1).astype(a.mean.dtype)
  weight = jnp.minimum(b.count.astype(a.mean.dtype) / total, 1)
  delta = b.mean.astype(a.mean.dtype) - a.mean
  spread = jnp.square(delta) * (1 - weight)
  change = b.variance.astype(a.variance.dtype) - a.variance + spread
  merged = Moments(
    count=count,
    mean=a.mean + weight * delta,
    variance=jnp.maximum(a.variance + weight * change, 0),
  )
  return jax.tree.map(lambda x, y: jnp.where(a.count > 0, x, y), merged, b)


class Normalizer(hk.Module):
  """Shifts and scales every float leaf to mean 0 and deviation 1.

  The statistics are frozen in `apply` and `unroll`; `update_statistics` takes
  in the rows of an update, once. Leaves of other dtypes pass unchanged.
  """

  def __init__(
    self,
    *,
    clip: float | None = 10.0,
    epsilon: float = 1e-6,
    warm_start: Any = None,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      clip: Bound of the output's absolute value, positive; None for no bound.
      epsilon: Added to the variance; positive, so that constant features give
        finite output.
      warm_start: Statistics to begin with: a tree like the input, with
        `Moments` in place of the float leaves.
      name: Name of the module.

    Raises:
      ValueError: if `clip` or `epsilon` is not positive.
    """
    super().__init__(name=name)
    if clip is not None and not clip > 0:
      raise ValueError(f'`clip` must be positive or None, got {clip}')
    if not epsilon > 0:
      raise ValueError(f'`epsilon` must be positive, got {epsilon}')
    self._clip = clip
    self._epsilon = epsilon
    self._warm_start = warm_start

  def __call__(self, x: Any) -> Any:
    rows = stateful.current_rows()
    leaves, treedef = jax.tree.flatten(x)
    floats = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    initial = self._initial([leaves[i] for i in floats], rows)
    frozen, latest = stateful.get_statistics('moments', initial)
    if rows.frozen is not None:
      mask = rows.mask
      latest = tuple(
        merge_moments(m, moments_of(leaves[i], mask))
        for i, m in zip(floats, latest, strict=True)
      )
      stateful.set_statistics('moments', latest)
    for i, moments in zip(floats, frozen, strict=True):
      leaves[i] = self._normalise(leaves[i], moments)
    return jax.tree.unflatten(treedef, leaves)

  def _initial(self, leaves, rows) -> tuple[Moments, ...]:
    shapes = [leaf.shape[rows.is_first.ndim :] for leaf in leaves]
    if self._warm_start is None:
      return tuple(
        empty_moments(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)
      )
    moments = tuple(
      m
      for m in jax.tree.leaves(self._warm_start, is_leaf=_is_moments)
      if _is_moments(m)
    )
    given = [jnp.shape(m.mean) for m in moments]
    if given != shapes:
      raise ValueError(
        f'`warm_start` must hold Moments of shapes {shapes} (one for each '
        f'float leaf of the input), got {given}'
      )
    return tuple(
      Moments(
        count=jnp.asarray(m.count, jnp.uint32),
        mean=jnp.asarray(m.mean, jnp.promote_types(x.dtype, jnp.float32)),
        variance=jnp.asarray(
          m.variance, jnp.promote_types(x.dtype, jnp.float32)
        ),
      )
      for m, x in zip(moments, leaves, strict=True)
    )

  def _normalise(self, x: types.Array, moments: Moments) -> types.Array:
    lead = (None,) * (x.ndim - moments.mean.ndim)
    scale = jax.lax.rsqrt(moments.variance + self._epsilon)
    y = (x - moments.mean[lead]) * scale[lead]
    if self._clip is not None:
      y = jnp.clip(y, -self._clip, self._clip)
    return y.astype(x.dtype)


def _is_float(x: types.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _is_moments(node: Any) -> bool:
  return isinstance(node, Moments)
