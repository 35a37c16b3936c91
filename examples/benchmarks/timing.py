"""How everything here is timed: compiled first, then medians."""

import time

import jax
import jax.numpy as jnp
import numpy as np


def compile_seconds(fn, *args, **jit_options):
  """Compiles `fn` for `args`: seconds, and the compiled function."""
  start = time.perf_counter()
  compiled = jax.jit(fn, **jit_options).lower(*args).compile()
  return time.perf_counter() - start, compiled


def run_seconds(compiled, *args, repeats=7):
  """Median seconds of a call, after one to warm up."""
  jax.block_until_ready(compiled(*args))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    times.append(time.perf_counter() - start)
  return float(np.median(times))


def carried_seconds(compiled, args, carry, repeats=30):
  """Median seconds of `carry = compiled(*args, carry)`, which is donated."""
  times = []
  for _ in range(repeats + 2):
    start = time.perf_counter()
    carry = jax.block_until_ready(compiled(*args, carry))
    times.append(time.perf_counter() - start)
  return float(np.median(times[2:]))


def matmul_flops(size=2048):
  """Float32 operations per second of a big matrix product."""
  x = jnp.ones((size, size), jnp.float32)
  _, compiled = compile_seconds(lambda x: x @ x, x)
  return 2 * size**3 / run_seconds(compiled, x)
