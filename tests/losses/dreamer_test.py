"""Tests of the losses of DreamerV3."""

import functools
from typing import Any

from absl.testing import absltest, parameterized
import chex
import distrax
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.losses import dreamer

GAMMA, LAMBDA = 0.9, 0.8
T, B, S, K = 4, 3, 2, 5
categorical_kl = jax.jit(dreamer.categorical_kl)
world_model_loss = jax.jit(dreamer.world_model_loss)


@jax.jit
def imagined_returns(reward, continues, value):
  return dreamer.imagined_returns(reward, continues, value, GAMMA, LAMBDA)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Laplace:
  """A distribution in three lines."""

  loc: Any

  def log_prob(self, value):
    return -jnp.abs(value - self.loc)

  def mean(self):
    return self.loc


def column(*numbers):
  return jnp.asarray(numbers, jnp.float32)[:, None]


def categorical(probs):
  return distrax.Categorical(logits=jnp.log(jnp.asarray(probs, jnp.float32)))


def kl_in_numpy(p, q):
  """The definition, over logits."""

  def log_softmax(x):
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))

  p, q = log_softmax(p), log_softmax(q)
  return np.sum(np.exp(p) * (p - q), axis=(-2, -1))


def prior_at(kl):
  """A row of two latents whose prior is `kl` from a uniform posterior.

  Each has half of it: KL(1/2 || q) = -log(4 q (1 - q)) / 2.
  """
  q = 0.5 + 0.5 * np.sqrt(1 - np.exp(-kl))
  return [[q, 1 - q], [q, 1 - q]]


class CategoricalKLTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_sums_over_the_last_batch_axis(self):
    p = categorical([[0.5, 0.5], [1.0, 0.0]])
    q = categorical([[0.25, 0.75], [0.1, 0.9]])
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3) + np.log(10)
    actual = self.variant(dreamer.categorical_kl)(p, q)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(dreamer.categorical_kl(p, p), 0, atol=1e-6)

  @hypothesis.given(seed=st.integers(0, 2**31))
  def test_agrees_with_numpy(self, seed):
    p, q = np.random.default_rng(seed).normal(0, 3, size=(2, 4, 3, S, K))
    actual = categorical_kl(
      *(distrax.Categorical(logits=jnp.float32(x)) for x in (p, q))
    )
    chex.assert_shape(actual, (4, 3))
    np.testing.assert_allclose(actual, kl_in_numpy(p, q), rtol=1e-4, atol=1e-5)

  def test_refuses_latents_of_other_sizes(self):
    x = jnp.zeros((3, 2, 4))
    with self.assertRaises(AssertionError):
      dreamer.categorical_kl(
        distrax.Categorical(logits=x), distrax.Categorical(logits=x[:, :1])
      )


class BalancedKLTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_case_h(self):
    posterior = categorical(np.full((2, 2, 2), 0.5))
    prior = categorical([prior_at(0.2), prior_at(3.0)])
    fn = self.variant(
      functools.partial(dreamer.balanced_kl, representation_cost=0.0)
    )
    loss, kls = fn(posterior, prior)
    np.testing.assert_allclose(kls['dynamics'], [0.2, 3.0], rtol=1e-4)
    np.testing.assert_allclose(kls['representation'], [0.2, 3.0], rtol=1e-4)
    np.testing.assert_allclose(loss, [1.0, 3.0], rtol=1e-4)
    np.testing.assert_allclose(jnp.mean(loss), 2.0, rtol=1e-4)

    def mean_loss(logits):
      return jnp.mean(fn(posterior, distrax.Categorical(logits=logits))[0])

    grads = jax.grad(mean_loss)(prior.logits)
    chex.assert_trees_all_equal(grads[0], jnp.zeros((2, 2)))
    # d KL(p || softmax(l)) / dl = softmax(l) - p, over two rows.
    np.testing.assert_allclose(
      grads[1], (np.asarray(prior_at(3.0)) - 0.5) / 2, rtol=1e-4
    )

  @parameterized.parameters(
    # (dynamics cost, representation cost, gradient to the prior, posterior).
    (1.0, 0.0, True, False),
    (0.0, 1.0, False, True),
  )
  def test_each_term_teaches_one_side(self, dynamics, representation, *reach):
    logits = jax.random.normal(jax.random.key(0), (2, 3, S, K))

    def loss(prior, posterior):
      kl, _ = dreamer.balanced_kl(
        distrax.Categorical(logits=posterior),
        distrax.Categorical(logits=prior),
        free_nats=0.0,
        dynamics_cost=dynamics,
        representation_cost=representation,
      )
      return jnp.sum(kl)

    grads = jax.grad(loss, (0, 1))(*logits)
    self.assertEqual([bool(jnp.any(g != 0)) for g in grads], list(reach))

  def test_costs_weigh_the_terms(self):
    posterior, prior = (
      distrax.Categorical(logits=x)
      for x in jax.random.normal(jax.random.key(0), (2, 3, S, K))
    )
    loss, kls = dreamer.balanced_kl(
      posterior, prior, free_nats=0.0, dynamics_cost=2.0
    )
    np.testing.assert_allclose(loss, 2.1 * kls['dynamics'], rtol=1e-5)


def sequence(seed=0):
  """A prediction and the rows that it is compared with."""
  rng = np.random.default_rng(seed)
  first, loc, reward, continues = rng.normal(size=(4, T, B))
  posterior, prior = rng.normal(0, 2, size=(2, T, B, S, K))
  prediction = dreamer.ModelPrediction(
    reconstruction_loss=jnp.float32(np.exp(rng.normal(size=(T, B)))),
    reward=Laplace(loc=jnp.float32(loc)),
    continues=distrax.Bernoulli(logits=jnp.float32(continues)),
    posterior=distrax.Categorical(logits=jnp.float32(posterior)),
    prior=distrax.Categorical(logits=jnp.float32(prior)),
  )
  rows = {
    'reward': jnp.float32(reward),
    'discount': jnp.float32(rng.random((T, B)) < 0.7),
    'is_first': jnp.asarray(first > 0.7),
    'mask': jnp.asarray(rng.random((T, B)) < 0.7),
  }
  return prediction, rows


class WorldModelLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_one_row_by_hand(self):
    prediction = dreamer.ModelPrediction(
      reconstruction_loss=jnp.full((1, 1), 7.0),
      reward=Laplace(loc=jnp.full((1, 1), 0.5)),
      continues=distrax.Bernoulli(probs=jnp.full((1, 1), 0.2)),
      posterior=categorical(np.full((1, 1, 2, 2), 0.5)),
      prior=categorical([[prior_at(3.0)]]),
    )
    loss, metrics = self.variant(dreamer.world_model_loss)(
      prediction,
      jnp.full((1, 1), 2.0),
      jnp.ones((1, 1)),
      jnp.zeros((1, 1), bool),
      jnp.ones((1, 1), bool),
    )
    q = prior_at(3.0)[0][0]
    expected = {
      'reconstruction_loss': 7,
      'reward_loss': 1.5,
      'continue_loss': -np.log(0.2),
      'dynamics_kl': 3,
      'representation_kl': 3,
      'posterior_entropy': 2 * np.log(2),
      'prior_entropy': -2 * (q * np.log(q) + (1 - q) * np.log(1 - q)),
      'model_loss': 7 + 1.5 - np.log(0.2) + 3 + 0.1 * 3,
    }
    chex.assert_trees_all_close(
      metrics, jax.tree.map(jnp.float32, expected), rtol=1e-4
    )
    self.assertEqual(metrics['model_loss'], loss)

  @hypothesis.given(seed=st.integers(0, 2**31))
  def test_agrees_with_numpy_on_the_rows_alone(self, seed):
    prediction, rows = sequence(seed)
    costs = {
      'reconstruction_cost': 0.5,
      'reward_cost': 2.0,
      'continue_cost': 3.0,
      'dynamics_cost': 0.7,
      'representation_cost': 0.3,
      'free_nats': 2.0,
    }
    loss, metrics = world_model_loss(prediction, **rows, **costs)
    rows = {name: np.asarray(x) for name, x in rows.items()}
    mask = rows['mask']
    transition = mask & ~rows['is_first']
    kl = kl_in_numpy(prediction.posterior.logits, prediction.prior.logits)
    # log(1 + exp(-x)) if it goes on, log(1 + exp(x)) if not.
    sign = np.where(rows['discount'] > 0, -1, 1)
    surprise = np.log1p(np.exp(sign * np.asarray(prediction.continues.logits)))

    def mean(x, mask):
      return np.asarray(x)[mask].mean() if mask.any() else 0.0

    reconstruction = mean(prediction.reconstruction_loss, mask)
    reward = mean(np.abs(rows['reward'] - prediction.reward.loc), transition)
    continues = mean(surprise, transition)
    kl_loss = mean(np.maximum(kl, 2), mask)
    np.testing.assert_allclose(metrics['reward_loss'], reward, rtol=1e-4)
    np.testing.assert_allclose(metrics['continue_loss'], continues, rtol=1e-4)
    np.testing.assert_allclose(
      metrics['dynamics_kl'], mean(kl, mask), rtol=1e-4
    )
    np.testing.assert_allclose(
      loss,
      0.5 * reconstruction + 2 * reward + 3 * continues + kl_loss,
      rtol=1e-4,
    )

  def test_transitions_into_first_rows_may_hold_anything(self):
    prediction, rows = sequence()
    nobodys = rows['is_first'] | ~rows['mask']
    self.assertTrue(np.any(rows['is_first'] & rows['mask']))
    fn = jax.jit(jax.value_and_grad(dreamer.world_model_loss, has_aux=True))
    expected = fn(prediction, **rows)
    for garbage in (jnp.nan, jnp.inf, 99.0):
      changed = rows | {
        name: jnp.where(nobodys, garbage, rows[name])
        for name in ('reward', 'discount')
      }
      chex.assert_trees_all_equal(fn(prediction, **changed), expected)
    _, grads = expected
    chex.assert_tree_all_finite(grads)
    # Which no gradient tells the heads about; the others' does.
    for head in (grads.reward.loc, grads.continues.logits):
      np.testing.assert_array_equal(head != 0, ~nobodys)
    np.testing.assert_array_equal(grads.reconstruction_loss != 0, rows['mask'])

  @pytest.mark.heavy
  def test_terminal_rows_teach_their_reward_and_end(self):
    prediction, rows = sequence()
    rows['is_first'] = jnp.zeros((T, B), bool)
    rows['discount'] = jnp.zeros((T, B))
    grads, _ = jax.grad(dreamer.world_model_loss, has_aux=True)(
      prediction, **rows
    )
    probs, count = prediction.continues.probs, rows['mask'].sum()
    np.testing.assert_allclose(
      grads.continues.logits,
      np.where(rows['mask'], probs / count, 0),
      rtol=1e-4,
      atol=1e-7,
    )

  def test_without_rows_all_is_0(self):
    prediction, rows = sequence()
    rows['mask'] = jnp.zeros((T, B), bool)
    out = jax.value_and_grad(dreamer.world_model_loss, has_aux=True)(
      prediction, **rows
    )
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))

  def test_refuses_a_mask_of_numbers(self):
    prediction, rows = sequence()
    with self.assertRaises(AssertionError):
      dreamer.world_model_loss(prediction, **rows | {'mask': jnp.ones((T, B))})


class ImaginationTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(
    ('goes_on', (1, 1, 1, 1), (1, 0.9, 0.81)),
    # A terminal at the first imagined row: only the start row counts.
    ('ends_at_once', (1, 0, 1, 1), (1, 0, 0)),
    ('ends_later', (1, 1, 0, 1), (1, 0.9, 0)),
    ('ends_after_all', (1, 1, 1, 0), (1, 0.9, 0.81)),
    ('starts_at_the_end', (0, 1, 1, 1), (0, 0, 0)),
    ('may_end', (1, 0.5, 0.5, 0), (1, 0.45, 0.2025)),
  )
  def test_weights(self, continues, expected):
    weights = self.variant(dreamer.imagined_weights)(column(*continues), GAMMA)
    np.testing.assert_allclose(weights, column(*expected), rtol=1e-6)

  def test_weights_have_no_gradient(self):
    grads = jax.grad(lambda c: dreamer.imagined_weights(c, GAMMA).sum())(
      jnp.full((4, 2), 0.5)
    )
    chex.assert_trees_all_equal(grads, jnp.zeros((4, 2)))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(
    # R_2 = 3 + .9 * 40, R_1 = 2 + .9 (6 + .8 R_2), R_0 = 1 + .9 (4 + .8 R_1).
    ('goes_on', (1, 1, 1, 1), (30.1456, 35.48, 39.0)),
    # R_0 = r_1: what is beyond the end counts for nothing.
    ('ends_at_once', (1, 0, 1, 1), (1.0, 35.48, 39.0)),
    # R_2 = r_3: R_1 = 2 + .9 (6 + .8 * 3).
    ('ends_last', (1, 1, 1, 0), (11.4832, 9.56, 3.0)),
  )
  def test_returns(self, continues, expected):
    fn = self.variant(dreamer.imagined_returns)
    for unused in (99.0, 0.0):
      reward, value = column(unused, 1, 2, 3), column(10, 20, 30, 40)
      actual = fn(reward, column(*continues), value, GAMMA, LAMBDA)
      np.testing.assert_allclose(actual, column(*expected), rtol=1e-6)

  @hypothesis.given(
    seed=st.integers(0, 2**31),
    continues=hnp.arrays(np.float32, (5, 2), elements=st.sampled_from((0, 1))),
  )
  def test_returns_agree_with_the_equation(self, seed, continues):
    reward, value = np.random.default_rng(seed).normal(size=(2, 5, 2))
    expected = [value[-1]]
    for h in reversed(range(4)):
      mixed = (1 - LAMBDA) * value[h + 1] + LAMBDA * expected[0]
      expected.insert(0, reward[h + 1] + GAMMA * continues[h + 1] * mixed)
    actual = imagined_returns(
      jnp.float32(reward), jnp.asarray(continues), jnp.float32(value)
    )
    np.testing.assert_allclose(actual, expected[:-1], rtol=1e-4, atol=1e-5)

  def test_returns_of_several_rewards(self):
    x = jax.random.normal(jax.random.key(0), (2, 2, 5, 3))
    reward, value = ({'a': y[0], 'b': y[1]} for y in x)
    continues = jnp.ones((5, 3))
    actual = dreamer.imagined_returns(reward, continues, value, GAMMA, LAMBDA)
    for key in ('a', 'b'):
      np.testing.assert_allclose(
        actual[key],
        imagined_returns(reward[key], continues, value[key]),
        rtol=1e-5,
      )


class ReturnRangeTest(chex.TestCase):
  def test_a_new_range_may_be_donated(self):
    donate = jax.jit(
      lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0
    )
    for x in jax.tree.leaves(donate(dreamer.init_range())):
      self.assertEqual(x, 1)

  @chex.variants(with_jit=True, without_jit=True)
  def test_the_first_update_counts_in_full(self):
    # Percentiles of 0..100 are themselves, in any order.
    returns = jax.random.permutation(jax.random.key(0), jnp.arange(101.0))
    before = dreamer.init_range(jnp.float32)
    self.assertEqual(dreamer.return_scale(before), 1)
    after = self.variant(dreamer.update_range)(before, returns[:, None])
    np.testing.assert_allclose([after.low, after.high], [5, 95], rtol=1e-5)
    np.testing.assert_allclose(dreamer.return_scale(after), 90, rtol=1e-5)
    chex.assert_trees_all_equal_dtypes(before, after)

  @parameterized.parameters(0.01, 0.3, 1.0)
  def test_later_ones_by_their_age(self, rate):
    update = jax.jit(functools.partial(dreamer.update_range, rate=rate))
    rng = np.random.default_rng(0)
    batches = rng.normal(3, 2, size=(6, 50))
    state = dreamer.init_range(jnp.float32)
    for batch in batches:
      state = update(state, jnp.float32(batch))
    ages = np.arange(6)[::-1]
    weights = (1 - rate) ** ages
    weights /= weights.sum()
    low, high = np.percentile(batches, [5, 95], axis=1)
    np.testing.assert_allclose(state.low, weights @ low, rtol=1e-4)
    np.testing.assert_allclose(state.high, weights @ high, rtol=1e-4)

  def test_of_other_percentiles(self):
    state = dreamer.update_range(
      dreamer.init_range(jnp.float32), jnp.arange(11.0), low=0.0, high=50.0
    )
    np.testing.assert_allclose([state.low, state.high], [0, 5], atol=1e-6)

  @parameterized.parameters((0.0, 0.5, 1.0), (-3.0, 2.0, 5.0), (7.0, 7.0, 1.0))
  def test_the_scale_is_at_least_the_limit(self, low, high, expected):
    state = dreamer.ReturnRange(
      low=jnp.float32(low), high=jnp.float32(high), weight=jnp.float32(1)
    )
    self.assertEqual(dreamer.return_scale(state), expected)
    self.assertEqual(dreamer.return_scale(state, 10.0), 10)

  def test_has_no_gradient(self):
    def scale(returns):
      state = dreamer.update_range(dreamer.init_range(jnp.float32), returns)
      return dreamer.return_scale(state)

    grads = jax.grad(scale)(jnp.arange(101.0))
    chex.assert_trees_all_equal(grads, jnp.zeros(101))


class ActorLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    fn = self.variant(functools.partial(dreamer.actor_loss, entropy_cost=0.1))
    loss, metrics = fn(
      column(-1, -2), column(0.5, 0.3), column(3, -4), column(1, 0.5)
    )
    # 1 * (-3 + .05) and .5 * (8 + .03), over two rows.
    np.testing.assert_allclose(loss, -(-2.95 + 4.015) / 2, rtol=1e-5)
    np.testing.assert_allclose(metrics['actor_loss'], loss)
    np.testing.assert_allclose(metrics['entropy'], 0.65 / 1.5, rtol=1e-5)
    np.testing.assert_allclose(
      metrics['advantage_magnitude'], 5 / 1.5, rtol=1e-5
    )

  @pytest.mark.heavy
  def test_gradient_is_that_of_reinforce_without_entropy_bonus(self):
    logits = jax.random.normal(jax.random.key(0), (3, 2, 4))
    action = jnp.asarray([[0, 1], [2, 3], [1, 1]])
    advantage = jnp.asarray([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.0]])
    weight = jnp.asarray([[1.0, 1.0], [0.9, 0.9], [0.0, 0.8]])

    def loss(logits, advantage, weight):
      policy = distrax.Categorical(logits=logits)
      return dreamer.actor_loss(
        policy.log_prob(action),
        policy.entropy(),
        advantage,
        weight,
        entropy_cost=0.0,
      )[0]

    grads = jax.grad(loss, (0, 1, 2))(logits, advantage, weight)
    # d log p(a) / d logits = onehot(a) - p.
    slope = jax.nn.one_hot(action, 4) - jax.nn.softmax(logits)
    expected = -(weight * advantage)[..., None] * np.asarray(slope) / 6
    np.testing.assert_allclose(grads[0], expected, rtol=1e-4, atol=1e-7)
    self.assertGreater(jnp.min(jnp.max(jnp.abs(grads[0][:2]), -1)), 1e-3)
    chex.assert_trees_all_equal(
      grads[1:], jax.tree.map(jnp.zeros_like, grads[1:])
    )

  def test_a_terminal_credits_only_what_precedes_it(self):
    # Row 1 is imagined to be terminal: actions from there on have no gradient,
    # and the return of row 0 is the reward on the way to it.
    continues = column(1, 0, 1, 1)
    weight = dreamer.imagined_weights(continues, GAMMA)

    def loss(log_prob, reward, value):
      target = dreamer.imagined_returns(reward, continues, value, GAMMA, LAMBDA)
      return dreamer.actor_loss(log_prob, 0 * log_prob, target, weight)[0]

    reward, value = column(9, 1, 2, 3), column(10, 20, 30, 40)
    grads = jax.grad(loss)(column(-1, -1, -1), reward, value)
    np.testing.assert_allclose(grads, column(-1 / 3, 0, 0), rtol=1e-6)

  def test_heads_add_up(self):
    x = jax.random.normal(jax.random.key(0), (6, 3, 2))
    heads = dreamer.actor_loss(
      {'a': x[0], 'b': x[1]}, {'a': x[2], 'b': x[3]}, x[4], x[5] ** 2
    )
    joint = dreamer.actor_loss(x[0] + x[1], x[2] + x[3], x[4], x[5] ** 2)
    chex.assert_trees_all_close(heads, joint, rtol=1e-5)


class CriticLossTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_by_hand(self):
    fn = self.variant(functools.partial(dreamer.critic_loss, slow_cost=0.5))
    loss, metrics = fn(
      Laplace(loc=column(1, 2)), column(4, 0), column(1, 3), column(1, 0.5)
    )
    # 1 * (3 + .5 * 0) and .5 * (2 + .5 * 1), over two rows.
    np.testing.assert_allclose(loss, (3 + 1.25) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics['critic_loss'], loss)
    np.testing.assert_allclose(metrics['value_mean'], 2 / 1.5, rtol=1e-6)
    np.testing.assert_allclose(metrics['target_mean'], 4 / 1.5, rtol=1e-6)

  def test_gradient_reaches_the_critic_alone(self):
    args = Laplace(loc=column(1, 2)), column(4, 0), column(9, 9), column(1, 0.5)
    grads = jax.grad(lambda *args: dreamer.critic_loss(*args)[0], (0, 1, 2, 3))(
      *args
    )
    # Both pull up by 1 in row 0; in row 1 they are in balance.
    np.testing.assert_allclose(grads[0].loc, column(-1, 0), atol=1e-7)
    chex.assert_trees_all_equal(
      grads[1:], jax.tree.map(jnp.zeros_like, grads[1:])
    )

  def test_nothing_counts_past_the_end(self):
    args = Laplace(loc=column(1, 2)), column(4, 0), column(9, 9), column(0, 0)
    out = dreamer.critic_loss(*args)
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


if __name__ == '__main__':
  absltest.main()
