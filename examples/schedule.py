"""How a graph is cut for execution: words, counts and the picture of a page.

Prints the schedule of a small body, and how many products there are in the
compiled gradient of a small and a large body of the same kinds. The picture
is the one of `schedule.md`.
"""

import argparse
import re

import jax
import jax.numpy as jnp

import hkgraph as hg

_NOW, _LATE, _INK = '#6f675a', '#7b3fa1', '#2b2b2b'
_FREE, _LOOP = ('#dcebf7', '#2f6ea5'), ('#fde6d2', '#c8651b')
_NUM_CELLS = 8


def make_body(parts: int, branch: int = 3) -> hg.GraphSpec:
  """Body parts in a tree; each talks to its parent and to itself."""
  graph = hg.PopulationGraph()
  for i in range(parts):
    graph.add_input(f'in{i}', 16, input_from=f'sense{i}')
    graph.add_population(f'h{i}', 32, activation='jax.nn.swish')
    graph.add_output(f'a{i}', 4)
    graph.add_output(f'v{i}', 1)
    graph.connect(f'in{i}', f'h{i}')
    graph.connect(f'h{i}', f'h{i}', delay=1)
    graph.connect(f'h{i}', f'a{i}')
    graph.connect(f'h{i}', f'v{i}')
    if i:
      parent = f'h{(i - 1) // branch}'
      graph.connect(f'h{i}', parent, delay=1, reciprocal=True)
  return graph.finalize()


def count_products(spec: hg.GraphSpec, num_rows: int = 8, batch: int = 4):
  """Matrix products in the optimised program of a sequence's gradient."""
  network = hg.graph_network(spec)
  x = {
    key: jnp.ones((num_rows, batch, size))
    for key, size in spec.input_sizes.items()
  }
  is_first = jnp.zeros((num_rows, batch), bool)
  row = {key: value[0] for key, value in x.items()}
  params, state = jax.eval_shape(network.init, jax.random.key(0), row)

  def loss(params, state):
    outputs, _ = network.unroll(params, state, None, x, is_first)
    return sum(jnp.mean(jnp.square(y)) for y in outputs.values())

  compiled = jax.jit(jax.grad(loss)).lower(params, state).compile()
  return len(re.findall(r' dot\(', compiled.as_text()))


# The picture.


def _label(plan, bucket) -> str:
  """Members of a bucket, what each reads, and what each gives."""
  width = sum(r.fan_in * plan.groups[r.group].size for r in bucket.reads)
  return f'{len(bucket.members)}x[{width}→{plan.groups[bucket.group].size}]'


def _labels(plan, buckets) -> str:
  return ' and '.join(_label(plan, b) for b in buckets)


def _box(ax, x, y, width, height, colors, text='', size=9):
  from matplotlib import patches

  face, edge = colors
  style = 'round,pad=0,rounding_size=0.06'
  ax.add_patch(
    patches.FancyBboxPatch((x, y), width, height, style, fc=face, ec=edge)
  )
  ax.text(
    x + width / 2, y + height / 2, text, ha='center', va='center', fontsize=size
  )


def _arrow(ax, start, stop, color, bend=0.0, gap=0.0):
  how = {
    'arrowstyle': '-|>',
    'color': color,
    'shrinkA': gap,
    'shrinkB': gap,
    'connectionstyle': f'arc3,rad={bend}',
  }
  ax.annotate('', stop, start, arrowprops=how)


def _draw_declared(ax, spec):
  column = {'in': 0.0, 'h': 1.6, 'a': 3.2, 'v': 3.2}
  place = {}
  for p in spec.populations:
    kind, part = p.name[:-1], int(p.name[-1])
    shift = {'a': 0.22, 'v': -0.22}.get(kind, 0)
    place[p.name] = column[kind], -1.2 * part + shift
  _box(ax, 0.85, -4.2, 1.5, 4.9, ('#fff6ee', _LOOP[1]))
  for c in spec.connections:
    color = _LATE if c.delay else _NOW
    if c.src == c.dst:
      x, y = place[c.src]
      _arrow(ax, (x - 0.12, y + 0.1), (x + 0.12, y + 0.1), color, -2.2)
    else:
      _arrow(ax, place[c.src], place[c.dst], color, 0.45 if c.delay else 0, 12)
  for name, (x, y) in place.items():
    colors = _LOOP if name[0] == 'h' else _FREE
    _box(ax, x - 0.24, y - 0.16, 0.48, 0.32, colors, name)
  ax.text(1.6, -4.55, 'the loop', ha='center', color=_LOOP[1], fontsize=9)
  ax.set(xlim=(-0.4, 3.6), ylim=(-4.8, 0.9))
  ax.set_title('As declared (purple: delay 1)', fontsize=11)


def _draw_stack(ax, group, x, top, colors) -> None:
  for i, name in enumerate(group.names):
    _box(ax, x, top - 0.42 * (i + 1), 0.9, 0.38, colors, name)


def _draw_compiled(ax, plan):
  first, loop, last = plan.blocks
  tops = {first: 'all rows', loop: 'scanned', last: 'all rows'}
  for x, (block, how) in zip((0.0, 2.85, 6.0), tops.items(), strict=True):
    pale = '#fff6ee' if block.is_loop else '#f3f8fd'
    edge = (_LOOP if block.is_loop else _FREE)[1]
    _box(ax, x, -4.2, 1.5, 4.9, (pale, edge))
    number = plan.blocks.index(block)
    text = f'block {number}: {how}'
    ax.text(x + 0.75, -4.55, text, ha='center', color=edge, fontsize=9)
  senses, hidden, actions, values = plan.groups
  _draw_stack(ax, senses, 0.3, -1.0, _FREE)
  _draw_stack(ax, hidden, 3.15, -1.0, _LOOP)
  _draw_stack(ax, actions, 6.3, 0.2, _FREE)
  _draw_stack(ax, values, 6.3, -2.1, _FREE)
  _arrow(ax, (1.25, -1.85), (3.1, -1.85), _NOW)
  for stop in (-0.6, -2.9):
    _arrow(ax, (4.1, -1.85), (6.25, stop), _NOW)
  (arriving,), together = loop.outer, last.outer
  ax.text(2.17, -1.7, _label(plan, arriving), ha='center', fontsize=9)
  sizes = '+'.join(str(plan.groups[b.group].size) for b in together)
  text = f'{len(hidden.names)}x[{hidden.size}→{sizes}]'
  ax.text(5.15, -1.9, text, ha='center', fontsize=9)
  many, few = (_label(plan, bucket) for bucket in loop.inner)
  _arrow(ax, (3.8, -0.98), (3.4, -0.98), _LATE, 1.6)
  ax.text(3.6, -0.2, f'{many}\ninto h1 h2 h3', ha='center', fontsize=9)
  _arrow(ax, (3.4, -2.72), (3.8, -2.72), _LATE, 1.6)
  ax.text(3.6, -3.75, f'{few}\ninto h0', ha='center', fontsize=9)
  ax.set(xlim=(-0.1, 7.6), ylim=(-4.8, 0.9))
  ax.set_title('As cut: one label is one product', fontsize=11)


def _draw_time(ax, plan):
  _, loop, last = plan.blocks
  outer = _labels(plan, loop.outer)
  inner = _labels(plan, loop.inner)
  back = _labels(plan, loop.transposed)
  rows = [
    ('forward: into the loop', f'{outer}, {{}}', 0),
    ('the loop', inner, 1),
    ('read-outs', f'{_labels(plan, last.outer)} as one, {{}}', 0),
    ('backward: read-outs', 'their derivatives, {}', 0),
    ('the loop, transposed', back, -1),
    ('weights of the loop', 'one gradient per member, {}', 0),
    ('weights into the loop', 'one gradient per member, {}', 0),
  ]
  for i, (name, text, direction) in enumerate(rows):
    y = -i - (0.35 if i > 2 else 0)
    ax.text(-0.15, y + 0.35, name, ha='right', va='center', fontsize=10)
    if not direction:
      text = text.format('over all T·B rows at once')
      _box(ax, 0, y, _NUM_CELLS, 0.7, _FREE, text, 10)
      continue
    for t in range(_NUM_CELLS):
      text = f't={t}' if t < _NUM_CELLS - 1 else 't=T-1'
      _box(ax, t + 0.12, y, 0.76, 0.7, _LOOP, text)
      if t:
        ends = (t - 0.15, y + 0.35), (t + 0.15, y + 0.35)
        _arrow(ax, *ends[::direction], _LATE)
    text = rows[i][1].replace(' and ', ' and\n') + ',\nB rows each'
    ax.text(_NUM_CELLS + 0.1, y + 0.35, text, va='center', fontsize=9)
  ax.set(xlim=(-2.1, _NUM_CELLS + 1.5), ylim=(-6.5, 0.9))
  ax.set_title('As run over a sequence, from top to bottom', fontsize=11)


def draw(spec: hg.GraphSpec, path: str) -> None:
  """The graph as declared, as cut and as run."""
  from matplotlib import figure

  plan = spec.schedule()
  picture = figure.Figure(figsize=(10, 8.6), layout='constrained')
  axes = picture.subplot_mosaic(
    [['declared', 'cut'], ['time', 'time']], width_ratios=(2, 3)
  )
  _draw_declared(axes['declared'], spec)
  _draw_compiled(axes['cut'], plan)
  _draw_time(axes['time'], plan)
  for ax in axes.values():
    ax.set_axis_off()
  picture.savefig(path, dpi=90)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='smaller bodies')
  parser.add_argument('--output', default='schedule.png', help='the picture')
  args = parser.parse_args()
  spec = make_body(4)
  print(spec.schedule().describe())
  for parts in (13, 40) if args.quick else (13, 121):
    large = make_body(parts)
    populations, connections = len(large.populations), len(large.connections)
    print(
      f'{populations} populations, {connections} connections: '
      f'{count_products(large)} products in the compiled gradient'
    )
  draw(spec, args.output)
  print(f'picture: {args.output}')


if __name__ == '__main__':
  main()
