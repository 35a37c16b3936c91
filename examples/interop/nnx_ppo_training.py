"""nnx-ppo trains a graph of ours, whose delay is what the task asks for.

A cue is shown in every step, and the right action is the cue of two steps ago:
without the delayed connection one can but guess. The weights then go back, and
the pure functions act with them.
"""

import argparse

import chex
from dm_env import specs
from flax import nnx
import jax
import jax.numpy as jnp
from nnx_ppo.algorithms import config as config_lib
from nnx_ppo.algorithms import ppo

import hkgraph as hg
from hkgraph.interop import nnx as hgnnx

LAG, NUM_CUES, EPISODE = 2, 3, 12


@chex.dataclass(frozen=True, mappable_dataclass=False)
class State:
  """The fields that nnx-ppo reads, and what the environment keeps."""

  obs: dict[str, jax.Array]
  reward: jax.Array
  done: jax.Array
  info: dict[str, jax.Array]
  metrics: dict[str, jax.Array]
  cues: jax.Array  # The last ones, the newest first.
  time: jax.Array
  key: jax.Array


class RecallEnv:
  """Pays for the cue of `LAG` steps ago; an episode is cut, it never ends."""

  def reset(self, key: jax.Array) -> State:
    cues = jnp.zeros(LAG + 1, jnp.int32)
    return self._state(key, cues, jnp.int32(0), jnp.float32(0))

  def step(self, state: State, action: jax.Array) -> State:
    reward = jnp.float32(action == state.cues[-1])
    return self._state(state.key, state.cues, state.time + 1, reward)

  def _state(self, key, cues, time, reward) -> State:
    key, cue_key = jax.random.split(key)
    cue = jax.random.randint(cue_key, (1,), 0, NUM_CUES)
    cues = jnp.concatenate([cue, cues[:-1]])
    cut = time >= EPISODE
    return State(
      obs={'cue': jax.nn.one_hot(cues[0], NUM_CUES)},
      reward=reward,
      done=jnp.float32(cut),
      info={'truncated': cut},
      metrics={},
      cues=cues,
      time=time,
      key=key,
    )


def make_network(delay: int) -> hg.Network:
  graph = hg.PopulationGraph()
  graph.add_input('eye', NUM_CUES, input_from='cue')
  graph.add_population('hidden', 32, activation='jax.nn.swish')
  graph.add_output('policy', NUM_CUES)
  graph.add_output('value', 1)
  graph.connect('eye', 'hidden', delay=delay)
  graph.connect('hidden', 'policy')
  graph.connect('hidden', 'value')
  actions = specs.DiscreteArray(NUM_CUES)
  return hg.policy_network(graph.finalize(), actions, normalize=True)


def train(network: hg.Network, num_updates: int) -> hgnnx.NNXNetwork:
  cue = jax.ShapeDtypeStruct((1, NUM_CUES), jnp.float32)
  module = hgnnx.NNXNetwork(
    network, {'cue': cue}, rngs=nnx.Rngs(0), entropy_cost=1e-3
  )
  config = config_lib.TrainConfig(
    ppo=config_lib.PPOConfig(
      n_envs=32,
      rollout_length=24,
      total_steps=32 * 24 * num_updates,
      learning_rate=1e-2,
    ),
    eval=config_lib.EvalConfig(enabled=False),
    seed=0,
  )
  ppo.train_ppo(RecallEnv(), module, config)
  return module


def evaluate(network: hg.Network, params, statistics) -> float:
  """Share of right actions, by the pure functions alone."""
  env, num_envs = RecallEnv(), 64

  def step(carry, is_first):
    env_state, state = carry
    first = jnp.full(num_envs, is_first)
    output, state = network.apply(params, state, None, env_state.obs, first)
    env_state = jax.vmap(env.step)(env_state, output.policy.mode())
    return (env_state, state), env_state.reward

  env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), num_envs))
  state = hg.NetworkState(
    carry=network.initial_carry(num_envs), statistics=statistics
  )
  is_first = jnp.arange(EPISODE) == 0
  _, rewards = jax.lax.scan(step, (env_state, state), is_first)
  # Before `LAG` steps there is no cue to recall.
  return float(rewards[LAG:].mean())


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='few updates')
  num_updates = 3 if parser.parse_args().quick else 40
  for delay in (LAG, 0):
    network = make_network(delay)
    module = train(network, num_updates)
    share = evaluate(network, module.params, module.statistics)
    print(f'delay {delay}: {share:.0%} right')


if __name__ == '__main__':
  main()
