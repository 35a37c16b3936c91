"""Compares an update of DreamerV3 with navix's own, in one run.

  pip install -e '.[bench]' && python examples/benchmarks/dreamer.py

Needs Python 3.12. Both learn from rows of Navix-Empty-5x5-v0's symbolic
observation, with navix's sizes: 200 hidden units in two layers (in one for
hkgraph's heads of reward and continuation, as in the paper), a GRU of 200
units, 8 latents of 8 classes, 41 bins, 64 sequences of 32 rows, a horizon of
15. hkgraph has layer norms where navix has none, and imagines from 32 rows of
a sequence where navix does from 31.

Prints milliseconds of a full update (the median of several): the batch is
drawn, then world model, actor and critic make a step each. navix has a function
for each of the three, which are compiled and timed one by one and added up, as
its `update` scans them one by one; hkgraph has one. The first call includes all
that is compiled for it. And seconds until a whole training is compiled as one
program, which is how navix runs its agents: networks, environments, acting,
replay and updates. Each has a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time

from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import hkgraph as hg
from hkgraph.envs import wrappers
from hkgraph.training import actor

ENVIRONMENT, SHAPE, NUM_ACTIONS = 'Navix-Empty-5x5-v0', (5, 5, 3), 7
NUM_STEPS, NUM_ENVS = 128, 16
WHATS = {
  'update': ('full update', '{:,.0f} ms', 1e3),
  'first_call': ('its first call', '{:.1f} s', 1),
  'training': ('compilation of a whole training', '{:.1f} s', 1),
}
NUM_UPDATES = 48
MAKE = hg.make_dreamer  # Imported before anything is timed.


def our_agent(dtype):
  config = hg.DreamerConfig(
    num_envs=NUM_ENVS,
    num_steps=NUM_STEPS,
    train_ratio=1,
    batch_size=64,
    sequence_length=32,
    burn_in=0,
    horizon=15,
    capacity=20 * NUM_STEPS * NUM_ENVS,
    hidden_size=200,
    num_layers=2,
    recurrent_size=200,
    num_latents=8,
    num_classes=8,
    num_bins=41,
    dtype=dtype,
  )
  agent = MAKE(
    specs.BoundedArray(SHAPE, np.uint8, 0, 255),
    specs.DiscreteArray(NUM_ACTIONS),
    config,
    core=lambda: hk.GRU(200),
  )
  return agent, config


def our_training(dtype):
  """A training of hkgraph: a function of a key."""
  agent, config = our_agent(dtype)
  env = wrappers.vectorize(hg.envs.make(f'navix:{ENVIRONMENT}'), NUM_ENVS)

  def update(state, _):
    learner, acting = state
    acting, trajectory, _ = actor.rollout(
      agent, env, learner, acting, config.num_steps
    )
    learner, metrics = agent.update(learner, trajectory)
    return (learner, acting), metrics

  def train(key):
    learner_key, actor_key = jax.random.split(key)
    learner = agent.init(learner_key, actor.example_rows(env))
    acting = actor.initial_actor_state(agent, env, actor_key)
    return jax.lax.scan(update, (learner, acting), length=NUM_UPDATES)

  return train


def ours(dtype):
  """The update of hkgraph, as functions of nothing that are called in turn."""
  agent, _ = our_agent(dtype)
  key = jax.random.key(0)
  rows = (NUM_STEPS + 1, NUM_ENVS)
  timestep = hg.TimeStep(
    step_type=jnp.ones(rows, jnp.int32).at[::20].set(0),
    reward=jnp.zeros(rows),
    discount=jnp.ones(rows),
    observation=jax.random.randint(key, (*rows, *SHAPE), 0, 10, jnp.uint8),
  )
  trajectory = hg.Trajectory(
    timestep=timestep,
    action=jax.random.randint(key, (NUM_STEPS, NUM_ENVS), 0, NUM_ACTIONS),
    log_prob=jnp.zeros((NUM_STEPS, NUM_ENVS)),
    value=jnp.zeros(rows),
    carry=(),
  )
  first = jax.tree.map(lambda x: x[0], timestep)
  box = [jax.block_until_ready(jax.jit(agent.init)(key, first))]
  update = jax.jit(agent.update, donate_argnums=0)

  def step():
    box[0], metrics = update(box[0], trajectory)
    jax.block_until_ready(metrics)

  return [step]


def their_agent(**hyperparameters):
  import navix
  from navix import agents
  from navix.agents import dreamer

  env = navix.make(ENVIRONMENT, observation_fn=navix.observations.symbolic)
  sizes = agents.DreamerHparams(**hyperparameters)
  world = dreamer.WorldModel(int(np.prod(SHAPE)), NUM_ACTIONS, sizes)
  actor = dreamer.Actor(NUM_ACTIONS, sizes.hidden_size)
  critic = dreamer.Critic(sizes.hidden_size, sizes.bins)
  return agents.Dreamer(sizes, env, world, actor, critic)


def their_training(dtype):
  """A training of navix: a function of a key."""
  del dtype
  return their_agent(budget=NUM_UPDATES * NUM_STEPS * NUM_ENVS).train


def theirs(dtype):
  """The three steps of navix."""
  del dtype
  from navix.agents import dreamer

  agent = their_agent()
  parts = agent.hparams, agent.env, agent.world, agent.actor, agent.critic
  key = jax.random.key(0)
  state = jax.block_until_ready(
    jax.jit(lambda key: dreamer.DreamerTrainState.create(key, *parts))(key)
  )
  shape = state.replay.obs.shape
  replay = state.replay.replace(
    obs=jax.random.randint(key, shape, 0, 10, state.replay.obs.dtype),
    size=jnp.int32(shape[0]),
  )

  @jax.jit
  def model_step(model, key):
    batch_key, loss_key = jax.random.split(key)
    batch = agent._sample_batch(batch_key, replay)
    grads, (features, _) = jax.grad(
      lambda p: agent._model_loss(p, *batch, loss_key), has_aux=True
    )(model.params)
    return model.apply_gradients(grads=grads), features[:, :-1].reshape(
      -1, features.shape[-1]
    )

  @jax.jit
  def actor_step(model, start, key):
    grads, _ = jax.grad(
      lambda p: agent._actor_loss(
        p, model.params, state.critic.params, start, jnp.float32(1), key
      ),
      has_aux=True,
    )(state.actor.params)
    return state.actor.apply_gradients(grads=grads)

  @jax.jit
  def critic_step(model, start, key):
    slow = state.slow_critic_params
    grads, _ = jax.grad(
      lambda p: agent._critic_loss(
        p, model.params, state.actor.params, slow, start, key
      ),
      has_aux=True,
    )(state.critic.params)
    new = state.critic.apply_gradients(grads=grads)
    return new, jax.tree.map(lambda s, x: 0.98 * s + 0.02 * x, slow, new.params)

  box = []

  def first():
    box[:] = jax.block_until_ready(model_step(state.model, key))

  def second():
    jax.block_until_ready(actor_step(*box, key))

  def third():
    jax.block_until_ready(critic_step(*box, key))

  return [first, second, third]


def measure(whose, dtype, repeats):
  """Seconds of a first and of a later full update."""
  make_steps, make_training = {
    'hkgraph': (ours, our_training),
    'navix': (theirs, their_training),
  }[whose]
  steps = make_steps(dtype)

  def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start

  first_call = sum(map(seconds, steps))
  times = [sum(map(seconds, steps)) for _ in range(repeats)]
  jax.clear_caches()
  start = time.perf_counter()
  jax.jit(make_training(dtype)).lower(jax.random.key(0)).compile()
  return {
    'first_call': first_call,
    'update': float(np.median(times)),
    'training': time.perf_counter() - start,
  }


def measure_apart(whose, dtype, repeats):
  """`measure` in a process of its own."""
  command = [sys.executable, __file__, '--dtype', dtype]
  result = subprocess.run(
    [*command, '--repeats', str(repeats), '--only', whose],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  return json.loads(result.stdout.splitlines()[-1])


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--dtype', default='float32', help='of hkgraph')
  parser.add_argument('--repeats', type=int, default=9)
  parser.add_argument('--only', choices=['hkgraph', 'navix'])
  args = parser.parse_args()
  if args.only:
    print(json.dumps(measure(args.only, args.dtype, args.repeats)))
    return
  mine, other = (
    measure_apart(whose, args.dtype, args.repeats)
    for whose in ('hkgraph', 'navix')
  )
  print('| what | hkgraph | navix | ratio |')
  print('| --- | --- | --- | --- |')
  for key, (what, form, unit) in WHATS.items():
    cells = form.format(unit * mine[key]), form.format(unit * other[key])
    print(f'| {what} | {" | ".join(cells)} | {other[key] / mine[key]:.2f}x |')


if __name__ == '__main__':
  main()
