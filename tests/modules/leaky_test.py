"""Tests of leaky populations."""

from absl.testing import absltest, parameterized
import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.modules import leaky


def _alone(module, size=1):
  """A graph of one leaky population that is input, and read out as it is."""
  graph = hg.PopulationGraph()
  graph.add_input('v', size, input_from='x', module=module)
  graph.add_output('out', size)
  graph.connect('v', 'out', transform=lambda: lambda x: x)
  return hg.graph_network(graph.finalize())


class LeakyTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(0.1, 1.0, 50.0)
  def test_is_the_solution_of_the_equation(self, dt):
    # From v = 0, with input i: v(t) = (v_leak + r i) (1 - exp(-t / tau)).
    tau, r, v_leak, i = 10.0, 3.0, -0.5, 0.7
    module = leaky.Leaky(tau=tau, dt=dt, r=r, v_leak=v_leak)
    network = _alone(module)
    x = jnp.full((20, 2, 1), i)
    params, state = network.init(jax.random.key(0), {'x': x[0]})
    is_first = jnp.zeros((20, 2), bool)
    unroll = self.variant(network.unroll)
    out, _ = unroll(params, state, None, {'x': x}, is_first)
    t = dt * np.arange(1, 21)
    expected = (v_leak + r * i) * (1 - np.exp(-t / tau))
    expected = np.tile(expected[:, None, None], (1, 2, 1))
    np.testing.assert_allclose(out['out'], expected, rtol=2e-5)

  def test_neurons_have_constants_of_their_own(self):
    network = _alone(leaky.Leaky(), size=3)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 3)), 'float32')
    params, state = network.init(jax.random.key(0), {'x': x[0]})
    (name,) = params
    tau = np.array([1.0, 4.0, 20.0])
    r, v_leak = np.array([1.0, -2.0, 0.5]), np.array([0.0, 1.0, 3.0])
    params = {
      name: {
        'log_tau': jnp.asarray(np.log(tau), 'float32'),
        'r': jnp.asarray(r, 'float32'),
        'v_leak': jnp.asarray(v_leak, 'float32'),
      }
    }
    is_first = np.zeros((6, 2), bool)
    is_first[3, 1] = True
    out, _ = network.unroll(
      params, state, None, {'x': x}, jnp.asarray(is_first)
    )
    a, v, expected = np.exp(-1 / tau), np.zeros((2, 3)), []
    for x_t, first in zip(np.asarray(x), is_first, strict=True):
      v = np.where(first[:, None], 0, v)
      v = v_leak + a * (v - v_leak) + (1 - a) * r * x_t
      expected.append(v)
    np.testing.assert_allclose(out['out'], expected, rtol=1e-5, atol=1e-6)

  def test_activation_comes_last(self):
    graph = hg.PopulationGraph()
    graph.add_input(
      'v',
      1,
      input_from='x',
      activation='jax.numpy.square',
      module=leaky.Leaky(tau=1.0),
    )
    graph.add_output('out', 1)
    graph.connect('v', 'out', transform=lambda: lambda x: x)
    network = hg.graph_network(graph.finalize())
    params, state = network.init(jax.random.key(0), {'x': jnp.ones((1, 1))})
    out, _ = network.apply(
      params, state, None, {'x': jnp.ones((1, 1))}, jnp.ones(1, bool)
    )
    expected = [[(1 - np.exp(-1)) ** 2]]
    np.testing.assert_allclose(out['out'], expected, rtol=1e-6)

  @pytest.mark.heavy
  def test_steps_and_sequences_agree_in_a_loop(self):
    graph = hg.PopulationGraph()
    graph.add_input('in_', 3, input_from='x')
    graph.add_population('a', 4, module=leaky.Leaky(tau=3.0))
    graph.add_population('b', 4, module=leaky.Leaky(tau=2.0))
    graph.add_output('out', 2)
    graph.connect('in_', 'a')
    graph.connect('a', 'b')
    graph.connect('b', 'a', delay=2)
    graph.connect('b', 'b', delay=1)
    graph.connect('b', 'out')
    network = hg.graph_network(graph.finalize())
    rng = np.random.default_rng(0)
    x = {'x': jnp.asarray(rng.normal(size=(9, 3, 3)), 'float32')}
    is_first = jnp.asarray(rng.random((9, 3)) < 0.2)
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], x)
    )
    unroll = jax.jit(network.unroll)
    unrolled, end = unroll(params, state, None, x, is_first)
    apply, rows = jax.jit(network.apply), []
    for t in range(9):
      row = jax.tree.map(lambda x, t=t: x[t], x)
      out, state = apply(params, state, None, row, is_first[t])
      rows.append(out['out'])
    np.testing.assert_allclose(
      unrolled['out'], np.stack(rows), rtol=1e-5, atol=1e-6
    )
    chex.assert_trees_all_close(end, state, rtol=1e-5, atol=1e-6)

    def loss(params):
      return jnp.sum(
        jnp.square(unroll(params, end, None, x, is_first)[0]['out'])
      )

    for leaf in jax.tree.leaves(jax.grad(loss)(params)):
      self.assertTrue(np.isfinite(leaf).all())
      self.assertTrue(np.any(leaf != 0))

  def test_outside_of_a_graph(self):
    network = hg.transform(
      lambda x: leaky.LeakyPopulation(2, tau=1.0)([hk.Linear(2)(x), x])
    )
    x = jnp.ones((4, 2))
    params, state = network.init(jax.random.key(0), x)
    out, _ = network.apply(params, state, None, x, jnp.ones(4, bool))
    arriving = x @ params['linear']['w'] + x
    np.testing.assert_allclose(out, (1 - np.exp(-1)) * arriving, rtol=1e-6)

  @parameterized.parameters(-80.0, np.inf)
  def test_extreme_time_constants_have_gradients(self, log_tau):
    # At once, v = x; and never, v = 0.
    network = _alone(leaky.Leaky())
    x, first = {'x': jnp.full((1, 1), 3.0)}, jnp.ones(1, bool)
    params, state = network.init(jax.random.key(0), x)

    def v(log_tau):
      (name,) = params
      new = {name: dict(params[name], log_tau=jnp.full(1, log_tau))}
      return network.apply(new, state, None, x, first)[0]['out'][0, 0]

    out, gradient = jax.value_and_grad(v)(log_tau)
    self.assertAlmostEqual(float(out), 3.0 if log_tau < 0 else 0.0)
    self.assertEqual(float(gradient), 0)

  @parameterized.parameters(
    dict(tau=0.0), dict(dt=-1.0), dict(tau=float('inf')), dict(r=float('nan'))
  )
  def test_wrong_constants(self, **kwargs):
    (name,) = kwargs
    with self.assertRaisesRegex(ValueError, f'`{name}` must be'):
      leaky.Leaky(**kwargs)
    with self.assertRaisesRegex(ValueError, f'`{name}` must be'):
      hk.transform(lambda: leaky.LeakyPopulation(3, **kwargs)).init(None)

  @parameterized.parameters(('10',), (None,), ([1.0, 2.0],), (np.ones(2),))
  def test_constants_that_are_no_numbers(self, tau):
    with self.assertRaisesRegex(TypeError, '`tau` must be a number, the same'):
      leaky.Leaky(tau=tau)


if __name__ == '__main__':
  absltest.main()
