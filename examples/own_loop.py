"""The agent in a loop of your own, instead of `hg.train`.

`hg.make_ppo` gives pure functions: jit them, vmap them over seeds, put what
you like between them.
"""

import argparse

import jax

import hkgraph as hg
from hkgraph.envs import wrappers
from hkgraph.training import actor


def make_graph() -> hg.GraphSpec:
  graph = hg.PopulationGraph()
  graph.add_input('state', 4, input_from='x')
  graph.add_population('hidden', 64, activation='jax.nn.swish')
  graph.add_output('policy', 2)
  graph.add_output('value', 1)
  graph.connect('state', 'hidden')
  graph.connect('hidden', 'hidden', delay=1)
  graph.connect('hidden', 'policy')
  graph.connect('hidden', 'value')
  return graph.finalize()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='few updates')
  num_updates = 3 if parser.parse_args().quick else 60
  config = hg.PPOConfig(num_envs=16, num_steps=128)
  env = hg.envs.make('cartpole')
  network = hg.policy_network(make_graph(), env.action_spec())
  agent = hg.make_ppo(network, config)
  batch = wrappers.EpisodeStatistics(wrappers.Vectorize(env, config.num_envs))

  learner_key, actor_key = jax.random.split(jax.random.key(0))
  _, timestep = batch.reset(actor_key)
  learner = agent.init(learner_key, timestep)
  state = actor.initial_actor_state(agent, batch, actor_key)

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
      print(
        f'update {i}: return {metrics["episode_return"]:.1f} over '
        f'{metrics["episodes"]:.0f} episodes, '
        f'ratio off by {metrics["ratio_deviation"]:.1e}'
      )


if __name__ == '__main__':
  main()
