"""Graphs of nnx-ppo with their weights, from there to here and back.

nnx-ppo runs a `PopulationGraph` by the same rules: activations of the sum of
what arrives, delays in steps of the episode, zeros before it began. So equal
weights give equal outputs. Nothing is initialised anew in either direction.

For a network of ours inside of nnx-ppo, see `interop.nnx.NNXNetwork`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import packages, types
from hkgraph.graph import builder, core, parameters, schedule, validate
from hkgraph.graph import spec as spec_lib


@dataclasses.dataclass(frozen=True)
class DenseTransform:
  """Makes `activation(x @ w + b)`: a `Dense` of nnx-ppo with an activation.

  Attributes:
    size: Of the output.
    activation: Maps `[..., size]` to the same shape.
  """

  size: int
  activation: Callable[..., Any]

  def __call__(self) -> hk.Sequential:
    return hk.Sequential([hk.Linear(self.size), self.activation])


def from_population_graph(
  graph: Any, arrays: Any = None
) -> tuple[spec_lib.GraphSpec, parameters.Params]:
  """Reads a `PopulationGraph` of nnx-ppo, with its weights.

  A `Dense` without bias becomes a connection whose bias is 0, and would learn
  one; a `Dense` with an activation becomes a `DenseTransform`.

  Args:
    graph: A finalized `PopulationGraph` of nnx-ppo, or an `hg.PopulationGraph`
      that was declared by the same calls, in the same order, and that needs
      `arrays`: this way nnx-ppo is not needed.
    arrays: Weights to take in place of the graph's own: the `nnx.State` of the
      graph, or nested dicts of arrays as a checkpoint holds them; also those
      of a whole network with one graph in it.

  Returns:
    The graph, and parameters of `hg.graph_network` of it. For another network
    with that graph in it, say a policy, write
    `hg.replace_connection_params(spec, its_params, hg.connection_params(spec,
    params))`.

  Raises:
    TypeError: If `graph` is neither of the two.
    ValueError: If it is not finalized, or no arrays are at hand; if we have no
      words for a part of it, or arrays do not fit: all faults together
      (`GraphError`), each with the name of what it is about.
  """
  reading = _read(graph)
  if arrays is None:
    if reading.arrays is None:
      raise ValueError(
        'an `hg.PopulationGraph` has no weights: give `arrays`, or the graph '
        'of nnx-ppo that has them'
      )
    arrays = reading.arrays
  faults = list(reading.faults)
  weights = _weights(reading, arrays, faults)
  spec = _spec(reading, faults)
  table = {}
  for key, i in _positions(spec, reading.connections).items():
    w, b = weights[i]
    activated = reading.connections[i].transform is not None
    names = ('linear/w', 'linear/b') if activated else ('w', 'b')
    table[key] = dict(zip(names, (w, b), strict=True))
  network = network_lib.graph_network(spec)
  shapes, _ = jax.eval_shape(
    network.init, jax.random.key(0), network_lib.input_specs(spec)
  )
  params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return spec, parameters.replace_connection_params(spec, params, table)


def to_population_graph(
  spec: spec_lib.GraphSpec,
  params: parameters.Params,
  *,
  rngs: Any,
  module: str | None = None,
) -> Any:
  """Makes a finalized `PopulationGraph` of nnx-ppo, with the same weights.

  Args:
    spec: The graph.
    params: Parameters that hold the graph's, alone or among others.
    rngs: An `nnx.Rngs`; what nnx-ppo draws from it is overwritten.
    module: As in `connection_params`; needed only where several graphs fit.

  Returns:
    The graph, to be used as a module of nnx-ppo.

  Raises:
    TypeError: If `spec` is no `GraphSpec`.
    ValueError: If populations have a `module` or connections a `transform` of
      their own: all of them (`GraphError`).
  """
  core.check_spec(spec)
  faults = [
    f'population {p.name!r} has a module of its own, which nnx-ppo has not'
    for p in spec.populations
    if p.module is not None
  ]
  faults += [
    f'connection {_arrow(c)}, index {c.index}, has a transform of its own; '
    'nnx-ppo has no Haiku modules'
    for c in spec.connections
    if c.transform is not None and not isinstance(c.transform, DenseTransform)
  ]
  if faults:
    raise validate.GraphError(faults)
  table = parameters.connection_params(spec, params, module=module)
  dense = packages.load('nnx_ppo.networks.feedforward', extra='nnx-ppo').Dense
  graph = _graph_class()(rngs)
  for p in spec.populations:
    fields = {'activation': p.activation}
    if p.kind == 'input':
      graph.add_input(p.name, p.size, input_from=p.input_from, **fields)
    elif p.kind == 'output':
      graph.add_output(p.name, p.size, output_to=p.output_to, **fields)
    else:
      graph.add_population(p.name, p.size, **fields)
  for c in spec.connections:
    sizes = [spec.population(end).size for end in (c.src, c.dst)]
    activation = getattr(c.transform, 'activation', None)
    transform = dense(*sizes, rngs, activation=activation)
    weights = list(table[schedule.key_of(c)].values())
    b, w = sorted(weights, key=jnp.ndim)
    transform.linear.kernel.set_value(w)
    transform.linear.bias.set_value(b)
    graph.connect(c.src, c.dst, transform=transform, delay=c.delay)
  graph.finalize()
  return graph


@dataclasses.dataclass
class _Reading:
  """A graph of nnx-ppo in our words, connections in its own order.

  A population that we cannot have is None.
  """

  populations: list[spec_lib.PopulationSpec | None]
  connections: list[spec_lib.ConnectionSpec]
  has_bias: list[bool]
  faults: list[str]
  arrays: Any = None


def _graph_class() -> Any:
  return packages.load(
    'nnx_ppo.networks.graph.graph', extra='nnx-ppo'
  ).PopulationGraph


def _read(graph: Any) -> _Reading:
  if isinstance(graph, builder.PopulationGraph):
    connections = list(graph.connections)
    faults = [
      f'connection {i}, {_arrow(c)}, has a transform of Haiku; declare it as '
      'in nnx-ppo, without'
      for i, c in enumerate(connections)
      if c.transform is not None
    ]
    biases = [True] * len(connections)
    return _Reading(list(graph.populations), connections, biases, faults)
  if not isinstance(graph, _graph_class()):
    raise TypeError(
      '`graph` must be a PopulationGraph of nnx-ppo, or an hg.PopulationGraph '
      f'declared by the same calls, got {graph!r}'
    )
  if not graph._finalized:
    raise ValueError('the graph is not finalized; call graph.finalize() first')
  return _read_nnx(graph)


def _read_nnx(graph: Any) -> _Reading:
  nnx = packages.load('flax.nnx', extra='flax')
  reading = _Reading([], [], [], [], nnx.state(graph, nnx.Param))
  sizes = {}
  for name, p in graph.populations.items():
    sizes[name] = p.size
    reading.populations.append(_population(p, reading.faults, nnx))
  seen = {}
  for i, c in enumerate(graph.connections):
    title = f'connection {i}, {_arrow(c)}'
    reading.faults += [
      f'{title}, {fault}' for fault in _transform_faults(c.transform, nnx)
    ]
    if id(c.transform) in seen:
      reading.faults.append(
        f'{title}, shares its transform with connection {seen[id(c.transform)]}'
        '; ours have weights of their own'
      )
    seen.setdefault(id(c.transform), i)
    activation = getattr(c.transform, 'activation', None)
    transform = activation and DenseTransform(sizes[c.dst], activation)
    try:
      spec = spec_lib.ConnectionSpec(c.src, c.dst, c.delay, transform)
    except (TypeError, ValueError) as error:
      reading.faults.append(f'{title}: {error}')
      spec = spec_lib.ConnectionSpec(c.src, c.dst)
    reading.connections.append(spec)
    linear = getattr(c.transform, 'linear', None)
    reading.has_bias.append(getattr(linear, 'use_bias', True))
  return reading


def _population(p: Any, faults: list[str], nnx: Any) -> Any:
  if isinstance(p.activation, nnx.Module):
    faults.append(
      f'population {p.name!r} has the module {type(p.activation).__name__} for '
      'an activation; ours are functions'
    )
    return None
  try:
    return spec_lib.PopulationSpec(
      p.name, p.size, p.activation, p.input_from, p.output_to
    )
  except (TypeError, ValueError) as error:
    faults.append(f'population {p.name!r}: {error}')
    return None


def _transform_faults(transform: Any, nnx: Any) -> Iterator[str]:
  dense = packages.load('nnx_ppo.networks.feedforward', extra='nnx-ppo').Dense
  if type(transform) is not dense:
    yield (
      f'has a {type(transform).__name__} for a transform; only Dense has a '
      'counterpart here'
    )
    return
  if isinstance(transform.activation, nnx.Module):
    yield 'has a module for an activation; ours are functions'
  linear = transform.linear
  if type(linear) is not nnx.Linear:
    yield f'has a {type(linear).__name__} in its Dense, not an nnx.Linear'
    return
  if linear.dtype not in (None, jnp.float32, jnp.dtype('float32')):
    yield f'computes in {jnp.dtype(linear.dtype)}; give float32 weights'
  if linear.dot_general is not jax.lax.dot_general:
    yield 'has a `dot_general` of its own'


def _spec(reading: _Reading, faults: list[str]) -> spec_lib.GraphSpec:
  """The graph, if it has no faults; raises all of them together."""
  populations = reading.populations
  if None not in populations:
    faults += validate.graph_faults(populations, reading.connections)
  if not any(p is None or p.kind == 'input' for p in populations):
    faults.append(
      'the graph has no input, and a network of ours takes its batch size from '
      'there; call add_input(name, size, input_from=key)'
    )
  if faults:
    raise validate.GraphError(faults)
  return spec_lib.GraphSpec(tuple(populations), tuple(reading.connections))


def _positions(
  spec: spec_lib.GraphSpec, connections: Sequence[spec_lib.ConnectionSpec]
) -> dict[schedule.ConnectionKey, int]:
  """Where each connection of `spec` stood in the order of declaration."""
  waiting = {}
  for i, c in enumerate(connections):
    alike = c.src, c.dst, c.delay, c.transform
    waiting.setdefault(alike, []).append(i)
  # Those that are alike keep their order.
  return {
    schedule.key_of(c): waiting[c.src, c.dst, c.delay, c.transform].pop(0)
    for c in spec.connections
  }


def _weights(
  reading: _Reading, arrays: Any, faults: list[str]
) -> list[tuple[types.Array, types.Array]]:
  """Weight and bias of each connection; what does not fit is a fault."""
  leaves = _of_graph(dict(_flatten(arrays)), len(reading.connections))
  sizes = {p.name: p.size for p in reading.populations if p is not None}
  weights = []
  for i, c in enumerate(reading.connections):
    shape = sizes.get(c.src), sizes.get(c.dst)
    named = f'connections.{i}.transform.linear'
    wanted = {'kernel': shape, 'bias': shape[1:]}
    if not reading.has_bias[i]:
      del wanted['bias']
    found = {'bias': jnp.zeros([n or 0 for n in shape[1:]])}
    for leaf, expected in wanted.items():
      path = ('connections', str(i), 'transform', 'linear', leaf)
      value = leaves.get(path)
      if value is None:
        # A transform that is no Dense has been told already.
        if not any(f.startswith(f'connection {i},') for f in faults):
          faults.append(
            f'{named}.{leaf} ({_arrow(c)}) is missing from `arrays`'
          )
        continue
      found[leaf] = jnp.asarray(value)
      if None not in expected and found[leaf].shape != expected:
        faults.append(
          f'{named}.{leaf} ({_arrow(c)}) must have shape {expected}, got '
          f'{found[leaf].shape}'
        )
      if found[leaf].dtype not in (jnp.float32, jnp.float64):
        faults.append(
          f'{named}.{leaf} ({_arrow(c)}) must be float32, got '
          f'{found[leaf].dtype}; cast it'
        )
    weights.append((found.get('kernel'), found['bias']))
  known = len(reading.connections)
  beyond = sorted({int(p[1]) for p in leaves if int(p[1]) >= known})
  if beyond:
    faults.append(
      f'`arrays` holds the connections {beyond}, but the graph has {known}'
    )
  return weights


def _of_graph(leaves: Mapping[tuple[str, ...], Any], count: int) -> Any:
  """The leaves below `connections` of the one graph among them."""
  graphs = {}
  for path, leaf in leaves.items():
    for i, part in enumerate(path[:-1]):
      if part == 'connections' and path[i + 1].isdigit():
        graphs.setdefault(path[:i], {})[path[i:]] = leaf
        break
  if not graphs and not count:
    return {}
  if len(graphs) != 1:
    names = [str('.'.join(prefix)) for prefix in graphs]
    what = f'several graphs, at {names}' if graphs else 'no graph'
    raise ValueError(
      f'`arrays` holds {what}; give the part that is the state of the graph, '
      f'with the key `connections`. It has {sorted({p[0] for p in leaves})}'
    )
  return next(iter(graphs.values()))


def _flatten(tree: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
  """Arrays by path, of an `nnx.State` or nested dicts and lists."""
  if isinstance(tree, Mapping):
    for key, value in tree.items():
      yield from _flatten(value, (*path, str(key)))
  elif isinstance(tree, list | tuple):
    yield from _flatten(dict(enumerate(tree)), path)
  elif hasattr(tree, 'get_value'):
    yield path, tree.get_value()
  elif tree is not None:
    # Checkpoints of variables may keep the array one level deeper.
    yield (path[:-1] if path[-1:] == ('value',) else path), tree


def _arrow(connection: Any) -> str:
  return f'{connection.src} -> {connection.dst}'
