"""Weights of a graph: stored stacked, seen one connection at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import haiku as hk
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import schedule
from hkgraph.graph import spec as spec_lib

# Standard deviation of a unit normal that is truncated at two deviations.
_TRUNCATED_STDDEV = 0.87962566103423978

Params = Mapping[str, Mapping[str, types.Array]]
Table = dict[schedule.ConnectionKey, dict[str, types.Array]]


def lecun_normal(fan_in: int) -> hk.initializers.Initializer:
  """Truncated normal of variance `1 / fan_in`, for stacks of weights too."""
  stddev = fan_in**-0.5 / _TRUNCATED_STDDEV
  return hk.initializers.TruncatedNormal(stddev)


def all_parameters(
  plan: schedule.Schedule, dtype: Any
) -> tuple[tuple[types.Array, ...], tuple[types.Array, ...]]:
  """Weights `[E, in, out]` and biases `[E, out]` of every pack."""
  weights, biases = [], []
  for pack in plan.packs:
    n_in, n_out = pack.sizes
    count = len(pack.connections)
    shape = (count, n_in, n_out)
    init = lecun_normal(n_in)
    weights.append(hk.get_parameter(f'w_{pack.name}', shape, dtype, init))
    biases.append(
      hk.get_parameter(f'b_{pack.name}', (count, n_out), dtype, jnp.zeros)
    )
  return tuple(weights), tuple(biases)


def scope_name(position: int, connection: spec_lib.ConnectionSpec) -> str:
  # The position makes it unique, the final underscore keeps Haiku from
  # numbering it.
  return f'c{position}_{connection.src}_to_{connection.dst}_'


def population_name(population: spec_lib.PopulationSpec) -> str:
  return f'{population.name}_population'


def connection_params(
  spec: spec_lib.GraphSpec, params: Params, *, module: str | None = None
) -> Table:
  """The weights of a graph by connection.

  Args:
    spec: The graph.
    params: Haiku parameters that hold the graph's, alone or among others.
    module: Name of the graph's core among them (say `'graph/~/core'`); needed
      only where several graphs fit.

  Returns:
    For each `(src, dst, index)`, `w` of shape `[in, out]` and `b` of shape
    `[out]`; for a custom transform its parameters as Haiku names them,
    below the transform (say `'linear/w'`).

  Raises:
    ValueError: if no module of `params`, or more than one, fits the graph.
  """
  module = find_module(spec, params, module)
  table = {}
  for pack in schedule.make(spec).packs:
    w, b = (params[module][f'{kind}_{pack.name}'] for kind in 'wb')
    for i, key in enumerate(pack.connections):
      table[key] = {'w': w[i], 'b': b[i]}
  for key, prefix in transform_scopes(spec, module):
    table[key] = {
      f'{name[len(prefix) :]}/{leaf}': value
      for name, bundle in params.items()
      if name.startswith(prefix)
      for leaf, value in bundle.items()
    }
  return table


def replace_connection_params(
  spec: spec_lib.GraphSpec,
  params: Params,
  table: Mapping[schedule.ConnectionKey, Mapping[str, types.Array]],
  *,
  module: str | None = None,
) -> dict[str, dict[str, types.Array]]:
  """The inverse of `connection_params`: `params` with the weights of a table.

  Args:
    spec: The graph.
    params: As in `connection_params`; not changed.
    table: Weights by `(src, dst, index)`. Connections, and names within one,
      may be left out: they keep what they have.
    module: As in `connection_params`.

  Returns:
    New parameters.

  Raises:
    ValueError: if the table names a connection or a parameter that the graph
      does not have, or an array has the wrong shape.
  """
  module = find_module(spec, params, module)
  current = connection_params(spec, params, module=module)
  table = {tuple(key): value for key, value in table.items()}
  _check_table(current, table)
  new = {name: dict(bundle) for name, bundle in params.items()}
  for pack in schedule.make(spec).packs:
    for kind in 'wb':
      name = f'{kind}_{pack.name}'
      rows = {
        i: table[key][kind]
        for i, key in enumerate(pack.connections)
        if kind in table.get(key, ())
      }
      if rows:
        new[module][name] = _set_rows(new[module][name], rows)
  for key, prefix in transform_scopes(spec, module):
    for path, value in table.get(key, {}).items():
      name, leaf = (prefix + path).rsplit('/', 1)
      new[name][leaf] = jnp.asarray(value, new[name][leaf].dtype)
  return new


def _set_rows(stack, rows):
  positions = jnp.array(list(rows))
  values = jnp.stack([jnp.asarray(v, stack.dtype) for v in rows.values()])
  return stack.at[positions].set(values)


def _check_table(current, table):
  unknown = [key for key in table if key not in current]
  if unknown:
    raise ValueError(
      f'the graph has no connections {unknown}; it has '
      f'{[tuple(key) for key in current]}'
    )
  for key, values in table.items():
    for name, value in values.items():
      if name not in current[key]:
        raise ValueError(
          f'connection {key} has the parameters {sorted(current[key])}, '
          f'not {name!r}'
        )
      if jnp.shape(value) != current[key][name].shape:
        raise ValueError(
          f'{name!r} of connection {key} must have shape '
          f'{current[key][name].shape}, got {jnp.shape(value)}'
        )


def find_module(
  spec: spec_lib.GraphSpec, params: Params, module: str | None = None
) -> str:
  """Name of the module that holds a graph's weights.

  Raises:
    ValueError: if no module of `params`, or more than one, fits the graph.
  """
  shapes = _shapes(spec)
  fits = [
    name
    for name, bundle in params.items()
    if shapes
    and {k: getattr(v, 'shape', None) for k, v in bundle.items()} == shapes
  ]
  if not shapes:
    # Nothing but custom transforms: their scopes tell.
    scopes = [scope_name(i, c) for i, c in enumerate(spec.connections)]
    fits = sorted(
      {n.split(f'/~/{s}')[0] for n in params for s in scopes if f'/~/{s}' in n}
    )
  if module is not None:
    fits = [name for name in fits if name == module]
  if len(fits) != 1:
    where = 'no module' if not fits else f'the modules {fits}'
    raise ValueError(
      f'{where} of the parameters fit the graph, whose weights are {shapes}; '
      f'the parameters hold {sorted(params)}; give `module` to choose one'
    )
  return fits[0]


def _shapes(spec) -> dict[str, tuple[int, ...]]:
  shapes = {}
  for pack in schedule.make(spec).packs:
    shapes[f'w_{pack.name}'] = (len(pack.connections), *pack.sizes)
    shapes[f'b_{pack.name}'] = (len(pack.connections), pack.sizes[1])
  return shapes


def transform_scopes(
  spec: spec_lib.GraphSpec, module: str
) -> Iterator[tuple[schedule.ConnectionKey, str]]:
  """Connections with a transform, and how names of its modules begin."""
  for i, connection in enumerate(spec.connections):
    if connection.transform is not None:
      prefix = f'{module}/~/{scope_name(i, connection)}/'
      yield schedule.key_of(connection), prefix
