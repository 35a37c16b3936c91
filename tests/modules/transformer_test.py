"""Windows against lists of frames, and attention against loops."""

import math
from unittest import mock

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import delay, encoders, encoding, transformer
from tests.modules import agreement

HIDDEN = 4


def _make(context, num_layers, num_heads, frame_encoder=None):
  """Tests write `shape` for context, layers and heads."""
  return transformer.TransformerEncoder(
    frame_encoder or encoders.MLPEncoder((HIDDEN,)),
    HIDDEN,
    num_heads,
    num_layers,
    context,
  )


def _windows(x, is_first, window):
  """Windows `[T, B, C, ...]` of lists of frames; `window` is that before."""
  num_rows, batch_size = is_first.shape
  lists = [list(w) for w in window]
  result = np.empty((num_rows, *window.shape), window.dtype)
  for t in range(num_rows):
    for b in range(batch_size):
      lists[b] = lists[b][1:] + [x[t, b]]
      if is_first[t, b]:
        lists[b] = [x[t, b]] * window.shape[1]
      result[t, b] = lists[b]
  return result


def _norm(x, params):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  return x * params['scale'] + params['offset']


def _linear(x, params):
  return x @ params['w'] + params['b']


def _attend(y, params, prefix, reach, num_heads):
  """Attention within one window `[C, H]`, token by token."""
  q = _linear(y, params[f'{prefix}/query'])
  k, v = np.split(_linear(y, params[f'{prefix}/key_value']), 2, -1)
  table = params[prefix]['positions']
  out = np.zeros_like(y)
  size = y.shape[-1] // num_heads
  for i in range(len(y)):
    for head in range(num_heads):
      part = slice(head * size, (head + 1) * size)
      seen = range(max(0, i - reach), i + 1)
      scores = [q[i, part] @ (k[j] + table[i - j])[part] for j in seen]
      weights = np.exp(np.array(scores) / math.sqrt(size))
      weights = weights / weights.sum()
      for weight, j in zip(weights, seen, strict=True):
        out[i, part] += weight * v[j, part]
  return _linear(out, params[f'{prefix}/attended'])


def _feature(window, params, context, num_layers, num_heads):
  """The last token of one window `[C, n]`, all of it computed anew."""
  x = np.tanh(_linear(window, params['mlp_encoder/linear']))
  share, rest = divmod(context - 1, num_layers)
  for i in range(num_layers):
    prefix = 'transformer_encoder/block' + (f'_{i}' if i else '')
    y = _norm(x, params[f'{prefix}/attention_norm'])
    x = x + _attend(y, params, prefix, share + (i < rest), num_heads)
    y = _norm(x, params[f'{prefix}/perceptron_norm'])
    y = _linear(y, params[f'{prefix}/hidden'])
    y = np.asarray(jax.nn.gelu(y))
    x = x + _linear(y, params[f'{prefix}/output'])
  return _norm(x[-1], params['transformer_encoder/layer_norm'])


def _random(params, seed):
  """Parameters none of which is 0 or 1, as after training."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: (p + 0.3 * rng.standard_normal(p.shape)).astype(p.dtype), params
  )


class WindowTest(parameterized.TestCase):
  @parameterized.parameters(
    ((1, 1, 1), 64), ((4, 1, 2), 64), ((4, 1, 1), 2), ((6, 2, 2), 2)
  )
  @pytest.mark.heavy
  def test_against_windows_one_by_one(self, shape, block):
    context = shape[0]
    num_rows, batch_size = 7, 2
    with mock.patch.object(transformer, '_BLOCK', block):
      net = hk.without_apply_rng(
        hk.transform(lambda *args: _make(*shape)(*args))
      )
      frames = jnp.zeros((batch_size, context, 3), np.uint8)
      row = jnp.zeros((batch_size, 3), np.uint8)
      params = jax.jit(net.init)(
        jax.random.key(0), frames, row, jnp.ones(2, bool)
      )
      params = jax.device_get(_random(params, 1))
      apply = jax.jit(net.apply)

      @hypothesis.settings(max_examples=4)
      @hypothesis.given(
        rate=st.sampled_from([0.0, 0.2, 0.6]), seed=st.integers(0, 2**16)
      )
      def check(rate, seed):
        rng = np.random.default_rng(seed)
        draw = lambda *s: rng.integers(0, 3, (*s, 3)).astype(np.uint8)  # noqa: E731
        x, window = draw(num_rows, batch_size), draw(batch_size, context)
        is_first = rng.random((num_rows, batch_size)) < rate
        windows = _windows(x, is_first, window)
        last, y = apply(params, window, x, is_first)
        self.assertEqual(last.dtype, np.uint8)
        np.testing.assert_array_equal(last, windows[-1])
        for t in range(num_rows):
          for b in range(batch_size):
            np.testing.assert_allclose(
              y[t, b],
              _feature(windows[t, b].astype(np.float32), params, *shape),
              rtol=1e-4,
              atol=1e-4,
            )
        for t in range(num_rows):
          window, y_t = apply(params, window, x[t], is_first[t])
          np.testing.assert_array_equal(window, windows[t])
          np.testing.assert_allclose(y_t, y[t], rtol=1e-4, atol=1e-4)

      check()

  @parameterized.parameters((True, (4, 1, 2)), (False, (3, 2, 1)))
  @pytest.mark.heavy
  def test_in_haiku_state(self, jit, shape):
    network = network_lib.transform(
      lambda x: encoding.Remember(_make(*shape))(x)
    )
    x, is_first = agreement.rows((2, 2), dtype=np.uint8)
    y, params, end = agreement.check(network, x, is_first, jit=jit)
    self.assertEqual(y.shape, (7, 3, HIDDEN))
    self.assertIn('mlp_encoder/linear', params)
    (window,) = jax.tree.leaves(end.carry)
    self.assertEqual(window.dtype, np.uint8)
    start = np.zeros((3, shape[0], 2, 2), np.uint8)
    start[:, -1] = x[0]  # What `agreement.check` shows before row 0.
    start[is_first[0] == 0] = x[0][is_first[0] == 0][:, None]
    expected = _windows(x, is_first, start)[-1]
    np.testing.assert_array_equal(window, expected)

  @parameterized.parameters((4, 1, 2), (2, 3, 1), (5, 2, 1))
  @pytest.mark.heavy
  def test_features_depend_on_the_window_and_nothing_else(self, *shape):
    context = shape[0]
    net = hk.without_apply_rng(hk.transform(lambda *args: _make(*shape)(*args)))
    x = np.random.default_rng(0).standard_normal((12, 1, 3)).astype(np.float32)
    is_first = np.zeros((12, 1), bool)
    carry = jnp.zeros((1, context, 3))
    params = jax.jit(net.init)(jax.random.key(0), carry, x, is_first)
    params = _random(params, 0)

    def last(x):
      return jnp.sum(net.apply(params, carry, x, is_first)[1][-1] ** 3)

    slope = np.abs(jax.jit(jax.grad(last))(x)).sum((1, 2))
    np.testing.assert_array_equal(slope[:-context], 0)
    self.assertTrue(np.all(slope[-context:] > 0), slope)


class MemoryTest(parameterized.TestCase):
  def _temporary(self, context, num_rows, frame, hidden, num_layers=1):
    def fn(carry, x, is_first):
      encoder = lambda x: jnp.tile(  # noqa: E731
        jnp.mean(x.astype(jnp.float32), (1, 2)), (1, hidden)
      )
      module = transformer.TransformerEncoder(
        encoder, hidden, 2, num_layers, context
      )
      return module(carry, x, is_first)

    net = hk.without_apply_rng(hk.transform(fn))
    spec = jax.ShapeDtypeStruct
    args = (
      spec((2, context, *frame), jnp.uint8),
      spec((num_rows, 2, *frame), jnp.uint8),
      spec((num_rows, 2), bool),
    )
    params = jax.eval_shape(net.init, jax.random.key(0), *args)
    compiled = jax.jit(net.apply).lower(params, *args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  def test_frames_are_not_copied_for_each_window(self):
    frame, num_rows = (64, 64, 1), 32
    short, long = (
      self._temporary(context, num_rows, frame, 4) for context in (4, 16)
    )
    more_windows = (16 - 4) * num_rows * 2 * math.prod(frame)
    self.assertLess(long - short, more_windows / 4)

  @pytest.mark.heavy
  def test_tokens_are_not_copied_for_each_window(self):
    short, long = (
      self._temporary(context, 256, (1, 1, 1), 64, 2) for context in (4, 32)
    )
    self.assertLess(long, 2 * short)

  def test_memory_grows_with_the_length_of_a_sequence(self):
    short, long = (
      self._temporary(4, num_rows, (1, 1, 1), 8) for num_rows in (512, 2048)
    )
    self.assertLess(long, 6 * short)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(context=0), 'context.*positive integer, got 0'),
    (dict(context=2.0), 'context.*got 2.0'),
    (dict(context=True), 'context.*got True'),
    (dict(num_layers=0), 'num_layers.*got 0'),
    (dict(num_heads=0), 'num_heads.*got 0'),
    (dict(hidden_size=6), 'multiple of `num_heads`, got 6 and 4'),
  )
  def test_sizes(self, wrong, message):
    kwargs = dict(hidden_size=8, num_heads=4, num_layers=1, context=2) | wrong
    net = hk.transform(
      lambda: transformer.TransformerEncoder(jnp.ravel, **kwargs)
    )
    with self.assertRaisesRegex(ValueError, message):
      net.init(jax.random.key(0))

  @parameterized.parameters(
    (lambda: encoders.MLPEncoder((7,)), r'`hidden_size` = 4 .*got shape \[7\]'),
    (lambda: lambda x: x, r'got shape \[3\]'),
    (lambda: _make(2, 1, 1), 'must not remember'),
    (lambda: delay.Delay(1), 'must not remember'),
  )
  def test_frame_encoders(self, make, message):
    network = network_lib.transform(
      lambda x: encoding.Remember(_make(3, 1, 1, make()))(x)
    )
    with self.assertRaisesRegex(ValueError, message):
      network.init(jax.random.key(0), jnp.zeros((2, 3)))

  def test_no_function(self):
    net = hk.transform(lambda: _make(3, 1, 1, 'cnn'))
    with self.assertRaisesRegex(TypeError, "frames to features, got 'cnn'"):
      net.init(jax.random.key(0))

  @parameterized.parameters(
    ((2, 3, 3), np.float32), ((2, 2, 3), np.uint8), ((1, 2, 3), np.float32)
  )
  def test_carry(self, shape, dtype):
    net = hk.transform(lambda *args: _make(2, 1, 1)(*args))
    args = (jnp.zeros(shape, dtype), jnp.zeros((2, 3)), jnp.zeros(2, bool))
    with self.assertRaisesRegex(ValueError, r'carry of shape \(2, 2, 3\) and'):
      net.init(jax.random.key(0), *args)

  def test_dicts(self):
    network = network_lib.transform(
      lambda x: encoding.Remember(_make(3, 1, 1))(x)
    )
    with self.assertRaisesRegex(TypeError, r"dict of \['x'\].*`Concat`"):
      network.init(jax.random.key(0), {'x': jnp.zeros((2, 3))})


if __name__ == '__main__':
  absltest.main()
