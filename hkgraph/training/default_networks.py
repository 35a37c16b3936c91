"""The usual networks, by name, for environments of any observation.

Read without JAX, so that a command line can list them.
"""

from collections.abc import Mapping
import difflib
from typing import Any

KINDS = ('auto', 'mlp', 'conv', 'gru', 'transformer')

_IMAGE = 8  # From this height and width on, a grid is an image.
_SMALL = 32  # Up to this size, no pixel of an image is left out.
_HIDDEN, _CONTEXT = 64, 16


def make(
  kind: str, env: Any, discrete: bool, *, normalize: bool = False
) -> Any:
  """Makes a network for an environment.

  `'mlp'` flattens an observation, and lays the entries of a dict side by side;
  a `DiscreteArray` is one-hot. `'conv'` takes one image `[H, W, C]`. `'auto'`
  is `'conv'` for an image of at least 8 by 8, else `'mlp'`. `'gru'` (64 units)
  and `'transformer'` (the last 16 frames) see what `'auto'` makes of a frame.

  Args:
    kind: One of `KINDS`.
    env: A single environment, of which the specs are read.
    discrete: Whether to make action values for PQN, else a policy and a value.
    normalize: Whether observations pass a `Normalizer` first.

  Returns:
    A `Network`.

  Raises:
    ValueError: If there is no such kind, or it cannot take the observation.
  """
  if kind not in KINDS:
    near = difflib.get_close_matches(kind, KINDS, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(
      f'`network` must be one of {", ".join(map(repr, KINDS))}, got {kind!r}'
      f'{hint}'
    )
  from hkgraph import network as network_lib
  from hkgraph.modules import normalizer, towers

  observation_spec, action_spec = env.observation_spec(), env.action_spec()
  shape = _image_shape(observation_spec, kind)
  reward_spec = env.reward_spec()
  reward_keys = list(reward_spec) if isinstance(reward_spec, Mapping) else None

  def fn(inputs):
    x = inputs if shape else _join(inputs, observation_spec)
    if normalize:
      x = normalizer.Normalizer(name='observations')(x.astype(float))
    if discrete:
      return towers.QNetwork(action_spec, _q_encoder(kind, shape))(x)
    policy, value = (_encoder(kind, shape) for _ in range(2))
    return towers.ActorCritic(
      action_spec, policy, value, reward_keys=reward_keys
    )(x)

  return network_lib.transform(fn)


def _encoder(kind: str, shape: tuple[int, ...] | None) -> Any:
  from hkgraph.modules import encoders

  if shape:
    return _with_memory(kind, encoders.ConvEncoder(hidden_size=_HIDDEN))
  return _with_memory(kind, encoders.MLPEncoder((64, _HIDDEN)))


def _q_encoder(kind: str, shape: tuple[int, ...] | None) -> Any:
  from hkgraph.modules import encoders

  width = 128 if kind in ('auto', 'mlp', 'conv') else _HIDDEN
  if not shape:
    encoder = encoders.QMLPEncoder((128, width))
  elif max(shape) <= _SMALL:
    encoder = encoders.QConvEncoder(hidden_sizes=(width,))
  else:
    encoder = encoders.QConvEncoder(
      (32, 64, 64), (width,), stride=2, padding='SAME'
    )
  return _with_memory(kind, encoder)


def _with_memory(kind: str, encoder: Any) -> Any:
  import haiku as hk

  from hkgraph.modules import recurrent, transformer

  if kind == 'gru':
    return recurrent.RecurrentEncoder(hk.GRU(_HIDDEN), encoder)
  if kind == 'transformer':
    return transformer.TransformerEncoder(
      encoder, _HIDDEN, num_heads=4, num_layers=1, context=_CONTEXT
    )
  return encoder


def _image_shape(spec: Any, kind: str) -> tuple[int, ...] | None:
  """Height and width of the image that convolutions look at, if they do."""
  shape = () if isinstance(spec, Mapping) else spec.shape
  if kind == 'conv' and len(shape) != 3:
    raise ValueError(
      "`network='conv'` takes one image [H, W, C], but the observation spec is "
      f"{spec}; take 'mlp'"
    )
  small = len(shape) != 3 or min(shape[:2]) < _IMAGE
  if kind == 'mlp' or (kind != 'conv' and small):
    return None
  return tuple(shape[:2])


def _join(inputs: Any, spec: Any) -> Any:
  """Observations as one array; several side by side, and numbers one-hot."""
  from dm_env import specs
  import jax
  import jax.numpy as jnp

  def vector(x, spec):
    if isinstance(spec, specs.DiscreteArray):
      return jax.nn.one_hot(x, spec.num_values)
    return jnp.reshape(x, (*x.shape[: x.ndim - len(spec.shape)], -1))

  leaves = jax.tree.leaves(jax.tree.map(vector, inputs, spec))
  return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)
