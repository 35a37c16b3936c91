"""Networks of ours as Flax NNX modules, and as modules of nnx-ppo.

Who initialises what: `network.init` draws the parameters when the module is
made, with its own initializers; no host draws them anew.
"""

from collections.abc import Mapping
import importlib
from typing import Any

import chex
import jax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import packages, trees, types

nnx = packages.load('flax.nnx', extra='flax')

try:
  host: Any = importlib.import_module('nnx_ppo.networks.types')
except ModuleNotFoundError as error:
  if error.name != 'nnx_ppo':
    raise
  host = None

if host is not None:
  Module: Any = host.StatefulModule
  ModuleOutput: Any = host.StatefulModuleOutput
  PPOOutput: Any = host.PPONetworkOutput
else:
  Module = nnx.Module

  @chex.dataclass(frozen=True, mappable_dataclass=False)
  class ModuleOutput:
    """What a call gives; the fields are those that nnx-ppo has."""

    next_state: types.ArrayTree  # [B, ...]
    output: Any  # [B, ...]
    regularization_loss: types.Array  # [B]
    metrics: dict[str, Any]
    rollout_extras: Any = None

  @chex.dataclass(frozen=True, mappable_dataclass=False)
  class PPOOutput:
    """The output of a policy; the fields are those that nnx-ppo has."""

    actions: types.ArrayTree  # [B, ...]
    loglikelihoods: types.ArrayTree  # [B]
    value_estimates: types.ArrayTree  # [B]


class Statistic(nnx.Variable):
  """A leaf of a network's statistics, which `update_statistics` changes."""


class NNXNetwork(Module):
  """A network as an `nnx.Module`, and as a `StatefulModule` of nnx-ppo.

  Every leaf of the parameters is an `nnx.Param`, under its own name, in
  `weights`; every leaf of the statistics is a `Statistic`, in `moments`. The
  carry is the state that goes from call to call. `params` and `statistics` are
  what `network.apply` takes, so that what was trained here goes back.

  A network that gives a `PolicyValue` is a policy for `train_ppo` of nnx-ppo:
  it draws actions (in evaluation mode, after `module.eval()`, takes the mode)
  and gives them as the environment takes them, log-likelihoods and values.
  Another network gives its outputs as they are, `[B, ...]`: a layer among those
  of nnx-ppo, whose `PPOAdapter` and samplers make a policy of it.
  """

  def __init__(
    self,
    network: network_lib.Network,
    inputs: Any,
    *,
    rngs: Any,
    params: Any = None,
    statistics: Any = None,
    entropy_cost: float = 0.0,
  ):
    """Creates the module.

    Args:
      network: The network.
      inputs: One step's inputs, `[B, ...]`, for their shapes and dtypes: arrays
        or `jax.ShapeDtypeStruct`. `B` may be another one in calls.
      rngs: An `nnx.Rngs`. Its stream `params` seeds `network.init`; the default
        stream is what actions are drawn from, and what the network draws.
      params: Trained ones to begin with, as `network.init` has them.
      statistics: Trained ones, as `NetworkState.statistics` has them.
      entropy_cost: Of a policy; weight of its negative entropy, summed over
        heads, in the regularization loss.

    Raises:
      TypeError: If `network` is no `Network` or `rngs` no `nnx.Rngs`, or
        outputs are neither a `PolicyValue` nor arrays.
      ValueError: If outputs lack the batch's axis, given parameters are not
        those of the network, or an entropy is asked of what is no policy.
    """
    _check_arguments(network, rngs)
    inputs = jax.tree.map(_zeros_like, inputs)
    fresh, state = network.init(rngs.params(), inputs)
    self.network = network
    self.entropy_cost = entropy_cost
    self.deterministic = False
    self.weights, self._params_def = _as_variables(
      nnx.Param, 'params', params, fresh
    )
    self.moments, self._statistics_def = _as_variables(
      Statistic, 'statistics', statistics, state.statistics
    )
    args = fresh, state, inputs
    outputs = _outputs(network, *args, jax.random.key(0))
    self.is_policy = isinstance(outputs, types.PolicyValue)
    _check_outputs(outputs, jax.tree.leaves(inputs)[0].shape[0], entropy_cost)
    self._draws = _draws(network, *args)
    self._seeds = any(map(_is_key, jax.tree.leaves(state.carry)))
    self.rngs = rngs if self._draws or self._seeds or self.is_policy else None

  @property
  def params(self) -> Any:
    """The parameters, as `network.apply` takes them."""
    return self._params_def.unflatten(_values(self.weights))

  @property
  def statistics(self) -> Any:
    """The statistics, as `NetworkState` holds them."""
    return self._statistics_def.unflatten(_values(self.moments))

  def initialize_state(self, batch_size: int) -> dict[str, Any]:
    """The state before the first row of `batch_size` elements.

    Returns:
      A tree of arrays `[B, ...]`: the carry, and which elements begin an
      episode with the next row.
    """
    key = self.rngs() if self._seeds else None
    carry = self.network.initial_carry(batch_size, key)
    return {'carry': carry, 'is_first': jnp.ones(batch_size, bool)}

  def reset_state(self, prev_state: dict[str, Any]) -> dict[str, Any]:
    """The state from which the next row begins an episode.

    The network itself resets its carry before that row, as it does for ours;
    noise that is kept in it goes on.

    Args:
      prev_state: Of all elements, or of a single one (without `B`).
    """
    _check_state(prev_state)
    is_first = jnp.ones_like(prev_state['is_first'])
    return {**prev_state, 'is_first': is_first}

  def __call__(
    self, module_state: dict[str, Any], obs: Any, rollout_extras: Any = None
  ) -> Any:
    """Advances by one row.

    Args:
      module_state: What `initialize_state`, `reset_state` or the last call
        gave.
      obs: The inputs of the network, `[B, ...]`.
      rollout_extras: What a call gave as such, to meet the same actions again;
        None draws.

    Returns:
      A `StatefulModuleOutput` of nnx-ppo, or, where that is not installed, a
      `ModuleOutput` with the same fields: `output` is that of the network, or
      of a policy `actions`, `loglikelihoods` and `value_estimates`;
      `next_state` is the state after the row.
    """
    _check_state(module_state)
    state = types.NetworkState(
      carry=module_state['carry'], statistics=self.statistics
    )
    is_first = module_state['is_first']
    key = self.rngs() if self._draws else None
    output, new = self.network.apply(self.params, state, key, obs, is_first)
    extras, metrics, loss = {}, {}, jnp.zeros(is_first.shape)
    if self._statistics_def.num_leaves:
      # All that `update_statistics` needs to see the row again.
      extras['row'] = {**module_state, 'inputs': obs}
    if self.is_policy:
      output, extras['action'], metrics['entropy'] = self._act(
        output, None if rollout_extras is None else rollout_extras['action']
      )
      loss -= self.entropy_cost * trees.total(metrics['entropy'])
    return ModuleOutput(
      next_state={
        'carry': new.carry,
        'is_first': jnp.zeros_like(is_first),
      },
      output=output,
      regularization_loss=loss,
      metrics=metrics,
      rollout_extras=extras or None,
    )

  def update_statistics(self, rollout_extras: Any) -> None:
    """Takes the rows of a rollout into the statistics, once per update.

    Without statistics, nothing happens. They are computed with the parameters
    as they now are.

    Args:
      rollout_extras: What the calls of a rollout gave as such, `[T, B, ...]`.
    """
    if not self._statistics_def.num_leaves:
      return
    row = rollout_extras['row']
    state = types.NetworkState(
      carry=jax.tree.map(lambda x: x[0], row['carry']),
      statistics=self.statistics,
    )
    is_first = row['is_first']
    new = self.network.update_statistics(
      self.params, state, row['inputs'], is_first, jnp.ones_like(is_first)
    )
    leaves = jax.tree.leaves(new.statistics)
    for variable, leaf in zip(self.moments.values(), leaves, strict=True):
      variable.set_value(leaf)

  def _act(self, outputs: types.PolicyValue, action: Any) -> tuple[Any, ...]:
    """The output for nnx-ppo, the action of the policy and its entropy."""
    # Distrax takes seconds to import, and a layer does not need it.
    from hkgraph.modules import distributions

    policy = outputs.policy
    if action is None and self.deterministic:
      action = distributions.mode(policy)
    elif action is None:
      action = distributions.sample(policy, self.rngs())
    action = jax.lax.stop_gradient(action)
    output = PPOOutput(
      actions=distributions.to_environment(policy, action),
      loglikelihoods=distributions.log_prob(policy, action),
      value_estimates=outputs.value,
    )
    return output, action, distributions.entropy(policy)


def _as_variables(kind, argument, given, fresh):
  """Variables by name, and the structure that puts them together."""
  structure = jax.tree.structure(fresh)
  tree = fresh if given is None else given
  if given is not None and _shapes(given) != _shapes(fresh):
    raise ValueError(
      f'`{argument}` must be those of the network, of shapes '
      f'{_shapes(fresh)}, got {_shapes(given)}'
    )
  variables = {
    jax.tree_util.keystr(path, simple=True, separator='.'): kind(
      jnp.asarray(leaf)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  return nnx.Dict(variables), structure


def _values(variables) -> list[types.Array]:
  return [variable.get_value() for variable in variables.values()]


def _outputs(network, params, state, inputs, key):
  is_first = jnp.ones(jax.tree.leaves(inputs)[0].shape[:1], bool)
  return jax.eval_shape(network.apply, params, state, key, inputs, is_first)[0]


def _draws(network, params, state, inputs) -> bool:
  """Whether the network asks for a key."""
  try:
    _outputs(network, params, state, inputs, None)
  except ValueError:  # With a key it went well.
    return True
  return False


def _zeros_like(x) -> types.Array:
  return jnp.zeros(jnp.shape(x), jnp.result_type(x))


def _is_key(x) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shapes(tree) -> dict[str, tuple[int, ...]]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): jnp.shape(x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_arguments(network, rngs) -> None:
  if not isinstance(network, network_lib.Network):
    raise TypeError(
      '`network` must be a Network, as `hg.policy_network`, '
      f'`hg.graph_network` or `hg.transform` make it, got {network!r}'
    )
  if not isinstance(rngs, nnx.Rngs):
    raise TypeError(f'`rngs` must be an nnx.Rngs, as nnx.Rngs(0), got {rngs!r}')


def _check_outputs(outputs, batch_size: int, entropy_cost: float) -> None:
  is_policy = isinstance(outputs, types.PolicyValue)
  if entropy_cost and not is_policy:
    raise ValueError(
      f'`entropy_cost` is for a network that gives a PolicyValue, got '
      f'{entropy_cost} for one that gives a {type(outputs).__name__}; make a '
      'policy with `hg.policy_network`, or give the cost to the sampler'
    )
  arrays = outputs.value if is_policy else outputs
  leaves = jax.tree.leaves(arrays)
  if not leaves or not all(
    isinstance(x, jax.ShapeDtypeStruct) and x.ndim for x in leaves
  ):
    raise TypeError(
      'nnx-ppo takes a network that gives a `PolicyValue`, an array [B, ...] '
      f'or a tree of them, got {outputs!r}'
    )
  wrong = {k: s for k, s in _shapes(arrays).items() if s[0] != batch_size}
  if is_policy:
    wrong = {k: s for k, s in _shapes(arrays).items() if s != (batch_size,)}
    _check_policy(outputs.policy)
  if wrong:
    what = 'values [B]' if is_policy else 'outputs [B, ...]'
    raise ValueError(
      f'nnx-ppo takes {what}, got the shapes {wrong} for B = {batch_size}'
    )


def _check_policy(policy) -> None:
  import distrax

  heads = policy.values() if isinstance(policy, Mapping) else [policy]
  for head in heads:
    if not isinstance(head, distrax.Distribution):
      raise TypeError(
        '`policy` must be a distrax distribution or a dict of them, got '
        f'{type(head).__name__}; make it with a policy head'
      )


def _check_state(state) -> None:
  if not isinstance(state, Mapping) or set(state) != {'carry', 'is_first'}:
    raise TypeError(
      'the state must be what `initialize_state(batch_size)` or the last call '
      f'gave, got a {type(state).__name__}'
    )
