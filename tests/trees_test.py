"""Tests of what is done to dicts of heads."""

from absl.testing import absltest
import chex
import jax.numpy as jnp

from hkgraph import trees


class TreesTest(chex.TestCase):
  def test_maps_over_entries_or_over_the_lone_one(self):
    def add(x, y):
      return x + y

    self.assertEqual(trees.map_heads(add, x=1, y=2), 3)
    self.assertEqual(
      trees.map_heads(add, x={'b': 1, 'a': 2}, y={'a': 20, 'b': 10}),
      {'a': 22, 'b': 11},
    )

  def test_names_both_when_keys_differ(self):
    with self.assertRaisesRegex(
      ValueError, r"`left` has keys \['a'\].*`right` has keys \['a', 'b'\]"
    ):
      trees.map_heads(max, left={'a': 1}, right={'a': 1, 'b': 2})
    with self.assertRaisesRegex(ValueError, r'`left` has no keys'):
      trees.check_same_keys(left=1, right={'a': 1})

  def test_total(self):
    self.assertEqual(trees.total({'a': jnp.float32(1), 'b': jnp.float32(2)}), 3)
    self.assertEqual(trees.total(jnp.float32(4)), 4)
    with self.assertRaises(AssertionError):
      trees.total({'a': jnp.zeros(2), 'b': jnp.zeros(3)})

  def test_reports_all_and_each(self):
    self.assertEqual(
      trees.report('kl', {'a': jnp.float32(1), 'b': jnp.float32(3)}, jnp.mean),
      {'kl': 2, 'kl/a': 1, 'kl/b': 3},
    )
    self.assertEqual(trees.report('kl', jnp.float32(5), jnp.sum), {'kl': 5})


if __name__ == '__main__':
  absltest.main()
