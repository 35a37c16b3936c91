"""What DreamerV3 makes of replayed rows: one loss for all that it learns."""

from collections.abc import Callable
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.learners import dreamer_config, dreamer_networks
from hkgraph.losses import dreamer as losses
from hkgraph.modules import distributions, encoding, heads


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Row:
  """What is replayed of a row.

  Attributes:
    observation: In its own dtype.
    action: What was done at the row, in the policy's own space.
    reward: Of the transition into the row.
    discount: 0 if that transition terminated the episode, else 1.
    is_first: Whether the row opens an episode.
  """

  observation: types.ArrayTree  # [..., *observation_shape]
  action: types.ArrayTree  # [...]
  reward: types.Array  # [...]
  discount: types.Array  # [...]
  is_first: types.Array  # [...]


def make_loss(
  networks: dreamer_networks.Networks,
  action_spec: Any,
  config: dreamer_config.DreamerConfig,
) -> Callable[..., Any]:
  """Makes the loss of all parts on one batch of sequences.

  Args:
    networks: World model, actor and critic.
    action_spec: The action of one environment.
    config: The hyperparameters.

  Returns:
    `(params, slow_critic, return_range, rows, key) -> (loss, (range,
    metrics))`, of rows `[burn_in + T, B, ...]`.
  """
  dtype = jnp.dtype(config.dtype)
  world = networks.world

  def loss_fn(params, slow_critic, return_range, rows, key):
    """The loss of rows `[burn_in + T, B, ...]`, and `(range, metrics)`."""
    params, slow_critic = encoding.cast_floats((params, slow_critic), dtype)
    frozen = lax.stop_gradient(params)
    warm_key, observe_key, imagine_key = jax.random.split(key, 3)
    action = heads.encode_action(action_spec, rows.action).astype(dtype)
    # The action before the first row is not replayed: the state is empty too.
    action_tm1 = jnp.concatenate([jnp.zeros_like(action[:1]), action[:-1]])
    sequence = (rows.observation, action_tm1, rows.is_first)
    burn_in = config.burn_in
    state = world['initial']({}, rows.is_first.shape[1], dtype)
    if burn_in:
      warming = jax.tree.map(lambda x: x[:burn_in], sequence)
      warmed = world['observe'](
        frozen['world_model'], state, *warming, warm_key
      )
      state = lax.stop_gradient(warmed.state)
    sequence, rows = jax.tree.map(lambda x: x[burn_in:], (sequence, rows))
    observed = world['observe'](
      params['world_model'], state, *sequence, observe_key
    )
    model_loss, metrics = _model_loss(
      world, params['world_model'], observed, rows, config
    )
    behaviour_loss, return_range, more = _behaviour_loss(
      networks,
      config,
      action_spec,
      params,
      frozen['world_model'],
      slow_critic,
      return_range,
      *(lax.stop_gradient(observed), rows, imagine_key),
    )
    return model_loss + behaviour_loss, (return_range, metrics | more)

  return loss_fn


def _model_loss(world, params, observed, rows, config):
  target = world['prepare'](params, rows.observation)
  features = observed.features
  prediction = losses.ModelPrediction(
    reconstruction_loss=world['decode'](params, features).loss(target),
    reward=world['reward'](params, features),
    continues=world['continues'](params, features),
    posterior=observed.posterior,
    prior=observed.prior,
  )
  return losses.world_model_loss(
    prediction,
    rows.reward.astype(jnp.float32),
    rows.discount,
    rows.is_first,
    jnp.ones(rows.is_first.shape, bool),
    free_nats=config.free_nats,
    dynamics_cost=config.dynamics_cost,
    representation_cost=config.representation_cost,
  )


def _behaviour_loss(
  networks,
  config,
  action_spec,
  params,
  world_params,
  slow_critic,
  return_range,
  observed,
  rows,
  key,
):
  """Imagines from every row, and scores actor and critic."""
  world = networks.world

  def act(features, key):
    policy = networks.actor(params['actor'], features)
    action = distributions.sample(policy, key)
    return heads.encode_action(action_spec, action), action

  # Nothing is differentiated here: credit flows through the log-densities.
  start = observed.features
  features, action = lax.stop_gradient(
    world['imagine'](
      world_params,
      observed.states,
      start.reshape(-1, start.shape[-1]),
      act,
      config.horizon,
      key,
    )
  )

  def each_step(fn, x):
    # Activations of one step fit into a cache, and are cheaper to compute again
    # for the gradient than to keep.
    return lax.map(jax.checkpoint(fn), x)

  policy = each_step(
    lambda x: networks.actor(params['actor'], x), features[:-1]
  )
  # What a row that opens an episode says of its transition is nobody's.
  goes_on = jnp.where(rows.is_first, 1, rows.discount).reshape(1, -1)
  continues = each_step(
    lambda x: world['continues'](world_params, x).mean(), features[1:]
  )
  continues = jnp.concatenate([goes_on.astype(continues.dtype), continues])
  reward = each_step(
    lambda x: world['reward'](world_params, x).mean(), features[1:]
  )
  reward = jnp.concatenate([jnp.zeros_like(reward[:1]), reward])
  critic = each_step(lambda x: networks.critic(params['critic'], x), features)
  value = lax.stop_gradient(critic.mean())
  target = losses.imagined_returns(
    reward, continues, value, gamma=config.discount, lambda_=config.lambda_
  )
  weight = losses.imagined_weights(continues, gamma=config.discount)
  return_range = losses.update_range(
    return_range, target, rate=config.return_rate
  )
  scale = losses.return_scale(return_range)
  actor_loss, metrics = losses.actor_loss(
    distributions.log_prob(policy, action),
    distributions.entropy(policy),
    (target - value[:-1]) / scale,
    weight,
    entropy_cost=config.entropy_cost,
  )
  slow_value = each_step(
    lambda x: networks.critic(slow_critic, x).mean(), features[:-1]
  )
  critic_loss, more = losses.critic_loss(
    jax.tree.map(lambda x: x[:-1], critic),
    target,
    slow_value,
    weight,
    slow_cost=config.slow_cost,
  )
  metrics |= more
  metrics |= {
    'imagined_reward': jnp.mean(reward[1:]),
    'imagined_continues': jnp.mean(continues[1:]),
    'return_scale': scale,
  }
  return actor_loss + critic_loss, return_range, metrics
