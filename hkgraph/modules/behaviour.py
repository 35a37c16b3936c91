"""Actor and critic that read the features of a world model."""

from collections.abc import Sequence
from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.modules import heads, perceptron, towers, twohot


class Actor(hk.Module):
  """Features to a policy that begins near uniform and never rules out a choice.

  Hafner et al., arXiv 2301.04104, section "Actor critic learning": 1 % of each
  discrete policy is uniform.
  """

  def __init__(
    self,
    action_spec: heads.ActionSpec,
    hidden_sizes: Sequence[int],
    *,
    unimix: float = 0.01,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      action_spec: A `dm_env` spec, or a dict of them, one head for each.
      hidden_sizes: Of the hidden layers.
      unimix: Share of the uniform distribution in discrete policies.
      name: Name of the module.
    """
    super().__init__(name=name)
    self._sizes = heads.input_size(action_spec)
    self._head = heads.make_head(action_spec)
    self._hidden_sizes = hidden_sizes
    self._unimix = unimix

  def __call__(self, features: types.Array) -> Any:
    """Maps features `[..., F]` to a distribution, or a dict of them."""
    x = perceptron.Perceptron(self._hidden_sizes)(features)
    inputs = towers.linear_heads(x, self._sizes, 0.01, 'policy')
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    policy = heads.read(self._head, inputs)
    return trees.map_heads(self._mix, policy=policy)

  def _mix(self, policy):
    if isinstance(policy, distrax.Independent):
      return distrax.Independent(self._mix(policy.distribution), 1)
    if not isinstance(policy, distrax.Categorical) or not self._unimix:
      return policy
    # Choices that only pad an array stay impossible.
    possible = policy.logits > -jnp.inf
    uniform = possible / jnp.sum(possible, axis=-1, keepdims=True)
    probs = (1 - self._unimix) * policy.probs + self._unimix * uniform
    logits = jnp.log(jnp.where(possible, probs, 1))
    logits = jnp.where(possible, logits, -jnp.inf)
    return distrax.Categorical(logits=logits, dtype=policy.dtype)


class Critic(hk.Module):
  """Features to a two-hot distribution over returns; it begins at 0."""

  def __init__(
    self,
    hidden_sizes: Sequence[int],
    *,
    num_bins: int = 255,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      hidden_sizes: Of the hidden layers.
      num_bins: Of the distribution.
      name: Name of the module.
    """
    super().__init__(name=name)
    self._head = twohot.TwoHotHead(hidden_sizes, num_bins=num_bins)

  def __call__(self, features: types.Array) -> twohot.TwoHot:
    """Maps features `[..., F]` to the value of a row, `[...]`."""
    return self._head(features)
