"""A graph as text: JSON and back, its digest, and a table for people."""

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import json
from typing import Any

from hkgraph.graph import activations, validate

_FORMAT = 'hkgraph.graph'
_VERSION = 1
_REQUIRED = {'populations': ('name', 'size'), 'connections': ('src', 'dst')}
_OPTIONAL = {
  'populations': ('activation', 'input_from', 'output_to'),
  'connections': ('delay',),
}
_HEADINGS = (
  'population',
  'size',
  'activation',
  'in',
  'out',
  'history length',
  'parameters',
)
_RIGHT = ('size', 'history length', 'parameters')
_SHOWN_ENDS = 4


def digest(spec: Any) -> str:
  """SHA-256 of the wiring, 16 hexadecimal digits (see `GraphSpec.digest`)."""
  wiring = [[_record(x) for x in xs] for xs in _parts(spec).values()]
  return hashlib.sha256(json.dumps(wiring).encode()).hexdigest()[:16]


def to_json(spec: Any) -> str:
  """JSON with one population or connection a line (see `GraphSpec.to_json`)."""
  items = (*spec.populations, *spec.connections)
  unwritable = [fault for item in items for fault in _unwritable(item)]
  if unwritable:
    raise ValueError(
      f'the graph cannot be written as JSON: {"; ".join(unwritable)}. JSON '
      'holds public functions of jax.numpy, jax.nn and jax.lax as activations '
      'and nothing custom; keep the code that builds this graph instead'
    )
  blocks = [f'"format": "{_FORMAT}"', f'"version": {_VERSION}']
  for field, part in _parts(spec).items():
    lines = ',\n    '.join(json.dumps(_record(item)) for item in part)
    blocks.append(f'"{field}": [\n    {lines}\n  ]')
  return '{\n  ' + ',\n  '.join(blocks) + '\n}'


def from_json(
  text: str, population: type, connection: type
) -> tuple[list[Any], list[Any]]:
  """Reads populations and connections (see `GraphSpec.from_json`).

  Args:
    text: What `to_json` wrote.
    population: The class of a population.
    connection: The class of a connection.

  Returns:
    Lists of them, each checked by its class, not yet as a whole.
  """
  document = _document(text)
  faults = []
  populations = _items(population, document, 'populations', faults)
  connections = _items(connection, document, 'connections', faults)
  if faults:
    raise validate.GraphError(faults)
  return populations, connections


def summary(spec: Any) -> str:
  """A table of the populations and totals (see `GraphSpec.summary`)."""
  kinds = ('input', 'population', 'output')
  by_kind = sorted(spec.populations, key=lambda p: kinds.index(p.kind))
  rows = [_HEADINGS, *(_row(spec, p.name) for p in by_kind)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  rows.insert(1, ['-' * width for width in widths])
  lines = [
    '  '.join(
      cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
      for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
    ).rstrip()
    for row in rows
  ]
  custom = sum(c.transform is not None for c in spec.connections)
  modules = sum(p.module is not None for p in spec.populations)
  totals = (
    f'{_count(len(spec.populations), "population")}, '
    f'{_count(len(spec.connections), "connection")}, '
    f'{_count(spec.num_parameters, "parameter")}'
  )
  if custom or modules:
    totals += (
      f' (+ those of {_count(custom, "custom transform")} and '
      f'{_count(modules, "custom population")})'
    )
  return '\n'.join([*lines, '', f'{totals}; digest {spec.digest()}'])


def _parts(spec) -> dict[str, Sequence[Any]]:
  return {'populations': spec.populations, 'connections': spec.connections}


def _record(item) -> dict[str, Any]:
  """The fields of `item` that differ from their defaults, as JSON values."""
  record = {}
  for field in dataclasses.fields(item):
    value = getattr(item, field.name)
    if value != field.default and field.name != 'index':
      name = callable(value) and activations.qualified_name(value)
      record[field.name] = name or value
  return record


def _unwritable(item) -> Iterator[str]:
  """Which callables of `item` have no place in JSON."""
  for field in ('activation', 'module', 'transform'):
    value = getattr(item, field, None)
    public = field == 'activation' and activations.public_name(value)
    if value is not None and not public:
      yield (
        f'{_described(item)} has {field} {activations.qualified_name(value)}'
      )


def _described(item) -> str:
  if hasattr(item, 'name'):
    return f'population {item.name!r}'
  return f'connection {item.index} from {item.src!r} to {item.dst!r}'


def _document(text: str) -> dict[str, Any]:
  if not isinstance(text, str):
    raise TypeError(f'JSON must be given as a string, got {type(text)}')
  try:
    document = json.loads(text, object_pairs_hook=_without_repetition)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'the text is no JSON of a graph: {error}') from error
  found = document.get('format') if isinstance(document, dict) else None
  if found != _FORMAT:
    raise ValueError(
      f'the text must be a JSON object with "format": "{_FORMAT}", as '
      f'`GraphSpec.to_json` writes it; got format {found!r}'
    )
  version = document.get('version')
  if type(version) is not int or version != _VERSION:
    raise ValueError(
      f'"version" must be {_VERSION}, got {version!r}; a graph of a later '
      'version needs a later hkgraph: pip install --upgrade hkgraph'
    )
  _check_fields(document, ('format', 'version', *_REQUIRED), ())
  for field in _REQUIRED:
    if not isinstance(document[field], list):
      raise ValueError(f'"{field}" must be a list, got {document[field]!r}')
  return document


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  record = dict(pairs)
  if len(record) < len(pairs):
    raise ValueError(f'a key is given twice in {json.dumps(record)}')
  return record


def _items(cls, document, field: str, faults: list[str]) -> list[Any]:
  items = []
  for i, record in enumerate(document[field]):
    try:
      if not isinstance(record, dict):
        raise ValueError('must be an object, as in {"name": "arm", "size": 4}')
      _check_fields(record, _REQUIRED[field], _OPTIONAL[field])
      _check_activation(record)
      items.append(cls(**record))
    except (TypeError, ValueError) as error:
      faults.append(f'{field}[{i}], {json.dumps(record)}: {error}')
  return items


def _check_activation(record: dict[str, Any]):
  value = record.get('activation')
  if not isinstance(value, str | None):
    raise TypeError(
      "`activation` must be a name such as 'jax.nn.swish', or null, got "
      f'{value!r}'
    )


def _check_fields(record, required: Sequence[str], optional: Sequence[str]):
  known = (*required, *optional)
  for field in record:
    if field not in known:
      raise ValueError(
        f'unknown field {field!r}{validate.did_you_mean(field, known)}; '
        f'allowed are {", ".join(known)}'
      )
  for field in required:
    if field not in record:
      raise ValueError(f'the field {field!r} is missing')


def _row(spec, name: str) -> tuple[str, ...]:
  p = spec.population(name)
  incoming, outgoing = spec.incoming(name), spec.outgoing(name)
  sources = [_end(c.src, c.delay) for c in incoming]
  readers = [_end(c.dst, c.delay) for c in outgoing]
  reads = [repr(p.input_from)] if p.input_from else []
  writes = [repr(p.output_to)] if p.output_to else []
  custom = p.module or any(c.transform for c in incoming)
  return (
    name,
    str(p.size),
    activations.qualified_name(p.activation) if p.activation else '-',
    _listed([*reads, *sources]),
    _listed([*writes, *readers]),
    str(spec.history_lengths[name]),
    f'{spec.num_parameters_into(name):,}{"+" if custom else ""}',
  )


def _end(name: str, delay: int) -> str:
  return f'{name} @{delay}' if delay else name


def _listed(ends: Sequence[str]) -> str:
  if len(ends) > _SHOWN_ENDS:
    rest = len(ends) - _SHOWN_ENDS + 1
    ends = [*ends[: _SHOWN_ENDS - 1], f'{rest} more']
  return ', '.join(ends) or '-'


def _count(number: int, noun: str) -> str:
  return f'{number:,} {noun}{"" if number == 1 else "s"}'
