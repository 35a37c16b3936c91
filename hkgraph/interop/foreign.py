"""A module of another library as a Haiku module: what is kept where.

Its trainable leaves are Haiku parameters, one for each leaf. What it knows of
its data (running averages) is statistics: frozen in `apply` and `unroll`. What
it remembers of an element of the batch, and a key for the noise of each, is
carry.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import functools
import inspect
from typing import Any

import chex
import haiku as hk
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import core
from hkgraph.modules import stateful


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Variables:
  """All arrays of a foreign module but its random streams, by name.

  Attributes:
    params: Trainable.
    statistics: Anything else, such as running averages and constants.
    cache: What the module itself keeps of one element of the batch.
  """

  params: dict[str, types.Array]
  statistics: dict[str, types.Array]
  cache: dict[str, types.Array]


class Host(abc.ABC):
  """A foreign module as pure functions; inputs have one leading axis, `N`.

  Attributes:
    title: What to call the module in an error.
  """

  title: str

  @abc.abstractmethod
  def create(self, key: chex.PRNGKey, x: Any) -> tuple[Variables, Any]:
    """Makes the module: fresh variables, and the structure of the rest."""

  def initial_memory(
    self, structure: Any, variables: Variables, x: Any
  ) -> types.ArrayTree:
    """The recurrent carry at the beginning of an episode, `[N, ...]`."""
    del structure, variables, x
    return ()

  @abc.abstractmethod
  def call(
    self,
    structure: Any,
    variables: Variables,
    memory: types.ArrayTree,
    x: Any,
    key: chex.PRNGKey,
    mask: types.Array | None,
  ) -> tuple[Variables, types.ArrayTree, Any]:
    """Runs the module on `N` rows.

    Args:
      structure: What `create` gave.
      variables: Before the call.
      memory: Before the call. Shape `[N, ...]`.
      x: Shape `[N, ...]`.
      key: All noise of the call is drawn from it.
      mask: None normalises by running averages. Else they are learned, from the
        rows that are set. Shape `[N]`, bool.

    Returns:
      Variables and memory after the call, and the output, `[N, ...]`.
    """


@dataclasses.dataclass(frozen=True)
class Layout:
  """The names of a tree's leaves, in its order."""

  names: tuple[str, ...]
  treedef: Any

  def tree(self, leaves: dict[str, Any]) -> Any:
    """The tree with these leaves."""
    return jax.tree.unflatten(self.treedef, [leaves[n] for n in self.names])


def name_leaves(
  tree: Any, rename: Callable[[str], str] = str
) -> tuple[dict[str, Any], Layout]:
  """The leaves of a tree by name, such as `layers.0.kernel`."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  named = {}
  for path, leaf in leaves:
    name = rename(jax.tree_util.keystr(path, simple=True, separator='.'))
    if name in named:
      raise ValueError(f'two leaves of the module are named {name!r}')
    named[name] = leaf
  return named, Layout(tuple(named), treedef)


def build(factory: Callable[..., Any], x: Any, source: str, value: Any) -> Any:
  """Calls a factory with a source of randomness, and `in_features` if wanted.

  Args:
    factory: `(rngs)` or `(in_features, rngs)`, where `source` is `'rngs'`.
    x: The input, one array `[N, ..., in_features]` if the factory asks.
    source: The name of the argument that takes `value`.
    value: Random streams or a key.
  """
  parameters = _signature(factory).parameters
  args = []
  size = parameters.get('in_features')
  if size is not None and size.default is inspect.Parameter.empty:
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(x)):
      raise TypeError(
        'a factory with `in_features` reads one array, got a '
        f'{type(x).__name__}; join it first, or make a factory without'
      )
    args = [jnp.shape(x)[-1]]
  if source in parameters:
    return factory(*args, **{source: value})
  return factory(*args, value)


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
  """What a factory takes, also if it is a class with a metaclass."""
  bound = (), {}
  if hasattr(factory, 'func'):  # A partial, of one library or another.
    bound = factory.args, dict(factory.keywords)
    factory = factory.func
  factory = inspect.unwrap(factory)
  if isinstance(factory, type):
    factory = functools.partial(factory.__init__, None)
  return inspect.signature(functools.partial(factory, *bound[0], **bound[1]))


class ForeignModule(hk.Module):
  """A module of another library, to be called as any Haiku module is.

  Maps `[B, ...]` or, in a sequence, `[T, B, ...]`. It is an encoder or body as
  it is, a connection's transform by a factory (`transform=lambda: ...`), and a
  population by `population`.
  """

  def __init__(self, host: Host, name: str | None = None):
    super().__init__(name=name)
    self._host = host

  def __call__(self, x: Any) -> Any:
    rows = _rows()
    is_sequence = rows is not None and rows.is_sequence
    row = jax.tree.map(lambda x: x[0], x) if is_sequence else x
    shapes, structure = _inspect(self._host, row)
    variables, latest = self._variables(shapes, row)
    initial = self._initial(structure, variables, shapes, row)
    draws = _check_and_probe(self._host, structure, variables, initial, row)
    run = functools.partial(_run, self._host, structure, variables)
    if draws or jax.tree.leaves(initial):
      y, before = Carry(run, initial, draws)(x)
    else:
      y = _flat(lambda x: run({}, None, x)[1], 1 + is_sequence)(x)
      before = {}
    if latest and not shapes.cache and rows.frozen is not None:
      new = variables.replace(statistics=latest)
      self._learn(structure, new, before, x, rows.mask)
    return y

  @hk.transparent
  def _variables(self, shapes, row):
    """Variables of this pass, and the statistics to be updated."""

    @functools.cache
    def fresh():
      return self._host.create(hk.next_rng_key(), row)[0]

    def parameter(name, like):
      def init(shape, dtype):
        return jnp.asarray(fresh().params[name], dtype)

      return hk.get_parameter(name, like.shape, like.dtype, init)

    params = {name: parameter(name, x) for name, x in shapes.params.items()}
    frozen = latest = {}
    if shapes.statistics:
      statistics = _strong(fresh().statistics) if hk.running_init() else None
      frozen, latest = stateful.get_statistics('statistics', statistics)
    return Variables(params=params, statistics=frozen, cache={}), latest

  @hk.transparent
  def _initial(self, structure, variables, shapes, row):
    """What is remembered at the beginning of an episode, `[B, ...]`."""
    initial, cache = {}, {}
    if shapes.cache:
      cache = self._host.create(jax.random.key(0), row)[0].cache
      size = jax.tree.leaves(row)[0].shape[0]
      initial['cache'] = jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), cache
      )
    variables = variables.replace(cache=cache)
    memory = self._host.initial_memory(structure, variables, row)
    if jax.tree.leaves(memory):
      initial['memory'] = memory
    return _strong(initial)

  @hk.transparent
  def _learn(self, structure, variables, before, x, mask):
    """Takes the rows under the mask into the statistics, all at once."""
    before, x = _merge_rows((before, x), mask.ndim)
    mask = mask.reshape(-1)
    # What is not under the mask cannot leave a trace, whoever the learner is.
    order = jnp.argsort(~mask, stable=True)
    row = jnp.arange(mask.size) % jnp.maximum(jnp.sum(mask), 1)
    taken = jnp.where(mask, jnp.arange(mask.size), order[row])
    memory, x = jax.tree.map(lambda x: x[taken], (before.get('memory', ()), x))
    key = before['keys'][0] if 'keys' in before else jax.random.key(0)
    new, _, _ = self._host.call(structure, variables, memory, x, key, mask)
    statistics = jax.tree.map(
      lambda new, old: jnp.where(jnp.any(mask), new, old).astype(old.dtype),
      new.statistics,
      variables.statistics,
    )
    stateful.set_statistics('statistics', statistics)


class Carry(stateful.StatefulModule):
  """What a foreign module remembers, and a key for the noise of each element.

  Noise `n` of an element is drawn from its key folded with `n`, as in
  `GaussianNoise`: replayed from a stored carry, any part of the batch meets the
  same noise, and fresh episodes have fresh noise.
  """

  def __init__(self, run: Callable[..., Any], initial: Any, draws: bool):
    """Creates the module.

    Args:
      run: `(kept, keys or None, x) -> (kept, y)` on `[N, ...]`.
      initial: What is kept, at the beginning of an episode. `[B, ...]`.
      draws: Whether there is noise.
    """
    super().__init__(name='carry')
    self._run = run
    self._initial = initial
    self._draws = draws

  def initial_carry(self, x: Any) -> Any:
    if not self._draws:
      return {'kept': self._initial}
    size = stateful.current_rows().batch_size
    return {
      'kept': self._initial,
      'key': stateful.initial_keys(size),
      'count': jnp.zeros(size, jnp.uint32),
    }

  def reset(self, carry: Any, x: Any) -> Any:
    is_first = stateful.current_rows().is_first
    kept = stateful.reset_carry(is_first, carry['kept'], self._initial)
    return dict(carry, kept=kept)

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    keys = _keys(carry['key'], carry['count']) if self._draws else None
    kept, y = self._run(carry['kept'], keys, x)
    before = self._before(carry['kept'], keys)
    return dict(self._advance(carry, 1), kept=kept), (y, before)

  def unroll(self, carry: Any, x: Any) -> tuple[Any, Any]:
    if self._initial:
      return super().unroll(carry, x)
    num_rows = jax.tree.leaves(x)[0].shape[0]
    row = jnp.arange(num_rows, dtype=jnp.uint32)[:, None]
    keys = jax.vmap(_keys, (None, 0))(carry['key'], carry['count'][None] + row)
    y = _flat(lambda args: self._run({}, *args)[1], 2)((keys, x))
    return self._advance(carry, num_rows), (y, self._before({}, keys))

  def _advance(self, carry, num_rows):
    if not self._draws:
      return carry
    # Wraps around after 2**32 rows.
    return dict(carry, count=carry['count'] + jnp.uint32(num_rows))

  def _before(self, kept, keys):
    """What the rows were run with, if statistics are to be learned of it."""
    if stateful.current_rows().frozen is None:
      return {}
    return kept if keys is None else dict(kept, keys=keys)


def population(make: Callable[[int], Callable[[Any], Any]]) -> Any:
  """Makes a kind of population that passes its input through any module.

  `graph.add_population('arm', 8, module=population(make))` then integrates what
  arrives, runs the module on it, and applies the activation.

  Args:
    make: `size -> module`, which maps `[..., size]` to `[..., size]`: foreign,
      a `StatefulModule`, or any Haiku module.

  Returns:
    A subclass of `hg.Population`, to be given as `module`.
  """
  if not callable(make):
    raise TypeError(f'`make` must be a function of a size, got {make!r}')

  class ForeignPopulation(core.Population):
    """A population whose rule is that of a module."""

    def __init__(self, size: int, activation: Any = None, name: Any = None):
      super().__init__(size=size, activation=activation, name=name)
      self.body = make(size)

    def __call__(self, inputs: Sequence[types.Array]) -> types.Array:
      x = self.body(self.integrate(inputs))
      return x if self.activation is None else self.activation(x)

  return ForeignPopulation


def _rows() -> stateful.Rows | None:
  """The rows of the pass; None outside of `hkgraph.transform`."""
  try:
    return stateful.current_rows()
  except ValueError:  # Whoever keeps state asks again, and tells.
    return None


def _keys(key: chex.PRNGKey, count: types.Array) -> chex.PRNGKey:
  return jax.vmap(jax.random.fold_in)(key, count)


def _flat(fn: Callable[[Any], Any], num_axes: int) -> Callable[[Any], Any]:
  """Makes `fn` of `[N, ...]` take one leading axis or two."""
  if num_axes == 1:
    return fn

  def apply(x):
    lead = jax.tree.leaves(x)[0].shape[:2]
    y = fn(_merge_rows(x, 2))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), y)

  return apply


def _strong(tree: Any) -> Any:
  """The tree without weak types, for which a caller would compile twice."""

  def strong(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else x.astype(x.dtype)

  return jax.tree.map(strong, jax.tree.map(jnp.asarray, tree))


def _merge_rows(tree: Any, num_axes: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[num_axes:]), tree)


def _inspect(host: Host, x: Any) -> tuple[Variables, Any]:
  """Shapes of the variables, and the structure, without any number."""
  found = []

  def create(key):
    variables, structure = host.create(key, x)
    found.append(structure)
    return variables

  shapes = jax.eval_shape(create, jax.random.key(0))
  return shapes, found[0]


def _run(host, structure, variables, kept, keys, x):
  """Runs `N` rows; one by one where noise or a cache is the row's own."""
  memory, cache = kept.get('memory', ()), kept.get('cache', {})
  if keys is None and not cache:
    key = jax.random.key(0)
    _, memory, y = host.call(structure, variables, memory, x, key, None)
    return ({'memory': memory} if 'memory' in kept else {}), y
  if keys is None:
    keys = jax.random.split(jax.random.key(0), jax.tree.leaves(x)[0].shape[0])

  def one(memory, cache, key, x):
    memory, x = jax.tree.map(lambda x: x[None], (memory, x))
    new, memory, y = host.call(
      structure, variables.replace(cache=cache), memory, x, key, None
    )
    return jax.tree.map(lambda x: x[0], (memory, y)), new.cache

  (memory, y), cache = jax.vmap(one)(memory, cache, keys, x)
  new = {'memory': memory, 'cache': cache}
  return {name: new[name] for name in kept}, y


def _check_and_probe(host, structure, variables, initial, x) -> bool:
  """Whether noise matters; raises unless outputs have the batch in front."""
  # A cache belongs to one element; else, two tell the batch from an axis of 1.
  size = 1 if 'cache' in initial else 2

  def rows(x):
    return jax.ShapeDtypeStruct((size, *jnp.shape(x)[1:]), jnp.result_type(x))

  def one(x):
    return jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))

  memory, x = jax.tree.map(rows, (initial.get('memory', ()), x))
  cache = jax.tree.map(one, initial.get('cache', {}))
  variables = variables.replace(cache=cache)

  def call(key, variables, memory, x):
    new, memory, y = host.call(structure, variables, memory, x, key, None)
    return (memory, new.cache), y

  args = (jax.random.key(0), variables, memory, x)
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args
  )
  try:
    jaxpr, (new, y) = jax.make_jaxpr(call, return_shape=True)(*args)
  except Exception as error:
    raise ValueError(
      f'the output size of {host.title} cannot be inferred from inputs '
      f'{_shapes(x)}, as calling it on these failed with '
      f'{type(error).__name__}: {error}'
    ) from error
  ys = jax.tree.leaves(y)
  if not ys or any(y.shape[:1] != (size,) for y in ys):
    raise ValueError(
      f'the output size of {host.title} cannot be inferred: it must map '
      f'[N, ...] to arrays [N, ...], and for inputs {_shapes(x)} gave '
      f'{_shapes(y)}; let it keep the leading axis, or say by `call` which '
      'part of what it gives is the output'
    )
  if _shapes(new) != _shapes((memory, cache)):
    raise ValueError(
      f'{host.title} must keep the shapes and dtypes of what it remembers, '
      f'{_shapes((memory, cache))}, got {_shapes(new)}'
    )
  return _depends_on_first(jaxpr.jaxpr)


def _depends_on_first(jaxpr: Any) -> bool:
  """Whether an output of a jaxpr depends on its first input."""
  live = set(_variables_of(jaxpr.outvars))
  for eqn in reversed(jaxpr.eqns):
    if not live.isdisjoint(eqn.outvars):
      live.update(_variables_of(eqn.invars))
  return jaxpr.invars[0] in live


def _variables_of(atoms):
  return [a for a in atoms if not isinstance(a, jax_core.Literal)]


def _shapes(tree: Any) -> Any:
  return jax.tree.map(lambda x: f'{x.dtype}{list(x.shape)}', tree)
