"""Steps of the optimizer, against the formula."""

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np
import optax

from hkgraph.learners import optimizer as optimizer_lib

LR, EPS = 0.1, 1e-5


def steps(optimizer, grads, param=2.0):
  """The parameter after each of some gradients."""
  params = {'x': jnp.float32(param)}
  state, seen = optimizer.init(params), []
  for grad in grads:
    updates, state = optimizer.update({'x': jnp.float32(grad)}, state, params)
    params = optax.apply_updates(params, updates)
    seen.append(params['x'])
  return np.array(seen)


class MakeOptimizerTest(parameterized.TestCase):
  # The first step of Adam is `-lr g / (|g| + eps)`: `eps` shows where the
  # gradient is small.
  @parameterized.parameters(3.0, -0.5, 1e-5)
  def test_first_step(self, grad):
    actual = steps(optimizer_lib.make_optimizer(LR), [grad])
    expected = 2 - LR * grad / (abs(grad) + EPS)
    np.testing.assert_allclose(actual, [expected], rtol=1e-6)

  def test_gradient_is_clipped_before_adam(self):
    grad = 1e-5 / np.hypot(1, 1)
    optimizer = optimizer_lib.make_optimizer(LR, max_grad_norm=1e-5)
    params = {'x': jnp.float32(0), 'y': jnp.float32(0)}
    updates, _ = optimizer.update(
      {'x': jnp.float32(5), 'y': jnp.float32(5)}, optimizer.init(params)
    )
    expected = -LR * grad / (grad + EPS)
    np.testing.assert_allclose(updates['x'], expected, rtol=1e-5)
    np.testing.assert_allclose(updates['y'], expected, rtol=1e-5)

  def test_linear_schedule_ends_at_zero(self):
    optimizer = optimizer_lib.make_optimizer(
      LR, schedule='linear', total_steps=4
    )
    # With a constant gradient, each of Adam's steps has the length lr.
    actual = -np.diff(steps(optimizer, [1.0] * 6), prepend=2.0)
    np.testing.assert_allclose(
      actual, LR * np.array([1, 0.75, 0.5, 0.25, 0, 0]), atol=1e-5
    )

  def test_weight_decay_shrinks_without_gradient(self):
    optimizer = optimizer_lib.make_optimizer(LR, weight_decay=0.5)
    np.testing.assert_allclose(
      steps(optimizer, [0.0, 0.0]), 2 * 0.95 ** np.array([1, 2]), rtol=1e-6
    )

  def test_radam(self):
    # Liu et al. (2020), algorithm 2: momentum alone while rho <= 5, then Adam
    # times r.
    grad, expected, m, v = 0.5, [], 0.0, 0.0
    limit, x = 2 / (1 - 0.999) - 1, 2.0
    for t in range(1, 9):
      m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
      mean, decay = m / (1 - 0.9**t), 0.999**t
      rho = limit - 2 * t * decay / (1 - decay)
      if rho >= 5:
        r = (rho - 4) * (rho - 2) * limit
        r = np.sqrt(r / ((limit - 4) * (limit - 2) * rho))
        mean *= r / (np.sqrt(v / (1 - decay)) + EPS)
      x -= LR * mean
      expected.append(x)
    optimizer = optimizer_lib.make_optimizer(LR, name='radam')
    np.testing.assert_allclose(
      steps(optimizer, [grad] * 8), expected, rtol=1e-4
    )

  def test_unknown_name(self):
    with self.assertRaisesRegex(ValueError, "'radam', got 'sgd'"):
      optimizer_lib.make_optimizer(LR, name='sgd')
    with self.assertRaisesRegex(ValueError, '`weight_decay` must be 0'):
      optimizer_lib.make_optimizer(LR, name='radam', weight_decay=0.1)

  @parameterized.parameters(('linear', 'total_steps'), ('cosine', "'cosine'"))
  def test_wrong_schedule(self, schedule, message):
    with self.assertRaisesRegex(ValueError, message):
      optimizer_lib.make_optimizer(LR, schedule=schedule)


if __name__ == '__main__':
  absltest.main()
