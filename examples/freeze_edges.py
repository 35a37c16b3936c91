"""Freezing one connection of a graph, and training others at another rate.

Sensory delays are taken as given: the connection from the eyes keeps the
weights that it has, what feeds the read-outs learns at a tenth of the rate,
and all else as usual.
"""

import argparse

import jax
import numpy as np
import optax

import hkgraph as hg
from hkgraph.envs import wrappers
from hkgraph.graph import labels
from hkgraph.training import actor


def make_graph() -> hg.GraphSpec:
  graph = hg.PopulationGraph()
  graph.add_input('eye', 4, input_from='x')
  graph.add_population('hidden', 64, activation='jax.nn.swish')
  graph.add_output('policy', 2)
  graph.add_output('value', 1)
  graph.connect('eye', 'hidden')
  graph.connect('eye', 'hidden', delay=1)
  graph.connect('hidden', 'policy')
  graph.connect('hidden', 'value')
  return graph.finalize()


def make_optimizer(spec: hg.GraphSpec) -> optax.GradientTransformation:
  def adam(rate):
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate))
    # Few large vectors are faster than many small arrays.
    return optax.flatten(clipped)

  return labels.by_connection(
    spec,
    {'usual': adam(3e-3), 'slow': adam(3e-4), 'frozen': optax.set_to_zero()},
    # The second of the two from `eye`, and whatever feeds the read-outs.
    {('eye', 'hidden', 1): 'frozen', 'policy': 'slow', 'value': 'slow'},
    default='usual',
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='few updates')
  num_updates = 3 if parser.parse_args().quick else 60
  config = hg.PPOConfig(num_envs=16, num_steps=128)
  env = hg.envs.make('cartpole')
  spec = make_graph()
  network = hg.policy_network(spec, env.action_spec())
  agent = hg.make_ppo(network, config, optimizer=make_optimizer(spec))
  batch = wrappers.EpisodeStatistics(wrappers.Vectorize(env, config.num_envs))

  learner_key, actor_key = jax.random.split(jax.random.key(0))
  _, timestep = batch.reset(actor_key)
  learner = agent.init(learner_key, timestep)
  state = actor.initial_actor_state(agent, batch, actor_key)
  before = hg.connection_params(spec, learner.params)

  @jax.jit
  def update(learner, state):
    state, trajectory, episodes = actor.rollout(
      agent, batch, learner, state, config.num_steps
    )
    learner, metrics = agent.update(learner, trajectory)
    rows = jax.tree.map(lambda x: x[1:], trajectory.timestep)
    metrics |= wrappers.finished_episode_metrics(rows, **episodes)
    return learner, state, metrics

  for i in range(num_updates):
    learner, state, metrics = update(learner, state)
    if i % 10 == 0 or i == num_updates - 1:
      print(f'update {i}: return {metrics["episode_return"]:.1f}')

  after = hg.connection_params(spec, learner.params)
  for key, weights in after.items():
    moved = np.abs(weights['w'] - before[key]['w']).mean()
    print(f'{key.src} -> {key.dst}, index {key.index}: moved by {moved:.1e}')
    assert (moved == 0) == (key == ('eye', 'hidden', 1))


if __name__ == '__main__':
  main()
