"""What the compiled program is like: products, scans, memory, copies."""

import random
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg


def _many(count, *, size=4, fan_in=3, max_delay=3, seed=0):
  """`count` populations that hear `fan_in` others each, and two read-outs."""
  rng = random.Random(seed)
  graph = hg.PopulationGraph()
  graph.add_input('x', size, input_from='x')
  names = [f'h{i}' for i in range(count)]
  for name in names:
    graph.add_population(name, size, activation=jnp.tanh)
  graph.add_output('a', 2)
  graph.add_output('b', 1)
  for name, before in zip(names, names[-1:] + names, strict=False):
    graph.connect('x', name)
    # A ring, so that all are one component, and others at random.
    for other in [before, *rng.sample(names, fan_in - 1)]:
      graph.connect(other, name, delay=rng.randint(1, max_delay))
    graph.connect(name, 'a')
    graph.connect(name, 'b')
  return graph.finalize()


def _layers(delay):
  """No loop, but delays and two depths."""
  graph = hg.PopulationGraph()
  graph.add_input('x', 3, input_from='x')
  for i in range(4):
    graph.add_population(f'h{i}', 5, activation=jax.nn.swish)
    graph.connect('x', f'h{i}', delay=i * delay)
  graph.add_output('y', 2)
  for i in range(4):
    graph.connect(f'h{i}', 'y', delay=(3 - i) * delay)
  return graph.finalize()


def _sequence(spec, num_rows, batch_size):
  """A loss of a sequence, and arguments for it."""
  network = hg.graph_network(spec)
  x = {k: jnp.ones((num_rows, batch_size, n)) for k, n in _sizes(spec)}
  is_first = jnp.zeros((num_rows, batch_size), bool)
  row = jax.tree.map(lambda x: x[0], x)
  params, state = jax.eval_shape(network.init, jax.random.key(0), row)

  def loss(params, state, x, is_first):
    outputs, _ = network.unroll(params, state, None, x, is_first)
    return sum(jnp.mean(jnp.square(y)) for y in outputs.values())

  return loss, (params, state, x, is_first)


def _sizes(spec):
  return spec.input_sizes.items()


def _gradient(spec, num_rows, batch_size):
  loss, arguments = _sequence(spec, num_rows, batch_size)
  return jax.jit(jax.grad(loss)).lower(*arguments).compile()


def _primitives(jaxpr):
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for value in jax.tree.leaves(equation.params):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from _primitives(inner)


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(1, 2)
  @pytest.mark.heavy
  def test_products_do_not_grow_with_the_graph(self, seed):
    counts = []
    for count in (16, 128):
      compiled = _gradient(_many(count, seed=seed), 3, 2)
      counts.append(len(re.findall(r' dot\(', compiled.as_text())))
    # Some products are there for every kind, and none for every population.
    self.assertGreater(counts[0], 3)
    self.assertLess(counts[1], 1.3 * counts[0])

  @parameterized.parameters(0, 2)
  def test_no_scan_without_a_loop(self, delay):
    loss, arguments = _sequence(_layers(delay), 6, 2)
    for fn in (loss, jax.grad(loss)):
      found = set(_primitives(jax.make_jaxpr(fn)(*arguments).jaxpr))
      self.assertIn('dot_general', found)
      self.assertTrue(found.isdisjoint({'scan', 'while'}), found)

  def test_one_scan_for_a_loop(self):
    loss, arguments = _sequence(_many(6), 6, 2)
    found = list(_primitives(jax.make_jaxpr(loss)(*arguments).jaxpr))
    self.assertEqual(found.count('scan'), 1)

  def test_memory_is_that_of_activities_not_of_histories(self):
    count, size, batch_size, num_rows, delay = 8, 16, 32, 48, 40
    spec = _many(count, size=size, max_delay=delay)
    longest = max(spec.history_lengths.values())
    memory = _gradient(spec, num_rows, batch_size).memory_analysis()
    row = count * size * batch_size * 4
    # Lines, drives, deltas, and a copy or two in other orders: a few arrays of
    # activities. A history in every row would be `longest` of them.
    self.assertLess(memory.temp_size_in_bytes, 8 * row * (num_rows + longest))
    self.assertGreater(longest * num_rows, 2 * 8 * (num_rows + longest))

  @pytest.mark.heavy
  def test_a_step_copies_no_history(self):
    for delay in (8, 64):
      spec = _many(6, size=8, max_delay=delay, seed=delay)
      network = hg.graph_network(spec)
      x, is_first = {'x': jnp.ones((16, 8))}, jnp.zeros(16, bool)
      params, state = network.init(jax.random.key(0), x)

      def step(params, state, x, is_first, network=network):
        return network.apply(params, state, None, x, is_first)

      step = jax.jit(step, donate_argnums=1)
      compiled = step.lower(params, state, x, is_first).compile()
      memory = compiled.memory_analysis()
      ring = sum(x.nbytes for x in jax.tree.leaves(state.carry))
      length = max(spec.history_lengths.values())
      self.assertGreater(length, 0.7 * delay)
      # The ring is given back as it came, and nothing of its size is made.
      self.assertGreaterEqual(memory.alias_size_in_bytes, ring)
      self.assertLess(memory.temp_size_in_bytes, 40 * ring / length)
      copied = rf'f32\[16,{length},6,8\]\S* copy\('
      self.assertEmpty(re.findall(copied, compiled.as_text()))

  @pytest.mark.heavy
  def test_carries_of_unlike_age_stack(self):
    spec = _many(5, max_delay=4)
    network = hg.graph_network(spec)
    rng = np.random.default_rng(0)
    x = {'x': rng.standard_normal((12, 1, 4)).astype(np.float32)}
    params, state = network.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], x)
    )
    apply, no = jax.jit(network.apply), np.zeros(1, bool)
    states, outputs = [], []
    for t in range(12):
      row = jax.tree.map(lambda x, t=t: x[t], x)
      states.append(state)
      out, state = apply(params, state, None, row, no)
      outputs.append(out)
    # From three moments on, three rows at once.
    starts = (0, 2, 7)
    stacked = jax.tree.map(
      lambda *x: jnp.concatenate(x), *(states[t] for t in starts)
    )
    parts = [jax.tree.map(lambda x, t=t: x[t : t + 3], x) for t in starts]
    rows = jax.tree.map(lambda *x: np.concatenate(x, 1), *parts)
    got, _ = network.unroll(params, stacked, None, rows, np.zeros((3, 3), bool))
    for key, y in got.items():
      for i, t in enumerate(starts):
        wanted = np.stack([outputs[t + k][key][0] for k in range(3)])
        np.testing.assert_allclose(y[:, i], wanted, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
