"""Times a whole PPO update beside nnx-ppo, in one run.

  pip install -e '.[bench]' && python examples/benchmarks/ppo_update.py

Both act for 20 steps in 256 environments of the same kind, then learn in 4
epochs of 4 minibatches, in float32; one call does all of it. Every body part
has an observation, an action of two numbers, a reward and a value of its own.
Prints seconds of the first call, with everything that it compiles, and of a
later one.
"""

import argparse
import dataclasses
import time
from typing import Any

import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

import hkgraph as hg
from hkgraph.envs import protocol
from hkgraph.training import setup
import workloads

ENVS, STEPS, EPOCHS, MINIBATCHES = 256, 20, 4, 4
LENGTH = 50  # Steps of an episode.


@dataclasses.dataclass(frozen=True)
class Parts:
  """What belongs together: `(name, observation, policy, value)` of each part,
  and the size of an observation."""

  names: tuple[tuple[str, str, str, str], ...]
  size: int

  def move(self, observations, action):
    """The observations drift, pushed by the actions."""
    return {
      key: 0.9 * observations[key]
      + 0.1 * jnp.pad(action[name], (0, self.size - 2))
      for name, key, *_ in self.names
    }

  def start(self, key):
    # Drawn at once: it is not the environment that is timed.
    x = jax.random.normal(key, (len(self.names), self.size))
    return {name[1]: row for name, row in zip(self.names, x, strict=True)}

  def reward(self, observations):
    return {
      name: -jnp.mean(jnp.square(observations[key]))
      for name, key, *_ in self.names
    }


def parts_of(workload_name):
  if workload_name == 'tutorial':
    return Parts((('part', 'x', 'action_params', 'value'),), 8)
  names = tuple((f'p{i}', f'o{i}', f'a{i}', f'v{i}') for i in range(24))
  return Parts(names, 16)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  observations: Any
  steps: jax.Array


class Environment:
  """The environment as hkgraph takes it."""

  def __init__(self, parts):
    self.parts = parts

  def reset(self, key):
    observations = self.parts.start(key)
    state = State(observations=observations, steps=jnp.int32(0))
    return state, protocol.restart(self.reward_spec(), observations)

  def step(self, state, action):
    observations = self.parts.move(state.observations, action)
    state = State(observations=observations, steps=state.steps + 1)
    reward = self.parts.reward(observations)
    return state, protocol.transition(
      reward, observations, state.steps >= LENGTH
    )

  def observation_spec(self):
    shape = (self.parts.size,)
    return {n[1]: specs.Array(shape, np.float32) for n in self.parts.names}

  def action_spec(self):
    spec = specs.BoundedArray((2,), np.float32, -1.0, 1.0)
    return {n[0]: spec for n in self.parts.names}

  def reward_spec(self):
    return {n[0]: specs.Array((), np.float32) for n in self.parts.names}

  def discount_spec(self):
    return protocol.discount_spec()


def ours(name):
  """A function that makes one update, and waits for it."""
  parts = parts_of(name)
  env = Environment(parts)
  network = hg.policy_network(
    workloads.to_spec(workloads.WORKLOADS[name]()),
    env.action_spec(),
    policy={n[0]: n[2] for n in parts.names},
    value={n[0]: n[3] for n in parts.names},
  )
  config = hg.PPOConfig(
    num_envs=ENVS,
    num_steps=STEPS,
    num_epochs=EPOCHS,
    num_minibatches=MINIBATCHES,
    advantage_mode='per_head',
    learning_rate=1e-4,
    max_grad_norm=None,
  )
  agent = hg.make_ppo(network, config)
  update, state = setup.make_update(agent, env, config, jax.random.key(0))

  def call():
    nonlocal state
    state, metrics = jax.block_until_ready(update(state))
    return metrics

  return call


def theirs(name):
  """The same of nnx-ppo."""
  from flax import nnx
  from nnx_ppo.algorithms import ppo
  from nnx_ppo.algorithms.types import LoggingLevel
  from nnx_ppo.networks import adapter, containers, sampling_layers, utils
  from nnx_ppo.networks.graph import PopulationGraph

  parts = parts_of(name)
  graph = workloads.to_peer(workloads.WORKLOADS[name](), PopulationGraph, nnx)
  rngs = nnx.Rngs(1)
  sampler = sampling_layers.NormalTanhSampler
  network = containers.Sequential(
    [
      graph,
      adapter.PPOAdapter(
        action=containers.Sequential(
          [
            utils.Filter({n[0]: n[2] for n in parts.names}),
            utils.Map({n[0]: sampler(rngs, 1e-2) for n in parts.names}),
          ]
        ),
        value=utils.Filter({n[0]: n[3] for n in parts.names}),
      ),
    ]
  )

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class PeerState:
    obs: Any
    reward: Any
    done: Any
    info: Any
    metrics: Any

  def state_of(observations, steps):
    done = (steps >= LENGTH).astype(jnp.float32)
    reward = parts.reward(observations)
    return PeerState(observations, reward, done, {'steps': steps}, {})

  class PeerEnvironment:
    def reset(self, key):
      return state_of(parts.start(key), jnp.int32(0))

    def step(self, state, action):
      observations = parts.move(state.obs, action)
      return state_of(observations, state.info['steps'] + 1)

  env = PeerEnvironment()
  state = ppo.new_training_state(env, network, ENVS, 0, 1e-4)
  step = nnx.jit(
    ppo.ppo_step, static_argnums=(0, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13)
  )
  options = ENVS, STEPS, 0.95, 0.99, 0.2, True, False, EPOCHS, MINIBATCHES, 1.0
  levels = LoggingLevel.LOSSES, None

  def call():
    nonlocal state
    state, metrics = step(env, state, *options, *levels)
    jax.block_until_ready((metrics, state.steps_taken))
    return metrics

  return call


def seconds(call, repeats=7):
  """Seconds of the first call, and the median of later ones."""
  times = []
  for _ in range(repeats + 2):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return times[0], float(np.median(times[2:]))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('workloads', nargs='*', default=['tutorial', 'body'])
  parser.add_argument('--no-peer', action='store_true')
  args = parser.parse_args()
  print('| workload | what | hkgraph | nnx-ppo | ratio |')
  print('| --- | --- | --- | --- | --- |')
  for name in args.workloads:
    mine = seconds(ours(name))
    other = (None, None) if args.no_peer else seconds(theirs(name))
    whats = 'first PPO update, with compilation', 'later PPO update'
    for what, m, o in zip(whats, mine, other, strict=True):
      cells = (f'{o:.3f} s', f'{o / m:.1f}x') if o else ('-', '-')
      print(f'| {name} | {what} | {m:.3f} s | {cells[0]} | {cells[1]} |')


if __name__ == '__main__':
  main()
