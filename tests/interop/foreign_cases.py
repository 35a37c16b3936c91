"""What every foreign module is asked, whatever library it comes from."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.learners import ppo
from hkgraph.modules import distributions
from tests.learners import ppo_test
from tests.modules import agreement

without_keys = ppo_test.without_keys


def network(make):
  """The network that is the module alone."""
  return network_lib.transform(lambda x: make()(x))


def start(make, x):
  """The network, and parameters and state for rows `[T, B, ...]`."""
  net = network(make)
  params, state = jax.jit(net.init)(jax.random.key(0), x[0])
  return net, params, state


def check_stepped_as_unrolled(network, x, is_first):
  """As `agreement.check`, for carries with keys in them."""
  row = jax.tree.map(lambda x: x[0], x)
  params, state = jax.jit(network.init)(jax.random.key(0), row)
  apply, unroll = jax.jit(network.apply), jax.jit(network.unroll)
  _, state = apply(params, state, None, row, ~is_first[0])
  looped, loop_end = agreement.loop(apply, params, state, x, is_first)
  unrolled, end = unroll(params, state, None, x, is_first)
  chex.assert_trees_all_close(looped, unrolled, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(
    without_keys(loop_end), without_keys(end), rtol=1e-5, atol=1e-5
  )
  chex.assert_trees_all_equal(end.statistics, state.statistics)
  return params, end


def check_noise(make):
  """A module that is dropout alone, by one half: what it drops and when."""
  x = np.ones((5, 6, 40), np.float32)
  is_first = np.zeros((5, 6), bool)
  is_first[3, 1] = True
  net, params, state = start(make, x)
  unroll = jax.jit(net.unroll)
  whole, end = unroll(params, state, None, x, is_first)
  np.testing.assert_array_equal(np.unique(whole), [0, 2])
  # Neither rows nor elements meet the same noise, also after a reset.
  assert len(np.unique(np.reshape(whole, (30, 40)), axis=0)) == 30
  for part in map(np.array, ([4], [1, 3], [5, 0, 1])):
    carry = jax.tree.map(lambda x, part=part: x[part], state.carry)
    some, some_end = unroll(
      params,
      state.replace(carry=carry),
      None,
      x[:, part],
      is_first[:, part],
    )
    np.testing.assert_array_equal(some, whole[:, part])
    for a, b in zip(
      jax.tree.leaves(without_keys(some_end.carry)),
      jax.tree.leaves(without_keys(end.carry)),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b[part])
  looped, _ = agreement.loop(jax.jit(net.apply), params, state, x, is_first)
  np.testing.assert_array_equal(looped, whole)


def check_no_carry(make):
  x, is_first = agreement.rows((4,))
  net, params, state = start(make, x)
  assert not jax.tree.leaves(state.carry)
  y, _ = net.unroll(params, state, None, x, is_first)
  np.testing.assert_array_equal(y, x)


def check_seeds_and_gradients(make, size=4):
  """Works under vmap, and every parameter has a gradient."""
  x, is_first = agreement.rows((size,))
  net = network(make)
  keys = jax.random.split(jax.random.key(0), 2)

  def loss(params, state):
    y, _ = net.unroll(params, state, None, x, is_first)
    return jnp.sum(jnp.sin(y) * jnp.cos(3 * y))

  def one(key):
    params, state = net.init(key, x[0])
    return params, jax.grad(loss)(params, state)

  _, grads = jax.jit(jax.vmap(one))(keys)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    for gradient in leaf:
      assert np.any(gradient), jax.tree_util.keystr(path)
  alone = jax.jit(one)(keys[1])[1]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b[1], rtol=1e-4, atol=1e-5),
    alone,
    grads,
  )


def batch_norm_rows():
  """Rows, and a mask that leaves out some, not half of them."""
  rng = np.random.default_rng(1)
  x = rng.normal(3, 2, (4, 3, 5)).astype(np.float32)
  mask = rng.random((4, 3)) < 0.6
  mask[0, 0], mask[1, 1] = True, False
  return x, mask


def check_statistics(make, averages, *, momentum=0.9, mask=None):
  """A batch norm alone: frozen but in `update_statistics`.

  Args:
    make: The module.
    averages: `state.statistics -> (mean, variance)`.
    momentum: What is kept of an average.
    mask: In place of an irregular one.
  """
  x, irregular = batch_norm_rows()
  mask = irregular if mask is None else mask
  is_first = np.zeros(mask.shape, bool)
  net, params, state = start(make, x)
  y, end = jax.jit(net.unroll)(params, state, None, x, is_first)
  np.testing.assert_allclose(y, x / np.sqrt(1 + 1e-5), rtol=1e-5)
  agreement.check(net, x, is_first)
  jax.tree.map(np.testing.assert_array_equal, end.statistics, state.statistics)

  update = jax.jit(net.update_statistics)
  spoiled = np.where(mask[..., None], x, np.nan)
  new = update(params, state, spoiled, is_first, mask)
  rows = x[mask].astype(np.float64)
  mean, variance = averages(new.statistics)
  np.testing.assert_allclose(
    mean, (1 - momentum) * rows.mean(0), rtol=1e-4, atol=1e-5
  )
  np.testing.assert_allclose(
    variance, momentum + (1 - momentum) * rows.var(0), rtol=1e-4
  )
  y, _ = jax.jit(net.unroll)(params, new, None, x, is_first)
  expected = (x - np.asarray(mean)) / np.sqrt(np.asarray(variance) + 1e-5)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)

  nothing = update(params, new, x, is_first, np.zeros_like(mask))
  jax.tree.map(
    np.testing.assert_array_equal, nothing.statistics, new.statistics
  )


def check_ratio(make, num_minibatches):
  """PPO's ratio is 1 before the first update of each of three rollouts.

  The module maps `[..., 1]` to `[..., 3]`: two logits and a value.
  """

  def fn(x):
    y = make()(x[..., None])
    return types.PolicyValue(
      policy=distributions.categorical(y[..., :2]), value=y[..., 2]
    )

  config = ppo.PPOConfig(
    num_envs=4,
    num_steps=9,
    num_minibatches=num_minibatches,
    num_epochs=2,
    learning_rate=1e-2,
  )
  trainer = ppo_test.Trainer(network_lib.transform(fn), config)
  learner, actor = trainer.start(jax.random.key(0))
  before = learner.statistics
  for _ in range(3):
    actor, trajectory = trainer.rollout(learner, actor)
    learner, metrics = trainer.update(learner, trajectory)
    assert jnp.any(trajectory.timestep.first()[1:])
    assert metrics['ratio_deviation'] < 1e-5, metrics['ratio_deviation']
    assert metrics['approx_kl'] > 1e-9  # It moved afterwards.
    assert metrics['skipped'] == 0
  for a, b in zip(
    jax.tree.leaves(before), jax.tree.leaves(learner.statistics), strict=True
  ):
    assert np.any(a != b)


def recurrent_reference(cell, initial, x, is_first):
  """`cell(carry, x) -> (carry, y)` row by row, reset at first rows."""
  carry, ys = initial, []
  for row, first in zip(x, is_first, strict=True):

    def reset(now, new, first=first):
      return jnp.where(first[:, None], new, now)

    carry, y = cell(jax.tree.map(reset, carry, initial), row)
    ys.append(y)
  return jnp.stack(ys)


def mlp(params, x, names, weight='kernel', transpose=False):
  """Linear layers with a relu between, of parameters by name."""
  y = x
  for i, name in enumerate(names):
    w = params[f'{name}.{weight}']
    w = w.T if transpose else w
    y = y @ w + np.asarray(params[f'{name}.bias'])[(None,) * (x.ndim - 1)]
    y = np.maximum(y, 0) if i < len(names) - 1 else y
  return y
