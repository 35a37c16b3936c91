"""How a graph is stored and executed, decided before anything is traced.

Blocks are run one after the other: a strongly connected component with a loop
is a block of its own, and the populations of one depth outside of all loops
are another. Within a block, populations of one size and activation are a
group (one array), and connections are put in buckets (one product).
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import networkx as nx

from hkgraph.graph import spec as spec_lib

# Populations of unlike fan-in that share a product are padded to the widest;
# up to so many products per group and step are made to keep padding small.
MAX_BUCKETS = 4


class ConnectionKey(NamedTuple):
  """Names a connection: the `index`-th from `src` to `dst`."""

  src: str
  dst: str
  index: int


@dataclasses.dataclass(frozen=True)
class Group:
  """Populations that are computed as one array.

  Attributes:
    names: The populations, in the order of the array's leading axis.
    size: Neurons of each.
    activation: Of each; None is the identity.
    module: Class of a custom population, which is alone in its group.
    length: Longest delay with which one of them is read; 0 if none is.
  """

  names: tuple[str, ...]
  size: int
  activation: Callable[..., Any] | None
  module: Callable[..., Any] | None
  length: int


@dataclasses.dataclass(frozen=True)
class Pack:
  """Default connections whose weights are stored as one stack.

  Attributes:
    name: Suffix of the parameters `w_{name}` and `b_{name}`.
    sizes: Sizes of source and destination.
    connections: In the order of the leading axis.
  """

  name: str
  sizes: tuple[int, int]
  connections: tuple[ConnectionKey, ...]


Table = tuple[tuple[int, ...], ...]  # [members][fan-in]


@dataclasses.dataclass(frozen=True)
class Reads:
  """What each member of a bucket reads from one group.

  Attributes:
    group: Index of the group that is read.
    near: Positions in that group.
    delay: Delays.
    rows: Rows of the stack of weights; -1 for padding.
    pack: Index of the pack that is the stack. None in a transposed bucket:
      there the stack holds all packs of the two sizes, one after the other.
  """

  group: int
  near: Table
  delay: Table
  rows: Table
  pack: int | None

  @property
  def fan_in(self) -> int:
    return len(self.near[0])

  @property
  def is_padded(self) -> bool:
    return any(row < 0 for rows in self.rows for row in rows)


@dataclasses.dataclass(frozen=True)
class Bucket:
  """Members of one group whose input is one product.

  Attributes:
    group: Index of the group.
    members: Positions in the group.
    reads: What they read, side by side in the product; each from one group.
  """

  group: int
  members: tuple[int, ...]
  reads: tuple[Reads, ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """Groups that are run together.

  Attributes:
    groups: Indices of the groups, in the order of execution in a step.
    is_loop: Whether the populations are a component with a loop.
    is_custom: Whether the loop holds a custom population or transform, so
      that it is walked connection by connection.
    outer: Buckets of the connections from earlier blocks.
    inner: Buckets of the connections within a loop, in order of execution;
      every group of the loop appears.
    joined: The buckets of a single step through a loop: those of `inner`, each
      with what its members read from earlier blocks at its side, and those of
      `outer` that do not go with them.
    transposed: The same connections seen from their sources, in the order in
      which gradients flow.
  """

  groups: tuple[int, ...]
  is_loop: bool
  is_custom: bool
  outer: tuple[Bucket, ...]
  inner: tuple[Bucket, ...]
  joined: tuple[Bucket, ...]
  transposed: tuple[Bucket, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The whole plan; hashable, so it can be a static argument."""

  groups: tuple[Group, ...]
  blocks: tuple[Block, ...]
  packs: tuple[Pack, ...]

  def position(self, name: str) -> tuple[int, int]:
    """Index of the population's group, and position within it."""
    return self._positions[name]

  def row(self, key: ConnectionKey) -> tuple[int, int]:
    """Index of the connection's pack, and row within it."""
    return self._rows[key]

  @functools.cached_property
  def _rows(self) -> dict[ConnectionKey, tuple[int, int]]:
    return {
      key: (number, row)
      for number, pack in enumerate(self.packs)
      for row, key in enumerate(pack.connections)
    }

  @functools.cached_property
  def _positions(self) -> dict[str, tuple[int, int]]:
    return {
      name: (g, i)
      for g, group in enumerate(self.groups)
      for i, name in enumerate(group.names)
    }

  def kind(self, sizes: tuple[int, int]) -> tuple[int, ...]:
    """Indices of the packs of these sizes, as transposed buckets stack them."""
    return tuple(i for i, pack in enumerate(self.packs) if pack.sizes == sizes)

  def describe(self) -> str:
    """Says in words which blocks, groups and products there are, and why."""
    return '\n'.join(_describe(self))


def key_of(connection: spec_lib.ConnectionSpec) -> ConnectionKey:
  return ConnectionKey(connection.src, connection.dst, connection.index)


@functools.lru_cache(maxsize=256)
def make(spec: spec_lib.GraphSpec) -> Schedule:
  """Plans the execution of a graph."""
  return _Planner(spec).plan()


class _Planner:
  """Builds a schedule block by block."""

  def __init__(self, spec: spec_lib.GraphSpec):
    self.spec = spec
    self.groups: list[Group] = []
    self.blocks: list[Block] = []
    self.packs: list[Pack] = []
    self.position: dict[str, tuple[int, int]] = {}

  def plan(self) -> Schedule:
    components = list(_components(self.spec))
    self.rank = self._ranks(components)
    for names, is_loop in components:
      self._add_block(names, is_loop)
    blocks = [self._transpose(block) for block in self.blocks]
    return Schedule(tuple(self.groups), tuple(blocks), tuple(self.packs))

  def _ranks(self, components) -> dict[str, tuple[int, int]]:
    """Where each population stands among those of its group.

    Within a loop those of like fan-in stand side by side. The others stand in
    the order of what they feed or read there, so that one-to-one connections
    find their sources in order and nothing is moved.
    """
    natural = {p.name: i for i, p in enumerate(self.spec.populations)}
    rank = {}
    for names, is_loop in components:
      if is_loop:
        for name in names:
          fan_in = sum(c.src in names for c in self.spec.incoming(name))
          rank[name] = fan_in, natural[name]
    free = {}
    for name in natural:
      if name not in rank:
        near = [c.dst for c in self.spec.outgoing(name)]
        near += [c.src for c in self.spec.incoming(name)]
        known = [rank[n] for n in near if n in rank]
        free[name] = min(known, default=(0, natural[name]))
    return rank | free

  def _add_block(self, names: list[str], is_loop: bool) -> None:
    inside = set(names)
    connections = [c for c in self.spec.connections if c.dst in inside]
    inner = [c for c in connections if is_loop and c.src in inside]
    outer = [c for c in connections if not (is_loop and c.src in inside)]
    is_custom = is_loop and (
      any(self.spec.population(name).module for name in names)
      or any(c.transform for c in inner)
    )
    groups = self._add_groups(names, inner)
    outer = self._buckets(groups, outer, together=False)
    inner = self._buckets(groups, inner, together=True) if is_loop else ()
    self.blocks.append(
      Block(
        groups=groups,
        is_loop=is_loop,
        is_custom=is_custom,
        outer=outer,
        inner=inner,
        joined=tuple(_join(outer, inner)),
        transposed=(),
      )
    )

  def _add_groups(self, names, inner) -> tuple[int, ...]:
    """Groups populations by stage, size, activation and use of history."""
    depth = _depths(names, [c for c in inner if c.delay == 0])
    lengths = self.spec.history_lengths
    kinds: dict[Any, list[str]] = {}
    for name in names:
      p = self.spec.population(name)
      alone = name if p.module else ''
      kind = depth[name], p.size, p.activation, lengths[name] > 0, alone
      kinds.setdefault(kind, []).append(name)
    first = len(self.groups)
    for kind, members in sorted(kinds.items(), key=lambda item: item[0][0]):
      members = sorted(members, key=self.rank.get)
      _, size, activation, _, _ = kind
      length = max(lengths[name] for name in members)
      module = self.spec.population(members[0]).module
      for i, name in enumerate(members):
        self.position[name] = len(self.groups), i
      self.groups.append(
        Group(tuple(members), size, activation, module, length)
      )
    return tuple(range(first, len(self.groups)))

  def _buckets(self, groups, connections, together) -> tuple[Bucket, ...]:
    """Buckets of default connections into `groups`, with packs of their own.

    Args:
      groups: Indices of the destinations.
      connections: All connections at hand.
      together: Whether a member is in one bucket, with all that it reads, or
        in one for each group that it reads.
    """
    edges = [
      (self.position[c.dst], self.position[c.src], c.delay, key_of(c))
      for c in connections
      if c.transform is None
    ]
    buckets = []
    for g in groups:
      mine = [e for e in edges if e[0][0] == g]
      sources = sorted({e[1][0] for e in mine})
      if together:
        members = range(len(self.groups[g].names))
        buckets += self._fill(g, members, sources, mine)
      else:
        for source in sources:
          part = [e for e in mine if e[1][0] == source]
          members = sorted({e[0][1] for e in part})
          buckets += self._fill(g, members, [source], part)
    return tuple(buckets)

  def _fill(self, g, members, sources, edges) -> list[Bucket]:
    table = {
      i: [[e for e in edges if e[0][1] == i and e[1][0] == s] for s in sources]
      for i in members
    }
    buckets = []
    for part in _cut({i: tuple(map(len, row)) for i, row in table.items()}):
      reads = [
        self._read(g, source, [table[i][k] for i in part])
        for k, source in enumerate(sources)
      ]
      reads = tuple(r for r in reads if r is not None)
      buckets.append(Bucket(g, tuple(part), reads))
    return buckets

  def _read(self, g, source, rows) -> Reads | None:
    """Reads of a new pack; `rows` lists the edges of each member."""
    width = max(map(len, rows))
    if not width:
      return None
    keys = tuple(e[3] for row in rows for e in row)
    sizes = self.groups[source].size, self.groups[g].size
    number = iter(range(len(keys)))
    reads = Reads(
      group=source,
      near=_table(rows, width, lambda e: e[1][1], 0),
      delay=_table(rows, width, lambda e: e[2], _padding_delay(rows)),
      rows=_table(rows, width, lambda e: next(number), -1),
      pack=len(self.packs),
    )
    self.packs.append(Pack(str(len(self.packs)), sizes, keys))
    return reads

  def _transpose(self, block: Block) -> Block:
    """Adds the buckets of a loop as gradients see it."""
    if not block.is_loop or block.is_custom:
      return block
    edges = []
    for bucket in block.inner:
      for reads in bucket.reads:
        edges += self._edges(bucket, reads)
    buckets = []
    for g in reversed(block.groups):
      mine = [e for e in edges if e[0][0] == g]
      targets = sorted({e[1][0] for e in mine})
      table = {
        i: [[e for e in mine if e[0][1] == i and e[1][0] == t] for t in targets]
        for i in range(len(self.groups[g].names))
      }
      for part in _cut({i: tuple(map(len, r)) for i, r in table.items()}):
        reads = []
        for k, target in enumerate(targets):
          rows = [table[i][k] for i in part]
          width = max(map(len, rows))
          if width:
            columns = (
              _table(rows, width, lambda e: e[1][1], 0),
              _table(rows, width, lambda e: e[2], _padding_delay(rows)),
              _table(rows, width, lambda e: e[3], -1),
            )
            reads.append(Reads(target, *columns, pack=None))
        buckets.append(Bucket(g, tuple(part), tuple(reads)))
    return dataclasses.replace(block, transposed=tuple(buckets))

  def _edges(self, bucket, reads):
    """Source, destination, delay and row in the stack of all such packs."""
    sizes = self.packs[reads.pack].sizes
    earlier = self.packs[: reads.pack]
    offset = sum(len(p.connections) for p in earlier if p.sizes == sizes)
    for i, member in enumerate(bucket.members):
      for near, delay, row in zip(
        reads.near[i], reads.delay[i], reads.rows[i], strict=True
      ):
        if row >= 0:
          source = reads.group, near
          yield source, (bucket.group, member), delay, offset + row


def _components(spec) -> Iterable[tuple[list[str], bool]]:
  """Names of each block and whether it is a loop, in order of execution."""
  graph = nx.DiGraph()
  graph.add_nodes_from(p.name for p in spec.populations)
  graph.add_edges_from((c.src, c.dst) for c in spec.connections)
  condensed = nx.condensation(graph)
  levels: dict[int, int] = {}
  for node in nx.topological_sort(condensed):
    before = [levels[n] for n in condensed.predecessors(node)]
    levels[node] = 1 + max(before, default=-1)
  order = {p.name: i for i, p in enumerate(spec.populations)}
  for level in range(1 + max(levels.values(), default=-1)):
    free, loops = [], []
    for node in (n for n in condensed if levels[n] == level):
      names = sorted(condensed.nodes[node]['members'], key=order.get)
      looped = len(names) > 1 or graph.has_edge(names[0], names[0])
      (loops if looped else free).append(names)
    if free:
      yield sorted(sum(free, []), key=order.get), False
    for names in sorted(loops, key=lambda names: order[names[0]]):
      yield names, True


def _depths(names, connections) -> dict[str, int]:
  """Longest path of delay-0 connections that leads to each population."""
  graph = nx.DiGraph()
  graph.add_nodes_from(names)
  graph.add_edges_from((c.src, c.dst) for c in connections)
  depth: dict[str, int] = {}
  for name in nx.topological_sort(graph):
    before = [depth[n] for n in graph.predecessors(name)]
    depth[name] = 1 + max(before, default=-1)
  return depth


def _cut(widths: dict[int, tuple[int, ...]]) -> list[list[int]]:
  """Splits members into at most `MAX_BUCKETS` parts of like fan-in.

  Members keep their order. Where a part holds unlike fan-ins, the narrower
  are padded; the cuts waste the least, by dynamic programming over the
  distinct fan-ins.
  """
  kinds = sorted(set(widths.values()), key=lambda w: (sum(w), w))
  counts = [sum(w == kind for w in widths.values()) for kind in kinds]

  def cost(i, j):
    widest = [max(column) for column in zip(*kinds[i:j], strict=True)]
    return sum(widest) * sum(counts[i:j])

  best = {(0, 0): (0, [])}
  for parts in range(1, MAX_BUCKETS + 1):
    for j in range(1, len(kinds) + 1):
      options = [
        (best[parts - 1, i][0] + cost(i, j), [*best[parts - 1, i][1], j])
        for i in range(j)
        if (parts - 1, i) in best
      ]
      if options:
        best[parts, j] = min(options)
  _, cuts = min(v for (_, j), v in best.items() if j == len(kinds))
  parts, start = [], 0
  for stop in cuts:
    inside = set(kinds[start:stop])
    parts.append([i for i, width in widths.items() if width in inside])
    start = stop
  return parts


def _padding_delay(rows: Sequence) -> int:
  """A delay that is read anyway: what is not there yet is not asked for."""
  return min(e[2] for row in rows for e in row)


def _join(outer: Sequence[Bucket], inner: Sequence[Bucket]) -> Iterable[Bucket]:
  """Puts outer buckets at the side of inner ones, as far as they fit."""
  beside: dict[Bucket, list[Reads]] = {bucket: [] for bucket in inner}
  for bucket in outer:
    mine = [b for b in inner if b.group == bucket.group]
    shared = [set(b.members) & set(bucket.members) for b in mine]
    fits = all(
      not s or len(s) == len(b.members)
      for s, b in zip(shared, mine, strict=True)
    )
    if not (mine and fits):
      yield bucket
      continue
    for b in mine:
      if b.members[0] in bucket.members:
        beside[b] += [_part(bucket, reads, b.members) for reads in bucket.reads]
  for b, reads in beside.items():
    yield Bucket(b.group, b.members, (*b.reads, *reads))


def _part(bucket: Bucket, reads: Reads, members: tuple[int, ...]) -> Reads:
  """What some members of a bucket read."""
  rows = [bucket.members.index(i) for i in members]
  near, delay, weights = (
    tuple(table[i] for i in rows)
    for table in (reads.near, reads.delay, reads.rows)
  )
  return Reads(reads.group, near, delay, weights, reads.pack)


def _table(rows: Sequence, width: int, field: Callable, fill: int) -> Table:
  return tuple(
    tuple(field(e) for e in row) + (fill,) * (width - len(row)) for row in rows
  )


def _describe(schedule: Schedule) -> Iterable[str]:
  many = len(schedule.blocks), len(schedule.groups), len(schedule.packs)
  yield (
    '{} blocks, {} groups of populations, {} stacks of weights'.format(*many)
  )
  for i, block in enumerate(schedule.blocks):
    yield f'block {i}: {_why(block, schedule)}'
    for g in block.groups:
      yield f'  group {g}: {_group_text(schedule.groups[g])}'
    for bucket in (*block.outer, *block.inner):
      for reads in bucket.reads:
        yield f'  product: {_reads_text(schedule, bucket, reads)}'


def _why(block: Block, schedule: Schedule) -> str:
  names = sum(len(schedule.groups[g].names) for g in block.groups)
  if not block.is_loop:
    return (
      f'{names} populations outside of all loops, at one depth; in a sequence '
      'all time steps at once'
    )
  if block.is_custom:
    return (
      f'a loop of {names} populations with custom parts; in a sequence one '
      'scan, connection by connection'
    )
  return (
    f'a loop of {names} populations; in a sequence one scan with a derivative '
    'by hand'
  )


def _group_text(group: Group) -> str:
  names = ', '.join(group.names[:3]) + (', ...' if group.names[3:] else '')
  kind = f'{len(group.names)} of size {group.size} ({names})'
  if group.module:
    kind += ', custom'
  return kind + (
    f', the last {group.length} steps kept' if group.length else ''
  )


def _reads_text(schedule: Schedule, bucket: Bucket, reads: Reads) -> str:
  pack = schedule.packs[reads.pack]
  delays = sorted({d for row in reads.delay for d in row})
  spread = str(delays[0]) if len(delays) == 1 else f'{delays[0]}-{delays[-1]}'
  padded = len(bucket.members) * reads.fan_in - len(pack.connections)
  return (
    f'group {reads.group} -> group {bucket.group}, {len(pack.connections)} '
    f'connections {pack.sizes[0]}x{pack.sizes[1]}, {len(bucket.members)} '
    f'destinations with up to {reads.fan_in} each, delay {spread}'
    + (f', {padded} of padding' if padded else '')
  )
