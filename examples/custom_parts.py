"""A population with its own rule, a connection with its own transform.

A gated population multiplies what its two connections bring; one of them is
an MLP. The graph is then stepped and unrolled, to the same effect.
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp

import hkgraph as hg


class Gated(hg.Population):
  """The product of what arrives, instead of the sum."""

  def integrate(self, inputs):
    return jnp.prod(jnp.stack(inputs), axis=0)


def make_graph() -> hg.GraphSpec:
  graph = hg.PopulationGraph()
  graph.add_input('eye', 3, input_from='eye')
  graph.add_population('gate', 8, activation='jax.numpy.tanh', module=Gated)
  graph.add_output('limb', 2)
  graph.connect('eye', 'gate', transform=lambda: hk.nets.MLP([16, 8]))
  graph.connect('gate', 'gate', delay=1)
  graph.connect('gate', 'limb')
  return graph.finalize()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='fewer rows')
  num_rows = 5 if parser.parse_args().quick else 50
  network = hg.graph_network(make_graph())
  eye = jax.random.normal(jax.random.key(0), (num_rows, 4, 3))
  is_first = jnp.zeros((num_rows, 4), bool).at[num_rows // 2].set(True)
  params, state = network.init(jax.random.key(1), {'eye': eye[0]})
  unrolled, _ = network.unroll(params, state, None, {'eye': eye}, is_first)

  apply = jax.jit(network.apply)
  for t in range(num_rows):
    row = {'eye': eye[t]}
    outputs, state = apply(params, state, None, row, is_first[t])
  difference = jnp.abs(outputs['limb'] - unrolled['limb'][-1]).max()
  print(f'last row, stepped against unrolled: {difference:.1e} apart')
  assert difference < 1e-5


if __name__ == '__main__':
  main()
