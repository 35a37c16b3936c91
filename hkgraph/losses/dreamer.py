"""The losses of DreamerV3 (Hafner et al., 2023, arXiv 2301.04104).

World model rows are `[T, B]`, imagined ones `[H + 1, N]` where `N` start rows
are imagined on for `H` steps. Distributions are distrax's.
"""

from typing import Any

import chex
import distrax
import jax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.losses import masked, returns


@chex.dataclass(frozen=True, mappable_dataclass=False)
class ModelPrediction:
  """What a world model makes of the rows of a sequence.

  Attributes:
    reconstruction_loss: Distance of the decoded observation from the row's.
    reward: A distribution over the reward of the transition into the row.
    continues: A distribution over its discount: 1 unless it terminated.
    posterior: Of the row's latents, given its observation.
    prior: Of the row's latents, from the rows before alone.
  """

  reconstruction_loss: types.Array  # [T, B]
  reward: Any  # [T, B]
  continues: Any  # [T, B]
  posterior: distrax.Categorical  # [T, B, S]
  prior: distrax.Categorical  # [T, B, S]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class ReturnRange:
  """A running range of imagined returns.

  Attributes:
    low: Average of a low percentile of the returns.
    high: Average of a high one.
    weight: Share of the averages that was observed, 0 before any update.
  """

  low: types.Array  # []
  high: types.Array  # []
  weight: types.Array  # []


def categorical_kl(
  p: distrax.Categorical, q: distrax.Categorical
) -> types.Array:
  """Computes KL(p || q) of rows of `S` independent categoricals.

  The divergence of section "World model learning".

  Args:
    p: Batch shape `[..., S]`.
    q: Batch shape `[..., S]`.

  Returns:
    The sum over the `S` of them, in nats, shape `[...]`.
  """
  chex.assert_equal_shape([p.logits, q.logits])
  return jnp.sum(p.kl_divergence(q), axis=-1)


def balanced_kl(
  posterior: distrax.Categorical,
  prior: distrax.Categorical,
  *,
  free_nats: float = 1.0,
  dynamics_cost: float = 1.0,
  representation_cost: float = 0.1,
) -> tuple[types.Array, dict[str, types.Array]]:
  """Computes the dynamics and representation losses of each row.

    dynamics = max(free_nats, KL(sg(posterior) || prior))
    representation = max(free_nats, KL(posterior || sg(prior)))

  (section "World model learning"). Each row is clipped by itself,
  so that rows within the free nats have no gradient.

  Args:
    posterior: Batch shape `[..., S]`.
    prior: Batch shape `[..., S]`.
    free_nats: The divergence of a row that costs nothing to lower further.
    dynamics_cost: Weight of the loss that teaches the prior.
    representation_cost: Weight of the loss that teaches the posterior.

  Returns:
    The weighted sum, shape `[...]`, and the divergences before they are
    clipped, `dynamics` and `representation`, same shape: equal numbers with
    different gradients.
  """
  dynamics = categorical_kl(jax.lax.stop_gradient(posterior), prior)
  representation = categorical_kl(posterior, jax.lax.stop_gradient(prior))
  loss = dynamics_cost * jnp.maximum(dynamics, free_nats)
  loss += representation_cost * jnp.maximum(representation, free_nats)
  return loss, {'dynamics': dynamics, 'representation': representation}


def world_model_loss(
  prediction: ModelPrediction,
  reward: types.Array,
  discount: types.Array,
  is_first: types.Array,
  mask: types.Array,
  *,
  reconstruction_cost: float = 1.0,
  reward_cost: float = 1.0,
  continue_cost: float = 1.0,
  dynamics_cost: float = 1.0,
  representation_cost: float = 0.1,
  free_nats: float = 1.0,
) -> tuple[types.Array, types.Metrics]:
  """Computes the loss of a world model.

  The weighted sum of the reconstruction loss, `-log p(reward)`, `-log
  p(discount)` and the balanced KL (section "World model learning"), each a mean
  over its rows. The transition into a `FIRST` row is
  nobody's data: its reward and discount may be anything, they are absent from
  their means and gradients.

  Args:
    prediction: Of rows `[T, B]`.
    reward: Of the transitions into the rows, shape `[T, B]`.
    discount: Likewise, 0 at terminations and else 1, shape `[T, B]`.
    is_first: Whether a row opens an episode, bool, shape `[T, B]`.
    mask: Whether a row counts, bool, shape `[T, B]`.
    reconstruction_cost: Weight of the reconstruction loss.
    reward_cost: Weight of the reward loss.
    continue_cost: Weight of the loss of the discount.
    dynamics_cost: See `balanced_kl`.
    representation_cost: See `balanced_kl`.
    free_nats: See `balanced_kl`.

  Returns:
    The loss, 0 without rows that count, and scalar metrics: `model_loss`,
    `reconstruction_loss`, `reward_loss` and `continue_loss` without their
    weights, `dynamics_kl` and `representation_kl` before they are clipped,
    `prior_entropy` and `posterior_entropy` in nats per row.
  """
  chex.assert_type([is_first, mask], bool)
  chex.assert_equal_shape(
    [prediction.reconstruction_loss, reward, discount, is_first, mask]
  )
  transition = mask & ~is_first

  def surprise(distribution, value):
    log_prob = distribution.log_prob(jnp.where(transition, value, 0))
    return masked.mean(-log_prob, transition)

  reconstruction = masked.mean(prediction.reconstruction_loss, mask)
  reward_loss = surprise(prediction.reward, reward)
  continue_loss = surprise(prediction.continues, discount)
  kl_loss, kls = balanced_kl(
    prediction.posterior,
    prediction.prior,
    free_nats=free_nats,
    dynamics_cost=dynamics_cost,
    representation_cost=representation_cost,
  )
  loss = (
    reconstruction_cost * reconstruction
    + reward_cost * reward_loss
    + continue_cost * continue_loss
    + masked.mean(kl_loss, mask)
  )
  metrics = {
    'model_loss': loss,
    'reconstruction_loss': reconstruction,
    'reward_loss': reward_loss,
    'continue_loss': continue_loss,
    'dynamics_kl': masked.mean(kls['dynamics'], mask),
    'representation_kl': masked.mean(kls['representation'], mask),
    'prior_entropy': _entropy(prediction.prior, mask),
    'posterior_entropy': _entropy(prediction.posterior, mask),
  }
  return loss, metrics


def _entropy(latents: distrax.Categorical, mask: types.Array) -> types.Array:
  return masked.mean(jnp.sum(latents.entropy(), axis=-1), mask)


def imagined_weights(continues: types.Array, gamma: float) -> types.Array:
  """Computes how much imagined rows count in the actor's and critic's losses.

    w_0 = c_0,    w_h = w_{h-1} gamma c_h

  So what is imagined past a termination counts for nothing, while the row
  before it counts in full (the continuation of section "Critic learning").

  Args:
    continues: Probability that the episode goes on after the transition into
      the row, shape `[H + 1, N]`; that of row 0, which was not imagined, is 0
      or 1: a terminal row is no start.
    gamma: Discount per step, in [0, 1].

  Returns:
    Weights of rows `0..H-1`, shape `[H, N]`, without gradient.
  """
  chex.assert_rank(continues, 2)
  factors = jnp.concatenate([continues[:1], gamma * continues[1:-1]])
  return jax.lax.stop_gradient(jnp.cumprod(factors, axis=0))


def imagined_returns(
  reward: types.ArrayTree,
  continues: types.Array,
  value: types.ArrayTree,
  gamma: float,
  lambda_: float,
) -> types.ArrayTree:
  """Computes lambda-returns of imagined rows.

    R_h = r_{h+1} + gamma c_{h+1} ((1 - lambda) v_{h+1} + lambda R_{h+1}),
    R_H = v_H

  (section "Critic learning", with rewards and continuations of the
  transition into a row.)

  Args:
    reward: Shape `[H + 1, N]`, that of row 0 is not used; an array or a dict.
    continues: Probability that the episode goes on, shape `[H + 1, N]`.
    value: Shape `[H + 1, N]`, a dict if the reward is one.
    gamma: Discount per step, in [0, 1].
    lambda_: Mixing of the bootstraps, in [0, 1].

  Returns:
    Returns of rows `0..H-1`, shape `[H, N]`. Gradients flow.

  Raises:
    ValueError: If `reward` and `value` do not have the same keys.
  """
  chex.assert_equal_shape([continues, *jax.tree.leaves((reward, value))])
  never_last = jnp.zeros(continues[1:].shape, bool)
  target, _ = returns.td_lambda(
    jax.tree.map(lambda x: x[1:], reward),
    continues[1:],
    never_last,
    value,
    gamma=gamma,
    lambda_=lambda_,
  )
  return target


def init_range(dtype: Any = jnp.float32) -> ReturnRange:
  """Makes a range of no returns; its scale is the limit."""
  # A zero for each: they may be donated.
  low, high, weight = (jnp.zeros((), dtype) for _ in range(3))
  return ReturnRange(low=low, high=high, weight=weight)


def update_range(
  return_range: ReturnRange,
  returns_: types.Array,
  *,
  rate: float = 0.01,
  low: float = 5.0,
  high: float = 95.0,
) -> ReturnRange:
  """Moves a range towards percentiles of new returns.

  Exponential averages (section "Actor learning") that are corrected
  for their start: after the first update they are its percentiles, after `n`
  those of update `i` have the weight `(1 - rate)^(n-i)`, normalised.

  Args:
    return_range: What to move.
    returns_: Imagined returns, any shape.
    rate: Weight of new returns in the long run, in (0, 1].
    low: The lower percentile, in [0, 100].
    high: The upper one.

  Returns:
    The range, without gradient.
  """
  x = jax.lax.stop_gradient(returns_).reshape(-1)
  new_low, new_high = jnp.percentile(x, jnp.asarray([low, high], x.dtype))
  weight = return_range.weight + rate * (1 - return_range.weight)
  step = rate / weight
  return ReturnRange(
    low=return_range.low + step * (new_low - return_range.low),
    high=return_range.high + step * (new_high - return_range.high),
    weight=weight,
  )


def return_scale(return_range: ReturnRange, limit: float = 1.0) -> types.Array:
  """Computes what to divide advantages by: `max(limit, high - low)`.

  Returns below the limit are not scaled up, which would magnify the noise of
  sparse rewards (section "Actor learning").

  Args:
    return_range: From `update_range`.
    limit: The smallest scale, positive.

  Returns:
    A scalar.
  """
  return jnp.maximum(return_range.high - return_range.low, limit)


def actor_loss(
  log_prob: types.ArrayTree,
  entropy: types.ArrayTree,
  advantage: types.Array,
  weight: types.Array,
  *,
  entropy_cost: float = 3e-4,
) -> tuple[types.Array, types.Metrics]:
  """Computes the loss of the actor on imagined rows, by REINFORCE.

  The mean of `-weight (sg(advantage) log_prob + entropy_cost entropy)` (section
  "Actor learning"). Heads are independent: their log-densities and
  entropies add up.

  Args:
    log_prob: Log-density of the imagined action, shape `[H, N]`, or a dict.
    entropy: Of the policy, shape `[H, N]`, or a dict.
    advantage: `(return - value) / return_scale(range)`, shape `[H, N]`.
    weight: From `imagined_weights`, shape `[H, N]`.
    entropy_cost: Weight of the entropy bonus.

  Returns:
    The loss, and scalar metrics: `actor_loss`, `entropy` and
    `advantage_magnitude`, the mean of `|advantage|`; these two by weight.
  """
  log_prob, entropy = trees.total(log_prob), trees.total(entropy)
  chex.assert_equal_shape([log_prob, entropy, advantage, weight])
  advantage, weight = jax.lax.stop_gradient((advantage, weight))
  gain = advantage * log_prob + entropy_cost * entropy
  loss = -jnp.mean(weight * gain)
  metrics = {
    'actor_loss': loss,
    'entropy': weighted_mean(entropy, weight),
    'advantage_magnitude': weighted_mean(jnp.abs(advantage), weight),
  }
  return loss, metrics


def critic_loss(
  value_distribution: Any,
  target: types.Array,
  slow_value: types.Array,
  weight: types.Array,
  *,
  slow_cost: float = 1.0,
) -> tuple[types.Array, types.Metrics]:
  """Computes the loss of the critic on imagined rows.

  The mean of `-weight (log p(target) + slow_cost log p(slow_value))` (section
  "Critic learning"): the critic predicts the distribution of the returns, and
  stays close to a slow average of itself. No gradient flows through the rest.

  Args:
    value_distribution: With `log_prob` and `mean()` of shape `[H, N]`.
    target: From `imagined_returns`, shape `[H, N]`.
    slow_value: Mean of the slow critic, shape `[H, N]`.
    weight: From `imagined_weights`, shape `[H, N]`.
    slow_cost: Weight of the second term.

  Returns:
    The loss, and scalar metrics: `critic_loss`, `value_mean` and `target_mean`;
    these two by weight.
  """
  chex.assert_equal_shape([target, slow_value, weight])
  target, slow_value, weight = jax.lax.stop_gradient(
    (target, slow_value, weight)
  )
  log_prob = value_distribution.log_prob(target)
  log_prob += slow_cost * value_distribution.log_prob(slow_value)
  chex.assert_equal_shape([log_prob, weight])
  loss = -jnp.mean(weight * log_prob)
  metrics = {
    'critic_loss': loss,
    'value_mean': weighted_mean(value_distribution.mean(), weight),
    'target_mean': weighted_mean(target, weight),
  }
  return loss, metrics


def weighted_mean(x: types.Array, weight: types.Array) -> types.Array:
  """Computes `sum(weight x) / sum(weight)`; 0 if nothing has weight."""
  tiny = jnp.finfo(weight.dtype).tiny
  return jnp.sum(weight * x) / jnp.maximum(jnp.sum(weight), tiny)
