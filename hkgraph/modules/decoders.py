"""Decoders: what a world model's features say about an observation.

Hafner et al., arXiv 2301.04104, sections "World model learning" and "Robust
predictions".
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.modules import encoding, perceptron, symlog

_MIN_IMAGE = 8  # Pixels of height and width.


@dataclasses.dataclass(frozen=True)
class LeafKind:
  """How one array of an observation is predicted; static.

  Attributes:
    shape: Of the array, without the batch.
    scale: What a predicted brightness of 1 means; None for what is no image.
  """

  shape: tuple[int, ...]
  scale: float | None

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['values'],
  meta_fields=['kinds'],
)
@dataclasses.dataclass(frozen=True)
class Prediction:
  """A predicted observation, which may leave the network as it is.

  Attributes:
    values: Tree of the observation: symlogs, or brightness from 0 to 1 for
      images. Leaves `[..., *shape]`.
    kinds: Of the leaves, in order.
  """

  values: types.ArrayTree
  kinds: tuple[LeafKind, ...]

  def loss(self, observation: types.ArrayTree) -> types.Array:
    """Computes the squared error of each row.

    It is summed over all elements: `(value - symlog(x))^2` for vectors,
    `(value - x / 255)^2` for uint8 images, `(value - x)^2` for other images.

    Args:
      observation: Tree of `values`, with leaves of the same shapes.

    Returns:
      Shape `[...]`, at least float32.
    """
    chex.assert_trees_all_equal_structs(self.values, observation)
    leaves = map(jax.tree.leaves, (self.values, observation))
    return sum(map(_squared_error, *leaves, self.kinds))

  def mean(self) -> types.ArrayTree:
    """Computes the predicted observation in the observation's own units.

    Returns:
      Tree of floats; what is uint8 in an observation is from 0 to 255 here.
    """

    def convert(value, kind):
      if kind.scale is None:
        return symlog.symexp(value)
      return value * jnp.asarray(kind.scale, value.dtype)

    leaves, treedef = jax.tree.flatten(self.values)
    return treedef.unflatten(map(convert, leaves, self.kinds))


class Decoder(hk.Module):
  """Predicts an observation from features.

  An array `[H, W, C]` with `H` and `W` of at least 8 is an image if it holds
  uint8, bools or floats (from 0 to 1), and is made by transposed convolutions
  of stride 2. Everything else, numbers of any magnitude, is predicted as its
  symlog, by one perceptron for all of it.
  """

  def __init__(
    self,
    observation_spec: Any,
    *,
    hidden_sizes: Sequence[int] = (256, 256, 256),
    channels: Sequence[int] = (64, 64, 32),
    kernel_size: int = 4,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      observation_spec: Tree of what has a `shape` and a `dtype`, without the
        batch, as a spec or a `jax.ShapeDtypeStruct`. Classes are better
        described as the one-hot vectors that they are compared with.
      hidden_sizes: Of the perceptron for what is no image.
      channels: Of an image's growing grid, from the smallest on. There are as
        many transposed convolutions, and `2 ** len(channels)` must divide
        height and width.
      kernel_size: Of the convolutions, in pixels; a multiple of 2 covers all
        pixels alike.
      name: Of the module.

    Raises:
      TypeError: if a leaf has no shape or dtype.
      ValueError: if an image's size cannot be made, or a size is no positive
        integer.
    """
    super().__init__(name=name)
    specs, self._treedef = jax.tree.flatten(observation_spec)
    self._hidden_sizes = encoding.check_sizes('hidden_sizes', hidden_sizes)
    self._channels = encoding.check_sizes('channels', channels)
    (self._kernel_size,) = encoding.check_sizes('kernel_size', [kernel_size])
    self._kinds = tuple(map(_kind, specs))
    for kind in self._kinds:
      if kind.scale is not None:
        _check_image(kind.shape, len(self._channels))
    if not self._kinds:
      raise ValueError('`observation_spec` has no array: nothing to predict')

  def __call__(self, features: types.Array) -> Prediction:
    """Makes the prediction of features `[..., F]`, for every row."""
    vectors = iter(self._vectors(features))
    values = [
      next(vectors) if kind.scale is None else self._image(features, kind.shape)
      for kind in self._kinds
    ]
    return Prediction(values=self._treedef.unflatten(values), kinds=self._kinds)

  @hk.transparent
  def _vectors(self, features: types.Array) -> list[types.Array]:
    kinds = [kind for kind in self._kinds if kind.scale is None]
    if not kinds:
      return []
    sizes = [kind.size for kind in kinds]
    x = perceptron.Perceptron(self._hidden_sizes)(features)
    x = hk.Linear(sum(sizes), w_init=perceptron.fan_avg, name='vectors')(x)
    parts = jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)
    return [
      part.reshape(*features.shape[:-1], *kind.shape)
      for part, kind in zip(parts, kinds, strict=True)
    ]

  @hk.transparent
  def _image(
    self, features: types.Array, shape: tuple[int, ...]
  ) -> types.Array:
    """Grows an image, doubling height and width with every layer."""
    factor = 2 ** len(self._channels)
    grid = (shape[0] // factor, shape[1] // factor, self._channels[0])
    x = features.reshape(-1, features.shape[-1])
    x = hk.Linear(
      math.prod(grid), with_bias=False, w_init=perceptron.fan_avg, name='grid'
    )(x)
    x = x.reshape(-1, *grid)
    for size in self._channels[1:]:
      x = self._double(jax.nn.silu(perceptron.layer_norm(x)), size, False)
    x = self._double(jax.nn.silu(perceptron.layer_norm(x)), shape[2], True)
    return jax.nn.sigmoid(x).reshape(*features.shape[:-1], *shape)

  @hk.transparent
  def _double(self, x: types.Array, size: int, with_bias: bool) -> types.Array:
    return hk.Conv2DTranspose(
      size,
      self._kernel_size,
      2,
      with_bias=with_bias,
      w_init=perceptron.fan_avg,
    )(x)


def _squared_error(
  value: types.Array, target: types.Array, kind: LeafKind
) -> types.Array:
  """Squared error of each row, summed over the leaf's own axes."""
  chex.assert_equal_shape([value, target])
  value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
  is_image = kind.scale is not None
  target = encoding.as_float(target, image=is_image).astype(value.dtype)
  target = target if is_image else symlog.symlog(target)
  own = range(value.ndim - len(kind.shape), value.ndim)
  return jnp.sum(jnp.square(value - target), axis=tuple(own))


def _kind(spec: Any) -> LeafKind:
  if not (hasattr(spec, 'shape') and hasattr(spec, 'dtype')):
    raise TypeError(
      'every leaf of `observation_spec` needs a shape and a dtype, as '
      f'jax.ShapeDtypeStruct((3,), float), got {spec!r}'
    )
  shape, dtype = tuple(spec.shape), np.dtype(spec.dtype)
  is_grid = len(shape) == 3 and min(shape[:2]) >= _MIN_IMAGE and shape[2] > 0
  has_brightness = dtype in (np.uint8, np.bool_) or jnp.issubdtype(
    dtype, jnp.floating
  )
  if not (is_grid and has_brightness):
    return LeafKind(shape=shape, scale=None)
  return LeafKind(shape=shape, scale=255.0 if dtype == np.uint8 else 1.0)


def _check_image(shape: tuple[int, ...], num_layers: int) -> None:
  """Raises unless `num_layers` doublings of a grid make the image."""
  factor, (height, width) = 2**num_layers, shape[:2]
  if height % factor or width % factor:
    common = math.gcd(height, width)
    most = (common & -common).bit_length() - 1
    fits = [
      f'{factor * math.ceil(height / factor)} x '
      f'{factor * math.ceil(width / factor)}'
    ]
    fits += [f'at most {most} `channels`'] if most else []
    raise ValueError(
      f'images of {height} x {width} cannot be made by {num_layers} layers '
      f'that double: height and width must be multiples of {factor}; '
      f'{" or ".join(fits)} would fit'
    )
