"""Discrete latent variables: vectors of one-hot samples with a gradient.

Hafner et al., arXiv 2301.04104, section "World model learning".
"""

import math
from typing import Any

import distrax
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import distributions


def unimix_categorical(
  logits: types.Array, unimix: float = 0.01
) -> distrax.Categorical:
  """Mixes a categorical with the uniform one.

    p = (1 - unimix) * softmax(logits) + unimix / K

  so that no class is impossible and no KL infinite. Computed in at least
  float32.

  Args:
    logits: Shape `[..., K]`.
    unimix: Share of the uniform distribution, in `[0, 1]`.

  Returns:
    A distribution with batch shape `[...]`.

  Raises:
    ValueError: if `unimix` is out of range.
  """
  if not 0 <= unimix <= 1:
    raise ValueError(f'`unimix` must be in [0, 1], got {unimix!r}')
  logits = _widen(logits)
  if unimix:
    probs = (1 - unimix) * jax.nn.softmax(logits, axis=-1)
    logits = jnp.log(probs + unimix / logits.shape[-1])
  return distributions.categorical(logits)


def straight_through_sample(
  distribution: distrax.Categorical, key: types.Array, *, dtype: Any = None
) -> types.Array:
  """Draws one-hot vectors whose gradient is that of the probabilities.

  One uniform number per categorical is compared with the cumulative
  probabilities. A class of probability 0 is never drawn.

  Args:
    distribution: Of `K` classes, batch shape `[...]`.
    key: Consumed.
    dtype: Of the result; that of the probabilities if None.

  Returns:
    Shape `[..., K]`, exactly 0 or 1.
  """
  rows = distribution.probs.shape[:-1]
  return straight_through(distribution, uniform(key, rows), dtype=dtype)


def uniform(key: types.Array, rows: tuple[int, ...]) -> types.Array:
  """Draws what `straight_through` reads, shape `rows`, in `[0, 1)`."""
  # In one axis: XLA is slow to compile random bits in several.
  return jax.random.uniform(key, (math.prod(rows),)).reshape(rows)


def straight_through(
  distribution: distrax.Categorical, uniform: types.Array, *, dtype: Any = None
) -> types.Array:
  """Does what `straight_through_sample` does, with numbers that are given.

  Args:
    distribution: Of `K` classes, batch shape `[...]`.
    uniform: From `uniform`; one for each categorical, `[...]`.
    dtype: Of the result; that of the probabilities if None.

  Returns:
    Shape `[..., K]`, exactly 0 or 1.
  """
  probs = _widen(distribution.probs)
  dtype = probs.dtype if dtype is None else dtype
  one_hot = _draw(jax.lax.stop_gradient(probs), uniform).astype(dtype)
  # In these brackets: rounding must not touch the one-hot vector.
  return one_hot + (probs - jax.lax.stop_gradient(probs)).astype(dtype)


def _draw(probs: types.Array, uniform: types.Array) -> types.Array:
  """Draws a class of each row as a mask `[..., K]`."""
  num_classes = probs.shape[-1]
  # One product: a cumulative sum is many operations on a CPU.
  before = jnp.triu(jnp.ones((num_classes, num_classes), probs.dtype))
  total = jnp.matmul(probs, before, precision=jax.lax.Precision.HIGHEST)
  # Sums may be rounded out of order; what is impossible is beyond none.
  total = jnp.where(probs > 0, total, 0)
  uniform = uniform.astype(probs.dtype)[..., None]
  threshold = uniform * jnp.max(total, -1, keepdims=True)
  classes = jax.lax.broadcasted_iota(jnp.int32, probs.shape, probs.ndim - 1)
  hits = jnp.where(total > threshold, classes, num_classes - 1)
  return classes == jnp.min(hits, axis=-1, keepdims=True)


def _widen(x: types.Array) -> types.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
