"""Tests for `hkgraph.graph.spec`."""

import copy
import dataclasses
import pathlib
import pickle
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp

from hkgraph.graph import builder, spec, validate
from tests.graph import declarations, random_graphs


def tutorial():
  graph = builder.PopulationGraph()
  graph.add_input('in_x', 8, input_from='x')
  graph.add_population('hidden', 32, activation=jax.nn.swish)
  graph.add_output('action_params', 4, output_to='action')
  graph.add_output('value', 1)
  graph.connect('in_x', 'hidden')
  graph.connect('hidden', 'hidden', delay=1)
  graph.connect('hidden', 'action_params')
  graph.connect('hidden', 'value', delay=3)
  return graph.finalize()


def linear():
  return hk.Linear(4)


class GraphSpecTest(parameterized.TestCase):
  def test_canonical_order(self):
    p, c = spec.PopulationSpec, spec.ConnectionSpec
    graph = spec.GraphSpec(
      [p('h10', 1, output_to='y'), p('l_0', 1), p('h2', 1), p('l', 1)],
      [
        c('l', 'h10', 2),
        c('h10', 'h2', 1, index=7),
        c('h2', 'h10', 1),
        c('l', 'h10', 0),
        c('h2', 'l_0', 0),
        c('l', 'h10', 2),
      ],
    )
    names = [p.name for p in graph.populations]
    self.assertEqual(names, ['h2', 'h10', 'l', 'l_0'])
    rows = [dataclasses.astuple(c) for c in graph.connections]
    self.assertEqual(
      rows,
      [
        ('h2', 'h10', 1, None, 0),
        ('h2', 'l_0', 0, None, 0),
        ('h10', 'h2', 1, None, 0),
        ('l', 'h10', 0, None, 0),
        ('l', 'h10', 2, None, 1),
        ('l', 'h10', 2, None, 2),
      ],
    )

  def test_canonical_order_is_a_fixed_point(self):
    graph = tutorial()
    again = spec.GraphSpec(graph.populations[::-1], graph.connections[::-1])
    self.assertEqual(graph, again)

  def test_refuses_faults_however_it_is_made(self):
    graph = tutorial()
    with self.assertRaisesRegex(validate.GraphError, "'hidden'"):
      dataclasses.replace(graph, populations=graph.populations[:1])
    with self.assertRaisesRegex(validate.GraphError, "'value_2'"):
      dataclasses.replace(
        graph, populations=(*graph.populations, graph.populations[-1])
      )

  def test_population_is_no_input_and_output(self):
    with self.assertRaisesRegex(ValueError, 'make two populations'):
      spec.PopulationSpec('a', 1, input_from='x', output_to='y')

  def test_population(self):
    graph = tutorial()
    self.assertEqual(
      graph.population('hidden'),
      spec.PopulationSpec('hidden', 32, activation=jax.nn.swish),
    )

  @parameterized.parameters('population', 'incoming', 'outgoing')
  def test_unknown_name(self, method):
    with self.assertRaisesRegex(ValueError, r"'hiden'.*mean 'hidden'\?"):
      getattr(tutorial(), method)('hiden')

  def test_inputs_and_outputs(self):
    graph = tutorial()
    self.assertEqual([p.name for p in graph.inputs], ['in_x'])
    self.assertEqual([p.output_to for p in graph.outputs], ['action', 'value'])
    kinds = [p.kind for p in graph.populations]
    self.assertEqual(kinds, ['output', 'population', 'input', 'output'])

  def test_incoming_and_outgoing(self):
    graph = tutorial()
    sources = [c.src for c in graph.incoming('hidden')]
    readers = [c.dst for c in graph.outgoing('hidden')]
    self.assertEqual(sources, ['hidden', 'in_x'])
    self.assertEqual(readers, ['action_params', 'hidden', 'value'])
    self.assertEqual(graph.incoming('in_x'), ())

  def test_history_lengths(self):
    self.assertEqual(
      tutorial().history_lengths,
      {'action_params': 0, 'hidden': 3, 'in_x': 0, 'value': 0},
    )

  def test_input_sizes(self):
    self.assertEqual(tutorial().input_sizes, {'x': 8})

  def test_num_parameters(self):
    graph = tutorial()
    # in_x and the loop into hidden, then the two read-outs.
    into_hidden = (8 + 1) * 32 + (32 + 1) * 32
    expected = into_hidden + (32 + 1) * 4 + (32 + 1) * 1
    self.assertEqual(graph.num_parameters, expected)
    self.assertEqual(graph.num_parameters_into('hidden'), into_hidden)
    self.assertEqual(graph.num_parameters_into('in_x'), 0)

  def test_transforms_do_not_count_as_parameters(self):
    graph = tutorial()
    custom = spec.ConnectionSpec('in_x', 'action_params', transform=linear)
    more = dataclasses.replace(graph, connections=(*graph.connections, custom))
    self.assertEqual(more.num_parameters, graph.num_parameters)

  @hypothesis.given(random_graphs.specs())
  def test_order_is_topological(self, graph):
    rank = {name: i for i, name in enumerate(graph.order)}
    self.assertCountEqual(graph.order, [p.name for p in graph.populations])
    for c in graph.connections:
      if c.delay == 0:
        self.assertLess(rank[c.src], rank[c.dst])

  def test_order_breaks_ties_by_name(self):
    graph = builder.PopulationGraph()
    for name in ('h10', 'h9', 'b'):
      graph.add_population(name, 1)
      graph.connect(name, 'a')
    graph.add_output('a', 1)
    self.assertEqual(graph.finalize().order, ('b', 'h9', 'h10', 'a'))

  def test_is_immutable(self):
    graph = tutorial()
    with self.assertRaises(dataclasses.FrozenInstanceError):
      graph.populations = ()
    with self.assertRaises(dataclasses.FrozenInstanceError):
      graph.populations[0].size = 3
    with self.assertRaises(dataclasses.FrozenInstanceError):
      graph.connections[0].delay = 3
    with self.assertRaises(TypeError):
      graph.history_lengths['hidden'] = 0
    with self.assertRaises(TypeError):
      graph.input_sizes['x'] = 0
    self.assertIsInstance(graph.populations, tuple)
    self.assertIsInstance(graph.connections, tuple)

  @parameterized.parameters(
    ('populations', 0, {'size': 5}),
    ('populations', 0, {'output_to': 'torque'}),
    ('populations', 1, {'activation': jnp.tanh}),
    ('populations', 1, {'module': object}),
    ('populations', 2, {'input_from': 'y'}),
    ('connections', 1, {'delay': 2}),
    ('connections', 1, {'transform': linear}),
    ('connections', 0, {'src': 'in_x'}),
  )
  def test_any_difference_counts(self, field, index, change):
    graph = tutorial()
    items = list(getattr(graph, field))
    items[index] = dataclasses.replace(items[index], **change)
    other = dataclasses.replace(graph, **{field: tuple(items)})
    self.assertNotEqual(graph, other)
    self.assertNotEqual(graph.digest(), other.digest())

  def test_equal_graphs_are_one_key(self):
    self.assertLen({tutorial(): 1, tutorial(): 2}, 1)

  @parameterized.parameters(
    copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))
  )
  def test_copies(self, copied):
    graph = tutorial()
    graph.digest(), graph.order, graph.history_lengths, hash(graph)
    other = copied(graph)
    self.assertEqual(other, graph)
    self.assertEqual(hash(other), hash(graph))
    self.assertEqual(other.digest(), graph.digest())
    self.assertIs(other.population('hidden').activation, jax.nn.swish)

  def test_pickle_keeps_custom_callables(self):
    graph = tutorial()
    custom = spec.ConnectionSpec('in_x', 'action_params', transform=linear)
    more = dataclasses.replace(graph, connections=(*graph.connections, custom))
    self.assertEqual(pickle.loads(pickle.dumps(more)), more)

  def test_digest_is_the_same_in_another_process(self):
    code = (
      'import sys; from hkgraph.graph import spec; '
      'print(spec.GraphSpec.from_json(sys.stdin.read()).digest(), end="")'
    )
    graph = builder.PopulationGraph()
    for name in ('a', 'b', 'l', 'l_0'):
      graph.add_output(name, 1)
      graph.connect(name, 'a', delay=2)
      graph.connect('a', name, delay=1)
    graph = graph.finalize()
    digest = subprocess.run(
      [sys.executable, '-c', code],
      input=graph.to_json(),
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    self.assertEqual(digest, graph.digest())
    self.assertRegex(digest, '^[0-9a-f]{16}$')

  def test_repr_is_short(self):
    graph = tutorial()
    self.assertEqual(
      repr(graph),
      f"GraphSpec(4 populations, 4 connections, digest='{graph.digest()}')",
    )

  def test_draw(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'graph.dot')
      drawing = tutorial().draw(path)
      self.assertEqual(path.read_text(), drawing.source)

  @hypothesis.given(declarations.calls())
  def test_names_do_not_clash(self, calls):
    graph = declarations.declare(calls)
    keys = {(c.src, c.dst, c.index) for c in graph.connections}
    self.assertLen(keys, len(graph.connections))


if __name__ == '__main__':
  absltest.main()
