"""Graphs in the Neuromorphic Intermediate Representation, and back.

NIR (Pedersen et al., 2024, "Neuromorphic intermediate representation", Nature
Communications) is a graph of nodes in continuous time, joined by edges that
add up. What it and a graph of populations have in common:

| here | there |
|---|---|
| a population without activation | `Scale` by ones |
| a `Leaky` population | `LI` |
| a connection `x @ w + b` | `Affine`, with `w` transposed |
| `delay=k` | a `Delay` of `k dt` before the `Affine` |
| `input_from`, `output_to` | `Input`, `Output`; the key is in their metadata |

The length `dt` of a step is written into the metadata of the graph, as `dt`.
Weights are initialised by neither side: both functions move them.
"""

from collections.abc import Iterator
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from hkgraph import packages
from hkgraph.graph import activations, core, parameters, validate
from hkgraph.graph import spec as spec_lib
from hkgraph.interop import nir_reading
from hkgraph.modules import leaky

nir = packages.load('nir')

Params = parameters.Params


def to_nir(
  spec: spec_lib.GraphSpec,
  params: Params,
  *,
  dt: float | None = None,
  module: str | None = None,
) -> Any:
  """Writes a graph and its weights as a `nir.NIRGraph`.

  Args:
    spec: The graph.
    params: Haiku parameters that hold the graph's, alone or among others.
    dt: Length of a step, in the unit that delays are to have there. None is
      that of the `Leaky` populations, and 1 if there are none.
    module: As for `connection_params`: needed only where several graphs fit.

  Returns:
    The graph, for `nir.write`.

  Raises:
    TypeError: If `spec` is no `GraphSpec`, or `dt` no number.
    GraphError: With all that NIR cannot say, by name: activations, populations
      other than `Leaky` ones, custom transforms, populations that are not fed
      or not read, a graph without inputs.
    ValueError: If `params` do not fit the graph.
  """
  core.check_spec(spec)
  dt = _step_length(spec, dt)
  faults = [*_faults(spec, dt)]
  if faults:
    raise validate.GraphError(faults)
  table = parameters.connection_params(spec, params, module=module)
  nodes, edges = {}, []
  for p in spec.populations:
    nodes[p.name] = _population(p, params, module)
  for c in spec.connections:
    # Names of populations are identifiers, so these are names of none.
    name = f'{c.src}-{c.dst}-{c.index}'
    path = [c.src, name, c.dst]
    weights = table[c.src, c.dst, c.index]
    nodes[name] = nir.Affine(_array(weights['w']).T, _array(weights['b']))
    if c.delay:
      path.insert(1, f'{name}-delay')
      size = spec.population(c.src).size
      nodes[path[1]] = nir.Delay(np.full(size, c.delay * dt))
    edges += zip(path[:-1], path[1:], strict=True)
  for key, size in spec.input_sizes.items():
    name = _free(f'{key}-input', nodes)
    nodes[name] = nir.Input(np.array([size]), metadata={'key': key})
    edges += [(name, p.name) for p in spec.inputs if p.input_from == key]
  for p in spec.outputs:
    name = _free(f'{p.output_to}-output', nodes)
    nodes[name] = nir.Output(np.array([p.size]), metadata={'key': p.output_to})
    edges.append((p.name, name))
  return nir.NIRGraph(nodes, edges, metadata={'dt': dt})


def from_nir(
  graph: Any, *, dt: float | None = None
) -> tuple[spec_lib.GraphSpec, dict[str, dict[str, Any]]]:
  """Reads a `nir.NIRGraph` as a graph and its weights.

  `Input`, `Output`, `LI` and `Scale` by ones are populations; `Affine`,
  `Linear` and other `Scale` nodes are weights of connections and `Delay` nodes
  their delays; an edge between populations is a connection of weight one. An
  `Input` or `Output` that one population alone stands behind is that
  population. Where weights follow one another, or edges meet at them or part,
  a population without activation is put between. `LI` nodes are solved as
  `LeakyPopulation` says, and `Delay` nodes give 0 before an episode began.

  Args:
    graph: The graph, as `nir.read` gives it, in one dimension throughout.
    dt: Length of a step, in the unit of the graph's time constants and delays.
      None is what `to_nir` wrote, and needless without such nodes.

  Returns:
    The graph, and its parameters in `hg.graph_network(spec)`. Node names that
    are no identifiers are made so. `Leaky` has its default initial values in
    the graph; the parameters hold those that were read.

  Raises:
    TypeError: If `graph` is no `nir.NIRGraph`, or `dt` no number.
    GraphError: With all that a graph of populations cannot say, by name: nodes
      of other kinds, delays that are no multiple of `dt` or differ between
      neurons, loops without a delay, sizes that do not match, edges of nodes
      that are not there.
    ValueError: If `dt` is asked for.
  """
  if not isinstance(graph, nir.NIRGraph):
    raise TypeError(f'`graph` must be a nir.NIRGraph, got {graph!r}')
  if dt is None:
    dt = (graph.metadata or {}).get('dt')
  timed = [
    k for k, v in graph.nodes.items() if isinstance(v, nir.LI | nir.Delay)
  ]
  if dt is None and timed:
    raise ValueError(
      f'`dt` is not in the metadata of the graph, and the nodes {timed} need '
      'it; give the length of a step in the unit of their time constants'
    )
  dt = 1.0 if dt is None else _positive(dt)
  return nir_reading.Reading(nir, graph, dt).result()


def _step_length(spec, dt: float | None) -> float:
  if dt is not None:
    return _positive(dt)
  for p in spec.populations:
    if isinstance(p.module, leaky.Leaky):
      return float(p.module.dt)
  return 1.0


def _positive(dt: Any) -> float:
  try:
    dt = float(dt)
  except (TypeError, ValueError) as error:
    raise TypeError(f'`dt` must be a positive number, got {dt!r}') from error
  if not 0 < dt < float('inf'):
    raise ValueError(f'`dt` must be positive and finite, got {dt}')
  return dt


def _faults(spec, dt: float) -> Iterator[str]:
  """What NIR cannot say of a graph."""
  if not spec.inputs:
    yield 'NIR needs an input; call add_input(name, size, input_from=key)'
  for p in spec.populations:
    if p.activation is not None:
      yield (
        f'population {p.name!r} has an activation, '
        f'{activations.qualified_name(p.activation)}, and NIR has '
        f'none; call {validate.call(p)} without'
      )
    if isinstance(p.module, leaky.Leaky):
      if p.module.dt != dt:
        yield (
          f'population {p.name!r} has dt={p.module.dt}, but a step is {dt} '
          f'long; call {validate.call(p, module=leaky.Leaky(dt=dt))}'
        )
    elif p.module is not None:
      yield (
        f'population {p.name!r} is a '
        f'{activations.qualified_name(p.module)}, which NIR does not '
        f'know; it knows {validate.call(p, module=leaky.Leaky(dt=dt))}'
      )
    if p.kind != 'input' and not spec.incoming(p.name):
      yield f'nothing feeds {p.name!r}; call connect(src, {p.name!r})'
    if p.kind != 'output' and not spec.outgoing(p.name):
      yield f'nothing reads {p.name!r}; call connect({p.name!r}, dst)'
  for c in spec.connections:
    if c.transform is not None:
      yield (
        f'connection {c.index} from {c.src!r} to {c.dst!r} has the transform '
        f'{activations.qualified_name(c.transform)}, which NIR does '
        f'not know; call connect({c.src!r}, {c.dst!r}) without'
      )


def _population(p, params, module) -> Any:
  if p.module is None:
    return nir.Scale(np.ones(p.size))
  name = _leaky_name(p.name, params, module)
  values = {key: _array(value) for key, value in params[name].items()}
  tau = np.exp(values['log_tau'].astype(np.float64))
  return nir.LI(tau=tau, r=values['r'], v_leak=values['v_leak'])


def _leaky_name(name: str, params, module) -> str:
  """The module of a leaky population among the parameters."""
  below = '' if module is None else f'{module}/'
  fits = [
    key
    for key in params
    if key.startswith(below) and key.split('/')[-1] == f'{name}_population'
  ]
  if len(fits) != 1:
    where = f'the modules {fits}' if fits else 'no module'
    raise ValueError(
      f'{where} of the parameters fit population {name!r}; they hold '
      f'{sorted(params)}; give `module` to choose one'
    )
  return fits[0]


def _array(x: Any) -> np.ndarray:
  return np.asarray(x, jnp.promote_types(x.dtype, jnp.float32))


def _free(name: str, taken: Any) -> str:
  """A name for a node that HDF5 can hold and that no other node has."""
  stem = name = re.sub(r'[^\w.-]', '_', name)
  number = 2
  while name in taken:
    name = f'{stem}-{number}'
    number += 1
  return name
