"""Targets and advantages for rows that run through episode boundaries."""

import chex
import jax
import jax.numpy as jnp
import rlax

from hkgraph import trees, types


def td_lambda(
  r_t: types.ArrayTree,
  discount_t: types.Array,
  last_tm1: types.Array,
  v: types.ArrayTree,
  *,
  gamma: float,
  lambda_: float,
) -> tuple[types.ArrayTree, types.ArrayTree]:
  """Computes lambda-returns and advantages of the transitions between rows.

  Transition `t` leads from row `t` to row `t + 1`. Its target is (Sutton and
  Barto, 2018, section 12.2)

    G_t = r_t + gamma discount_t ((1 - lambda) V_{t+1} + lambda G_{t+1}),
    G_T = V_T.

  A transition out of a `LAST` row is nobody's data: its reward is replaced by
  `V_t` and its discount by 0, so that its advantage is exactly 0, the trace of
  the next episode ends there, and a truncated episode bootstraps from the value
  of its own last row. With greedy action values as `v` these are the
  lambda-returns of Q.

  Args:
    r_t: Rewards of rows `1..T`, shape `[T, B]`; an array or a dict of them.
    discount_t: Discounts of rows `1..T`, 0 at terminations, shape `[T, B]`.
    last_tm1: Whether rows `0..T-1` are `LAST`, bool, shape `[T, B]`.
    v: Values of rows `0..T`, shape `[T + 1, B]`; a dict if the reward is one.
    gamma: Discount per step, in [0, 1].
    lambda_: Mixing of the bootstraps, in [0, 1].

  Returns:
    Targets and advantages, each of the structure and shape of `r_t`. Gradients
    flow through both.

  Raises:
    ValueError: If `r_t` and `v` do not have the same keys.
  """
  chex.assert_rank(last_tm1, 2)
  chex.assert_type(last_tm1, bool)
  chex.assert_equal_shape([discount_t, last_tm1, *jax.tree.leaves(r_t)])
  num_steps, batch_size = last_tm1.shape
  chex.assert_shape(jax.tree.leaves(v), (num_steps + 1, batch_size))
  discount_t = jnp.where(last_tm1, 0, gamma * discount_t)
  lambda_returns = jax.vmap(rlax.lambda_returns, (1, 1, 1, None), 1)

  def of_one(r_t, v):
    dtype = jnp.result_type(r_t, v)
    v_tm1, v_t = v[:-1], v[1:]
    r_t = jnp.where(last_tm1, v_tm1, r_t)
    target = lambda_returns(
      *(jnp.asarray(x, dtype) for x in (r_t, discount_t, v_t, lambda_))
    )
    return target, target - v_tm1

  return trees.unzip(trees.map_heads(of_one, r_t=r_t, v=v))
