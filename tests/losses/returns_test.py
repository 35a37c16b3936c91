"""Tests of targets and advantages through episode boundaries."""

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.losses import returns

GAMMA, LAMBDA = 0.9, 0.8
td_lambda = jax.jit(returns.td_lambda)


def column(*numbers):
  return jnp.asarray(numbers, jnp.float32)[:, None]


def case_a(discount_into_last, garbage=99.0):
  """Rows F M M L F M and the bootstrap row, of one environment."""
  return {
    'r_t': column(1, 1, 1, garbage, 1, 0),
    'discount_t': column(1, 1, discount_into_last, garbage, 1, 1),
    'last_tm1': jnp.asarray([0, 0, 0, 1, 0, 0], bool)[:, None],
    'v': column(0.5, 0.6, 0.7, 1.0, 0.8, 2.0, 0.0),
  }


def forward_view(r_t, discount_t, last_tm1, v, gamma, lambda_):
  """Sums weighted n-step returns forwards, transition by transition."""
  num_steps, batch_size = r_t.shape
  target = v[:-1].copy()
  for b in range(batch_size):
    for start in np.flatnonzero(~last_tm1[:, b]):
      total, weight = 0.0, 1.0
      for t in range(start, num_steps):
        total += weight * r_t[t, b]
        weight *= gamma * discount_t[t, b]
        if t + 1 == num_steps or last_tm1[t + 1, b]:
          total += weight * v[t + 1, b]
          break
        total += weight * (1 - lambda_) * v[t + 1, b]
        weight *= lambda_
      target[start, b] = total
  return target


class TdLambdaTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # By hand: the last valid delta is 1 + .9 * d * 1 - .7 = .3 + .9 d, and
    # before it A = delta + .72 A': delta = 1 + .9 * .7 - .6 and
    # 1 + .9 * .6 - .5.
    (0.0, [1.93712, 1.246, 0.3]),
    (1.0, [2.40368, 1.894, 1.2]),
  )
  def test_case_a(self, discount_into_last, expected):
    fn = self.variant(returns.td_lambda)
    target, advantage = fn(
      **case_a(discount_into_last), gamma=GAMMA, lambda_=LAMBDA
    )
    # Row 4: its own delta 1 + .9 * 2 - .8, and the trace of row 5's, which is
    # 0 + .9 * 0 - 2.
    delta_4, delta_5 = 1 + 0.9 * 2 - 0.8, -2.0
    expected = [*expected, 0, delta_4 + 0.72 * delta_5, delta_5]
    np.testing.assert_allclose(advantage[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(
      target[:, 0],
      np.add(expected, [0.5, 0.6, 0.7, 1, 0.8, 2]),
      atol=1e-5,
    )
    self.assertEqual(advantage[3, 0], 0)

  def test_case_a_ends_with_the_bootstrap_row(self):
    rows = jax.tree.map(lambda x: x[:5], case_a(1.0)) | {
      'v': case_a(1.0)['v'][:6]
    }
    target, advantage = td_lambda(**rows, gamma=GAMMA, lambda_=LAMBDA)
    np.testing.assert_allclose(
      advantage[:, 0], [2.40368, 1.894, 1.2, 0, 2.0], atol=1e-5
    )
    np.testing.assert_allclose(
      target[:, 0], [2.90368, 2.494, 1.9, 1.0, 2.8], atol=1e-5
    )

  @parameterized.parameters(np.nan, np.inf, -np.inf, 1e30)
  def test_nothing_of_the_reset_transition_gets_through(self, garbage):
    results = [
      td_lambda(**case_a(1.0, x), gamma=GAMMA, lambda_=LAMBDA)
      for x in (0.0, garbage)
    ]
    chex.assert_trees_all_equal(*results)

  def test_no_gradient_of_the_reset_transition_gets_through(self):
    rows = case_a(1.0, np.nan)

    def total(v):
      _, advantage = td_lambda(**rows | {'v': v}, gamma=GAMMA, lambda_=LAMBDA)
      return jnp.sum(advantage[3])

    chex.assert_trees_all_equal(
      jax.grad(total)(rows['v']), jnp.zeros_like(rows['v'])
    )

  @parameterized.named_parameters(
    dict(
      testcase_name='no_end',
      r_t=column(1, 2, 3),
      discount_t=column(1, 1, 1),
      last=[0, 0, 0],
      greedy=column(10, 20, 30, 40),
      # 39 = 3 + .9 * 40; 33.05 = 2 + .9 * (15 + 19.5); ...
      expected=[24.8725, 33.05, 39],
    ),
    dict(
      testcase_name='terminated',
      r_t=column(1, 2, np.nan, 3),
      discount_t=column(1, 0, np.nan, 1),
      last=[0, 0, 1, 0],
      greedy=column(10, 20, 50, 30, 40),
      expected=[10.9, 2, 50, 39],
    ),
    dict(
      testcase_name='truncated',
      r_t=column(1, 2, np.nan, 3),
      discount_t=column(1, 1, np.nan, 1),
      last=[0, 0, 1, 0],
      greedy=column(10, 20, 50, 30, 40),
      expected=[31.15, 47, 50, 39],
    ),
  )
  def test_case_b(self, r_t, discount_t, last, greedy, expected):
    # What is greedy counts, not what was done: the other action is worth less.
    q = jnp.stack([greedy - 7, greedy], axis=-1)
    target, _ = td_lambda(
      r_t,
      discount_t,
      jnp.asarray(last, bool)[:, None],
      jnp.max(q, axis=-1),
      gamma=0.9,
      lambda_=0.5,
    )
    np.testing.assert_allclose(target[:, 0], expected, atol=1e-5)

  @hypothesis.given(
    seed=st.integers(0, 2**31),
    last=hnp.arrays(bool, (6, 3)),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lambda_=st.sampled_from([0.0, 0.5, 1.0]),
  )
  def test_agrees_with_the_forward_view(self, seed, last, gamma, lambda_):
    rng = np.random.default_rng(seed)
    r_t, v = rng.normal(size=(6, 3)), rng.normal(size=(7, 3))
    discount_t = rng.choice([0.0, 0.5, 1.0], size=(6, 3))
    expected = forward_view(r_t, discount_t, last, v, gamma, lambda_)
    target, advantage = td_lambda(
      *map(jnp.float32, (np.where(last, np.nan, r_t), discount_t)),
      jnp.asarray(last),
      jnp.float32(v),
      gamma=gamma,
      lambda_=lambda_,
    )
    np.testing.assert_allclose(target, expected, atol=1e-5)
    np.testing.assert_allclose(advantage, expected - v[:-1], atol=1e-5)

  def test_dicts_are_their_entries(self):
    rows = case_a(1.0)
    other = {'r_t': -rows['r_t'], 'v': 2 * rows['v']}
    both = td_lambda(
      {'leg': rows['r_t'], 'arm': other['r_t']},
      rows['discount_t'],
      rows['last_tm1'],
      {'leg': rows['v'], 'arm': other['v']},
      gamma=GAMMA,
      lambda_=LAMBDA,
    )
    for name, alone in (('leg', rows), ('arm', rows | other)):
      chex.assert_trees_all_close(
        tuple(x[name] for x in both),
        td_lambda(**alone, gamma=GAMMA, lambda_=LAMBDA),
      )

  def test_scans_once_for_many_rewards(self):
    rows = case_a(1.0)
    many = {k: {str(i): rows[k] for i in range(5)} for k in ('r_t', 'v')}

    def fn(rows):
      return returns.td_lambda(**rows, gamma=GAMMA, lambda_=LAMBDA)

    jaxpr = str(jax.make_jaxpr(fn)(rows | many))
    self.assertEqual(jaxpr.count('scan['), 1)

  def test_takes_the_dtype_of_the_values(self):
    rows = case_a(1.0)
    rows = {
      k: x if x.dtype == bool else x.astype(jnp.bfloat16)
      for k, x in rows.items()
    }
    target, advantage = td_lambda(**rows, gamma=GAMMA, lambda_=LAMBDA)
    chex.assert_type([target, advantage], jnp.bfloat16)

  def test_gamma_and_lambda_may_be_arrays(self):
    rows = case_a(1.0)

    def fn(g, mix):
      return returns.td_lambda(**rows, gamma=g, lambda_=mix)

    many = jax.vmap(fn)(jnp.asarray([0.5, GAMMA]), jnp.asarray([1.0, LAMBDA]))
    chex.assert_trees_all_close(
      jax.tree.map(lambda x: x[1], many), fn(GAMMA, LAMBDA), rtol=1e-6
    )

  def test_names_keys_that_differ(self):
    rows = case_a(1.0)
    rows['r_t'] = {'leg': rows['r_t']}
    with self.assertRaisesRegex(ValueError, r"\['leg'\].*no keys"):
      returns.td_lambda(**rows, gamma=GAMMA, lambda_=LAMBDA)

  def test_refuses_values_without_a_bootstrap_row(self):
    rows = case_a(1.0)
    rows['v'] = rows['v'][:-1]
    with self.assertRaises(AssertionError):
      returns.td_lambda(**rows, gamma=GAMMA, lambda_=LAMBDA)


if __name__ == '__main__':
  absltest.main()
