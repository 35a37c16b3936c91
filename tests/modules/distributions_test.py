"""Tests of policies and of what learners ask of them."""

import functools

from absl.testing import absltest, parameterized
import chex
import distrax
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import distributions

NUM_ACTIONS = (3, 1, 4)


def tanh_normal(loc, scale, low=(-1.0,), high=(1.0,)):
  return distributions.TanhNormal(
    jnp.asarray(loc), jnp.asarray(scale), low, high
  )


def policies(leading):
  """One policy of each kind, and a dict of all."""
  rng = np.random.default_rng(3)
  normal = jnp.float32(rng.normal(size=(3, *leading, 8)))
  single = {
    'categorical': distributions.categorical(normal[0]),
    'several': distributions.multi_categorical(normal[1], NUM_ACTIONS),
    'tanh_normal': tanh_normal(
      normal[2][..., :2],
      1 + jnp.square(normal[2][..., 2:4]),
      (-2.0, 0.0),
      (4.0, 1.0),
    ),
  }
  return single | {'dict': single}


sample = jax.jit(distributions.sample)
log_prob_of = jax.jit(distributions.log_prob)


class TanhNormalTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # Standard normal at 0: -log(2 pi) / 2.
    (0.0, 1.0, -1.0, 1.0, -0.918939),
    # ... at 1, less log(1 - tanh(1)^2).
    (1.0, 1.0, -1.0, 1.0, -0.551377),
    # 2 (log 2 - 30) is the logarithm of the slope.
    (30.0, np.exp(10), -1.0, 1.0, 47.694766),
    (-30.0, np.exp(10), -1.0, 1.0, 47.694766),
    # Half the width of the bounds is 3.
    (0.0, 1.0, -2.0, 4.0, -2.017551),
  )
  def test_case_f(self, u, scale, low, high, expected):
    def log_prob(loc, scale, u):
      return tanh_normal(loc, scale, (low,), (high,)).log_prob(u)

    args = (jnp.zeros(1), jnp.asarray([scale]), jnp.asarray([u]))
    fn = self.variant(jax.value_and_grad(log_prob, (0, 1, 2)))
    value, grads = fn(*map(jnp.float32, args))
    np.testing.assert_allclose(value, expected, atol=1e-5)
    np.testing.assert_allclose(grads[0], [u / scale**2], rtol=1e-5)
    np.testing.assert_allclose(
      grads[1], [(u**2 / scale**2 - 1) / scale], rtol=1e-5
    )
    slope = -u / scale**2 + 2 * np.tanh(u)
    np.testing.assert_allclose(grads[2], [slope], rtol=1e-5)

  @parameterized.parameters(1e-3, 1.0, 1e4)
  def test_is_finite_far_out(self, scale):
    def log_prob(loc, u):
      return jnp.sum(tanh_normal(loc, jnp.full((5, 1), scale)).log_prob(u))

    u = jnp.asarray([-1e4, -50.0, 0.0, 50.0, 1e4])[:, None]
    chex.assert_tree_all_finite(
      jax.value_and_grad(log_prob, (0, 1))(jnp.zeros((5, 1)), u)
    )

  @pytest.mark.heavy
  def test_dimensions_add_up(self):
    policy = tanh_normal([0.3, -1.0], [0.5, 2.0], (-2.0, 0.0), (4.0, 1.0))
    u = jnp.asarray([0.1, 0.7])
    alone = [
      tanh_normal(
        policy.loc[i : i + 1],
        policy.scale[i : i + 1],
        ((-2.0, 0.0)[i],),
        ((4.0, 1.0)[i],),
      )
      for i in range(2)
    ]
    for fn in (lambda p, u: p.log_prob(u), lambda p, u: p.entropy()):
      np.testing.assert_allclose(
        fn(policy, u),
        sum(fn(p, u[i : i + 1]) for i, p in enumerate(alone)),
        rtol=1e-5,
      )

  @pytest.mark.heavy
  def test_density_integrates_to_1_over_the_bounds(self):
    policy = tanh_normal(
      jnp.full((20_001, 1), 0.4), jnp.full((20_001, 1), 0.9), (-2,), (4,)
    )
    u = jnp.linspace(-8, 8, 20_001)[:, None]
    action = np.asarray(policy.to_environment(u)[:, 0], float)
    density = np.exp(np.asarray(policy.log_prob(u), float))
    np.testing.assert_allclose(np.trapezoid(density, action), 1, atol=1e-4)
    # ... which also gives the entropy.
    entropy = -np.trapezoid(density * np.log(density), action)
    np.testing.assert_allclose(policy.entropy()[0], entropy, atol=1e-3)

  @parameterized.parameters(
    (0.0, 1.0, 1e-3), (2.0, 1.0, 1e-3), (0.0, 2.0, 0.03), (-1.5, 2.0, 0.03)
  )
  def test_entropy_is_near_that_of_samples(self, loc, scale, atol):
    policy = tanh_normal([loc], [scale], (-2,), (4,))
    z = np.linspace(-10, 10, 100_001)
    u = loc + scale * z
    log_slope = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    mean = np.trapezoid(np.exp(-z * z / 2) * log_slope, z) / np.sqrt(2 * np.pi)
    normal = 0.5 * np.log(2 * np.pi * np.e) + np.log(scale)
    expected = normal + mean + np.log(3)
    np.testing.assert_allclose(policy.entropy(), expected, atol=atol)

  def test_entropy_pulls_a_wide_policy_in_and_a_narrow_one_out(self):
    def entropy(log_scale):
      return tanh_normal(jnp.zeros(1), jnp.exp(log_scale)).entropy()

    for log_scale, sign in ((-2.0, 1), (2.0, -1)):
      grads = jax.grad(entropy)(jnp.asarray([log_scale]))
      self.assertEqual(np.sign(grads), sign)

  def test_middle_of_the_bounds(self):
    action = tanh_normal([0.0], [1.0], (-2,), (4,)).to_environment(jnp.zeros(1))
    np.testing.assert_allclose(action, [1.0])

  @hypothesis.given(
    low=st.floats(-1e6, 1e6),
    width=st.floats(1e-3, 1e6),
    u=st.floats(-1e6, 1e6, width=32),
  )
  def test_never_exceeds_the_bounds(self, low, width, u):
    high = low + width
    # Between the bounds there must be something that float32 holds.
    lowest, highest = np.float32(low), np.float32(high)
    if float(lowest) < low:
      lowest = np.nextafter(lowest, np.float32(np.inf))
    if float(highest) > high:
      highest = np.nextafter(highest, np.float32(-np.inf))
    hypothesis.assume(lowest < highest)
    # Accelerators round subnormal numbers to 0.
    hypothesis.assume(all(x == 0 or abs(x) > 1e-30 for x in (low, high)))
    policy = tanh_normal([0.0], [1.0], (low,), (high,))
    for x in (u, -1e9, 1e9):
      action = float(policy.to_environment(jnp.float32([x]))[0])
      self.assertBetween(action, low, high)

  @parameterized.parameters('float32', 'bfloat16', 'float16')
  def test_bounds_that_the_dtype_does_not_hold(self, dtype):
    policy = tanh_normal([0.0, 0.0], [1.0, 1.0], (-0.1, 0.7), (0.1, 0.9))
    for sign in (-1, 1):
      action = policy.to_environment(jnp.full((2,), sign * 40, dtype))
      self.assertEqual(action.dtype, dtype)
      action = np.asarray(action, float)
      self.assertTrue(np.all(action >= [-0.1, 0.7]), action)
      self.assertTrue(np.all(action <= [0.1, 0.9]), action)
      np.testing.assert_allclose(
        action, [sign * 0.1, 0.8 + sign * 0.1], rtol=0.01
      )

  def test_samples_are_those_of_the_normal(self):
    shape = (40_000, 2)
    loc = jnp.broadcast_to(jnp.asarray([1.0, -2.0]), shape)
    scale = jnp.broadcast_to(jnp.asarray([0.5, 2.0]), shape)
    policy = tanh_normal(loc, scale, (-1, -1), (1, 1))
    u = policy.sample(seed=jax.random.key(0))
    np.testing.assert_allclose(u.mean(0), [1, -2], atol=0.05)
    np.testing.assert_allclose(u.std(0), [0.5, 2], rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(u.T)[0, 1], 0, atol=0.02)

  def test_shapes(self):
    policy = policies((3, 4))['tanh_normal']
    self.assertEqual(policy.event_shape, (2,))
    self.assertEqual(policy.batch_shape, (3, 4))
    u = policy.sample(seed=jax.random.key(0), sample_shape=5)
    chex.assert_shape(u, (5, 3, 4, 2))

  def test_refuses_parameters_that_do_not_fit(self):
    with self.assertRaises(AssertionError):
      tanh_normal([0.0, 1.0], [1.0])
    with self.assertRaises(AssertionError):
      tanh_normal([0.0, 1.0], [1.0, 1.0], (-1,), (1,))


class MultiCategoricalTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_sum_of_single_choices(self):
    logits = jax.random.normal(jax.random.key(0), (5, 8))

    def joint(logits, action):
      policy = distributions.multi_categorical(logits, NUM_ACTIONS)
      return policy.log_prob(action), policy.entropy(), policy.mode()

    action = jnp.asarray(
      [[0, 0, 3], [1, 0, 2], [2, 0, 1], [0, 0, 0], [2, 0, 3]]
    )
    log_prob, entropy, mode = self.variant(joint)(logits, action)
    parts = np.split(np.asarray(logits, float), np.cumsum(NUM_ACTIONS)[:-1], 1)
    logs = [x - np.logaddexp.reduce(x, 1, keepdims=True) for x in parts]
    np.testing.assert_allclose(
      log_prob,
      sum(x[np.arange(5), action[:, i]] for i, x in enumerate(logs)),
      rtol=1e-5,
    )
    np.testing.assert_allclose(
      entropy, -sum((np.exp(x) * x).sum(1) for x in logs), rtol=1e-5
    )
    np.testing.assert_array_equal(mode.T, [x.argmax(1) for x in logs])

  def test_samples_follow_the_probabilities(self):
    probs = [[0.2, 0.3, 0.5], [1.0], [0.1, 0.2, 0.3, 0.4]]
    logits = jnp.log(jnp.concatenate([jnp.asarray(p) for p in probs]))
    policy = distributions.multi_categorical(
      jnp.broadcast_to(logits, (40_000, 8)), NUM_ACTIONS
    )
    action = sample(policy, jax.random.key(0))
    chex.assert_shape(action, (40_000, 3))
    chex.assert_type(action, jnp.int32)
    for i, p in enumerate(probs):
      counts = np.bincount(action[:, i], minlength=len(p))
      np.testing.assert_allclose(counts / 40_000, p, atol=0.01)

  @pytest.mark.heavy
  def test_padding_lets_no_gradient_or_action_through(self):
    def fn(logits, action):
      policy = distributions.multi_categorical(logits, NUM_ACTIONS)
      return policy.log_prob(action) + policy.entropy()

    grads = jax.grad(fn)(jnp.arange(8.0), jnp.asarray([2, 0, 1]))
    chex.assert_tree_all_finite(grads)
    # The choice that is none.
    self.assertEqual(grads[3], 0)
    policy = distributions.multi_categorical(jnp.arange(8.0), NUM_ACTIONS)
    self.assertEqual(policy.log_prob(jnp.asarray([3, 0, 0])), -jnp.inf)

  def test_kl_ignores_the_padding(self):
    p, q = (
      distributions.multi_categorical(x, NUM_ACTIONS)
      for x in (jnp.arange(8.0), jnp.zeros(8))
    )
    # To the uniform: log of the number of joint actions less the entropy.
    np.testing.assert_allclose(
      p.kl_divergence(q), np.log(12) - p.entropy(), rtol=1e-5
    )

  def test_operations_do_not_grow_with_the_actions_drawn(self):
    def count(k):
      def fn(x, key):
        return distributions.sample(
          distributions.multi_categorical(x, (2, 3) * k), key
        )

      jaxpr = jax.make_jaxpr(fn)(jnp.zeros(5 * k), jax.random.key(0))
      return str(jaxpr).count('random_bits')

    self.assertEqual(count(1), count(10))


class InterfaceTest(chex.TestCase):
  @parameterized.product(kind=['tanh_normal', 'dict'], leading=[(4,), (3, 4)])
  def test_shapes_and_dtypes(self, kind, leading):
    policy = policies(leading)[kind]
    action = sample(policy, jax.random.key(0))
    chex.assert_tree_shape_prefix(action, leading)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      action,
      distributions.mode(policy),
      distributions.to_environment(policy, action),
    )
    for x in jax.tree.leaves(
      (log_prob_of(policy, action), jax.jit(distributions.entropy)(policy))
    ):
      chex.assert_shape(x, leading)
      chex.assert_type(x, jnp.float32)

  def test_leaves_jit_and_scan_and_vmap_as_it_went_in(self):
    policy = policies((3, 4))['dict']
    action = sample(policy, jax.random.key(0))
    log_prob = log_prob_of(policy, action)

    def row(policy_t, action_t):
      return policy_t, distributions.log_prob(policy_t, action_t)

    scan = jax.lax.scan(lambda _, xs: (0, row(*xs)), 0, (policy, action))[1]
    vmapped = jax.jit(jax.vmap(jax.vmap(row)))(policy, action)
    jitted = jax.jit(row)(policy, action)
    for out_policy, out in (scan, vmapped, jitted):
      chex.assert_trees_all_close(out, log_prob, rtol=1e-5)
      chex.assert_trees_all_close(
        log_prob_of(out_policy, action), log_prob, rtol=1e-5
      )

  @pytest.mark.heavy
  def test_rows_can_be_picked(self):
    policy = policies((3, 4))['dict']
    action = sample(policy, jax.random.key(0))
    log_prob = log_prob_of(policy, action)
    for index in (1, (2, 3), (slice(None), jnp.asarray([3, 0]))):
      pick = functools.partial(jax.tree.map, lambda x, i=index: x[i])
      part = pick(policy)
      chex.assert_trees_all_close(
        log_prob_of(part, pick(action)), pick(log_prob), rtol=1e-6
      )
      chex.assert_trees_all_equal_shapes(
        sample(part, jax.random.key(1)), pick(action)
      )

  def test_compiles_once(self):
    chex.clear_trace_counter()
    fn = jax.jit(chex.assert_max_traces(distributions.sample, n=1))
    for seed in range(2):
      fn(policies((4,))['dict'], jax.random.key(seed))

  @pytest.mark.heavy
  def test_log_densities_of_a_dict_are_those_of_its_heads(self):
    policy = policies((4,))['dict']
    action = sample(policy, jax.random.key(0))
    actual = log_prob_of(policy, action)
    for name, head in policy.items():
      chex.assert_trees_all_equal(actual[name], head.log_prob(action[name]))

  def test_heads_draw_independently(self):
    head = tanh_normal(jnp.zeros((10_000, 1)), jnp.ones((10_000, 1)))
    policy = {'b': head, 'a': head, 'c': head}
    action = sample(policy, jax.random.key(0))
    correlations = np.corrcoef(np.concatenate(list(action.values()), 1).T)
    np.testing.assert_allclose(correlations, np.eye(3), atol=0.05)

  def test_order_of_a_dict_does_not_matter(self):
    policy = policies((4,))['dict']
    key = jax.random.key(0)
    chex.assert_trees_all_equal(
      # By closure: as an argument the dict would be sorted on the way in.
      jax.jit(
        lambda: distributions.sample(dict(reversed(policy.items())), key)
      )(),
      sample(policy, key),
    )

  def test_only_bounded_actions_change_for_the_environment(self):
    policy = policies((4,))['dict']
    action = sample(policy, jax.random.key(0))
    converted = distributions.to_environment(policy, action)
    for name in ('categorical', 'several'):
      chex.assert_trees_all_equal(converted[name], action[name])
    np.testing.assert_allclose(
      converted['tanh_normal'],
      np.asarray([1.0, 0.5])
      + np.asarray([3.0, 0.5]) * np.tanh(action['tanh_normal']),
      rtol=1e-5,
      atol=1e-6,
    )

  def test_mode_is_the_likeliest_action_or_the_median(self):
    logits = jnp.asarray([[0.0, 2.0, 1.0]])
    policy = {
      'one': distributions.categorical(logits),
      'two': tanh_normal([[0.3]], [[2.0]]),
    }
    expected = {'one': jnp.asarray([1]), 'two': jnp.asarray([[0.3]])}
    chex.assert_trees_all_equal(distributions.mode(policy), expected)

  def test_takes_any_distribution(self):
    policy = distrax.Normal(jnp.zeros(3), jnp.ones(3))
    action = sample(policy, jax.random.key(0))
    self.assertIs(distributions.to_environment(policy, action), action)
    np.testing.assert_allclose(
      distributions.entropy(policy), [1.418939] * 3, rtol=1e-6
    )

  @parameterized.parameters(
    distributions.log_prob, distributions.to_environment
  )
  def test_names_keys_that_differ(self, fn):
    policy = {'arm': distributions.categorical(jnp.zeros(3))}
    with self.assertRaisesRegex(ValueError, r"\['arm'\].*\['leg'\]"):
      fn(policy, {'leg': jnp.zeros((), int)})
    with self.assertRaisesRegex(ValueError, r"\['arm'\].*no keys"):
      fn(policy, jnp.zeros((), int))


if __name__ == '__main__':
  absltest.main()
