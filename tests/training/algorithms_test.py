"""Which learner a config asks for, and what each takes as a network."""

import dataclasses
import subprocess
import sys

from absl.testing import absltest, parameterized
from dm_env import specs
import haiku as hk
import jax
import numpy as np

from hkgraph import envs
from hkgraph.graph import builder
from hkgraph.learners import config as config_lib
from hkgraph.learners import dreamer, dreamer_config
from hkgraph.modules import history
from hkgraph.training import algorithms
from tests.learners import fakes

DREAMER = dreamer_config.DreamerConfig(
  num_envs=2,
  hidden_size=4,
  recurrent_size=6,
  num_latents=2,
  num_classes=3,
  num_bins=5,
)


class _Rewards:
  """The fake environment, with a reward for each of two keys."""

  def reward_spec(self):
    return dict.fromkeys('ab', specs.Array((), np.float32))

  def __getattr__(self, name):
    return getattr(fakes.Episodes(), name)


def _memory():
  graph = builder.PopulationGraph()
  graph.add_input('sense', 5, input_from='x')
  graph.add_output('out', 4)
  graph.connect('sense', 'out', delay=2)
  return graph.finalize()


def _make(network, env=None, config=DREAMER, normalize=False):
  env = env or envs.make('delayed_recall')
  return algorithms.of(config).make(env, network, config, normalize)


class OfTest(parameterized.TestCase):
  @parameterized.parameters(
    (config_lib.PPOConfig(), 'ppo'),
    (config_lib.PQNConfig(), 'pqn'),
    (DREAMER, 'dreamer'),
  )
  def test_the_config_tells(self, config, name):
    self.assertEqual(algorithms.of(config).name, name)
    self.assertIs(algorithms.ALGORITHMS[name].config, type(config))

  def test_something_else(self):
    with self.assertRaisesRegex(
      TypeError, 'a PPOConfig or PQNConfig or DreamerConfig, got 3'
    ):
      algorithms.of(3)

  def test_is_read_without_jax(self):
    code = (
      'import sys; from hkgraph.training import algorithms;'
      'sys.exit("jax" in sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


class DreamerTest(parameterized.TestCase):
  def _core(self, agent):
    return agent.initial_carry(3)['state'].core

  def test_memories_by_name(self):
    agent = _make('auto')
    self.assertIsInstance(agent, dreamer.DreamerAgent)
    self.assertEqual(self._core(agent).shape, (3, 6))
    self.assertEqual(self._core(_make('gru')).shape, (3, 6))
    env = envs.make('delayed_recall')
    _, timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    names = {}
    for network in ('auto', 'gru'):
      state = jax.eval_shape(_make(network).init, jax.random.key(0), timestep)
      names[network] = ' '.join(state.params['world_model'])
    self.assertIn('gated_cell', names['auto'])
    self.assertNotIn('gated_cell', names['gru'])
    self.assertIn('gru', names['gru'])

  def test_a_graph_is_a_memory(self):
    (state,) = self._core(_make(_memory())).values()
    self.assertIsInstance(state, history.History)
    self.assertEqual(history.length_of(state), 2)

  def test_a_function_makes_a_core(self):
    self.assertEqual(self._core(_make(lambda: hk.GRU(7))).shape, (3, 7))

  @parameterized.parameters(
    ('mlp', ValueError, r"'auto' for that.*'gru' for an hk.GRU.*got 'mlp'"),
    (64, TypeError, r'lambda: hk.GRU\(200\)`, got 64'),
  )
  def test_no_memory(self, network, error, message):
    with self.assertRaisesRegex(error, message):
      _make(network)

  def test_a_network_of_ppo(self):
    with self.assertRaisesRegex(TypeError, '`core` must be a finished graph'):
      _make(fakes.memoryless())

  def test_normalize(self):
    with self.assertRaisesRegex(ValueError, 'symlog, so `normalize`'):
      _make('auto', normalize=True)

  def test_several_rewards(self):
    with self.assertRaisesRegex(
      ValueError, r"one reward.*\['a', 'b'\].*train with PPO"
    ):
      _make('auto', env=_Rewards())

  def test_sizes_come_from_the_config(self):
    config = dataclasses.replace(DREAMER, recurrent_size=8)
    self.assertEqual(self._core(_make('gru', config=config)).shape, (3, 8))


if __name__ == '__main__':
  absltest.main()
