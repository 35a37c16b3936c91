"""PQN learns a MinAtar game of pgx from a grid of 10 x 10 pixels.

Network and hyperparameters are those that Gallici et al. ("Simplifying Deep
Temporal Difference Learning", 2024, arXiv 2407.04811) give for MinAtar in
`config/alg/pqn_minatar.yaml` of mttga/purejaxql. There the learning rate falls
for ten million frames, and epsilon for the first of them. So do they here,
however few frames are played: the curve is the beginning of the published
training, not a shorter one of its own, unless `--horizon` says otherwise.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import jax
import numpy as np

import hkgraph as hg
from hkgraph import plotting
from hkgraph.training import evaluator, setup

CONFIG = hg.PQNConfig(
  num_envs=128,
  num_steps=32,
  num_minibatches=32,
  num_epochs=2,
  lambda_=0.65,
  learning_rate=5e-4,
  schedule='linear',
  exploration_fraction=0.1,
)


def train(env, frames: int, horizon: int, seed: int):
  """Plays `frames` of a training whose schedules end after `horizon`."""
  per_update = CONFIG.num_envs * CONFIG.num_steps
  config = dataclasses.replace(CONFIG, total_updates=-(-horizon // per_update))
  network = hg.transform(
    lambda obs: hg.QNetwork(env.action_spec(), hg.QConvEncoder())(obs)
  )
  env, agent = setup.build(env, network, config)
  update, state = setup.make_update(agent, env, config, jax.random.key(seed))
  rows = []
  for part in tenths(range(-(-frames // per_update))):
    for _ in part:
      start = time.perf_counter()
      state, metrics = update(state)
      row = {k: float(v) for k, v in jax.device_get(metrics).items()}
      row['seconds'] = time.perf_counter() - start
      rows.append(row | {'steps': (len(rows) + 1) * per_update})
    print(_line(rows[-len(part) :]), flush=True)
  return agent, state[0], rows


def tenths(rows):
  """Ten parts as alike as can be; fewer of less than ten rows."""
  return [part for part in np.array_split(rows, 10) if len(part)]


def mean_return(rows) -> float:
  """Of the training episodes that ended in these rows."""
  episodes = sum(row['episodes'] for row in rows)
  total = sum(row['episodes'] * row['episode_return'] for row in rows)
  return total / episodes if episodes else float('nan')


def frames_per_second(rows) -> float:
  """Of the median update: the first one compiles."""
  seconds = np.median([row['seconds'] for row in rows])
  return CONFIG.num_envs * CONFIG.num_steps / float(seconds)


def _line(rows) -> str:
  episodes = sum(row['episodes'] for row in rows)
  return (
    f'{rows[-1]["steps"]:>9,} frames: return {mean_return(rows):6.2f} in '
    f'{episodes:6.0f} episodes, epsilon {rows[-1]["epsilon"]:.2f}, '
    f'{frames_per_second(rows):,.0f} frames/s'
  )


def evaluate(agent, env, learner_state, episodes: int, seed: int):
  """Greedy episodes, and ones with the final share of random actions."""
  results = {}
  for name, deterministic in (('greedy', True), ('epsilon', False)):
    run = evaluator.make_evaluator(
      agent, env, episodes=episodes, deterministic=deterministic
    )
    key = jax.random.key(seed + 1 + len(results))
    results[name] = run(learner_state.params, learner_state.statistics, key)
  return results


def save(path: pathlib.Path, args, rows, results) -> None:
  """Draws the curve, and writes its numbers beside it."""
  ended = [row for row in rows if row['episodes']]
  plotting.learning_curve(ended, title=args.env).savefig(path)
  numbers = {
    'env': args.env,
    'frames': rows[-1]['steps'],
    'horizon': args.horizon,
    'seed': args.seed,
    'config': dataclasses.asdict(CONFIG),
    'frames_per_second': frames_per_second(rows),
    'curve': [[part[-1]['steps'], mean_return(part)] for part in tenths(rows)],
    **{name: [run.mean, run.std] for name, run in results.items()},
  }
  text = json.dumps(numbers, indent=2) + '\n'
  path.with_suffix('.json').write_text(text, encoding='utf-8')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--env', default='pgx:minatar-breakout')
  parser.add_argument('--frames', type=int, default=2_000_000)
  parser.add_argument('--horizon', type=int, default=10_000_000)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--episodes', type=int, default=100, help='to evaluate')
  parser.add_argument('--output', type=pathlib.Path, help='a PNG of the curve')
  parser.add_argument('--quick', action='store_true', help='a small budget')
  args = parser.parse_args()
  if args.quick:
    args.frames, args.episodes = 20_000, 10
    print('quick: 20,000 frames, too few to learn from')
  try:
    env = hg.envs.make(args.env)
  except ImportError as error:  # It names the extra to install.
    parser.exit(1, f'{error}\n')
  agent, learner_state, rows = train(env, args.frames, args.horizon, args.seed)
  results = evaluate(agent, env, learner_state, args.episodes, args.seed)
  for name, run in results.items():
    print(
      f'{name}: {run.mean:.2f} +- {run.std:.2f} in {args.episodes} episodes'
    )
  if args.output:
    save(args.output, args, rows, results)


if __name__ == '__main__':
  main()
