"""Tests for `hkgraph.graph.drawing`."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized
import hypothesis
from matplotlib import figure as mpl_figure
from matplotlib import patches

from hkgraph.graph import builder, drawing
from tests.graph import random_graphs

_KEY = 'a "b" \\N\n{c|d} $x_1$ é'
_DOT_STRING = r'"(?:[^"\\]|\\.)*"'
_DOT_OPTION = rf'\w+=(?:{_DOT_STRING}|\w+)'
_DOT_LINE = re.compile(
  rf"""(?x)
  \{{rank=(?P<rank>\w+);\ (?P<ranked>{_DOT_STRING}(?:;\ {_DOT_STRING})*)\}}
  | (?P<src>{_DOT_STRING})(?:\ ->\ (?P<dst>{_DOT_STRING}))?
    (?:\ \[(?P<options>{_DOT_OPTION}(?:,\ {_DOT_OPTION})*)\])?;
  | (?:rankdir=LR|(?:node|edge)\ \[.*\]);
  """
)


def _graph():
  graph = builder.PopulationGraph()
  graph.add_input('in_x', 8, input_from=_KEY)
  graph.add_population('node', 32)  # A keyword of Graphviz.
  graph.add_output('action_params', 4)
  graph.add_output('value', 1, output_to='v')
  graph.connect('in_x', 'node')
  graph.connect('node', 'node', delay=1)
  graph.connect('node', 'action_params')
  graph.connect('node', 'value', delay=12)
  return graph.finalize()


def _large(count=60):
  graph = builder.PopulationGraph()
  graph.add_output('y', 1)
  for i in range(count):
    graph.add_population(f'h{i}', 1)
    graph.connect(f'h{i}', f'h{(i + 1) % count}', delay=1 + i % 9)
    graph.connect(f'h{i}', 'y')
  return graph.finalize()


def _parsed(source):
  """Fields of the lines of a Graphviz source, each of known form."""
  head, *lines, tail, end = source.split('\n')
  assert (head, tail, end) == ('digraph {', '}', '')
  found = [_DOT_LINE.fullmatch(line.strip()) for line in lines]
  assert all(found), source
  return [f.groupdict() for f in found]


class DotTest(parameterized.TestCase):
  def test_edges(self):
    rows = [row for row in _parsed(drawing.to_dot(_graph())) if row['dst']]
    self.assertEqual(
      [(row['src'], row['dst'], row['options']) for row in rows],
      [
        ('"in_x"', '"node"', None),
        ('"node"', '"action_params"', None),
        ('"node"', '"node"', 'label="1", style=dashed, constraint=false'),
        ('"node"', '"value"', 'label="12", style=dashed'),
      ],
    )

  def test_inputs_left_and_outputs_right(self):
    source = drawing.to_dot(_graph())
    self.assertIn('rankdir=LR;', source)
    ranks = {r['rank']: r['ranked'] for r in _parsed(source) if r['rank']}
    self.assertEqual(
      ranks, {'source': '"in_x"', 'sink': '"action_params"; "value"'}
    )

  def test_labels(self):
    labels = {
      row['src']: re.search(f'label=({_DOT_STRING})', row['options'])[1]
      for row in _parsed(drawing.to_dot(_graph()))
      if row['src'] and not row['dst']
    }
    self.assertEqual(
      labels,
      {
        '"in_x"': r'"in_x\n8\nfrom a \"b\" \\N {c|d} $x_1$ é"',
        '"node"': r'"node\n32"',
        '"action_params"': r'"action_params\n4"',
        '"value"': r'"value\n1\nto v"',
      },
    )

  @hypothesis.given(random_graphs.specs())
  def test_random_graphs(self, graph):
    rows = _parsed(drawing.to_dot(graph))
    edges = [row for row in rows if row['dst']]
    nodes = [row for row in rows if row['src'] and not row['dst']]
    self.assertLen(edges, len(graph.connections))
    self.assertLen(nodes, len(graph.populations))


class FigureTest(parameterized.TestCase):
  def _parts(self, graph):
    (axes,) = drawing.figure(graph).axes
    arrows = [p for p in axes.patches if isinstance(p, patches.FancyArrowPatch)]
    frames = [p for p in axes.patches if isinstance(p, patches.FancyBboxPatch)]
    return axes, frames, arrows

  def test_parts(self):
    axes, frames, arrows = self._parts(_graph())
    self.assertLen(frames, 4)
    self.assertLen(arrows, 4)
    self.assertCountEqual(
      [text.get_text() for text in axes.texts],
      [
        *('in_x', 'node', 'action_params', 'value'),
        *('8', '32', '4', '1'),
        *(f'{_KEY} \u203a', '\u203a v'),
        *('1', '12'),  # The delays.
      ],
    )
    formulas = [t for t in axes.texts if _KEY in t.get_text()]
    self.assertEqual([t.get_parse_math() for t in formulas], [False])

  def test_delayed_connections_are_dashed(self):
    _, _, arrows = self._parts(_graph())
    styles = [arrow.get_linestyle() for arrow in arrows]
    # In canonical order of the connections.
    self.assertEqual(
      [style == 'solid' for style in styles], [True, True, False, False]
    )

  def test_everything_is_within_the_picture(self):
    axes, frames, arrows = self._parts(_graph())
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    width, height = axes.figure.get_size_inches()
    self.assertAlmostEqual(width, right - left)
    self.assertAlmostEqual(height, top - bottom)
    canvas = axes.figure.bbox
    for artist in (*frames, *arrows, *axes.texts):
      box = artist.get_window_extent()
      self.assertGreaterEqual(min(box.x0 - canvas.x0, box.y0 - canvas.y0), 0)
      self.assertGreaterEqual(min(canvas.x1 - box.x1, canvas.y1 - box.y1), 0)

  def test_many_delays_are_told_by_colour(self):
    graph = _large()
    axes, frames, arrows = self._parts(graph)
    self.assertLen(frames, 61)
    self.assertLen(arrows, 120)
    self.assertLen(axes.texts, 2 * 61)  # No delay among them.
    legend = axes.get_legend()
    self.assertEqual(legend.get_title().get_text(), 'delay')
    # Nine delays and eight colours: the ninth shares the first's.
    self.assertEqual(
      [text.get_text() for text in legend.get_texts()],
      ['1, 9', '2', '3', '4', '5', '6', '7', '8'],
    )

  def test_few_delays_need_no_legend(self):
    axes, _, _ = self._parts(_graph())
    self.assertIsNone(axes.get_legend())

  @hypothesis.given(random_graphs.specs())
  def test_random_graphs(self, graph):
    _, frames, arrows = self._parts(graph)
    self.assertLen(frames, len(graph.populations))
    self.assertLen(arrows, len(graph.connections))

  def test_names_the_extra(self):
    with (
      mock.patch.dict(sys.modules, {'matplotlib.figure': None}),
      self.assertRaisesRegex(ImportError, r"pip install 'hkgraph\[train\]'"),
    ):
      drawing.figure(_graph())

  def test_touches_no_screen(self):
    code = (
      'import sys; from hkgraph.graph import builder; '
      'g = builder.PopulationGraph(); g.add_output("a", 1); '
      'g.connect("a", "a", delay=1); d = g.finalize().draw(); '
      'assert "matplotlib" not in sys.modules; d.figure; '
      'assert "matplotlib.pyplot" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


class DrawingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._folder = pathlib.Path(folder.name)

  @parameterized.parameters('graph.dot', 'graph.gv', 'graph.DOT')
  def test_saves_source(self, name):
    picture = drawing.Drawing(_graph())
    picture.save(self._folder / name)
    saved = (self._folder / name).read_text(encoding='utf-8')
    self.assertEqual(saved, drawing.to_dot(_graph()))

  @parameterized.parameters(
    ('graph.png', b'\x89PNG'), ('graph.svg', b'<?xml'), ('graph.pdf', b'%PDF')
  )
  def test_saves_pictures(self, name, magic):
    drawing.Drawing(_graph()).save(str(self._folder / name))
    self.assertStartsWith((self._folder / name).read_bytes(), magic)

  def test_saves_large_pictures(self):
    drawing.Drawing(_large()).save(self._folder / 'graph.png')
    header = (self._folder / 'graph.png').read_bytes()[16:24]
    width, height = (int.from_bytes(b) for b in (header[:4], header[4:]))
    self.assertBetween(max(width, height), 1000, 2400)

  @parameterized.parameters('graph.jpeg', 'graph', 'graph.dot.txt')
  def test_refuses_other_suffixes(self, name):
    with self.assertRaisesRegex(ValueError, r'\.dot, \.gv, \.png.*\.svg'):
      drawing.Drawing(_graph()).save(self._folder / name)
    self.assertEmpty(list(self._folder.iterdir()))

  def test_is_made_once(self):
    picture = _graph().draw()
    self.assertIs(picture.figure, picture.figure)
    self.assertIsInstance(picture.figure, mpl_figure.Figure)
    self.assertIs(picture.source, picture.source)

  def test_is_immutable(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      _graph().draw().spec = None

  def test_shows_itself_in_notebooks(self):
    self.assertEndsWith(ET.fromstring(_graph().draw()._repr_svg_()).tag, 'svg')


if __name__ == '__main__':
  absltest.main()
