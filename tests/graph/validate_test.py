"""Tests for `hkgraph.graph.validate`: faults of whole graphs, by their text."""

import pickle

from absl.testing import absltest, parameterized

from hkgraph.graph import builder, validate


def _graph():
  """`eye -> arm`, without a fault."""
  graph = builder.PopulationGraph()
  graph.add_input('eye', 8, input_from='pixels')
  graph.add_output('arm', 2)
  graph.connect('eye', 'arm')
  return graph


def _faults(graph):
  try:
    graph.finalize()
  except validate.GraphError as error:
    return error.faults
  return ()


class GraphFaultsTest(parameterized.TestCase):
  def test_none(self):
    self.assertEqual(_faults(_graph()), ())

  def test_no_population(self):
    (fault,) = _faults(builder.PopulationGraph())
    self.assertStartsWith(fault, 'the graph has no population; call add_input(')

  def test_no_output(self):
    graph = builder.PopulationGraph()
    graph.add_population('brain', 4)
    self.assertEqual(
      _faults(graph),
      (
        'the graph has no output; call add_output(name, size) and '
        'connect(src, name)',
      ),
    )

  def test_unknown_population_with_a_near_name(self):
    graph = _graph()
    graph.connect('eye', 'amr', delay=2)
    self.assertEqual(
      _faults(graph),
      (
        "connect('eye', 'amr', delay=2) names 'amr', which is no population "
        "(did you mean 'arm'?); connect another one or call "
        "add_population('amr', size)",
      ),
    )

  def test_unknown_population_is_told_once(self):
    graph = _graph()
    graph.connect('quux', 'quux', delay=1)
    graph.connect('quux', 'arm', delay=1, reciprocal=True)
    (fault,) = _faults(graph)
    self.assertStartsWith(
      fault,
      "connect('arm', 'quux', delay=1) and 2 more names 'quux', which is no "
      'population; connect',
    )

  @parameterized.parameters(
    ([('arm', 'arm', 0)], 'arm -> arm', ('arm', 'arm')),
    ([('arm', 'eye', 0)], 'arm -> eye -> arm', ('eye', 'arm')),
    (
      [('arm', 'b10', 0), ('b10', 'b2', 0), ('b2', 'arm', 0)],
      'arm -> b10 -> b2 -> arm',
      ('b2', 'arm'),
    ),
    # The short way round, though there is a long one.
    (
      [('b2', 'b10', 0), ('b10', 'b2', 0), ('b10', 'arm', 0), ('arm', 'b2', 0)],
      'arm -> b2 -> b10 -> arm',
      ('b10', 'arm'),
    ),
  )
  def test_cycle_without_delay(self, connections, path, mended):
    graph = _graph()
    for name in ('b2', 'b10'):
      graph.add_population(name, 4)
    for src, dst, delay in connections:
      graph.connect(src, dst, delay=delay)
    src, dst = mended
    self.assertEqual(
      _faults(graph),
      (
        f'connections without delay form a cycle: {path}; give one of them a '
        f"delay: connect('{src}', '{dst}', delay=1)",
      ),
    )

  def test_every_loop_is_told_once(self):
    graph = _graph()
    for a, b in (('m', 'n'), ('p', 'q')):
      graph.add_population(a, 4)
      graph.add_population(b, 4)
      graph.connect(a, b, reciprocal=True)
      graph.connect(a, a)
    faults = _faults(graph)
    self.assertLen(faults, 2)
    self.assertIn('m -> m;', faults[0])
    self.assertIn('p -> p;', faults[1])

  def test_cycle_with_a_delay_is_none(self):
    graph = _graph()
    graph.connect('arm', 'eye', delay=1)
    graph.connect('arm', 'arm', delay=1)
    self.assertEqual(_faults(graph), ())

  def test_outputs_of_one_key(self):
    graph = _graph()
    graph.add_output('leg', 2, output_to='arm')
    graph.connect('eye', 'leg')
    self.assertEqual(
      _faults(graph),
      (
        "outputs 'arm' and 'leg' both write the key 'arm'; give one another "
        "key: add_output('leg', 2, output_to='arm_2')",
      ),
    )

  def test_output_that_is_not_connected(self):
    graph = _graph()
    graph.add_output('leg', 2)
    graph.connect('leg', 'eye', delay=1)  # Going out does not count.
    self.assertEqual(
      _faults(graph),
      ("output 'leg' has no incoming connection; call connect(src, 'leg')",),
    )

  def test_inputs_of_unlike_sizes_on_one_key(self):
    graph = _graph()
    graph.add_input('lens', 7, input_from='pixels')
    self.assertEqual(
      _faults(graph),
      (
        "inputs of unlike sizes read the key 'pixels': 'eye' (size 8), 'lens' "
        '(size 7); give all the size of the observation: '
        "add_input('lens', 8, input_from='pixels')",
      ),
    )

  def test_all_are_told_together(self):
    graph = _graph()
    graph.add_output('leg', 2, output_to='arm')
    graph.add_input('lens', 7, input_from='pixels')
    graph.connect('arm', 'eye')
    graph.connect('eye', 'ear')
    with self.assertRaises(ValueError) as caught:
      graph.finalize()
    faults = caught.exception.faults
    self.assertLen(faults, 5)
    message = str(caught.exception)
    self.assertStartsWith(message, 'the graph has 5 faults:\n  * ')
    for fault, start in zip(
      faults,
      ('connect', 'connections', 'inputs', 'outputs', 'output'),
      strict=True,
    ):
      self.assertStartsWith(fault, f'{start} ' if start != 'connect' else start)
      self.assertIn(f'\n  * {fault}', message)

  def test_error_survives_pickling(self):
    error = validate.GraphError(['one', 'two'])
    copy = pickle.loads(pickle.dumps(error))
    self.assertEqual(copy.faults, ('one', 'two'))
    self.assertEqual(str(copy), 'the graph has 2 faults:\n  * one\n  * two')


class NaturalKeyTest(absltest.TestCase):
  def test_digits_count_as_numbers(self):
    names = ['h10', 'h2', 'l_1', 'l', 'l_0', 'h', 'h02', 'h2b', 'h2_1']
    self.assertEqual(
      sorted(names, key=validate.natural_key),
      ['h', 'h02', 'h2', 'h2_1', 'h2b', 'h10', 'l', 'l_0', 'l_1'],
    )


if __name__ == '__main__':
  absltest.main()
