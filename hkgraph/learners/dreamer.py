"""DreamerV3 (Hafner et al., 2023): learns in a world that it has learned."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import chex
import jax
from jax import flatten_util, lax
import jax.numpy as jnp
import optax

from hkgraph import types
from hkgraph.data import replay as replay_lib
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import (
  checks,
  dreamer_config,
  dreamer_loss,
  dreamer_networks,
  guard,
)
from hkgraph.learners import optimizer as optimizer_lib
from hkgraph.losses import dreamer as losses
from hkgraph.modules import encoding, heads

DreamerConfig = dreamer_config.DreamerConfig


@chex.dataclass(frozen=True, mappable_dataclass=False)
class DreamerState(agent_lib.LearnerState):
  """All that DreamerV3 changes.

  Attributes:
    params: A dict: `world_model`, `actor` and `critic`.
    statistics: Empty.
    opt_state: A dict with the keys of `params`.
    key: Typed key that the next update splits.
    num_updates: Number of updates that were applied, int32.
    slow_critic: A moving average of the critic's parameters.
    return_range: Of the imagined returns.
    replay: The rows that were met.
  """

  slow_critic: types.ArrayTree
  return_range: losses.ReturnRange
  replay: replay_lib.Replay


@dataclasses.dataclass(frozen=True)
class DreamerAgent(agent_lib.Agent):
  """An agent that also tells what it expects.

  Attributes:
    foresee: `(params, timestep, action, key, num_context) -> Foreseen`: follows
      the first rows of an episode `[T, B, ...]`, then only the actions.
    loss: `(params, slow_critic, return_range, rows, key) -> (loss, (range,
      metrics))`, what `update` takes gradients of; rows `[T, B, ...]`.
  """

  foresee: Callable[..., Any]
  loss: Callable[..., Any]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Foreseen:
  """What an agent expects of rows, beside what they were.

  Attributes:
    observation: As the decoder has it, by name: images `[H, W, C]`, all else
      vectors.
    target: The observations in the same form.
    reward: Expected reward of the transition into each row.
    discount: Probability that the transition into each row does not terminate.
  """

  observation: types.ArrayTree  # [T, B, ...]
  target: types.ArrayTree  # [T, B, ...]
  reward: types.Array  # [T, B]
  discount: types.Array  # [T, B]


def make_dreamer(
  observation_spec: Any,
  action_spec: Any,
  config: DreamerConfig,
  *,
  core: dreamer_networks.Core | None = None,
) -> DreamerAgent:
  """Makes an agent that plans by a world model of its own.

  DreamerV3 (Hafner et al., "Mastering Diverse Domains through World Models",
  arXiv 2301.04104). `update` adds the rows of a trajectory to a replay on the
  device; then it makes `config.train_ratio` gradient steps, each on a batch of
  replayed sequences, from which world model, actor and critic all learn: the
  world model of the rows, actor and critic of `config.horizon` steps imagined
  from the state after every row. No step is made until as many rows are stored
  as a sequence has.

  Sequences may run through several episodes. Where a row is first, the state
  and the previous action are zero; where a sequence begins within an episode,
  they are zero too, and its first `config.burn_in` rows only warm the state:
  they are followed without gradient and count in no loss.

  The carry holds the state of the world model and the previous action, in the
  dtype of `config`. There are no statistics: observations and rewards are
  squashed by symlog.

  Metrics are means over the gradient steps: of `losses.dreamer`, and
  `grad_norm/KEY` of each part; and those of `guard.keep_finite`.

  Args:
    observation_spec: A `dm_env` spec, or a dict of them; see `WorldModel`.
    action_spec: A `dm_env` spec, discrete or bounded, or a dict of them.
    config: The hyperparameters.
    core: The deterministic part of the state. None makes the gated recurrence
      of the paper; a graph is told latents and action through a learned layer
      for each of its inputs, and its outputs are the features; a function
      without arguments makes any `hk.RNNCore`, whose initial state is constant.

  Returns:
    An `Agent`; its `init` raises `ValueError` unless the reward is a number.

  Raises:
    TypeError: If an argument is of another type.
    ValueError: If there is no policy for the actions, the decoder cannot make
      an image of the size that is observed, or a schedule has no end.
  """
  checks.check_config(config, DreamerConfig)
  checks.check_schedule(config)
  networks = dreamer_networks.make_networks(
    observation_spec, action_spec, config, core
  )
  optimizers = _make_optimizers(config)
  dtype = jnp.dtype(config.dtype)
  loss_fn = dreamer_loss.make_loss(networks, action_spec, config)
  fit = _make_fit(loss_fn, optimizers, config)

  def init(key, timestep):
    check_reward(timestep.reward, timestep.step_type.shape)
    params_key, learner_key = jax.random.split(key)
    params = networks.init(params_key, timestep.observation)
    return DreamerState(
      params=params,
      statistics={},
      opt_state={k: optimizers[k].init(params[k]) for k in params},
      key=learner_key,
      num_updates=jnp.zeros((), jnp.int32),
      # Copied, so that no two leaves share a buffer that is given away.
      slow_critic=jax.tree.map(jnp.copy, params['critic']),
      return_range=losses.init_range(),
      replay=replay_lib.empty(
        _empty_row(timestep, action_spec), config.capacity
      ),
    )

  def initial_carry(batch_size, key=None):
    del key  # Noise is drawn from the keys that `act` is given.
    return {
      'state': networks.world['initial']({}, batch_size, dtype),
      'action': jnp.zeros((batch_size, heads.encoded_size(action_spec)), dtype),
    }

  def update(learner_state, trajectory):
    checks.check_trajectory(trajectory, config)
    rows = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
    # What is not finite must not be met again in every batch to come.
    rows = _finite(_row(rows, trajectory.action))
    replay = replay_lib.add(learner_state.replay, rows)
    key, fit_key = jax.random.split(learner_state.key)
    # The replay stays outside of what is selected: it is never copied.
    before = learner_state.replace(replay=(), key=key)
    after, metrics = fit(before, replay, fit_key)
    after, faults = guard.keep_finite(before, after, trajectory)
    return after.replace(replay=replay), metrics | faults

  def foresee(params, timestep, action, key, num_context):
    return _foresee(
      networks, action_spec, dtype, params, timestep, action, key, num_context
    )

  return DreamerAgent(
    init=init,
    initial_carry=initial_carry,
    act=_make_act(networks, action_spec, dtype),
    update=update,
    foresee=foresee,
    loss=loss_fn,
  )


def _make_optimizers(
  config: DreamerConfig,
) -> dict[str, optax.GradientTransformation]:
  """One for each part; they step `train_ratio` times per update."""
  rates = {
    'world_model': config.learning_rate,
    'actor': config.actor_learning_rate,
    'critic': config.critic_learning_rate,
  }
  return {
    name: optimizer_lib.make_optimizer(
      rate,
      schedule=config.schedule,
      total_steps=config.train_ratio * (config.total_updates or 1),
      max_grad_norm=config.max_grad_norm,
      eps=1e-8,
    )
    for name, rate in rates.items()
  }


def check_reward(reward: Any, batch: tuple[int, ...] = ()) -> None:
  """Raises `ValueError` unless it is, or is the spec of, one number a row."""
  if isinstance(reward, Mapping):
    raise ValueError(
      'DreamerV3 learns from one reward, got a dict with the keys '
      f'{sorted(reward)}; let the environment add them up, or train with PPO'
    )
  shape = getattr(reward, 'shape', None)
  if shape != batch:
    raise ValueError(
      'DreamerV3 learns from one reward, a number of shape '
      f'{batch}, got {shape}; let the environment add them up'
    )


def _empty_row(timestep: types.TimeStep, action_spec: Any) -> dreamer_loss.Row:
  shape = timestep.step_type.shape

  def action(spec):
    is_float = jnp.issubdtype(spec.dtype, jnp.floating)
    dtype = jnp.float32 if is_float else jnp.int32
    return jnp.zeros((*shape, *spec.shape), dtype)

  return _row(timestep, jax.tree.map(action, action_spec))


def _row(timestep: types.TimeStep, action: types.ArrayTree) -> dreamer_loss.Row:
  return dreamer_loss.Row(
    observation=timestep.observation,
    action=action,
    reward=timestep.reward,
    discount=timestep.discount,
    is_first=timestep.first(),
  )


def _finite(rows: dreamer_loss.Row) -> dreamer_loss.Row:
  """Rows with 0 for what is not finite."""

  def clean(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(jnp.isfinite(x), x, 0)

  return jax.tree.map(clean, rows)


def _make_act(networks, action_spec, dtype):
  def act(
    params, state, key, timestep, *, deterministic=False, num_updates=None
  ):
    del num_updates  # Exploration is the actor's entropy.
    latent_key, action_key = jax.random.split(key)
    params = encoding.cast_floats(params, dtype)
    observed = networks.world['observe'](
      params['world_model'],
      state.carry['state'],
      jax.tree.map(lambda x: x[None], timestep.observation),
      state.carry['action'][None],
      timestep.first()[None],
      latent_key,
    )
    features = observed.features[0]
    decision = types.PolicyValue(
      policy=networks.actor(params['actor'], features),
      value=networks.critic(params['critic'], features).mean(),
    )
    output = agent_lib.decide(decision, action_key, deterministic)
    action = heads.encode_action(action_spec, output.action).astype(dtype)
    carry = {'state': observed.state, 'action': action}
    return output, state.replace(carry=carry)

  return act


def _make_fit(loss_fn, optimizers, config):
  """Makes `(state, replay, key) -> (state, metrics)`: all gradient steps."""

  def step(state, replay, key):
    sample_key, loss_key = jax.random.split(key)
    rows = replay_lib.sample(
      replay, sample_key, config.batch_size, config.replayed_rows
    )
    grads, (return_range, metrics) = jax.grad(loss_fn, has_aux=True)(
      state.params, state.slow_critic, state.return_range, rows, loss_key
    )
    params, opt_state = {}, {}
    for name, optimizer in optimizers.items():
      updates, opt_state[name] = optimizer.update(
        grads[name], state.opt_state[name], state.params[name]
      )
      params[name] = optax.apply_updates(state.params[name], updates)
      flat_grads, _ = flatten_util.ravel_pytree(grads[name])
      metrics[f'grad_norm/{name}'] = optax.tree.norm(flat_grads)
    slow_critic = optax.incremental_update(
      params['critic'], state.slow_critic, config.slow_rate
    )
    state = state.replace(
      params=params,
      opt_state=opt_state,
      slow_critic=slow_critic,
      return_range=return_range,
    )
    return state, metrics

  def fit(state, replay, key):
    keys = jax.random.split(key, config.train_ratio)
    kinds = {}

    def run(state):
      state, metrics = lax.scan(lambda s, k: step(s, replay, k), state, keys)
      metrics = jax.tree.map(jnp.mean, metrics)
      kinds.update({name: (x.shape, x.dtype) for name, x in metrics.items()})
      return state, metrics

    def wait(state):
      # Nothing was measured. `run` is traced before: not again for its names.
      return state, {name: jnp.zeros(*kind) for name, kind in kinds.items()}

    enough = replay_lib.can_sample(replay, config.replayed_rows)
    state, metrics = lax.cond(enough, run, wait, state)
    metrics['gradient_steps'] = enough * jnp.float32(config.train_ratio)
    return state.replace(num_updates=state.num_updates + 1), metrics

  return fit


def _foresee(
  networks, action_spec, dtype, params, timestep, action, key, num_context
):
  num_rows, batch_size = timestep.step_type.shape
  if not 1 <= num_context <= num_rows:
    raise ValueError(
      f'`num_context` must be between 1 and the {num_rows} rows, got '
      f'{num_context}'
    )
  world, params = networks.world, encoding.cast_floats(params, dtype)
  params = params['world_model']
  action_tm1 = dreamer_loss.encode_previous(action_spec, action, dtype)
  observe_key, imagine_key = jax.random.split(key)
  context = jax.tree.map(
    lambda x: x[:num_context],
    (timestep.observation, action_tm1, timestep.first()),
  )
  state = world['initial']({}, batch_size, dtype)
  observed = world['observe'](params, state, *context, observe_key)
  features = observed.features
  horizon = num_rows - num_context
  if horizon:
    features = jnp.concatenate(
      [
        features,
        world['follow'](
          params,
          observed.state,
          features[-1],
          action_tm1[num_context:],
          imagine_key,
        ),
      ]
    )
  return Foreseen(
    observation=world['decode'](params, features).mean(),
    target=world['prepare'](params, timestep.observation),
    reward=world['reward'](params, features).mean(),
    discount=world['continues'](params, features).mean(),
  )
