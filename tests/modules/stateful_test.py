"""Case C, and the two kinds of state."""

import functools

from absl.testing import absltest, parameterized
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import network as network_lib
from hkgraph.modules import stateful


class Sum(stateful.StatefulModule):
  """`h = (0 if first else h) + x`."""

  def initial_carry(self, x):
    return jnp.zeros_like(x)

  def step(self, carry, x):
    carry = carry + x
    return carry, carry


class Nested(stateful.StatefulModule):
  """Calls a stateful module inside its step, and a linear layer."""

  def initial_carry(self, x):
    return jnp.zeros_like(x)

  def step(self, carry, x):
    y = Sum()(x)
    carry = carry + hk.Linear(x.shape[-1])(y)
    return carry, carry


X = np.ones((4, 1, 1), np.float32)
FIRST = np.array([[True], [False], [True], [False]])


class CaseCTest(parameterized.TestCase):
  @parameterized.product(
    jit=[True, False], how=['apply', 'unroll', 'two unrolls', 'scan']
  )
  def test_sums_restart(self, jit, how):
    fallback = 'scan' if how == 'scan' else 'sequence'
    network = network_lib.transform(lambda x: Sum()(x), unroll=fallback)
    params, state = network.init(jax.random.key(0), X[0])
    maybe_jit = jax.jit if jit else lambda f: f
    apply, unroll = maybe_jit(network.apply), maybe_jit(network.unroll)

    def run(state, is_first):
      if how == 'apply':
        ys = []
        for x, f in zip(X, is_first, strict=True):
          y, state = apply(params, state, None, x, f)
          ys.append(y)
        return np.ravel(ys), state
      parts = [slice(0, 2), slice(2, 4)] if how == 'two unrolls' else [slice(4)]
      ys = []
      for part in parts:
        y, state = unroll(params, state, None, X[part], is_first[part])
        ys.append(y)
      return np.ravel(np.concatenate(ys)), state

    y, last = run(state, FIRST)
    np.testing.assert_array_equal(y, [1, 2, 1, 2])
    np.testing.assert_array_equal(jax.tree.leaves(last.carry)[0], [[2]])
    carried = state.replace(carry=jax.tree.map(lambda c: c + 5, state.carry))
    y, _ = run(carried, FIRST & np.array([[0], [0], [1], [0]], bool))
    np.testing.assert_array_equal(y, [6, 7, 1, 2])

  def test_init_leaves_the_carry_initial(self):
    network = network_lib.transform(lambda x: Sum()(x))
    _, state = network.init(jax.random.key(0), X[0] * 7)
    np.testing.assert_array_equal(jax.tree.leaves(state.carry)[0], [[0]])

  def test_nested_modules_agree_in_both_times(self):
    network = network_lib.transform(lambda x: Nested()(x))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 3, 2)).astype(np.float32)
    is_first = rng.random((6, 3)) < 0.4
    params, state = network.init(jax.random.key(0), x[0])
    expected, expected_state = network.unroll(params, state, None, x, is_first)
    ys, one = [], state
    for row, first in zip(x, is_first, strict=True):
      y, one = network.apply(params, one, None, row, first)
      ys.append(y)
    np.testing.assert_allclose(np.stack(ys), expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      one,
      expected_state,
    )


class KindsTest(parameterized.TestCase):
  def test_keys_go_on_through_a_reset(self):
    keys = jax.random.split(jax.random.key(1), 2)
    carry = {'key': keys, 'h': jnp.ones(2)}
    initial = {'key': jax.random.split(jax.random.key(0), 2), 'h': jnp.zeros(2)}
    got = stateful.reset_carry(jnp.array([True, False]), carry, initial)
    np.testing.assert_array_equal(got['h'], [0, 1])
    np.testing.assert_array_equal(
      jax.random.key_data(got['key']), jax.random.key_data(keys)
    )

  def test_foreign_state_is_statistics(self):
    def fn(x):
      norm = hk.BatchNorm(True, True, 0.5)
      norm = functools.partial(norm, is_training=True)
      return stateful.batch_apply(norm)(Sum()(x))

    network = network_lib.transform(fn)
    params, state = network.init(jax.random.key(0), X[0])
    self.assertLen(jax.tree.leaves(state.carry), 1)
    self.assertNotEmpty(jax.tree.leaves(state.statistics))
    _, after = network.unroll(params, state, None, X, FIRST)
    jax.tree.map(
      np.testing.assert_array_equal, after.statistics, state.statistics
    )
    updated = network.update_statistics(params, state, X, FIRST, FIRST | True)
    changed = jax.tree.map(
      lambda a, b: bool(np.any(a != b)), updated.statistics, state.statistics
    )
    self.assertTrue(any(jax.tree.leaves(changed)))
    jax.tree.map(np.testing.assert_array_equal, updated.carry, state.carry)

  def test_outside_of_transform(self):
    with self.assertRaisesRegex(ValueError, 'hkgraph.transform'):
      hk.transform_with_state(lambda x: Sum()(x)).init(jax.random.key(0), X[0])

  def test_twice_on_the_same_rows_has_no_meaning(self):
    def fn(x):
      module = Sum()
      return module(x) + module(x)

    network = network_lib.transform(fn)
    with self.assertRaisesRegex(ValueError, "'sum' was called twice"):
      network.init(jax.random.key(0), X[0])

  def test_two_modules_and_remat_are_no_second_call(self):
    def fn(x):
      return hk.remat(Sum())(x) + Sum()(x)

    network = network_lib.transform(fn)
    params, state = network.init(jax.random.key(0), X[0])
    y, _ = network.unroll(params, state, None, X, FIRST)
    np.testing.assert_array_equal(np.ravel(y), [2, 4, 2, 4])

  def test_carry_must_lead_with_the_batch(self):
    class Bad(Sum):
      def initial_carry(self, x):
        return jnp.zeros((5,))

      def step(self, carry, x):
        return carry, x

      def reset(self, carry, x):
        return carry

    network = network_lib.transform(lambda x: Bad()(x))
    with self.assertRaisesRegex(ValueError, r'batch 1; got shape \(5,\)'):
      network.init(jax.random.key(0), X[0])


if __name__ == '__main__':
  absltest.main()
