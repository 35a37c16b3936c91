"""The loss of PQN, for one head or for many.

Rows are `[N]` or `[T, B]`. Rows outside of the mask are absent from every mean;
where no row is left, the loss is 0.
"""

import chex
import jax
import jax.numpy as jnp
import rlax

from hkgraph import trees, types
from hkgraph.losses import masked


@chex.dataclass(frozen=True, mappable_dataclass=False)
class PQNBatch:
  """Rows to learn from, as the actor met them.

  Attributes:
    action: What was done, integers; a dict if the action values are one.
    target: What the value of `action` is regressed to; a dict likewise.
    value: The greedy value at that time; a dict likewise.
    mask: Whether the row counts, bool.
  """

  action: types.ArrayTree  # [...]
  target: types.ArrayTree  # [...]
  value: types.ArrayTree  # [...]
  mask: types.Array  # [...]


def greedy_value(q: types.ArrayTree) -> types.ArrayTree:
  """Computes the largest of the action values, `[..., A]` to `[...]`."""
  return jax.tree.map(lambda x: jnp.max(x, axis=-1), q)


def pqn_loss(
  q: types.ArrayTree, batch: PQNBatch
) -> tuple[types.Array, types.Metrics]:
  """Computes the loss of PQN (Gallici et al., 2024, arXiv 2407.04811).

  The mean of `(q(s, a) - target)^2 / 2` over the valid rows, added up over
  heads. No gradient flows through the targets: these are lambda-returns on
  greedy values, `returns.td_lambda(r_t, discount_t, last_tm1,
  greedy_value(q), ...)`.

  Args:
    q: Action values now, shape `[..., A]`; a dict has one entry per head.
    batch: The rows, shape `[...]`.

  Returns:
    The loss, and scalar metrics: `loss` (a sum over heads), `td_error` (mean
    `|q(s, a) - target|`), `q_mean` (mean `q(s, a)`) and `explained_variance`
    (of the targets by `q(s, a)`), means over heads; `value_deviation` (largest
    change of a greedy value since the row was met); for dicts also each head's
    own as `name/key`.

  Raises:
    ValueError: If keys do not match.
  """
  mask = batch.mask
  chex.assert_type(mask, bool)
  chex.assert_type(jax.tree.leaves(batch.action), int)
  chex.assert_equal_shape(
    [mask, *jax.tree.leaves((batch.action, batch.target, batch.value))]
  )
  chosen = trees.map_heads(_value_of, q=q, action=batch.action)
  chosen, target = jax.tree.map(
    lambda x: jnp.where(mask, x, 0),
    (chosen, jax.lax.stop_gradient(batch.target)),
  )
  losses = trees.map_heads(
    lambda x, g: masked.mean(rlax.l2_loss(x, g), mask),
    q=chosen,
    target=target,
  )
  errors = trees.map_heads(
    lambda x, g: masked.mean(jnp.abs(x - g), mask), q=chosen, target=target
  )
  explained = trees.map_heads(
    lambda x, g: masked.explained_variance(x, g, mask), q=chosen, target=target
  )
  means = trees.map_heads(lambda x: masked.mean(x, mask), q=chosen)
  deviations = trees.map_heads(
    lambda x, old: jnp.max(jnp.where(mask, jnp.abs(x - old), 0)),
    q=greedy_value(q),
    value=batch.value,
  )
  metrics = (
    trees.report('loss', losses, jnp.sum)
    | trees.report('td_error', errors, jnp.mean)
    | trees.report('q_mean', means, jnp.mean)
    | trees.report('explained_variance', explained, jnp.mean)
    | trees.report('value_deviation', deviations, jnp.max)
  )
  return trees.total(losses), metrics


def _value_of(q: types.Array, action: types.Array) -> types.Array:
  chex.assert_equal_shape_prefix([q, action], action.ndim)
  chex.assert_rank(q, action.ndim + 1)
  return rlax.batched_index(q, action)
