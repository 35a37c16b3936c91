"""How the nodes of a NIR graph become populations and connections."""

from collections.abc import Iterator
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import network as network_lib
from hkgraph.graph import parameters, validate
from hkgraph.graph import spec as spec_lib
from hkgraph.modules import leaky


@dataclasses.dataclass(frozen=True)
class _Link:
  """A connection to be: weights are `[out, in]`, as in NIR."""

  src: str
  dst: str
  delay: int
  weight: np.ndarray
  bias: np.ndarray


class Reading:
  """One pass over the nodes, from populations along weights and delays."""

  def __init__(self, nir: Any, graph: Any, dt: float):
    self._nir = nir
    self._dt = dt
    self._nodes = graph.nodes
    self._after = {name: [] for name in graph.nodes}
    self._before = {name: [] for name in graph.nodes}
    self._faults = []
    for src, dst in graph.edges:
      missing = [name for name in (src, dst) if name not in graph.nodes]
      if missing:
        self._faults.append(
          f'the edge from {src!r} to {dst!r} names {missing[0]!r}, which is no '
          'node of the graph'
        )
        continue
      self._after[src].append(dst)
      self._before[dst].append(src)
    for name in graph.nodes:
      self._faults += self._node_faults(name)
    self._populations: dict[str, spec_lib.PopulationSpec] = {}
    self._names: dict[Any, str] = {}  # Of populations, by their node.
    self._links: list[_Link] = []
    self._visited: set[str] = set()

  def result(self) -> tuple[spec_lib.GraphSpec, dict[str, dict[str, Any]]]:
    """The graph and its parameters, or all faults."""
    self._raise_faults()
    self._make_populations()
    for node, name in [*self._names.items()]:
      for following in self._after[node]:
        self._follow(name, following)
    for name in self._nodes:
      if name not in self._visited and name not in self._names:
        self._faults.append(f'node {name!r} is not reached from any input')
    self._raise_faults()
    populations = tuple(self._populations.values())
    spec = spec_lib.GraphSpec(
      populations,
      tuple(
        spec_lib.ConnectionSpec(x.src, x.dst, x.delay) for x in self._links
      ),
    )
    return spec, self._params(spec)

  # Nodes.

  def _is(self, name: str, *kinds: str) -> bool:
    return isinstance(
      self._nodes[name], tuple(getattr(self._nir, kind) for kind in kinds)
    )

  def _is_body(self, name: str) -> bool:
    """Whether a node is a population by itself: `LI`, or `Scale` by ones."""
    return self._is(name, 'LI') or (
      self._is(name, 'Scale') and bool(np.all(self._nodes[name].scale == 1))
    )

  def _node_faults(self, name: str) -> Iterator[str]:
    node = self._nodes[name]
    kind = type(node).__name__
    if not self._is(name, *'Input Output LI Scale Affine Linear Delay'.split()):
      yield (
        f'node {name!r} is a nir.{kind}, which is no population, weight or '
        'delay of ours'
      )
      return
    if self._is(name, 'Affine', 'Linear'):
      shape = np.shape(node.weight)
      if len(shape) != 2:
        yield f'node {name!r} must have a weight [out, in], got shape {shape}'
      elif np.shape(getattr(node, 'bias', node.weight[:, 0])) != (
        len(node.weight),
      ):
        yield f'node {name!r} must have a bias of shape [out]'
    elif len(_shape(node)) != 1 or not _shape(node)[0]:
      yield (
        f'node {name!r} must have a shape of one axis, of size 1 or more, got '
        f'{_shape(node)}'
      )
    elif self._is(name, 'Delay'):
      yield from self._delay_faults(name)
    elif self._is(name, 'LI') and not np.all(node.tau > 0):
      yield f'node {name!r} must have positive `tau`, got {node.tau}'
    if not self._is(name, 'Output') and not self._after[name]:
      yield f'node {name!r} feeds no other; put a nir.Output behind it'

  def _delay_faults(self, name: str) -> Iterator[str]:
    delay = np.asarray(self._nodes[name].delay, float)
    steps = delay / self._dt
    if not np.all(delay == delay.flat[0]):
      yield f'node {name!r} delays neurons differently, by {delay}'
    elif not np.isfinite(steps).all() or steps.flat[0] < 0:
      yield f'node {name!r} must have a delay of at least 0, got {delay[0]}'
    elif abs(steps.flat[0] - round(steps.flat[0])) > 1e-3:
      yield (
        f'node {name!r} has the delay {delay[0]}, which is no multiple of '
        f'dt={self._dt}; give a `dt` that divides it'
      )

  # Populations.

  def _make_populations(self) -> None:
    merged: dict[str, dict[str, str]] = {}
    inputs = [x for x in self._nodes if self._is_merged_input(x)]
    for name in inputs:
      key = self._key(name)
      merged |= {body: {'input_from': key} for body in self._after[name]}
    outputs = [x for x in self._nodes if self._is_merged_output(x, merged)]
    for name in outputs:
      merged[self._before[name][0]] = {'output_to': self._key(name)}
    self._visited.update(inputs, outputs)
    for name, node in self._nodes.items():
      if self._is_body(name):
        self._add(name, _sizes(node)[0], merged.get(name, {}))
      elif self._is(name, 'Input', 'Output') and name not in self._visited:
        field = 'input_from' if self._is(name, 'Input') else 'output_to'
        self._add(name, _sizes(node)[0], {field: self._key(name)})
    for edges in (self._after, self._before):
      for name in edges:
        edges[name] = [x for x in edges[name] if x not in self._visited]

  def _is_merged_input(self, name: str) -> bool:
    """Whether all that an `Input` feeds are populations that read only it."""
    if not self._is(name, 'Input') or not self._after[name]:
      return False
    return all(
      self._is_body(body)
      and sum(self._is(x, 'Input') for x in self._before[body]) == 1
      for body in self._after[name]
    )

  def _is_merged_output(self, name: str, merged) -> bool:
    """Whether an `Output` shows one population that has no other."""
    if not self._is(name, 'Output') or len(self._before[name]) != 1:
      return False
    (body,) = self._before[name]
    outputs = [x for x in self._after[body] if self._is(x, 'Output')]
    return self._is_body(body) and len(outputs) == 1 and body not in merged

  def _key(self, name: str) -> str:
    return str((self._nodes[name].metadata or {}).get('key', name))

  def _add(self, node: str, size: int, fields: dict[str, str]) -> str:
    """A population for a node, under a name that can be had."""
    name = _identifier(node, self._populations)
    module = leaky.Leaky(dt=self._dt) if self._is(node, 'LI') else None
    self._populations[name] = spec_lib.PopulationSpec(
      name, size, module=module, **fields
    )
    self._names[node] = name
    return name

  # Connections.

  def _follow(self, src: str, node: str, entered: bool = False) -> None:
    """Makes the connections from a population along the nodes behind it."""
    delay, weights = 0, None
    while True:
      if node in self._names:
        self._link(src, self._names[node], delay, weights)
        return
      is_delay = self._is(node, 'Delay')
      if not entered and (weights or len(self._before[node]) > 1):
        self._meet(src, node, delay, weights)
        return
      entered = False
      self._visited.add(node)
      if is_delay:
        delay += round(float(self._nodes[node].delay[0]) / self._dt)
      else:
        weights = _weights(self._nodes[node])
      if len(self._after[node]) != 1:
        self._part(src, node, delay, weights)
        return
      (node,) = self._after[node]

  def _meet(self, src, node, delay, weights) -> None:
    """Puts a population in front of a node, where edges or weights meet."""
    entrance = node, 'in'
    is_new = entrance not in self._names
    if is_new:
      self._junction(entrance, _sizes(self._nodes[node])[0])
    self._link(src, self._names[entrance], delay, weights)
    if is_new:
      self._follow(self._names[entrance], node, entered=True)

  def _part(self, src, node, delay, weights) -> None:
    """Puts a population behind a node from which several edges part."""
    name = self._junction((node, 'out'), _sizes(self._nodes[node])[1])
    self._link(src, name, delay, weights)
    for following in self._after[node]:
      self._follow(name, following)

  def _junction(self, place: tuple[str, str], size: int) -> str:
    name = _identifier('_'.join(place), self._populations)
    self._populations[name] = spec_lib.PopulationSpec(name, size)
    self._names[place] = name
    return name

  def _link(self, src, dst, delay, weights) -> None:
    sizes = self._populations[src].size, self._populations[dst].size
    if weights is None:
      weights = np.eye(sizes[0], dtype=np.float32), np.zeros(sizes[0])
    if weights[0].shape != sizes[::-1]:
      self._faults.append(
        f'what leads from {src!r} of size {sizes[0]} to {dst!r} of size '
        f'{sizes[1]} has weights of shape [out, in] = {weights[0].shape}'
      )
    self._links.append(_Link(src, dst, delay, *weights))

  # Parameters.

  def _params(self, spec) -> dict[str, dict[str, Any]]:
    network = network_lib.graph_network(spec)
    like, _ = jax.eval_shape(
      network.init, jax.random.key(0), network_lib.input_specs(spec)
    )
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    table, counts = {}, {}
    for link in sorted(self._links, key=lambda link: link.delay):
      ends = link.src, link.dst
      index = counts[ends] = counts.get(ends, -1) + 1
      table[*ends, index] = {'w': link.weight.T, 'b': link.bias}
    params = parameters.replace_connection_params(spec, params, table)
    for node, name in self._names.items():
      if node in self._nodes and self._is(node, 'LI'):
        values = self._nodes[node]
        bundle = {
          'log_tau': np.log(np.asarray(values.tau, float)),
          'r': values.r,
          'v_leak': values.v_leak,
        }
        (key,) = (k for k in params if k.split('/')[-1] == f'{name}_population')
        params[key] = {
          k: jnp.asarray(v, params[key][k].dtype) for k, v in bundle.items()
        }
    return params

  def _raise_faults(self) -> None:
    if self._faults:
      raise validate.GraphError(self._faults)


def _identifier(node: str, taken: Any) -> str:
  """A name for a population that is near to that of a node."""
  name = re.sub(r'\W', '_', node, flags=re.ASCII)
  name = name if re.match('[A-Za-z_]', name) else f'p_{name}'
  try:
    validate.identifier('name', name)
  except ValueError:
    name = f'{name}_'
  stem, number = name, 2
  while name in taken:
    name = f'{stem}_{number}'
    number += 1
  return name


def _shape(node: Any) -> tuple[int, ...]:
  """The shape of what goes into a node that keeps it."""
  return tuple(np.asarray(next(iter(node.input_type.values()))).tolist())


def _sizes(node: Any) -> tuple[int, int]:
  """Sizes of what goes into a node, and of what comes out."""
  if hasattr(node, 'weight'):
    return node.weight.shape[1], node.weight.shape[0]
  size = int(_shape(node)[0])
  return size, size


def _weights(node: Any) -> tuple[np.ndarray, np.ndarray]:
  weight = node.weight if hasattr(node, 'weight') else np.diag(node.scale)
  bias = getattr(node, 'bias', np.zeros(len(weight), weight.dtype))
  return weight, bias
