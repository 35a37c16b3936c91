"""How a graph is stored and executed, decided before anything is traced."""

from collections.abc import Iterable
import dataclasses
from typing import NamedTuple

from hkgraph.graph import spec as spec_lib


class ConnectionKey(NamedTuple):
  """Names a connection: the `index`-th from `src` to `dst`."""

  src: str
  dst: str
  index: int


@dataclasses.dataclass(frozen=True)
class Pack:
  """Default connections of one shape, whose weights are stored stacked.

  Attributes:
    name: Suffix of the parameters `w_{name}` and `b_{name}`.
    sizes: Sizes of source and destination.
    connections: The connections, in the order of the leading axis.
  """

  name: str
  sizes: tuple[int, int]
  connections: tuple[ConnectionKey, ...]


def key_of(connection: spec_lib.ConnectionSpec) -> ConnectionKey:
  return ConnectionKey(connection.src, connection.dst, connection.index)


def packs(spec: spec_lib.GraphSpec) -> tuple[Pack, ...]:
  """Groups the default connections by the sizes they join."""
  size = {p.name: p.size for p in spec.populations}
  groups: dict[tuple[int, int], list[ConnectionKey]] = {}
  for connection in default_connections(spec):
    sizes = size[connection.src], size[connection.dst]
    groups.setdefault(sizes, []).append(key_of(connection))
  return tuple(
    Pack(f'{sizes[0]}x{sizes[1]}', sizes, tuple(keys))
    for sizes, keys in sorted(groups.items())
  )


def default_connections(
  spec: spec_lib.GraphSpec,
) -> Iterable[spec_lib.ConnectionSpec]:
  return (c for c in spec.connections if c.transform is None)
