"""Graphs of nnx-ppo, there and here, on the real package."""

import os
import tempfile

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

# ruff: noqa: E402
nnx_ppo_graph = pytest.importorskip('nnx_ppo.networks.graph.graph')

from flax import nnx
from nnx_ppo.networks import delay, feedforward, recurrent
import orbax.checkpoint as ocp

from hkgraph import network as network_lib
from hkgraph.graph import builder, parameters, validate
from hkgraph.interop import nnx_ppo

NUM_ROWS, BATCH = 30, 3


def declare(seed, make):
  """A random graph: several inputs and outputs, loops, parallel edges."""
  rng = np.random.default_rng(seed)
  activations = (None, nnx.tanh, nnx.swish, jnp.sin)
  inputs = [f'in_{i}' for i in range(rng.integers(1, 4))]
  hidden = [f'h_{i}' for i in range(rng.integers(0, 7))]
  outputs = [f'out_{i}' for i in range(rng.integers(1, 4))]
  names = inputs + hidden + outputs
  graph = make()

  def sizes():
    return {
      'size': int(rng.integers(1, 6)),
      'activation': activations[rng.integers(len(activations))],
    }

  def connect(src, dst, least, reciprocal=False):
    graph.connect(
      src, dst, delay=int(rng.integers(least, 9)), reciprocal=reciprocal
    )

  # In an order that is not that of their names.
  for i in rng.permutation(len(names)):
    name = names[i]
    if name in inputs:
      graph.add_input(name, **sizes(), input_from=f'x_{name}')
    elif name in hidden:
      graph.add_population(name, **sizes())
    else:
      key = f'y_{name}' if rng.integers(2) else None
      graph.add_output(name, **sizes(), output_to=key)
  for name in outputs:
    connect(str(rng.choice(inputs + hidden)), name, 0)
  for _ in range(rng.integers(4, 20)):
    i, j = rng.integers(len(names), size=2)
    connect(names[i], names[j], 0 if i < j else 1)
  connect(*rng.choice(names, size=2, replace=False), 1, reciprocal=True)
  graph.finalize()
  return graph


def make_graph(seed, biased=True):
  graph = declare(seed, lambda: nnx_ppo_graph.PopulationGraph(nnx.Rngs(seed)))
  if biased:  # Biases begin at 0, where an error would not show.
    for i, connection in enumerate(graph.connections):
      bias = connection.transform.linear.bias
      key = jax.random.fold_in(jax.random.key(seed), i)
      bias.set_value(jax.random.normal(key, bias.get_value().shape))
  return graph


def rows_of(spec, seed):
  rng = np.random.default_rng(seed + 1000)
  inputs = {
    key: rng.standard_normal((NUM_ROWS, BATCH, size)).astype(np.float32)
    for key, size in spec.input_sizes.items()
  }
  is_first = rng.random((NUM_ROWS, BATCH)) < 0.15
  is_first[0] = True
  return inputs, is_first


def run_there(graph, inputs, is_first):
  """Steps as nnx-ppo does, which resets after the last row of an episode."""

  def where(condition, x, y):
    shape = condition.shape + (1,) * (x.ndim - 1)
    return jnp.where(condition.reshape(shape), x, y)

  graphdef, variables = nnx.split(graph)

  @jax.jit
  def step(state, row):
    inputs, is_first = row
    module = nnx.merge(graphdef, variables)
    fresh = module.reset_state(state)
    state = jax.tree.map(lambda x, y: where(is_first, x, y), fresh, state)
    out = module(state, inputs)
    return out.next_state, out.output

  with jax.numpy_rank_promotion('allow'):
    state = graph.initialize_state(BATCH)
    return jax.lax.scan(step, state, (inputs, is_first))[1]


def run_here(spec, params, inputs, is_first):
  network = network_lib.graph_network(spec)
  first = jax.tree.map(lambda x: x[0], inputs)
  _, state = network.init(jax.random.key(0), first)
  return jax.jit(network.unroll)(params, state, None, inputs, is_first)[0]


class ImportTest(parameterized.TestCase):
  @parameterized.parameters(range(20))
  def test_equal_weights_give_equal_outputs(self, seed):
    graph = make_graph(seed)
    spec, params = nnx_ppo.from_population_graph(graph)
    inputs, is_first = rows_of(spec, seed)
    there = run_there(graph, inputs, is_first)
    here = run_here(spec, params, inputs, is_first)
    chex.assert_trees_all_close(here, there, atol=1e-5, rtol=1e-5)
    self.assertGreater(max(np.abs(y).max() for y in there.values()), 0.1)

  @parameterized.parameters(0, 7)
  def test_step_by_step(self, seed):
    graph = make_graph(seed)
    spec, params = nnx_ppo.from_population_graph(graph)
    inputs, is_first = rows_of(spec, seed)
    network = network_lib.graph_network(spec)
    first = jax.tree.map(lambda x: x[0], inputs)
    _, state = network.init(jax.random.key(0), first)
    apply, outputs = jax.jit(network.apply), []
    for t in range(NUM_ROWS):
      row = jax.tree.map(lambda x: x[t], inputs)  # noqa: B023
      output, state = apply(params, state, None, row, is_first[t])
      outputs.append(output)
    chex.assert_trees_all_close(
      jax.tree.map(lambda *x: jnp.stack(x), *outputs),
      run_there(graph, inputs, is_first),
      atol=1e-5,
      rtol=1e-5,
    )

  def test_weights_go_to_their_connections(self):
    graph = nnx_ppo_graph.PopulationGraph(nnx.Rngs(0))
    graph.add_output('b', 3)
    graph.add_input('a', 3, input_from='x')
    # Three from a to b: told apart by their delay, else by the order.
    for d in (2, 0, 2):
      graph.connect('a', 'b', delay=d)
    graph.finalize()
    spec, params = nnx_ppo.from_population_graph(graph)
    table = parameters.connection_params(spec, params)
    self.assertEqual([c.delay for c in spec.connections], [0, 2, 2])
    for index, there in enumerate((1, 0, 2)):
      kernel = graph.connections[there].transform.linear.kernel
      np.testing.assert_array_equal(
        table['a', 'b', index]['w'], kernel.get_value()
      )

  def test_public_activations_are_known_by_name(self):
    graph = nnx_ppo_graph.PopulationGraph(nnx.Rngs(0))
    graph.add_input('a', 3, input_from='x', activation=nnx.relu)
    graph.add_output('b', 3, activation=nnx.swish)
    graph.connect('a', 'b')
    graph.finalize()
    spec, _ = nnx_ppo.from_population_graph(graph)
    self.assertIn('jax.nn.swish', spec.to_json())

  def test_dense_with_an_activation_and_without_a_bias(self):
    rngs = nnx.Rngs(3)
    graph = nnx_ppo_graph.PopulationGraph(rngs)
    graph.add_input('a', 3, input_from='x')
    graph.add_output('b', 4, activation=nnx.tanh)
    dense = feedforward.Dense
    graph.connect('a', 'b', delay=1)
    graph.connect('a', 'b', transform=dense(3, 4, rngs, activation=nnx.relu))
    graph.connect('a', 'b', transform=dense(3, 4, rngs, use_bias=False))
    graph.connect('b', 'b', transform=dense(4, 4, rngs, jnp.sin), delay=2)
    graph.finalize()
    spec, params = nnx_ppo.from_population_graph(graph)
    inputs, is_first = rows_of(spec, 0)
    chex.assert_trees_all_close(
      run_here(spec, params, inputs, is_first),
      run_there(graph, inputs, is_first),
      atol=1e-5,
    )

  def test_to_a_policy(self):
    graph = make_graph(2)
    spec, params = nnx_ppo.from_population_graph(graph)
    network = network_lib.transform(
      lambda x: network_lib.core.Graph(spec, name='body')(x)
    )
    inputs, is_first = rows_of(spec, 2)
    first = jax.tree.map(lambda x: x[0], inputs)
    theirs, state = network.init(jax.random.key(0), first)
    theirs = parameters.replace_connection_params(
      spec, theirs, parameters.connection_params(spec, params)
    )
    outputs, _ = network.unroll(theirs, state, None, inputs, is_first)
    chex.assert_trees_all_close(
      outputs, run_there(graph, inputs, is_first), atol=1e-5, rtol=1e-5
    )


class CheckpointTest(parameterized.TestCase):
  """Weights of another graph of the same structure, in many forms."""

  def assert_taken(self, graph, arrays):
    spec, params = nnx_ppo.from_population_graph(graph, arrays)
    expected_spec, expected = nnx_ppo.from_population_graph(make_graph(5))
    self.assertEqual(spec, expected_spec)
    chex.assert_trees_all_equal(params, expected)

  def test_state(self):
    other = make_graph(5, biased=False)
    self.assert_taken(other, nnx.state(make_graph(5)))
    self.assert_taken(other, nnx.state(make_graph(5), nnx.Param))

  def test_nested_dicts(self):
    state = nnx.state(make_graph(5), nnx.Param)
    self.assert_taken(make_graph(5, biased=False), nnx.to_pure_dict(state))

  def test_structure_in_our_words(self):
    ours = _Unfinished(5)
    self.assert_taken(ours, nnx.to_pure_dict(nnx.state(make_graph(5))))

  def test_graph_inside_of_a_network(self):
    rngs = nnx.Rngs(0)
    layers = [feedforward.Dense(2, 2, rngs), make_graph(5)]
    module = nnx.List(layers)
    self.assert_taken(make_graph(5, biased=False), nnx.state(module))
    twice = nnx.List([make_graph(5), make_graph(5)])
    with self.assertRaisesRegex(ValueError, r"several graphs, at \['0', '1'\]"):
      nnx_ppo.from_population_graph(make_graph(5), nnx.state(twice))

  def test_checkpoint_without_a_template(self):
    state = nnx.state(make_graph(5), nnx.Param)
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, 'networks')
      checkpointer = ocp.StandardCheckpointer()
      checkpointer.save(path, state)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(path)
      checkpointer.close()
    self.assert_taken(make_graph(5, biased=False), restored)
    self.assert_taken(_Unfinished(5), restored)


def _Unfinished(seed):  # noqa: N802
  class Graph(builder.PopulationGraph):
    def finalize(self):
      return self

  return declare(seed, Graph)


class WayBackTest(parameterized.TestCase):
  @parameterized.parameters(0, 5, 11)
  def test_round_trip(self, seed):
    spec, params = nnx_ppo.from_population_graph(make_graph(seed))
    graph = nnx_ppo.to_population_graph(spec, params, rngs=nnx.Rngs(1))
    inputs, is_first = rows_of(spec, seed)
    chex.assert_trees_all_close(
      run_there(graph, inputs, is_first),
      run_here(spec, params, inputs, is_first),
      atol=1e-5,
      rtol=1e-5,
    )
    again, params_again = nnx_ppo.from_population_graph(graph)
    self.assertEqual(again, spec)
    chex.assert_trees_all_equal(params_again, params)

  def test_dense_with_an_activation(self):
    graph = builder.PopulationGraph()
    graph.add_input('a', 3, input_from='x')
    graph.add_output('b', 3)
    graph.connect('a', 'b', transform=nnx_ppo.DenseTransform(3, jnp.tanh))
    spec = graph.finalize()
    network = network_lib.graph_network(spec)
    inputs, is_first = rows_of(spec, 0)
    params, _ = network.init(jax.random.key(0), {'x': inputs['x'][0]})
    there = nnx_ppo.to_population_graph(spec, params, rngs=nnx.Rngs(0))
    chex.assert_trees_all_close(
      run_there(there, inputs, is_first),
      run_here(spec, params, inputs, is_first),
      atol=1e-6,
    )

  def test_what_nnx_ppo_cannot_say(self):
    graph = builder.PopulationGraph()
    graph.add_input('a', 3, input_from='x')
    graph.add_output('b', 3, module=network_lib.core.Population)
    graph.connect('a', 'b', transform=lambda: abs)
    with self.assertRaises(validate.GraphError) as caught:
      nnx_ppo.to_population_graph(graph.finalize(), {}, rngs=nnx.Rngs(0))
    self.assertLen(caught.exception.faults, 2)
    self.assertRegex(str(caught.exception), "population 'b' has a module")
    self.assertRegex(str(caught.exception), 'a -> b, index 0, has a transform')


class RefusalTest(parameterized.TestCase):
  def test_all_faults_together_by_name(self):
    rngs = nnx.Rngs(0)
    graph = nnx_ppo_graph.PopulationGraph(rngs)
    graph.add_input('the eye', 3, input_from='x')
    graph.add_population('lstm', 3, activation=nnx.BatchNorm(3, rngs=rngs))
    graph.add_output('arm', 3)
    shared = feedforward.Dense(3, 3, rngs)
    half = feedforward.Dense(3, 3, rngs, dtype=jnp.bfloat16)
    cell = recurrent.LSTM(3, 3, rngs)
    late = delay.Delay(jnp.zeros(3), 2)
    for transform in (shared, shared, half, cell, late):
      graph.connect('lstm', 'arm', transform=transform)
    graph.finalize()
    with self.assertRaises(validate.GraphError) as caught:
      nnx_ppo.from_population_graph(graph)
    patterns = (
      "population 'the eye': `name` must be an identifier",
      "population 'lstm' has the module BatchNorm for an activation",
      'connection 1, lstm -> arm, shares its transform with connection 0',
      'connection 2, lstm -> arm, computes in bfloat16',
      'connection 3, lstm -> arm, has a LSTM for a transform; only Dense',
      'connection 4, lstm -> arm, has a Delay for a transform; only Dense',
    )
    self.assertLen(caught.exception.faults, len(patterns))
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)

  def test_what_only_nnx_ppo_allows(self):
    graph = nnx_ppo_graph.PopulationGraph(nnx.Rngs(0))
    graph.add_population('a', 3)
    graph.add_output('b', 3, output_to='y')
    graph.add_output('c', 3, output_to='y')
    graph.connect('a', 'b', transform=recurrent.LSTM(3, 3, nnx.Rngs(0)))
    graph.finalize()
    with self.assertRaises(validate.GraphError) as caught:
      nnx_ppo.from_population_graph(graph)
    text = str(caught.exception)
    self.assertLen(caught.exception.faults, 4)
    for pattern in (
      "both write the key 'y'",
      "output 'c' has no incoming connection",
      'the graph has no input',
      'a -> b, has a LSTM',
    ):
      self.assertRegex(text, pattern)

  def test_arrays_of_another_graph(self):
    graph = nnx_ppo_graph.PopulationGraph(nnx.Rngs(0))
    graph.add_input('a', 3, input_from='x')
    graph.add_output('b', 2)
    graph.connect('a', 'b')
    graph.connect('a', 'b', delay=1)
    graph.finalize()
    arrays = nnx.to_pure_dict(nnx.state(graph, nnx.Param))
    linear = arrays['connections'][0]['transform']['linear']
    linear['kernel'] = jnp.zeros((2, 3))
    linear['bias'] = jnp.zeros(2, jnp.bfloat16)
    del arrays['connections'][1]['transform']['linear']['bias']
    arrays['connections'][7] = arrays['connections'][0]
    with self.assertRaises(validate.GraphError) as caught:
      nnx_ppo.from_population_graph(graph, arrays)
    self.assertEqual(
      caught.exception.faults,
      (
        'connections.0.transform.linear.kernel (a -> b) must have shape '
        '(3, 2), got (2, 3)',
        'connections.0.transform.linear.bias (a -> b) must be float32, got '
        'bfloat16; cast it',
        'connections.1.transform.linear.bias (a -> b) is missing from `arrays`',
        '`arrays` holds the connections [7], but the graph has 2',
      ),
    )

  def test_other_things(self):
    ours = _Unfinished(0)
    with self.assertRaisesRegex(ValueError, 'has no weights: give `arrays`'):
      nnx_ppo.from_population_graph(ours)
    with self.assertRaisesRegex(TypeError, 'must be a PopulationGraph of nnx'):
      nnx_ppo.from_population_graph({})
    with self.assertRaisesRegex(ValueError, r'call graph.finalize\(\) first'):
      nnx_ppo.from_population_graph(nnx_ppo_graph.PopulationGraph(nnx.Rngs(0)))
    with self.assertRaisesRegex(ValueError, r"holds no graph.*\['layers'\]"):
      nnx_ppo.from_population_graph(ours, {'layers': {'w': jnp.ones(2)}})


if __name__ == '__main__':
  absltest.main()
