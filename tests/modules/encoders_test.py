"""Perceptrons and convolutions against NumPy, and the contract."""

from absl.testing import absltest, parameterized
import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import delay, encoders, encoding
from tests.modules import agreement


def _run(make, x):
  """Output and parameters by the explicit contract, one row `[B, ...]`."""
  net = hk.without_apply_rng(
    hk.transform(lambda x, f: make()((), x, f)),
  )
  is_first = np.ones(x.shape[0], bool)
  params = jax.jit(net.init)(jax.random.key(3), x, is_first)
  rng = np.random.default_rng(0)
  trained = jax.tree.map(
    lambda p: p + (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), params
  )
  carry, y = jax.jit(net.apply)(trained, x, is_first)
  assert carry == ()
  return y, jax.device_get(trained), jax.device_get(params)


def _norm(x, params, epsilon=1e-5):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(x.var(-1, keepdims=True) + epsilon)
  return x * params['scale'] + params['offset']


def _convolve(x, params, stride, padding):
  """Pixel by pixel; `padding` is what comes before and after."""
  w, b = params['w'], params['b']
  x = np.pad(x, [(0, 0), padding, padding, (0, 0)])
  size = w.shape[0]
  rows = (x.shape[1] - size) // stride + 1
  y = np.empty((len(x), rows, rows, w.shape[-1]), np.float32)
  for i in range(rows):
    for j in range(rows):
      top, left = i * stride, j * stride
      patch = x[:, top : top + size, left : left + size]
      y[:, i, j] = np.tensordot(patch, w, 3) + b
  return y


class EncodersTest(parameterized.TestCase):
  @parameterized.parameters(np.float32, np.uint8, np.int32, np.bool_)
  def test_mlp(self, dtype):
    x = (np.random.default_rng(0).standard_normal((3, 2, 2)) * 3).astype(dtype)
    y, p, _ = _run(lambda: encoders.MLPEncoder((5, 4)), x)
    h = x.reshape(3, 4).astype(np.float32)  # At face value.
    for name in ('mlp_encoder/linear', 'mlp_encoder/linear_1'):
      h = np.tanh(h @ p[name]['w'] + p[name]['b'])
    np.testing.assert_allclose(y, h, rtol=1e-5, atol=1e-6)

  def test_q_mlp(self):
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    y, p, _ = _run(lambda: encoders.QMLPEncoder((5, 6)), x)
    h = x
    for end in ('', '_1'):
      layer = p[f'qmlp_encoder/linear{end}']
      h = h @ layer['w'] + layer['b']
      h = np.maximum(_norm(h, p[f'qmlp_encoder/layer_norm{end}']), 0)
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-5)

  @parameterized.product(
    dtype=(np.float32, np.uint8, np.int32), norm=(True, False)
  )
  def test_symlog(self, dtype, norm):
    x = (np.random.default_rng(0).standard_normal((3, 2, 2)) * 90).astype(dtype)
    y, p, _ = _run(lambda: encoders.SymlogEncoder((5, 4), norm=norm), x)
    h = x.reshape(3, 4).astype(np.float32)  # At face value.
    h = np.sign(h) * np.log1p(np.abs(h))
    for end in ('', '_1'):
      layer = p[f'symlog_encoder/perceptron/linear{end}']
      h = h @ layer['w'] + layer.get('b', 0)
      self.assertEqual('b' in layer, not norm)
      if norm:
        h = _norm(h, p[f'symlog_encoder/perceptron/layer_norm{end}'], 1e-3)
      h = h / (1 + np.exp(-h))
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-5)

  @parameterized.parameters(np.uint8, np.float32, np.int32)
  def test_conv(self, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (2, 8, 8, 2)).astype(dtype)
    y, p, _ = _run(lambda: encoders.ConvEncoder((3, 4), 5), x)
    h = x.astype(np.float32) / (255 if dtype == np.uint8 else 1)
    # Of an even number of pixels every second one is a centre: 0 before, 1
    # after.
    for name in ('conv_encoder/conv2_d', 'conv_encoder/conv2_d_1'):
      h = np.maximum(_convolve(h, p[name], 2, (0, 1)), 0)
    self.assertEqual(h.shape, (2, 2, 2, 4))
    layer = p['conv_encoder/linear']
    h = np.maximum(h.reshape(2, -1) @ layer['w'] + layer['b'], 0)
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-4)

  def test_q_conv(self):
    x = np.random.default_rng(0).random((2, 6, 6, 3)) < 0.5
    y, p, _ = _run(lambda: encoders.QConvEncoder((4,), (5,)), x)
    h = _convolve(x.astype(np.float32), p['q_conv_encoder/conv2_d'], 1, (0, 0))
    self.assertEqual(h.shape, (2, 4, 4, 4))
    h = np.maximum(_norm(h, p['q_conv_encoder/layer_norm']), 0)
    layer = p['q_conv_encoder/linear']
    h = h.reshape(2, -1) @ layer['w'] + layer['b']
    h = np.maximum(_norm(h, p['q_conv_encoder/layer_norm_1']), 0)
    np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-4)

  @parameterized.parameters(
    (encoders.MLPEncoder, (3,), 64),
    (encoders.QMLPEncoder, (3,), 128),
    (encoders.ConvEncoder, (11, 9, 2), 256),
    (encoders.QConvEncoder, (10, 10, 4), 128),
  )
  def test_defaults(self, make, frame, size):
    x = np.zeros((2, *frame), np.float32)
    y, _, params = _run(make, x)
    self.assertEqual(y.shape, (2, size))
    for name, leaves in params.items():
      if 'w' in leaves:
        w = leaves['w'].reshape(-1, leaves['w'].shape[-1])
        gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
        np.testing.assert_allclose(
          gram, 2 * np.eye(len(gram)), atol=1e-4, err_msg=name
        )
        np.testing.assert_array_equal(leaves['b'], 0)

  def test_w_init(self):
    make = lambda: encoders.MLPEncoder((2,), w_init=jnp.zeros)  # noqa: E731
    _, _, params = _run(make, np.ones((1, 3), np.float32))
    np.testing.assert_array_equal(params['mlp_encoder/linear']['w'], 0)

  @pytest.mark.heavy
  def test_any_size_of_image(self):
    y, _, _ = _run(encoders.ConvEncoder, np.ones((2, 1, 1, 1), np.uint8))
    self.assertEqual(y.shape, (2, 256))
    make = lambda: encoders.QConvEncoder(stride=4)  # noqa: E731
    y, _, _ = _run(make, np.ones((1, 40, 52, 3), np.uint8))
    self.assertEqual(y.shape, (1, 128))

  def test_activations_are_bounded_by_the_frames(self):
    net = hk.transform(lambda x, f: encoders.ConvEncoder((8, 8), 4)((), x, f))
    x = jax.ShapeDtypeStruct((4, 16, 16, 1), np.uint8)
    f = jax.ShapeDtypeStruct((4,), bool)
    params = jax.eval_shape(net.init, jax.random.key(0), x, f)
    jaxpr = jax.make_jaxpr(net.apply)(params, None, x, f)
    sizes = [
      v.aval.shape
      for e in jaxpr.eqns
      if e.primitive.name == 'conv_general_dilated'
      for v in e.outvars
    ]
    self.assertEqual(sizes, [(4, 8, 8, 8), (4, 4, 4, 8)])

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_half_precision(self, dtype):
    y, _, params = _run(encoders.QMLPEncoder, jnp.ones((2, 3), dtype))
    self.assertEqual(y.dtype, dtype)
    chex.assert_tree_all_finite(params)
    dtypes = {p.dtype for p in jax.tree.leaves(params)}
    self.assertEqual(dtypes, {jnp.dtype(dtype)})


class ContractTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: encoders.MLPEncoder((4,)), (2, 3)),
    (lambda: encoders.QMLPEncoder((4,)), ()),
    (lambda: encoders.SymlogEncoder((4,)), (2, 3)),
    (lambda: encoders.ConvEncoder((3,), 4), (5, 6, 1)),
    (lambda: encoders.QConvEncoder((3,), (4,)), (5, 6, 1)),
  )
  def test_apply_and_unroll_agree(self, make, frame):
    network = network_lib.transform(lambda x: encoding.Remember(make())(x))
    x, is_first = agreement.rows(frame, dtype=np.uint8)
    y, _, end = agreement.check(network, x, is_first)
    self.assertEqual(y.shape, (7, 3, 4))
    self.assertEmpty(jax.tree.leaves(end.carry))

  def test_encoders_without_memory_may_be_shared(self):
    def fn(x):
      module = encoding.Remember(encoders.MLPEncoder((2,)))
      return module(x), module(-x)

    network = network_lib.transform(fn)
    params, state = network.init(jax.random.key(0), jnp.ones((2, 3)))
    self.assertLen(params, 1)
    (y, z), _ = network.apply(
      params, state, None, jnp.ones((2, 3)), jnp.ones(2, bool)
    )
    np.testing.assert_allclose(y, -z, rtol=1e-6)  # tanh is odd.

  @parameterized.parameters(((3,), (2,)), ((2, 2), (2, 3)), ((), ()))
  def test_rows_that_do_not_fit(self, rows, lead):
    net = hk.transform(lambda x, f: encoders.MLPEncoder()((), x, f))
    with self.assertRaisesRegex(ValueError, '`is_first` of shape'):
      net.init(jax.random.key(0), np.zeros((*lead, 3)), np.zeros(rows, bool))

  @parameterized.parameters(
    (lambda: encoders.MLPEncoder((4, 0)), r'`hidden_sizes`.*got \(4, 0\)'),
    (lambda: encoders.QMLPEncoder((4.0,)), '`hidden_sizes`'),
    (lambda: encoders.SymlogEncoder((0,)), '`hidden_sizes`'),
    (lambda: encoders.MLPEncoder((True,)), '`hidden_sizes`'),
    (lambda: encoders.ConvEncoder((0,)), '`channels`'),
    (lambda: encoders.ConvEncoder(hidden_size=True), '`hidden_size`'),
    (lambda: encoders.QConvEncoder(stride=0), '`stride`'),
    (lambda: encoders.QConvEncoder(padding='FULL'), "got 'FULL'"),
  )
  def test_sizes(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      hk.transform(make).init(jax.random.key(0))

  @parameterized.parameters(encoders.ConvEncoder, encoders.QConvEncoder)
  def test_no_images(self, make):
    for frame in ((4,), (4, 4), (0, 4, 1)):
      with self.assertRaisesRegex(ValueError, r'reads images \[H, W, C\]'):
        _run(make, np.zeros((2, *frame), np.float32))

  def test_image_smaller_than_the_kernel(self):
    make = lambda: encoders.QConvEncoder((4, 4))  # noqa: E731
    with self.assertRaisesRegex(ValueError, r'no pixel left.*\(4, 4, 1\)'):
      _run(make, np.zeros((2, 4, 4, 1), np.float32))

  def test_dicts(self):
    network = network_lib.transform(
      lambda x: encoding.Remember(encoders.MLPEncoder())(x)
    )
    with self.assertRaisesRegex(TypeError, r"dict of \['a', 'b'\].*`Concat`"):
      network.init(
        jax.random.key(0), {'b': jnp.ones((1, 1)), 'a': jnp.ones((1, 1))}
      )

  def test_only_encoders_are_made_to_remember(self):
    network = network_lib.transform(lambda x: encoding.Remember(jnp.tanh)(x))
    with self.assertRaisesRegex(TypeError, 'must be an Encoder'):
      network.init(jax.random.key(0), jnp.ones((1, 1)))

  def test_what_serves_as_an_encoder(self):
    def fn(x):
      return tuple(
        encoding.as_module(module)(x)
        for module in (
          encoders.MLPEncoder((2,)),
          delay.Delay(1),
          lambda x: {'b': x, 'a': -x},
        )
      )

    network = network_lib.transform(fn)
    (y, delayed, joined), _, _ = agreement.check(network, *agreement.rows((1,)))
    self.assertEqual(y.shape, (7, 3, 2))
    self.assertEqual(delayed.shape, (7, 3, 1))
    np.testing.assert_array_equal(joined[..., :1], -joined[..., 1:])
    np.testing.assert_array_equal(joined[..., 1:], agreement.rows((1,))[0])
    with self.assertRaisesRegex(TypeError, 'got 3'):
      encoding.as_module(3)

  def test_sizes_may_come_once_and_from_numpy(self):
    sizes = encoding.check_sizes('sizes', (np.int64(n) for n in (4, 5)))
    self.assertEqual(sizes, (4, 5))
    with self.assertRaisesRegex(TypeError, r'`sizes`.*\(64, 64\), got 64'):
      encoding.check_sizes('sizes', 64)


if __name__ == '__main__':
  absltest.main()
