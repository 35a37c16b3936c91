"""The loss of proximal policy optimization, for one head or for many.

Rows are `[N]` or `[T, B]`. Rows outside of the mask are absent from every mean
and every count; where no row is left, losses are 0.
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import rlax

from hkgraph import trees, types
from hkgraph.losses import masked


@chex.dataclass(frozen=True, mappable_dataclass=False)
class PPOBatch:
  """Rows to learn from, as the actor met them.

  Attributes:
    action: What the policy drew; a dict if the policy is one.
    log_prob: Log-density of `action` at that time; a dict if the policy is one.
    advantage: How much better `action` was than expected. A dict with the
      policy's keys gives every head its own surrogate; an array is shared by
      the joint action of all heads.
    target: What the value is regressed to; a dict if the value is one.
    value: The value estimate at that time; a dict if the value is one.
    mask: Whether the row counts, bool.
  """

  action: types.ArrayTree  # [..., *action_shape]
  log_prob: types.ArrayTree  # [...]
  advantage: types.ArrayTree  # [...]
  target: types.ArrayTree  # [...]
  value: types.ArrayTree  # [...]
  mask: types.Array  # [...]


def normalise_advantages(
  advantage: types.ArrayTree, mask: types.Array, *, eps: float = 1e-8
) -> types.ArrayTree:
  """Shifts and scales advantages to mean 0 and deviation 1 over valid rows.

  Args:
    advantage: Shape `[...]`; a dict has each entry normalised by itself.
    mask: Whether a row counts, bool, shape `[...]`.
    eps: Added to the standard deviation.

  Returns:
    The structure of `advantage`, without gradient; 0 outside of the mask.
  """

  def normalise(x):
    x = masked.centre(jax.lax.stop_gradient(x), mask)
    return x / (jnp.sqrt(masked.mean(jnp.square(x), mask)) + eps)

  return trees.map_heads(normalise, advantage=advantage)


def combine(
  tree: types.ArrayTree, weights: Mapping[str, float] | None = None
) -> types.Array:
  """Adds up the entries of a dict, for a policy that serves several rewards.

  Args:
    tree: A dict of arrays of one shape; an array is returned as it is.
    weights: Factor per key; all 1 if None.

  Returns:
    An array of the shape of the entries.

  Raises:
    ValueError: If the weights' keys are not those of the tree.
  """
  if weights is not None:
    tree = trees.map_heads(
      lambda x, weight: weight * x, tree=tree, weights=weights
    )
  return trees.total(tree)


def clipped_surrogate_loss(
  log_ratio: types.Array,
  advantage: types.Array,
  mask: types.Array,
  epsilon: float,
) -> types.Array:
  """Computes the clipped surrogate policy loss.

  The mean of `-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A)` with
  `rho = exp(log_ratio)` (Schulman et al., 2017, equation 7).

  Args:
    log_ratio: Log-density of the action now, less that when drawn, `[...]`.
    advantage: Shape `[...]`; no gradient flows through it.
    mask: Whether a row counts, bool, shape `[...]`.
    epsilon: How far from 1 a ratio may be rewarded to go.

  Returns:
    A scalar.
  """
  chex.assert_equal_shape([log_ratio, advantage, mask])
  ratio = jnp.exp(jnp.where(mask, log_ratio, 0))
  advantage = jnp.where(mask, advantage, 0)
  # rlax averages over a vector, so that a row's own loss is that of one row.
  loss_of_row = jax.vmap(rlax.clipped_surrogate_pg_loss, (0, 0, None))
  losses = loss_of_row(ratio.reshape(-1, 1), advantage.reshape(-1, 1), epsilon)
  return masked.mean(losses, mask.reshape(-1))


def value_loss(
  value: types.Array,
  target: types.Array,
  mask: types.Array,
  *,
  old_value: types.Array | None = None,
  clip: float | None = None,
) -> types.Array:
  """Computes half the mean squared error of the value, clipped if asked.

  With `clip`, the larger of the losses of `value` and of the nearest number to
  it within `clip` of `old_value` counts (OpenAI Baselines' PPO2).

  Args:
    value: Estimates now, shape `[...]`.
    target: Shape `[...]`; no gradient flows through it.
    mask: Whether a row counts, bool, shape `[...]`.
    old_value: Estimates when the rows were met, shape `[...]`.
    clip: How far a value may move unpunished; None does not clip.

  Returns:
    A scalar.

  Raises:
    ValueError: If `clip` is given without `old_value`.
  """
  chex.assert_equal_shape([value, target, mask])
  value, target = (jnp.where(mask, x, 0) for x in (value, target))
  target = jax.lax.stop_gradient(target)
  loss = rlax.l2_loss(value, target)
  if clip is not None:
    if old_value is None:
      raise ValueError('`clip` needs `old_value`, got None.')
    chex.assert_equal_shape([value, old_value])
    old_value = jnp.where(mask, old_value, 0)
    moved = jnp.clip(value - old_value, -clip, clip)
    loss = jnp.maximum(loss, rlax.l2_loss(old_value + moved, target))
  return masked.mean(loss, mask)


def approximate_kl(log_ratio: types.Array, mask: types.Array) -> types.Array:
  """Estimates KL(old, new) from actions of the old policy.

  The mean of `(rho - 1) - log(rho)`, unbiased and never negative (Schulman,
  "Approximating KL Divergence", 2020, estimator k3).

  Args:
    log_ratio: Log-density of the action now, less that when drawn, `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.

  Returns:
    A scalar.
  """
  return masked.mean(jnp.expm1(log_ratio) - log_ratio, mask)


def clip_fraction(
  log_ratio: types.Array, mask: types.Array, epsilon: float
) -> types.Array:
  """Computes the share of valid rows whose ratio lies outside of the clip.

  Args:
    log_ratio: Log-density of the action now, less that when drawn, `[...]`.
    mask: Whether a row counts, bool, shape `[...]`.
    epsilon: Half the width of the clip.

  Returns:
    A scalar in [0, 1].
  """
  outside = jnp.abs(jnp.expm1(log_ratio)) > epsilon
  return masked.mean(outside.astype(log_ratio.dtype), mask)


def ppo_loss(
  policy: Any,
  value: types.ArrayTree,
  batch: PPOBatch,
  *,
  clip_epsilon: float,
  value_cost: float,
  entropy_cost: float,
  value_clip: float | None = None,
) -> tuple[types.Array, types.Metrics]:
  """Computes the loss of proximal policy optimization (Schulman et al., 2017).

    loss = surrogate + value_cost * value_loss - entropy_cost * entropy

  Heads of a dict policy are independent, so that their entropies add up. With
  one advantage per head each has its own surrogate, and these add up; with a
  single advantage the heads' log-densities are added into one ratio. Losses of
  several values add up. A single policy takes a single advantage:
  `combine` makes it from a dict.

  Args:
    policy: A distribution over actions with the rows of the batch, or a dict.
    value: Value estimates, shape `[...]`, or a dict of them.
    batch: The rows, shape `[...]`.
    clip_epsilon: How far from 1 a ratio may be rewarded to go, positive.
    value_cost: Weight of the value loss.
    entropy_cost: Weight of the entropy bonus.
    value_clip: How far a value may move unpunished; None does not clip.

  Returns:
    The loss, and scalar metrics: `policy_loss`, `value_loss`, `entropy` and
    `approx_kl` (sums over heads), `clip_fraction` and `explained_variance`
    (means over heads), `ratio_deviation` (largest `|rho - 1|`); for dicts also
    each head's own as `name/key`.

  Raises:
    ValueError: If keys do not match, or a single policy has many advantages.
  """
  mask = batch.mask
  chex.assert_type(mask, bool)
  chex.assert_equal_shape(
    [mask, *jax.tree.leaves((batch.log_prob, batch.advantage, value))]
  )
  log_ratio, entropies = _ratio_and_entropy(policy, batch)
  policy_losses = trees.map_heads(
    lambda r, a: clipped_surrogate_loss(r, a, mask, clip_epsilon),
    policy=log_ratio,
    advantage=batch.advantage,
  )
  value_losses = trees.map_heads(
    lambda v, g, old: value_loss(v, g, mask, old_value=old, clip=value_clip),
    value=value,
    target=batch.target,
    old_value=batch.value,
  )
  loss = (
    trees.total(policy_losses)
    + value_cost * trees.total(value_losses)
    - entropy_cost * trees.total(entropies)
  )
  metrics = (
    {'loss': loss}
    | trees.report('policy_loss', policy_losses, jnp.sum)
    | trees.report('value_loss', value_losses, jnp.sum)
    | trees.report('entropy', entropies, jnp.sum)
    | _diagnostics(log_ratio, value, batch, clip_epsilon)
  )
  return loss, metrics


def _ratio_and_entropy(
  policy: Any, batch: PPOBatch
) -> tuple[types.ArrayTree, types.ArrayTree]:
  """Compares actions' log-densities, as one array if the advantage is one.

  Also computes the mean entropy of each head, in the same pass.
  """

  def of_head(p, action, old):
    return p.log_prob(action) - old, masked.mean(p.entropy(), batch.mask)

  log_ratio, entropy = trees.unzip(
    trees.map_heads(
      of_head, policy=policy, action=batch.action, log_prob=batch.log_prob
    )
  )
  if isinstance(batch.advantage, Mapping):
    if not isinstance(policy, Mapping):
      raise ValueError(
        'A single policy needs a single `advantage`, got keys '
        f'{sorted(batch.advantage)}; make it with `combine`.'
      )
    trees.check_same_keys(policy=policy, advantage=batch.advantage)
    return log_ratio, entropy
  return trees.total(log_ratio), entropy


def _diagnostics(
  log_ratio: types.ArrayTree,
  value: types.ArrayTree,
  batch: PPOBatch,
  clip_epsilon: float,
) -> types.Metrics:
  mask = batch.mask

  def deviation(r):
    return jnp.max(jnp.where(mask, jnp.abs(jnp.expm1(r)), 0))

  kls = trees.map_heads(lambda r: approximate_kl(r, mask), policy=log_ratio)
  clipped = trees.map_heads(
    lambda r: clip_fraction(r, mask, clip_epsilon), policy=log_ratio
  )
  deviations = trees.map_heads(deviation, policy=log_ratio)
  explained = trees.map_heads(
    lambda v, g: masked.explained_variance(v, g, mask),
    value=value,
    target=batch.target,
  )
  return (
    trees.report('approx_kl', kls, jnp.sum)
    | trees.report('clip_fraction', clipped, jnp.mean)
    | trees.report('ratio_deviation', deviations, jnp.max)
    | trees.report('explained_variance', explained, jnp.mean)
  )
