"""Cores of Haiku against loops, for every reset pattern."""

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.modules import encoders, encoding, recurrent, transformer
from tests.modules import agreement


class Sum(hk.RNNCore):
  """`h + x`."""

  def __call__(self, inputs, prev_state):
    h = prev_state + inputs
    return h, h

  def initial_state(self, batch_size):
    return jnp.zeros((batch_size, 1))


def _graph():
  graph = hg.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_population('a', 4, activation=jnp.tanh)
  graph.add_output('b', 2)
  graph.add_output('c', 1)
  graph.connect('eye', 'a', delay=1)
  graph.connect('a', 'a', delay=2)
  graph.connect('a', 'b', delay=3)
  graph.connect('a', 'c')
  return graph.finalize()


CORES = {
  'gru': (lambda: hk.GRU(4), 4),
  'lstm': (lambda: hk.LSTM(4), 4),
  'vanilla': (lambda: hk.VanillaRNN(4), 4),
  'deep': (lambda: hk.DeepRNN([hk.Linear(5), hk.LSTM(4), jnp.tanh]), 4),
  'graph': (lambda: hg.GraphCore(_graph()), 3),
  'walked graph': (lambda: hg.GraphCore(_graph(), path='general'), 3),
}


def _apply(make):
  """The encoder by its explicit contract, outside of `hg.transform`."""
  net = hk.without_apply_rng(
    hk.multi_transform(
      lambda: (
        lambda encoder: (
          lambda *args: encoder(*args),
          (lambda *args: encoder(*args), encoder.initial_carry),
        )
      )(make())
    )
  )
  return net.init, *net.apply


class RecurrentEncoderTest(parameterized.TestCase):
  @parameterized.parameters('apply', 'unroll', 'two unrolls')
  def test_case_c(self, how):
    _, apply, initial_carry = _apply(lambda: recurrent.RecurrentEncoder(Sum()))
    x = np.ones((4, 1, 1), np.float32)

    def run(carry, is_first):
      cuts = {'apply': range(4), 'unroll': [slice(4)]}
      ys = []
      for cut in cuts.get(how, [slice(0, 2), slice(2, 4)]):
        carry, y = jax.jit(apply)({}, carry, x[cut], is_first[cut])
        ys.extend(np.ravel(y))
      return ys

    carry = initial_carry({}, (1, 1), jnp.float32)
    first = np.array([[True], [False], [True], [False]])
    self.assertEqual(run(carry, first), [1, 2, 1, 2])
    carry = jax.tree.map(lambda c: c + 5, carry)
    self.assertEqual(run(carry, first & (np.arange(4) == 2)[:, None]), [
      6, 7, 1, 2,
    ])  # fmt: skip

  def test_vanilla_rnn_against_numpy(self):
    init, apply, initial_carry = _apply(
      lambda: recurrent.RecurrentEncoder(hk.VanillaRNN(3), jnp.square)
    )
    carry = initial_carry({}, (2, 2), jnp.float32)
    zeros = np.zeros((2, 2), np.float32)
    params = init(jax.random.key(0), carry, zeros, np.ones(2, bool))
    params = jax.tree.map(lambda p: p + 0.1, jax.device_get(params))
    read, back = params['vanilla_rnn/linear'], params['vanilla_rnn/linear_1']
    apply = jax.jit(apply)

    @hypothesis.settings(max_examples=10)
    @hypothesis.given(
      rate=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 2**16)
    )
    def check(rate, seed):
      rng = np.random.default_rng(seed)
      x = rng.standard_normal((6, 2, 2)).astype(np.float32)
      is_first = rng.random((6, 2)) < rate
      h = rng.standard_normal((2, 3)).astype(np.float32)
      last, y = apply(params, {'core': h}, x, is_first)
      for t in range(6):
        h = np.where(is_first[t][:, None], 0, h)
        h = x[t] ** 2 @ read['w'] + read['b'] + h @ back['w'] + back['b']
        h = np.maximum(h, 0)
        np.testing.assert_allclose(y[t], h, rtol=1e-4, atol=1e-5)
      np.testing.assert_allclose(last['core'], h, rtol=1e-4, atol=1e-5)

    check()

  @parameterized.parameters(*CORES)
  def test_apply_and_unroll_agree(self, name):
    make, size = CORES[name]
    network = hg.transform(
      lambda x: encoding.Remember(recurrent.RecurrentEncoder(make()))(x)
    )
    y, _, _ = agreement.check(network, *agreement.rows((3,)))
    self.assertEqual(y.shape, (7, 3, size))

  @parameterized.parameters('lstm', 'graph')
  @pytest.mark.heavy
  def test_without_jit(self, name):
    make, _ = CORES[name]
    network = hg.transform(
      lambda x: encoding.Remember(
        recurrent.RecurrentEncoder(make(), encoders.MLPEncoder((3,)))
      )(x)
    )
    x, is_first = agreement.rows((2, 2), num_rows=3, dtype=np.uint8)
    _, params, _ = agreement.check(network, x, is_first, jit=False)
    self.assertIn('mlp_encoder/linear', params)

  @pytest.mark.heavy
  def test_a_graph_core_is_a_graph(self):
    spec = _graph()
    both = (
      hg.transform(
        lambda x: encoding.Remember(
          recurrent.RecurrentEncoder(hg.GraphCore(spec, name='core'))
        )({'x': x})
      ),
      hg.transform(lambda x: hg.Concat()(hg.Graph(spec, name='g')({'x': x}))),
    )
    x, is_first = agreement.rows((3,))
    (y, params, _), (z, renamed, _) = (
      agreement.check(network, x, is_first) for network in both
    )
    self.assertEqual(
      jax.tree.map(jnp.shape, [*params.values()]),
      jax.tree.map(jnp.shape, [*renamed.values()]),
    )
    self.assertGreater(np.abs(y).max(), 0)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)

  @pytest.mark.heavy
  def test_one_output_of_a_graph(self):
    spec = _graph()
    make = lambda output: hg.transform(  # noqa: E731
      lambda x: encoding.Remember(
        recurrent.RecurrentEncoder(hg.GraphCore(spec), output=output)
      )(x)
    )
    x, is_first = agreement.rows((3,))
    params, state = make(None).init(jax.random.key(0), x[0])
    both, one = (
      make(output).unroll(params, state, None, x, is_first)[0]
      for output in (None, 'c')
    )
    np.testing.assert_array_equal(both[..., 2:], one)
    with self.assertRaisesRegex(ValueError, r"\['b', 'c'\]; got 'd'"):
      make('d').init(jax.random.key(0), x[0])

  def test_inputs_are_encoded_once(self):
    shapes = []

    def encoder(x):
      shapes.append(x.shape)
      return x

    network = hg.transform(
      lambda x: encoding.Remember(
        recurrent.RecurrentEncoder(hk.GRU(2), encoder)
      )(x)
    )
    x, is_first = agreement.rows((3,))
    params, state = network.init(jax.random.key(0), x[0])
    shapes.clear()
    network.unroll(params, state, None, x, is_first)
    self.assertEqual(shapes, [(7, 3, 3)])

  @pytest.mark.heavy
  def test_over_a_window(self):
    def fn(x):
      frames = encoders.MLPEncoder((4,))
      window = transformer.TransformerEncoder(frames, 4, 2, 1, 3)
      return encoding.Remember(recurrent.RecurrentEncoder(hk.GRU(2), window))(x)

    x, is_first = agreement.rows((2,), dtype=np.uint8)
    _, _, end = agreement.check(hg.transform(fn), x, is_first)
    shapes = {tuple(leaf.shape[1:]) for leaf in jax.tree.leaves(end.carry)}
    self.assertEqual(shapes, {(3, 2), (2,)})

  def test_errors(self):
    with self.assertRaisesRegex(TypeError, r'hk.GRU\(64\), got 64'):
      hk.transform(lambda: recurrent.RecurrentEncoder(64)).init(
        jax.random.key(0)
      )
    with self.assertRaisesRegex(TypeError, 'inputs of the core, got 3'):
      hk.transform(lambda: recurrent.RecurrentEncoder(Sum(), 3)).init(
        jax.random.key(0)
      )


if __name__ == '__main__':
  absltest.main()
