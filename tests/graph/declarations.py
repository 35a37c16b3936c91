"""Hypothesis strategy for the calls that declare a graph."""

from hypothesis import strategies as st
import jax.numpy as jnp

from hkgraph.graph import builder

# Connections between these names clash if names are joined carelessly.
_NAMES = ('l', 'l_0', 'l_1', 'a', 'b_c', 'a_b', 'c', 'l2', 'l10')


@st.composite
def calls(draw):
  """Calls `(method, args, kwargs)` that make a graph, in some order."""
  names = draw(st.lists(st.sampled_from(_NAMES), unique=True, min_size=1))
  activations = st.sampled_from([None, jnp.tanh, 'jax.nn.swish'])
  made = [
    ('add_input', ('in_x', 3), {'input_from': 'x'}),
    ('add_output', ('out', 2), {}),
    ('connect', (names[0], 'out'), {}),
  ]
  for name in names:
    options = {'activation': draw(activations)}
    made.append(('add_population', (name, draw(st.integers(1, 4))), options))
  for _ in range(draw(st.integers(0, 12))):
    ends = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    made.append(('connect', ends, {'delay': draw(st.integers(1, 3))}))
  return made


def declare(calls):
  """The graph that they declare."""
  graph = builder.PopulationGraph()
  for method, args, kwargs in calls:
    getattr(graph, method)(*args, **kwargs)
  return graph.finalize()
