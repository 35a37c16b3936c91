"""Numbers of any magnitude as a distribution over exponentially spaced bins.

Hafner et al., arXiv 2301.04104, section "Critic learning": rewards and values
are learned as classes, so that the gradient does not grow with the number.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import chex
import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.modules import perceptron, symlog

# The largest number that has an exponential in float32, less a margin.
_MAX_LIMIT = 80.0


@functools.lru_cache(maxsize=16)
def two_hot_bins(num_bins: int = 255, limit: float = 20.0) -> np.ndarray:
  """Computes bins at `symexp(linspace(-limit, limit, num_bins))`.

  One half is the mirror image of the other, to the last bit, and the middle of
  an odd number of bins is exactly 0.

  Args:
    num_bins: At least 2.
    limit: Symlog of the last bin, in `(0, 80]`.

  Returns:
    Shape `[num_bins]`, increasing, float64, read-only.

  Raises:
    ValueError: if there are too few bins, or the limit is out of range.
  """
  if isinstance(num_bins, bool) or num_bins < 2:
    raise ValueError(
      f'`num_bins` must be an integer of at least 2, got {num_bins!r}'
    )
  if not 0 < limit <= _MAX_LIMIT:
    raise ValueError(
      f'`limit` is the symlog of the last bin and must be in (0, 80], got '
      f'{limit!r}'
    )
  half = np.expm1(np.linspace(-limit, limit, num_bins)[(num_bins + 1) // 2 :])
  bins = np.concatenate([-half[::-1], np.zeros(num_bins % 2), half])
  bins.flags.writeable = False
  return bins


class TwoHot(distrax.Distribution):
  """A categorical over `two_hot_bins`, for numbers between the bins.

  The density of a number is the cross entropy of its two-hot encoding: weights
  on the two bins beside it, linear in the distance from each, that decode to
  the number,

    log p(x) = sum_k twohot(x)_k * log softmax(logits)_k.

  It computes in at least float32.
  """

  def __init__(self, logits: types.Array, limit: float = 20.0):
    """Makes a distribution with batch shape `[...]`.

    Args:
      logits: Shape `[..., K]`, `K` at least 2.
      limit: Symlog of the last bin.
    """
    super().__init__()
    self._logits = jnp.asarray(logits)
    # No leaf: without the batch's axes it could not be indexed.
    self._limit = float(limit)
    two_hot_bins(self._logits.shape[-1], self._limit)

  @property
  def logits(self) -> types.Array:
    """Of the bins, shape `[..., K]`."""
    return self._logits

  @property
  def bins(self) -> np.ndarray:
    """Shape `[K]`, float64."""
    return two_hot_bins(self._logits.shape[-1], self._limit)

  @property
  def event_shape(self) -> tuple[int, ...]:
    """Shape of a number: `()`."""
    return ()

  @property
  def batch_shape(self) -> tuple[int, ...]:
    """Leading axes."""
    return self._logits.shape[:-1]

  def log_prob(self, value: types.Array) -> types.Array:
    """Computes the negative cross entropy of the two-hot encoding of `value`.

    Args:
      value: Shape `[...]`; beyond the bins it is read as the last one.

    Returns:
      Shape `[...]`, finite wherever the logits are.
    """
    chex.assert_shape(value, self.batch_shape)
    logits = self._wide_logits
    index, weight = self._split(jnp.asarray(value, logits.dtype))
    pair = jnp.stack([index, index + 1], axis=-1)
    pair = jnp.take_along_axis(logits, pair, axis=-1, mode='clip')
    picked = (1 - weight) * pair[..., 0] + weight * pair[..., 1]
    return picked - jax.nn.logsumexp(logits, axis=-1)

  def mean(self) -> types.Array:
    """Computes the expected number, shape `[...]`.

    Each bin is added to its mirror image first, so that bins of one
    probability give exactly 0.
    """
    probs = jax.nn.softmax(self._wide_logits, axis=-1)
    num = probs.shape[-1] // 2
    excess = probs[..., -num:] - jnp.flip(probs[..., :num], axis=-1)
    half = jnp.asarray(self.bins[-num:], probs.dtype)
    return jnp.sum(excess * jnp.broadcast_to(half, excess.shape), axis=-1)

  def mode(self) -> types.Array:
    """Returns the mean: the number that the bins stand for together."""
    return self.mean()

  def _sample_n(self, key: types.Array, n: int) -> types.Array:
    logits = self._wide_logits
    index = jax.random.categorical(key, logits, shape=(n, *self.batch_shape))
    return jnp.asarray(self.bins, logits.dtype)[index]

  @property
  def _wide_logits(self) -> types.Array:
    dtype = jnp.promote_types(self._logits.dtype, jnp.float32)
    return self._logits.astype(dtype)

  def _split(self, value: types.Array) -> tuple[types.Array, types.Array]:
    """The bin below each value, and the weight of the bin above."""
    bins = jnp.asarray(self.bins, value.dtype)
    value = jnp.clip(value, bins[0], bins[-1])
    # Rounding may name a bin's neighbour only where the clip mends it.
    place = symlog.symlog(jax.lax.stop_gradient(value)) / self._limit + 1
    place = jnp.floor(place * ((bins.size - 1) / 2)).astype(jnp.int32)
    index = jnp.clip(place, 0, bins.size - 2)
    low = jnp.take(bins, index, mode='clip')
    high = jnp.take(bins, index + 1, mode='clip')
    return index, jnp.clip((value - low) / (high - low), 0, 1)


class TwoHotHead(hk.Module):
  """Reads features as a `TwoHot`, which at first is exactly 0 everywhere.

  Hidden layers as in `Perceptron`, then a linear layer whose weights are 0 at
  first, so that an untrained critic or reward does not mislead (Hafner et al.,
  arXiv 2301.04104, section "Critic learning").
  """

  def __init__(
    self,
    hidden_sizes: Sequence[int] = (),
    *,
    num_bins: int = 255,
    limit: float = 20.0,
    activation: Callable[[types.Array], types.Array] = jax.nn.silu,
    norm: bool = True,
    w_init: Callable[[Sequence[int], Any], types.Array] = jnp.zeros,
    name: str | None = None,
  ):
    """Makes a head.

    Args:
      hidden_sizes: Of the layers before the last.
      num_bins: At least 2.
      limit: Symlog of the last bin, in `(0, 80]`.
      activation: After each hidden layer.
      norm: Whether each hidden layer has a layer norm.
      w_init: Of the last layer's weights.
      name: Of the module.

    Raises:
      ValueError: if a size or the limit is out of range.
    """
    super().__init__(name=name)
    two_hot_bins(num_bins, limit)
    self._layers = functools.partial(
      perceptron.Perceptron, hidden_sizes, activation=activation, norm=norm
    )
    self._num_bins, self._limit, self._w_init = num_bins, limit, w_init

  def __call__(self, features: types.Array) -> TwoHot:
    """Makes the distribution of features `[..., F]`, batch shape `[...]`."""
    x = self._layers()(features)
    logits = hk.Linear(self._num_bins, w_init=self._w_init, name='logits')(x)
    return TwoHot(logits, self._limit)
