"""Flax modules as Haiku modules, and networks as Linen modules.

In both directions the library that a module comes from initialises it: Flax
layers are Flax's lecun-normal, also inside of ours, and a network handed to
Linen begins as `network.init` has it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import packages, types
from hkgraph.interop import flax_hosts, foreign, hosting

linen = packages.load('flax.linen', extra='flax')
nnx = packages.load('flax.nnx', extra='flax')


def from_nnx(
  factory: Callable[..., Any],
  *,
  call: Callable[..., Any] | None = None,
  initial_carry: Callable[[Any, Any], Any] | None = None,
  carry_variables: Any = None,
  name: str | None = None,
) -> foreign.ForeignModule:
  """Makes a Haiku module of an NNX module, in a function for `hg.transform`.

  * Every leaf of an `nnx.Param` is a Haiku parameter with its path as name, for
    instance `layers.0.kernel`; the factory draws its initial value.
  * `nnx.BatchStat`, other variables and bare arrays are statistics. BatchNorm
    uses running averages in `apply` and `unroll`, whatever its flag says; they
    learn from the masked rows of `update_statistics`, all of these at once.
  * A module with `initialize_carry`, as every `nnx.RNNCellBase`, is recurrent:
    it is called as `module(carry, x) -> (carry, y)`, and its carry is reset
    where an episode begins.
  * Streams of random numbers that matter for the output (dropout) become one
    key for each element of the batch, in the carry. Such a module runs on each
    element alone, `[1, ...]`, so that a replay of any part of the batch meets
    the same noise. Call `module.eval()` in the factory for no dropout.
  * Rows must not mix but in BatchNorm.

  Args:
    factory: `(rngs) -> module`, or `(in_features, rngs) -> module` where it
      has an argument of that name: it is given the input's last axis.
    call: `(module, x) -> y` in place of `module(x)`; `(module, carry, x) ->
      (carry, y)` for a recurrent one.
    initial_carry: `(module, x) -> carry`, each leaf `[B, ...]`, for an `x` of
      shape `[B, ...]`; makes the module recurrent.
    carry_variables: An NNX filter of variables that the module itself writes to
      remember one element of the batch: it then runs on each alone, and they
      are reset to what the factory gives. None is `nnx.Cache`.
    name: Name of the module.

  Returns:
    A module that maps `[B, ...]` or, in a sequence, `[T, B, ...]`.

  Raises:
    TypeError: If `factory` cannot be called; in a call, if it makes no module.
    ValueError: In a call, if the output size cannot be inferred, or batch
      statistics meet variables that belong to one element.
  """
  _check_callable('factory', factory, 'a function of `nnx.Rngs`')
  filter_ = nnx.Cache if carry_variables is None else carry_variables
  host = flax_hosts.NNXHost(factory, call, initial_carry, filter_)
  return foreign.ForeignModule(host, name or 'nnx_module')


def from_linen(
  module: Any,
  *,
  call: Callable[..., Any] | None = None,
  initial_carry: Callable[[Any, Any], Any] | None = None,
  carry_collections: Sequence[str] = ('cache',),
  name: str | None = None,
) -> foreign.ForeignModule:
  """Makes a Haiku module of a Linen module, in a function for `hg.transform`.

  As `from_nnx`: the collection `'params'` is Haiku parameters, initialised by
  Linen; `carry_collections` belong to one element of the batch and are reset;
  every other collection is statistics. For dropout, give `train=True` or
  `deterministic=False` by `call`: BatchNorm runs on its averages all the same.

  Args:
    module: A module, not bound.
    call: `(module, x) -> y` in place of `module(x)`, for instance `lambda m, x:
      m(x, train=True)`; `(module, carry, x) -> (carry, y)` for a recurrent one.
    initial_carry: `(module, x) -> carry`, each leaf `[B, ...]`; makes the
      module recurrent, as `initialize_carry` does.
    carry_collections: What the module writes to remember one element.
    name: Name of the module.

  Returns:
    A module that maps `[B, ...]` or, in a sequence, `[T, B, ...]`.

  Raises:
    TypeError: If `module` is no Linen module.
    ValueError: As `from_nnx`.
  """
  if not isinstance(module, linen.Module):
    raise TypeError(
      f'`module` must be a flax.linen.Module, got {module!r}; an NNX module is '
      'given by a factory, to `from_nnx`'
    )
  host = flax_hosts.LinenHost(
    module, call, initial_carry, tuple(carry_collections)
  )
  return foreign.ForeignModule(host, name or 'linen_module')


def to_linen(network: network_lib.Network, *, name: str | None = None) -> Any:
  """Makes a Linen module of a network; `network.init` initialises it.

  `module(inputs, is_first=None)` is one row `[B, ...]`, and
  `module.unroll(inputs, is_first)` a sequence `[T, B, ...]`: give
  `mutable=['carry']` and take over what comes back. The collections are
  `'params'` (an entry for each Haiku module), `'carry'`, and `'statistics'`,
  which `module.update_statistics(inputs, is_first, mask)` alone changes, under
  `mutable=['statistics']`. A stream `'noise'` is what `hk.next_rng_key` reads.

  Args:
    network: Any network, with state or without.
    name: Name of the module, inside of another.

  Returns:
    A `flax.linen.Module`. Its calls raise `ValueError` if the network has a
    carry and the collection is not mutable, so that nothing is forgotten, or
    if it draws random numbers and there is no stream `'noise'`.

  Raises:
    TypeError: If `network` is no `Network`.
  """
  if not isinstance(network, network_lib.Network):
    raise TypeError(
      '`network` must be a Network, such as `hg.transform` or '
      f'`hg.graph_network` gives, got {network!r}'
    )
  return LinenNetwork(network=network, name=name)


class LinenNetwork(linen.Module):
  """A network as a Linen module; see `to_linen`."""

  network: network_lib.Network

  @linen.compact
  def __call__(self, inputs: Any, is_first: types.Array | None = None) -> Any:
    """One row: inputs `[B, ...]`, is_first `[B]`; None goes on everywhere."""
    if is_first is None:
      shapes = [jnp.shape(x)[:1] for x in jax.tree.leaves(inputs)]
      is_first = jnp.zeros(shapes[0] if shapes else (), bool)
    if not self.is_initializing():
      return self._forward(self.network.apply, inputs, is_first)
    params, state = self.network.init(self.make_rng('params'), inputs)
    for name, leaves in params.items():
      self.param(name, lambda _, leaves=leaves: leaves)
    self._put('statistics', state.statistics)
    self._put('carry', state.carry)
    key = self.make_rng('params')
    return self.network.apply(params, state, key, inputs, is_first)[0]

  def unroll(self, inputs: Any, is_first: types.Array) -> Any:
    """A sequence: inputs `[T, B, ...]`, is_first `[T, B]`."""
    return self._forward(self.network.unroll, inputs, is_first)

  def update_statistics(
    self, inputs: Any, is_first: types.Array, mask: types.Array
  ) -> None:
    """Takes the rows of a sequence under the mask into the statistics."""
    params, state = self._variables(is_first.shape[-1])
    state = self.network.update_statistics(
      params, state, inputs, is_first, mask
    )
    self._put('statistics', state.statistics)

  def _forward(self, run, inputs, is_first):
    params, state = self._variables(is_first.shape[-1])
    key = self.make_rng('noise') if self.has_rng('noise') else None
    with hosting.telling_of_noise("give `rngs={'noise': key}` to `apply`"):
      outputs, state = run(params, state, key, inputs, is_first)
    if jax.tree.leaves(state.carry):
      self._put('carry', state.carry)
    return outputs

  def _variables(self, batch_size):
    params, statistics, carry = (
      {name: dict(leaves) for name, leaves in self.variables.get(c, {}).items()}
      for c in ('params', 'statistics', 'carry')
    )
    if not carry:
      carry = self.network.initial_carry(batch_size)
    return params, types.NetworkState(carry=carry, statistics=statistics)

  def _put(self, collection, tree):
    if not self.is_mutable_collection(collection):
      raise ValueError(
        f'the network has {collection}, which this call changes: give '
        f"`mutable=['{collection}']` to `apply`, and the collection that comes "
        'back to the next call'
      )
    for name, value in tree.items():
      self.put_variable(collection, name, value)


def _check_callable(argument, value, wanted) -> None:
  if not callable(value) or isinstance(value, nnx.Module):
    raise TypeError(f'`{argument}` must be {wanted}, got {value!r}')
