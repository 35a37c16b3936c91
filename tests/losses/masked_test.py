"""Tests of means over the rows that count."""

from absl.testing import absltest
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.losses import masked

NAMES = ('mean', 'variance', 'explained_variance')
jitted = {name: jax.jit(getattr(masked, name)) for name in NAMES}


class MaskedTest(chex.TestCase):
  @hypothesis.given(mask=hnp.arrays(bool, (3, 4)), seed=st.integers(0, 2**31))
  def test_agrees_with_numpy_on_the_rows_alone(self, mask, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(3, 2, size=(2, 3, 4))
    hidden = jnp.float32(np.where(mask, x, np.nan))
    rows = x[mask] if mask.any() else np.zeros(1)
    np.testing.assert_allclose(
      jitted['mean'](hidden, mask), rows.mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
      jitted['variance'](hidden, mask), rows.var(), atol=1e-5
    )
    expected = 0.0
    if mask.sum() > 1:
      expected = 1 - (x - y)[mask].var() / rows.var()
    actual = jitted['explained_variance'](jnp.float32(y), hidden, mask)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)

  @chex.variants(with_jit=True, without_jit=True)
  def test_explained_variance_of_known_values(self):
    fn = self.variant(masked.explained_variance)
    target, mask = jnp.asarray([1.0, 2.0, 3.0, 9.0]), jnp.arange(4) < 3
    self.assertEqual(fn(target - 5, target, mask), 1)
    self.assertEqual(fn(jnp.zeros(4), target, mask), 0)
    # Residuals 2, 4, 6: variance 8 / 3 over the targets' 2 / 3.
    np.testing.assert_allclose(fn(-target, target, mask), 1 - 4, rtol=1e-6)

  def test_targets_that_differ_by_rounding_do_not_vary(self):
    target = jnp.full((1000,), 7.7)
    mask = target > 0
    self.assertEqual(masked.explained_variance(target * 2, target, mask), 0)
    self.assertLess(masked.variance(target, mask), 1e-18)

  def test_gradients_stay_finite_beside_garbage(self):
    x, mask = jnp.asarray([1.0, jnp.nan, 3.0]), jnp.asarray([1, 0, 1], bool)
    chex.assert_trees_all_close(
      jax.grad(masked.mean)(x, mask), jnp.asarray([0.5, 0, 0.5])
    )
    chex.assert_trees_all_equal(
      jax.grad(masked.mean)(x, jnp.zeros(3, bool)), jnp.zeros(3)
    )

  def test_refuses_a_mask_of_numbers(self):
    with self.assertRaises(AssertionError):
      masked.mean(jnp.ones(3), jnp.ones(3))


if __name__ == '__main__':
  absltest.main()
