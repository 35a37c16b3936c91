"""What a training refuses before anything is compiled."""

import dataclasses

from absl.testing import absltest, parameterized
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph.graph import builder
from hkgraph.learners import config as config_lib
from hkgraph.training import actions, setup
from tests.learners import fakes

_PQN = config_lib.PQNConfig(num_envs=2, num_minibatches=1, total_updates=5)


class _Acts:
  """The fake environment, with another action spec."""

  def __init__(self, spec):
    self._spec = spec

  def action_spec(self):
    return self._spec

  def step(self, state, action):
    del action  # Of shapes that those episodes do not know.
    return fakes.Episodes().step(state, jnp.int32(0))

  def __getattr__(self, name):
    return getattr(fakes.Episodes(), name)


def _q_graph(**sizes):
  graph = builder.PopulationGraph()
  graph.add_input('sense', 4, input_from='x')
  for name, size in sizes.items():
    graph.add_output(name, size)
    graph.connect('sense', name)
  return graph.finalize()


class BuildTest(parameterized.TestCase):
  def test_the_config_says_which_learner_it_is(self):
    _, agent = setup.build(
      'delayed_recall', _q_graph(q=4), _PQN, normalize=True
    )
    self.assertEmpty(jax.tree.leaves(agent.initial_carry(3)))
    with self.assertRaisesRegex(ValueError, 'policy'):
      setup.build('delayed_recall', _q_graph(q=4), config_lib.PPOConfig())
    with self.assertRaisesRegex(
      TypeError, 'PQNConfig or DreamerConfig, got {}'
    ):
      setup.build('delayed_recall', _q_graph(q=4), {})

  def test_a_graph_that_is_not_finished(self):
    with self.assertRaisesRegex(
      TypeError, r'still being built.*`finalize\(\)`'
    ):
      setup.build('cartpole', builder.PopulationGraph(), config_lib.PPOConfig())

  def test_what_is_no_environment(self):
    with self.assertRaisesRegex(TypeError, 'lacks .*reward_spec'):
      setup.build(object(), _q_graph(q=4), _PQN)

  @parameterized.parameters(
    specs.BoundedArray((2,), np.float32, -1.0, 1.0),
    specs.BoundedArray((), np.int32, 1, 4),
    specs.BoundedArray((3,), np.int32, 0, 4),
  )
  def test_actions_that_are_not_a_number_from_zero_on(self, spec):
    for given in (spec, {'arm': spec, 'leg': specs.DiscreteArray(2)}):
      with self.assertRaisesRegex(
        ValueError, r"'pqn' learns.*the action spec is BoundedArray.*use PPO"
      ):
        network = fakes.memoryless(fakes.action_values)
        setup.build(_Acts(given), network, _PQN)

  def test_bodies_have_continuous_actions(self):
    with self.assertRaisesRegex(ValueError, 'use PPO'):
      setup.build('bodies', _q_graph(q=4), _PQN)

  @parameterized.parameters(
    (specs.DiscreteArray(3), r'must give 3 action values.*got 2'),
    ({'a': specs.DiscreteArray(2)}, r"\{'a': 2\} action values.*got 2"),
  )
  def test_another_number_of_actions(self, spec, message):
    network = fakes.memoryless(fakes.action_values)
    with self.assertRaisesRegex(ValueError, message):
      setup.build(_Acts(spec), network, _PQN)

  def test_the_right_number_of_actions(self):
    network = fakes.memoryless(fakes.action_values)
    for spec in (
      specs.DiscreteArray(2),
      specs.BoundedArray((), np.int64, 0, 1),
    ):
      actions.check_number(network, _Acts(spec))

  def test_outputs_of_ppo_are_left_to_the_learner(self):
    network = fakes.memoryless()
    env, agent = setup.build(fakes.Episodes(), network, _PQN)
    with self.assertRaisesRegex(TypeError, 'is one for PPO'):
      setup.make_update(agent, env, _PQN, jax.random.key(0))

  def test_burn_in_of_a_network_without_carry(self):
    config = dataclasses.replace(_PQN, burn_in=3)
    env, agent = setup.build('delayed_recall', _q_graph(q=4), config)
    with self.assertRaisesRegex(ValueError, '`burn_in` warms a carry'):
      setup.make_update(agent, env, config, jax.random.key(0))


if __name__ == '__main__':
  absltest.main()
