"""The three graphs on which speed is compared, as plain data.

tutorial: 4 populations, 4 connections, a self-loop of delay 1.
body: 24 body parts in a tree (input, hidden, action, value each), joined to
  the parent in both directions with delay 1: 96 populations, 142 connections.
large: 128 hidden populations of 64, fan-in 8, delays 1 to 8, a shared input,
  two read-outs: 131 populations, 1408 connections, 4.9 million weights.
"""

from collections.abc import Callable
import dataclasses
import random

import hkgraph as hg


@dataclasses.dataclass
class Workload:
  """Populations `(name, size, kind, key, activation)` and connections."""

  populations: list[tuple] = dataclasses.field(default_factory=list)
  connections: list[tuple[str, str, int]] = dataclasses.field(
    default_factory=list
  )

  def add(self, name, size, kind, *, key=None, activation=None):
    self.populations.append((name, size, kind, key, activation))

  def connect(self, src, dst, delay=0):
    self.connections.append((src, dst, delay))

  def inputs(self) -> dict[str, int]:
    return {p[3]: p[1] for p in self.populations if p[2] == 'input'}


def tutorial() -> Workload:
  w = Workload()
  w.add('in_x', 8, 'input', key='x')
  w.add('hidden', 32, 'population', activation='swish')
  w.add('action_params', 4, 'output')
  w.add('value', 1, 'output')
  w.connect('in_x', 'hidden')
  w.connect('hidden', 'hidden', 1)
  w.connect('hidden', 'action_params')
  w.connect('hidden', 'value')
  return w


def body(parts: int = 24, size: int = 32, branch: int = 3) -> Workload:
  w = Workload()
  for i in range(parts):
    w.add(f'in{i}', 16, 'input', key=f'o{i}')
    w.add(f'h{i}', size, 'population', activation='swish')
    w.add(f'a{i}', 4, 'output')
    w.add(f'v{i}', 1, 'output')
    w.connect(f'in{i}', f'h{i}')
    w.connect(f'h{i}', f'h{i}', 1)
    w.connect(f'h{i}', f'a{i}')
    w.connect(f'h{i}', f'v{i}')
    if i:
      parent = (i - 1) // branch
      w.connect(f'h{i}', f'h{parent}', 1)
      w.connect(f'h{parent}', f'h{i}', 1)
  return w


def large(
  n: int = 128, size: int = 64, fan_in: int = 8, max_delay: int = 8
) -> Workload:
  rng = random.Random(0)
  w = Workload()
  w.add('in_x', 64, 'input', key='x')
  for i in range(n):
    w.add(f'h{i}', size, 'population', activation='tanh')
  w.add('action_params', 8, 'output')
  w.add('value', 1, 'output')
  for i in range(n):
    w.connect('in_x', f'h{i}')
    for j in rng.sample(range(n), fan_in):
      w.connect(f'h{j}', f'h{i}', rng.randint(1, max_delay))
  for i in range(n):
    w.connect(f'h{i}', 'action_params')
    w.connect(f'h{i}', 'value')
  return w


WORKLOADS: dict[str, Callable[[], Workload]] = {
  'tutorial': tutorial,
  'body': body,
  'large': large,
}

_ACTIVATIONS = {'tanh': 'jax.numpy.tanh', 'swish': 'jax.nn.swish', None: None}


def to_spec(workload: Workload) -> hg.GraphSpec:
  """The workload as a graph of ours."""
  graph = hg.PopulationGraph()
  for name, size, kind, key, activation in workload.populations:
    activation = _ACTIVATIONS[activation]
    if kind == 'input':
      graph.add_input(name, size, input_from=key, activation=activation)
    elif kind == 'output':
      graph.add_output(name, size, activation=activation)
    else:
      graph.add_population(name, size, activation=activation)
  for src, dst, delay in workload.connections:
    graph.connect(src, dst, delay=delay)
  return graph.finalize()


def to_peer(workload: Workload, graph_class, nnx):
  """The graph as nnx-ppo's `PopulationGraph`; given, as it is optional."""
  activations = {None: None, 'tanh': nnx.tanh, 'swish': nnx.swish}
  graph = graph_class(nnx.Rngs(0))
  for name, size, kind, key, activation in workload.populations:
    options = {'activation': activations[activation]}
    if kind == 'input':
      graph.add_input(name, size, input_from=key, **options)
    elif kind == 'output':
      graph.add_output(name, size, **options)
    else:
      graph.add_population(name, size, **options)
  for src, dst, delay in workload.connections:
    graph.connect(src, dst, delay=delay)
  graph.finalize()
  return graph
