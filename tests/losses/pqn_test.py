"""The loss of PQN, against its formula, and its targets (case B)."""

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.losses import pqn, returns

Q = np.array([[1.0, -2.0, 0.5], [3.0, 3.0, 9.0], [0.0, 4.0, -1.0]])
ACTION = np.array([1, 2, 0])
TARGET = np.array([0.5, -7.0, 2.0])
VALUE = np.array([1.25, 0.0, 4.0])
MASK = np.array([True, False, True])


def batch(**changes):
  fields = {
    'action': jnp.int32(ACTION),
    'target': jnp.float32(TARGET),
    'value': jnp.float32(VALUE),
    'mask': jnp.asarray(MASK),
  }
  return pqn.PQNBatch(**(fields | changes))


class PQNLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_numbers(self):
    loss, metrics = self.variant(pqn.pqn_loss)(jnp.float32(Q), batch())
    # Rows 0 and 2 count: q(s, a) is -2 and 0, the targets .5 and 2.
    expected = {
      'loss': (2.5**2 + 2**2) / 2 / 2,
      'td_error': (2.5 + 2) / 2,
      'q_mean': -1.0,
      # The errors are 2.5 and 2, the targets .5 and 2.
      'explained_variance': 1 - 0.25**2 / 0.75**2,
      'value_deviation': 0.25,  # |1 - 1.25| and |4 - 4|.
    }
    self.assertEqual(metrics.keys(), expected.keys())
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    self.assertEqual(loss, metrics['loss'])

  @pytest.mark.heavy
  def test_gradient_reaches_the_action_taken_alone(self):
    def loss(q, target):
      return pqn.pqn_loss(q, batch(target=target))[0]

    by_q, by_target = jax.grad(loss, (0, 1))(
      jnp.float32(Q), jnp.float32(TARGET)
    )
    expected = np.zeros_like(Q)
    expected[0, 1], expected[2, 0] = -2.5 / 2, -2 / 2
    np.testing.assert_allclose(by_q, expected, rtol=1e-6)
    np.testing.assert_array_equal(by_target, 0)

  def test_rows_outside_of_the_mask_may_be_anything(self):
    q, target, value = (
      jnp.float32(x).at[1].set(jnp.nan) for x in (Q, TARGET, VALUE)
    )
    spoilt = batch(target=target, value=value)
    clean = pqn.pqn_loss(jnp.float32(Q), batch())
    chex.assert_trees_all_equal(pqn.pqn_loss(q, spoilt), clean)
    gradient = jax.grad(lambda q: pqn.pqn_loss(q, spoilt)[0])(q)
    np.testing.assert_array_equal(gradient[1], 0)
    self.assertTrue(jnp.all(jnp.isfinite(gradient)))

  def test_no_row_is_no_loss(self):
    loss, metrics = pqn.pqn_loss(jnp.float32(Q), batch(mask=jnp.zeros(3, bool)))
    self.assertEqual(loss, 0)
    for value in metrics.values():
      self.assertEqual(value, 0)

  def test_sequences_are_rows(self):
    q = jnp.float32(np.tile(Q, (2, 1, 1)))
    doubled = jax.tree.map(lambda x: jnp.stack([x, x]), batch())
    chex.assert_trees_all_close(
      pqn.pqn_loss(q, doubled), pqn.pqn_loss(q[0], batch()), rtol=1e-6
    )

  def test_losses_of_heads_add_up(self):
    """Heads of other numbers of actions, reported each by its name."""
    small = jnp.float32(Q[:, :2])
    other = batch(action=jnp.int32([0, 1, 1]))
    both = pqn.PQNBatch(
      action={'a': batch().action, 'b': other.action},
      target=dict.fromkeys('ab', batch().target),
      value=dict.fromkeys('ab', batch().value),
      mask=batch().mask,
    )
    loss, metrics = pqn.pqn_loss({'a': jnp.float32(Q), 'b': small}, both)
    a, of_a = pqn.pqn_loss(jnp.float32(Q), batch())
    b, of_b = pqn.pqn_loss(small, other)
    np.testing.assert_allclose(loss, a + b, rtol=1e-6)
    for name in of_a:
      self.assertEqual(metrics[f'{name}/a'], of_a[name])
      self.assertEqual(metrics[f'{name}/b'], of_b[name])
    np.testing.assert_allclose(
      metrics['td_error'], (of_a['td_error'] + of_b['td_error']) / 2
    )

  def test_keys_that_do_not_match(self):
    with self.assertRaisesRegex(ValueError, "keys .'b'.*no keys"):
      pqn.pqn_loss({'b': jnp.float32(Q)}, batch())

  @hypothesis.given(st.integers(0, 2**32 - 1), st.integers(2, 5))
  def test_any_numbers(self, seed, num_actions):
    rng = np.random.default_rng(seed)
    shape = (4, 3)
    q = rng.normal(size=(*shape, num_actions))
    action = rng.integers(num_actions, size=shape)
    target, mask = rng.normal(size=shape), rng.random(shape) < 0.6
    loss, metrics = jax.jit(pqn.pqn_loss)(
      jnp.float32(q),
      pqn.PQNBatch(
        action=jnp.int32(action),
        target=jnp.float32(target),
        value=jnp.float32(q.max(-1)),
        mask=jnp.asarray(mask),
      ),
    )
    chosen = np.take_along_axis(q, action[..., None], -1)[..., 0]
    error = (chosen - target)[mask]
    expected = np.mean(error**2) / 2 if mask.any() else 0
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    self.assertEqual(metrics['value_deviation'], 0)


class TargetsTest(parameterized.TestCase):
  """Case B: lambda-returns on greedy values of states 0..3, 10 to 40."""

  @parameterized.named_parameters(
    ('no_end', [1, 1, 1], [24.8725, 33.05, 39]),
    ('terminated', [1, 0, 1], [10.9, 2, 39]),
  )
  def test_case_b(self, discount, expected):
    # The bootstrap is the larger value, whatever action was taken.
    greedy = jnp.float32([10, 20, 30, 40])
    q = jnp.stack([greedy - 7, greedy], -1)[:, None]
    target, _ = returns.td_lambda(
      jnp.float32([[1], [2], [3]]),
      jnp.float32(discount)[:, None],
      jnp.zeros((3, 1), bool),
      pqn.greedy_value(q),
      gamma=0.9,
      lambda_=0.5,
    )
    np.testing.assert_allclose(target[:, 0], expected, rtol=1e-6)

  def test_case_b_truncated(self):
    # The final observation, of value 50, is a row of its own: LAST.
    target, _ = returns.td_lambda(
      jnp.float32([[1], [2], [99], [3]]),
      jnp.ones((4, 1)),
      jnp.asarray([[False], [False], [True], [False]]),
      jnp.float32([[10], [20], [50], [30], [40]]),
      gamma=0.9,
      lambda_=0.5,
    )
    np.testing.assert_allclose(target[:, 0], [31.15, 47, 50, 39], rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
