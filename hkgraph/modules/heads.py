"""Policy heads: what turns a network's output into a policy.

Heads have no linear layer: whatever comes before, a read-out population or an
`hk.Linear`, gives `input_size` numbers per row. They take `[B, ...]` and
`[T, B, ...]` alike.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any

from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import trees, types
from hkgraph.modules import distributions

ActionSpec = Any  # specs.Array | dict[str, specs.Array]
MIN_SCALE = 1e-3


class CategoricalHead(hk.Module):
  """Reads logits as a distribution over one action in `0..num_actions - 1`."""

  def __init__(self, num_actions: int, name: str | None = None):
    """Makes a head.

    Args:
      num_actions: At least 1.
      name: Of the module.
    """
    super().__init__(name=name)
    _check_num_actions([num_actions])
    self.input_size = num_actions
    self.kind = 'categorical', num_actions

  def __call__(self, inputs: types.Array) -> distributions.Policy:
    """Makes the policy of logits `[..., num_actions]`."""
    _check_width(self, inputs)
    return distributions.categorical(inputs)


class MultiCategoricalHead(hk.Module):
  """Reads logits as a distribution over several independent choices."""

  def __init__(self, num_actions: Sequence[int], name: str | None = None):
    """Makes a head.

    Args:
      num_actions: Number of actions of each choice, at least 1.
      name: Of the module.
    """
    super().__init__(name=name)
    _check_num_actions(num_actions)
    self.num_actions = tuple(num_actions)
    self.input_size = sum(num_actions)
    self.kind = 'multi_categorical', *num_actions

  def __call__(self, inputs: types.Array) -> distributions.Policy:
    """Makes the policy of logits `[..., sum(num_actions)]`, in order."""
    _check_width(self, inputs)
    return distributions.multi_categorical(inputs, self.num_actions)


class TanhNormalHead(hk.Module):
  """Reads means, and scales if predicted, of bounded continuous actions."""

  def __init__(
    self,
    low: Sequence[float],
    high: Sequence[float],
    *,
    scale: str = 'predicted',
    min_scale: float = MIN_SCALE,
    name: str | None = None,
  ):
    """Makes a head for `d` dimensions.

    Scales are `softplus(x) + min_scale`.

    Args:
      low: Lower bound of each dimension, finite.
      high: Upper bound of each dimension, finite, greater than `low`.
      scale: 'predicted' reads `x` from the inputs, after the `d` means;
        'independent' has a parameter `raw_scale` of shape `[d]` for it.
      min_scale: Positive.
      name: Of the module.
    """
    super().__init__(name=name)
    low, high = np.asarray(low, float), np.asarray(high, float)
    _check_bounds(low, high)
    if not min_scale > 0:
      raise ValueError(f'`min_scale` must be positive, got {min_scale!r}.')
    self.low, self.high = tuple(low.tolist()), tuple(high.tolist())
    self.input_size = len(low) * _inputs_per_dimension(scale)
    self.scale = scale
    self.min_scale = min_scale
    # Another head has a parameter of its own.
    if scale == 'predicted':
      self.kind = 'tanh_normal', self.low, self.high, min_scale

  def __call__(self, inputs: types.Array) -> distributions.TanhNormal:
    """Makes the policy of inputs `[..., input_size]`."""
    _check_width(self, inputs)
    if self.scale == 'predicted':
      loc, raw_scale = jnp.split(inputs, 2, axis=-1)
    else:
      loc = inputs
      raw_scale = hk.get_parameter(
        'raw_scale', loc.shape[-1:], loc.dtype, init=jnp.zeros
      )
      raw_scale = jnp.broadcast_to(raw_scale, loc.shape)
    scale = jax.nn.softplus(raw_scale) + self.min_scale
    return distributions.TanhNormal(loc, scale, self.low, self.high)


def make_head(
  action_spec: ActionSpec,
  *,
  scale: str = 'predicted',
  min_scale: float = MIN_SCALE,
  name: str | None = None,
) -> hk.Module | dict[str, hk.Module]:
  """Makes the head that an action spec asks for, inside of a transform.

  `DiscreteArray` gets a `CategoricalHead`, a vector of bounded integers from 0
  a `MultiCategoricalHead`, a vector of floats with finite bounds a
  `TanhNormalHead`, and a dict a dict of heads (apply it with `Map`).

  Args:
    action_spec: A spec of `dm_env.specs`, or a dict of them.
    scale: As in `TanhNormalHead`.
    min_scale: As in `TanhNormalHead`.
    name: Of the module; a head in a dict is called after its key.

  Returns:
    A module, or a dict of them.

  Raises:
    ValueError: If there is no head for the spec.
  """
  if isinstance(action_spec, Mapping):
    make = functools.partial(make_head, scale=scale, min_scale=min_scale)
    # A name that ended in a number would clash with Haiku's own numbering.
    return {
      key: make(_leaf(action_spec[key]), name=f'{key}_head')
      for key in sorted(action_spec)
    }
  if _is_integer(action_spec):
    num_actions = _num_actions(action_spec)
    if action_spec.shape:
      return MultiCategoricalHead(num_actions.tolist(), name=name)
    return CategoricalHead(int(num_actions), name=name)
  low, high = _bounds(action_spec)
  return TanhNormalHead(low, high, scale=scale, min_scale=min_scale, name=name)


def read(
  head: hk.Module | Mapping[str, hk.Module], inputs: types.ArrayTree
) -> distributions.Policy:
  """Makes the policy of a head's inputs, or one for each of a dict of heads.

  Args:
    head: What `make_head` returned.
    inputs: Shape `[..., input_size]`; a dict if the heads are one.

  Returns:
    A distribution, or a dict of them.

  Raises:
    ValueError: If keys differ, or sizes.
  """
  trees.check_same_keys(heads=head, inputs=inputs)
  if not isinstance(head, Mapping):
    return head(inputs)
  policies = {}
  for keys in _kinds(head):
    # Heads of a kind do the same, so that one does for all.
    policies |= trees.map_heads(
      head[keys[0]], inputs={key: inputs[key] for key in keys}
    )
  return {key: policies[key] for key in sorted(policies)}


def _kinds(heads: Mapping[str, hk.Module]) -> Iterable[list[str]]:
  """Keys of heads without parameters that do the same, together."""
  kinds: dict[Any, list[str]] = {}
  for key, head in heads.items():
    kind = getattr(head, 'kind', None) or key
    kinds.setdefault(kind, []).append(key)
  return kinds.values()


def input_size(
  action_spec: ActionSpec, *, scale: str = 'predicted'
) -> int | dict[str, int]:
  """Computes how many numbers the head of an action spec reads per row.

  Other than the head's own `input_size` it is at hand outside of a transform,
  where graphs are made.

  Args:
    action_spec: A spec of `dm_env.specs`, or a dict of them.
    scale: As in `TanhNormalHead`.

  Returns:
    A size, or a dict of sizes.

  Raises:
    ValueError: If there is no head for the spec.
  """
  if isinstance(action_spec, Mapping):
    return {
      key: input_size(_leaf(action_spec[key]), scale=scale)
      for key in sorted(action_spec)
    }
  if _is_integer(action_spec):
    return int(np.sum(_num_actions(action_spec)))
  low, _ = _bounds(action_spec)
  return len(low) * _inputs_per_dimension(scale)


def encoded_size(action_spec: ActionSpec) -> int:
  """Counts the numbers that `encode_action` makes of an action."""
  leaves = [action_spec]
  if isinstance(action_spec, Mapping):
    leaves = [_leaf(action_spec[key]) for key in sorted(action_spec)]
  return sum(
    input_size(spec) if _is_integer(spec) else len(_bounds(spec)[0])
    for spec in leaves
  )


def encode_action(
  action_spec: ActionSpec, action: types.ArrayTree
) -> types.Array:
  """Makes an action an input of networks.

  Choices are one-hot, and bounded numbers lie between -1 and 1; the heads of a
  dict are side by side, in the order of their keys.

  Args:
    action_spec: A spec of `dm_env.specs`, or a dict of them.
    action: In the policy's own space, as `distributions.sample` returns it,
      `[...]` or `[..., d]`; a dict if the spec is one.

  Returns:
    Shape `[..., encoded_size(action_spec)]`.
  """
  if isinstance(action_spec, Mapping):
    parts = [
      encode_action(action_spec[key], action[key])
      for key in sorted(action_spec)
    ]
    return jnp.concatenate(parts, axis=-1)
  if not _is_integer(action_spec):
    return jnp.tanh(action)
  num_actions = _num_actions(action_spec)
  if not action_spec.shape:
    return jax.nn.one_hot(action, int(num_actions))
  parts = [
    jax.nn.one_hot(action[..., i], n)
    for i, n in enumerate(num_actions.tolist())
  ]
  return jnp.concatenate(parts, axis=-1)


def _leaf(spec: Any) -> specs.Array:
  if isinstance(spec, Mapping):
    raise ValueError(
      'Action specs nest no deeper than one dict, got a dict of '
      f'{sorted(spec)} inside of a dict; give every head a key of its own.'
    )
  return spec


def _is_integer(spec: specs.Array) -> bool:
  if not isinstance(spec, specs.Array):
    raise ValueError(
      f'Action specs are a spec of dm_env.specs, or a dict of them, got {spec}.'
    )
  return np.issubdtype(spec.dtype, np.integer)


def _num_actions(spec: specs.Array) -> np.ndarray:
  """Returns the number of actions of each choice, shape of the spec."""
  if not isinstance(spec, specs.BoundedArray) or len(spec.shape) > 1:
    raise ValueError(
      'Integer actions need a DiscreteArray, or a BoundedArray with one axis, '
      f'got {spec}.'
    )
  if np.any(spec.minimum != 0):
    raise ValueError(
      f'Integer actions must count from 0, got {spec}; let the environment add '
      'the minimum.'
    )
  return np.broadcast_to(np.asarray(spec.maximum, np.int64) + 1, spec.shape)


def _bounds(spec: specs.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the bounds of float actions, each of shape `[d]`."""
  if not np.issubdtype(spec.dtype, np.floating):
    raise ValueError(f'Actions must be integers or floats, got {spec}.')
  if not isinstance(spec, specs.BoundedArray) or len(spec.shape) != 1:
    raise ValueError(
      f'Float actions need a BoundedArray with one axis, got {spec}; let the '
      'environment declare bounds.'
    )
  low, high = (
    np.broadcast_to(np.asarray(x, float), spec.shape)
    for x in (spec.minimum, spec.maximum)
  )
  _check_bounds(low, high)
  return low, high


def _check_bounds(low: np.ndarray, high: np.ndarray) -> None:
  if low.ndim != 1 or low.shape != high.shape or not low.size:
    raise ValueError(
      '`low` and `high` must be vectors of one length, got shapes '
      f'{low.shape} and {high.shape}.'
    )
  if not (np.all(np.isfinite(low) & np.isfinite(high)) and np.all(low < high)):
    raise ValueError(
      'Bounds must be finite, each `low` less than its `high`, got '
      f'{low.tolist()} and {high.tolist()}.'
    )


def _check_num_actions(num_actions: Sequence[int]) -> None:
  if not len(num_actions) or any(n < 1 for n in num_actions):
    raise ValueError(
      f'Every choice needs at least 1 action, got {list(num_actions)}.'
    )


def _inputs_per_dimension(scale: str) -> int:
  sizes = {'predicted': 2, 'independent': 1}
  if scale not in sizes:
    raise ValueError(f'`scale` must be one of {sorted(sizes)}, got {scale!r}.')
  return sizes[scale]


def _check_width(head: hk.Module, inputs: types.Array) -> None:
  if not inputs.ndim or inputs.shape[-1] != head.input_size:
    raise ValueError(
      f'`{head.name}` reads inputs of shape [..., {head.input_size}], got '
      f'{list(inputs.shape)}.'
    )
