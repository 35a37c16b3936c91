"""Parallelised Q-learning (Gallici et al., 2024) for any `Network`."""

from collections.abc import Callable, Mapping

import distrax
import jax
import jax.numpy as jnp
import optax

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import checks, rollouts
from hkgraph.learners import config as config_lib
from hkgraph.learners import optimizer as optimizer_lib
from hkgraph.losses import pqn as losses
from hkgraph.losses import returns

PQNConfig = config_lib.PQNConfig


def make_pqn(
  network: network_lib.Network,
  config: PQNConfig,
  *,
  optimizer: optax.GradientTransformation | None = None,
) -> agent_lib.Agent:
  """Makes an agent that learns action values from parallel environments.

  PQN (Gallici et al., "Simplifying Deep Temporal Difference Learning", 2024,
  arXiv 2407.04811) has neither a replay buffer nor a target network. It acts
  epsilon-greedily: a share epsilon of the actions is uniformly random, and
  epsilon falls over the first updates; without `num_updates`, as in an
  evaluation, it has its final value. Deterministic actions are greedy. The
  value of a row is that of the greedy action.

  `update` computes lambda-returns once, from the greedy values that the actor
  stored, and then regresses the values of the actions taken to them, in
  `num_epochs * num_minibatches` minibatches: of whole environments from the
  stored carry on where the network has carry, of single rows where it has
  none. `LAST` rows count in no loss, nor do the first `burn_in` rows of a
  sequence: they warm the carry, through which gradients reach them. The
  statistics stand still until the end; then they take in all rows `0..T-1`
  once, as the parameters that acted saw them. An update that meets, or would
  leave, a number that is not finite leaves the learner state as it is.

  Metrics are scalars: those of `losses.pqn.pqn_loss` and `grad_norm` as means
  over the minibatches; `value_deviation` of the very first one, which is
  rounding error unless the replay is inexact; `epsilon`; and those of
  `guard.keep_finite`.

  Args:
    network: Its outputs are action values `[..., A]`, or a dict of them with
      one entry for each head of the action. Such a dict learns from a reward
      for each of its keys, or from one reward that all heads share.
    config: The hyperparameters.
    optimizer: As in `make_ppo`; it replaces that of the config, whose
      `optimizer`, `learning_rate`, `schedule` and `max_grad_norm` then have no
      effect.

  Returns:
    An `Agent`; its `init` raises `TypeError` or `ValueError` if the outputs
    of the network, the reward and `config` do not go together.

  Raises:
    TypeError: If `network` is no `Network`, `config` no `PQNConfig`, or
      `optimizer` no `optax.GradientTransformation`.
    ValueError: If a schedule has no end.
  """
  checks.check_arguments(network, config, PQNConfig, optimizer)
  checks.check_schedule(config)
  checks.check_exploration(config)
  optimizer = optimizer or optimizer_lib.make_optimizer(
    config.learning_rate,
    name=config.optimizer,
    schedule=config.schedule,
    total_steps=rollouts.total_steps(config),
    max_grad_norm=config.max_grad_norm,
    eps=1e-8,
  )
  epsilon_at = _make_schedule(config)
  agent = rollouts.make_agent(
    network, config, optimizer, _method(config, epsilon_at)
  )

  def update(learner_state, trajectory):
    new_state, metrics = agent.update(learner_state, trajectory)
    return new_state, metrics | {
      'epsilon': epsilon_at(learner_state.num_updates)
    }

  return agent_lib.Agent(
    init=agent.init,
    initial_carry=agent.initial_carry,
    act=agent.act,
    update=update,
  )


def _make_schedule(config: PQNConfig) -> Callable[..., types.Array]:
  """Makes epsilon of the number of updates; None is after the last."""
  updates = config.exploration_fraction * (config.total_updates or 1)
  schedule = optax.linear_schedule(
    config.epsilon_start, config.epsilon_finish, max(1, round(updates))
  )

  def epsilon_at(num_updates):
    if num_updates is None:
      return jnp.float32(config.epsilon_finish)
    return jnp.asarray(schedule(num_updates), jnp.float32)

  return epsilon_at


def _method(
  config: PQNConfig, epsilon_at: Callable[..., types.Array]
) -> rollouts.Method:
  def check(outputs, timestep, carry):
    checks.check_action_values(outputs, timestep, carry, config)

  def decide(outputs, num_updates, deterministic):
    epsilon = 0.0 if deterministic else epsilon_at(num_updates)
    policy = jax.tree.map(
      lambda q: distrax.EpsilonGreedy(q, epsilon, dtype=jnp.int32), outputs
    )
    return types.PolicyValue(policy=policy, value=losses.greedy_value(outputs))

  return rollouts.Method(
    check=check,
    decide=decide,
    batch=lambda trajectory: _batch(trajectory, config),
    loss=losses.pqn_loss,
    replayed='value_deviation',
  )


def _batch(trajectory: types.Trajectory, config: PQNConfig) -> losses.PQNBatch:
  """Adds targets to the rows `0..T-1`."""
  following = jax.tree.map(lambda x: x[1:], trajectory.timestep)
  last = trajectory.timestep.last()[:-1]
  reward, value = following.reward, trajectory.value
  if isinstance(value, Mapping) and not isinstance(reward, Mapping):
    reward = dict.fromkeys(value, reward)
  target, _ = returns.td_lambda(
    reward,
    following.discount,
    last,
    value,
    gamma=config.discount,
    lambda_=config.lambda_,
  )
  warm = jnp.arange(config.num_steps)[:, None] >= config.burn_in
  return losses.PQNBatch(
    action=trajectory.action,
    target=target,
    value=jax.tree.map(lambda x: x[:-1], value),
    mask=~last & warm,
  )
