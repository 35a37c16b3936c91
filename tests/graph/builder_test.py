"""Tests for `hkgraph.graph.builder`: what is refused, and where."""

import functools

from absl.testing import absltest, parameterized
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.graph import builder, spec, validate
from tests.graph import declarations


def _started():
  """`eye -> brain -> arm`, not finalized."""
  graph = builder.PopulationGraph()
  graph.add_input('eye', 8, input_from='pixels')
  graph.add_population('brain', 32, activation=jax.nn.swish)
  graph.add_output('arm', 2, output_to='action')
  graph.connect('eye', 'brain')
  graph.connect('brain', 'arm')
  return graph


def linear():
  return hk.Linear(2)


class PopulationGraphTest(parameterized.TestCase):
  def test_declares_populations(self):
    graph = _started()
    graph.add_output('value', 1, activation='jax.numpy.tanh')
    graph.connect('brain', 'value')
    self.assertEqual(
      graph.finalize().populations,
      (
        spec.PopulationSpec('arm', 2, output_to='action'),
        spec.PopulationSpec('brain', 32, activation=jax.nn.swish),
        spec.PopulationSpec('eye', 8, input_from='pixels'),
        spec.PopulationSpec('value', 1, activation=jnp.tanh, output_to='value'),
      ),
    )

  def test_declares_connections(self):
    graph = _started()
    graph.connect('brain', 'arm', delay=3)
    graph.connect('brain', 'arm', transform=linear)
    self.assertEqual(
      graph.finalize().outgoing('brain'),
      (
        spec.ConnectionSpec('brain', 'arm', 0, None, 0),
        spec.ConnectionSpec('brain', 'arm', 0, linear, 1),
        spec.ConnectionSpec('brain', 'arm', 3, None, 2),
      ),
    )

  def test_reciprocal_makes_two_connections(self):
    graph, by_hand = _started(), _started()
    graph.connect('eye', 'arm', delay=2, transform=linear, reciprocal=True)
    by_hand.connect('eye', 'arm', delay=2, transform=linear)
    by_hand.connect('arm', 'eye', delay=2, transform=linear)
    self.assertEqual(graph.finalize(), by_hand.finalize())
    self.assertLen(graph.finalize().connections, 4)

  def test_connections_may_come_before_populations(self):
    graph = builder.PopulationGraph()
    graph.connect('eye', 'brain')
    graph.connect('brain', 'arm')
    graph.add_output('arm', 2, output_to='action')
    graph.add_population('brain', 32, activation=jax.nn.swish)
    graph.add_input('eye', 8, input_from='pixels')
    self.assertEqual(graph.finalize(), _started().finalize())

  def test_several_inputs_read_one_key(self):
    graph = _started()
    graph.add_input('other_eye', 8, input_from='pixels')
    self.assertEqual(graph.finalize().input_sizes, {'pixels': 8})

  def test_numpy_integers_become_ints(self):
    graph = _started()
    graph.add_population('leg', np.int64(4))
    graph.connect('leg', 'arm', delay=np.int32(2))
    result = graph.finalize()
    self.assertIs(type(result.population('leg').size), int)
    self.assertIs(type(result.outgoing('leg')[0].delay), int)
    self.assertIn('"delay": 2', result.to_json())

  def test_finalized_graph_does_not_see_later_calls(self):
    graph = _started()
    before = graph.finalize()
    graph.connect('brain', 'brain', delay=1)
    graph.add_population('leg', 4)
    self.assertEqual(before, _started().finalize())
    self.assertLen(graph.finalize().populations, 4)
    self.assertLen(graph.finalize().connections, 3)

  @hypothesis.given(st.data())
  def test_order_of_declaration_has_no_effect(self, data):
    calls = data.draw(declarations.calls())
    shuffled = data.draw(st.permutations(calls))
    one, other = declarations.declare(calls), declarations.declare(shuffled)
    self.assertEqual(one, other)
    self.assertEqual(hash(one), hash(other))
    self.assertEqual(one.digest(), other.digest())
    self.assertEqual(one.to_json(), other.to_json())
    self.assertEqual(one.order, other.order)

  def test_order_has_no_effect_on_transforms_of_unlike_names(self):
    def first():
      return hk.Linear(2)

    def second():
      return hk.Linear(2)

    one, other = _started(), _started()
    for graph, transforms in ((one, [first, second]), (other, [second, first])):
      for transform in transforms:
        graph.connect('eye', 'arm', transform=transform)
    self.assertEqual(one.finalize(), other.finalize())


class ArgumentsTest(parameterized.TestCase):
  def _refuses(self, error, message, method, *args, **kwargs):
    """The call raises, and the graph is what it was before it."""
    graph = _started()
    with self.assertRaisesRegex(error, message):
      getattr(graph, method)(*args, **kwargs)
    self.assertEqual(graph.finalize(), _started().finalize())

  @parameterized.parameters(
    ('my leg', "'my_leg'"),
    ('2nd', "'p_2nd'"),
    ('', 'empty'),
    ('class', "'class_'"),
    ('a/b', "'a_b'"),
    ('jambe_é', "'jambe__'"),
    ('leg\n', "'leg_'"),
  )
  def test_name_that_is_no_identifier(self, name, mended):
    self._refuses(ValueError, mended, 'add_population', name, 4)
    self._refuses(ValueError, mended, 'add_output', name, 4)
    self._refuses(ValueError, mended, 'add_input', name, 4, input_from='pixels')

  @parameterized.parameters(None, 3, b'leg', (('leg',),))
  def test_name_that_is_no_string(self, name):
    self._refuses(TypeError, 'must be a string', 'add_population', name, 4)
    self._refuses(TypeError, 'must be a string', 'add_output', name, 4)
    self._refuses(TypeError, 'must be a string', 'connect', name, 'arm')
    self._refuses(TypeError, 'must be a string', 'connect', 'arm', name)

  def test_name_that_is_taken(self):
    self._refuses(
      ValueError,
      r"'brain' is taken by add_population\('brain', 32\).*'brain_2'",
      'add_output',
      'brain',
      2,
    )

  @parameterized.parameters(
    (0, ValueError),
    (-1, ValueError),
    (1.0, TypeError),
    (2.5, TypeError),
    (True, TypeError),
    (np.True_, TypeError),
    ('4', TypeError),
    (None, TypeError),
    (np.array([4]), TypeError),
  )
  def test_size_that_is_no_positive_integer(self, size, error):
    message = '`size` must be a positive integer, got'
    self._refuses(error, message, 'add_population', 'leg', size)
    self._refuses(error, message, 'add_output', 'leg', size)
    self._refuses(error, message, 'add_input', 'leg', size, input_from='x')

  @parameterized.parameters(
    (-1, ValueError, '-1'),
    (1.5, TypeError, '1.5'),
    (True, TypeError, 'True; write 1'),
    (False, TypeError, 'False; write 0'),
    (None, TypeError, 'None'),
    ('1', TypeError, "'1'"),
  )
  def test_delay_that_is_no_count(self, delay, error, given):
    message = f'`delay` must be a non-negative integer, got {given}'
    self._refuses(error, message, 'connect', 'brain', 'arm', delay=delay)

  @parameterized.parameters(
    ('jax.nn.swich', ValueError, "did you mean 'jax.nn.swish'"),
    ('swish', ValueError, "did you mean 'jax.nn.swish'"),
    ('tanh', ValueError, "did you mean 'jax.numpy.tanh'"),
    ('os.system', ValueError, 'jax.numpy, jax.nn or jax.lax'),
    (3, TypeError, 'callable'),
  )
  def test_activation_that_is_none(self, activation, error, message):
    self._refuses(
      error, message, 'add_population', 'leg', 4, activation=activation
    )

  def test_callable_without_hash(self):
    class Unhashable:
      __hash__ = None

      def __call__(self, x):
        return x

    self._refuses(
      TypeError,
      '`activation` must be hashable.*lambda',
      'add_population',
      'leg',
      4,
      activation=Unhashable(),
    )

  def test_module_that_is_no_class(self):
    self._refuses(
      TypeError, 'hg.Population', 'add_population', 'leg', 4, module='Leg'
    )

  @parameterized.parameters(
    (3, 'factory'),
    ('hk.Linear', 'factory'),
    (lambda x: x, r'without arguments.*takes \(x\)'),
    (functools.partial(lambda x, y: x, 1), r'without arguments.*takes \(y\)'),
  )
  def test_transform_that_is_no_factory(self, transform, message):
    self._refuses(
      TypeError, message, 'connect', 'brain', 'arm', transform=transform
    )

  @parameterized.parameters(
    lambda: hk.Linear(2),
    functools.partial(hk.Linear, 2),
    (lambda size=2: hk.Linear(size),),
    hk.Flatten,
  )
  def test_factories(self, transform):
    graph = _started()
    graph.connect('brain', 'arm', transform=transform)
    self.assertIs(graph.finalize().incoming('arm')[1].transform, transform)

  @parameterized.parameters((None, TypeError), (3, TypeError), ('', ValueError))
  def test_input_from_that_is_no_key(self, key, error):
    self._refuses(error, '`input_from`', 'add_input', 'leg', 4, input_from=key)

  @parameterized.parameters((3, TypeError), ('', ValueError))
  def test_output_to_that_is_no_key(self, key, error):
    self._refuses(error, '`output_to`', 'add_output', 'leg', 4, output_to=key)

  def test_reciprocal_to_itself(self):
    self._refuses(
      ValueError,
      r"connect\('brain', 'brain', delay=2\)",
      'connect',
      'brain',
      'brain',
      delay=2,
      reciprocal=True,
    )

  def test_reciprocal_that_is_no_bool(self):
    self._refuses(
      TypeError, '`reciprocal`', 'connect', 'brain', 'arm', reciprocal=1
    )

  def test_refused_graph_can_be_mended(self):
    graph = _started()
    graph.connect('leg', 'arm')
    with self.assertRaisesRegex(validate.GraphError, "'leg'"):
      graph.finalize()
    graph.add_population('leg', 4)
    self.assertLen(graph.finalize().populations, 4)


if __name__ == '__main__':
  absltest.main()
