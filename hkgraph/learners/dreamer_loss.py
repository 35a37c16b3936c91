"""What DreamerV3 makes of replayed rows: one loss for all that it learns."""

from collections.abc import Callable
import functools
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
    reward: Of the transition into each row; without meaning for the start.
    continues: Probability that it does not terminate; for the start as it was.
    value: By the critic.
    slow_value: By the slow critic.
  """

  features: types.Array  # [H + 1, N, F]
  action: types.ArrayTree  # [H + 1, N, ...]
  reward: types.Array  # [H + 1, N]
  continues: types.Array  # [H + 1, N]
  value: types.Array  # [H + 1, N]
  slow_value: types.Array  # [H + 1, N]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Lesson:
  """What actor and critic learn from.

  Attributes:
    features: Of the row.
    action: What was done there.
    advantage: Of that, by the scale of the returns.
    target: The return.
    slow_value: By the slow critic.
    weight: How much the row counts.
  """

  features: types.Array  # [..., N, F]
  action: types.ArrayTree  # [..., N, ...]
  advantage: types.Array  # [..., N]
  target: types.Array  # [..., N]
  slow_value: types.Array  # [..., N]
  weight: types.Array  # [..., N]


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
    # Nothing of it is differentiated: credit flows through log-densities.
    observed = lax.stop_gradient(observed)
    imagined = imagine(frozen, slow_critic, observed, rows, imagine_key)
    behaviour_loss, return_range, more = score(params, return_range, imagined)
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
  """Makes `(frozen params, slow critic, observed, rows, key) -> _Imagined`.

  All that is asked of a row is worked out in its turn, while it is at hand.
  """
  world = networks.world

  def imagine(frozen, slow_critic, observed, rows, key):
    params = frozen['world_model']

    def act(features, key):
      policy = networks.actor(frozen['actor'], features)
      action = distributions.sample(policy, key)
      row = _Imagined(
        features=features,
        action=action,
        reward=world['reward'](params, features).mean(),
        continues=world['continues'](params, features).mean(),
        value=networks.critic(frozen['critic'], features).mean(),
        slow_value=networks.critic(slow_critic, features).mean(),
      )
      return heads.encode_action(action_spec, action), row

    start = observed.features
    start = start.reshape(-1, start.shape[-1])
    # One step more than is used, so that the last row has its turn, too.
    _, imagined = world['imagine'](
      params, observed.states, start, act, config.horizon + 1, key
    )
    # What a row that opens an episode says of its transition is nobody's.
    goes_on = jnp.where(rows.is_first, 1, rows.discount).reshape(1, -1)
    continues = imagined.continues
    goes_on = goes_on.astype(continues.dtype)
    return imagined.replace(continues=jnp.concatenate([goes_on, continues[1:]]))

  return imagine


def _make_score(networks, config):
  """Makes the loss of actor and critic on what was imagined."""

  def step_loss(params, lesson):
    """The loss of the rows of one step, and metrics."""
    policy = networks.actor(params['actor'], lesson.features)
    actor_loss, metrics = losses.actor_loss(
      distributions.log_prob(policy, lesson.action),
      distributions.entropy(policy),
      lesson.advantage,
      lesson.weight,
      entropy_cost=config.entropy_cost,
    )
    critic_loss, more = losses.critic_loss(
      networks.critic(params['critic'], lesson.features),
      lesson.target,
      lesson.slow_value,
      lesson.weight,
      slow_cost=config.slow_cost,
    )
    return actor_loss + critic_loss, metrics | more

  def score(params, return_range, imagined):
    continues, value = imagined.continues, imagined.value
    target = losses.imagined_returns(
      imagined.reward,
      continues,
      value,
      gamma=config.discount,
      lambda_=config.lambda_,
    )
    return_range = losses.update_range(
      return_range, target, rate=config.return_rate
    )
    scale = losses.return_scale(return_range)
    weight = losses.imagined_weights(continues, gamma=config.discount)
    features, action, slow_value = jax.tree.map(
      lambda x: x[:-1],
      (imagined.features, imagined.action, imagined.slow_value),
    )
    lessons = _Lesson(
      features=features,
      action=action,
      advantage=(target - value[:-1]) / scale,
      target=target,
      slow_value=slow_value,
      weight=weight,
    )
    params = {name: params[name] for name in ('actor', 'critic')}
    loss, metrics = _mean_of_steps(step_loss, params, lessons)
    weights = jnp.sum(weight, axis=1)
    metrics = {
      # As over all rows at once: a loss is a mean, all else goes by weight.
      name: jnp.mean(x) if 'loss' in name else losses.weighted_mean(x, weights)
      for name, x in metrics.items()
    }
    metrics |= {
      'imagined_reward': jnp.mean(imagined.reward[1:]),
      'imagined_continues': jnp.mean(continues[1:]),
      'return_scale': scale,
    }
    return loss, return_range, metrics

  return score


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean_of_steps(fn: Callable[..., Any], params: Any, xs: Any) -> Any:
  """The mean of a loss over steps, with metrics of each step.

  Its gradient is taken step by step along with it, while the activations of a
  step are at hand: they are neither kept nor worked out twice.

  Args:
    fn: `(params, x) -> (loss, metrics)`.
    params: What the loss is differentiated for.
    xs: Steps along the leading axis, without gradient.
  """
  loss, metrics = lax.map(lambda x: fn(params, x), xs)
  return jnp.mean(loss), metrics


def _mean_of_steps_fwd(fn, params, xs):
  def step(total, x):
    (loss, metrics), grads = jax.value_and_grad(fn, has_aux=True)(params, x)
    total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
    return total, (loss, metrics)

  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
    params,
  )
  total, (loss, metrics) = lax.scan(step, zeros, xs)
  count = loss.shape[0]
  grads = jax.tree.map(lambda g, x: (g / count).astype(x.dtype), total, params)
  return (jnp.mean(loss), metrics), grads


def _mean_of_steps_bwd(fn, grads, cotangents):
  del fn
  scale, _ = cotangents
  return jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads), None


_mean_of_steps.defvjp(_mean_of_steps_fwd, _mean_of_steps_bwd)
