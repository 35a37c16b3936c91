"""Pictures of a graph: Graphviz source, and a matplotlib figure."""

import dataclasses
import functools
import io
import pathlib
import typing

from hkgraph.graph import layout as layout_lib
from hkgraph.graph import routes
from hkgraph.graph import spec as spec_lib

if typing.TYPE_CHECKING:
  from matplotlib import figure as mpl_figure

_FILL = {'input': '#dcebf7', 'population': '#f4f1ea', 'output': '#fde6d2'}
_EDGE = {'input': '#2f6ea5', 'population': '#6f675a', 'output': '#c8651b'}
_INK = '#2b2b2b'
_FAINT = '#8a8a8a'
_DELAYS = ('#7b3fa1', '#b5367a', '#e0533f', '#e08a1e', '#7a9a1f', '#1f9a7a')
_DELAYS += ('#1f7fb8', '#3a4fb0')
_MAX_EDGE_LABELS = 40
_DPI = 150
_MAX_PIXELS = 2400
_MARGIN = 0.25  # Inches.
_PICTURES = ('.png', '.svg', '.pdf')
_SOURCES = ('.dot', '.gv')


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A picture of a graph, made when it is asked for.

  Attributes:
    spec: The graph.
  """

  spec: spec_lib.GraphSpec

  @functools.cached_property
  def source(self) -> str:
    """The graph in the language of Graphviz."""
    return to_dot(self.spec)

  @functools.cached_property
  def figure(self) -> 'mpl_figure.Figure':
    """The graph as a `matplotlib.figure.Figure`."""
    return figure(self.spec)

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the source (`.dot`, `.gv`) or the figure (`.png`, `.svg`, `.pdf`).

    Raises:
      ValueError: If the path has another suffix.
    """
    path = pathlib.Path(path)
    suffix = path.suffix.lower()
    if suffix in _SOURCES:
      path.write_text(self.source, encoding='utf-8')
    elif suffix in _PICTURES:
      longest = max(self.figure.get_size_inches())
      self.figure.savefig(path, dpi=min(_DPI, _MAX_PIXELS / longest))
    else:
      allowed = ', '.join((*_SOURCES, *_PICTURES))
      raise ValueError(
        f'`path` must end in one of {allowed}, got {str(path)!r}; write for '
        f'instance {str(path.with_suffix(".svg"))!r}'
      )

  def _repr_svg_(self) -> str:
    buffer = io.StringIO()  # For notebooks.
    self.figure.savefig(buffer, format='svg')
    return buffer.getvalue()


def to_dot(spec: spec_lib.GraphSpec) -> str:
  """Graphviz source: inputs left, outputs right, delays on the edges."""
  column = layout_lib.depths(spec)
  lines = [
    'rankdir=LR;',
    'node [shape=box, style="rounded,filled", fontname="Helvetica"];',
    'edge [fontname="Helvetica", fontsize=10];',
    *(
      _dot_rank(rank, ps)
      for rank, ps in (('source', spec.inputs), ('sink', spec.outputs))
      if ps
    ),
    *(_dot_node(p) for p in spec.populations),
    *(_dot_edge(c, column) for c in spec.connections),
  ]
  return 'digraph {\n  ' + '\n  '.join(lines) + '\n}\n'


def figure(spec: spec_lib.GraphSpec) -> 'mpl_figure.Figure':
  """Draws columns from the inputs (left) to the outputs (right).

  Connections with a delay are dashed and labelled with it; where there are too
  many to be labelled, their colour tells it. Columns that are densely connected
  within become rings.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  try:
    import matplotlib.figure
  except ImportError as error:
    raise ImportError(
      "pictures of graphs need matplotlib: pip install 'hkgraph[train]'; "
      '`.source` and `.dot` files do without'
    ) from error
  layout = layout_lib.arrange(spec)
  curves = routes.route(layout, spec.connections)
  left, right, bottom, top = _bounds(layout, curves)
  result = matplotlib.figure.Figure((right - left, top - bottom))
  axes = result.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
  axes.set_axis_off()
  _draw_connections(axes, spec.connections, curves, layout.font)
  for p in spec.populations:
    _draw_population(axes, p, layout.boxes[p.name], layout.font)
  if not _is_labelled(spec.connections):
    _draw_legend(axes, spec.connections, layout.font)
  return result


def _bounds(layout, curves) -> tuple[float, float, float, float]:
  """Left, right, bottom and top of all frames, keys and connections."""
  points = [routes.point(curve, i / 8) for curve in curves for i in range(9)]
  points += [(x, 0.0) for x in (0.0, layout.width)]
  for box in layout.boxes.values():
    points += [(box.x, box.y + s * box.height / 2) for s in (-1, 1)]
  xs, ys = zip(*points, strict=True)
  return (
    min(xs) - _MARGIN,
    max(xs) + _MARGIN,
    min(ys) - _MARGIN,
    max(ys) + _MARGIN,
  )


def _dot_rank(rank: str, populations) -> str:
  names = '; '.join(_quoted(p.name) for p in populations)
  return f'{{rank={rank}; {names}}}'


def _dot_node(p) -> str:
  lines = [p.name, str(p.size)]
  key = p.input_from or p.output_to
  if key and key != p.name:
    lines.append(f'from {key}' if p.kind == 'input' else f'to {key}')
  label = '\\n'.join(_escaped(line.replace('\\', '\\\\')) for line in lines)
  colors = f'fillcolor="{_FILL[p.kind]}", color="{_EDGE[p.kind]}"'
  return f'{_quoted(p.name)} [label="{label}", {colors}];'


def _dot_edge(c, column) -> str:
  options = []
  if c.delay:
    options += [f'label="{c.delay}"', 'style=dashed']
  if column[c.src] >= column[c.dst]:
    options.append('constraint=false')
  tail = f' [{", ".join(options)}]' if options else ''
  return f'{_quoted(c.src)} -> {_quoted(c.dst)}{tail};'


def _quoted(text: str) -> str:
  return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
  """`text` without what would end a quoted string; a newline is a space."""
  return ' '.join(text.splitlines()).replace('"', '\\"')


def _draw_population(axes, p, box: layout_lib.Box, font: float):
  from matplotlib import patches

  corner = (box.x - box.width / 2, box.y - box.height / 2)
  style = f'round,pad=0,rounding_size={box.height / 4}'
  axes.add_patch(
    patches.FancyBboxPatch(
      corner,
      box.width,
      box.height,
      boxstyle=style,
      facecolor=_FILL[p.kind],
      edgecolor=_EDGE[p.kind],
      linewidth=0.8 if font < 8 else 1.2,
      zorder=3,
    )
  )
  options = dict(ha='center', zorder=4, parse_math=False)
  axes.text(
    box.x,
    box.y + 0.03 * box.height,
    p.name,
    va='bottom',
    fontsize=font,
    color=_INK,
    **options,
  )
  axes.text(
    box.x,
    box.y - 0.06 * box.height,
    str(p.size),
    va='top',
    fontsize=0.8 * font,
    color=_EDGE[p.kind],
    **options,
  )
  _draw_key(axes, p, box, font)


def _draw_key(axes, p, box: layout_lib.Box, font: float):
  """The key of the observation left of an input, of an output right of it."""
  key = p.input_from or p.output_to
  if not key or key == p.name:
    return
  sign = -1 if p.kind == 'input' else 1
  axes.text(
    box.x + sign * (box.width / 2 + 0.05),
    box.y,
    f'{key} \u203a' if sign < 0 else f'\u203a {key}',
    ha='right' if sign < 0 else 'left',
    va='center',
    fontsize=0.85 * font,
    style='italic',
    color=_FAINT,
    parse_math=False,
    zorder=4,
  )


def _draw_connections(axes, connections, curves, font: float):
  for c, curve in zip(connections, curves, strict=True):
    _draw_curve(axes, c, curve, len(curves))
    if c.delay and _is_labelled(connections):
      _draw_delay(axes, c, curve, font)


def _is_labelled(connections) -> bool:
  return sum(c.delay > 0 for c in connections) <= _MAX_EDGE_LABELS


def _draw_legend(axes, connections, font: float):
  """Tells delays by colour, in rows below everything else."""
  from matplotlib import lines

  delays = {}
  for delay in sorted({c.delay for c in connections if c.delay}):
    delays.setdefault(_color(delay), []).append(str(delay))
  handles = [
    lines.Line2D([], [], color=color, linestyle='--', label=', '.join(group))
    for color, group in delays.items()
  ]
  (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
  columns = max(1, min(len(handles), int((right - left) / (0.1 * font))))
  rows = -(-len(handles) // columns)
  bottom -= font * (0.025 + 0.02 * rows)
  axes.set_ylim(bottom, top)
  axes.figure.set_size_inches(right - left, top - bottom)
  axes.legend(
    handles=handles,
    title='delay',
    loc='lower center',
    ncols=columns,
    frameon=False,
    fontsize=font,
    title_fontsize=font,
  )


def _color(delay: int) -> str:
  return _DELAYS[(delay - 1) % len(_DELAYS)] if delay else _INK


def _draw_curve(axes, c, curve, count: int):
  from matplotlib import patches, path

  dense = min(1.0, (60 / count) ** 0.5)
  codes = [path.Path.MOVETO] + 3 * [path.Path.CURVE4]
  axes.add_patch(
    patches.FancyArrowPatch(
      path=path.Path(curve, codes),
      arrowstyle='-|>',
      mutation_scale=4 + 6 * dense,
      linewidth=0.4 + 0.8 * dense,
      linestyle=(0, (4, 2)) if c.delay else 'solid',
      color=_color(c.delay),
      alpha=0.25 + 0.65 * dense,
      zorder=2,
    )
  )


def _draw_delay(axes, c, curve, font: float):
  x, y = routes.point(curve, 0.5)
  axes.text(
    x,
    y,
    str(c.delay),
    ha='center',
    va='center',
    fontsize=0.85 * font,
    color=_color(c.delay),
    bbox=dict(boxstyle='circle,pad=0.15', facecolor='white', edgecolor='none'),
    zorder=2.5,
  )
