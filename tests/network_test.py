"""The pure functions, whatever is inside."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg


class Noisy(hg.Population):
  """A population whose activation is noisy."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self._noise = hg.GaussianNoise(0.5)

  def __call__(self, inputs):
    return self._noise(super().__call__(inputs))


class Normalised(hg.Connection):
  """Normalises what it carries, inside the graph."""

  def __call__(self, x):
    return super().__call__(hg.Normalizer()(x))


def everything_graph(policy=2):
  """Delays, loops, noise, normalisers, custom parts."""
  graph = hg.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_population('a', 6, activation='jax.nn.swish')
  graph.add_population('b', 5, activation=jnp.tanh, module=Noisy)
  graph.add_output('policy', policy)
  graph.add_output('value', 1)
  graph.connect('eye', 'a', delay=2)
  graph.connect('eye', 'b', transform=Normalised)
  graph.connect('a', 'b', delay=1, reciprocal=True)
  graph.connect('a', 'a', delay=3)
  graph.connect('b', 'policy')
  graph.connect('a', 'value')
  return graph.finalize()


def _rows(num_rows=8, batch_size=4, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((num_rows, batch_size, 3)).astype(np.float32)
  return {'x': x}, rng.random((num_rows, batch_size)) < 0.3


def _loop(network, params, state, inputs, is_first):
  apply = jax.jit(network.apply)
  ys = []
  for t in range(len(is_first)):
    row = jax.tree.map(lambda x, t=t: x[t], inputs)
    y, state = apply(params, state, None, row, is_first[t])
    ys.append(y)
  return jax.tree.map(lambda *y: jnp.stack(y), *ys), state


def _assert_close(a, b, **kwargs):
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
  raw = lambda x: jax.random.key_data(x) if is_key(x) else x  # noqa: E731
  chex.assert_trees_all_close(
    jax.tree.map(raw, a), jax.tree.map(raw, b), **kwargs
  )


class NetworkTest(parameterized.TestCase):
  @parameterized.parameters('sequence', 'scan')
  @pytest.mark.heavy
  def test_apply_and_unroll_agree(self, unroll):
    spec = everything_graph()
    network = hg.transform(lambda x: hg.Graph(spec)(x), unroll=unroll)
    inputs, is_first = _rows()
    row = jax.tree.map(lambda x: x[0], inputs)
    params, state = network.init(jax.random.key(0), row)
    looped, loop_end = _loop(network, params, state, inputs, is_first)
    unrolled, end = jax.jit(network.unroll)(
      params, state, None, inputs, is_first
    )
    _assert_close(looped, unrolled, rtol=1e-5, atol=1e-6)
    _assert_close(loop_end, end, rtol=1e-5, atol=1e-6)

  def test_initial_carry_of_any_batch_size(self):
    network = hg.transform(lambda x: hg.Delay(2)(hk.Linear(3)(x)))
    with self.assertRaisesRegex(ValueError, 'call `init` first'):
      network.initial_carry(2)
    _, state = network.init(jax.random.key(0), jnp.zeros((4, 5)))
    carry = network.initial_carry(7)
    chex.assert_trees_all_equal_structs(carry, state.carry)
    for leaf in jax.tree.leaves(carry):
      self.assertEqual(leaf.shape[0], 7)
    graph = hg.graph_network(everything_graph())
    for leaf in jax.tree.leaves(graph.initial_carry(3)):
      self.assertEqual(leaf.shape[0], 3)

  @pytest.mark.heavy
  def test_evaluation_at_another_batch_size(self):
    network = hg.graph_network(everything_graph())
    inputs, is_first = _rows()
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )
    unroll = jax.jit(network.unroll)
    full, _ = unroll(params, state, None, inputs, is_first)
    for b in (0, 3):
      one = jax.tree.map(lambda x, b=b: x[b : b + 1], state.carry)
      part, _ = unroll(
        params,
        state.replace(carry=one),
        None,
        {'x': inputs['x'][:, b : b + 1]},
        is_first[:, b : b + 1],
      )
      _assert_close(
        part,
        jax.tree.map(lambda x, b=b: x[:, b : b + 1], full),
        rtol=1e-5,
        atol=1e-6,
      )

  @pytest.mark.heavy
  def test_carries_of_different_ages_stack(self):
    network = hg.graph_network(everything_graph())
    inputs, is_first = _rows(num_rows=9, batch_size=1)
    apply = jax.jit(network.apply)
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )
    carries, outputs = [], []
    for t in range(9):
      row = {'x': inputs['x'][t]}
      carries.append(state.carry)
      y, state = apply(params, state, None, row, is_first[t])
      outputs.append(y)
    starts = [0, 3, 5]
    stacked = jax.tree.map(
      lambda *x: jnp.concatenate(x), *(carries[t] for t in starts)
    )
    window = [slice(t, t + 4) for t in starts]
    x = {'x': np.concatenate([inputs['x'][w] for w in window], 1)}
    first = np.concatenate([is_first[w] for w in window], 1)
    again, _ = jax.jit(network.unroll)(
      params, state.replace(carry=stacked), None, x, first
    )
    for i, w in enumerate(window):
      expected = jax.tree.map(lambda *y: jnp.concatenate(y), *outputs[w])
      _assert_close(
        jax.tree.map(lambda y, i=i: y[:, i], again),
        expected,
        rtol=1e-5,
        atol=1e-6,
      )

  @pytest.mark.heavy
  def test_leaks_gradients_remat_and_one_compilation(self):
    spec = everything_graph()
    inputs, is_first = _rows()
    plain = hg.transform(lambda x: hg.Graph(spec)(x))
    remat = hg.transform(lambda x: hk.remat(hg.Graph(spec))(x))
    params, state = plain.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )

    def loss(network, params):
      y, _ = network.unroll(params, state, None, inputs, is_first)
      return sum(jnp.mean(jnp.square(v)) for v in jax.tree.leaves(y))

    with jax.checking_leaks():
      grads = jax.jit(jax.grad(lambda p: loss(plain, p)))(params)
    for name, leaf in jax.tree_util.tree_leaves_with_path(grads):
      self.assertTrue(np.all(np.isfinite(leaf)), name)
      self.assertGreater(float(jnp.sum(jnp.abs(leaf))), 0, name)
    _assert_close(
      jax.jit(jax.grad(lambda p: loss(remat, p)))(params),
      grads,
      rtol=1e-4,
      atol=1e-6,
    )
    chex.clear_trace_counter()
    unroll = jax.jit(chex.assert_max_traces(plain.unroll, n=1))
    _, state = unroll(params, state, None, inputs, is_first)
    unroll(params, state, None, inputs, is_first)

  @pytest.mark.heavy
  def test_vmap_over_seeds(self):
    network = hg.graph_network(everything_graph())
    inputs, is_first = _rows()
    row = jax.tree.map(lambda x: x[0], inputs)

    def run(key):
      params, state = network.init(key, row)
      return network.unroll(params, state, None, inputs, is_first)[0]

    keys = jax.random.split(jax.random.key(0), 4)
    run = jax.jit(run)
    singles = [run(key) for key in keys]
    together = jax.jit(jax.vmap(run))(keys)
    _assert_close(
      together,
      jax.tree.map(lambda *y: jnp.stack(y), *singles),
      rtol=1e-5,
      atol=1e-5,
    )

  def test_functions_with_keys(self):
    def fn(x):
      return x + jax.random.normal(hk.next_rng_key(), x.shape)

    for unroll in ('sequence', 'scan'):
      network = hg.transform(fn, unroll=unroll)
      _, state = network.init(jax.random.key(0), jnp.zeros((2, 1)))
      y, _ = network.unroll(
        {},
        state,
        jax.random.key(1),
        jnp.zeros((5, 2, 1)),
        jnp.zeros((5, 2), bool),
      )
      self.assertLen(np.unique(y), 10)

  @parameterized.parameters(
    ('apply', (2,), (3,), 'use `apply` for one row'),
    ('apply', (2, 3), (2, 3), 'of shape'),
    ('unroll', (2,), (2,), r'\[T, B, ...\]'),
    ('unroll', (2, 3), (2,), 'use `apply` for one row'),
  )
  def test_wrong_shapes(self, how, shape, first_shape, message):
    network = hg.transform(lambda x: x)
    _, state = network.init(jax.random.key(0), jnp.zeros((2,)))
    run = getattr(network, how)
    with self.assertRaisesRegex(ValueError, message):
      run({}, state, None, jnp.zeros(shape), jnp.zeros(first_shape, bool))

  def test_other_wrong_arguments(self):
    with self.assertRaisesRegex(TypeError, 'Haiku function'):
      hg.transform(3)
    with self.assertRaisesRegex(ValueError, "'sequence' or 'scan'"):
      hg.transform(lambda x: x, unroll='loop')
    network = hg.transform(lambda x: x)
    with self.assertRaisesRegex(TypeError, 'must be bool, got int32'):
      network.apply({}, None, None, jnp.zeros((2,)), jnp.zeros(2, jnp.int32))
    with self.assertRaisesRegex(ValueError, 'must share leading axes'):
      network.init(jax.random.key(0), {'a': jnp.ones(2), 'b': jnp.ones(3)})
    with self.assertRaisesRegex(ValueError, 'hold no array'):
      network.init(jax.random.key(0), {})

  @parameterized.parameters(0, -1, None, 2.5, True)
  def test_wrong_batch_size(self, batch_size):
    network = hg.transform(lambda x: x, inputs=jnp.zeros((1, 3)))
    with self.assertRaisesRegex(
      (TypeError, ValueError), '`batch_size` must be a positive integer'
    ):
      network.initial_carry(batch_size)

  @parameterized.parameters(
    ((3, 2), jnp.float32), ((3, 1), bool), ((2,), bool), ((2, 3), bool)
  )
  def test_wrong_mask(self, shape, dtype):
    network = hg.transform(lambda x: hg.Normalizer()(x))
    _, state = network.init(jax.random.key(0), jnp.zeros((2, 1)))
    with self.assertRaisesRegex(ValueError, r'`mask` must be bool .*\(3, 2\)'):
      network.update_statistics(
        *({}, state, jnp.zeros((3, 2, 1)), jnp.zeros((3, 2), bool)),
        jnp.ones(shape, dtype),
      )

  @parameterized.parameters(
    ('init', (2,), r"\{'x': \(B, 3\)\}, got \{'x': \(2,\)\}"),
    ('init', (2, 4), r"\{'x': \(B, 3\)\}, got \{'x': \(2, 4\)\}"),
    ('init', (2, 5, 3), r"\{'x': \(B, 3\)\}"),
    ('unroll', (4, 2, 5, 3), r"\{'x': \(T, B, 3\)\}"),
  )
  def test_observation_of_wrong_shape(self, how, shape, message):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    graph.add_output('arm', 1)
    graph.connect('eye', 'arm')
    network = hg.graph_network(graph.finalize())
    params, state = network.init(jax.random.key(0), {'x': jnp.zeros((2, 3))})
    x = {'x': jnp.zeros(shape)}
    with self.assertRaisesRegex(ValueError, message):
      if how == 'init':
        network.init(jax.random.key(0), x)
      else:
        network.unroll(params, state, None, x, jnp.zeros(shape[:2], bool))

  def test_graph_that_is_not_finished(self):
    for make in (
      hg.graph_network,
      lambda graph: hg.policy_network(graph, specs.DiscreteArray(2)),
    ):
      with self.assertRaisesRegex(TypeError, r'`finalize\(\)` returns'):
        make(hg.PopulationGraph())

  @parameterized.parameters(None, 3)
  def test_transform_that_makes_no_module(self, made):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    graph.add_output('arm', 1)
    graph.connect('eye', 'arm', transform=lambda: made)
    with self.assertRaisesRegex(TypeError, f'eye -> arm .*got {made}'):
      hg.graph_network(graph.finalize())

  def test_carry_of_another_batch_size(self):
    network = hg.transform(lambda x: hg.Delay(1)(x))
    _, state = network.init(jax.random.key(0), jnp.zeros((2, 1)))
    with self.assertRaisesRegex(ValueError, r'initial_carry\(5\)'):
      network.apply({}, state, None, jnp.zeros((5, 1)), jnp.zeros(5, bool))


class PolicyNetworkTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_outputs(self):
    network = hg.policy_network(
      everything_graph(), specs.DiscreteArray(2), normalize=True
    )
    inputs, is_first = _rows()
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )
    out, _ = network.unroll(params, state, None, inputs, is_first)
    self.assertEqual(out.value.shape, (8, 4))
    self.assertEqual(out.policy.logits.shape, (8, 4, 2))
    self.assertLen(
      jax.tree.leaves(
        state.statistics, is_leaf=lambda x: isinstance(x, hg.Moments)
      ),
      2,
    )

  @pytest.mark.heavy
  def test_dicts(self):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    for body, size in (('arm', 2), ('leg', 3)):
      graph.add_output(f'p_{body}', size, output_to=f'policy_{body}')
      graph.add_output(f'v_{body}', 1)
      graph.connect('eye', f'p_{body}')
      graph.connect('eye', f'v_{body}')
    actions = {
      'arm': specs.BoundedArray((1,), np.float32, -1, 1),
      'leg': specs.DiscreteArray(3),
    }
    network = hg.policy_network(
      graph.finalize(), actions, value={'arm': 'v_arm', 'leg': 'v_leg'}
    )
    params, state = network.init(jax.random.key(0), jnp.ones((5, 3)))
    out, _ = network.apply(
      params, state, None, jnp.ones((5, 3)), jnp.zeros(5, bool)
    )
    self.assertCountEqual(out.policy, ['arm', 'leg'])
    self.assertEqual(out.policy['arm'].loc.shape, (5, 1))
    self.assertEqual(out.policy['leg'].logits.shape, (5, 3))
    self.assertEqual(
      jax.tree.map(jnp.shape, out.value), {'arm': (5,), 'leg': (5,)}
    )

  @parameterized.parameters(
    (dict(policy='torque'), "'torque' of size 2 is asked for, but missing"),
    (dict(value='policy'), "'policy' of size 1 is asked for, but has size 2"),
    (dict(actions=5), "'policy' of size 5 is asked for, but has size 2"),
  )
  def test_wrong_outputs(self, kwargs, message):
    actions = specs.DiscreteArray(kwargs.pop('actions', 2))
    with self.assertRaisesRegex(ValueError, message):
      hg.policy_network(everything_graph(), actions, **kwargs)


class QNetworkTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_outputs(self):
    network = hg.q_network(
      everything_graph(), specs.DiscreteArray(2), q='policy', normalize=True
    )
    inputs, is_first = _rows()
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )
    q, _ = jax.jit(network.unroll)(params, state, None, inputs, is_first)
    same = hg.policy_network(
      everything_graph(), specs.DiscreteArray(2), normalize=True
    )
    out, _ = jax.jit(same.unroll)(params, state, None, inputs, is_first)
    self.assertEqual(q.shape, (8, 4, 2))
    # The same output, which a categorical normalises.
    np.testing.assert_allclose(
      jax.nn.log_softmax(q), out.policy.logits, rtol=1e-5, atol=1e-6
    )

  @parameterized.parameters(('q',), ({'arm': 'q_arm', 'leg': 'q_leg'},))
  def test_dicts(self, q):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    for body, size in (('arm', 2), ('leg', 3)):
      graph.add_output(f'q_{body}', size)
      graph.connect('eye', f'q_{body}')
    actions = {'leg': specs.DiscreteArray(3), 'arm': specs.DiscreteArray(2)}
    network = hg.q_network(graph.finalize(), actions, q=q)
    params, state = network.init(jax.random.key(0), jnp.ones((5, 3)))
    out, _ = network.apply(
      params, state, None, jnp.ones((5, 3)), jnp.zeros(5, bool)
    )
    shapes = jax.tree.map(jnp.shape, out)
    self.assertEqual(shapes, {'arm': (5, 2), 'leg': (5, 3)})

  @parameterized.parameters(
    (specs.DiscreteArray(2), "'q' of size 2 is asked for, but missing.*`q`"),
    (specs.BoundedArray((2,), np.float32, -1, 1), 'continuous.*PPO'),
  )
  def test_wrong_outputs(self, actions, message):
    with self.assertRaisesRegex(ValueError, message):
      hg.q_network(everything_graph(), actions)

  def test_no_graph(self):
    with self.assertRaisesRegex(TypeError, r'`finalize\(\)` returns'):
      hg.q_network(hg.PopulationGraph(), specs.DiscreteArray(2))


class UpdateStatisticsTest(parameterized.TestCase):
  @parameterized.parameters('sequence', 'scan')
  def test_only_statistics_change_and_only_by_masked_rows(self, unroll):
    spec = everything_graph()
    network = hg.transform(lambda x: hg.Graph(spec)(x), unroll=unroll)
    inputs, is_first = _rows()
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], inputs)
    )
    mask = np.random.default_rng(2).random(is_first.shape) < 0.5
    new = jax.jit(network.update_statistics)(
      params, state, inputs, is_first, mask
    )
    _assert_close(new.carry, state.carry)
    (moments,) = jax.tree.leaves(
      new.statistics, is_leaf=lambda x: isinstance(x, hg.Moments)
    )
    seen = inputs['x'][mask]
    self.assertEqual(int(moments.count), len(seen))
    np.testing.assert_allclose(moments.mean, seen.mean(0), atol=1e-5)
    np.testing.assert_allclose(moments.variance, seen.var(0), rtol=1e-4)


if __name__ == '__main__':
  absltest.main()
