"""Tests for `hkgraph.graph.routes`."""

from absl.testing import absltest, parameterized
import hypothesis

from hkgraph.graph import builder, layout, routes
from tests.graph import random_graphs


def _graph():
  """A row `a b c d`, every population but the input with a loop."""
  graph = builder.PopulationGraph()
  graph.add_input('a', 1, input_from='x')
  graph.add_population('b', 1)
  graph.add_population('c', 1)
  graph.add_output('d', 1)
  for src, dst in ('ab', 'bc', 'cd', 'ac', 'bd', 'bd', 'ad'):
    graph.connect(src, dst)
  for src, dst in ('bb', 'bb', 'cb', 'db', 'da'):
    graph.connect(src, dst, delay=1)
  return graph.finalize()


def _routed(graph):
  arranged = layout.arrange(graph)
  curves = routes.route(arranged, graph.connections)
  return arranged.boxes, list(zip(graph.connections, curves, strict=True))


def _is_inside(box, point, slack=0.0):
  x, y = point
  return (
    abs(x - box.x) <= box.width / 2 + slack
    and abs(y - box.y) <= box.height / 2 + slack
  )


class RoutesTest(parameterized.TestCase):
  def test_point(self):
    curve = ((0.0, 0.0), (0.0, 4.0), (8.0, 4.0), (8.0, 0.0))
    self.assertEqual(routes.point(curve, 0), (0.0, 0.0))
    self.assertEqual(routes.point(curve, 1), (8.0, 0.0))
    # At the middle: (p0 + 3 p1 + 3 p2 + p3) / 8.
    self.assertEqual(routes.point(curve, 0.5), (4.0, 3.0))

  @hypothesis.given(random_graphs.specs(max_populations=15))
  def test_curves_join_the_frames_of_their_ends(self, graph):
    boxes, routed = _routed(graph)
    self.assertLen(routed, len(graph.connections))
    for c, curve in routed:
      self.assertTrue(_is_inside(boxes[c.src], curve[0], 1e-6))
      self.assertTrue(_is_inside(boxes[c.dst], curve[3], 1e-6))

  def test_run_over_no_other_population(self):
    boxes, routed = _routed(_graph())
    for c, curve in routed:
      others = [b for n, b in boxes.items() if n not in (c.src, c.dst)]
      for i in range(101):
        point = routes.point(curve, i / 100)
        self.assertFalse(any(_is_inside(b, point) for b in others), c)

  def test_every_connection_has_a_curve_of_its_own(self):
    _, routed = _routed(_graph())
    middles = {routes.point(curve, 0.5) for _, curve in routed}
    self.assertLen(middles, len(routed))

  def test_reciprocal_pair_is_two_curves(self):
    graph = builder.PopulationGraph()
    graph.add_input('x', 1, input_from='x')
    graph.add_output('y', 1)
    for name in ('b', 'c'):
      graph.add_population(name, 1)
      graph.connect('x', name)
      graph.connect(name, 'y')
    graph.connect('b', 'c', delay=1, reciprocal=True)
    boxes, routed = _routed(graph.finalize())
    middles = {
      c.src: routes.point(curve, 0.5)[0] for c, curve in routed if c.delay
    }
    self.assertEqual(boxes['b'].x, boxes['c'].x)
    self.assertGreater(middles['b'], boxes['b'].x + boxes['b'].width / 2)
    self.assertLess(middles['c'], boxes['b'].x - boxes['b'].width / 2)

  def test_loops_stand_above(self):
    boxes, routed = _routed(_graph())
    tops = [routes.point(v, 0.5)[1] for c, v in routed if c.src == c.dst]
    self.assertLen(tops, 2)
    self.assertGreater(tops[0], boxes['b'].y + boxes['b'].height)
    self.assertGreater(tops[1], tops[0])


if __name__ == '__main__':
  absltest.main()
