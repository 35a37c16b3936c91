"""Tests for `hkgraph.graph.text`: JSON and the table."""

import dataclasses
import json

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
import jax.numpy as jnp

from hkgraph.graph import builder, spec, validate
from tests.graph import declarations, random_graphs


def _graph():
  graph = builder.PopulationGraph()
  graph.add_input('eye', 8, input_from='camera "left"\n\\é')
  graph.add_population('brain', 32, activation='jax.nn.swish')
  graph.add_output('arm', 2, output_to='action')
  graph.add_output('value', 1)
  graph.connect('eye', 'brain')
  graph.connect('brain', 'brain', delay=1)
  graph.connect('brain', 'arm')
  graph.connect('brain', 'value', delay=20)
  return graph.finalize()


def _edited(**changes):
  """The graph's JSON with dotted fields changed; None removes one."""
  document = json.loads(_graph().to_json())
  for path, value in changes.items():
    *parents, last = path.split('__')
    node = document
    for parent in parents:
      node = node[int(parent) if isinstance(node, list) else parent]
    if value is None:
      del node[last]
    else:
      node[last] = value
  return json.dumps(document)


def linear():
  return hk.Linear(2)


class JsonTest(parameterized.TestCase):
  def test_is_for_people_too(self):
    lines = _graph().to_json().splitlines()
    self.assertIn(
      '    {"name": "brain", "size": 32, "activation": "jax.nn.swish"},', lines
    )
    self.assertIn('    {"src": "brain", "dst": "value", "delay": 20},', lines)
    self.assertIn('  "format": "hkgraph.graph",', lines)
    self.assertIn('  "version": 1,', lines)

  def test_round_trip(self):
    graph = _graph()
    copy = spec.GraphSpec.from_json(graph.to_json())
    self.assertEqual(copy, graph)
    self.assertEqual(copy.digest(), graph.digest())
    self.assertEqual(copy.to_json(), graph.to_json())
    self.assertEqual(copy.inputs[0].input_from, 'camera "left"\n\\é')

  @hypothesis.given(random_graphs.specs())
  def test_round_trip_of_random_graphs(self, graph):
    self.assertEqual(spec.GraphSpec.from_json(graph.to_json()), graph)

  @hypothesis.given(declarations.calls())
  def test_round_trip_of_names_that_look_alike(self, calls):
    graph = declarations.declare(calls)
    self.assertEqual(spec.GraphSpec.from_json(graph.to_json()), graph)

  def test_order_in_the_file_has_no_effect(self):
    document = json.loads(_graph().to_json())
    document['populations'].reverse()
    document['connections'].reverse()
    text = json.dumps(document, indent=1)
    self.assertEqual(spec.GraphSpec.from_json(text), _graph())

  def test_graph_without_connections_between_hidden(self):
    graph = builder.PopulationGraph()
    graph.add_output('a', 1)
    graph.connect('a', 'a', delay=1)
    graph = graph.finalize()
    self.assertEqual(spec.GraphSpec.from_json(graph.to_json()), graph)

  def test_names_what_cannot_be_written(self):
    graph = _graph()
    populations = [
      dataclasses.replace(p, activation=lambda x: x, module=hk.Module)
      if p.name == 'brain'
      else p
      for p in graph.populations
    ]
    connections = (
      *graph.connections,
      spec.ConnectionSpec('brain', 'arm', transform=linear),
    )
    with self.assertRaises(ValueError) as caught:
      spec.GraphSpec(populations, connections).to_json()
    message = str(caught.exception)
    self.assertRegex(message, "population 'brain' has activation .*<lambda>;")
    self.assertRegex(message, "population 'brain' has module haiku.*Module;")
    self.assertIn(
      f"connection 1 from 'brain' to 'arm' has transform {__name__}.linear.",
      message,
    )
    self.assertNotIn("'eye'", message)

  def test_writes_names_of_callables(self):
    graph = _graph()
    populations = [
      dataclasses.replace(p, activation=jnp.tanh) for p in graph.populations
    ]
    text = dataclasses.replace(graph, populations=populations).to_json()
    self.assertEqual(text.count('"activation": "jax.numpy.tanh"'), 4)

  @parameterized.parameters(
    ('', 'no JSON'),
    ('{', 'no JSON'),
    ('[' * 100_000, 'no JSON'),
    ('{"version": 1, "version": 1}', 'given twice'),
    ('[]', 'format None'),
    ('{}', 'format None'),
    (_edited(format='gml'), "format 'gml'"),
    (_edited(version=None), '"version" must be 1, got None'),
    (_edited(version=2), '"version" must be 1, got 2.*later hkgraph'),
    (_edited(version='1'), '"version" must be 1'),
    (_edited(version=True), '"version" must be 1'),
    (_edited(connections=None), "'connections' is missing"),
    (_edited(connections={}), '"connections" must be a list'),
    (_edited(conections=[]), "'conections'.*mean 'connections'"),
  )
  def test_refuses_documents(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      spec.GraphSpec.from_json(text)

  def test_refuses_what_is_no_text(self):
    with self.assertRaisesRegex(TypeError, 'string'):
      spec.GraphSpec.from_json({'format': 'hkgraph.graph'})

  # In the file: arm, brain, eye, value; brain->arm, brain->brain, ...
  @parameterized.parameters(
    ({'populations__1__name': 'my brain'}, r'populations\[1\].*identifier'),
    ({'populations__1__name': None}, r"populations\[1\].*'name' is missing"),
    ({'populations__1__size': 0}, r'populations\[1\].*positive integer, got 0'),
    ({'populations__1__size': 2.0}, 'positive integer, got 2.0'),
    ({'populations__1__size': True}, 'positive integer, got True'),
    ({'populations__1__size': 'x'}, "positive integer, got 'x'"),
    ({'populations__1__sise': 4}, "unknown field 'sise'.*mean 'size'"),
    ({'populations__1__module': 'os.system'}, "unknown field 'module'"),
    ({'populations__1__activation': 'os.system'}, 'name of a function in jax'),
    ({'populations__1__activation': 3}, '`activation` must be a name'),
    ({'populations__1__input_from': ''}, '`input_from`'),
    ({'populations__2__output_to': 'y'}, 'make two populations'),
    ({'populations__3__output_to': 'action'}, 'both write the key'),
    ({'populations': []}, 'no population'),
    ({'populations': ['brain']}, r'populations\[0\].*must be an object'),
    ({'connections__1__delay': -1}, r'connections\[1\].*non-negative.*-1'),
    ({'connections__1__delay': 1.5}, 'non-negative integer, got 1.5'),
    ({'connections__1__delay': True}, 'non-negative integer, got True'),
    ({'connections__1__delay': 0}, 'brain -> brain'),
    ({'connections__1__transform': 'x'}, "unknown field 'transform'"),
    ({'connections__1__src': 'brian'}, "'brian'.*mean 'brain'"),
    ({'connections__1__src': 7}, '`src` must be a string'),
    ({'connections__1__dst': None}, "'dst' is missing"),
    ({'connections': []}, 'no incoming connection'),
  )
  def test_refuses_faults(self, changes, message):
    with self.assertRaisesRegex(validate.GraphError, message):
      spec.GraphSpec.from_json(_edited(**changes))

  def test_tells_all_faults(self):
    text = _edited(
      populations__0__size=0, populations__1__size=-1, connections__0__delay=-1
    )
    with self.assertRaises(validate.GraphError) as caught:
      spec.GraphSpec.from_json(text)
    self.assertLen(caught.exception.faults, 3)


class SummaryTest(absltest.TestCase):
  def _table(self, graph):
    head, line, *rows = graph.summary().splitlines()
    widths = [len(column) for column in line.split('  ')]
    table = []
    for row in [head, *rows[:-2]]:
      cells, at = [], 0
      for width in widths:
        cells.append(row[at : at + width].strip())
        at += width + 2
      table.append(cells)
    return table, rows[-2:]

  def test_table(self):
    graph = builder.PopulationGraph()
    graph.add_input('eye', 8, input_from='pixels')
    graph.add_population('brain', 32, activation='jax.nn.swish')
    graph.add_output('arm', 2, output_to='action')
    graph.connect('eye', 'brain')
    graph.connect('brain', 'brain', delay=5)
    graph.connect('brain', 'arm', transform=linear)
    graph.connect('brain', 'arm')
    graph = graph.finalize()
    table, (blank, totals) = self._table(graph)
    into_brain = f'{(8 + 1) * 32 + (32 + 1) * 32:,}'
    self.assertEqual(
      table,
      [
        [
          'population',
          'size',
          'activation',
          'in',
          'out',
          'history length',
          'parameters',
        ],
        ['eye', '8', '-', "'pixels'", 'brain', '0', '0'],
        [
          'brain',
          '32',
          'jax.nn.swish',
          'brain @5, eye',
          'arm, arm, brain @5',
          '5',
          into_brain,
        ],
        ['arm', '2', '-', 'brain, brain', "'action'", '0', '66+'],
      ],
    )
    self.assertEqual(blank, '')
    self.assertEqual(
      totals,
      '3 populations, 4 connections, 1,410 parameters (+ those of 1 custom '
      f'transform and 0 custom populations); digest {graph.digest()}',
    )

  def test_many_ends_are_counted(self):
    graph = builder.PopulationGraph()
    graph.add_output('out', 1)
    for i in range(12):
      graph.add_population(f'h{i}', 1)
      graph.connect(f'h{i}', 'out')
    table, _ = self._table(graph.finalize())
    self.assertEqual(table[-1][3], 'h0, h1, h2, 9 more')


if __name__ == '__main__':
  absltest.main()
