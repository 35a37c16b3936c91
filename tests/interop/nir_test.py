"""Graphs in NIR and back, against a simulation of the NIR graph itself."""

import functools
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.modules import leaky

nir = pytest.importorskip('nir')

from hkgraph.interop import nir as hgnir  # noqa: E402

T, B = 12, 2


def _simulate(graph, inputs, dt):
  """Outputs by node of a NIR graph: each node's equation, from its text.

  Args:
    graph: A `nir.NIRGraph`.
    inputs: `[T, B, n]` by name of the `Input` node.
    dt: Length of a step, in which inputs stand still.
  """
  before = {k: [a for a, b in graph.edges if b == k] for k in graph.nodes}

  @functools.cache
  def arriving(name, t):
    return sum((value(x, t) for x in before[name]), np.float64(0))

  @functools.cache
  def value(name, t):
    node = graph.nodes[name]
    kind = type(node).__name__
    if kind == 'Input':
      return np.asarray(inputs[name][t], np.float64) + arriving(name, t)
    if kind == 'Output':
      return arriving(name, t)
    if kind == 'Scale':
      return node.scale * arriving(name, t)
    if kind == 'Linear':
      return arriving(name, t) @ node.weight.T
    if kind == 'Affine':
      return arriving(name, t) @ node.weight.T + node.bias
    if kind == 'Delay':
      past = t - round(float(node.delay[0]) / dt)
      return (
        arriving(name, past) if past >= 0 else np.zeros((B, len(node.delay)))
      )
    assert kind == 'LI'
    # tau v' = (v_leak - v) + r I falls to its rest by exp(-dt / tau).
    rest = node.v_leak + node.r * arriving(name, t)
    v = value(name, t - 1) if t else 0.0
    return rest + (v - rest) * np.exp(-dt / node.tau)

  return {
    k: np.stack([value(k, t) for t in range(T)])
    for k, node in graph.nodes.items()
    if isinstance(node, nir.Output)
  }


def _inputs_of(graph, seed=0):
  rng = np.random.default_rng(seed)
  return {
    k: rng.normal(size=(T, B, *node.input_type['input'])).astype(np.float32)
    for k, node in graph.nodes.items()
    if isinstance(node, nir.Input)
  }


def _keys(graph, kind):
  nodes = {k: v for k, v in graph.nodes.items() if isinstance(v, kind)}
  return {k: (v.metadata or {}).get('key', k) for k, v in nodes.items()}


def _unroll(spec, params, inputs):
  network = hg.graph_network(spec)
  state = hg.NetworkState(carry=network.initial_carry(B), statistics={})
  is_first = jnp.zeros((T, B), bool).at[0].set(True)
  outputs, _ = jax.jit(network.unroll)(params, state, None, inputs, is_first)
  return outputs


def _random_graph(seed):
  """Leaky and linear populations, loops, delays and shared inputs."""
  rng = np.random.default_rng(seed)
  graph = hg.PopulationGraph()
  sizes = rng.integers(1, 5, 5)
  module = leaky.Leaky(dt=0.5, tau=2.0)
  names = [f'p{i}' for i in range(5)]
  for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
    kwargs = {'module': module} if rng.random() < 0.5 else {}
    if i == 0:
      graph.add_input(name, size, input_from='x/1', **kwargs)
    elif i == 1:
      graph.add_input(name, sizes[0], input_from='x/1', **kwargs)
    elif i == 4:
      graph.add_output(name, size, output_to='the arm', **kwargs)
    else:
      graph.add_population(name, size, **kwargs)
  for src, dst in ((0, 2), (1, 2), (2, 3), (3, 4)):
    graph.connect(names[src], names[dst], delay=int(rng.integers(0, 3)))
  for _ in range(5):
    src, dst = rng.integers(0, 5, 2)
    least = int(src >= dst)
    delay = int(rng.integers(least, 4))
    graph.connect(names[src], names[dst], delay=delay)
  return graph.finalize()


def _random_params(spec, seed):
  network = hg.graph_network(spec)
  inputs = {k: jnp.zeros((1, n)) for k, n in spec.input_sizes.items()}
  params, _ = jax.jit(network.init)(jax.random.key(seed), inputs)
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), params
  )


class RoundTripTest(parameterized.TestCase):
  def _write_and_read(self, graph):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder, 'graph.nir')
    nir.write(path, graph)
    return nir.read(path)

  @parameterized.parameters(range(6))
  @pytest.mark.heavy
  def test_random_graphs(self, seed):
    spec = _random_graph(seed)
    params = _random_params(spec, seed)
    graph = self._write_and_read(hgnir.to_nir(spec, params))
    inputs = _inputs_of(graph, seed)
    by_key = {k: inputs[node] for node, k in _keys(graph, nir.Input).items()}
    self.assertEqual(set(by_key), {'x/1'})
    ours = _unroll(spec, params, by_key)

    # What was written means the same.
    dt = 0.5 if any(p.module for p in spec.populations) else 1.0
    for node, theirs in _simulate(graph, inputs, dt).items():
      key = graph.nodes[node].metadata['key']
      np.testing.assert_allclose(ours[key], theirs, rtol=2e-4, atol=2e-5)

    # What is read is the same.
    again, new_params = hgnir.from_nir(graph)
    self.assertEqual(
      [(p.name, p.size, p.input_from, p.output_to) for p in again.populations],
      [(p.name, p.size, p.input_from, p.output_to) for p in spec.populations],
    )
    self.assertEqual(again.connections, spec.connections)
    self.assertEqual(
      [bool(p.module) for p in again.populations],
      [bool(p.module) for p in spec.populations],
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
      new_params,
      params,
    )
    if seed < 2:
      read = _unroll(again, new_params, by_key)
      np.testing.assert_allclose(
        read['the arm'], ours['the arm'], rtol=1e-6, atol=1e-6
      )

  def test_graphs_are_equal_with_default_constants(self):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 2, input_from='eye')
    graph.add_population('soma', 3, module=leaky.Leaky(dt=0.1))
    graph.add_output('arm', 1)
    graph.connect('eye', 'soma', delay=3)
    graph.connect('soma', 'soma', delay=1)
    graph.connect('soma', 'arm')
    spec = graph.finalize()
    params = _random_params(spec, 0)
    written = hgnir.to_nir(spec, params)
    self.assertEqual(written.metadata['dt'], 0.1)
    np.testing.assert_allclose(
      written.nodes['eye-soma-0-delay'].delay, [0.3, 0.3]
    )
    again, new_params = hgnir.from_nir(self._write_and_read(written))
    self.assertEqual(again, spec)
    jax.tree.map(np.testing.assert_array_equal, new_params, params)

  def test_among_other_parameters(self):
    spec = _random_graph(0)
    params = _random_params(spec, 0)
    (core,) = {k.split('/~/')[0] for k in params}
    others = {
      f'b{k}': jax.tree.map(jnp.zeros_like, v) for k, v in params.items()
    }
    written = hgnir.to_nir(spec, params | others, module=f'{core}/~/core')
    expected = hgnir.to_nir(spec, params)
    for name, node in expected.nodes.items():
      for field in ('weight', 'bias', 'tau', 'r'):
        if hasattr(node, field):
          got = getattr(written.nodes[name], field)
          np.testing.assert_array_equal(got, getattr(node, field))


def _affine(rng, size_in, size_out):
  return nir.Affine(
    rng.normal(size=(size_out, size_in)), rng.normal(size=size_out)
  )


def _li(size, tau=3.0):
  return nir.LI(
    tau=np.full(size, tau), r=np.full(size, 2.0), v_leak=np.full(size, 0.5)
  )


def _foreign(name):
  """Graphs as others write them."""
  rng = np.random.default_rng(1)
  if name == 'chain':
    return nir.NIRGraph.from_list(
      _affine(rng, 3, 4), _li(4), nir.Linear(rng.normal(size=(2, 4))), _li(2)
    )
  if name == 'weights in a row':
    return nir.NIRGraph.from_list(
      _affine(rng, 3, 4),
      nir.Scale(rng.normal(size=4)),
      nir.Delay(np.full(4, 2.0)),
      nir.Delay(np.full(4, 1.0)),
      _affine(rng, 4, 2),
    )
  if name == 'edges that meet and part':
    nodes = {
      'input': nir.Input(np.array([2])),
      'other': nir.Input(np.array([2])),
      '0.w': _affine(rng, 2, 2),
      'li': _li(2),
      'class': nir.Delay(np.full(2, 1.0)),
      'output': nir.Output(np.array([2])),
      'second': nir.Output(np.array([2])),
    }
    edges = [
      ('input', '0.w'),
      ('other', '0.w'),
      ('other', 'li'),
      ('class', '0.w'),
      ('0.w', 'li'),
      ('0.w', 'class'),
      ('0.w', 'output'),
      ('li', 'output'),
      ('li', 'second'),
    ]
    return nir.NIRGraph(nodes, edges)
  assert name == 'nothing between'
  nodes = {
    'input': nir.Input(np.array([2])),
    'output': nir.Output(np.array([2])),
  }
  return nir.NIRGraph(nodes, [('input', 'output')])


class ForeignGraphsTest(parameterized.TestCase):
  @parameterized.parameters(
    'chain', 'weights in a row', 'edges that meet and part', 'nothing between'
  )
  def test_means_the_same(self, name):
    graph = _foreign(name)
    inputs = _inputs_of(graph)
    expected = _simulate(graph, inputs, 1.0)
    spec, params = hgnir.from_nir(graph, dt=1.0)
    ours = _unroll(spec, params, inputs)
    self.assertEqual(set(ours), set(expected))
    for key, outputs in expected.items():
      np.testing.assert_allclose(ours[key], outputs, rtol=2e-4, atol=2e-5)

  def test_chain_is_read_without_detours(self):
    spec, _ = hgnir.from_nir(_foreign('chain'), dt=1.0)
    self.assertEqual(spec.order, ('input', 'li', 'li_1'))
    self.assertLen(spec.connections, 2)
    self.assertEqual(spec.population('li_1').output_to, 'output')

  def test_time_step_is_asked_for(self):
    with self.assertRaisesRegex(ValueError, r"`dt` is not .* \['li', 'li_1'\]"):
      hgnir.from_nir(_foreign('chain'))
    with self.assertRaisesRegex(ValueError, '`dt` must be positive'):
      hgnir.from_nir(_foreign('chain'), dt=0)
    with self.assertRaisesRegex(TypeError, "`dt` must be a pos.*, got 'fast'"):
      hgnir.from_nir(_foreign('chain'), dt='fast')
    spec, _ = hgnir.from_nir(_foreign('nothing between'))
    self.assertLen(spec.populations, 2)

  def test_all_faults_are_told_together(self):
    nodes = {
      'input': nir.Input(np.array([2])),
      'spikes': nir.LIF(*(np.ones(2) for _ in range(4))),
      'late': nir.Delay(np.array([1.0, 2.0])),
      'odd': nir.Delay(np.array([0.3, 0.3])),
      'grid': nir.Affine(np.ones((3, 2, 2)), np.ones((3, 2))),
      'output': nir.Output(np.array([2])),
    }
    names = list(nodes)
    edges = list(zip(names[:-1], names[1:], strict=True))
    graph = nir.NIRGraph(nodes, edges, type_check=False)
    with self.assertRaises(hg.GraphError) as raised:
      hgnir.from_nir(graph, dt=1.0)
    faults = '\n'.join(raised.exception.faults)
    self.assertLen(raised.exception.faults, 4)
    for part in (
      "'spikes' is a nir.LIF",
      "'late' delays neurons differently",
      "'odd' has the delay 0.3, which is no multiple of dt=1.0",
      r"'grid' must have a weight [out, in], got shape (3, 2, 2)",
    ):
      self.assertIn(part, faults)

  def test_edges_of_no_node_and_nodes_of_no_size(self):
    nodes = {
      'input': nir.Input(np.array([2])),
      'empty': nir.Delay(np.array([])),
      'output': nir.Output(np.array([2])),
    }
    edges = [('input', 'output'), ('input', 'lost'), ('empty', 'output')]
    graph = nir.NIRGraph(nodes, edges, type_check=False)
    with self.assertRaises(hg.GraphError) as raised:
      hgnir.from_nir(graph, dt=1.0)
    edge, size = raised.exception.faults
    self.assertIn("'input' to 'lost' names 'lost', which is no node", edge)
    self.assertIn("'empty' must have a shape of one axis, of size 1", size)

  def test_loop_without_delay(self):
    nodes = {
      'input': nir.Input(np.array([2])),
      'a': _li(2),
      'w': nir.Linear(np.ones((2, 2))),
      'output': nir.Output(np.array([2])),
    }
    edges = [('input', 'a'), ('a', 'w'), ('w', 'a'), ('a', 'output')]
    with self.assertRaisesRegex(hg.GraphError, 'a -> a'):
      hgnir.from_nir(nir.NIRGraph(nodes, edges), dt=1.0)

  def test_what_leads_nowhere(self):
    nodes = {
      'input': nir.Input(np.array([2])),
      'w': nir.Linear(np.ones((3, 2))),
      'u': nir.Linear(np.ones((2, 2))),
      'output': nir.Output(np.array([2])),
    }
    edges = [('input', 'w'), ('w', 'output'), ('u', 'output')]
    graph = nir.NIRGraph(nodes, edges, type_check=False)
    with self.assertRaises(hg.GraphError) as raised:
      hgnir.from_nir(graph)
    self.assertRegex(
      raised.exception.faults[0], "'output' of size 2 has .*3, 2"
    )
    self.assertIn("node 'u' is not reached", raised.exception.faults[1])
    with self.assertRaisesRegex(TypeError, 'must be a nir.NIRGraph'):
      hgnir.from_nir(nodes)


class RefusedTest(absltest.TestCase):
  def test_all_faults_are_told_together(self):
    graph = hg.PopulationGraph()
    graph.add_population('lost', 2)
    graph.add_population('a', 2, activation='jax.nn.swish')
    graph.add_population('b', 2, module=hg.Population)
    graph.add_population('c', 2, module=leaky.Leaky(dt=1.0))
    graph.add_population('d', 2, module=leaky.Leaky(dt=2.0))
    graph.add_output('out', 2)
    graph.connect('a', 'b')
    graph.connect('b', 'a', delay=1, transform=lambda: hk.Linear(2))
    graph.connect('c', 'd', reciprocal=True, delay=1)
    graph.connect('d', 'out')
    with self.assertRaises(hg.GraphError) as raised:
      hgnir.to_nir(graph.finalize(), {})
    faults = '\n'.join(raised.exception.faults)
    for part in (
      'NIR needs an input',
      "'a' has an activation, jax.nn.swish",
      "'b' is a hkgraph.graph.core.Population",
      "'d' has dt=2.0, but a step is 1.0",
      "nothing feeds 'lost'",
      "nothing reads 'lost'",
      "connection 0 from 'b' to 'a' has the transform",
    ):
      self.assertIn(part, faults)
    self.assertLen(raised.exception.faults, 7)

  def test_wrong_arguments(self):
    with self.assertRaisesRegex(TypeError, 'must be a GraphSpec'):
      hgnir.to_nir(hg.PopulationGraph(), {})
    spec = _random_graph(0)
    with self.assertRaisesRegex(ValueError, '`dt` must be positive'):
      hgnir.to_nir(spec, {}, dt=-1)
    with self.assertRaisesRegex(ValueError, 'no module of the parameters'):
      hgnir.to_nir(spec, {})


if __name__ == '__main__':
  absltest.main()
