"""From encoders to what learners read: policy and value, or action values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.modules import encoders, encoding, heads


class ActorCritic(hk.Module):
  """Two towers: one encoder for the policy, one for the value.

  Each ends in a linear layer, orthogonal times 0.01 for the policy (so that it
  begins near uniform) and times 1 for the value, as CleanRL's `ppo.py` has it.
  """

  def __init__(
    self,
    action_spec: heads.ActionSpec,
    policy_encoder: Any,
    value_encoder: Any = None,
    *,
    reward_keys: Sequence[str] | None = None,
    scale: str = 'predicted',
    name: str | None = None,
  ):
    """Creates the module, inside of a function given to `hkgraph.transform`.

    Args:
      action_spec: A `dm_env` spec, or a dict of them, one head for each.
      policy_encoder: An `Encoder`, which is made to remember, or any module or
        function from observations to features, such as a `Graph`, which is
        taken as it is; a dict of features is joined in order of its keys.
      value_encoder: As `policy_encoder`. None lets the value read the features
        of the policy.
      reward_keys: Where the reward is a dict, its keys: the value is then a
        dict with an estimate for each.
      scale: Of `TanhNormalHead`: 'predicted' or 'independent'.
      name: Name of the module.

    Raises:
      TypeError: if an encoder cannot be called.
      ValueError: if there is no policy for the spec.
    """
    super().__init__(name=name)
    if value_encoder is policy_encoder:
      value_encoder = None
    self._encoders = {'policy': policy_encoder, 'value': value_encoder}
    self._sizes = heads.input_size(action_spec, scale=scale)
    self._head = heads.make_head(action_spec, scale=scale)
    self._reward_keys = _check_keys(reward_keys)
    self._policy_tower = encoding.as_module(policy_encoder, 'policy_tower')
    self._value_tower = None
    if value_encoder is not None:
      self._value_tower = encoding.as_module(value_encoder, 'value_tower')

  def __call__(self, obs: Any) -> types.PolicyValue:
    """Maps observations `[B, ...]` or `[T, B, ...]` to policy and value.

    Args:
      obs: What the encoders read.

    Returns:
      A distribution over actions and a value, or dicts of them.

    Raises:
      ValueError: if both towers are an `Encoder`, with carries of unlike
        structure.
    """
    self._check_carries(obs)
    features = self._policy_tower(obs)
    logits = linear_heads(features, self._sizes, 0.01, 'policy_head')
    if self._value_tower is not None:
      features = self._value_tower(obs)
    sizes = {key: 1 for key in self._reward_keys} if self._reward_keys else 1
    values = linear_heads(features, sizes, 1.0, 'value_head')
    return types.PolicyValue(
      policy=heads.read(self._head, logits),
      value=jax.tree.map(lambda x: jnp.squeeze(x, -1), values),
    )

  def _check_carries(self, obs):
    towers = (self._policy_tower, self._value_tower)
    if not all(isinstance(tower, encoding.Remember) for tower in towers):
      return
    policy, value = (tower.carry_of(obs) for tower in towers)
    if jax.tree.structure(policy) != jax.tree.structure(value):
      raise ValueError(
        'the towers must remember alike, or not at all: the policy tower '
        f'{_describe(self._encoders["policy"], policy)}, the value tower '
        f'{_describe(self._encoders["value"], value)}; give both the same '
        'kind of encoder, or leave `value_encoder` out to share one'
      )


class QNetwork(hk.Module):
  """An encoder and a linear layer: the value of each action.

  The layer is orthogonal times 1.
  """

  def __init__(
    self,
    action_spec: heads.ActionSpec,
    encoder: Any,
    *,
    name: str | None = None,
  ):
    """Creates the module, inside of a function given to `hkgraph.transform`.

    Args:
      action_spec: A `dm_env` `DiscreteArray`, or a dict of them.
      encoder: An `Encoder`, which is made to remember, or any module or
        function from observations to features, such as a `Graph`, which is
        taken as it is; a dict of features is joined in order of its keys.
      name: Name of the module.

    Raises:
      TypeError: if `encoder` cannot be called.
      ValueError: if a spec is not of discrete actions.
    """
    super().__init__(name=name)
    self._sizes = num_actions(action_spec)
    self._encoder = encoding.as_module(encoder, 'tower')

  def __call__(self, obs: Any) -> types.Array | dict[str, types.Array]:
    """Maps observations to action values.

    Args:
      obs: What the encoder reads, `[B, ...]` or `[T, B, ...]`.

    Returns:
      Shape `[B, A]` or `[T, B, A]`; a dict for a dict of specs.
    """
    return linear_heads(self._encoder(obs), self._sizes, 1.0, 'q_head')


def num_actions(action_spec: heads.ActionSpec) -> int | dict[str, int]:
  """Counts the actions that a Q-network has values for.

  Args:
    action_spec: A `dm_env` `DiscreteArray`, or a dict of them.

  Returns:
    A number, or a dict of numbers.

  Raises:
    ValueError: if a spec is continuous, or of several choices at once.
  """
  if isinstance(action_spec, Mapping):
    if not action_spec:
      raise ValueError('`action_spec` must have at least one head, got {}')
    return {key: _num_actions(action_spec[key]) for key in sorted(action_spec)}
  return _num_actions(action_spec)


def _num_actions(spec: Any) -> int:
  if isinstance(spec, specs.Array) and not np.issubdtype(
    spec.dtype, np.integer
  ):
    raise ValueError(
      'a discrete learner needs discrete actions: action values exist for a '
      f'`DiscreteArray`, got the continuous {spec}; train continuous actions '
      'with PPO (`make_ppo`, on an `ActorCritic` or a `policy_network`)'
    )
  if not isinstance(spec, specs.Array) or spec.shape:
    raise ValueError(
      'action values need a `DiscreteArray` of `dm_env.specs`, or a dict of '
      f'them, got {spec}; give each of several choices a key of its own, or '
      'train with PPO'
    )
  return heads.input_size(spec)


def linear_heads(x: types.Array, sizes: Any, scale: float, name: str) -> Any:
  """One linear layer for all heads.

  Args:
    x: Features `[..., F]`.
    sizes: The size of a head, or a dict of them.
    scale: Of the orthogonal weights.
    name: Of the layer.

  Returns:
    Shape `[..., size]`, or a dict of such.
  """
  keys = sorted(sizes) if isinstance(sizes, Mapping) else None
  widths = [sizes] if keys is None else [sizes[key] for key in keys]
  w_init = encoders.orthogonal(scale)
  x = encoding.as_float(x)
  y = hk.Linear(sum(widths), w_init=w_init, name=name)(x)
  if keys is None:
    return y
  parts = jnp.split(y, np.cumsum(widths)[:-1], axis=-1)
  return dict(zip(keys, parts, strict=True))


def _check_keys(keys: Any) -> tuple[str, ...] | None:
  if keys is None:
    return None
  given = keys
  keys = tuple(keys) if isinstance(keys, Iterable) else (None,)
  if isinstance(given, str) or not all(isinstance(key, str) for key in keys):
    raise TypeError(f'`reward_keys` must be a sequence of keys, got {given!r}')
  if not keys or len(set(keys)) < len(keys):
    raise ValueError(f'`reward_keys` must be distinct, at least one: {keys!r}')
  return keys


def _describe(encoder: encoding.Encoder, carry: Any) -> str:
  kind = type(encoder).__name__
  if not jax.tree.leaves(carry):
    return f'({kind}) has no carry'
  return f'({kind}) has the carry {jax.tree.map(jnp.shape, carry)}'
