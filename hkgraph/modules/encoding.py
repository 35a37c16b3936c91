"""The contract of encoders, and what keeps it for them.

An `Encoder` keeps its carry by argument, so that it serves any Haiku function;
`Remember` keeps it in the state of a function given to `hkgraph.transform`.
They read one array; `routing.Concat` makes one of a dict of them.
"""

from collections.abc import Callable, Iterable, Sequence
import math
import numbers
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import stateful


class Encoder(hk.Module):
  """Maps observations to features, and may remember earlier ones."""

  def initial_carry(self, obs_shape: Any, dtype: Any) -> Any:
    """The carry at the beginning of an episode.

    Args:
      obs_shape: Of one step's observation, the batch included: `[B, *frame]`;
        a dict of shapes for a dict of observations.
      dtype: Of the observation; a dict for a dict.

    Returns:
      Tree of arrays `[B, ...]`; `()` for an encoder that remembers nothing.
    """
    del obs_shape, dtype
    return ()

  def __call__(
    self, carry: Any, obs: Any, is_first: types.Array
  ) -> tuple[Any, types.Array]:
    """Advances by one row, or by a sequence.

    Args:
      carry: Before the first row; reset where `is_first` is set.
      obs: Shape `[B, *frame]`, or `[T, B, *frame]` in a sequence.
      is_first: Rows that open an episode. Shape `[B]` or `[T, B]`, bool.

    Returns:
      The carry after the last row, and features of shape `[B, F]` or
      `[T, B, F]`.
    """
    raise NotImplementedError


class Remember(stateful.StatefulModule):
  """An encoder as an ordinary module: its carry lives in Haiku state."""

  def __init__(self, encoder: Encoder, name: str | None = None):
    """Creates the module.

    Args:
      encoder: Its parameters keep their own name.
      name: Name of the module, under which the carry is kept.

    Raises:
      TypeError: if `encoder` is no `Encoder`.
    """
    super().__init__(name=name)
    if not isinstance(encoder, Encoder):
      raise TypeError(
        f'`encoder` must be an Encoder, got {encoder!r}; other modules keep '
        'their state themselves: call them as they are'
      )
    self.encoder = encoder

  def initial_carry(self, x: Any) -> Any:
    shapes, dtypes = (
      jax.tree.map(jnp.shape, x),
      jax.tree.map(jnp.result_type, x),
    )
    return self.encoder.initial_carry(shapes, dtypes)

  def carry_of(self, x: Any) -> Any:
    """The initial carry for `x`, one row or a sequence."""
    is_sequence = stateful.current_rows().is_sequence
    row = jax.tree.map(lambda x: x[0], x) if is_sequence else x
    return self.initial_carry(row)

  def reset(self, carry: Any, x: Any) -> Any:
    return carry  # The encoder does it.

  def step(self, carry: Any, x: Any) -> tuple[Any, types.Array]:
    return self.encoder(carry, x, stateful.current_rows().is_first)

  unroll = step

  def __call__(self, x: Any) -> types.Array:
    """Maps `[B, *frame]` or `[T, B, *frame]` to features."""
    if jax.tree.leaves(self.carry_of(x)):
      return super().__call__(x)
    return self.step((), x)[1]


class FrameEncoder(Encoder):
  """An encoder without memory; subclasses write `encode`."""

  def encode(self, frames: types.Array) -> types.Array:
    """Maps frames `[N, *frame]` to features `[N, F]`.

    Decorate it with `hk.transparent`, so that parameters are named as if they
    were made in `__call__`.
    """
    raise NotImplementedError

  def __call__(
    self, carry: Any, obs: types.Array, is_first: types.Array
  ) -> tuple[Any, types.Array]:
    obs = check_rows(self, obs, is_first)
    return carry, by_frame(self.encode, obs, jnp.ndim(is_first))


def as_module(encoder: Any, name: str | None = None) -> Callable[[Any], Any]:
  """What maps observations to features: an `Encoder` is made to remember.

  Any other callable is taken as it is; if it gives a dict of features, as a
  graph of populations does, they are joined in the order of their keys.

  Args:
    encoder: An `Encoder`, module or function.
    name: For the carry of an `Encoder`.

  Raises:
    TypeError: if `encoder` cannot be called.
  """
  if isinstance(encoder, Encoder):
    return Remember(encoder, name=name)
  if isinstance(encoder, type):
    raise TypeError(
      f'an encoder must be made first: write `{encoder.__name__}(...)`'
    )
  if isinstance(encoder, hk.RNNCore):
    raise TypeError(
      f'{encoder.name!r} is a recurrent core, which keeps its state by '
      'argument; write `RecurrentEncoder(core)`'
    )
  if not callable(encoder):
    raise TypeError(
      'an encoder must be an Encoder, or a module or function from '
      f'observations to features, got {encoder!r}'
    )
  return lambda x: join(encoder(x))


def join(features: Any) -> types.Array:
  """One array `[..., F]` of a dict of them, in the order of their keys."""
  leaves = jax.tree.leaves(features)
  return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)


def layer_norm(x: types.Array, name: str | None = None) -> types.Array:
  """Layer norm over the last axis, with learned scale and offset."""
  return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)


def as_float(x: types.Array, *, image: bool = False) -> types.Array:
  """Casts integers and bools to float; floats keep their dtype.

  Args:
    x: Any shape.
    image: Whether uint8 means brightness, to be divided by 255.
  """
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.floating):
    return x
  is_brightness = image and x.dtype == jnp.uint8
  x = x.astype(jnp.result_type(float))
  return x / 255 if is_brightness else x


def cast_floats(tree: Any, dtype: Any) -> Any:
  """Casts the floats of a tree; other leaves stay as they are."""

  def cast(x):
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(cast, tree)


def by_frame(
  fn: Callable[[types.Array], types.Array], obs: types.Array, num_axes: int
) -> types.Array:
  """Applies `fn`, which knows one leading axis, where there are `num_axes`."""
  lead, frame = obs.shape[:num_axes], obs.shape[num_axes:]
  y = fn(jnp.reshape(obs, (math.prod(lead), *frame)))
  return jnp.reshape(y, (*lead, *y.shape[1:]))


def check_rows(module: hk.Module, obs: Any, is_first: types.Array) -> Any:
  """The observations as one array, whose leading axes are the rows."""
  if not jax.tree_util.treedef_is_leaf(jax.tree.structure(obs)):
    keys = f' of {sorted(obs)}' if isinstance(obs, dict) else ''
    raise TypeError(
      f'`{module.name}` reads one array, got a {type(obs).__name__}{keys}; '
      'take `obs[key]`, or join vectors with `Concat`'
    )
  obs, rows = jnp.asarray(obs), jnp.shape(is_first)
  if len(rows) not in (1, 2) or obs.shape[: len(rows)] != rows:
    raise ValueError(
      f'`{module.name}` needs `is_first` of shape [B] for observations '
      f'[B, ...], or [T, B] for [T, B, ...]; got {rows} for {obs.shape}'
    )
  if jnp.result_type(is_first) != jnp.bool_:
    raise TypeError(f'`is_first` must be bool, got {jnp.result_type(is_first)}')
  return obs


def check_sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
  """The sizes as a tuple, if all are positive integers."""
  message = f'`{name}` must be positive integers, as in (64, 64), got {sizes!r}'
  if not isinstance(sizes, Iterable) or isinstance(sizes, str):
    raise TypeError(message)
  sizes = tuple(sizes)
  for size in sizes:
    is_integer = isinstance(size, numbers.Integral)
    if isinstance(size, bool) or not is_integer or size < 1:
      raise ValueError(message)
  return tuple(map(int, sizes))
