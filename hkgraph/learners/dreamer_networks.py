"""The networks of DreamerV3 as pure functions."""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.graph import core as graph_core
from hkgraph.graph import spec as spec_lib
from hkgraph.learners import dreamer_config
from hkgraph.modules import behaviour, heads, rssm, stateful, world_model

Core = spec_lib.GraphSpec | Callable[[], hk.RNNCore]


@dataclasses.dataclass(frozen=True)
class Networks:
  """World model, actor and critic as pure functions."""

  init: Callable[..., dict[str, types.ArrayTree]]
  world: Mapping[str, Callable[..., Any]]
  actor: Callable[..., Any]
  critic: Callable[..., Any]


def make_networks(
  observation_spec: Any,
  action_spec: Any,
  config: dreamer_config.DreamerConfig,
  core: Core | None,
) -> Networks:
  """Makes them; arguments and errors are those of `make_dreamer`."""
  sizes = config.sizes
  hidden_sizes = [sizes.hidden_size] * sizes.num_layers

  def make_actor():
    actor = behaviour.Actor(action_spec, hidden_sizes, unimix=config.unimix)
    return actor, {'actor': actor}

  def make_critic():
    critic = behaviour.Critic(hidden_sizes, num_bins=sizes.num_bins)
    return critic, {'critic': critic}

  make_world = _world_maker(observation_spec, action_spec, config, core)
  (init_world, world), (init_actor, actor), (init_critic, critic) = (
    network_lib.methods(make) for make in (make_world, make_actor, make_critic)
  )
  num_features = _count_features(observation_spec, init_world, world, core)

  def init(key, observation):
    world_key, actor_key, critic_key, latent_key = jax.random.split(key, 4)
    features = jnp.zeros((1, num_features), jnp.float32)
    return {
      'world_model': init_world(world_key, observation, latent_key),
      'actor': init_actor(actor_key, features),
      'critic': init_critic(critic_key, features),
    }

  _check_initial_state(world['initial'])
  return Networks(init, world, actor['actor'], critic['critic'])


def _world_maker(observation_spec, action_spec, config, core):
  """What `network.methods` takes, of the world model."""
  sizes = config.sizes
  make_core = _core_maker(core, sizes)

  def make_world():
    model = world_model.WorldModel(
      observation_spec,
      make_core(),
      num_latents=sizes.num_latents,
      num_classes=sizes.num_classes,
      hidden_size=sizes.hidden_size,
      num_layers=sizes.num_layers,
      num_bins=sizes.num_bins,
      num_channels=sizes.num_channels,
      unimix=config.unimix,
    )

    def everything(observation, key):
      row = jax.tree.map(lambda x: x[None], observation)
      batch_size = jax.tree.leaves(row)[0].shape[1]
      is_first = jnp.ones((1, batch_size), bool)
      size = heads.encoded_size(action_spec)
      action = jnp.zeros((1, batch_size, size), jnp.float32)
      state = model.initial(batch_size)
      observed = model.observe(state, row, action, is_first, key)
      model.decode(observed.features)
      model.reward(observed.features)
      model.continues(observed.features)
      return observed.features[0]

    names = (
      'initial observe imagine follow reward continues decode prepare'
    ).split()
    return everything, {
      'everything': everything,
      **{name: getattr(model, name) for name in names},
    }

  return make_world


def _count_features(observation_spec, init_world, world, core) -> int:
  """The size of the features; says what does not fit in the world model."""
  observation = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), observation_spec
  )

  def features(key, observation):
    params = init_world(key, observation, key)
    return world['everything'](params, observation, key)

  try:
    return jax.eval_shape(features, jax.random.key(0), observation).shape[-1]
  except stateful.NoRowsError as error:
    raise ValueError(
      '`core` must keep all that it remembers in its own state, but in '
      f'{core!r} is a module that keeps state elsewhere (a `StatefulModule`, '
      'as `Leaky` and `Delay` make); let connections with `delay` remember, or '
      'write it as an hk.RNNCore'
    ) from error


def _check_initial_state(initial) -> None:
  try:
    jax.eval_shape(lambda: initial({}, 1))
  except ValueError as error:
    raise ValueError(
      'the initial state of `core` must be constant, without parameters: '
      f'{error}'
    ) from error


def _core_maker(core, sizes) -> Callable[[], hk.RNNCore]:
  if core is None:
    return lambda: rssm.GatedCell(
      sizes.recurrent_size, sizes.hidden_size, num_blocks=sizes.num_blocks
    )
  if isinstance(core, spec_lib.GraphSpec):
    return lambda: rssm.ProjectedCore(
      graph_core.GraphCore(core), core.input_sizes
    )
  is_function = callable(core) and not isinstance(core, hk.RNNCore | type)
  if not is_function or _needs_arguments(core):
    raise TypeError(
      '`core` must be a finished graph, or a function without arguments that '
      f'makes an hk.RNNCore, as `lambda: hk.GRU(200)`, got {core!r}'
    )
  return core


def _needs_arguments(function: Callable[..., Any]) -> bool:
  try:
    inspect.signature(function).bind()
  except TypeError:
    return True
  return False
