"""What the compiled update is like: its length does not follow the heads."""

import re

from absl.testing import absltest
import jax
import pytest

import hkgraph as hg
from hkgraph.envs import bodies, wrappers
from hkgraph.training import actor

_CONFIG = hg.PPOConfig(
  num_envs=4, num_steps=3, num_minibatches=2, advantage_mode='per_head'
)
# What a distribution, its sample and the loss are made of.
_COSTLY = (
  r' = \S+ (?:exponential|exponential-minus-one|log|log-plus-one|tanh)\('
)


def _policy(env):
  """Each body has an input, a population, a policy and a value of its own."""
  graph = hg.PopulationGraph()
  names = sorted(env.action_spec())
  for name in names:
    graph.add_input(f'{name}_in', 6, input_from=name)
    graph.add_population(f'{name}_h', 4)
    graph.add_output(f'{name}_policy', 4)
    graph.add_output(f'{name}_value', 1)
    graph.connect(f'{name}_in', f'{name}_h')
    graph.connect(f'{name}_h', f'{name}_h', delay=1)
    graph.connect(f'{name}_h', f'{name}_policy')
    graph.connect(f'{name}_h', f'{name}_value')
  return hg.policy_network(
    graph.finalize(),
    env.action_spec(),
    policy={name: f'{name}_policy' for name in names},
    value={name: f'{name}_value' for name in names},
  )


def _program(num_bodies):
  """Rollout and update, compiled."""
  env = bodies.Bodies(num_bodies)
  agent = hg.make_ppo(_policy(env), _CONFIG)
  env = wrappers.EpisodeStatistics(wrappers.vectorize(env, _CONFIG.num_envs))

  def start(key):
    learner_state = agent.init(key, env.reset(key)[1])
    return learner_state, actor.initial_actor_state(agent, env, key)

  def update(learner_state, actor_state):
    actor_state, trajectory, _ = actor.rollout(
      agent, env, learner_state, actor_state, _CONFIG.num_steps
    )
    return agent.update(learner_state, trajectory), actor_state

  states = jax.eval_shape(start, jax.random.key(0))
  return jax.jit(update).lower(*states).compile().as_text()


class ManyHeadsTest(absltest.TestCase):
  @pytest.mark.heavy
  def test_all_heads_are_computed_together(self):
    few, many = (_program(n) for n in (2, 6))
    costly = [len(re.findall(_COSTLY, text)) for text in (few, many)]
    self.assertGreater(costly[0], 10)
    self.assertLess(costly[1], 1.2 * costly[0])


if __name__ == '__main__':
  absltest.main()
