"""The executor against the interpreter, and against cases with answers."""

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.graph import builder, core, parameters
from tests.graph import interpreter, random_graphs


def _chain(delay, *, size=1, loop=None):
  """Input to output over one connection, both the identity."""
  graph = builder.PopulationGraph()
  graph.add_input('a', size, input_from='x')
  graph.add_output('b', size)
  graph.connect('a', 'b', delay=delay)
  if loop is not None:
    graph.connect('b', 'b', delay=loop)
  return graph.finalize()


def _identity_params(spec, params):
  table = parameters.connection_params(spec, params)
  size = {p.name: p.size for p in spec.populations}
  return parameters.replace_connection_params(
    spec,
    params,
    {
      key: {
        'w': np.eye(size[key.src], size[key.dst]),
        'b': np.zeros_like(v['b']),
      }
      for key, v in table.items()
    },
  )


def _sequence(values):
  return np.asarray(values, np.float32).reshape(-1, 1, 1)


def _first(num_rows, rows):
  is_first = np.zeros((num_rows, 1), bool)
  is_first[list(rows)] = True
  return is_first


def _loop(network, params, state, inputs, is_first):
  """`apply` row by row."""
  rows = []
  apply = jax.jit(network.apply)
  for t in range(is_first.shape[0]):
    row = jax.tree.map(lambda x, t=t: x[t], inputs)
    out, state = apply(params, state, None, row, is_first[t])
    rows.append(out)
  return jax.tree.map(lambda *x: jnp.stack(x), *rows), state


def _settings(max_examples):
  # One test, inherited by a class for each path.
  return hypothesis.settings(
    max_examples=max_examples,
    suppress_health_check=[hypothesis.HealthCheck.differing_executors],
  )


class OnAPath(parameterized.TestCase):
  """Cases that hold on both paths; subclasses name theirs."""

  path = 'grouped'

  def network(self, spec, **kwargs):
    return network_lib.graph_network(spec, path=self.path, **kwargs)

  def outputs(self, spec, x, is_first, how):
    network = self.network(spec)
    params, state = network.init(jax.random.key(0), {'x': x[0]})
    params = _identity_params(spec, params)
    if how == 'unroll':
      unroll = jax.jit(network.unroll)
      return unroll(params, state, None, {'x': x}, is_first)[0]
    return _loop(network, params, state, {'x': x}, is_first)[0]


class DelayTest(OnAPath):
  """Case D."""

  @parameterized.parameters('apply', 'unroll')
  @pytest.mark.heavy
  def test_impulse_and_resets(self, how):
    for delay, first, expected in [
      (2, [0], [0, 0, 1, 2, 3, 4]),
      (2, [0, 3], [0, 0, 1, 0, 0, 4]),
      (1, [0], [0, 1, 2, 3, 4, 5]),
      (3, [0], [0, 0, 0, 1, 2, 3]),
      (0, [0, 3], [1, 2, 3, 4, 5, 6]),
      (20, [0], [0] * 6),
    ]:
      spec = _chain(delay)
      got = self.outputs(spec, _sequence(range(1, 7)), _first(6, first), how)
      np.testing.assert_array_equal(got['b'][:, 0, 0], expected)

  @parameterized.parameters('apply', 'unroll')
  def test_two_delays_of_one_source(self, how):
    graph = builder.PopulationGraph()
    graph.add_input('a', 1, input_from='x')
    for delay in (1, 3):
      graph.add_output(f'late_{delay}', 1)
      graph.connect('a', f'late_{delay}', delay=delay)
    got = self.outputs(
      graph.finalize(), _sequence(range(1, 7)), _first(6, [0]), how
    )
    np.testing.assert_array_equal(got['late_1'][:, 0, 0], [0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(got['late_3'][:, 0, 0], [0, 0, 0, 1, 2, 3])

  @parameterized.product(how=['apply', 'unroll'], delay=[0, 1, 2, 3, 20])
  def test_impulse_arrives_at_its_step(self, how, delay):
    x = np.zeros((45, 1, 1), np.float32)
    x[0] = 1
    spec = _chain(delay)
    got = self.outputs(spec, x, _first(45, [0]), how)['b'][:, 0, 0]
    self.assertEqual(np.flatnonzero(got).tolist(), [delay])
    if delay:
      spec = _chain(0, loop=delay)
      got = self.outputs(spec, x, _first(45, [0]), how)['b'][:, 0, 0]
      np.testing.assert_array_equal(
        np.flatnonzero(got), np.arange(0, 45, delay)
      )
      got = self.outputs(_two_cycle(delay), x, _first(45, [0]), how)['b'][
        :, 0, 0
      ]
      np.testing.assert_array_equal(
        np.flatnonzero(got), np.arange(0, 45, delay)
      )

  @parameterized.parameters('apply', 'unroll')
  def test_two_cycle_counts(self, how):
    x = np.ones((4, 1, 1), np.float32)
    got = self.outputs(_two_cycle(1), x, _first(4, [0]), how)
    np.testing.assert_array_equal(got['b'][:, 0, 0], [1, 2, 3, 4])


def _two_cycle(delay):
  graph = builder.PopulationGraph()
  graph.add_input('a', 1, input_from='x')
  graph.add_output('b', 1)
  graph.connect('a', 'b')
  graph.connect('b', 'a', delay=delay)
  return graph.finalize()


def _linear(size):
  return lambda: hk.Linear(size)


def _bent(size):
  return lambda: hk.Sequential([hk.Linear(size), jnp.sin])


def _in_numpy(spec, table):
  """What `_linear` and `_bent` compute, by connection."""

  def make(weights, bend):
    (w,) = (np.asarray(v) for k, v in weights.items() if k.endswith('w'))
    (b,) = (np.asarray(v) for k, v in weights.items() if k.endswith('b'))
    return lambda x: bend(x @ w + b)

  transforms = {}
  for c in spec.connections:
    if c.transform is not None:
      bends = c.transform.__qualname__.startswith('_bent')
      key = (c.src, c.dst, c.index)
      transforms[key] = make(table[key], np.sin if bends else np.asarray)
  return transforms


class InterpreterTest(OnAPath):
  @_settings(6)
  @hypothesis.given(data=st.data(), seed=st.integers(0, 2**16))
  @pytest.mark.heavy
  def test_random_graphs_agree(self, data, seed):
    transforms = data.draw(st.sampled_from([(), (_linear, _bent)]))
    spec = data.draw(random_graphs.specs(transforms=transforms))
    num_rows, batch_size = 12, 2
    is_first = data.draw(random_graphs.boundaries(num_rows, batch_size))
    inputs = random_graphs.inputs_of(spec, (num_rows, batch_size), seed)
    network = self.network(spec)
    row = jax.tree.map(lambda x: x[0], inputs)
    params, state = network.init(jax.random.key(seed), row)
    params = jax.tree.map(lambda x: x + 0.1, params)  # Biases too.
    table = parameters.connection_params(spec, params)

    # Two sequences one after the other: the second starts from a carry.
    half = num_rows // 2
    unroll = jax.jit(network.unroll)
    episodes, carried = None, state
    for rows in (slice(0, half), slice(half, None)):
      part = jax.tree.map(lambda x, rows=rows: x[rows], inputs)
      expected, episodes = interpreter.run(
        spec,
        table,
        part,
        is_first[rows],
        transforms=_in_numpy(spec, table),
        episodes=episodes,
      )
      looped, state = _loop(network, params, state, part, is_first[rows])
      unrolled, carried = unroll(params, carried, None, part, is_first[rows])
      for key, value in expected.items():
        np.testing.assert_allclose(looped[key], value, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(unrolled[key], value, rtol=1e-4, atol=1e-4)

  @pytest.mark.heavy
  def test_custom_transforms_and_populations(self):
    class Gate(core.Connection):
      def __call__(self, x):
        return 2.0 * jnp.ones((*x.shape[:-1], self.output_size)) * x[..., :1]

    class Largest(core.Population):
      def integrate(self, inputs):
        return jnp.max(jnp.stack(inputs), axis=0)

    graph = builder.PopulationGraph()
    graph.add_input('a', 2, input_from='x')
    graph.add_population('m', 3, module=Largest)
    graph.add_output('b', 3)
    graph.connect('a', 'm', transform=Gate)
    graph.connect('a', 'm', transform=lambda: hk.nets.MLP([5, 3]), delay=1)
    graph.connect('m', 'b')
    spec = graph.finalize()
    network = self.network(spec)
    x = np.random.default_rng(0).standard_normal((4, 2, 2)).astype(np.float32)
    params, state = network.init(jax.random.key(0), {'x': x[0]})
    table = parameters.connection_params(spec, params)
    table = jax.tree.map(np.asarray, table)
    mlp = next(v for v in table.values() if len(v) == 4)
    is_first = np.zeros((4, 2), bool)
    got, _ = network.unroll(params, state, None, {'x': x}, is_first)

    def run_mlp(v):
      h = np.maximum(v @ mlp['mlp/~/linear_0/w'] + mlp['mlp/~/linear_0/b'], 0)
      return h @ mlp['mlp/~/linear_1/w'] + mlp['mlp/~/linear_1/b']

    before = np.concatenate([np.zeros((1, 2, 2)), x[:-1]])
    largest = np.maximum(2 * x[..., :1] * np.ones(3), run_mlp(before))
    read_out = table['m', 'b', 0]
    expected = largest @ read_out['w'] + read_out['b']
    np.testing.assert_allclose(got['b'], expected, rtol=1e-4, atol=1e-5)


class NamesTest(OnAPath):
  """Case I."""

  @parameterized.parameters(
    (['l', 'l_0', 'l_1'],), (['l_1', 'l', 'l_0'],), (['l_0', 'l_1', 'l'],)
  )
  def test_numbered_names_in_every_order(self, names):
    graph = builder.PopulationGraph()
    graph.add_input('x', 2, input_from='x')
    graph.add_output('y', 1)
    for name in names:
      graph.add_population(name, 2, module=core.Population)
      graph.connect('x', name, transform=lambda: hk.Linear(2))
      graph.connect(name, 'y')
    spec = graph.finalize()
    network = self.network(spec)
    params, state = network.init(jax.random.key(0), {'x': jnp.ones((1, 2))})
    table = parameters.connection_params(spec, params)
    table = jax.tree.map(np.asarray, table)
    self.assertLen(table, 6)
    weights = [np.asarray(table['x', n, 0]['linear/w']) for n in names]
    for i in range(3):
      for j in range(i):
        self.assertFalse(np.allclose(weights[i], weights[j]))
    out, _ = network.apply(
      params, state, None, {'x': jnp.ones((1, 2))}, jnp.zeros(1, bool)
    )
    expected = sum(
      np.sum(w, 0) @ table[n, 'y', 0]['w']
      for n, w in zip(names, weights, strict=True)
    )
    np.testing.assert_allclose(out['y'][0], expected, rtol=1e-5)

  def test_connections_whose_names_run_together(self):
    graph = builder.PopulationGraph()
    for name in ('a', 'a_b'):
      graph.add_input(name, 1, input_from=name)
    for name in ('c', 'b_c'):
      graph.add_output(name, 1)
    for transform in (None, lambda: hk.Linear(1)):
      graph.connect('a', 'b_c', transform=transform)
      graph.connect('a_b', 'c', transform=transform)
    spec = graph.finalize()
    network = self.network(spec)
    inputs = {'a': jnp.ones((1, 1)), 'a_b': jnp.ones((1, 1))}
    params, _ = network.init(jax.random.key(0), inputs)
    table = parameters.connection_params(spec, params)
    self.assertCountEqual(
      table,
      [('a', 'b_c', 0), ('a', 'b_c', 1), ('a_b', 'c', 0), ('a_b', 'c', 1)],
    )
    values = [float(next(iter(v.values())).sum()) for v in table.values()]
    weights = [
      float(np.sum(v.get('w', v.get('linear/w')))) for v in table.values()
    ]
    self.assertLen(set(weights), 4, values)


class GraphCoreTest(OnAPath):
  @pytest.mark.heavy
  def test_is_a_haiku_core(self):
    spec = _two_cycle(2)
    x = np.random.default_rng(0).standard_normal((6, 3, 1)).astype(np.float32)
    is_first = np.random.default_rng(1).random((6, 3)) < 0.3

    def dynamic(x, is_first):
      graph = core.GraphCore(spec, path=self.path, name='core')
      state = graph.initial_state(3)
      return hk.dynamic_unroll(
        hk.ResetCore(graph), (x, jnp.asarray(is_first)), state
      )

    transformed = hk.without_apply_rng(hk.transform(dynamic))
    params = transformed.init(jax.random.key(0), x, is_first)
    out, _ = transformed.apply(params, x, is_first)
    network = self.network(spec)
    _, state = network.init(jax.random.key(0), {'x': x[0]})
    ours, _ = network.unroll(
      {'graph/~/core': params['core']}, state, None, {'x': x}, is_first
    )
    np.testing.assert_allclose(out['b'], ours['b'], rtol=1e-6)

  def test_stateful_population_needs_graph(self):
    with self.assertRaisesRegex(ValueError, 'positive integer, got None'):
      hk.testing.transform_and_run(
        lambda: core.GraphCore(_chain(1)).initial_state(None)
      )()

  @parameterized.parameters(
    ({}, r"\['x'\] are missing"),
    ({'x': jnp.ones((2, 3))}, r'got .*\(2, 3\)'),
    ({'x': jnp.ones(1)}, r'got .*\(1,\)'),
  )
  def test_wrong_inputs(self, inputs, message):
    network = self.network(_chain(1))
    inputs = dict(inputs, other=jnp.ones((2, 1)))
    with self.assertRaisesRegex(ValueError, message):
      network.init(jax.random.key(0), inputs)

  def test_wrong_transform_is_refused_at_once(self):
    graph = builder.PopulationGraph()
    graph.add_input('a', 2, input_from='x')
    graph.add_output('b', 3)
    graph.connect('a', 'b', transform=lambda: hk.Linear(4))
    with self.assertRaisesRegex(ValueError, 'a -> b .* output size 3'):
      self.network(graph.finalize())

  @parameterized.parameters(
    dict(activation=lambda x: x[..., :1]),
    dict(
      module=type(
        'Bad',
        (core.Population,),
        {'__call__': lambda self, inputs: inputs[0][..., :1]},
      )
    ),
  )
  def test_wrong_activation_is_refused_at_once(self, **kwargs):
    graph = builder.PopulationGraph()
    graph.add_input('a', 2, input_from='x')
    graph.add_output('b', 3, **kwargs)
    graph.connect('a', 'b')
    with self.assertRaisesRegex(ValueError, "population 'b' must keep"):
      self.network(graph.finalize())

  def test_bare_array_serves_a_single_key(self):
    spec = _chain(1)
    network = self.network(spec)
    x = jnp.ones((2, 1))
    params, state = network.init(jax.random.key(0), x)
    no = jnp.zeros(2, bool)
    bare, _ = network.apply(params, state, None, x, no)
    keyed, _ = network.apply(params, state, None, {'x': x}, no)
    np.testing.assert_array_equal(bare['b'], keyed['b'])

  @pytest.mark.heavy
  def test_bfloat16_throughout(self):
    network = self.network(_two_cycle(2), dtype=jnp.bfloat16)
    x = {'x': jnp.ones((3, 2, 1))}
    params, state = network.init(jax.random.key(0), {'x': x['x'][0]})
    out, state = network.unroll(params, state, None, x, jnp.zeros((3, 2), bool))
    for leaf in jax.tree.leaves((params, out)):
      self.assertEqual(leaf.dtype, jnp.bfloat16)
    for h in jax.tree.leaves(
      state.carry, is_leaf=lambda x: hasattr(x, 'position')
    ):
      self.assertEqual(h.values.dtype, jnp.bfloat16)


class ParametersTest(OnAPath):
  @_settings(4)
  @hypothesis.given(spec=random_graphs.specs(), seed=st.integers(0, 99))
  @pytest.mark.heavy
  def test_round_trip(self, spec, seed):
    network = self.network(spec)
    inputs = random_graphs.inputs_of(spec, (1,), seed)
    params, _ = network.init(jax.random.key(seed), inputs)
    table = parameters.connection_params(spec, params)
    for c in spec.connections:
      sizes = spec.population(c.src).size, spec.population(c.dst).size
      self.assertEqual(table[c.src, c.dst, c.index]['w'].shape, sizes)
      self.assertEqual(table[c.src, c.dst, c.index]['b'].shape, sizes[1:])
    zeros = jax.tree.map(jnp.zeros_like, params)
    back = parameters.replace_connection_params(spec, zeros, table)
    jax.tree.map(np.testing.assert_array_equal, back, params)

  def test_weights_are_lecun_normal(self):
    graph = builder.PopulationGraph()
    graph.add_input('a', 100, input_from='x')
    graph.add_output('b', 400)
    graph.connect('a', 'b')
    spec = graph.finalize()
    network = self.network(spec)
    params, _ = network.init(jax.random.key(0), jnp.ones((1, 100)))
    table = parameters.connection_params(spec, params)['a', 'b', 0]
    self.assertAlmostEqual(float(np.std(table['w'])), 0.1, delta=0.002)
    self.assertEqual(float(np.abs(table['b']).max()), 0)

  def test_errors(self):
    spec = _chain(1)
    network = self.network(spec)
    params, _ = network.init(jax.random.key(0), jnp.ones((1, 1)))
    replace = parameters.replace_connection_params
    with self.assertRaisesRegex(ValueError, 'no connections'):
      replace(spec, params, {('a', 'c', 0): {}})
    with self.assertRaisesRegex(ValueError, "not 'v'"):
      replace(spec, params, {('a', 'b', 0): {'v': 1}})
    with self.assertRaisesRegex(ValueError, r'shape \(1, 1\), got \(2,\)'):
      replace(spec, params, {('a', 'b', 0): {'w': np.ones(2)}})
    with self.assertRaisesRegex(ValueError, 'no module'):
      parameters.connection_params(spec, {'linear': {}})


class GeneralDelayTest(DelayTest):
  path = 'general'


class GeneralInterpreterTest(InterpreterTest):
  path = 'general'


class GeneralNamesTest(NamesTest):
  path = 'general'


class GeneralGraphCoreTest(GraphCoreTest):
  path = 'general'


class GeneralParametersTest(ParametersTest):
  path = 'general'


if __name__ == '__main__':
  absltest.main()
