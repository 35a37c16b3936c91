"""Runs a `GraphSpec`: populations, connections, delays (design section 3)."""

from collections.abc import Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import execution, parameters, readers, schedule
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
  an actor-learner that had an `hk.LSTM`. The state holds a history for each
  group of populations that a delayed connection reads. Populations or
  transforms that are themselves a `StatefulModule` need `Graph` instead.
  """

  def __init__(
    self,
    spec: spec_lib.GraphSpec,
    *,
    path: str = 'grouped',
    dtype: Any = jnp.float32,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      spec: The graph.
      path: 'grouped' runs the schedule of the graph, and its loops know their
        derivative in reverse mode only; 'general' walks it connection by
        connection, to the same effect, in forward mode (`jax.jvp`) too.
      dtype: Of weights, activations and histories.
      name: Name of the module.
    """
    super().__init__(name=name)
    check_spec(spec)
    if path not in ('grouped', 'general'):
      raise ValueError(f"`path` must be 'grouped' or 'general', got {path!r}")
    self.spec = spec
    self.path = path
    self.dtype = jnp.dtype(dtype)
    self.plan = schedule.make(spec)
    _check_activations(spec, self.dtype)
    self._populations = {p.name: _population(p) for p in spec.populations}
    self._transforms = {
      schedule.key_of(c): _transform(i, c, spec.population(c.dst).size)
      for i, c in enumerate(spec.connections)
      if c.transform is not None
    }

  def initial_state(self, batch_size: int) -> readers.State:
    """Empty histories: every delayed read gives zeros.

    Args:
      batch_size: At least 1; a graph has no unbatched form.

    Returns:
      A history of shape `[B, L, P, size]` for each group that needs one.
    """
    if batch_size is None:
      raise ValueError(
        '`batch_size` must be a positive integer, got None; '
        'give inputs a leading axis of 1 for a single element'
      )
    return {
      readers.state_name(g): history.empty(
        jnp.zeros((batch_size, len(group.names), group.size), self.dtype),
        group.length,
      )
      for g, group in enumerate(self.plan.groups)
      if group.length
    }

  def __call__(
    self, inputs: Any, prev_state: readers.State
  ) -> tuple[dict[str, types.Array], readers.State]:
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
    inputs = check_inputs(self.spec, inputs, ('B',))
    reader = readers.StepReader(
      self.plan, prev_state, _batch_size(inputs, prev_state)
    )
    return self._run(reader, inputs)

  def unroll(
    self, inputs: Any, prev_state: readers.State, is_first: types.Array
  ) -> tuple[dict[str, types.Array], readers.State]:
    """Advances by a sequence: what has no loop runs all steps at once.

    Args:
      inputs: As in a step, `[T, B, size]`.
      prev_state: Histories before the first row.
      is_first: Rows that open an episode. Shape `[T, B]`, bool.

    Returns:
      Outputs `[T, B, size]`, and the histories after the last row.
    """
    inputs = check_inputs(self.spec, inputs, ('T', 'B'))
    reader = readers.SequenceReader(self.plan, prev_state, is_first)
    return self._run(reader, inputs)

  def _run(self, reader, inputs):
    run = execution.Execution(
      self.spec,
      reader,
      inputs,
      parameters.all_parameters(self.plan, self.dtype),
      self._populations,
      self._transforms,
      self.dtype,
    )
    if self.path == 'general':
      for name in self.spec.order:
        run.walk(name)
    else:
      run.blocks()
    outputs = {p.output_to: reader.each(p.name) for p in self.spec.outputs}
    return outputs, reader.next_state()


class Graph(stateful.StatefulModule):
  """A graph of populations inside a function given to `hkgraph.transform`.

  Maps observations by key to the output populations' activations by key, for
  one step or a sequence; the histories live in the carry.
  """

  def __init__(
    self,
    spec: spec_lib.GraphSpec,
    *,
    path: str = 'grouped',
    dtype: Any = jnp.float32,
    name: str | None = None,
  ):
    """Creates the module; arguments as in `GraphCore`."""
    super().__init__(name=name)
    self.core = GraphCore(spec, path=path, dtype=dtype, name='core')

  def initial_carry(self, x: Any) -> readers.State:
    return self.core.initial_state(stateful.current_rows().batch_size)

  def reset(self, carry: Any, x: Any) -> Any:
    is_first = stateful.current_rows().is_first
    return {k: history.reset(h, is_first) for k, h in carry.items()}

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    outputs, carry = self.core(x, carry)
    return carry, outputs

  def unroll(self, carry: Any, x: Any) -> tuple[Any, Any]:
    if self.core.path == 'general':
      return super().unroll(carry, x)
    is_first = stateful.current_rows().is_first
    outputs, carry = self.core.unroll(x, carry, is_first)
    return carry, outputs


def check_spec(spec: Any) -> None:
  """Raises `TypeError` unless `spec` is a finished graph."""
  if not isinstance(spec, spec_lib.GraphSpec):
    raise TypeError(
      f'`spec` must be a GraphSpec (what `finalize()` returns), got {spec!r}'
    )


def check_inputs(
  spec: spec_lib.GraphSpec, inputs: Any, lead: tuple[str, ...]
) -> Mapping[str, types.Array]:
  """The inputs by key, checked against the sizes of the input populations.

  Args:
    spec: The graph.
    inputs: Observations by key, or one observation.
    lead: Names of the axes before the last.
  """
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
    if jnp.ndim(inputs[key]) != len(lead) + 1
    or jnp.shape(inputs[key])[-1] != size
  }
  if wrong:
    axes = ''.join(f'{axis}, ' for axis in lead)
    wanted = ', '.join(f'{key!r}: ({axes}{sizes[key]})' for key in wrong)
    raise ValueError(
      'inputs must have the sizes of the populations that read them, '
      f'{{{wanted}}}, got {wrong}'
    )
  return {key: jnp.asarray(inputs[key]) for key in sizes}


def _check_activations(spec: spec_lib.GraphSpec, dtype: Any) -> None:
  """Each activation must map `[B, n]` to `[B, n]`; one look at each kind."""
  kinds = {(p.activation, p.size): p for p in spec.populations if p.activation}
  for (activation, size), population in kinds.items():
    shape = 1, size
    x = jax.eval_shape(activation, jax.ShapeDtypeStruct(shape, dtype))
    execution.check_activity(population, x, shape)


def _population(population: spec_lib.PopulationSpec) -> Any:
  make = population.module or Population
  return make(
    size=population.size,
    activation=population.activation,
    name=parameters.population_name(population),
  )


def _transform(
  position: int, connection: spec_lib.ConnectionSpec, size: int
) -> Any:
  with hk.name_scope(parameters.scope_name(position, connection)):
    make = connection.transform
    if isinstance(make, type) and issubclass(make, Connection):
      return make(size)
    module = make()
  if not callable(module):
    raise TypeError(
      f'the transform of {connection.src} -> {connection.dst} must make a '
      f'Haiku module, got {module!r}; give a factory such as '
      f'`lambda: hk.Linear({size})`'
    )
  return module


def _batch_size(inputs, state) -> int:
  for x in jax.tree.leaves((inputs, state)):
    return x.shape[0]
  return stateful.current_rows().batch_size
