"""Proximal policy optimization (Schulman et al., 2017) for any `Network`."""

from collections.abc import Callable

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.data import minibatches
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import checks, guard
from hkgraph.learners import config as config_lib
from hkgraph.learners import optimizer as optimizer_lib
from hkgraph.losses import ppo as losses
from hkgraph.losses import returns
from hkgraph.modules import distributions

PPOConfig = config_lib.PPOConfig


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Rows:
  """Rows to learn from: what the network was shown, and what the loss needs.

  Attributes:
    observation: What the network was shown.
    is_first: Whether a row opens an episode.
    batch: What was done there, and what it led to.
  """

  observation: types.ArrayTree  # [T, b, ...] or [N, ...]
  is_first: types.Array  # [T, b] or [N]
  batch: losses.PPOBatch  # [T, b, ...] or [N, ...]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Fit:
  """What changes from minibatch to minibatch."""

  params: types.ArrayTree
  opt_state: optax.OptState
  stopped: types.Array  # []


def make_ppo(
  network: network_lib.Network, config: PPOConfig
) -> agent_lib.Agent:
  """Makes an agent that learns by proximal policy optimization.

  `update` computes advantages and targets once, from the values that the actor
  stored, and then steps through `num_epochs * num_minibatches` minibatches: of
  whole environments from the stored carry on where the network has carry, of
  single rows where it has none. Advantages are normalised over the whole
  rollout, so a row weighs the same in every split. `LAST` rows count in no
  loss. The statistics stand still until the end; then they take in all rows
  `0..T-1` once, as the parameters that acted saw them.

  Once a minibatch's KL estimate passes `target_kl`, neither it nor a later one
  of the same update is stepped on. An update that meets, or would leave, a
  number that is not finite leaves the learner state as it is.

  Metrics are scalars: those of `losses.ppo.ppo_loss` and `grad_norm` as means
  over the minibatches; `ratio_deviation` of the very first one, which is
  rounding error unless the replay is inexact; `steps_applied`, the share of
  the minibatches that were stepped on; `skipped`, whether the state was left
  as it is; and the number of faults in `nonfinite/observation/...`,
  `nonfinite/reward/...` and `nonfinite/params`, `.../opt_state` and
  `.../statistics`.

  Args:
    network: Its outputs are `types.PolicyValue`; one value for each reward.
    config: The hyperparameters.

  Returns:
    An `Agent`; its `init` raises `TypeError` or `ValueError` if the outputs
    of the network, the reward and `config` do not go together.

  Raises:
    TypeError: If `network` is no `Network` or `config` no `PPOConfig`.
  """
  checks.check_arguments(network, config)
  optimizer = _optimizer(config)

  def init(key, timestep):
    params_key, learner_key = jax.random.split(key)
    params, state = network.init(params_key, timestep.observation)
    outputs, _ = jax.eval_shape(
      network.apply,
      *(params, state, learner_key),
      *(timestep.observation, timestep.first()),
    )
    checks.check_outputs(outputs, timestep, config)
    return agent_lib.LearnerState(
      params=params,
      statistics=state.statistics,
      opt_state=optimizer.init(params),
      key=learner_key,
      num_updates=jnp.zeros((), jnp.int32),
    )

  def act(params, state, key, timestep, *, deterministic=False):
    network_key, action_key = jax.random.split(key)
    outputs, state = network.apply(
      params, state, network_key, timestep.observation, timestep.first()
    )
    if deterministic:
      action = distributions.mode(outputs.policy)
    else:
      action = distributions.sample(outputs.policy, action_key)
    output = agent_lib.ActorOutput(
      action=action,
      environment_action=distributions.to_environment(outputs.policy, action),
      log_prob=distributions.log_prob(outputs.policy, action),
      value=outputs.value,
    )
    return output, state

  def update(learner_state, trajectory):
    checks.check_trajectory(trajectory, config)
    rows = _rows(trajectory, config)
    next_key, epochs_key = jax.random.split(learner_state.key)
    acted = types.NetworkState(
      carry=trajectory.carry, statistics=learner_state.statistics
    )
    loss_fn = _make_loss(network, config, acted.statistics)
    fit = _Fit(
      params=learner_state.params,
      opt_state=learner_state.opt_state,
      stopped=jnp.zeros((), bool),
    )
    fit, metrics = _run_epochs(
      loss_fn, optimizer, config, fit, (rows, acted.carry), epochs_key
    )
    everything = jnp.ones(rows.is_first.shape, bool)
    state = network.update_statistics(
      learner_state.params,
      acted,
      rows.observation,
      rows.is_first,
      everything,
    )
    new_state = agent_lib.LearnerState(
      params=fit.params,
      statistics=state.statistics,
      opt_state=fit.opt_state,
      key=next_key,
      num_updates=learner_state.num_updates + 1,
    )
    new_state, faults = guard.keep_finite(learner_state, new_state, trajectory)
    return new_state, metrics | faults

  return agent_lib.Agent(
    init=init, initial_carry=network.initial_carry, act=act, update=update
  )


def _optimizer(config: PPOConfig) -> optax.GradientTransformation:
  steps_per_update = config.num_epochs * config.num_minibatches
  return optimizer_lib.make_optimizer(
    config.learning_rate,
    schedule=config.schedule,
    total_steps=steps_per_update * (config.total_updates or 1),
    max_grad_norm=config.max_grad_norm,
    weight_decay=config.weight_decay,
  )


def _rows(trajectory: types.Trajectory, config: PPOConfig) -> _Rows:
  """Adds advantages and targets to the rows `0..T-1`."""
  first, following = (
    jax.tree.map(lambda x, part=part: x[part], trajectory.timestep)
    for part in (slice(None, -1), slice(1, None))
  )
  mask = ~first.last()
  target, advantage = returns.td_lambda(
    following.reward,
    following.discount,
    first.last(),
    trajectory.value,
    gamma=config.discount,
    lambda_=config.lambda_,
  )
  if config.advantage_mode == 'combined':
    advantage = losses.combine(advantage, config.advantage_weights)
  if config.normalise_advantages:
    advantage = losses.normalise_advantages(advantage, mask)
  batch = losses.PPOBatch(
    action=trajectory.action,
    log_prob=trajectory.log_prob,
    advantage=advantage,
    target=target,
    value=jax.tree.map(lambda x: x[:-1], trajectory.value),
    mask=mask,
  )
  return _Rows(
    observation=first.observation,
    is_first=first.first(),
    batch=batch,
  )


def _make_loss(
  network: network_lib.Network,
  config: PPOConfig,
  statistics: types.ArrayTree,
) -> Callable[..., tuple[types.Array, types.Metrics]]:
  """Makes the loss of parameters, from a minibatch and a key."""

  def loss_fn(params, minibatch, key):
    rows, carry = minibatch
    state = types.NetworkState(carry=carry, statistics=statistics)
    run = network.unroll if rows.is_first.ndim == 2 else network.apply
    outputs, _ = run(params, state, key, rows.observation, rows.is_first)
    return losses.ppo_loss(
      outputs.policy,
      outputs.value,
      rows.batch,
      clip_epsilon=config.clip_epsilon,
      value_cost=config.value_cost,
      entropy_cost=config.entropy_cost,
      value_clip=config.value_clip,
    )

  return loss_fn


def _run_epochs(
  loss_fn: Callable[..., tuple[types.Array, types.Metrics]],
  optimizer: optax.GradientTransformation,
  config: PPOConfig,
  fit: _Fit,
  data: tuple[_Rows, types.ArrayTree],
  key: chex.PRNGKey,
) -> tuple[_Fit, types.Metrics]:
  """Steps through all minibatches of all epochs."""

  def step(fit, minibatch_and_key):
    grads, metrics = jax.grad(loss_fn, has_aux=True)(
      fit.params, *minibatch_and_key
    )
    updates, opt_state = optimizer.update(grads, fit.opt_state, fit.params)
    params = optax.apply_updates(fit.params, updates)
    new_fit = fit.replace(params=params, opt_state=opt_state)
    if config.target_kl is not None:
      stopped = fit.stopped | (metrics['approx_kl'] > config.target_kl)
      new_fit = guard.select(stopped, fit, new_fit).replace(stopped=stopped)
    metrics |= {
      'grad_norm': optax.tree.norm(grads),
      'steps_applied': (~new_fit.stopped).astype(jnp.float32),
    }
    return new_fit, metrics

  def epoch(fit, keys):
    parts = _split(keys[0], *data, config.num_minibatches)
    return lax.scan(step, fit, (parts, keys[1:]))

  shape = (config.num_epochs, 1 + config.num_minibatches)
  fit, metrics = lax.scan(epoch, fit, jax.random.split(key, shape))
  return fit, {
    name: x[0, 0] if name.startswith('ratio_deviation') else jnp.mean(x)
    for name, x in metrics.items()
  }


def _split(
  key: chex.PRNGKey, rows: _Rows, carry: types.ArrayTree, num_minibatches: int
) -> tuple[_Rows, types.ArrayTree]:
  """Deals whole environments, or rows that stand alone, to minibatches."""
  if jax.tree.leaves(carry):
    return minibatches.permuted_minibatches(
      key, (rows, carry), num_minibatches, axis=(1, 0)
    )
  flat = minibatches.flatten_rows(rows)
  return minibatches.permuted_minibatches(key, flat, num_minibatches), carry
