"""Symlog and symexp: case H, and NumPy."""

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from hkgraph.modules import symlog


class SymlogTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_case_h(self):
    forth = self.variant(symlog.symlog)
    back = self.variant(symlog.symexp)
    self.assertEqual(forth(jnp.float32(0)), 0)
    np.testing.assert_allclose(forth(jnp.float32(np.e - 1)), 1, rtol=1e-6)
    np.testing.assert_allclose(back(forth(jnp.float32(-3))), -3, rtol=1e-6)
    for fn in (forth, back):
      self.assertEqual(jax.grad(fn)(jnp.float32(0)), 1)

  @hypothesis.given(
    hnp.arrays(np.float32, 5, elements={'min_value': -80, 'max_value': 80})
  )
  def test_numpy(self, x):
    size = np.abs(x.astype(np.float64))
    np.testing.assert_allclose(
      symlog.symlog(x), np.sign(x) * np.log1p(size), 1e-5, 1e-37
    )
    np.testing.assert_allclose(
      symlog.symexp(x), np.sign(x) * np.expm1(size), 1e-4, 1e-37
    )
    np.testing.assert_array_equal(symlog.symlog(-x), -symlog.symlog(x))
    slopes = jax.vmap(jax.grad(symlog.symlog))(x)
    np.testing.assert_allclose(slopes, 1 / (1 + size), rtol=1e-5)

  @pytest.mark.heavy
  def test_those_of_rlax(self):
    x = jnp.linspace(-9, 9, 20)
    np.testing.assert_allclose(symlog.symlog(x), rlax.signed_logp1(x), 1e-6)
    np.testing.assert_allclose(symlog.symexp(x), rlax.signed_expm1(x), 1e-6)

  @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
  def test_dtype_is_kept(self, dtype):
    for fn in (symlog.symlog, symlog.symexp):
      self.assertEqual(fn(jnp.ones(2, dtype)).dtype, dtype)


if __name__ == '__main__':
  absltest.main()
