"""Compares PPO and PQN with navix's own, in one run.

  pip install -e '.[bench]' && python examples/benchmarks/navix_agents.py

Needs Python 3.12. Both train on Navix-Empty-5x5-v0, whose symbolic observation
is flattened, with the layer sizes, environments, steps, epochs and minibatches
that navix has by default; but PQN has 32 environments and 64 steps where navix
has 16 and 128, as hkgraph makes no more minibatches than there are
environments. The rate at which PPO learns is each library's own default, 3e-4
and 2.5e-4; at 2.5e-4 hkgraph reaches the goal a point more rarely. A call is a
whole training, compiled as one program, which is how navix runs its agents.
Each learner has a process of its own, in which nothing was compiled before.

Prints frames per second of a later call (the median over the seeds), seconds
of the first call with all that it builds and compiles (imports are not
counted), and how often the goal is reached, over the seeds: in the episodes
that end in the last tenth of the training, and in an evaluation of the final
parameters, by one and the same function, for the first episode of each of 256
environments (PPO samples its actions, PQN takes the greedy ones).
"""

import argparse
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import navix
from navix import agents
import numpy as np

import hkgraph as hg
from hkgraph.envs import wrappers
from hkgraph.training import actor

ENVIRONMENT = 'Navix-Empty-5x5-v0'
FRAMES, HIDDEN = 100_000, 64
SIZES = {
  'ppo': dict(num_envs=16, num_steps=128, num_minibatches=8, num_epochs=1),
  'pqn': dict(num_envs=32, num_steps=64, num_minibatches=32, num_epochs=8),
}
PER_UPDATE = 2048
UPDATES = FRAMES // PER_UPDATE
EVALUATION_ENVS = 256
# Named here, so that all is imported before anything is timed.
MAKE = {'ppo': hg.make_ppo, 'pqn': hg.make_pqn}
TOWERS = {'ppo': hg.ActorCritic, 'pqn': hg.QNetwork}
WHATS = {
  'frames_per_second': ('frames/s', '{:,.0f}'),
  'first_call': ('first call', '{:.2f} s'),
  'training': ('success in training', '{:.1%}'),
  'evaluation': ('success in evaluation', '{:.1%}'),
}


def ours(algo):
  """What trains and what acts, of hkgraph.

  Returns:
    `train(key) -> (params, finished, succeeded, metrics)`: whether an episode
    ended, and reached the goal, in each step of each environment; and
    `act(params, observation, key) -> action`.
  """
  env = hg.envs.make(f'navix:{ENVIRONMENT}', flatten=True)
  spec, sizes = env.action_spec(), (HIDDEN, HIDDEN)
  common = dict(**SIZES[algo], schedule='linear', total_updates=UPDATES)
  if algo == 'ppo':
    # navix discounts by 0.99^t at step t of an episode, 0.95 is about the mean;
    # its clipped value loss is halved, and so hardly ever the larger one.
    config = hg.PPOConfig(**common, discount=0.95, value_clip=None)
    encoders = hg.MLPEncoder, hg.MLPEncoder
  else:
    config = hg.PQNConfig(
      **common,
      learning_rate=2.5e-4,
      lambda_=0.65,
      epsilon_finish=0.1,
      exploration_fraction=0.3,
    )
    encoders = (hg.QMLPEncoder,)

  def network(x):
    return TOWERS[algo](spec, *(encoder(sizes) for encoder in encoders))(x)

  agent = MAKE[algo](hg.transform(network), config)
  envs = wrappers.EpisodeStatistics(wrappers.vectorize(env, config.num_envs))

  def update(state, _):
    learner, acting = state
    acting, trajectory, episodes = actor.rollout(
      agent, envs, learner, acting, config.num_steps
    )
    learner, metrics = agent.update(learner, trajectory)
    finished = trajectory.timestep.last()[1:]
    succeeded = finished & (episodes['episode_return'] > 0)
    return (learner, acting), (finished, succeeded, metrics)

  def train(key):
    learner_key, actor_key = jax.random.split(key)
    learner = agent.init(learner_key, actor.example_rows(envs))
    acting = actor.initial_actor_state(agent, envs, actor_key)
    (learner, _), (finished, succeeded, metrics) = jax.lax.scan(
      update, (learner, acting), length=UPDATES
    )
    return learner.params, finished, succeeded, metrics

  def act(params, observation, key):
    timestep = hg.TimeStep(
      step_type=jnp.ones(observation.shape[:1], jnp.int32),
      reward=jnp.zeros(observation.shape[:1]),
      discount=jnp.ones(observation.shape[:1]),
      observation=observation,
    )
    output, _ = agent.act(
      params,
      hg.NetworkState(carry={}, statistics={}),
      key,
      timestep,
      deterministic=algo == 'pqn',
    )
    return output.environment_action

  return train, act


def theirs(algo):
  """The same of navix."""
  env = flat_environment()
  common = dict(**SIZES[algo], budget=FRAMES)
  num_actions = len(env.action_set)
  if algo == 'ppo':
    network = agents.ActorCritic(
      num_actions, agents.MLPEncoder(HIDDEN), agents.MLPEncoder(HIDDEN)
    )
    agent = agents.PPO(agents.PPOHparams(**common), env, network)
  else:
    network = agents.QNetwork(num_actions, agents.QMLPEncoder(HIDDEN))
    agent = agents.PQN(agents.PQNHparams(**common), env, network)

  def train(key):
    state, logs = agent.train(key)
    finished = logs['agent/train/done_mask']
    succeeded = finished & (logs['agent/train/returns'] > 0)
    return state.params, finished, succeeded, logs

  def act(params, observation, key):
    is_first = jnp.zeros(observation.shape[:1], bool)
    _, output = jax.vmap(network.apply, (None, None, 0, 0))(
      params, (), observation, is_first
    )
    if algo == 'pqn':
      return jnp.argmax(output, -1)
    return output[0].sample(seed=key)

  return train, act


def flat_environment():
  env = navix.make(ENVIRONMENT, observation_fn=navix.observations.symbolic)
  space = env.observation_space
  return env.replace(
    observation_fn=lambda state: jnp.ravel(navix.observations.symbolic(state)),
    observation_space=space.replace(shape=(int(np.prod(space.shape)),)),
  )


def success_rate(act, params, key):
  """Share of environments whose first episode reaches the goal."""
  env = flat_environment()

  def step(state, key):
    timestep, over, succeeded = state
    action = act(params, timestep.observation, key)
    timestep = jax.vmap(env.step)(timestep, action)
    succeeded |= ~over & timestep.is_done() & (timestep.info['return'] > 0)
    return (timestep, over | timestep.is_done(), succeeded), None

  reset_key, act_key = jax.random.split(key)
  no = jnp.zeros(EVALUATION_ENVS, bool)
  start = jax.vmap(env.reset)(jax.random.split(reset_key, EVALUATION_ENVS))
  keys = jax.random.split(act_key, env.max_steps)
  (_, _, succeeded), _ = jax.lax.scan(step, (start, no, no), keys)
  return jnp.mean(succeeded)


def measure(whose, algo, num_seeds):
  """The numbers of one learner, by the keys of `WHATS`."""
  jax.block_until_ready(jax.random.split(jax.random.key(0)))
  start = time.perf_counter()
  train, act = {'hkgraph': ours, 'navix': theirs}[whose](algo)
  train = jax.jit(train)
  jax.block_until_ready(train(jax.random.key(0)))
  first_call = time.perf_counter() - start
  evaluate = jax.jit(lambda params, key: success_rate(act, params, key))
  times, in_training, in_evaluation = [], [], []
  for seed in range(num_seeds):
    start = time.perf_counter()
    params, finished, succeeded, _ = jax.block_until_ready(
      train(jax.random.key(seed))
    )
    times.append(time.perf_counter() - start)
    late = slice(-max(1, UPDATES // 10), None)
    in_training.append(succeeded[late].sum() / finished[late].sum())
    in_evaluation.append(evaluate(params, jax.random.key(1000 + seed)))
  return {
    'frames_per_second': UPDATES * PER_UPDATE / float(np.median(times)),
    'first_call': first_call,
    'training': float(np.mean(in_training)),
    'evaluation': float(np.mean(in_evaluation)),
  }


def measure_apart(whose, algo, num_seeds):
  """`measure` in a process of its own."""
  command = [sys.executable, __file__, algo, '--seeds', str(num_seeds)]
  result = subprocess.run(
    [*command, '--only', whose], check=True, stdout=subprocess.PIPE, text=True
  )
  return json.loads(result.stdout.splitlines()[-1])


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('algos', nargs='*', default=['ppo', 'pqn'])
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--only', choices=['hkgraph', 'navix'])
  args = parser.parse_args()
  if args.only:
    (algo,) = args.algos
    print(json.dumps(measure(args.only, algo, args.seeds)))
    return
  print('| learner | what | hkgraph | navix | against navix |')
  print('| --- | --- | --- | --- | --- |')
  for algo in args.algos:
    mine, other = (
      measure_apart(whose, algo, args.seeds) for whose in ('hkgraph', 'navix')
    )
    for key, (what, form) in WHATS.items():
      m, o = mine[key], other[key]
      if key in ('training', 'evaluation'):
        against = f'{100 * (m - o):+.1f} points'
      else:
        against = f'{o / m if key == "first_call" else m / o:.2f}x'
      cells = form.format(m), form.format(o), against
      print(f'| {algo.upper()} | {what} | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
  main()
