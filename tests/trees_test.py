"""Tests of what is done to dicts of heads."""

from absl.testing import absltest
import chex
import jax
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

  def test_packs_what_is_alike_and_unpacks(self):
    tree = {
      'a': jnp.arange(3.0),
      'b': [jnp.arange(3.0) + 5, jnp.arange(3)],
      'c': jnp.zeros((2, 3)),
    }
    arrays, unpack = trees.pack(tree)
    self.assertEqual([x.shape for x in arrays], [(2, 3), (1, 3), (1, 2, 3)])
    chex.assert_trees_all_equal(unpack(arrays), tree)
    firsts = unpack([x[..., 0] for x in arrays])
    chex.assert_trees_all_equal(firsts, jax.tree.map(lambda x: x[..., 0], tree))

  def test_scans_as_lax_does_and_adds_one_more(self):
    def output(carry, x):
      return {'sum': carry, 'twice': 2 * x, 'is_even': x % 2 == 0}

    def step(carry, x):
      return carry + x, output(carry, x)

    args = step, jnp.int32(1), jnp.arange(4)
    carry, ys = trees.scan(*args, lambda carry: output(carry, jnp.int32(9)))
    expected_carry, expected = jax.lax.scan(*args)
    self.assertEqual(carry, expected_carry)
    firsts = jax.tree.map(lambda x: x[:-1], ys)
    chex.assert_trees_all_equal(firsts, expected)
    last = jax.tree.map(lambda x: x[-1], ys)
    self.assertEqual(last, {'sum': 7, 'twice': 18, 'is_even': False})

  def test_unzips(self):
    self.assertEqual(
      trees.unzip({'a': (1, 2), 'b': (3, 4)}),
      ({'a': 1, 'b': 3}, {'a': 2, 'b': 4}),
    )
    self.assertEqual(trees.unzip((1, 2)), (1, 2))

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
