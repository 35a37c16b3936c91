"""Optimizers by connection: freeze this edge, another rate for that one.

Weights of several connections are stored as one array, so a label for each
leaf of the parameters, as `optax.multi_transform` and `optax.masked` take it,
cannot tell one connection from another. The transformations here cut those
arrays where labels differ, hand the pieces to optax, and put them together.
"""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hkgraph.graph import parameters, schedule, validate
from hkgraph.graph import spec as spec_lib

# A population, all connections of a pair, or one connection.
Name = str | tuple[str, str] | tuple[str, str, int]


def connection_labels(
  spec: spec_lib.GraphSpec, labels: Mapping[Name, str], *, default: str
) -> dict[schedule.ConnectionKey, str]:
  """The label of every connection.

  It fits `connection_params(spec, params)` as a label tree of
  `optax.multi_transform`, for those who keep their parameters like that.

  Args:
    spec: The graph.
    labels: By name: `'arm'` for all connections that feed the population,
      `('eye', 'arm')` for all from `eye` to `arm`, `('eye', 'arm', 1)` for one
      of them. The longer name has the last word.
    default: Of what is named by none of them.

  Returns:
    Labels by `(src, dst, index)`.

  Raises:
    ValueError: if names are unknown, or name nothing; tells all of them, with
      names near to them.
    TypeError: if `spec` is no graph, a name none of the three, or a label no
      string.
  """
  _check(spec, labels, default)
  resolved = {}
  for key in map(schedule.key_of, spec.connections):
    names = (tuple(key), tuple(key[:2]), key.dst)
    resolved[key] = next((labels[n] for n in names if n in labels), default)
  return resolved


def by_connection(
  spec: spec_lib.GraphSpec,
  transforms: Mapping[str, optax.GradientTransformation],
  labels: Mapping[Name, str],
  *,
  default: str,
  module: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs `optax.multi_transform` with labels by connection and population.

  Each transformation sees what has its label, and nothing else: a clip by the
  global norm, say, is one by the norm of these. What goes to
  `optax.set_to_zero()` does not move at all, whatever momentum or decay the
  others have. Put `optax.flatten` around the single transformations, not
  around this one: a flat vector has no connections.

  Args:
    spec: The graph.
    transforms: Transformations by label, as `optax.multi_transform` has them.
    labels: As in `connection_labels`. The label of a population is also that
      of the parameters of its own `module`.
    default: Label of the connections and populations that have none, and of
      parameters beside the graph's.
    module: As in `connection_params`; needed only where several graphs fit.

  Returns:
    A transformation of parameters that hold the graph's, alone or among
    others. Its state is that of `optax.multi_transform`.

  Raises:
    ValueError: as `connection_labels`, or if a label has no transformation;
      its functions, if no module of the parameters, or more than one, fits
      the graph.
    TypeError: as `connection_labels`; its functions, if what they are given is
      no dict of parameters by module.
  """
  _check(spec, labels, default)
  _check_transforms(transforms, {*labels.values(), default})

  def partition(params):
    _check_params(params)
    ours = {k: v for k, v in params.items() if isinstance(v, Mapping)}
    parts = _parts(spec, ours, labels, default, module)
    present = {part.label for part in parts.values()}
    inner = optax.multi_transform(
      # A vector of nothing would be too short for `optax.flatten`.
      {k: v for k, v in transforms.items() if k in present},
      {name: part.label for name, part in parts.items()},
    )
    return parts, inner

  def init(params):
    parts, inner = partition(params)
    return inner.init(_take(params, parts))

  def update(updates, state, params=None, **extra_args):
    parts, inner = partition(updates)
    params = None if params is None else _take(params, parts)
    pieces, state = inner.update(
      _take(updates, parts), state, params, **extra_args
    )
    return _put(updates, parts, pieces), state

  return optax.GradientTransformationExtraArgs(init, update)


def masked_by_connection(
  spec: spec_lib.GraphSpec,
  inner: optax.GradientTransformation,
  names: Iterable[Name],
  *,
  module: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs `optax.masked`: `inner` for what is named, all else as it comes.

  Args:
    spec: The graph.
    inner: What to do there, say `optax.add_decayed_weights(1e-4)`.
    names: Populations and connections, as in `connection_labels`.
    module: As in `by_connection`.

  Returns:
    A transformation, to be chained with others.

  Raises:
    ValueError: as `by_connection`.
    TypeError: as `by_connection`.
  """
  transforms = {'masked': inner, 'other': optax.identity()}
  labels = dict.fromkeys(_names(names), 'masked')
  return by_connection(spec, transforms, labels, default='other', module=module)


def freeze(
  spec: spec_lib.GraphSpec,
  inner: optax.GradientTransformation,
  names: Iterable[Name],
  *,
  module: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs `inner` for all but what is named, which does not move at all.

  Args:
    spec: The graph.
    inner: The optimizer of the rest.
    names: Populations and connections, as in `connection_labels`.
    module: As in `by_connection`.

  Returns:
    A transformation, to be used as an optimizer.

  Raises:
    ValueError: as `by_connection`.
    TypeError: as `by_connection`.
  """
  transforms = {'trained': inner, 'frozen': optax.set_to_zero()}
  labels = dict.fromkeys(_names(names), 'frozen')
  return by_connection(
    spec, transforms, labels, default='trained', module=module
  )


@dataclasses.dataclass(frozen=True)
class _Part:
  """A leaf of the parameters, or those rows of it that share a label."""

  module: str
  leaf: str
  label: str
  rows: tuple[int, ...] | None = None  # None is all of it.


def _parts(spec, params, labels, default, module) -> dict[str, _Part]:
  """How the parameters are cut, by names that are unique."""
  core = parameters.find_module(spec, params, module)
  table = connection_labels(spec, labels, default=default)
  parts = {}
  for pack in schedule.make(spec).packs:
    rows = {}
    for row, key in enumerate(pack.connections):
      rows.setdefault(table[key], []).append(row)
    for leaf in (f'w_{pack.name}', f'b_{pack.name}'):
      if len(rows) == 1:
        parts[f'{core}/{leaf}'] = _Part(core, leaf, *rows)
        continue
      for label, members in rows.items():
        name = f'{core}/{leaf}[{label}]'
        parts[name] = _Part(core, leaf, label, tuple(members))
  owners = _owners(spec, core, table, labels, default)
  for name, bundle in params.items():
    if name == core and schedule.make(spec).packs:
      continue
    owner = next((o for o in owners if f'{name}/'.startswith(o)), None)
    for leaf, value in bundle.items():
      if jax.tree.leaves(value):
        parts[f'{name}/{leaf}'] = _Part(name, leaf, owners.get(owner, default))
  return parts


def _owners(spec, core, table, labels, default) -> dict[str, str]:
  """Labels of transforms and populations, by how names of modules begin."""
  owners = {
    prefix: table[key]
    for key, prefix in parameters.transform_scopes(spec, core)
  }
  for p in spec.populations:
    prefix = f'{core}/~/{parameters.population_name(p)}/'
    owners[prefix] = labels.get(p.name, default)
  return owners


def _take(params, parts: Mapping[str, _Part]) -> dict[str, Any]:
  def piece(part):
    value = params[part.module][part.leaf]
    return value if part.rows is None else value[np.array(part.rows)]

  return {name: piece(part) for name, part in parts.items()}


def _put(params, parts: Mapping[str, _Part], pieces) -> dict[str, Any]:
  """The inverse of `_take`; what is in no part stays as it is in `params`."""
  new = {
    name: dict(bundle) if isinstance(bundle, Mapping) else bundle
    for name, bundle in params.items()
  }
  cut = {}
  for name, part in parts.items():
    if part.rows is None:
      new[part.module][part.leaf] = pieces[name]
    else:
      cut.setdefault((part.module, part.leaf), []).append(name)
  for (module, leaf), names in cut.items():
    rows = np.concatenate([parts[name].rows for name in names])
    stack = jnp.concatenate([pieces[name] for name in names])
    new[module][leaf] = stack[np.argsort(rows)]
  return new


def _names(names: Any) -> list[Name]:
  is_one = isinstance(names, str | tuple)
  if is_one or not isinstance(names, Iterable):
    raise TypeError(
      '`names` must be a list of populations and connections, got '
      f'{names!r}' + (f'; write [{names!r}]' if is_one else '')
    )
  names = list(names)
  for name in names:
    if isinstance(name, list):
      raise TypeError(
        f'a name must be a string or a tuple, got {name!r}; write '
        f'{tuple(name)!r}'
      )
  return names


def _check(spec, labels, default) -> None:
  if not isinstance(spec, spec_lib.GraphSpec):
    raise TypeError(
      f'`spec` must be a GraphSpec (what `finalize()` returns), got {spec!r}'
    )
  if not isinstance(labels, Mapping):
    raise TypeError(
      "`labels` must be a dict such as {('eye', 'arm'): 'slow'}, got "
      f'{labels!r}'
    )
  for label in (*labels.values(), default):
    validate.text('label', label)
  faults = [f for name in labels if (f := _fault(spec, name))]
  if faults:
    raise ValueError('; '.join(faults))


def _fault(spec: spec_lib.GraphSpec, name: Any) -> str | None:
  """What is wrong with the name of a population or connection."""
  kinds = ((str, str), (str, str, int))
  if isinstance(name, str):
    return _population_fault(spec, name)
  if not isinstance(name, tuple) or tuple(map(type, name)) not in kinds:
    raise TypeError(
      "a name must be that of a population, or ('eye', 'arm') or "
      f"('eye', 'arm', 0) for connections, got {name!r}"
    )
  keys = [tuple(schedule.key_of(c)) for c in spec.connections]
  pairs = list(dict.fromkeys(key[:2] for key in keys))
  pair = name[:2]
  if name in (*keys, *pairs):
    return None
  if pair in pairs:
    last = sum(key[:2] == pair for key in keys) - 1
    there = f'{_arrow(pair)} has the indices 0 to {last}'
    return f'{name!r} names no connection: {there}'
  near = validate.did_you_mean(_arrow(pair), map(_arrow, pairs))
  if pair[::-1] in pairs:
    near = f' (did you mean {_arrow(pair[::-1])!r}?)'
  return f'{name!r} names no connection{near}'


def _arrow(pair: tuple[str, str]) -> str:
  return f'{pair[0]} -> {pair[1]}'


def _population_fault(spec: spec_lib.GraphSpec, name: str) -> str | None:
  population = next((p for p in spec.populations if p.name == name), None)
  if population is None:
    near = validate.did_you_mean(name, [p.name for p in spec.populations])
    return f'{name!r} is no population of this graph{near}'
  if spec.incoming(name) or population.module:
    return None
  example = spec.outgoing(name)
  hint = f'; name what it feeds: {(name, example[0].dst)!r}' if example else ''
  return f'{name!r} stands for the connections that feed it, but has none{hint}'


def _check_transforms(transforms: Any, used: set[str]) -> None:
  if not isinstance(transforms, Mapping):
    raise TypeError(
      "`transforms` must be a dict such as {'slow': optax.adam(1e-4)}, got "
      f'{transforms!r}'
    )
  missing = sorted(used - set(transforms))
  if missing:
    hints = [f'{k!r}{validate.did_you_mean(k, transforms)}' for k in missing]
    raise ValueError(
      f'`transforms` has no entry for the label {", ".join(hints)}; it has '
      f'{sorted(transforms)}'
    )
  for label, transform in transforms.items():
    if not isinstance(transform, optax.GradientTransformation):
      raise TypeError(
        f'`transforms[{label!r}]` must be an optax.GradientTransformation, '
        f'got {transform!r}'
      )


def _check_params(params: Any) -> None:
  # Modules that optax has masked are empty, and no dicts.
  if not isinstance(params, Mapping) or not all(
    isinstance(bundle, Mapping) or not jax.tree.leaves(bundle)
    for bundle in params.values()
  ):
    raise TypeError(
      'parameters and updates must be dicts by module, as `Network.init` '
      f'makes them, got {type(params).__name__}; put `optax.flatten` inside: '
      'around the single transformations'
    )
