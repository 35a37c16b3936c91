"""Tests of the pieces that move dicts of arrays about."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import routing


def inputs(leading=(4,), **sizes):
  sizes = sizes or {'eye': 3, 'arm': 2, 'leg': 1}
  total = np.cumsum([0, *sizes.values()])
  return {
    key: jnp.broadcast_to(
      jnp.arange(start, start + n, dtype=float), (*leading, n)
    )
    for start, (key, n) in zip(total[:-1], sizes.items(), strict=True)
  }


LEADING = [(), (4,), (3, 4)]


class RoutingTest(chex.TestCase):
  def test_filter(self):
    x = inputs()
    self.assertEqual(list(routing.Filter('leg', 'eye')(x)), ['leg', 'eye'])
    self.assertIs(routing.Filter('leg')(x)['leg'], x['leg'])

  def test_map(self):
    x = inputs()
    doubled = routing.Map(lambda y: 2 * y)(x)
    chex.assert_trees_all_equal(doubled, {k: 2 * y for k, y in x.items()})
    each = routing.Map(
      {
        'leg': lambda y: y + 1,
        'eye': lambda y: y + 2,
        'arm': lambda y: y + 3,
      }
    )(x)
    chex.assert_trees_all_equal(
      each, {'eye': x['eye'] + 2, 'arm': x['arm'] + 3, 'leg': x['leg'] + 1}
    )

  def test_parallel(self):
    x = jnp.arange(3.0)
    actual = routing.Parallel({'same': lambda y: y, 'sum': jnp.sum})(x)
    chex.assert_trees_all_equal(actual, {'same': x, 'sum': jnp.asarray(3.0)})

  @parameterized.parameters(*LEADING)
  def test_concat(self, *leading):
    x = inputs(leading)
    np.testing.assert_array_equal(
      routing.Concat()(x),
      np.broadcast_to([3, 4, 0, 1, 2, 5], (*leading, 6)),
    )
    np.testing.assert_array_equal(
      routing.Concat(['leg', 'arm'])(x),
      np.broadcast_to([5, 3, 4], (*leading, 3)),
    )

  def test_merge(self):
    parts = [{'a': 1}, {'b': 2, 'c': 3}, {}]
    expected = {'a': 1, 'b': 2, 'c': 3}
    self.assertEqual(routing.Merge()(parts), expected)
    self.assertEqual(routing.Merge()({'x': parts[0], 'y': parts[1]}), expected)

  @parameterized.parameters(*LEADING)
  def test_split_undoes_concat(self, *leading):
    x = inputs(leading)
    joined = routing.Concat(['eye', 'arm', 'leg'])(x)
    chex.assert_trees_all_equal(
      routing.Split([3, 2, 1])(joined), list(x.values())
    )
    chex.assert_trees_all_equal(
      routing.Split({'eye': 3, 'arm': 2, 'leg': 1})(joined), x
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*LEADING)
  def test_scale(self, *leading):
    x = inputs(leading)['eye']
    np.testing.assert_allclose(
      self.variant(routing.Scale(2.0, [10, 20, 30]))(x),
      np.broadcast_to([10, 22, 34], x.shape),
    )

  def test_scale_of_images(self):
    image = jnp.full((2, 3, 3, 1), 51, jnp.uint8)
    actual = routing.Scale(1 / 255)(image)
    chex.assert_type(actual, jnp.float32)
    np.testing.assert_allclose(actual, np.full(image.shape, 0.2), rtol=1e-6)

  def test_scale_keeps_float_types(self):
    x = jnp.ones((2, 3), jnp.bfloat16)
    self.assertEqual(routing.Scale(np.ones(3), 1.0)(x).dtype, jnp.bfloat16)

  def test_scale_from_spec(self):
    spec = specs.BoundedArray((2,), np.float32, [-2.0, 0.0], [4.0, 1.0])
    x = jnp.asarray([[[-2.0, 0.0], [1.0, 0.5], [4.0, 1.0]]])
    np.testing.assert_allclose(
      routing.Scale.from_spec(spec)(x), [[[-1, -1], [0, 0], [1, 1]]]
    )

  @parameterized.parameters((4, 2, 3), (5, 4, 2, 3))
  def test_haiku_flattens_the_last_axes(self, *shape):
    def fn(x):
      return hk.Flatten(preserve_dims=-2)(x)

    transformed = hk.without_apply_rng(hk.transform(fn))
    out = transformed.apply({}, jnp.zeros(shape))
    chex.assert_shape(out, (*shape[:-2], 6))

  @pytest.mark.heavy
  def test_composes_in_a_sequence(self):
    def fn(observation):
      return hk.Sequential(
        [
          routing.Filter('eye', 'arm'),
          routing.Map(
            {
              'eye': hk.Linear(4, name='see'),
              'arm': hk.Linear(5, name='feel'),
            }
          ),
          routing.Concat(),
          routing.Parallel(
            {
              'policy': hk.Sequential([hk.Linear(3), routing.Split([1, 2])]),
              'value': hk.Linear(1, name='value'),
            }
          ),
        ]
      )(observation)

    transformed = hk.without_apply_rng(hk.transform(fn))
    rows = inputs((5, 4))
    params = transformed.init(jax.random.key(0), rows)
    self.assertSameElements(params, ['see', 'feel', 'linear', 'value'])
    out = transformed.apply(params, rows)
    chex.assert_shape(
      [*out['policy'], out['value']], [(5, 4, 1), (5, 4, 2), (5, 4, 1)]
    )
    alone = transformed.apply(params, jax.tree.map(lambda x: x[2], rows))
    chex.assert_trees_all_close(
      alone, jax.tree.map(lambda x: x[2], out), rtol=1e-5
    )

  @parameterized.named_parameters(
    ('filter', routing.Filter('eye', 'tail'), r"\['tail'\].*\['arm', 'eye'"),
    ('filter_array', routing.Filter('eye'), 'needs a dict, got', 'array'),
    ('map_missing', routing.Map({'tail': abs}), r"misses.*\['tail'\]"),
    ('map_more', routing.Map({'eye': abs}), r"\['eye'\], got.*'arm'"),
    ('map_array', routing.Map(abs), 'needs a dict', 'array'),
    ('concat', routing.Concat(['tail']), r"\['tail'\]"),
    ('concat_none', routing.Concat([]), 'one or more arrays'),
    (
      'concat_shapes',
      routing.Concat(),
      r"'eye': \(3, 3\)",
      {'arm': np.zeros((4, 2)), 'eye': np.zeros((3, 3))},
    ),
    ('concat_scalar', routing.Concat(), r"'arm': \(\)", {'arm': np.zeros(())}),
    ('merge', routing.Merge(), r"\['a'\]", [{'a': 1, 'b': 1}, {'a': 2}]),
    ('split', routing.Split([2, 3]), r'\[2, 3\].*5.*got \[4, 3\]', 'array'),
    ('scale', routing.Scale(np.ones(2)), r'by \[2\].*got \[4, 3\]', 'array'),
    # An axis of size 1 would broadcast in silence.
    ('scale_1', routing.Scale(np.ones(1)), r'by \[1\].*got \[4, 3\]', 'array'),
  )
  def test_refuses(self, fn, message, x=None):
    given = {'array': inputs()['eye']}.get(x, x) if isinstance(x, str) else x
    with self.assertRaisesRegex(ValueError, message):
      fn(inputs() if given is None else given)

  @parameterized.parameters(
    specs.Array((2,), np.float32),
    specs.BoundedArray((2,), np.float32, [0, -np.inf], 1),
    specs.BoundedArray((1,), np.float32, -3.4e38, 3.4e38),
    specs.BoundedArray((1,), np.float32, 1.0, 1.0),
  )
  def test_scale_refuses_specs_without_bounds(self, spec):
    with self.assertRaisesRegex(ValueError, 'needs bounds'):
      routing.Scale.from_spec(spec)


if __name__ == '__main__':
  absltest.main()
