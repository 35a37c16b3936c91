"""Tests for `hkgraph.graph.layout`."""

from absl.testing import absltest, parameterized
import hypothesis

from hkgraph.graph import builder, layout
from tests.graph import random_graphs


def _graph(inputs, hidden, outputs, connections):
  graph = builder.PopulationGraph()
  for name in inputs:
    graph.add_input(name, 1, input_from=name)
  for name in hidden:
    graph.add_population(name, 1)
  for name in outputs:
    graph.add_output(name, 1)
  for src, dst, delay in connections:
    graph.connect(src, dst, delay=delay)
  return graph.finalize()


def _ring(count):
  """Populations that are all fed, and each feeds the next three."""
  hidden = [f'h{i}' for i in range(count)]
  connections = [('x', h, 0) for h in hidden] + [('h0', 'y', 0)]
  connections += [
    (hidden[i], hidden[(i + k) % count], 1)
    for i in range(count)
    for k in (1, 2, 3)
  ]
  return _graph('x', hidden, 'y', connections)


class DepthsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      'chain of delays',
      'a',
      'bc',
      'd',
      [('a', 'b', 1), ('b', 'c', 2), ('c', 'd', 3)],
      dict(a=0, b=1, c=2, d=3),
    ),
    (
      'loop entered at its beginning',
      'a',
      'bcd',
      'e',
      [
        ('a', 'b', 0),
        ('b', 'c', 1),
        ('c', 'd', 1),
        ('d', 'b', 1),
        ('d', 'e', 0),
      ],
      dict(a=0, b=1, c=2, d=3, e=4),
    ),
    (
      'loop entered everywhere',
      'a',
      'bc',
      'd',
      [
        ('a', 'b', 0),
        ('a', 'c', 0),
        ('b', 'c', 1),
        ('c', 'b', 1),
        ('b', 'd', 0),
      ],
      dict(a=0, b=1, c=1, d=2),
    ),
    (
      'delay 0 leads to the right within a loop',
      'a',
      'bc',
      'd',
      [
        ('a', 'b', 0),
        ('a', 'c', 0),
        ('b', 'c', 0),
        ('c', 'b', 1),
        ('b', 'd', 0),
      ],
      dict(a=0, b=1, c=2, d=3),
    ),
    (
      'feedback from an output into an input',
      'a',
      '',
      'd',
      [('a', 'd', 0), ('d', 'a', 1)],
      dict(a=0, d=1),
    ),
    (
      'outputs share the last column',
      'a',
      'b',
      'de',
      [('a', 'b', 0), ('b', 'd', 0), ('a', 'e', 0)],
      dict(a=0, b=1, d=2, e=2),
    ),
    (
      'no input',
      '',
      'b',
      'd',
      [('b', 'b', 1), ('b', 'd', 0)],
      dict(b=0, d=1),
    ),
  )
  def test_columns(self, inputs, hidden, outputs, connections, expected):
    graph = _graph(inputs, hidden, outputs, connections)
    self.assertEqual(layout.depths(graph), expected)

  @hypothesis.given(random_graphs.specs())
  def test_ends(self, graph):
    depth = layout.depths(graph)
    self.assertCountEqual(depth, [p.name for p in graph.populations])
    self.assertEqual(set(depth.values()), set(range(max(depth.values()) + 1)))
    for p in graph.populations:
      self.assertEqual(depth[p.name] == 0, p.kind == 'input')
      last = depth[p.name] == max(depth.values())
      self.assertEqual(last, p.kind == 'output')


class ArrangeTest(parameterized.TestCase):
  def _assert_apart(self, boxes):
    boxes = list(boxes)
    for i, a in enumerate(boxes):
      for b in boxes[:i]:
        beside = abs(a.x - b.x) > (a.width + b.width) / 2
        above = abs(a.y - b.y) > (a.height + b.height) / 2
        self.assertTrue(beside or above, (a, b))

  @hypothesis.given(random_graphs.specs(max_populations=40))
  def test_frames_do_not_overlap(self, graph):
    self._assert_apart(layout.arrange(graph).boxes.values())

  @parameterized.parameters(9, 30, 100)
  def test_ring(self, count):
    arranged = layout.arrange(_ring(count))
    hidden = [b for n, b in arranged.boxes.items() if n.startswith('h')]
    self.assertLen({b.hub for b in hidden}, 1)
    self.assertIsNone(arranged.boxes['x'].hub)
    (hub_x, hub_y) = hidden[0].hub
    radii = [(b.x - hub_x) ** 2 + (b.y - hub_y) ** 2 for b in hidden]
    self.assertAlmostEqual(min(radii), max(radii))
    self._assert_apart(arranged.boxes.values())

  def test_few_populations_are_no_ring(self):
    boxes = layout.arrange(_ring(8)).boxes
    self.assertEqual({b.hub for b in boxes.values()}, {None})

  def test_long_columns_are_folded(self):
    outputs = [f'y{i}' for i in range(96)]
    graph = _graph('x', '', outputs, [('x', y, 0) for y in outputs])
    boxes = layout.arrange(graph).boxes
    self.assertLen({b.x for n, b in boxes.items() if n != 'x'}, 96 // 24)
    self.assertEqual({b.column for n, b in boxes.items() if n != 'x'}, {1})
    self._assert_apart(boxes.values())

  def test_columns_go_to_the_right(self):
    chain = [('a', 'b', 0), ('b', 'c', 1), ('c', 'd', 0)]
    boxes = layout.arrange(_graph('a', 'bc', 'd', chain)).boxes
    xs = [boxes[n].x for n in 'abcd']
    self.assertEqual(xs, sorted(set(xs)))

  def test_neighbours_face_each_other(self):
    # Sorted by name, all these lines would cross.
    pairs = [(f'a{i}', f'b{9 - i}', 0) for i in range(10)]
    graph = _graph(
      [a for a, _, _ in pairs], '', [b for _, b, _ in pairs], pairs
    )
    boxes = layout.arrange(graph).boxes
    for a, b, _ in pairs:
      self.assertAlmostEqual(boxes[a].y, boxes[b].y)

  def test_many_populations_have_small_labels(self):
    fonts = [layout.arrange(_ring(n)).font for n in (10, 30, 60)]
    self.assertEqual(fonts, [10, 8, 6])


if __name__ == '__main__':
  absltest.main()
