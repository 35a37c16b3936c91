"""Keeps numbers that are not finite out of a learner."""

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.learners import agent as agent_lib


def select(
  condition: types.Array, on_true: types.ArrayTree, on_false: types.ArrayTree
) -> types.ArrayTree:
  """Takes one of two trees as a whole, by a bool scalar."""
  return jax.tree.map(
    lambda x, y: jnp.where(condition, x, y), on_true, on_false
  )


def keep_finite(
  old: agent_lib.LearnerState,
  new: agent_lib.LearnerState,
  trajectory: types.Trajectory,
) -> tuple[agent_lib.LearnerState, types.Metrics]:
  """Takes the new learner state, or the old one if anything is not finite.

  What is looked at: observations of all rows, rewards of all transitions but
  those into a `FIRST` row, and the new parameters, optimizer state and
  statistics.

  Args:
    old: The state before the update.
    new: The state after it.
    trajectory: What it was made from.

  Returns:
    The state, and metrics: `skipped` (0 or 1), and the number of values that
    are not finite, as `nonfinite/observation/...` and `nonfinite/reward/...`
    by leaf, and as `nonfinite/params`, `nonfinite/opt_state` and
    `nonfinite/statistics`.
  """
  timestep = trajectory.timestep
  owned = ~timestep.first()[1:]

  def count_owned(reward):
    return _count(jnp.where(owned, reward[1:], 0))

  metrics = trees.map_heads(_count, x=_floats(observation=timestep.observation))
  metrics |= trees.map_heads(count_owned, x=_floats(reward=timestep.reward))
  for name in ('params', 'opt_state', 'statistics'):
    metrics[f'nonfinite/{name}'] = _count(getattr(new, name))
  skipped = jnp.any(trees.stack(list(metrics.values())) > 0)
  metrics['skipped'] = skipped.astype(jnp.int32)
  # One operation, where `select` would be one for each leaf.
  return lax.cond(skipped, lambda: old, lambda: new), metrics


def _floats(**data: types.ArrayTree) -> dict[str, types.Array]:
  """Leaves that may be not finite, by the names of their metrics."""
  leaves = {
    'nonfinite/' + jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(data)
  }
  return {
    name: jnp.asarray(x)
    for name, x in leaves.items()
    if jnp.issubdtype(x.dtype, jnp.inexact)
  }


def _count(tree: types.ArrayTree) -> types.Array:
  leaves = [
    jnp.ravel(x)
    for x in jax.tree.leaves(tree)
    if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  if not leaves:
    return jnp.zeros((), jnp.int32)
  # Side by side: one count, however many leaves there are.
  return jnp.sum(~jnp.isfinite(jnp.concatenate(leaves)), dtype=jnp.int32)
