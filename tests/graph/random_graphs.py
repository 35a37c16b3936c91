"""Hypothesis strategies for graphs and episode boundaries."""

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.graph import builder

_ACTIVATIONS = (None, jnp.tanh, jax.nn.swish, jnp.sin)


@st.composite
def specs(
  draw, *, max_populations=5, max_connections=12, max_delay=7, transforms=()
):
  """Graphs with loops, several inputs and outputs, parallel connections.

  `transforms` are functions of an output size that make a `transform`; each
  connection has one of them or none.
  """
  graph = builder.PopulationGraph()
  sizes = st.integers(1, 4)
  inputs = [f'in_{i}' for i in range(draw(st.integers(1, 2)))]
  hidden = [f'h_{i}' for i in range(draw(st.integers(0, max_populations)))]
  outputs = [f'out_{i}' for i in range(draw(st.integers(1, 2)))]
  activations = st.sampled_from(_ACTIVATIONS)
  names = inputs + hidden + outputs
  size_of = {name: draw(sizes) for name in names}
  for name in names:
    size, activation = size_of[name], draw(activations)
    if name in inputs:
      graph.add_input(name, size, input_from=f'x_{name}', activation=activation)
    elif name in hidden:
      graph.add_population(name, size, activation=activation)
    else:
      graph.add_output(name, size, activation=activation)
  make = st.sampled_from((lambda size: None, *transforms))

  def connect(src, dst, delay):
    transform = draw(make)(size_of[dst]) if transforms else None
    graph.connect(src, dst, delay=delay, transform=transform)

  for name in outputs:
    # An output must be fed; from an earlier one, so that no cycle closes.
    source = draw(st.sampled_from(inputs + hidden))
    connect(source, name, draw(st.integers(0, max_delay)))
  for _ in range(draw(st.integers(0, max_connections))):
    src, dst = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    forward = names.index(src) < names.index(dst)
    delay = draw(st.integers(0 if forward else 1, max_delay))
    connect(src, dst, delay)
  return graph.finalize()


@st.composite
def boundaries(draw, num_rows, batch_size):
  """Where episodes begin. Shape `[T, B]`, bool."""
  rate = draw(st.sampled_from([0.0, 0.1, 0.4]))
  seed = draw(st.integers(0, 2**16))
  rng = np.random.default_rng(seed)
  return rng.random((num_rows, batch_size)) < rate


def inputs_of(spec, shape, seed):
  """Random observations by key, float32."""
  rng = np.random.default_rng(seed)
  return {
    key: rng.standard_normal((*shape, size)).astype(np.float32)
    for key, size in spec.input_sizes.items()
  }
