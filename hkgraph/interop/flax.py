"""Flax modules as Haiku modules, and networks as Linen modules.

In both directions the library that a module comes from initialises it: Flax
layers are Flax's lecun-normal, also inside of ours, and a network handed to
Linen begins as `network.init` has it.
"""

from collections.abc import Callable, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.interop import foreign, packages

linen = packages.load('flax.linen', extra='flax')
nnx = packages.load('flax.nnx', extra='flax')

# How BatchNorm runs: None by running averages, else these rows teach them.
_MASK: contextvars.ContextVar[types.Array | None] = contextvars.ContextVar(
  'mask', default=None
)


def from_nnx(
  factory: Callable[..., Any],
  *,
  call: Callable[..., Any] | None = None,
  initial_carry: Callable[[Any, Any], Any] | None = None,
  carry_variables: Any = None,
  name: str | None = None,
) -> foreign.ForeignModule:
  """Makes a Haiku module of an NNX module, in a function for `hg.transform`.

  * Every leaf of an `nnx.Param` is a Haiku parameter with its path as name, for
    instance `layers.0.kernel`; the factory draws its initial value.
  * `nnx.BatchStat`, other variables and bare arrays are statistics. BatchNorm
    uses running averages in `apply` and `unroll`, whatever its flag says; they
    learn from the masked rows of `update_statistics`, all of these at once.
  * A module with `initialize_carry`, as every `nnx.RNNCellBase`, is recurrent:
    it is called as `module(carry, x) -> (carry, y)`, and its carry is reset
    where an episode begins.
  * Streams of random numbers that matter for the output (dropout) become one
    key for each element of the batch, in the carry. Such a module runs on each
    element alone, `[1, ...]`, so that a replay of any part of the batch meets
    the same noise. Call `module.eval()` in the factory for no dropout.
  * Rows must not mix but in BatchNorm.

  Args:
    factory: `(rngs) -> module`, or `(in_features, rngs) -> module` where it
      has an argument of that name: it is given the input's last axis.
    call: `(module, x) -> y` in place of `module(x)`; `(module, carry, x) ->
      (carry, y)` for a recurrent one.
    initial_carry: `(module, x) -> carry`, each leaf `[B, ...]`, for an `x` of
      shape `[B, ...]`; makes the module recurrent.
    carry_variables: An NNX filter of variables that the module itself writes to
      remember one element of the batch: it then runs on each alone, and they
      are reset to what the factory gives. None is `nnx.Cache`.
    name: Name of the module.

  Returns:
    A module that maps `[B, ...]` or, in a sequence, `[T, B, ...]`.

  Raises:
    TypeError: If `factory` cannot be called; in a call, if it makes no module.
    ValueError: In a call, if the output size cannot be inferred, or batch
      statistics meet variables that belong to one element.
  """
  _check_callable('factory', factory, 'a function of `nnx.Rngs`')
  filter_ = nnx.Cache if carry_variables is None else carry_variables
  host = _NNXHost(factory, call, initial_carry, filter_)
  return foreign.ForeignModule(host, name or 'nnx_module')


def from_linen(
  module: Any,
  *,
  call: Callable[..., Any] | None = None,
  initial_carry: Callable[[Any, Any], Any] | None = None,
  carry_collections: Sequence[str] = ('cache',),
  name: str | None = None,
) -> foreign.ForeignModule:
  """Makes a Haiku module of a Linen module, in a function for `hg.transform`.

  As `from_nnx`: the collection `'params'` is Haiku parameters, initialised by
  Linen; `carry_collections` belong to one element of the batch and are reset;
  every other collection is statistics. For dropout, give `train=True` or
  `deterministic=False` by `call`: BatchNorm runs on its averages all the same.

  Args:
    module: A module, not bound.
    call: `(module, x) -> y` in place of `module(x)`, for instance `lambda m, x:
      m(x, train=True)`; `(module, carry, x) -> (carry, y)` for a recurrent one.
    initial_carry: `(module, x) -> carry`, each leaf `[B, ...]`; makes the
      module recurrent, as `initialize_carry` does.
    carry_collections: What the module writes to remember one element.
    name: Name of the module.

  Returns:
    A module that maps `[B, ...]` or, in a sequence, `[T, B, ...]`.

  Raises:
    TypeError: If `module` is no Linen module.
    ValueError: As `from_nnx`.
  """
  if not isinstance(module, linen.Module):
    raise TypeError(
      f'`module` must be a flax.linen.Module, got {module!r}; an NNX module is '
      'given by a factory, to `from_nnx`'
    )
  host = _LinenHost(module, call, initial_carry, tuple(carry_collections))
  return foreign.ForeignModule(host, name or 'linen_module')


def to_linen(network: network_lib.Network, *, name: str | None = None) -> Any:
  """Makes a Linen module of a network; `network.init` initialises it.

  `module(inputs, is_first=None)` is one row `[B, ...]`, and
  `module.unroll(inputs, is_first)` a sequence `[T, B, ...]`: give
  `mutable=['carry']` and take over what comes back. The collections are
  `'params'` (an entry for each Haiku module), `'carry'`, and `'statistics'`,
  which `module.update_statistics(inputs, is_first, mask)` alone changes, under
  `mutable=['statistics']`. A stream `'noise'` is what `hk.next_rng_key` reads.

  Args:
    network: Any network, with state or without.
    name: Name of the module, inside of another.

  Returns:
    A `flax.linen.Module`. Its calls raise `ValueError` if the network has a
    carry and the collection is not mutable, so that nothing is forgotten.

  Raises:
    TypeError: If `network` is no `Network`.
  """
  if not isinstance(network, network_lib.Network):
    raise TypeError(
      '`network` must be a Network, such as `hg.transform` or '
      f'`hg.graph_network` gives, got {network!r}'
    )
  return LinenNetwork(network=network, name=name)


class LinenNetwork(linen.Module):
  """A network as a Linen module; see `to_linen`."""

  network: network_lib.Network

  @linen.compact
  def __call__(self, inputs: Any, is_first: types.Array | None = None) -> Any:
    """One row: inputs `[B, ...]`, is_first `[B]`; None goes on everywhere."""
    size = jax.tree.leaves(inputs)[0].shape[0]
    if is_first is None:
      is_first = jnp.zeros(size, bool)
    if not self.is_initializing():
      return self._forward(self.network.apply, inputs, is_first)
    params, state = self.network.init(self.make_rng('params'), inputs)
    for name, leaves in params.items():
      self.param(name, lambda _, leaves=leaves: leaves)
    self._put('statistics', state.statistics)
    self._put('carry', state.carry)
    key = self.make_rng('params')
    return self.network.apply(params, state, key, inputs, is_first)[0]

  def unroll(self, inputs: Any, is_first: types.Array) -> Any:
    """A sequence: inputs `[T, B, ...]`, is_first `[T, B]`."""
    return self._forward(self.network.unroll, inputs, is_first)

  def update_statistics(
    self, inputs: Any, is_first: types.Array, mask: types.Array
  ) -> None:
    """Takes the rows of a sequence under the mask into the statistics."""
    params, state = self._variables(is_first.shape[-1])
    state = self.network.update_statistics(
      params, state, inputs, is_first, mask
    )
    self._put('statistics', state.statistics)

  def _forward(self, run, inputs, is_first):
    params, state = self._variables(is_first.shape[-1])
    key = self.make_rng('noise') if self.has_rng('noise') else None
    outputs, state = run(params, state, key, inputs, is_first)
    if jax.tree.leaves(state.carry):
      self._put('carry', state.carry)
    return outputs

  def _variables(self, batch_size):
    params, statistics, carry = (
      {name: dict(leaves) for name, leaves in self.variables.get(c, {}).items()}
      for c in ('params', 'statistics', 'carry')
    )
    if not carry:
      carry = self.network.initial_carry(batch_size)
    return params, types.NetworkState(carry=carry, statistics=statistics)

  def _put(self, collection, tree):
    if not self.is_mutable_collection(collection):
      raise ValueError(
        f'the network has {collection}, which this call changes: give '
        f"`mutable=['{collection}']` to `apply`, and the collection that comes "
        'back to the next call'
      )
    for name, value in tree.items():
      self.put_variable(collection, name, value)


@dataclasses.dataclass(frozen=True)
class _NNXStructure:
  """An NNX module without its arrays."""

  graphdef: Any
  params: foreign.Layout
  statistics: foreign.Layout
  cache: foreign.Layout
  rngs: foreign.Layout
  rng_shapes: dict[str, Any]
  is_recurrent: bool


class _NNXHost(foreign.Host):
  """An NNX module as pure functions."""

  def __init__(self, factory, call, initial_carry, carry_variables):
    self._factory = factory
    self._call = call
    self._initial_carry = initial_carry
    self._filters = (nnx.Param, nnx.RngState, carry_variables, ...)
    self.title = f'the NNX module of {_name(factory)}'

  def create(self, key, x):
    module = foreign.build(self._factory, x, 'rngs', nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
      raise TypeError(f'`factory` must make an nnx.Module, got {module!r}')
    graphdef, *states = nnx.split(module, *self._filters)
    (params, rngs, cache, rest), layouts = zip(
      *(foreign.name_leaves(s, _without_value) for s in states), strict=True
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
    variables = foreign.Variables(params=params, statistics=rest, cache=cache)
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
      if isinstance(part, nnx.BatchNorm):
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
      foreign.name_leaves(s, _without_value)[0] for s in states
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

  params: foreign.Layout
  statistics: foreign.Layout
  cache: foreign.Layout


class _LinenHost(foreign.Host):
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
    with _learning_from(None), linen.intercept_methods(_batch_norm):
      variables = self._module.init(_streams(key), *args, method=self._call)
    params, rest, cache = self._split(variables)
    _check_cache(self.title, cache, rest)
    named, layouts = zip(
      *map(foreign.name_leaves, (params, rest, cache)), strict=True
    )
    structure = _LinenStructure(*layouts)
    return foreign.Variables(
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
    with _learning_from(mask), linen.intercept_methods(_batch_norm):
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
    rest, cache = (foreign.name_leaves(t)[0] for t in (rest, cache))
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


@functools.cache
def _switched(cls: type) -> type:
  """A kind of `nnx.BatchNorm` that runs as the pass has it."""

  class BatchNorm(cls):
    def __call__(self, x, use_running_average=None, *, mask=None):
      del use_running_average
      mask = _mask_of(x) if mask is None else mask
      is_running = _MASK.get() is None
      return super().__call__(x, use_running_average=is_running, mask=mask)

  return BatchNorm


def _batch_norm(next_method, args, kwargs, context):
  """Runs what has `use_running_average` as the pass has it."""
  module = context.module
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


def _check_callable(argument, value, wanted) -> None:
  if not callable(value) or isinstance(value, nnx.Module):
    raise TypeError(f'`{argument}` must be {wanted}, got {value!r}')


def _without_value(name: str) -> str:
  return name.removesuffix('.value')


def _is_key(x) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _name(factory) -> str:
  return getattr(factory, '__name__', None) or repr(factory)
