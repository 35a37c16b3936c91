"""Our PPO trains bodies of Flax and Equinox on CartPole.

Each body has a batch norm and dropout, which keep the rules of ours: averages
stand still in a rollout and in its loss, and a replay meets the same noise, so
that the first ratio of every update is 1. Their trainable leaves are ordinary
Haiku parameters.

Needs: pip install 'hkgraph[flax,equinox]'
"""

import argparse

import equinox as eqx
from flax import linen, nnx
import jax

import hkgraph as hg
from hkgraph.interop import equinox as hgeqx
from hkgraph.interop import flax as hgflax


class NNXBody(nnx.Module):
  def __init__(self, in_features, *, rngs):
    self.hidden = nnx.Linear(in_features, 64, rngs=rngs)
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.out = nnx.Linear(64, 64, rngs=rngs)

  def __call__(self, x):
    return nnx.tanh(self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x))))))


class LinenBody(linen.Module):
  @linen.compact
  def __call__(self, x, train):
    x = linen.Dense(64)(x)
    x = linen.tanh(linen.BatchNorm(use_running_average=not train)(x))
    x = linen.Dropout(0.1, deterministic=not train)(x)
    return linen.tanh(linen.Dense(64)(x))


class EquinoxBody(eqx.Module):
  hidden: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout
  out: eqx.nn.Linear

  def __init__(self, in_features, *, key):
    keys = jax.random.split(key)
    self.hidden = eqx.nn.Linear(in_features, 64, key=keys[0])
    self.norm = eqx.nn.BatchNorm(64, axis_name='batch', mode='ema')
    self.dropout = eqx.nn.Dropout(0.1)
    self.out = eqx.nn.Linear(64, 64, key=keys[1])

  def __call__(self, x, state, *, key):
    x, state = self.norm(self.hidden(x), state)
    x = self.dropout(jax.nn.tanh(x), key=key)
    return jax.nn.tanh(self.out(x)), state


def equinox_body(in_features, key):
  return eqx.nn.make_with_state(EquinoxBody)(in_features, key=key)


BODIES = {
  'nnx': lambda: hgflax.from_nnx(NNXBody),
  'linen': lambda: hgflax.from_linen(
    LinenBody(), call=lambda module, x: module(x, train=True)
  ),
  'equinox': lambda: hgeqx.from_equinox(equinox_body),
}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='few steps')
  quick = parser.parse_args().quick
  env = hg.envs.make('cartpole')
  for name, body in BODIES.items():
    network = hg.transform(
      lambda obs, body=body: hg.ActorCritic(
        env.action_spec(), body(), hg.MLPEncoder()
      )(obs)
    )
    result = hg.train(
      env,
      network,
      hg.PPOConfig(num_envs=8, num_steps=128, learning_rate=1e-3),
      total_steps=2048 if quick else 100_000,
      eval_episodes=5 if quick else 20,
      progress=False,
    )
    print(f'{name}: mean return {result.evaluation.mean:.1f}')


if __name__ == '__main__':
  main()
