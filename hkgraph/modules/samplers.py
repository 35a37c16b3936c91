"""Noise that a replay reproduces."""

from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import stateful


class GaussianNoise(stateful.StatefulModule):
  """Adds normal noise, drawn from a key per batch element in the carry.

  Noise `n` of an element is drawn from its key folded with `n`; the count
  goes on through a reset. So any part of the batch, replayed from a stored
  carry, meets the same noise, and sequences need no loop.
  """

  def __init__(self, scale: float = 1.0, name: str | None = None):
    """Creates the module.

    Args:
      scale: Standard deviation, at least 0.
      name: Name of the module.
    """
    super().__init__(name=name)
    if not scale >= 0:
      raise ValueError(f'`scale` must be non-negative, got {scale}')
    self._scale = scale

  def initial_carry(self, x: types.Array) -> Any:
    batch_size = x.shape[0]
    return {
      'key': stateful.initial_keys(batch_size),
      'count': jnp.zeros(batch_size, jnp.uint32),
    }

  def reset(self, carry: Any, x: Any) -> Any:
    return carry  # Fresh episodes have fresh noise.

  def step(self, carry: Any, x: types.Array) -> tuple[Any, types.Array]:
    noise = _noise(carry['key'], carry['count'], x[0])
    return self._advance(carry, 1), x + self._scale * noise

  def unroll(self, carry: Any, x: types.Array) -> tuple[Any, types.Array]:
    num_rows = x.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.uint32)[:, None]
    count = carry['count'][None] + row
    noise = jax.vmap(_noise, (None, 0, None))(carry['key'], count, x[0, 0])
    return self._advance(carry, num_rows), x + self._scale * noise

  def _advance(self, carry, num_rows):
    # Wraps around after 2**32 rows.
    return dict(carry, count=carry['count'] + jnp.uint32(num_rows))


def _noise(key, count, like):
  def draw(key, count):
    key = jax.random.fold_in(key, count)
    return jax.random.normal(key, like.shape, like.dtype)

  return jax.vmap(draw)(key, count)
