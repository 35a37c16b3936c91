"""A world model: encoder, recurrent state-space model, decoder and heads.

Hafner et al., "Mastering Diverse Domains through World Models",
arXiv 2301.04104, section "World model learning".
"""

from collections.abc import Callable, Iterable, Mapping
import math
from typing import Any

import chex
import distrax
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.modules import (
  decoders,
  encoders,
  encoding,
  perceptron,
  rssm,
  twohot,
)

_IMAGE = 8  # From this height and width on, a grid is an image.


class WorldModel(hk.Module):
  """Follows observations, foresees them, and imagines what would follow."""

  def __init__(
    self,
    observation_spec: Any,
    core: hk.RNNCore,
    *,
    num_latents: int,
    num_classes: int,
    hidden_size: int,
    num_layers: int,
    num_bins: int = 255,
    num_channels: int = 16,
    unimix: float = 0.01,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      observation_spec: A `dm_env` spec or a dict of them. `[H, W, C]` from 8
        by 8 on is an image, if it holds bools, uint8 up to 255 or floats from 0
        to 1; a `DiscreteArray` is one-hot; all else is a vector.
      core: The deterministic part of the state: reads latents and action side
        by side, `[B, I]`. A `GatedCell`, any `hk.RNNCore`, or a graph in a
        `ProjectedCore`.
      num_latents: Categorical variables of the state.
      num_classes: Classes of each.
      hidden_size: Width of all hidden layers.
      num_layers: Hidden layers of encoder and decoder; the heads have one.
      num_bins: Of the two-hot reward.
      num_channels: Of the first convolution of the encoder; each later one has
        twice as many, and the decoder mirrors them.
      unimix: Share of the uniform distribution in the latents.
      name: Name of the module.

    Raises:
      TypeError: if the observation is none that has a spec as above.
      ValueError: if an image has a size that the decoder cannot make.
    """
    super().__init__(name=name)
    self._spec = observation_spec
    seen = observed_specs(observation_spec)
    images = {key: x.shape for key, x in seen.items() if len(x.shape) == 3}
    layers = [hidden_size] * num_layers
    channels = _channels(images.values(), num_channels)
    self._vectors = [key for key in seen if key not in images]
    self._vector_encoder = encoders.SymlogEncoder(layers)
    self._image_encoders = {
      key: encoders.ConvEncoder(channels, hidden_size, name=f'image_{i}_input')
      for i, key in enumerate(images)
    }
    self.rssm = rssm.RSSM(
      core,
      num_latents=num_latents,
      num_classes=num_classes,
      hidden_size=hidden_size,
      unimix=unimix,
    )
    self._decoder = decoders.Decoder(
      seen, hidden_sizes=layers, channels=channels[::-1]
    )
    self._reward = twohot.TwoHotHead(
      [hidden_size], num_bins=num_bins, name='reward'
    )
    self._continue = perceptron.Perceptron([hidden_size], name='continue')

  def initial(self, batch_size: int, dtype: Any = jnp.float32) -> Any:
    """The state at the beginning of an episode."""
    return self.rssm.initial(batch_size, dtype)

  def observe(
    self,
    state: rssm.RSSMState,
    observation: types.ArrayTree,
    action_tm1: types.Array,
    is_first: types.Array,
    key: chex.PRNGKey,
  ) -> rssm.Observed:
    """Follows a sequence of rows, `[T, B, ...]`; see `RSSM.observe`."""
    embedding = self._embed(self.prepare(observation), action_tm1.dtype)
    return self.rssm.observe(state, embedding, action_tm1, is_first, key)

  def imagine(
    self,
    state: rssm.RSSMState,
    features: types.Array,
    policy: Callable[[types.Array, Any], tuple[types.Array, Any]],
    horizon: int,
    key: chex.PRNGKey,
  ) -> tuple[types.Array, Any]:
    """Goes on without observations, by a policy.

    Args:
      state: Where to start. Shape `[N, ...]`.
      features: Those of the start, `[N, F]`.
      policy: `(features [N, F], key) -> (encoded action [N, A], aux)`.
      horizon: Number of steps `H`.
      key: Draws actions and latents. Consumed.

    Returns:
      Features after each step, `[H, N, F]`, and what the policy gave beside
      the actions, stacked, `[H, ...]`.
    """
    policy_key, key = jax.random.split(key)
    keys = jax.random.split(policy_key, horizon)
    return self.rssm.imagine(state, features, policy, keys, key)

  def follow(
    self,
    state: rssm.RSSMState,
    features: types.Array,
    action: types.Array,
    key: chex.PRNGKey,
  ) -> types.Array:
    """Goes on without observations, by encoded actions `[H, N, A]`.

    Returns:
      Features after each action, `[H, N, F]`.
    """

    def act(features, action):
      del features
      return action, ()

    return self.rssm.imagine(state, features, act, action, key)[0]

  def reward(self, features: types.Array) -> twohot.TwoHot:
    """The reward of the transition into rows with features `[..., F]`."""
    return self._reward(features)

  def continues(self, features: types.Array) -> distrax.Bernoulli:
    """Whether rows with features `[..., F]` do not terminate the episode."""
    zeros = hk.initializers.Constant(0)
    layer = hk.Linear(1, w_init=zeros, name='continue_output')
    logits = jnp.squeeze(layer(self._continue(features)), -1)
    return distrax.Bernoulli(logits=logits.astype(jnp.float32))

  def decode(self, features: types.Array) -> Any:
    """The observations of rows with features `[..., F]`, as `prepare` has."""
    return self._decoder(features)

  def prepare(self, observation: types.ArrayTree) -> dict[str, types.Array]:
    """What encoder and decoder know of observations `[..., *shape]`, by name.

    Images are as they are, the rest are vectors `[..., d]`.
    """
    named = _by_name(observation)
    return {
      name: _prepare(named[name], spec)
      for name, spec in _by_name(self._spec).items()
    }

  def _embed(self, prepared, dtype):
    vectors = [prepared[key].astype(dtype) for key in self._vectors]
    parts = []
    if vectors:
      vector = jnp.concatenate(vectors, axis=-1)
      parts.append(encoding.by_frame(self._vector_encoder.encode, vector, 2))
    for key, encoder in self._image_encoders.items():
      image = encoding.as_float(prepared[key], image=True).astype(dtype)
      parts.append(encoding.by_frame(encoder.encode, image, 2))
    return jnp.concatenate(parts, axis=-1)


def observed_specs(observation_spec: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """What a world model sees of an observation, by name."""
  seen = {}
  for name, spec in _by_name(observation_spec).items():
    _check_spec(name, spec)
    shape, dtype = (math.prod(spec.shape),), jnp.result_type(float)
    if isinstance(spec, specs.DiscreteArray):
      shape = (int(spec.num_values),)
    elif _is_image(spec):
      shape, dtype = spec.shape, spec.dtype
    seen[name] = jax.ShapeDtypeStruct(shape, dtype)
  return seen


def _check_spec(name: str, spec: Any) -> None:
  if not isinstance(spec, specs.Array):
    raise TypeError(
      '`observation_spec` must be a spec of `dm_env.specs` or a dict of them, '
      f'not nested, got {spec!r} for {name!r}; let the environment give every '
      'array a key of its own'
    )
  kinds = (np.bool_, np.integer, np.floating)
  if not any(np.issubdtype(spec.dtype, kind) for kind in kinds):
    raise TypeError(
      f'observations must be bools, integers or floats, got {spec!r} for '
      f'{name!r}'
    )


def _prepare(x, spec):
  if isinstance(spec, specs.DiscreteArray):
    return jax.nn.one_hot(x, int(spec.num_values))
  if _is_image(spec):
    return x
  return encoding.as_float(x).reshape(*x.shape[: x.ndim - len(spec.shape)], -1)


def _is_image(spec: specs.Array) -> bool:
  """Whether numbers are brightness: bools, bytes to 255, floats in [0, 1]."""
  if len(spec.shape) != 3 or min(spec.shape[:2]) < _IMAGE:
    return False
  if np.issubdtype(spec.dtype, np.floating):
    low, high = (getattr(spec, x, np.inf) for x in ('minimum', 'maximum'))
    return bool(np.all(low == 0) and np.all(high == 1))
  if spec.dtype == np.uint8:  # Less than 255 are symbols, by number.
    return bool(np.all(getattr(spec, 'maximum', 255) == 255))
  return spec.dtype == np.bool_


def _by_name(tree: Any) -> dict[str, Any]:
  if not isinstance(tree, Mapping):
    return {'observation': tree}
  return {key: tree[key] for key in sorted(tree)}


def _channels(shapes: Iterable[tuple[int, ...]], first: int) -> tuple[int, ...]:
  """As many convolutions as halve all images, down to 4 pixels at least."""
  sizes = [size for shape in shapes for size in shape[:2]]
  count = 1
  while sizes and all(n % 2 ** (count + 1) == 0 for n in sizes):
    if min(sizes) < 4 * 2 ** (count + 1):
      break
    count += 1
  return tuple(first * 2**i for i in range(count))
