"""Tests of the loss of proximal policy optimization."""

import functools
from typing import Any

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.losses import ppo

COSTS = {'clip_epsilon': 0.2, 'value_cost': 0.5, 'entropy_cost': 0.01}
loss_fn = jax.jit(functools.partial(ppo.ppo_loss, **COSTS))


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Laplace:
  """A distribution in three lines."""

  loc: Any

  def log_prob(self, action):
    return -jnp.abs(action - self.loc)

  def entropy(self):
    return 1.5 + self.loc


def make_batch(seed=0, shape=(5, 4), mask=None):
  rng = np.random.default_rng(seed)
  fields = ('action', 'log_prob', 'advantage', 'target', 'value')
  arrays = {k: jnp.float32(rng.normal(size=shape)) for k in fields}
  if mask is None:
    mask = rng.random(shape) < 0.7
  batch = ppo.PPOBatch(mask=jnp.asarray(mask), **arrays)
  loc, value = jnp.float32(rng.normal(size=(2, *shape)))
  return Laplace(loc=loc), value, batch


def by_head(*batches):
  """Makes one batch of several, with a dict in every field but the mask."""
  mask = batches[0].mask

  def join(*xs):
    return {f'head_{i}': x for i, x in enumerate(xs)}

  joined = {
    k: join(*(getattr(b, k) for b in batches))
    for k in ('action', 'log_prob', 'advantage', 'target', 'value')
  }
  return ppo.PPOBatch(mask=mask, **joined)


class SurrogateTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # (ratio, advantage, loss, gradient with respect to the log-ratio).
    (1.0, 2.0, -2.0, -2.0),
    (1.1, 2.0, -2.2, -2.2),
    (1.5, 2.0, -2.4, 0.0),
    (0.5, 2.0, -1.0, -1.0),
    (1.5, -2.0, 3.0, 3.0),
    (0.5, -2.0, 1.6, 0.0),
  )
  def test_of_one_row(self, ratio, advantage, loss, gradient):
    fn = self.variant(jax.value_and_grad(ppo.clipped_surrogate_loss))
    # A second row, which counts; a third, which does not.
    value, grad = fn(
      jnp.log(jnp.asarray([ratio, 1.0, 7.0])),
      jnp.asarray([advantage, 10.0, 7.0]),
      jnp.asarray([True, True, False]),
      0.2,
    )
    np.testing.assert_allclose(value, (loss - 10) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad, [gradient / 2, -5, 0], rtol=1e-6)

  @hypothesis.given(mask=hnp.arrays(bool, (5, 4)), seed=st.integers(0, 2**31))
  def test_agrees_with_numpy_on_the_rows_alone(self, mask, seed):
    rng = np.random.default_rng(seed)
    log_ratio, advantage = rng.normal(size=(2, 5, 4))
    ratio = np.exp(log_ratio)
    rows = -np.minimum(ratio * advantage, np.clip(ratio, 0.7, 1.3) * advantage)
    actual = ppo.clipped_surrogate_loss(
      *jnp.float32(np.where(mask, [log_ratio, advantage], np.nan)), mask, 0.3
    )
    expected = rows[mask].mean() if mask.any() else 0
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)

  def test_gradients_are_finite_beside_garbage(self):
    mask = jnp.asarray([True, False, False])
    x = jnp.asarray([0.1, jnp.inf, jnp.nan])
    grads = jax.grad(ppo.clipped_surrogate_loss)(x, x, mask, 0.2)
    # Within the clip the loss of the row is -exp(x) * x.
    np.testing.assert_allclose(grads, [-np.exp(0.1) * 0.1, 0, 0], rtol=1e-6)


class ValueLossTest(chex.TestCase):
  @parameterized.parameters(
    # (value, old value, target, loss) at clip .5.
    (1.0, 0.0, 3.0, 3.125),  # Clipped to .5: (2.5)^2 / 2 is the larger.
    (1.0, 0.0, 0.0, 0.5),  # Clipped would be .125: the value's own counts.
    (0.2, 0.0, 1.0, 0.32),  # Not clipped.
  )
  def test_clipped(self, value, old, target, loss):
    arrays = (jnp.asarray([x, 100.0]) for x in (value, target))
    actual = ppo.value_loss(
      *arrays,
      jnp.asarray([True, False]),
      old_value=jnp.asarray([old, 0.0]),
      clip=0.5,
    )
    np.testing.assert_allclose(actual, loss, rtol=1e-6)

  def test_plain_is_half_the_mean_square_without_gradient_to_the_target(self):
    value, target = jnp.asarray([1.0, 5.0, 9.0]), jnp.asarray([2.0, 2.0, 0.0])
    mask = jnp.asarray([True, True, False])
    loss, grads = jax.value_and_grad(ppo.value_loss, (0, 1))(
      value, target, mask
    )
    np.testing.assert_allclose(loss, (0.5 + 4.5) / 2)
    chex.assert_trees_all_close(
      grads, (jnp.asarray([-0.5, 1.5, 0.0]), jnp.zeros(3))
    )

  @parameterized.parameters(None, 0.5)
  def test_gradients_are_finite_beside_garbage(self, clip):
    x = jnp.asarray([1.0, jnp.nan])
    grads = jax.grad(ppo.value_loss)(
      x, 2 * x, jnp.asarray([True, False]), old_value=x, clip=clip
    )
    # At value == old value both errors are the same: -1.
    np.testing.assert_allclose(grads, [-1, 0])

  def test_clip_needs_the_old_value(self):
    x = jnp.zeros(2)
    with self.assertRaisesRegex(ValueError, '`old_value`'):
      ppo.value_loss(x, x, x == 0, clip=0.5)


class DiagnosticsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_approximate_kl(self):
    kl = self.variant(ppo.approximate_kl)
    log_ratio = jnp.log(jnp.asarray([1.0, 2.0, 0.5, 100.0]))
    mask = jnp.arange(4) < 3
    expected = ((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 3
    np.testing.assert_allclose(kl(log_ratio, mask), expected, rtol=1e-5)

  def test_approximate_kl_of_small_steps_keeps_its_digits(self):
    # x^2 / 2 to leading order; exp(x) - 1 in float32 would leave noise.
    x = jnp.full((3,), 1e-3)
    np.testing.assert_allclose(
      ppo.approximate_kl(x, x > 0), np.expm1(1e-3) - 1e-3, rtol=2e-3
    )

  def test_approximate_kl_estimates_the_kl(self):
    # Old N(0, 1), new N(.5, 1): KL = .125.
    action = jax.random.normal(jax.random.key(0), (200_000,))
    log_ratio = -0.5 * jnp.square(action - 0.5) + 0.5 * jnp.square(action)
    kl = ppo.approximate_kl(log_ratio, jnp.ones_like(action, bool))
    np.testing.assert_allclose(kl, 0.125, rtol=0.02)

  def test_clip_fraction(self):
    log_ratio = jnp.log(jnp.asarray([1.0, 1.19, 1.21, 0.79, 0.81, 50.0]))
    self.assertEqual(ppo.clip_fraction(log_ratio, jnp.arange(6) < 4, 0.2), 0.5)


class NormaliseAdvantagesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_over_valid_rows_only(self):
    fn = self.variant(ppo.normalise_advantages)
    x = jnp.asarray([[1.0, jnp.nan], [3.0, 5.0]])
    mask = jnp.asarray([[True, False], [True, True]])
    std = np.sqrt(8 / 3)
    np.testing.assert_allclose(
      fn(x, mask), [[-2 / std, 0], [0, 2 / std]], rtol=1e-6
    )

  def test_each_entry_by_itself(self):
    x = {'a': jnp.asarray([1.0, 2.0]), 'b': jnp.asarray([100.0, 300.0])}
    actual = ppo.normalise_advantages(x, jnp.ones(2, bool))
    chex.assert_trees_all_close(
      actual, dict.fromkeys(x, jnp.asarray([-1.0, 1.0]))
    )

  @parameterized.parameters(0, 1)
  def test_is_0_for_fewer_than_two_rows(self, num_rows):
    x = jnp.asarray([7.3, 1e9, -2.0])
    actual = ppo.normalise_advantages(x, jnp.arange(3) < num_rows)
    chex.assert_trees_all_equal(actual, jnp.zeros(3))

  @parameterized.parameters(0.1, -7.7, 123.4)
  def test_rows_that_are_all_the_same_stay_small(self, number):
    x = jnp.full((1000,), number)
    actual = ppo.normalise_advantages(x, x == x)
    np.testing.assert_allclose(actual, 0, atol=1e-3)

  def test_eps_bounds_the_magnification(self):
    x = jnp.asarray([-1e-3, 1e-3])
    actual = ppo.normalise_advantages(x, x < 1, eps=1e-3)
    np.testing.assert_allclose(actual, [-0.5, 0.5], rtol=1e-5)

  def test_has_no_gradient(self):
    x = jnp.asarray([2.0, 2.0])
    grads = jax.jacobian(ppo.normalise_advantages)(x, x > 0)
    chex.assert_trees_all_equal(grads, jnp.zeros((2, 2)))


class CombineTest(chex.TestCase):
  def test_sums(self):
    tree = {'a': jnp.asarray([1.0, 2.0]), 'b': jnp.asarray([10.0, 20.0])}
    chex.assert_trees_all_equal(ppo.combine(tree), jnp.asarray([11.0, 22.0]))
    chex.assert_trees_all_close(
      ppo.combine(tree, {'b': 0.5, 'a': -1}), jnp.asarray([4.0, 8.0])
    )
    chex.assert_trees_all_equal(ppo.combine(tree['a']), tree['a'])

  def test_refuses_weights_of_other_keys(self):
    with self.assertRaisesRegex(ValueError, r"\['a'\].*\['b'\]"):
      ppo.combine({'a': jnp.ones(2)}, {'b': 1.0})

  def test_refuses_entries_of_other_shapes(self):
    with self.assertRaises(AssertionError):
      ppo.combine({'a': jnp.ones(2), 'b': jnp.ones(1)})


class PPOLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_is_the_weighted_sum_of_its_parts(self):
    policy, value, batch = make_batch()
    loss, metrics = self.variant(
      lambda *args: ppo.ppo_loss(*args, **COSTS, value_clip=0.1)
    )(policy, value, batch)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    policy_loss = ppo.clipped_surrogate_loss(
      log_ratio, batch.advantage, batch.mask, 0.2
    )
    value_loss = ppo.value_loss(
      value, batch.target, batch.mask, old_value=batch.value, clip=0.1
    )
    entropy = np.asarray(policy.entropy())[batch.mask].mean()
    np.testing.assert_allclose(
      loss, policy_loss + 0.5 * value_loss - 0.01 * entropy, rtol=1e-5
    )
    np.testing.assert_allclose(metrics['loss'], loss)
    np.testing.assert_allclose(metrics['entropy'], entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics['value_loss'], value_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics['policy_loss'], policy_loss, rtol=1e-5)
    self.assertEqual(
      metrics['clip_fraction'], ppo.clip_fraction(log_ratio, batch.mask, 0.2)
    )
    np.testing.assert_allclose(
      metrics['ratio_deviation'],
      np.abs(np.exp(log_ratio) - 1)[batch.mask].max(),
      rtol=1e-5,
    )
    chex.assert_shape(jax.tree.leaves(metrics), ())

  def test_rows_may_be_in_any_shape(self):
    policy, value, batch = make_batch()
    flat = jax.tree.map(jnp.ravel, (policy, value, batch))
    chex.assert_trees_all_close(
      loss_fn(*flat),
      loss_fn(policy, value, batch),
      rtol=1e-5,
    )

  def test_invalid_rows_are_absent(self):
    policy, value, batch = make_batch()

    def garbage(x):
      return jnp.where(batch.mask, x, 1e6)

    changed = batch.replace(
      action=garbage(batch.action),
      log_prob=garbage(batch.log_prob),
      advantage=jnp.where(batch.mask, batch.advantage, jnp.nan),
      target=jnp.where(batch.mask, batch.target, jnp.inf),
      value=garbage(batch.value),
    )
    fn = jax.jit(
      jax.value_and_grad(
        functools.partial(ppo.ppo_loss, **COSTS, value_clip=0.1),
        (0, 1),
        has_aux=True,
      )
    )
    chex.assert_trees_all_equal(
      fn(policy, value, batch), fn(policy, value, changed)
    )
    # Nor do they count: the same rows alone, and twice.
    rows = [x[batch.mask] for x in jax.tree.leaves((policy, value, batch))]
    alone = jax.tree.unflatten(jax.tree.structure((policy, value, batch)), rows)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), alone)
    for other in (alone, twice):
      chex.assert_trees_all_close(
        loss_fn(*other),
        loss_fn(policy, value, batch),
        rtol=1e-4,
      )

  @parameterized.parameters(None, 0.1)
  @pytest.mark.heavy
  def test_without_valid_rows_all_is_0(self, value_clip):
    policy, value, batch = make_batch(mask=np.zeros((5, 4), bool))
    (loss, metrics), grads = jax.value_and_grad(
      lambda p, v: ppo.ppo_loss(p, v, batch, **COSTS, value_clip=value_clip),
      (0, 1),
      has_aux=True,
    )(policy, value)
    self.assertEqual(loss, 0)
    chex.assert_trees_all_equal(
      (metrics, grads), jax.tree.map(jnp.zeros_like, (metrics, grads))
    )

  def test_first_step_is_the_plain_policy_gradient(self):
    policy, value, batch = make_batch()
    batch = batch.replace(log_prob=policy.log_prob(batch.action))
    costs = {'clip_epsilon': 0.2, 'value_cost': 0.0, 'entropy_cost': 0.0}
    grads, metrics = jax.jit(
      jax.grad(functools.partial(ppo.ppo_loss, **costs), has_aux=True)
    )(policy, value, batch)
    count = batch.mask.sum()
    expected = -np.sign(batch.action - policy.loc) * batch.advantage / count
    np.testing.assert_allclose(
      grads.loc, np.where(batch.mask, expected, 0), rtol=1e-5
    )
    for name in ('ratio_deviation', 'approx_kl', 'clip_fraction'):
      self.assertEqual(metrics[name], 0)

  def test_per_head_advantages_are_one_loss_per_head(self):
    mask = np.random.default_rng(9).random((5, 4)) < 0.5
    parts = [make_batch(seed, mask=mask) for seed in range(2)]
    policies, values, batches = zip(*parts, strict=True)
    losses, metrics = zip(*(loss_fn(*part) for part in parts), strict=True)
    loss, joint = ppo.ppo_loss(
      {f'head_{i}': p for i, p in enumerate(policies)},
      {f'head_{i}': v for i, v in enumerate(values)},
      by_head(*batches),
      **COSTS,
    )
    np.testing.assert_allclose(loss, sum(losses), rtol=1e-5)
    reduce = {
      'policy_loss': sum,
      'value_loss': sum,
      'entropy': sum,
      'approx_kl': sum,
      'clip_fraction': np.mean,
      'explained_variance': np.mean,
      'ratio_deviation': max,
    }
    for name, fn in reduce.items():
      of_head = [float(m[name]) for m in metrics]
      np.testing.assert_allclose(joint[name], fn(of_head), rtol=1e-4)
      for i, number in enumerate(of_head):
        np.testing.assert_allclose(joint[f'{name}/head_{i}'], number, rtol=1e-5)

  def test_one_advantage_adds_the_heads_log_densities(self):
    mask = np.ones((5, 4), bool)
    parts = [make_batch(seed, mask=mask) for seed in range(2)]
    policies, values, batches = zip(*parts, strict=True)
    batch = by_head(*batches).replace(
      advantage=batches[0].advantage,
      target=batches[0].target,
      value=batches[0].value,
    )
    _, metrics = ppo.ppo_loss(
      {f'head_{i}': p for i, p in enumerate(policies)},
      values[0],
      batch,
      **COSTS,
    )
    log_ratio = sum(
      np.asarray(p.log_prob(b.action) - b.log_prob)
      for p, b in zip(policies, batches, strict=True)
    )
    ratio, advantage = np.exp(log_ratio), np.asarray(batch.advantage)
    expected = -np.minimum(
      ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage
    ).mean()
    np.testing.assert_allclose(metrics['policy_loss'], expected, rtol=1e-4)
    np.testing.assert_allclose(
      metrics['approx_kl'], (ratio - 1 - log_ratio).mean(), rtol=1e-4
    )
    np.testing.assert_allclose(
      metrics['entropy'], sum(p.entropy().mean() for p in policies), rtol=1e-5
    )
    self.assertNotIn('policy_loss/head_0', metrics)
    self.assertIn('entropy/head_0', metrics)

  def test_a_single_policy_with_several_values(self):
    policy, value, batch = make_batch()

    def two(x):
      return {'near': x, 'far': 2 * x}

    _, single = loss_fn(policy, value, batch)
    _, metrics = loss_fn(
      policy,
      two(value),
      batch.replace(target=two(batch.target), value=two(batch.value)),
    )
    np.testing.assert_allclose(
      metrics['value_loss'], (1 + 4) * single['value_loss'], rtol=1e-5
    )
    self.assertEqual(metrics['policy_loss'], single['policy_loss'])

  @parameterized.named_parameters(
    ('advantage', 'advantage', r'`policy`.*head_1.*`advantage`.*other'),
    ('action', 'action', r'`policy`.*head_1.*`action`.*other'),
    ('log_prob', 'log_prob', r'`policy`.*head_1.*`log_prob`.*other'),
    ('target', 'target', r'`value`.*head_1.*`target`.*other'),
    ('value', 'value', r'`value`.*head_1.*`old_value`.*other'),
  )
  def test_names_keys_that_differ(self, field, message):
    policy, value, batch = make_batch()
    batch = by_head(batch, batch)
    renamed = {'head_0': value, 'other': value}
    heads = ('head_0', 'head_1')
    with self.assertRaisesRegex(ValueError, message):
      ppo.ppo_loss(
        dict.fromkeys(heads, policy),
        dict.fromkeys(heads, value),
        batch.replace(**{field: renamed}),
        **COSTS,
      )

  def test_a_single_policy_refuses_several_advantages(self):
    policy, value, batch = make_batch()
    batch = batch.replace(advantage={'a': value, 'b': value})
    with self.assertRaisesRegex(ValueError, r"\['a', 'b'\].*`combine`"):
      loss_fn(policy, value, batch)

  def test_refuses_a_column_of_values(self):
    policy, value, batch = make_batch()
    with self.assertRaises(AssertionError):
      ppo.ppo_loss(policy, value[..., None], batch, **COSTS)

  def test_clip_epsilon_may_be_scheduled(self):
    policy, value, batch = make_batch()
    fn = jax.jit(chex.assert_max_traces(ppo.ppo_loss, n=1))
    for epsilon in (0.1, 0.3):
      costs = {k: jnp.float32(v) for k, v in COSTS.items()}
      costs['clip_epsilon'] = jnp.float32(epsilon)
      _, metrics = fn(policy, value, batch, **costs)
      _, expected = ppo.ppo_loss(
        policy, value, batch, **COSTS | {'clip_epsilon': epsilon}
      )
      chex.assert_trees_all_close(metrics, expected, rtol=1e-5)


if __name__ == '__main__':
  absltest.main()
