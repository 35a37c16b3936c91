"""What the learners from fresh rollouts share: how an update goes.

A rollout is dealt to minibatches anew in each epoch: whole environments from
the stored carry on where the network has carry, single rows where it has none.
The statistics stand still until the end; then they take in all rows `0..T-1`
once, as the parameters that acted saw them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
import jax
from jax import flatten_util, lax
import jax.numpy as jnp
import numpy as np
import optax

from hkgraph import network as network_lib
from hkgraph import trees, types
from hkgraph.data import minibatches
from hkgraph.learners import agent as agent_lib
from hkgraph.learners import checks, guard
from hkgraph.learners import config as config_lib

Config = config_lib.PPOConfig | config_lib.PQNConfig
Loss = Callable[..., tuple[types.Array, types.Metrics]]


@dataclasses.dataclass(frozen=True)
class Method:
  """What sets a learner apart from the others.

  Attributes:
    check: `(outputs, timestep, carry)` raises unless the network's outputs for
      a row `[B, ...]`, the row and the network's carry are what is asked for.
    decide: `(outputs, num_updates, deterministic) -> PolicyValue`, whose policy
      is sampled, or of which the mode is taken.
    batch: `trajectory -> batch`, all that the loss reads, `[T, B, ...]`.
    loss: `(outputs, batch) -> (loss, metrics)`.
    replayed: How names of metrics begin that tell whether the replay is exact:
      they are reported of the first minibatch, others as means over all.
    stop: `metrics -> bool`, whether neither this minibatch nor a later one of
      the update is stepped on; None never stops.
  """

  check: Callable[..., None]
  decide: Callable[..., types.PolicyValue]
  batch: Callable[[types.Trajectory], Any]
  loss: Loss
  replayed: str
  stop: Callable[[types.Metrics], types.Array] | None = None


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
  batch: Any  # [T, b, ...] or [N, ...]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Fit:
  """What changes from minibatch to minibatch."""

  params: types.ArrayTree
  opt_state: optax.OptState
  stopped: types.Array  # []


def make_agent(
  network: network_lib.Network,
  config: Config,
  optimizer: optax.GradientTransformation,
  method: Method,
) -> agent_lib.Agent:
  """Makes an agent of a network and a method.

  Args:
    network: The network.
    config: Sizes of rollout, minibatches and epochs.
    optimizer: Steps once per minibatch.
    method: What the outputs mean, and what is learned from them.

  Returns:
    An `Agent`.
  """

  def init(key, timestep):
    params_key, learner_key = jax.random.split(key)
    params, state = network.init(params_key, timestep.observation)
    outputs, _ = jax.eval_shape(
      network.apply,
      *(params, state, learner_key),
      *(timestep.observation, timestep.first()),
    )
    method.check(outputs, timestep, state.carry)
    return agent_lib.LearnerState(
      params=params,
      statistics=state.statistics,
      opt_state=optimizer.init(params),
      key=learner_key,
      num_updates=jnp.zeros((), jnp.int32),
    )

  def act(
    params, state, key, timestep, *, deterministic=False, num_updates=None
  ):
    network_key, action_key = jax.random.split(key)
    outputs, state = network.apply(
      params, state, network_key, timestep.observation, timestep.first()
    )
    decision = method.decide(outputs, num_updates, deterministic)
    return agent_lib.decide(decision, action_key, deterministic), state

  def update(learner_state, trajectory):
    checks.check_trajectory(trajectory, config)
    rows = _rows(trajectory, method)
    num_keys = config.num_epochs * (1 + config.num_minibatches)
    keys = jax.random.split(learner_state.key, 1 + num_keys)
    acted = types.NetworkState(
      carry=trajectory.carry, statistics=learner_state.statistics
    )
    fit = _Fit(
      params=learner_state.params,
      opt_state=learner_state.opt_state,
      stopped=jnp.zeros((), bool),
    )
    # Packed, so that dealing them out is few operations.
    packed, unpack = trees.pack(
      rows if jax.tree.leaves(acted.carry) else minibatches.flatten_rows(rows)
    )
    step = _make_step(network, optimizer, method, acted.statistics, unpack)
    fit, metrics = _run_epochs(
      step, config, fit, (packed, acted.carry), keys[1:], method.replayed
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
      key=keys[0],
      num_updates=learner_state.num_updates + 1,
    )
    new_state, faults = guard.keep_finite(learner_state, new_state, trajectory)
    return new_state, metrics | faults

  return agent_lib.Agent(
    init=init, initial_carry=network.initial_carry, act=act, update=update
  )


def total_steps(config: Config) -> int:
  """Computes the optimizer's steps in the whole training."""
  steps_per_update = config.num_epochs * config.num_minibatches
  return steps_per_update * (config.total_updates or 1)


def _rows(trajectory: types.Trajectory, method: Method) -> _Rows:
  """The rows `0..T-1`."""
  rows = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
  return _Rows(
    observation=rows.observation,
    is_first=rows.first(),
    batch=method.batch(trajectory),
  )


def _make_step(
  network: network_lib.Network,
  optimizer: optax.GradientTransformation,
  method: Method,
  statistics: types.ArrayTree,
  unpack: Callable[[list[types.Array]], _Rows],
) -> Callable[..., tuple[_Fit, types.Metrics]]:
  """Makes the step on a minibatch, `(packed rows, carry)`."""

  def loss_fn(params, minibatch, key):
    packed, carry = minibatch
    rows = unpack(packed)
    state = types.NetworkState(carry=carry, statistics=statistics)
    run = network.unroll if rows.is_first.ndim == 2 else network.apply
    outputs, _ = run(params, state, key, rows.observation, rows.is_first)
    return method.loss(outputs, rows.batch)

  def step(fit, minibatch_and_key):
    grads, metrics = jax.grad(loss_fn, has_aux=True)(
      fit.params, *minibatch_and_key
    )
    updates, opt_state = optimizer.update(grads, fit.opt_state, fit.params)
    params = optax.apply_updates(fit.params, updates)
    new_fit = fit.replace(params=params, opt_state=opt_state)
    if method.stop is not None:
      stopped = fit.stopped | method.stop(metrics)
      new_fit = guard.select(stopped, fit, new_fit).replace(stopped=stopped)
    # Of one vector, as the optimizer has it.
    flat_grads, _ = flatten_util.ravel_pytree(grads)
    metrics |= {
      'grad_norm': optax.tree.norm(flat_grads),
      'steps_applied': (~new_fit.stopped).astype(jnp.float32),
    }
    return new_fit, metrics

  return step


def _run_epochs(
  step: Callable[..., tuple[_Fit, types.Metrics]],
  config: Config,
  fit: _Fit,
  data: tuple[list[types.Array], types.ArrayTree],
  keys: chex.PRNGKey,
  replayed: str,
) -> tuple[_Fit, types.Metrics]:
  """Steps through all minibatches of all epochs.

  Metrics are means over them, or those of the first where the name begins with
  `replayed`.
  """
  names = []

  def vector_step(fit, minibatch_and_key):
    fit, metrics = step(fit, minibatch_and_key)
    names[:] = metrics
    # Side by side: one array to stack and reduce, instead of one for each.
    return fit, jnp.stack(list(metrics.values()))

  def epoch(fit, keys):
    parts = _split(keys[0], data, config.num_minibatches)
    return lax.scan(vector_step, fit, (parts, keys[1:]))

  shape = (config.num_epochs, 1 + config.num_minibatches)
  fit, metrics = lax.scan(epoch, fit, keys.reshape(shape))
  replayed = np.array([name.startswith(replayed) for name in names])
  metrics = jnp.where(replayed, metrics[0, 0], jnp.mean(metrics, axis=(0, 1)))
  return fit, dict(zip(names, trees.unstack(metrics), strict=True))


def _split(
  key: chex.PRNGKey,
  data: tuple[list[types.Array], types.ArrayTree],
  num_minibatches: int,
) -> tuple[list[types.Array], types.ArrayTree]:
  """Deals whole environments, or rows that stand alone, to minibatches."""
  _, carry = data
  # Of packed rows: one axis further back than of the rows themselves.
  axis = (2, 0) if jax.tree.leaves(carry) else (1, 0)
  return minibatches.permuted_minibatches(key, data, num_minibatches, axis=axis)
