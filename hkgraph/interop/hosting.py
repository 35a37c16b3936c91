"""A module of another library as pure functions of its variables."""

import abc
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import chex
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp

from hkgraph import types


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
  kinds = [p.kind for p in parameters.values()]
  by_name = source in parameters or inspect.Parameter.VAR_KEYWORD in kinds
  try:
    return (
      factory(*args, **{source: value}) if by_name else factory(*args, value)
    )
  except Exception as error:
    given = ', '.join([*['in_features'] * len(args), source])
    raise ValueError(
      f'`factory`, called with {given} alone, failed with '
      f'{type(error).__name__}: {error}; give a function of these that makes '
      f'the module, such as `lambda {given}: ...`'
    ) from error


@contextlib.contextmanager
def telling_of(title: str, x: Any) -> Iterator[None]:
  """Tells what is wrong with a module that fails on its inputs."""
  try:
    yield
  except Exception as error:
    raise ValueError(
      f'the output size of {title} cannot be inferred from inputs '
      f'{_shapes(x)}, as calling it on these alone failed with '
      f'{type(error).__name__}: {error}; give a module for inputs of these '
      'shapes, or say by `call` how it is to be called'
    ) from error


@contextlib.contextmanager
def telling_of_noise(remedy: str) -> Iterator[None]:
  """Tells of a network that draws random numbers and is given no key."""
  try:
    yield
  except ValueError as error:
    if type(error).__name__ != 'MissingRNGError':  # Haiku's, and private.
      raise
    raise ValueError(f'the network draws random numbers: {remedy}') from error


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


def inspect_host(host: Host, x: Any) -> tuple[Variables, Any]:
  """Shapes of the variables, and the structure, without any number."""
  found = []

  def create(key):
    variables, structure = host.create(key, x)
    found.append(structure)
    return variables

  shapes = jax.eval_shape(create, jax.random.key(0))
  return shapes, found[0]


def check_and_probe(
  host: Host, structure: Any, variables: Variables, initial: Any, x: Any
) -> bool:
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
  with telling_of(host.title, x):
    jaxpr, (new, y) = jax.make_jaxpr(call, return_shape=True)(*args)
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
