"""What a delay is good for: naming a cue that was shown eight steps ago.

The same graph is trained twice: once with a delayed connection beside the
direct one, once without, where it can but guess (one of four).
"""

import argparse

import hkgraph as hg


def make_graph(delay: int | None) -> hg.GraphSpec:
  graph = hg.PopulationGraph()
  graph.add_input('cue', 4, input_from='x')
  graph.add_population('hidden', 32, activation='jax.nn.swish')
  graph.add_output('policy', 4)
  graph.add_output('value', 1)
  graph.connect('cue', 'hidden')
  if delay is not None:
    graph.connect('cue', 'hidden', delay=delay)
  graph.connect('hidden', 'policy')
  graph.connect('hidden', 'value')
  return graph.finalize()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='a small budget')
  args = parser.parse_args()
  steps = 5_000 if args.quick else 100_000
  config = hg.PPOConfig(num_envs=32, num_steps=36, learning_rate=3e-3)
  env = hg.envs.make('delayed_recall', delay=8)
  for delay in (8, None):
    result = hg.train(
      env, make_graph(delay), config, total_steps=steps, progress=False
    )
    print(f'delay {delay}: {result.evaluation.mean:.0%} right')


if __name__ == '__main__':
  main()
