"""Flax modules as pure functions of their variables."""

import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import packages, types
from hkgraph.interop import hosting

linen = packages.load('flax.linen', extra='flax')
nnx = packages.load('flax.nnx', extra='flax')

# How BatchNorm runs: None by running averages, else these rows teach them.
_MASK: contextvars.ContextVar[types.Array | None] = contextvars.ContextVar(
  'mask', default=None
)


@dataclasses.dataclass(frozen=True)
class _NNXStructure:
  """An NNX module without its arrays."""

  graphdef: Any
  params: hosting.Layout
  statistics: hosting.Layout
  cache: hosting.Layout
  rngs: hosting.Layout
  rng_shapes: dict[str, Any]
  is_recurrent: bool


class NNXHost(hosting.Host):
  """An NNX module as pure functions."""

  def __init__(self, factory, call, initial_carry, carry_variables):
    self._factory = factory
    self._call = call
    self._initial_carry = initial_carry
    self._filters = (nnx.Param, nnx.RngState, carry_variables, ...)
    self.title = f'the NNX module of {_name(factory)}'

  def create(self, key, x):
    module = hosting.build(self._factory, x, 'rngs', nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
      raise TypeError(f'`factory` must make an nnx.Module, got {module!r}')
    graphdef, *states = nnx.split(module, *self._filters)
    (params, rngs, cache, rest), layouts = zip(
      *(hosting.name_leaves(s, _without_value) for s in states), strict=True
    )
    learned = jax.tree.leaves(nnx.state(module, nnx.BatchStat))
    _check_cache(self.title, cache, learned)
    is_recurrent = self._initial_carry or hasattr(module, 'initialize_carry')
    structure = _NNXStructure(
      graphdef=graphdef,
      params=layouts[0],
      statistics=layouts[3],
      cache=layouts[2],
      rngs=layouts[1],
      rng_shapes={n: (x.shape, _is_key(x)) for n, x in rngs.items()},
      is_recurrent=bool(is_recurrent),
    )
    variables = hosting.Variables(params=params, statistics=rest, cache=cache)
    return variables, structure

  def initial_memory(self, structure, variables, x):
    if not structure.is_recurrent:
      return ()
    module = self._merge(structure, variables, jax.random.key(0))
    if self._initial_carry:
      return self._initial_carry(module, x)
    return module.initialize_carry(jnp.shape(x), rngs=nnx.Rngs(0))

  def call(self, structure, variables, memory, x, key, mask):
    module = self._merge(structure, variables, key)
    for _, part in list(nnx.iter_modules(module)):
      if isinstance(part, nnx.BatchNorm | nnx.RNN):
        object.__setattr__(part, '__class__', _switched(type(part)))
      elif hasattr(part, 'use_running_average'):
        part.use_running_average = mask is None
    run = functools.partial(self._call, module) if self._call else module
    with _learning_from(mask):
      if structure.is_recurrent:
        memory, y = run(memory, x)
      else:
        y = run(x)
    _, *states = nnx.split(module, *self._filters)
    _, _, cache, rest = (
      hosting.name_leaves(s, _without_value)[0] for s in states
    )
    new = variables.replace(
      statistics={n: rest[n] for n in structure.statistics.names},
      cache={n: cache[n] for n in structure.cache.names},
    )
    return new, memory, y

  def _merge(self, structure, variables, key):
    def stream(i, shape, is_key):
      if not is_key:
        return jnp.zeros(shape, jnp.uint32)
      return jax.random.split(jax.random.fold_in(key, i), shape)

    rngs = {
      name: stream(i, *shape)
      for i, (name, shape) in enumerate(structure.rng_shapes.items())
    }
    return nnx.merge(
      structure.graphdef,
      structure.params.tree(variables.params),
      structure.rngs.tree(rngs),
      structure.cache.tree(variables.cache),
      structure.statistics.tree(variables.statistics),
    )


@dataclasses.dataclass(frozen=True)
class _LinenStructure:
  """What a Linen module calls its variables."""

  params: hosting.Layout
  statistics: hosting.Layout
  cache: hosting.Layout


class LinenHost(hosting.Host):
  """A Linen module as pure functions."""

  def __init__(self, module, call, initial_carry, carry_collections):
    self._module = module
    self._call = call
    self._initial_carry = initial_carry
    self._carry_collections = carry_collections
    self._is_recurrent = initial_carry or hasattr(module, 'initialize_carry')
    self.title = f'the Linen module {type(module).__name__}'

  def create(self, key, x):
    args = (self.initial_memory(None, None, x), x)
    args = args if self._is_recurrent else args[1:]
    # A cache belongs to one element of the batch.
    args = jax.tree.map(lambda x: x[:1], args)
    with (
      hosting.telling_of(self.title, args[-1]),
      _learning_from(None),
      linen.intercept_methods(_intercept),
    ):
      variables = self._module.init(_streams(key), *args, method=self._call)
    params, rest, cache = self._split(variables)
    _check_cache(self.title, cache, rest)
    named, layouts = zip(
      *map(hosting.name_leaves, (params, rest, cache)), strict=True
    )
    structure = _LinenStructure(*layouts)
    return hosting.Variables(
      params=named[0], statistics=named[1], cache=named[2]
    ), structure

  def initial_memory(self, structure, variables, x):
    if not self._is_recurrent:
      return ()
    if self._initial_carry:
      return self._initial_carry(self._module, x)
    return self._module.initialize_carry(jax.random.key(0), jnp.shape(x))

  def call(self, structure, variables, memory, x, key, mask):
    everything = {
      'params': structure.params.tree(variables.params),
      **structure.statistics.tree(variables.statistics),
      **structure.cache.tree(variables.cache),
    }
    args = (memory, x) if self._is_recurrent else (x,)
    with _learning_from(mask), linen.intercept_methods(_intercept):
      y, new = self._module.apply(
        everything,
        *args,
        rngs=_streams(key),
        mutable=[c for c in everything if c != 'params'],
        method=self._call,
      )
    if self._is_recurrent:
      memory, y = y
    _, rest, cache = self._split(new)
    rest, cache = (hosting.name_leaves(t)[0] for t in (rest, cache))
    new = variables.replace(
      statistics={n: rest[n] for n in structure.statistics.names},
      cache={n: cache[n] for n in structure.cache.names},
    )
    return new, memory, y

  def _split(self, variables):
    kept = self._carry_collections
    params = variables.get('params', {})
    rest = {c: v for c, v in variables.items() if c not in ('params', *kept)}
    return params, rest, {c: v for c, v in variables.items() if c in kept}


def _streams(key):
  """Every stream that is not named here is drawn from that of `params`."""
  params, dropout = jax.random.split(key)
  return {'params': params, 'dropout': dropout}


@contextlib.contextmanager
def _learning_from(mask: types.Array | None):
  token = _MASK.set(mask)
  try:
    yield
  finally:
    _MASK.reset(token)


def _mask_of(x: types.Array) -> types.Array | None:
  """The mask for an array whose leading axis is the rows'."""
  mask = _MASK.get()
  if mask is None or x.shape[:1] != mask.shape:
    return None
  mask = mask.reshape(mask.shape + (1,) * (x.ndim - 1))
  return jnp.broadcast_to(mask, x.shape)


def _check_time(rnn: Any, x: types.Array, time_major: bool | None) -> None:
  """Raises if a layer over sequences would take the rows for their time."""
  time_major = rnn.time_major if time_major is None else time_major
  num_axes = rnn.cell.num_feature_axes
  if time_major or jnp.ndim(x) < num_axes + 2:
    kind = type(rnn.cell).__name__
    raise ValueError(
      f'RNN runs over sequences [N, time, ...] within a row, got {jnp.shape(x)}'
      f'{" and time_major" if time_major else ""}, where the rows N would be '
      f'taken for time; to remember the rows of an episode, give the {kind} '
      'without RNN'
    )


@functools.cache
def _switched(cls: type) -> type:
  """A kind of `nnx.BatchNorm` or `nnx.RNN` that runs as the pass has it."""
  if issubclass(cls, nnx.RNN):

    class RNN(cls):
      def __call__(self, inputs, *args, time_major=None, **kwargs):
        _check_time(self, inputs, time_major)
        return super().__call__(inputs, *args, time_major=time_major, **kwargs)

    return RNN

  class BatchNorm(cls):
    def __call__(self, x, use_running_average=None, *, mask=None):
      del use_running_average
      mask = _mask_of(x) if mask is None else mask
      is_running = _MASK.get() is None
      return super().__call__(x, use_running_average=is_running, mask=mask)

  return BatchNorm


def _intercept(next_method, args, kwargs, context):
  """Runs what has `use_running_average` as the pass has it; looks at RNNs."""
  module = context.module
  if isinstance(module, linen.RNN) and context.method_name == '__call__':
    _check_time(module, args[0], kwargs.get('time_major'))
  is_norm = hasattr(module, 'use_running_average')
  if not is_norm or context.method_name != '__call__':
    return next_method(*args, **kwargs)
  given = module.use_running_average
  object.__setattr__(module, 'use_running_average', _MASK.get() is None)
  kwargs = {k: v for k, v in kwargs.items() if k != 'use_running_average'}
  if isinstance(module, linen.BatchNorm):
    args = args[:1]
    kwargs.setdefault('mask', _mask_of(args[0] if args else kwargs['x']))
  try:
    return next_method(*args, **kwargs)
  finally:
    object.__setattr__(module, 'use_running_average', given)


def _check_cache(title, cache, learned) -> None:
  if cache and learned:
    raise ValueError(
      f'{title} has both statistics of the batch and a cache of one element '
      f'({", ".join(cache)}), which cannot be learned together; keep what it '
      'remembers by `initial_carry` instead'
    )


def _without_value(name: str) -> str:
  return name.removesuffix('.value')


def _is_key(x) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _name(factory) -> str:
  return getattr(factory, '__name__', None) or repr(factory)
