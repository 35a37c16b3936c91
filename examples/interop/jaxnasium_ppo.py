"""Jaxnasium's own PPO trains networks of ours on CartPole.

One is a Flax network that came through ours, the other a graph of populations.
Jaxnasium has no place for a carry, so that the graph has no delays; it adds
the heads itself.

Needs: pip install 'hkgraph[flax,equinox]' jaxnasium
"""

import argparse

from flax import linen
import jax
import jax.numpy as jnp
import jaxnasium
from jaxnasium import algorithms

import hkgraph as hg
from hkgraph.interop import equinox as hgeqx
from hkgraph.interop import flax as hgflax


def flax_network() -> hg.Network:
  mlp = linen.Sequential([linen.Dense(64), linen.tanh, linen.Dense(64)])
  return hg.transform(lambda x: jnp.tanh(hgflax.from_linen(mlp)(x)))


def graph_network() -> hg.Network:
  graph = hg.PopulationGraph()
  graph.add_input('eye', 4, input_from='state')
  graph.add_population('left', 32, activation='jax.numpy.tanh')
  graph.add_population('right', 32, activation='jax.numpy.tanh')
  graph.add_output('limb', 64, activation='jax.numpy.tanh')
  graph.connect('eye', 'left')
  graph.connect('eye', 'right')
  graph.connect('left', 'limb')
  graph.connect('right', 'limb')
  return hg.graph_network(graph.finalize())


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='few steps')
  quick = parser.parse_args().quick
  env = jaxnasium.make('CartPole-v1')
  networks = {'flax': flax_network(), 'graph': graph_network()}
  for name, network in networks.items():
    body = hgeqx.EquinoxNetwork.factory(network)
    ppo = algorithms.PPO(
      total_timesteps=2048 if quick else 150_000,
      actor_kwargs={'body': body},
      critic_kwargs={'body': body},
      log_function=None,
    )
    agent, _ = ppo.train(jax.random.key(0), env)
    returns = ppo.evaluate(jax.random.key(1), agent, env)
    print(f'{name}: mean return {returns.mean():.1f}')
    # The trained parameters are those of `network.apply`.
    names = ', '.join(agent.actor.body.params)
    print(f'{name}: trained {names}')


if __name__ == '__main__':
  main()
