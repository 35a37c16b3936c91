"""A loop of `apply` against one `unroll`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def rows(frame, *, num_rows=7, batch_size=3, dtype=np.float32, seed=0):
  """Random observations and first rows, the episode of some goes on."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((num_rows, batch_size, *frame))
  x = x.astype(dtype) if dtype == np.float32 else (x * 99).astype(dtype)
  return x, rng.random((num_rows, batch_size)) < 0.3


def loop(apply, params, state, x, is_first):
  """Outputs stacked, and the last state."""
  ys = []
  for t in range(len(is_first)):
    row = jax.tree.map(lambda x, t=t: x[t], x)
    y, state = apply(params, state, None, row, is_first[t])
    ys.append(y)
  return jax.tree.map(lambda *y: jnp.stack(y), *ys), state


def check(network, x, is_first, *, jit=True):
  """Checks outputs and final state, and that carries lead with the batch.

  Returns:
    The outputs, the parameters and the state after the sequence.
  """
  first_row = jax.tree.map(lambda x: x[0], x)
  params, state = jax.jit(network.init)(jax.random.key(0), first_row)
  # A carry in mid-episode, with other numbers than the initial ones.
  apply = jax.jit(network.apply)
  _, state = apply(params, state, None, first_row, ~is_first[0])
  looped, loop_end = loop(apply, params, state, x, is_first)
  unroll = jax.jit(network.unroll) if jit else network.unroll
  unrolled, end = unroll(params, state, None, x, is_first)
  for leaf in jax.tree.leaves(end.carry):
    assert leaf.shape[0] == is_first.shape[1], leaf.shape
  chex.assert_trees_all_equal_shapes_and_dtypes(state.carry, end.carry)
  chex.assert_trees_all_close(looped, unrolled, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(loop_end, end, rtol=1e-5, atol=1e-5)
  return unrolled, params, end
