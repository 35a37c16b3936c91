"""Tests for `hkgraph.graph.activations`."""

import functools
import subprocess
import sys

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from hkgraph.graph import activations


def custom(x):
  return x


class ActivationsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('jax.nn.swish', jax.nn.swish),
    ('jax.nn.silu', jax.nn.silu),
    ('jax.numpy.tanh', jnp.tanh),
    ('jax.nn.tanh', jnp.tanh),
    ('jax.lax.tanh', jax.lax.tanh),
    ('jax.nn.relu', jax.nn.relu),
  )
  def test_resolves_names(self, name, expected):
    self.assertIs(activations.resolve(name), expected)

  def test_leaves_callables(self):
    self.assertIs(activations.resolve(custom), custom)
    self.assertIsNone(activations.resolve(None))

  @parameterized.parameters(
    'jax.nn.initializers',  # A module.
    'jax.nn.initializers.zeros',
    'jax.numpy.float32',  # A class.
    'jax.numpy.__name__',
    'jax.numpy._src',
    'jax.numpy.linalg.norm',
    'os.system',
    'builtins.eval',
    'custom',
    '',
  )
  def test_refuses_other_names(self, name):
    with self.assertRaisesRegex(ValueError, '`activation` must be the name'):
      activations.resolve(name)

  @parameterized.parameters(
    (jax.nn.swish, 'jax.nn.swish'),
    (jax.nn.silu, 'jax.nn.swish'),
    (jnp.tanh, 'jax.numpy.tanh'),
    (jax.lax.tanh, 'jax.lax.tanh'),
    (jax.nn.relu, 'jax.nn.relu'),
    (jax.nn.sigmoid, 'jax.nn.sigmoid'),
    (custom, None),
    (lambda x: x, None),
    (None, None),
  )
  def test_public_name(self, function, expected):
    self.assertEqual(activations.public_name(function), expected)

  def test_public_name_and_resolve_are_inverse(self):
    for name in ('gelu', 'relu6', 'softplus', 'mish', 'elu', 'leaky_relu'):
      function = getattr(jax.nn, name)
      found = activations.public_name(function)
      self.assertIs(activations.resolve(found), function)

  @parameterized.parameters(
    (jnp.tanh, 'jax.numpy.tanh'),
    (custom, f'{__name__}.custom'),
    (functools.partial(custom), f'functools.partial({__name__}.custom)'),
    (
      functools.partial(jax.nn.leaky_relu, negative_slope=0.3),
      'functools.partial(jax.nn.leaky_relu)',
    ),
  )
  def test_qualified_name(self, function, expected):
    self.assertEqual(activations.qualified_name(function), expected)

  def test_qualified_name_of_an_object(self):
    class Gain:
      def __call__(self, x):
        return 2 * x

    self.assertEndsWith(activations.qualified_name(Gain()), '<locals>.Gain')

  def test_graphs_as_data_import_neither_jax_nor_haiku(self):
    code = (
      'import sys; from hkgraph.graph import builder, drawing; '
      'g = builder.PopulationGraph(); g.add_population("a", 1); '
      'assert not {"jax", "haiku", "matplotlib"} & set(sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


if __name__ == '__main__':
  absltest.main()
