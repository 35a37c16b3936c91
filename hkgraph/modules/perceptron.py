"""The layers of DreamerV3: linear, layer norm, SiLU."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import encoding

# The standard deviation of a standard normal that is cut at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978


class Perceptron(hk.Module):
  """Linear layers, each with a layer norm and an activation.

  As in the code of Hafner et al., arXiv 2301.04104: no bias where a layer norm
  follows, weights from `fan_avg`.
  """

  def __init__(
    self,
    sizes: Sequence[int],
    *,
    activation: Callable[[types.Array], types.Array] = jax.nn.silu,
    norm: bool = True,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      sizes: Of the layers; without any the input is returned as it is.
      activation: After each layer.
      norm: Whether there are layer norms; if not, there are biases.
      name: Name of the module.

    Raises:
      ValueError: if a size is no positive integer.
    """
    super().__init__(name=name)
    self._sizes = encoding.check_sizes('sizes', sizes)
    self._activation = activation
    self._norm = norm

  def __call__(self, x: types.Array) -> types.Array:
    """Maps floats `[..., F]` to `[..., sizes[-1]]`."""
    for size in self._sizes:
      x = hk.Linear(size, with_bias=not self._norm, w_init=fan_avg)(x)
      x = self._activation(layer_norm(x) if self._norm else x)
    return x


def layer_norm(x: types.Array, name: str | None = None) -> types.Array:
  """Layer norm over the last axis, with learned scale and offset.

  Its epsilon is DreamerV3's, `1e-3`.
  """
  return hk.LayerNorm(
    -1, create_scale=True, create_offset=True, eps=1e-3, name=name
  )(x)


def fan_avg(shape: Sequence[int], dtype: Any) -> types.Array:
  """Truncated normal weights of variance `2 / (fan_in + fan_out)`.

  It is `hk.initializers.VarianceScaling(1.0, 'fan_avg', 'truncated_normal')`,
  with its numbers drawn in one axis: XLA is slow to compile random bits in
  several.

  Args:
    shape: `[..., in, out]`; axes before these are those of a kernel.
    dtype: Of the weights, a float.
  """
  fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
  scale = math.sqrt(2 / fans) / _TRUNCATED_STD
  wide = jnp.promote_types(dtype, jnp.float32)
  x = jax.random.truncated_normal(
    hk.next_rng_key(), -2, 2, (math.prod(shape),), wide
  )
  return jnp.asarray(scale * x.reshape(shape), dtype)
