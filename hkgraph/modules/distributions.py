"""Policies: distributions over actions, and what learners ask of them.

A policy is a distrax distribution or a dict of them, one per head. Both are
trees of arrays with the batch's leading axes, so that they can leave a jitted
function or a scan, and `jax.tree.map(lambda x: x[i], policy)` picks rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import chex
import distrax
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import trees, types

Policy = Any  # distrax.Distribution | dict[str, distrax.Distribution]

# The positive half of the nodes, and weights of a node and its mirror image.
_NODES, _WEIGHTS = (x[4:] for x in np.polynomial.hermite_e.hermegauss(8))
_WEIGHTS = _WEIGHTS / (2 * np.sum(_WEIGHTS))


def categorical(logits: types.Array) -> distrax.Categorical:
  """Makes a distribution over one int32 action in `0..n-1`.

  Args:
    logits: Shape `[..., n]`.

  Returns:
    A distribution with batch shape `[...]`.
  """
  return distrax.Categorical(logits=logits, dtype=jnp.int32)


def multi_categorical(
  logits: types.Array, num_actions: Sequence[int]
) -> distrax.Independent:
  """Makes a distribution over several independent choices.

  The choices are one array, padded with impossible actions where they differ in
  number, so that many choices cost no more operations than one.

  Args:
    logits: Those of all choices, one choice after the other, shape
      `[..., sum(num_actions)]`.
    num_actions: Number of actions of each of the `k` choices.

  Returns:
    A distribution over int32 actions `[..., k]`, with batch shape `[...]`.
  """
  chex.assert_axis_dimension(logits, -1, sum(num_actions))
  widest = max(num_actions)
  padded = [
    jnp.pad(
      choice,
      [(0, 0)] * (logits.ndim - 1) + [(0, widest - choice.shape[-1])],
      constant_values=-jnp.inf,
    )
    for choice in jnp.split(logits, np.cumsum(num_actions)[:-1], axis=-1)
  ]
  return distrax.Independent(categorical(jnp.stack(padded, axis=-2)), 1)


class TanhNormal(distrax.Distribution):
  """Bounded continuous actions `a = mid + half * tanh(u)`, `u` normal.

  Events are the values `u` *before* the squashing, which storage keeps exactly,
  where an action near its bound no longer tells its `u`. Densities are those of
  the bounded action,

    log p(a) = log N(u; loc, scale) - log |da / du|.
  """

  def __init__(
    self,
    loc: types.Array,
    scale: types.Array,
    low: Sequence[float],
    high: Sequence[float],
  ):
    """Makes a distribution with batch shape `[...]`.

    Args:
      loc: Mean of `u`, shape `[..., d]`.
      scale: Standard deviation of `u`, positive, shape `[..., d]`.
      low: Lower bound of each of the `d` dimensions.
      high: Upper bound of each, greater than `low`.
    """
    super().__init__()
    chex.assert_equal_shape([loc, scale])
    chex.assert_axis_dimension(loc, -1, len(low))
    chex.assert_axis_dimension(loc, -1, len(high))
    self._normal = distrax.Normal(loc, scale)
    # Floats, not arrays: a leaf without the batch's axes could not be indexed.
    self._low = tuple(map(float, low))
    self._high = tuple(map(float, high))

  @property
  def loc(self) -> types.Array:
    """Mean of `u`, shape `[..., d]`."""
    return self._normal.loc

  @property
  def scale(self) -> types.Array:
    """Standard deviation of `u`, shape `[..., d]`."""
    return self._normal.scale

  @property
  def event_shape(self) -> tuple[int, ...]:
    """Shape of `u`: `(d,)`."""
    return (len(self._low),)

  @property
  def batch_shape(self) -> tuple[int, ...]:
    """Leading axes."""
    return self._normal.batch_shape[:-1]

  def _sample_n(self, key: types.Array, n: int) -> types.Array:
    return self._normal.sample(seed=key, sample_shape=n)

  def log_prob(self, value: types.Array) -> types.Array:
    """Computes the log-density of the bounded action that `u` stands for.

    Args:
      value: `u`, shape `[..., d]`.

    Returns:
      Shape `[...]`, finite wherever `u` is.
    """
    log_prob = jnp.sum(self._normal.log_prob(value), axis=-1)
    return log_prob - jnp.sum(_log_tanh_slope(value), axis=-1) - self._log_half

  def entropy(self) -> types.Array:
    """Estimates the entropy of the bounded action, without a key.

    The entropy of `u` plus the mean of `log |da / du|` by 8 Gauss-Hermite
    nodes; per dimension it is off by less than .001 nats for scales up to 1,
    and by less than .03 up to 2.

    Returns:
      Shape `[...]`.
    """
    shape = (1,) * self.loc.ndim + (-1,)
    nodes = jnp.asarray(_NODES, self.loc.dtype).reshape(shape)
    weights = jnp.asarray(_WEIGHTS, self.loc.dtype).reshape(shape)
    loc, step = self.loc[..., None], self.scale[..., None] * nodes
    log_slope = jnp.sum(weights * _log_slopes(loc + step, loc - step), axis=-1)
    return jnp.sum(self._normal.entropy() + log_slope, axis=-1) + self._log_half

  def mode(self) -> types.Array:
    """Returns `loc`, the `u` of the median action, shape `[..., d]`.

    The density of the bounded action itself peaks at the bounds once the scale
    is large, which is no sensible greedy action.
    """
    return self.loc

  def to_environment(self, value: types.Array) -> types.Array:
    """Squashes `u` to an action that never exceeds its bounds.

    Args:
      value: `u`, shape `[..., d]`.

    Returns:
      Actions within the bounds, rounding included, shape and dtype of `u`.
    """

    def like_value(x):
      return jnp.broadcast_to(jnp.asarray(x, value.dtype), value.shape)

    low, high = np.asarray(self._low), np.asarray(self._high)
    action = like_value((low + high) / 2)
    action += like_value((high - low) / 2) * jnp.tanh(value)
    return jnp.clip(
      action,
      like_value(_round_inward(low, value.dtype, np.greater)),
      like_value(_round_inward(high, value.dtype, np.less)),
    )

  @property
  def _log_half(self) -> float:
    low, high = np.asarray(self._low), np.asarray(self._high)
    return float(np.sum(np.log((high - low) / 2)))


def sample(policy: Policy, key: types.Array) -> types.ArrayTree:
  """Draws an action per row, in the policy's own space.

  Args:
    policy: A distribution or a dict of them.
    key: Consumed; every head draws from its own part of it.

  Returns:
    Actions, a dict if the policy is one.
  """
  if not isinstance(policy, Mapping):
    return _sample(policy, key)
  keys = jax.random.split(key, len(policy))
  keys = dict(zip(sorted(policy), keys, strict=True))
  return trees.map_heads(_sample, policy=policy, key=keys)


def mode(policy: Policy) -> types.ArrayTree:
  """Returns the greedy action of each row, in the policy's own space."""
  return trees.map_heads(lambda p: p.mode(), policy=policy)


def log_prob(policy: Policy, action: types.ArrayTree) -> types.ArrayTree:
  """Computes the log-density of actions.

  Args:
    policy: A distribution or a dict of them.
    action: In the policy's own space, as `sample` returns it.

  Returns:
    Shape `[...]`, a dict if the policy is one: independent heads' log-densities
    add up to that of their joint action.

  Raises:
    ValueError: If policy and action do not have the same keys.
  """
  return trees.map_heads(
    lambda p, a: p.log_prob(a), policy=policy, action=action
  )


def entropy(policy: Policy) -> types.ArrayTree:
  """Computes the entropy of each row, a dict if the policy is one."""
  return trees.map_heads(lambda p: p.entropy(), policy=policy)


def to_environment(policy: Policy, action: types.ArrayTree) -> types.ArrayTree:
  """Turns actions of the policy's own space into those of the environment.

  Args:
    policy: A distribution or a dict of them. One that has a method
      `to_environment`, as `TanhNormal`, is asked; others' actions stay.
    action: As `sample` or `mode` returns it.

  Returns:
    Actions within their bounds, a dict if the policy is one.

  Raises:
    ValueError: If policy and action do not have the same keys.
  """

  def convert(head, a):
    return head.to_environment(a) if hasattr(head, 'to_environment') else a

  return trees.map_heads(convert, policy=policy, action=action)


def _sample(policy: distrax.Distribution, key: types.Array) -> types.Array:
  if not isinstance(policy, distrax.Categorical):
    return policy.sample(seed=key)
  # What distrax does, but in one axis: XLA takes a second to compile random
  # bits of a few rows for a CPU, where it unrolls every axis.
  logits = policy.logits
  noise = jax.random.gumbel(key, (logits.size,), logits.dtype)
  action = jnp.argmax(logits + noise.reshape(logits.shape), axis=-1)
  return action.astype(policy.dtype)


def _log_tanh_slope(u: types.Array) -> types.Array:
  """Computes `log(1 - tanh(u)^2)` without cancellation."""
  return distrax.Tanh().forward_log_det_jacobian(u)


def _log_slopes(u: types.Array, v: types.Array) -> types.Array:
  """Computes `log(1 - tanh(u)^2) + log(1 - tanh(v)^2)`, to rounding of 1.

  With `1 - tanh(u)^2 = 4 e / (1 + e)^2` for `e = exp(-2 |u|)`; the nodes of an
  entropy are many, and a single logarithm is cheap.
  """
  beyond = jnp.abs(u) + jnp.abs(v)
  both = (1 + jnp.exp(-2 * jnp.abs(u))) * (1 + jnp.exp(-2 * jnp.abs(v)))
  return float(4 * np.log(2)) - 2 * (beyond + jnp.log(both))


def _round_inward(
  bound: np.ndarray, dtype: Any, inside: np.ufunc
) -> np.ndarray:
  """Rounds to a number of `dtype` that is on the inside of the bound."""
  rounded = bound.astype(dtype)
  exact = rounded.astype(bound.dtype)
  inner = np.asarray(np.inf if inside is np.greater else -np.inf, dtype)
  crossed = (exact != bound) & ~inside(exact, bound)
  return np.where(crossed, np.nextafter(rounded, inner), rounded)
