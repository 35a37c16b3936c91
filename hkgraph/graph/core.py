"""Runs a `GraphSpec`: populations, connections, delays (design section 3)."""

from collections.abc import Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import parameters, schedule
from hkgraph.graph import spec as spec_lib
from hkgraph.modules import history, stateful


class Population(hk.Module):
  """Integrates what arrives, then applies the activation, once.

  Subclass it for another rule (override `integrate`), noise, or state.
  """

  def __init__(self, size: int, activation: Any = None, name: Any = None):
    super().__init__(name=name)
    self.size = size
    self.activation = activation

  def integrate(self, inputs: Sequence[types.Array]) -> types.Array:
    """The sum of the inputs, each `[..., size]`; there is at least one."""
    return sum(inputs[1:], inputs[0])

  def __call__(self, inputs: Sequence[types.Array]) -> types.Array:
    """Maps the list of inputs, each `[..., size]`, to the activation."""
    x = self.integrate(inputs)
    return x if self.activation is None else self.activation(x)


class Connection(hk.Module):
  """`x @ w + b`: what joins two populations unless told otherwise.

  Subclass it for a rule of your own and give the class, or a zero-argument
  factory of any Haiku module, as `transform`.
  """

  def __init__(self, output_size: int, name: Any = None):
    super().__init__(name=name)
    self.output_size = output_size

  def __call__(self, x: types.Array) -> types.Array:
    """Maps the source's output `[..., size]` to `[..., output_size]`."""
    sizes = (x.shape[-1], self.output_size)
    w = hk.get_parameter(
      'w', sizes, x.dtype, parameters.lecun_normal(x.shape[-1])
    )
    b = hk.get_parameter('b', sizes[1:], x.dtype, jnp.zeros)
    return x @ w + jnp.broadcast_to(b, (*x.shape[:-1], self.output_size))


class GraphCore(hk.RNNCore):
  """A graph of populations as a Haiku core with explicit state.

  It fits wherever an `hk.RNNCore` does: `hk.dynamic_unroll`, `hk.ResetCore`,
  an actor-learner that had an `hk.LSTM`. The state holds one history for each
  population that a delayed connection reads. Populations or transforms that
  are themselves a `StatefulModule` need `Graph` instead.
  """

  def __init__(
    self,
    spec: spec_lib.GraphSpec,
    *,
    dtype: Any = jnp.float32,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      spec: The graph.
      dtype: Of weights, activations and histories.
      name: Name of the module.
    """
    super().__init__(name=name)
    if not isinstance(spec, spec_lib.GraphSpec):
      raise TypeError(
        f'`spec` must be a GraphSpec (what `finalize()` returns), got {spec!r}'
      )
    self.spec = spec
    self.dtype = jnp.dtype(dtype)
    self._populations = {p.name: _population(p) for p in spec.populations}
    self._transforms = {
      schedule.key_of(c): _transform(i, c, spec.population(c.dst).size)
      for i, c in enumerate(spec.connections)
      if c.transform is not None
    }

  def initial_state(self, batch_size: int) -> dict[str, history.History]:
    """Empty histories: every delayed read gives zeros.

    Args:
      batch_size: At least 1; a graph has no unbatched form.

    Returns:
      A history of shape `[B, L, size]` by population.
    """
    if batch_size is None:
      raise ValueError(
        '`batch_size` must be a positive integer, got None; '
        'give inputs a leading axis of 1 for a single element'
      )
    return {
      name: history.empty(
        jnp.zeros((batch_size, self.spec.population(name).size), self.dtype),
        length,
      )
      for name, length in self.spec.history_lengths.items()
      if length
    }

  def __call__(
    self, inputs: Any, prev_state: dict[str, history.History]
  ) -> tuple[dict[str, types.Array], dict[str, history.History]]:
    """Advances by one step.

    Args:
      inputs: Observations by key, `[B, size]`; a bare array serves a graph
        with a single key. Keys that no population reads are ignored.
      prev_state: Histories.

    Returns:
      The output populations' activations by `output_to` or name, and the next
      histories.

    Raises:
      ValueError: if an input is missing or of the wrong size, or a transform
        gives the wrong size.
    """
    inputs = check_inputs(self.spec, inputs)
    weights = self._weights()
    outputs = {}
    for name in self.spec.order:
      outputs[name] = self._activity(name, inputs, outputs, prev_state, weights)
    state = {k: history.write(h, outputs[k]) for k, h in prev_state.items()}
    return {p.output_to: outputs[p.name] for p in self.spec.outputs}, state

  def _weights(self) -> dict[schedule.ConnectionKey, tuple[Any, Any]]:
    """The weights and the bias of each default connection."""
    weights = {}
    for pack in schedule.packs(self.spec):
      w, b = parameters.pack_parameters(pack, self.dtype)
      weights.update({k: (w[i], b[i]) for i, k in enumerate(pack.connections)})
    return weights

  def _activity(self, name, inputs, outputs, state, weights):
    population = self.spec.population(name)
    arriving = []
    if population.input_from is not None:
      arriving.append(inputs[population.input_from].astype(self.dtype))
    for connection in self.spec.incoming(name):
      source = outputs.get(connection.src)
      if connection.delay:
        source = history.read(
          state[connection.src],
          connection.delay,
          jnp.zeros((), self.dtype),
        )
      arriving.append(self._transmit(connection, source, weights))
    if not arriving:
      batch_size = _batch_size(inputs, state)
      arriving.append(jnp.zeros((batch_size, population.size), self.dtype))
    return self._populations[name](arriving).astype(self.dtype)

  def _transmit(self, connection, x, weights):
    key = schedule.key_of(connection)
    if connection.transform is None:
      w, b = weights[key]
      return x @ w + jnp.broadcast_to(b, (*x.shape[:-1], b.shape[-1]))
    y = self._transforms[key](x)
    size = self.spec.population(connection.dst).size
    if jnp.shape(y) != (*x.shape[:-1], size):
      raise ValueError(
        f'the transform of {connection.src} -> {connection.dst} must map '
        f'{x.shape} to {(*x.shape[:-1], size)}, got {jnp.shape(y)}; give it '
        f'the output size {size}'
      )
    return y.astype(self.dtype)


class Graph(stateful.StatefulModule):
  """A graph of populations inside a function given to `hkgraph.transform`.

  Maps observations by key to the output populations' activations by key, for
  one step or a sequence; the histories live in the carry.
  """

  def __init__(
    self,
    spec: spec_lib.GraphSpec,
    *,
    dtype: Any = jnp.float32,
    name: str | None = None,
  ):
    """Creates the module; arguments as in `GraphCore`."""
    super().__init__(name=name)
    self.core = GraphCore(spec, dtype=dtype, name='core')

  def initial_carry(self, x: Any) -> dict[str, history.History]:
    return self.core.initial_state(stateful.current_rows().batch_size)

  def reset(self, carry: Any, x: Any) -> Any:
    is_first = stateful.current_rows().is_first
    return {k: history.reset(h, is_first) for k, h in carry.items()}

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    outputs, carry = self.core(x, carry)
    return carry, outputs


def check_inputs(
  spec: spec_lib.GraphSpec, inputs: Any
) -> Mapping[str, types.Array]:
  """The inputs by key, checked against the sizes of the input populations."""
  sizes = spec.input_sizes
  if not isinstance(inputs, Mapping):
    if len(sizes) != 1:
      raise ValueError(
        f'the graph reads the keys {sorted(sizes)}, so its inputs must be a '
        f'dict; got {type(inputs).__name__}'
      )
    inputs = {next(iter(sizes)): inputs}
  missing = sorted(set(sizes) - set(inputs))
  if missing:
    raise ValueError(
      f'the graph reads the keys {sorted(sizes)}, but {missing} are missing '
      f'from the inputs, which hold {sorted(inputs)}'
    )
  wrong = {
    key: jnp.shape(inputs[key])
    for key, size in sizes.items()
    if jnp.ndim(inputs[key]) < 2 or jnp.shape(inputs[key])[-1] != size
  }
  if wrong:
    wanted = {key: (..., sizes[key]) for key in wrong}
    raise ValueError(
      f'inputs must have the sizes of the populations that read them, '
      f'{wanted}, got {wrong}'.replace('Ellipsis', '...')
    )
  return {key: jnp.asarray(inputs[key]) for key in sizes}


def _population(population: spec_lib.PopulationSpec) -> Any:
  make = population.module or Population
  return make(
    size=population.size,
    activation=population.activation,
    name=f'{population.name}_population',
  )


def _transform(
  position: int, connection: spec_lib.ConnectionSpec, size: int
) -> Any:
  with hk.name_scope(parameters.scope_name(position, connection)):
    make = connection.transform
    if isinstance(make, type) and issubclass(make, Connection):
      return make(size)
    return make()


def _batch_size(inputs, state) -> int:
  for x in jax.tree.leaves((inputs, state)):
    return x.shape[0]
  return stateful.current_rows().batch_size
