"""Proximal policy optimization (Schulman et al., 2017) for any `Network`."""

import jax
import optax

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import checks, rollouts
from hkgraph.learners import config as config_lib
from hkgraph.learners import optimizer as optimizer_lib
from hkgraph.losses import ppo as losses
from hkgraph.losses import returns

PPOConfig = config_lib.PPOConfig


def make_ppo(
  network: network_lib.Network,
  config: PPOConfig,
  *,
  optimizer: optax.GradientTransformation | None = None,
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
    optimizer: Steps once per minibatch, on the parameters as the network has
      them. It replaces that of the config, whose `learning_rate`, `schedule`,
      `max_grad_norm` and `weight_decay` then have no effect.

  Returns:
    An `Agent`; its `init` raises `TypeError` or `ValueError` if the outputs
    of the network, the reward and `config` do not go together.

  Raises:
    TypeError: If `network` is no `Network`, `config` no `PPOConfig`, or
      `optimizer` no `optax.GradientTransformation`.
    ValueError: If a linear schedule has no end.
  """
  checks.check_arguments(network, config, PPOConfig, optimizer)
  checks.check_schedule(config)
  optimizer = optimizer or optimizer_lib.make_optimizer(
    config.learning_rate,
    schedule=config.schedule,
    total_steps=rollouts.total_steps(config),
    max_grad_norm=config.max_grad_norm,
    weight_decay=config.weight_decay,
  )
  return rollouts.make_agent(network, config, optimizer, _method(config))


def _method(config: PPOConfig) -> rollouts.Method:
  def check(outputs, timestep, carry):
    del carry
    checks.check_policy_value(outputs, timestep, config)

  def decide(outputs, num_updates, deterministic):
    del num_updates, deterministic  # A policy explores by itself.
    return outputs

  def loss(outputs, batch):
    return losses.ppo_loss(
      outputs.policy,
      outputs.value,
      batch,
      clip_epsilon=config.clip_epsilon,
      value_cost=config.value_cost,
      entropy_cost=config.entropy_cost,
      value_clip=config.value_clip,
    )

  def stop(metrics):
    return metrics['approx_kl'] > config.target_kl

  return rollouts.Method(
    check=check,
    decide=decide,
    batch=lambda trajectory: _batch(trajectory, config),
    loss=loss,
    replayed='ratio_deviation',
    stop=None if config.target_kl is None else stop,
  )


def _batch(trajectory: types.Trajectory, config: PPOConfig) -> losses.PPOBatch:
  """Adds advantages and targets to the rows `0..T-1`."""
  following = jax.tree.map(lambda x: x[1:], trajectory.timestep)
  last = trajectory.timestep.last()[:-1]
  mask = ~last
  target, advantage = returns.td_lambda(
    following.reward,
    following.discount,
    last,
    trajectory.value,
    gamma=config.discount,
    lambda_=config.lambda_,
  )
  if config.advantage_mode == 'combined':
    advantage = losses.combine(advantage, config.advantage_weights)
  if config.normalise_advantages:
    advantage = losses.normalise_advantages(advantage, mask)
  return losses.PPOBatch(
    action=trajectory.action,
    log_prob=trajectory.log_prob,
    advantage=advantage,
    target=target,
    value=jax.tree.map(lambda x: x[:-1], trajectory.value),
    mask=mask,
  )
