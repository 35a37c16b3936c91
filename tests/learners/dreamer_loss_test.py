"""The gradient that is taken along with the loss, step by step."""

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.learners import dreamer_loss


def _loss_of_step(params, x):
  y = jnp.tanh(x['x'] @ params['w'] + params['b'])
  loss = jnp.mean(x['scale'] * jnp.square(y - x['kind'][:, None]))
  return loss, {'largest': jnp.max(y)}


def _scaled(params, xs):
  mean, metrics = dreamer_loss._mean_of_steps(_loss_of_step, params, xs)
  return 3 * mean, metrics


def _plain(params, xs):
  losses, metrics = jax.vmap(lambda x: _loss_of_step(params, x))(xs)
  return 3 * jnp.mean(losses), metrics


def _params_and_steps(dtype):
  rng = np.random.default_rng(0)
  params = {'w': rng.normal(size=(3, 2)), 'b': rng.normal(size=(1, 2))}
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  xs = {
    'x': jnp.asarray(rng.normal(size=(5, 4, 3)), dtype),
    'scale': jnp.asarray(rng.uniform(size=(5, 4, 2)), dtype),
    'kind': jnp.asarray(rng.integers(0, 3, size=(5, 4))),
  }
  return params, xs


class MeanOfStepsTest(parameterized.TestCase):
  @parameterized.parameters((jnp.float32, 1e-6), (jnp.bfloat16, 2e-2))
  @pytest.mark.heavy
  def test_against_the_derivative_of_the_mean(self, dtype, tolerance):
    params, xs = _params_and_steps(dtype)
    grads, metrics = jax.grad(_scaled, has_aux=True)(params, xs)
    wanted_grads, wanted_metrics = jax.grad(_plain, has_aux=True)(params, xs)
    chex.assert_trees_all_equal_dtypes(grads, params)
    chex.assert_trees_all_close(
      (grads, metrics),
      (wanted_grads, wanted_metrics),
      rtol=tolerance,
      atol=tolerance,
    )
    # Without a derivative it gives the same.
    chex.assert_trees_all_close(
      _scaled(params, xs), _plain(params, xs), rtol=tolerance
    )

  def test_nothing_is_kept_for_the_derivative_but_the_gradient(self):
    params, xs = _params_and_steps(jnp.float32)
    _, vjp = jax.vjp(lambda params: _scaled(params, xs)[0], params)
    kept = sorted(x.shape for x in jax.tree.leaves(vjp) if jnp.ndim(x))
    self.assertEqual(kept, [(1, 2), (3, 2)])


if __name__ == '__main__':
  absltest.main()
