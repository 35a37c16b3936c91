"""DreamerV3 with a graph of populations as the memory of its world model.

A cue is shown, noise follows, and four steps after the cue the action must name
it. The graph hears what the world model saw as many steps ago, through delayed
connections; the paper's gated recurrence is trained beside it.
"""

import argparse
import pathlib

import hkgraph as hg

DELAY = 4


def make_memory() -> hg.GraphSpec:
  graph = hg.PopulationGraph()
  # The one input of the graph: latents and action, a step old.
  graph.add_input('seen', 64, input_from='x')
  graph.add_output('memory', 64, activation='jax.nn.swish')
  graph.connect('seen', 'memory')
  graph.connect('seen', 'memory', delay=DELAY - 1)  # When the answer is due.
  graph.connect('seen', 'memory', delay=DELAY)  # When it is rewarded.
  graph.connect('memory', 'memory', delay=1)
  return graph.finalize()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='a small budget')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--only', choices=['graph', 'gated'])
  parser.add_argument('--run-dir', type=pathlib.Path, help='keeps the runs')
  args = parser.parse_args()
  config = hg.DreamerConfig(
    num_steps=20,
    batch_size=32,
    sequence_length=20,
    train_ratio=2 if args.quick else 16,
    horizon=6,
    entropy_cost=3e-3,
    free_nats=2.0,  # A cue of four is 1.4 nats, each of which counts.
  )
  env = hg.envs.make('delayed_recall', delay=DELAY)
  for name, memory in {'graph': make_memory(), 'gated': 'auto'}.items():
    if args.only not in (name, None):
      continue
    result = hg.train(
      env,
      memory,
      config,
      total_steps=1_000 if args.quick else 60_000,
      seed=args.seed,
      run_dir=args.run_dir and args.run_dir / name,
      progress=False,
    )
    print(f'{name}: {result.evaluation.mean:.0%} right', flush=True)


if __name__ == '__main__':
  main()
