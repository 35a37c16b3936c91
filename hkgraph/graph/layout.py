"""Where the populations of a graph stand in its picture, in inches."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import networkx as nx

from hkgraph.graph import validate

_MAX_ROWS = 24  # A longer column is folded.
_MIN_RING = 8  # A shorter column never is bent to a ring.


@dataclasses.dataclass(frozen=True)
class Box:
  """The frame of one population.

  Attributes:
    x: Center, from the left.
    y: Center, upward from the middle of the picture.
    width: Of the frame.
    height: Of the frame.
    column: Number of its column, from the left.
    hub: Center of the ring on which it stands, if it does.
  """

  x: float
  y: float
  width: float
  height: float
  column: int
  hub: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
  """All frames.

  Attributes:
    width: Of all, with the keys beside them.
    height: Of the highest column.
    gap: Between two columns.
    font: Size of the labels, in points.
    boxes: The frames by name of the population.
  """

  width: float
  height: float
  gap: float
  font: float
  boxes: Mapping[str, Box]


def depths(spec: Any) -> dict[str, int]:
  """The column of each population: inputs in the first, outputs in the last.

  Loops (strongly connected components) are entered where they are fed from
  outside; connections without delay always lead to the right, except from
  outputs and to inputs.
  """
  depth = _flow_depths(spec)
  inputs = {p.name for p in spec.inputs}
  outputs = {p.name for p in spec.outputs}
  for name in depth:
    depth[name] = 0 if name in inputs else max(depth[name], bool(inputs))
  last = 1 + max((d for n, d in depth.items() if n not in outputs), default=-1)
  depth |= dict.fromkeys(outputs, last)
  ranks = {d: rank for rank, d in enumerate(sorted(set(depth.values())))}
  return {p.name: ranks[depth[p.name]] for p in spec.populations}


def arrange(spec: Any) -> Layout:
  """Finds a frame for every population."""
  columns = _columns(spec)
  font = _font(spec)
  room = max(_room(spec, names, font) for names in columns)
  blocks = [_block(spec, names, font, room) for names in columns]
  gap = 0.09 * font + 0.03 * min(_MAX_ROWS, max(map(len, columns)))
  boxes, x = {}, _key_width(spec, columns[0], font)
  for column, (names, block) in enumerate(zip(columns, blocks, strict=True)):
    hub = (x + block.width / 2, 0.0) if block.ring else None
    for name, (left, y) in zip(names, block.places, strict=True):
      boxes[name] = Box(x + left, y, *block.frame, column, hub)
    x += block.width + gap
  width = x - gap + _key_width(spec, columns[-1], font)
  return Layout(width, room, gap, font, boxes)


def _font(spec) -> float:
  count = len(spec.populations)
  return 10 if count <= 12 else 8 if count <= 40 else 6


def _flow_depths(spec) -> dict[str, int]:
  graph = nx.DiGraph((c.src, c.dst) for c in spec.connections)
  graph.add_nodes_from(p.name for p in spec.populations)
  components = nx.condensation(graph)
  depth = {}
  for component in nx.topological_sort(components):
    members = components.nodes[component]['members']
    sources = {m: set(graph.predecessors(m)) - members for m in members}
    entries = {
      m: 1 + max(depth[s] for s in sources[m]) for m in members if sources[m]
    }
    depth |= _loop_depths(spec, graph.subgraph(members), entries)
  return depth


def _loop_depths(spec, loop: nx.DiGraph, entries: Mapping[str, int]):
  """Steps into a loop from its entries, then along connections of delay 0."""
  entries = entries or {min(loop, key=validate.natural_key): 0}
  graph = nx.DiGraph(loop.edges)
  outside = ''  # No population has this name.
  graph.add_weighted_edges_from((outside, n, d) for n, d in entries.items())
  depth = nx.single_source_dijkstra_path_length(graph, outside)
  depth = {n: max(depth[n], entries.get(n, 0)) for n in loop}
  for name in filter(depth.__contains__, spec.order):
    for c in spec.incoming(name):
      if not c.delay and c.src in depth:
        depth[name] = max(depth[name], depth[c.src] + 1)
  return depth


def _columns(spec) -> list[list[str]]:
  """Names by column, top to bottom, neighbours near each other."""
  depth = depths(spec)
  columns = [[] for _ in range(max(depth.values()) + 1)]
  for p in spec.populations:
    columns[depth[p.name]].append(p.name)
  free = []
  for names in columns:
    inner = _inner(spec, names)
    if inner.number_of_edges() < len(names):
      names[:] = _walk(inner)
    if not inner.edges:
      free.append(names)
  for names in 2 * [*free, *reversed(free)]:
    _sort_by_neighbours(spec, names, columns)
  return columns


def _inner(spec, names: Sequence[str]) -> nx.Graph:
  """Who is connected to whom within a column."""
  graph = nx.Graph()
  graph.add_nodes_from(names)
  graph.add_edges_from(
    (c.src, c.dst)
    for name in names
    for c in spec.outgoing(name)
    if c.dst in graph and c.dst != name
  )
  return graph


def _walk(graph: nx.Graph) -> list[str]:
  """Depth first, so that a tree has short branches."""
  walked = {}
  for name in graph:
    if name not in walked:
      walked |= dict.fromkeys(nx.dfs_preorder_nodes(graph, name))
  return list(walked)


def _sort_by_neighbours(spec, names: list[str], columns):
  place = {
    name: (i + 0.5) / len(column)
    for column in columns
    for i, name in enumerate(column)
  }

  def mean_place(name):
    ends = [c.src for c in spec.incoming(name)]
    ends += [c.dst for c in spec.outgoing(name)]
    places = [place[end] for end in ends if end not in names]
    return sum(places) / len(places) if places else place[name]

  names.sort(key=mean_place)


@dataclasses.dataclass(frozen=True)
class _Block:
  """A column by itself; places are relative to its left middle."""

  width: float
  frame: tuple[float, float]
  places: Sequence[tuple[float, float]]
  ring: bool = False


def _block(spec, names: Sequence[str], font: float, room: float) -> _Block:
  frame = _frame(names, font)
  if _is_ring(spec, names):
    radius = _radius(names, font)
    turns = [2 * math.pi * i / len(names) for i in range(len(names))]
    middle = radius + frame[0] / 2
    places = [
      (middle + radius * math.sin(t), radius * math.cos(t)) for t in turns
    ]
    return _Block(2 * middle, frame, places, ring=True)
  folds = math.ceil(len(names) / _MAX_ROWS)
  step = min(room / len(names), 2 * _row_height(spec, font) / folds)
  spread = frame[0] + 0.015 * font
  top = step * (len(names) - 1) / 2
  places = [
    (frame[0] / 2 + i % folds * spread, top - i * step)
    for i in range(len(names))
  ]
  return _Block(frame[0] + (folds - 1) * spread, frame, places)


def _room(spec, names: Sequence[str], font: float) -> float:
  """The least height of a column."""
  if _is_ring(spec, names):
    return 2 * _radius(names, font) + _frame(names, font)[1]
  return min(len(names), _MAX_ROWS) * _row_height(spec, font)


def _is_ring(spec, names: Sequence[str]) -> bool:
  inner = _inner(spec, names).number_of_edges()
  return len(names) > _MIN_RING and inner > 1.5 * len(names)


def _frame(names: Sequence[str], font: float) -> tuple[float, float]:
  longest = max(3, *map(len, names))
  return 0.0088 * font * longest + 0.02 * font, 0.043 * font


def _radius(names: Sequence[str], font: float) -> float:
  return 1.4 * max(_frame(names, font)) * len(names) / (2 * math.pi)


def _row_height(spec, font: float) -> float:
  """A frame, and the most loops that any population has above it."""
  loops = max(
    (c.index + 1 for c in spec.connections if c.src == c.dst), default=0
  )
  return font * (0.078 + loops * (0.005 if font <= 6 else 0.027))


def _key_width(spec, names: Sequence[str], font: float) -> float:
  keys = [
    len(key)
    for p in map(spec.population, names)
    for key in (p.input_from or p.output_to or '',)
    if key != p.name
  ]
  return 0.0085 * font * (max(keys, default=-2) + 2)
