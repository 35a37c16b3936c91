"""A graph of populations as data: frozen, hashable, comparable."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import types
import typing
from typing import Any

import networkx as nx

from hkgraph.graph import activations, validate
from hkgraph.graph import text as text_lib

if typing.TYPE_CHECKING:
  from hkgraph.graph import drawing
  from hkgraph.graph import schedule as schedule_lib


@dataclasses.dataclass(frozen=True)
class PopulationSpec:
  """A named group of neurons.

  Attributes:
    name: An identifier.
    size: Number of neurons.
    activation: Applied once to the integrated input; None is the identity. A
      public name (`'jax.nn.swish'`) is replaced by what it names.
    input_from: Key of the observation that an input population reads.
    output_to: Key under which an output population is found in the outputs.
    module: A class to use in place of `Population`.
  """

  name: str
  size: int
  activation: Callable[..., Any] | None = None
  input_from: str | None = None
  output_to: str | None = None
  module: Callable[..., Any] | None = None

  def __post_init__(self):
    validate.identifier('name', self.name)
    size = validate.integer('size', self.size, minimum=1)
    object.__setattr__(self, 'size', size)
    activation = activations.resolve(self.activation)
    object.__setattr__(self, 'activation', activation)
    for field in ('input_from', 'output_to'):
      if getattr(self, field) is not None:
        validate.text(field, getattr(self, field))
    if self.input_from and self.output_to:
      raise ValueError(
        f'population {self.name!r} has both `input_from` and `output_to`; '
        'make two populations and connect them'
      )
    if self.module is not None:
      validate.function('module', self.module, 'a subclass of hg.Population')

  @property
  def kind(self) -> str:
    """`'input'`, `'output'` or `'population'`."""
    if self.input_from:
      return 'input'
    return 'output' if self.output_to else 'population'

  def __reduce__(self):
    # JAX functions do not pickle, but their names do.
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    name = activations.public_name(self.activation)
    fields['activation'] = name or self.activation
    return type(self), tuple(fields.values())


@dataclasses.dataclass(frozen=True)
class ConnectionSpec:
  """A directed connection between two populations.

  Attributes:
    src: Name of the population that is read.
    dst: Name of the population that is fed.
    delay: How many steps ago the source is read.
    transform: Zero-argument factory of a Haiku module; None is `x @ w + b`.
    index: Counts the connections from `src` to `dst` in canonical order.
  """

  src: str
  dst: str
  delay: int = 0
  transform: Callable[..., Any] | None = None
  index: int = 0

  def __post_init__(self):
    validate.text('src', self.src)
    validate.text('dst', self.dst)
    for field in ('delay', 'index'):
      number = validate.integer(field, getattr(self, field), minimum=0)
      object.__setattr__(self, field, number)
    if self.transform is not None:
      validate.factory('transform', self.transform)


@dataclasses.dataclass(frozen=True, repr=False)
class GraphSpec:
  """A whole graph in canonical order, without a fault.

  Populations are sorted by name (`h2` before `h10`), connections by source,
  destination, delay and name of the transform; what is left is in the order of
  declaration. So the same graph declared in another order is equal.

  Attributes:
    populations: Any order is accepted and made canonical.
    connections: Likewise; `index` is counted anew.

  Raises:
    GraphError: With all faults of the graph as a whole.
  """

  populations: tuple[PopulationSpec, ...]
  connections: tuple[ConnectionSpec, ...]

  def __post_init__(self):
    populations = tuple(sorted(self.populations, key=_population_key))
    connections = _indexed(sorted(self.connections, key=_connection_key))
    object.__setattr__(self, 'populations', populations)
    object.__setattr__(self, 'connections', connections)
    faults = validate.graph_faults(populations, connections)
    if faults:
      raise validate.GraphError(faults)

  def __hash__(self) -> int:
    return self._hash

  def __repr__(self) -> str:
    return (
      f'GraphSpec({len(self.populations)} populations, '
      f'{len(self.connections)} connections, digest={self.digest()!r})'
    )

  def __reduce__(self):
    return type(self), (self.populations, self.connections)

  def population(self, name: str) -> PopulationSpec:
    """The population of that name."""
    return self._lookup(self._by_name, name)

  def incoming(self, name: str) -> tuple[ConnectionSpec, ...]:
    """The connections that feed a population, in canonical order."""
    return self._lookup(self._incoming, name)

  def outgoing(self, name: str) -> tuple[ConnectionSpec, ...]:
    """The connections that read a population, in canonical order."""
    return self._lookup(self._outgoing, name)

  @functools.cached_property
  def inputs(self) -> tuple[PopulationSpec, ...]:
    """The populations that read the observation."""
    return tuple(p for p in self.populations if p.kind == 'input')

  @functools.cached_property
  def outputs(self) -> tuple[PopulationSpec, ...]:
    """The populations that are read out."""
    return tuple(p for p in self.populations if p.kind == 'output')

  @functools.cached_property
  def order(self) -> tuple[str, ...]:
    """All names, the sources of delay-0 connections before what they feed."""
    graph = nx.DiGraph((c.src, c.dst) for c in self.connections if not c.delay)
    graph.add_nodes_from(self._by_name)
    key = validate.natural_key
    return tuple(nx.lexicographical_topological_sort(graph, key))

  @functools.cached_property
  def history_lengths(self) -> Mapping[str, int]:
    """The longest delay with which each population is read; 0 if none."""
    lengths = {
      name: max((c.delay for c in connections), default=0)
      for name, connections in self._outgoing.items()
    }
    return types.MappingProxyType(lengths)

  @functools.cached_property
  def input_sizes(self) -> Mapping[str, int]:
    """The size of the observation under each key that is read."""
    return types.MappingProxyType({p.input_from: p.size for p in self.inputs})

  @functools.cached_property
  def num_parameters(self) -> int:
    """Weights and biases of all connections without a `transform`."""
    return sum(self.num_parameters_into(name) for name in self._by_name)

  def num_parameters_into(self, name: str) -> int:
    """Weights and biases of those that feed the population `name`."""
    size = self.population(name).size
    return sum(
      (self._by_name[c.src].size + 1) * size
      for c in self.incoming(name)
      if c.transform is None
    )

  def digest(self) -> str:
    """Names the wiring by 16 hexadecimal digits (SHA-256).

    A callable without a public name counts by its qualified name, so two
    lambdas of one function are taken for the same.
    """
    return self._digest

  def to_json(self) -> str:
    """Writes the graph as text that `from_json` reads.

    Raises:
      ValueError: If populations or connections hold callables that are not
        public in `jax.numpy`, `jax.nn` or `jax.lax`; all are named.
    """
    return text_lib.to_json(self)

  @classmethod
  def from_json(cls, text: str) -> 'GraphSpec':
    """Reads what `to_json` wrote, under all the checks of the builder.

    No code is run and nothing imported: activations are looked up by name in
    `jax.numpy`, `jax.nn` and `jax.lax`.

    Raises:
      ValueError: If the text is no JSON, or of another format or version.
      GraphError: With all faults of the graph.
    """
    return cls(*text_lib.from_json(text, PopulationSpec, ConnectionSpec))

  def summary(self) -> str:
    """A table of the populations with totals, as plain text.

    `'x'` in it is a key of the observation or of the outputs, and `arm @2` is
    a connection from or to `arm` with delay 2.
    """
    return text_lib.summary(self)

  def schedule(self) -> 'schedule_lib.Schedule':
    """How the graph is executed; its `describe()` says it in words."""
    from hkgraph.graph import schedule

    return schedule.make(self)

  def draw(self, path: str | pathlib.Path | None = None) -> 'drawing.Drawing':
    """A picture of the graph, as Graphviz source and as a matplotlib figure.

    Args:
      path: Where to save it: `.dot` or `.gv`, `.png`, `.svg` or `.pdf`.

    Returns:
      The drawing, with `.source`, `.figure` and `.save(path)`.
    """
    from hkgraph.graph import drawing

    result = drawing.Drawing(self)
    if path is not None:
      result.save(path)
    return result

  @functools.cached_property
  def _by_name(self) -> dict[str, PopulationSpec]:
    return {p.name: p for p in self.populations}

  @functools.cached_property
  def _incoming(self) -> dict[str, tuple[ConnectionSpec, ...]]:
    return _grouped(self.connections, 'dst', self._by_name)

  @functools.cached_property
  def _outgoing(self) -> dict[str, tuple[ConnectionSpec, ...]]:
    return _grouped(self.connections, 'src', self._by_name)

  @functools.cached_property
  def _hash(self) -> int:
    return hash((self.populations, self.connections))

  @functools.cached_property
  def _digest(self) -> str:
    return text_lib.digest(self)

  def _lookup(self, table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
      raise ValueError(
        f'{name!r} is no population of this graph'
        f'{validate.did_you_mean(name, table)}'
      )
    return table[name]


def _population_key(p: PopulationSpec):
  return validate.natural_key(p.name)


def _connection_key(c: ConnectionSpec):
  transform = c.transform and activations.qualified_name(c.transform)
  ends = (validate.natural_key(c.src), validate.natural_key(c.dst))
  return (*ends, c.delay, transform or '')


def _indexed(connections: Sequence[ConnectionSpec]):
  counts = {}
  indexed = []
  for c in connections:
    index = counts.get((c.src, c.dst), 0)
    counts[c.src, c.dst] = index + 1
    indexed.append(dataclasses.replace(c, index=index))
  return tuple(indexed)


def _grouped(connections: Sequence[ConnectionSpec], end: str, names):
  groups = {name: [] for name in names}
  for c in connections:
    groups[getattr(c, end)].append(c)
  return {name: tuple(group) for name, group in groups.items()}
