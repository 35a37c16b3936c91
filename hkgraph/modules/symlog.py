"""Symlog squashing and its inverse: linear near 0, logarithmic far from it.

Hafner et al., arXiv 2301.04104, section "Robust predictions". These are
`rlax.signed_logp1` and `rlax.signed_expm1`, but for the slope at 0, which is 1
and not 0.
"""

import jax.numpy as jnp

from hkgraph import types


def symlog(x: types.Array) -> types.Array:
  """Computes `sign(x) * log(|x| + 1)`, for floats of any shape."""
  sign = _sign(x)
  return sign * jnp.log1p(sign * x)


def symexp(x: types.Array) -> types.Array:
  """Computes `sign(x) * (exp(|x|) - 1)`, for floats of any shape."""
  sign = _sign(x)
  return sign * jnp.expm1(sign * x)


def _sign(x: types.Array) -> types.Array:
  """The sign, which is 1 for 0."""
  one = jnp.ones_like(x)
  return jnp.where(x < 0, -one, one)
