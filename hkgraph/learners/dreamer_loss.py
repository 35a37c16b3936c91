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


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Imagined:
  """What follows the start rows, by the world model and the actor.

  Attributes:
    features: Of the start and of each step.
    action: What was done, in the policy's own space.
    reward: Of the transition into each row; 0 for the start.
    continues: Probability that it does not terminate; for the start as it was.
  """

  features: types.Array  # [H + 1, N, F]
  action: types.ArrayTree  # [H, N, ...]
  reward: types.Array  # [H + 1, N]
  continues: types.Array  # [H + 1, N]


def encode_previous(
  action_spec: Any, action: types.ArrayTree, dtype: Any
) -> types.Array:
  """Encodes the action that led into each row of `[T, B, ...]`.

  That before the first row is not known, and 0: the state is empty there too.
  """
  action = heads.encode_action(action_spec, action).astype(dtype)
  return jnp.concatenate([jnp.zeros_like(action[:1]), action[:-1]])


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
  imagine = _make_imagine(networks, action_spec, config)
  score = _make_score(networks, config)

  def loss_fn(params, slow_critic, return_range, rows, key):
    """The loss of rows `[burn_in + T, B, ...]`, and `(range, metrics)`."""
    params, slow_critic = encoding.cast_floats((params, slow_critic), dtype)
    frozen = lax.stop_gradient(params)
    warm_key, observe_key, imagine_key = jax.random.split(key, 3)
    action_tm1 = encode_previous(action_spec, rows.action, dtype)
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
    imagined = imagine(frozen, lax.stop_gradient(observed), rows, imagine_key)
    behaviour_loss, return_range, more = score(
      params, slow_critic, return_range, imagined
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
    reconstruction_cost=config.reconstruction_cost,
    dynamics_cost=config.dynamics_cost,
    representation_cost=config.representation_cost,
  )


def _make_imagine(networks, action_spec, config):
  """Makes `(frozen params, observed, rows, key) -> _Imagined`."""
  world = networks.world

  def imagine(frozen, observed, rows, key):
    params = frozen['world_model']

    def act(features, key):
      policy = networks.actor(frozen['actor'], features)
      action = distributions.sample(policy, key)
      return heads.encode_action(action_spec, action), action

    start = observed.features
    start = start.reshape(-1, start.shape[-1])
    features, action = world['imagine'](
      params, observed.states, start, act, config.horizon, key
    )
    continues = _each_step(
      lambda x: world['continues'](params, x).mean(), features[1:]
    )
    reward = _each_step(
      lambda x: world['reward'](params, x).mean(), features[1:]
    )
    # What a row that opens an episode says of its transition is nobody's.
    goes_on = jnp.where(rows.is_first, 1, rows.discount).reshape(1, -1)
    return _Imagined(
      features=features,
      action=action,
      reward=jnp.concatenate([jnp.zeros_like(reward[:1]), reward]),
      continues=jnp.concatenate([goes_on.astype(continues.dtype), continues]),
    )

  return imagine


def _make_score(networks, config):
  """Makes the loss of actor and critic on what was imagined."""

  def score(params, slow_critic, return_range, imagined):
    # Nothing of it is differentiated: credit flows through log-densities.
    imagined = lax.stop_gradient(imagined)
    features, continues = imagined.features, imagined.continues
    policy = _each_step(
      lambda x: networks.actor(params['actor'], x), features[:-1]
    )
    critic = _each_step(
      lambda x: networks.critic(params['critic'], x), features
    )
    slow_value = _each_step(
      lambda x: networks.critic(slow_critic, x).mean(), features[:-1]
    )
    value = lax.stop_gradient(critic.mean())
    target = losses.imagined_returns(
      imagined.reward,
      continues,
      value,
      gamma=config.discount,
      lambda_=config.lambda_,
    )
    weight = losses.imagined_weights(continues, gamma=config.discount)
    return_range = losses.update_range(
      return_range, target, rate=config.return_rate
    )
    scale = losses.return_scale(return_range)
    actor_loss, metrics = losses.actor_loss(
      distributions.log_prob(policy, imagined.action),
      distributions.entropy(policy),
      (target - value[:-1]) / scale,
      weight,
      entropy_cost=config.entropy_cost,
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
      'imagined_reward': jnp.mean(imagined.reward[1:]),
      'imagined_continues': jnp.mean(continues[1:]),
      'return_scale': scale,
    }
    return actor_loss + critic_loss, return_range, metrics

  return score


def _each_step(fn: Callable[[types.Array], Any], x: types.Array) -> Any:
  """Applies `fn` to one imagined step after the other.

  Activations of one step fit into a cache, and are cheaper to compute again for
  the gradient than to keep.
  """
  return lax.map(jax.checkpoint(fn), x)
