"""What a graph must satisfy, each fault told with the call that mends it."""

from collections.abc import Iterable, Iterator, Sequence
import difflib
import inspect
import keyword
import operator
import re
from typing import Any

import networkx as nx


class GraphError(ValueError):
  """All faults of a graph together.

  Attributes:
    faults: One sentence per fault, each with the call that would mend it.
  """

  def __init__(self, faults: Iterable[str]):
    self.faults = tuple(faults)
    super().__init__(self.faults)

  def __str__(self) -> str:
    count = len(self.faults)
    heading = f'the graph has {count} fault{"s" if count > 1 else ""}:'
    return '\n  * '.join([heading, *self.faults])


def identifier(argument: str, value: Any) -> str:
  """Returns `value` if it can name a population.

  Raises:
    TypeError: If it is no string.
    ValueError: If it is no identifier of ASCII letters, digits and `_`.
  """
  text(argument, value)
  if value.isidentifier() and value.isascii() and not keyword.iskeyword(value):
    return value
  mended = re.sub(r'\W', '_', value, flags=re.ASCII)
  mended = mended if re.match('[A-Za-z]', mended) else f'p_{mended}'
  mended = f'{mended}_' if keyword.iskeyword(mended) else mended
  raise ValueError(
    f'`{argument}` must be an identifier (letters, digits and `_`, no digit '
    f'first, no Python keyword), got {value!r}; write for instance {mended!r}'
  )


def text(argument: str, value: Any) -> str:
  """Returns `value` if it is a string that is not empty."""
  if not isinstance(value, str):
    raise TypeError(f'`{argument}` must be a string, got {value!r}')
  if not value:
    raise ValueError(f'`{argument}` must not be the empty string')
  return value


def integer(argument: str, value: Any, *, minimum: int) -> int:
  """Returns `value` as an int if it is an integer, no bool, `>= minimum`."""
  wanted = 'a positive integer' if minimum else 'a non-negative integer'
  message = f'`{argument}` must be {wanted}, got {value!r}'
  try:
    number = operator.index(value)
  except TypeError:
    raise TypeError(message) from None
  if isinstance(value, bool):
    raise TypeError(f'{message}; write {int(value)} if you mean the number')
  if number < minimum:
    raise ValueError(message)
  return number


def function(argument: str, value: Any, wanted: str) -> Any:
  """Returns `value` if it is callable and hashable; `wanted` describes it."""
  if not callable(value):
    raise TypeError(f'`{argument}` must be {wanted}, got {value!r}')
  try:
    hash(value)
  except TypeError:
    raise TypeError(
      f'`{argument}` must be hashable, got {value!r}; wrap it: `lambda '
      '*args, **kwargs: your_callable(*args, **kwargs)`'
    ) from None
  return value


def factory(argument: str, value: Any) -> Any:
  """Returns `value` if it is a class or can be called without arguments."""
  wanted = 'a factory of a Haiku module, such as `lambda: hk.Linear(4)`'
  function(argument, value, wanted)
  if isinstance(value, type):
    return value
  try:
    signature = inspect.signature(value)
  except (TypeError, ValueError):  # Some builtins have none.
    return value
  try:
    signature.bind()
  except TypeError:
    raise TypeError(
      f'`{argument}` must be {wanted}, which is called without arguments; '
      f'got {value!r}, which takes {signature}'
    ) from None
  return value


def natural_key(name: str) -> tuple[list[Any], str]:
  """A sort key under which `h2` comes before `h10`."""
  parts = re.split('([0-9]+)', name)
  return [int(p) if i % 2 else p for i, p in enumerate(parts)], name


def did_you_mean(name: Any, known: Iterable[str]) -> str:
  """` (did you mean 'arm'?)` if something near is known, else nothing."""
  near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
  choices = ' or '.join(repr(n) for n in near)
  return f' (did you mean {choices}?)' if near else ''


def graph_faults(
  populations: Sequence[Any], connections: Sequence[Any]
) -> tuple[str, ...]:
  """What is wrong with a graph as a whole.

  Args:
    populations: The graph's `PopulationSpec`s in canonical order.
    connections: The graph's `ConnectionSpec`s in canonical order.

  Returns:
    One sentence per fault, with the call that would mend it.
  """
  if not populations:
    unnamed = (
      'the graph has no population; call add_input(name, size, '
      'input_from=key), add_output(name, size) and connect(src, dst)'
    )
    return (unnamed,)
  return (
    *_names(populations),
    *_ends(populations, connections),
    *_cycles(connections),
    *_inputs(populations),
    *_outputs(populations, connections),
  )


def _names(populations) -> Iterator[str]:
  for name, group in _groups(populations, 'name'):
    if len(group) > 1:
      yield (
        f'{len(group)} populations are named {name!r}; give each a name of '
        f'its own: {call(group[-1], name=f"{name}_{len(group)}")}'
      )


def _ends(populations, connections) -> Iterator[str]:
  known = [p.name for p in populations]
  calls = {}
  for c in connections:
    for end in {c.src: None, c.dst: None}:
      if end not in known:
        calls.setdefault(end, []).append(_connect(c))
  for end, named_by in calls.items():
    others = f' and {len(named_by) - 1} more' if len(named_by) > 1 else ''
    yield (
      f'{named_by[0]}{others} names {end!r}, which is no population'
      f'{did_you_mean(end, known)}; connect another one or call '
      f'add_population({end!r}, size)'
    )


def _cycles(connections) -> Iterator[str]:
  edges = [(c.src, c.dst) for c in connections if c.delay == 0]
  components = nx.strongly_connected_components(nx.DiGraph(edges))
  first_names = {min(c, key=natural_key): c for c in components}
  for first in sorted(first_names, key=natural_key):
    inner = nx.DiGraph(e for e in edges if first_names[first].issuperset(e))
    if inner.edges:
      path = _shortest_cycle(inner, first)
      yield (
        f'connections without delay form a cycle: {" -> ".join(path)}; give '
        f'one of them a delay: connect({path[-2]!r}, {path[-1]!r}, delay=1)'
      )


def _shortest_cycle(graph: nx.DiGraph, first: str) -> list[str]:
  returns = [nx.shortest_path(graph, n, first) for n in graph.successors(first)]
  return [first, *min(returns, key=len)]


def _inputs(populations) -> Iterator[str]:
  for key, group in _groups(populations, 'input_from'):
    sizes = {p.size for p in group}
    if len(sizes) > 1:
      readers = ', '.join(f'{p.name!r} (size {p.size})' for p in group)
      yield (
        f'inputs of unlike sizes read the key {key!r}: {readers}; give all '
        f'the size of the observation: {call(group[-1], size=group[0].size)}'
      )


def _outputs(populations, connections) -> Iterator[str]:
  outputs = [p for p in populations if p.output_to is not None]
  if not outputs:
    yield (
      'the graph has no output; call add_output(name, size) and '
      'connect(src, name)'
    )
  for key, group in _groups(outputs, 'output_to'):
    if len(group) > 1:
      names = ' and '.join(repr(p.name) for p in group)
      mended = call(group[-1], output_to=f'{key}_{len(group)}')
      yield (
        f'outputs {names} both write the key {key!r}; give one another key: '
        f'{mended}'
      )
  reached = {c.dst for c in connections}
  for p in outputs:
    if p.name not in reached:
      yield (
        f'output {p.name!r} has no incoming connection; call connect(src, '
        f'{p.name!r})'
      )


def _groups(populations, field: str) -> Iterator[tuple[Any, list[Any]]]:
  """Populations that share a value of `field` other than None."""
  groups = {}
  for p in populations:
    groups.setdefault(getattr(p, field), []).append(p)
  return ((value, group) for value, group in groups.items() if value)


def call(population: Any, **changes: Any) -> str:
  """The builder's call that declares `population`, with `changes`."""
  fields = {k: getattr(population, k) for k in ('name', 'size')} | changes
  name, size = fields.pop('name'), fields.pop('size')
  kind = {'input': 'add_input', 'output': 'add_output'}
  for key in ('input_from', 'output_to'):
    value = fields.get(key, getattr(population, key))
    if value is not None:
      fields[key] = value
  options = ''.join(f', {k}={v!r}' for k, v in fields.items())
  method = kind.get(population.kind, 'add_population')
  return f'{method}({name!r}, {size}{options})'


def _connect(connection) -> str:
  delay = f', delay={connection.delay}' if connection.delay else ''
  return f'connect({connection.src!r}, {connection.dst!r}{delay})'
