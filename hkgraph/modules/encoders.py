"""Encoders without memory: perceptrons and convolutions."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import encoding, perceptron, symlog

Initializer = Callable[[Sequence[int], Any], types.Array]


class MLPEncoder(encoding.FrameEncoder):
  """Linear layers, each with a tanh; frames are flattened.

  Sizes and initialisation are those of CleanRL's `ppo.py`: two layers of 64,
  orthogonal times sqrt(2), bias 0. Integers are taken at face value.
  """

  def __init__(
    self,
    hidden_sizes: Sequence[int] = (64, 64),
    *,
    activation: Callable[[types.Array], types.Array] = jnp.tanh,
    w_init: Initializer | None = None,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      hidden_sizes: Of the layers; the last is the number of features.
      activation: After each layer.
      w_init: Of the weights; `orthogonal(sqrt(2))` if None.
      name: Name of the module.

    Raises:
      ValueError: if a size is no positive integer.
    """
    super().__init__(name=name)
    self._sizes = encoding.check_sizes('hidden_sizes', hidden_sizes)
    self._activation = activation
    self._w_init = w_init or orthogonal(math.sqrt(2))

  @hk.transparent
  def encode(self, frames: types.Array) -> types.Array:
    x = encoding.as_float(_flat(frames))
    for size in self._sizes:
      x = self._normalize(hk.Linear(size, w_init=self._w_init)(x))
      x = self._activation(x)
    return x

  def _normalize(self, x: types.Array) -> types.Array:
    return x


class QMLPEncoder(MLPEncoder):
  """Linear layers, each with a layer norm and a relu; frames are flattened.

  The network of PQN (Gallici et al., arXiv 2407.04811, section 4: layer norm
  keeps temporal differences from diverging without a target network), with
  orthogonal weights times sqrt(2). Integers are taken at face value.
  """

  def __init__(
    self,
    hidden_sizes: Sequence[int] = (128, 128),
    *,
    activation: Callable[[types.Array], types.Array] = jax.nn.relu,
    w_init: Initializer | None = None,
    name: str | None = None,
  ):
    """Creates the module; arguments as in `MLPEncoder`."""
    super().__init__(
      hidden_sizes, activation=activation, w_init=w_init, name=name
    )

  @hk.transparent
  def _normalize(self, x: types.Array) -> types.Array:
    return encoding.layer_norm(x)


class SymlogEncoder(encoding.FrameEncoder):
  """Symlog of every number, then a perceptron; frames are flattened.

  The encoder of vectors in Hafner et al., arXiv 2301.04104 (section "Robust
  predictions": magnitudes need no normaliser): linear layers, each with a
  layer norm and a SiLU. Integers are taken at face value.
  """

  def __init__(
    self,
    hidden_sizes: Sequence[int] = (256, 256, 256),
    *,
    activation: Callable[[types.Array], types.Array] = jax.nn.silu,
    norm: bool = True,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      hidden_sizes: Of the layers; the last is the number of features.
      activation: After each layer.
      norm: Whether there are layer norms.
      name: Name of the module.

    Raises:
      ValueError: if a size is no positive integer.
    """
    super().__init__(name=name)
    self._sizes = encoding.check_sizes('hidden_sizes', hidden_sizes)
    self._activation = activation
    self._norm = norm

  @hk.transparent
  def encode(self, frames: types.Array) -> types.Array:
    x = symlog.symlog(encoding.as_float(_flat(frames)))
    return perceptron.Perceptron(
      self._sizes, activation=self._activation, norm=self._norm
    )(x)


class ConvEncoder(encoding.FrameEncoder):
  """Convolutions of stride 2, each with a relu, then a linear layer with one.

  Every layer halves height and width (rounded up, so any size will do), which
  bounds the activations of a batch by a multiple of its frames. uint8 frames
  are divided by 255.
  """

  def __init__(
    self,
    channels: Sequence[int] = (32, 64, 64),
    hidden_size: int = 256,
    *,
    kernel_size: int = 3,
    w_init: Initializer | None = None,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      channels: Of the convolutions.
      hidden_size: Number of features.
      kernel_size: Of the convolutions, in pixels.
      w_init: Of all weights; `orthogonal(sqrt(2))` if None.
      name: Name of the module.

    Raises:
      ValueError: if a size is no positive integer.
    """
    super().__init__(name=name)
    self._channels = encoding.check_sizes('channels', channels)
    (self._hidden_size,) = encoding.check_sizes('hidden_size', [hidden_size])
    (self._kernel_size,) = encoding.check_sizes('kernel_size', [kernel_size])
    self._w_init = w_init or orthogonal(math.sqrt(2))

  @hk.transparent
  def encode(self, frames: types.Array) -> types.Array:
    _check_images(self, frames)
    x = encoding.as_float(frames, image=True)
    for size in self._channels:
      x = hk.Conv2D(size, self._kernel_size, 2, w_init=self._w_init)(x)
      x = jax.nn.relu(x)
    x = hk.Linear(self._hidden_size, w_init=self._w_init)(_flat(x))
    return jax.nn.relu(x)


class QConvEncoder(encoding.FrameEncoder):
  """Convolutions, then linear layers, each with a layer norm and a relu.

  The defaults are PQN's for MinAtar (Gallici et al., arXiv 2407.04811): 16
  channels, 3 x 3, stride 1, no padding, then 128 features; weights orthogonal
  times sqrt(2). Layer norm goes over channels. Give larger images a stride.
  uint8 frames are divided by 255.
  """

  def __init__(
    self,
    channels: Sequence[int] = (16,),
    hidden_sizes: Sequence[int] = (128,),
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: str = 'VALID',
    w_init: Initializer | None = None,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      channels: Of the convolutions.
      hidden_sizes: Of the linear layers; the last is the number of features.
      kernel_size: Of the convolutions, in pixels.
      stride: Of the convolutions, in pixels.
      padding: 'VALID' or 'SAME'.
      w_init: Of all weights; `orthogonal(sqrt(2))` if None.
      name: Name of the module.

    Raises:
      ValueError: if a size is no positive integer.
    """
    super().__init__(name=name)
    if padding not in ('VALID', 'SAME'):
      raise ValueError(f"`padding` must be 'VALID' or 'SAME', got {padding!r}")
    self._channels = encoding.check_sizes('channels', channels)
    self._hidden_sizes = encoding.check_sizes('hidden_sizes', hidden_sizes)
    (self._kernel_size,) = encoding.check_sizes('kernel_size', [kernel_size])
    (self._stride,) = encoding.check_sizes('stride', [stride])
    self._padding = padding
    self._w_init = w_init or orthogonal(math.sqrt(2))

  @hk.transparent
  def encode(self, frames: types.Array) -> types.Array:
    _check_images(self, frames)
    x = encoding.as_float(frames, image=True)
    for size in self._channels:
      self._check_kernel(x, frames)
      x = hk.Conv2D(
        size,
        self._kernel_size,
        self._stride,
        padding=self._padding,
        w_init=self._w_init,
      )(x)
      x = jax.nn.relu(encoding.layer_norm(x))
    x = _flat(x)
    for size in self._hidden_sizes:
      x = hk.Linear(size, w_init=self._w_init)(x)
      x = jax.nn.relu(encoding.layer_norm(x))
    return x

  def _check_kernel(self, x, frames):
    if self._padding == 'VALID' and min(x.shape[1:3]) < self._kernel_size:
      raise ValueError(
        f'`{self.name}` has no pixel left for its {self._kernel_size} x '
        f'{self._kernel_size} kernel on frames of shape {frames.shape[1:]}; '
        "take fewer layers, a smaller kernel or stride, or padding='SAME'"
      )


def orthogonal(scale: float = 1.0) -> Initializer:
  """Orthogonal weights times `scale`, for any float dtype."""

  def initializer(shape, dtype):
    # There is no QR decomposition in half precision.
    wide = jnp.promote_types(dtype, jnp.float32)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    # In one axis: XLA is slow to compile random bits in several.
    x = jax.random.normal(hk.next_rng_key(), (rows * columns,), wide)
    q, r = jnp.linalg.qr(x.reshape(max(rows, columns), min(rows, columns)))
    q *= jnp.sign(jnp.diagonal(r))[None]
    q = q if rows >= columns else q.T
    return jnp.asarray(scale * q.reshape(shape), dtype)

  return initializer


def _check_images(module: hk.Module, frames: types.Array) -> None:
  if frames.ndim != 4 or 0 in frames.shape[1:]:
    raise ValueError(
      f'`{module.name}` reads images [H, W, C], got frames of shape '
      f'{frames.shape[1:]}; MLPEncoder and QMLPEncoder take any shape, and '
      'images without channels need a last axis of 1'
    )


def _flat(x: types.Array) -> types.Array:
  return jnp.reshape(x, (x.shape[0], math.prod(x.shape[1:])))
