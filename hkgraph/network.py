"""From a Haiku function to pure functions: the only caller of `hk.transform*`.

Nothing above `Network` knows that Haiku made it.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import core, validate
from hkgraph.graph import spec as spec_lib
from hkgraph.modules import normalizer, stateful


@dataclasses.dataclass(frozen=True)
class Network:
  """A network as pure functions.

  `B` is the batch size and `T` the number of rows. `is_first` tells which
  rows open an episode; the carry of such a batch element is reset before the
  row is consumed. A loop of `apply` and one `unroll` agree.

  Attributes:
    init: `(key, inputs) -> (params, state)`, inputs `[B, ...]`. The carry is
      at its initial value.
    apply: `(params, state, key, inputs, is_first) -> (outputs, state)` for
      one row: inputs `[B, ...]`, is_first `[B]`. The key may be None if the
      function asks for none.
    unroll: The same for a sequence: inputs `[T, B, ...]`, is_first `[T, B]`.
    initial_carry: `(batch_size, key=None) -> carry`. The key seeds noise kept
      in the carry. The shapes of the inputs are those last given to `init`,
      or to `transform`.
    update_statistics: `(params, state, inputs, is_first, mask) -> state` for a
      sequence whose carry before row 0 is `state.carry`: takes the rows where
      mask `[T, B]` is set into the statistics, and leaves the carry alone.
  """

  init: Callable[..., tuple[Any, types.NetworkState]]
  apply: Callable[..., tuple[Any, types.NetworkState]]
  unroll: Callable[..., tuple[Any, types.NetworkState]]
  initial_carry: Callable[..., Any]
  update_statistics: Callable[..., types.NetworkState]


def transform(
  fn: Callable[[Any], Any], *, unroll: str = 'sequence', inputs: Any = None
) -> Network:
  """Makes a `Network` from a Haiku function of one step's inputs.

  In `unroll`, the function runs once on `[T, B, ...]` inputs: stateless
  modules see two leading axes (wrap those that cannot in `hk.BatchApply`),
  and every `StatefulModule` runs through time by itself. State of foreign
  modules (say `hk.BatchNorm`) counts as statistics: it changes in
  `update_statistics` only.

  Args:
    fn: A function of a tree of arrays, free to make Haiku modules.
    unroll: 'sequence' as above, or 'scan' for a function that insists on one
      step: it is then called row by row.
    inputs: One step's inputs (arrays or `jax.ShapeDtypeStruct`, any batch
      size), so that `initial_carry` works before `init`.

  Returns:
    The five pure functions.
  """
  if not callable(fn):
    raise TypeError(f'`fn` must be a Haiku function of the inputs, got {fn!r}')
  if unroll not in ('sequence', 'scan'):
    raise ValueError(f"`unroll` must be 'sequence' or 'scan', got {unroll!r}")

  def run(rows, inputs):
    with stateful.rows_scope(rows):
      return fn(inputs)

  transformed = hk.transform_with_state(run)
  signature = _Signature(inputs)

  def init(key, inputs):
    signature.inputs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs
    )
    rows = stateful.Rows(is_first=jnp.ones(_batch_shape(inputs, 1), bool))
    params, state = transformed.init(key, rows, inputs)
    state = stateful.split_state(state)
    _check_carry(state.carry, rows.batch_size)
    return params, state

  def step(params, state, key, inputs, rows):
    outputs, state = transformed.apply(
      params, stateful.merge_state(state), key, rows, inputs
    )
    return outputs, stateful.split_state(state)

  def sequence(params, state, key, inputs, rows):
    if unroll == 'sequence':
      return step(params, state, key, inputs, rows)

    def body(carry, row):
      state, key = carry
      inputs, is_first, mask = row
      key, step_key = (None, None) if key is None else jax.random.split(key)
      now = stateful.Rows(is_first, mask, rows.frozen)
      outputs, state = step(params, state, step_key, inputs, now)
      return (state, key), outputs

    xs = (inputs, rows.is_first, rows.mask)
    (state, _), outputs = jax.lax.scan(body, (state, key), xs)
    return outputs, state

  def forward(name, num_axes, run):
    def pass_(params, state, key, inputs, is_first):
      _check_rows(name, inputs, is_first, num_axes)
      _check_carry(state.carry, jnp.shape(is_first)[-1])
      rows = stateful.Rows(is_first=is_first)
      outputs, new = run(params, state, key, inputs, rows)
      return outputs, state.replace(carry=new.carry)

    return pass_

  def update_statistics(params, state, inputs, is_first, mask):
    _check_rows('update_statistics', inputs, is_first, 2)
    _check_carry(state.carry, jnp.shape(is_first)[-1])
    _check_mask(mask, jnp.shape(is_first))
    if not jax.tree.leaves(state.statistics):
      return state
    rows = stateful.Rows(is_first, mask, frozen=state.statistics)
    _, new = sequence(params, state, jax.random.key(0), inputs, rows)
    return state.replace(statistics=new.statistics)

  def initial_carry(batch_size, key=None):
    batch_size = validate.integer('batch_size', batch_size, minimum=1)
    key = jax.random.key(0) if key is None else key
    return _initial_carry(init, signature.batched(batch_size))(key)

  return Network(
    init=init,
    apply=forward('apply', 1, step),
    unroll=forward('unroll', 2, sequence),
    initial_carry=initial_carry,
    update_statistics=update_statistics,
  )


def methods(
  make: Callable[[], tuple[Callable[..., Any], dict[str, Callable[..., Any]]]],
) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
  """Makes pure functions of Haiku functions that share modules.

  For models that keep their state by argument, such as a world model.

  Args:
    make: Makes the modules and returns a function that uses them all, and a
      dict of functions; none keeps Haiku state or draws Haiku keys.

  Returns:
    `init(key, ...) -> params`, which takes the arguments of the first function,
    and a dict of `(params, ...) -> result`.
  """
  return hk.without_apply_rng(hk.multi_transform(make))


def graph_network(
  spec: spec_lib.GraphSpec,
  *,
  path: str = 'grouped',
  dtype: Any = jnp.float32,
) -> Network:
  """Makes a `Network` of a graph alone.

  Args:
    spec: The graph.
    path: How it is executed, to the same effect: see `GraphCore`.
    dtype: Of weights, activations and histories.

  Returns:
    A network from observations by key, `[B, size]` (a bare array serves a
    graph with a single key), to the output populations' activations by key.

  Raises:
    TypeError: if `spec` is no `GraphSpec`.
    ValueError: if a transform gives the wrong size.
  """
  core.check_spec(spec)

  def fn(inputs):
    return core.Graph(spec, dtype=dtype)(inputs)

  return _of_graph(fn, spec, dtype)


def policy_network(
  spec: spec_lib.GraphSpec,
  action_spec: Any,
  *,
  policy: str | Mapping[str, str] = 'policy',
  value: str | Mapping[str, str] = 'value',
  normalize: bool = False,
  dtype: Any = jnp.float32,
) -> Network:
  """Makes an actor-critic of a graph: its outputs become policy and value.

  Args:
    spec: The graph.
    action_spec: A `dm_env` spec, or a dict of them with one head for each;
      `modules.heads.input_size` tells how many numbers a head reads.
    policy: The output with the parameters of the policy; for a dict of specs,
      the output of each key, or the stem of `{policy}_{key}`.
    value: The output with the value, of size 1; or a mapping from the keys of
      the reward to outputs.
    normalize: Whether observations pass a `Normalizer` first.
    dtype: Of weights, activations and histories.

  Returns:
    A network whose outputs are `PolicyValue`.

  Raises:
    TypeError: if `spec` is no `GraphSpec`.
    ValueError: if an output is missing or has not the size of its head.
  """
  core.check_spec(spec)
  # Distrax takes seconds to import, and a graph alone does not need it.
  from hkgraph.modules import heads

  if isinstance(action_spec, Mapping) and isinstance(policy, str):
    policy = {key: f'{policy}_{key}' for key in action_spec}
  head_sizes = jax.tree.leaves(heads.input_size(action_spec))
  wanted = [*zip(jax.tree.leaves(policy), head_sizes, strict=True)]
  wanted += [(key, 1) for key in jax.tree.leaves(value)]
  _check_outputs(spec, wanted, 'a policy', action_spec, '`policy` and `value`')

  def fn(inputs):
    outputs = _read_graph(spec, inputs, normalize, dtype)
    head = heads.make_head(action_spec)
    return types.PolicyValue(
      policy=heads.read(head, jax.tree.map(lambda key: outputs[key], policy)),
      value=jax.tree.map(lambda key: jnp.squeeze(outputs[key], -1), value),
    )

  return _of_graph(fn, spec, dtype)


def q_network(
  spec: spec_lib.GraphSpec,
  action_spec: Any,
  *,
  q: str | Mapping[str, str] = 'q',
  normalize: bool = False,
  dtype: Any = jnp.float32,
) -> Network:
  """Makes a Q-network of a graph: an output is the values of the actions.

  Args:
    spec: The graph.
    action_spec: A `dm_env` `DiscreteArray`, or a dict of them.
    q: The output with one number per action; for a dict of specs, the output
      of each key, or the stem of `{q}_{key}`.
    normalize: Whether observations pass a `Normalizer` first.
    dtype: Of weights, activations and histories.

  Returns:
    A network whose outputs are action values `[..., A]`, or a dict of them.

  Raises:
    TypeError: if `spec` is no `GraphSpec`.
    ValueError: if actions are not discrete, or an output is missing or has
      not as many numbers as there are actions.
  """
  core.check_spec(spec)
  from hkgraph.modules import towers

  if isinstance(action_spec, Mapping) and isinstance(q, str):
    q = {key: f'{q}_{key}' for key in action_spec}
  sizes = jax.tree.leaves(towers.num_actions(action_spec))
  wanted = [*zip(jax.tree.leaves(q), sizes, strict=True)]
  _check_outputs(spec, wanted, 'action values', action_spec, '`q`')

  def fn(inputs):
    outputs = _read_graph(spec, inputs, normalize, dtype)
    return jax.tree.map(lambda key: outputs[key], q)

  return _of_graph(fn, spec, dtype)


def input_specs(spec: spec_lib.GraphSpec, dtype: Any = jnp.float32) -> Any:
  """Shapes and dtypes of one step's inputs, `[1, size]` by key."""
  return {
    key: jax.ShapeDtypeStruct((1, size), dtype)
    for key, size in spec.input_sizes.items()
  }


def _read_graph(spec, inputs, normalize: bool, dtype):
  """The outputs of the graph by key, inside of a transform."""
  if normalize:
    inputs = normalizer.Normalizer(name='observations')(inputs)
  return core.Graph(spec, dtype=dtype)(inputs)


def _of_graph(fn, spec, dtype) -> Network:
  """The network of `fn`, whose shapes are checked at once."""
  inputs = input_specs(spec, dtype)
  network = transform(fn, inputs=inputs)
  jax.eval_shape(network.init, jax.random.key(0), inputs)
  return network


def _check_outputs(spec, wanted, what, action_spec, arguments) -> None:
  """Checks that the graph has the outputs `wanted`, pairs of key and size."""
  sizes = {p.output_to: p.size for p in spec.outputs}
  faults = [
    f'{key!r} of size {size} is asked for, '
    + (f'but has size {sizes[key]}' if key in sizes else 'but missing')
    for key, size in wanted
    if sizes.get(key) != size
  ]
  if faults:
    raise ValueError(
      f'the graph has the outputs {sizes} (name and size), but for {what} over '
      f'{action_spec} {"; ".join(faults)} (a policy takes a logit for each '
      'choice, or a mean and a scale for each number): declare them with '
      f'`add_output(name, size, output_to=...)`, or say with {arguments} '
      'which outputs to take'
    )


@dataclasses.dataclass
class _Signature:
  """Shapes and dtypes of one step's inputs, as last seen."""

  inputs: Any

  def batched(self, batch_size: int) -> Any:
    if self.inputs is None:
      raise ValueError(
        'the shapes of the inputs are not known yet: call `init` first, or '
        'give `inputs` to `transform`'
      )
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype),
      self.inputs,
    )


def _initial_carry(init, inputs):
  # Compiled, so that parameters that nobody asks for are never computed.
  def carry(key):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    return init(key, zeros)[1].carry

  return jax.jit(carry)


def _batch_shape(inputs: Any, ndim: int) -> tuple[int, ...]:
  """The leading axes that all inputs share."""
  leaves = jax.tree_util.tree_leaves_with_path(inputs)
  if not leaves:
    raise ValueError('the inputs hold no array, so there is no batch')
  shapes = {
    jax.tree_util.keystr(path) or 'inputs': jnp.shape(x)[:ndim]
    for path, x in leaves
  }
  shape = next(iter(shapes.values()))
  if len(shape) < ndim or any(s != shape for s in shapes.values()):
    axes = '[B, ...]' if ndim == 1 else '[T, B, ...]'
    raise ValueError(f'inputs must share leading axes {axes}, got {shapes}')
  return shape


def _check_rows(name: str, inputs: Any, is_first: Any, ndim: int) -> None:
  shape = _batch_shape(inputs, ndim)
  given = jnp.shape(is_first)
  if given != shape:
    hint = 'use `apply` for one row and `unroll` for a sequence'
    raise ValueError(
      f'`{name}` needs `is_first` of shape {shape} for these inputs, '
      f'got {given}; {hint}'
    )
  if jnp.result_type(is_first) != jnp.bool_:
    raise TypeError(f'`is_first` must be bool, got {jnp.result_type(is_first)}')


def _check_mask(mask: Any, shape: tuple[int, ...]) -> None:
  if jnp.shape(mask) != shape or jnp.result_type(mask) != jnp.bool_:
    raise ValueError(
      f'`mask` must be bool of shape {shape}, that of `is_first`, got '
      f'{jnp.result_type(mask)} of shape {jnp.shape(mask)}'
    )


def _check_carry(carry: Any, batch_size: int) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
    if jnp.shape(leaf)[:1] != (batch_size,):
      raise ValueError(
        f'carry{jax.tree_util.keystr(path)} must have the batch as leading '
        f'axis, and the inputs have batch {batch_size}; got shape '
        f'{jnp.shape(leaf)}: `initial_carry({batch_size})` gives a fresh one'
      )
