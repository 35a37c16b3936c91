"""Tests of the training loop, with a network of two numbers."""

import dataclasses
import json
import os
import pathlib
import signal
import tempfile
import unittest

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.envs import protocol, wrappers
from hkgraph.graph import builder
from hkgraph.learners import config as config_lib
from hkgraph.training import checkpoint, loop, run_folder, setup
from tests.learners import fakes

_CONFIG = config_lib.PPOConfig(
  num_envs=3, num_steps=100, num_minibatches=1, num_epochs=1
)


def setUpModule():
  # Most trainings here are the same program: it is compiled once.
  folder = unittest.enterModuleContext(tempfile.TemporaryDirectory())
  for name, value in {
    'jax_compilation_cache_dir': folder,
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }.items():
    old = getattr(jax.config, name)
    unittest.addModuleCleanup(jax.config.update, name, old)
    jax.config.update(name, value)


class _Rows:
  """A logger that may do something at each row."""

  def __init__(self, action=None):
    self.rows = []
    self.closed = 0
    self._action = action

  def write(self, row):
    self.rows.append(row)
    if self._action:
      self._action(row)

  def close(self):
    self.closed += 1


class _Breaks:
  """Shows `{'x': ..., 'arm': ...}`; the arm is NaN from row 250 on."""

  def reset(self, key):
    observation = {'x': jax.random.normal(key), 'arm': jnp.float32(0)}
    return jnp.int32(0), protocol.restart(self.reward_spec(), observation)

  def step(self, state, action):
    state = state + 1
    observation = {
      'x': jnp.sin(state.astype(jnp.float32)),
      'arm': jnp.where(state >= 250, jnp.nan, 0.0),
    }
    reward = action.astype(jnp.float32)
    return state, protocol.transition(reward, observation, jnp.bool_(False))

  def observation_spec(self):
    return dict.fromkeys(('x', 'arm'), specs.Array((), np.float32))

  def action_spec(self):
    return specs.DiscreteArray(2)

  def reward_spec(self):
    return specs.Array((), np.float32)

  def discount_spec(self):
    return protocol.discount_spec()


def _train(env=None, network=None, config=_CONFIG, **kwargs):
  kwargs = {'total_steps': 600, 'progress': False, 'eval_episodes': 0} | kwargs
  env = fakes.Episodes() if env is None else env
  network = fakes.memoryless() if network is None else network
  return loop.train(env, network, config, **kwargs)


def _sees_x():
  return fakes.memoryless(lambda p, x: fakes.policy_value(p, x['x']))


class LoopTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    # Also where the tests run in the background of a shell, which ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, handler)

  def test_a_started_update_is_finished(self):
    # 1000 steps at 300 per update are 4 updates of 1200 steps.
    rows = _Rows()
    result = _train(total_steps=1000, logger=rows)
    self.assertEqual(result.steps, 1200)
    self.assertEqual([r['steps'] for r in rows.rows], [300, 600, 900, 1200])
    self.assertEqual(result.metrics, rows.rows)
    self.assertEqual(result.learner_state.num_updates, 4)
    self.assertEqual(rows.closed, 1)
    self.assertFalse(result.interrupted)

  @pytest.mark.heavy
  def test_the_schedule_ends_with_the_training(self):
    # Two updates of three steps: Adam's rate falls to 0 after six.
    config = dataclasses.replace(
      _CONFIG, num_epochs=3, schedule='linear', total_updates=99
    )
    result = _train(total_steps=301, config=config)
    env = fakes.Episodes()
    update, (fresh, actor_state) = setup.make_update(
      result.agent, env, config, jax.random.key(0)
    )
    rates = {}
    for name, state in {'fresh': fresh, 'ended': result.learner_state}.items():
      state, before = jax.tree.map(jnp.copy, (state, state))
      after, _ = update((state, jax.tree.map(jnp.copy, actor_state)))[0]
      rates[name] = abs(after.params['theta'] - before.params['theta'])
    self.assertGreater(rates['fresh'], 0)
    self.assertEqual(rates['ended'], 0)

  @pytest.mark.heavy
  def test_the_same_seed_gives_the_same_training(self):
    a, b, c = (_train(seed=seed).learner_state.params for seed in (1, 1, 2))
    chex.assert_trees_all_equal(a, b)
    self.assertNotEqual(float(a['theta']), float(c['theta']))

  @pytest.mark.heavy
  def test_learns_and_evaluates(self):
    # Action 1 pays x: the mode takes it where theta x is positive.
    config = dataclasses.replace(_CONFIG, learning_rate=0.1)
    result = _train(total_steps=6000, config=config, eval_episodes=7)
    self.assertGreater(float(result.learner_state.params['theta']), 1.0)
    self.assertLen(result.evaluation.returns, 7)
    self.assertTrue(result.evaluation.deterministic)
    # Episodes have 3.5 transitions, each worth E[max(x, 0)] = 0.4 at best.
    self.assertGreater(result.evaluation.mean, 0)

  @pytest.mark.heavy
  def test_compiles_once(self):
    env, agent = setup.build(fakes.Episodes(), fakes.memoryless(), _CONFIG)
    update, state = setup.make_update(agent, env, _CONFIG, jax.random.key(0))
    state, _ = update(state)
    with jax.no_tracing():
      for _ in range(2):
        state, metrics = update(state)
    self.assertEqual(update._cache_size(), 1)
    self.assertEqual(state[0].num_updates, 3)
    self.assertGreater(metrics['episodes'], 0)

  def test_the_state_is_given_away(self):
    env, agent = setup.build(fakes.Episodes(), fakes.memoryless(), _CONFIG)
    update, state = setup.make_update(agent, env, _CONFIG, jax.random.key(0))
    update(state)
    self.assertTrue(state[0].params['theta'].is_deleted())

  @pytest.mark.heavy
  def test_the_run_folder_holds_everything(self):
    path = self.dir / 'deep' / 'run'
    result = _train(run_dir=path, eval_episodes=2, seed=5)
    self.assertEqual(result.run_dir, path)
    self.assertEqual(
      sorted(p.name for p in path.iterdir()),
      [
        'config.json',
        'evaluation.json',
        'learning_curve.png',
        'metrics.jsonl',
        'weights.npz',
      ],
    )
    lines = (path / 'metrics.jsonl').read_text().splitlines()
    self.assertEqual([json.loads(x)['steps'] for x in lines], [300, 600])
    evaluation = json.loads((path / 'evaluation.json').read_text())
    self.assertEqual(evaluation, result.evaluation.to_dict())
    state = result.learner_state
    params, _ = run_folder.load_weights(path, state.params, state.statistics)
    chex.assert_trees_all_equal(params, state.params)
    metadata = checkpoint.read_metadata(path / 'weights.npz')
    self.assertEqual(metadata, {'graph': None, 'steps': 600, 'updates': 2})
    description = run_folder.read_description(path)
    self.assertEqual(description.config.total_updates, 2)
    self.assertEqual((description.seed, description.total_steps), (5, 600))

  def test_a_used_folder_is_refused_before_anything_runs(self):
    (self.dir / 'note').touch()
    rows = _Rows()
    with self.assertRaisesRegex(FileExistsError, 'another `run_dir`'):
      _train(run_dir=self.dir, logger=rows)
    self.assertEmpty(rows.rows)
    self.assertEqual([p.name for p in self.dir.iterdir()], ['note'])

  @pytest.mark.heavy
  def test_nan_in_an_observation_stops_with_the_last_good_state(self):
    # Rows 0..99, 100..199 are whole; the third update meets row 250.
    rows = _Rows()
    with self.assertRaisesRegex(
      loop.NonFiniteError, r'observation/arm .*in update 3.*weights\.npz'
    ) as caught:
      _train(
        _Breaks(),
        _sees_x(),
        total_steps=3000,
        run_dir=self.dir / 'run',
        logger=rows,
      )
    self.assertIsInstance(caught.exception, FloatingPointError)
    good = _train(_Breaks(), _sees_x(), total_steps=600).learner_state
    result = caught.exception.result
    chex.assert_trees_all_equal(result.learner_state.params, good.params)
    self.assertEqual(result.learner_state.num_updates, 2)
    saved, _ = run_folder.load_weights(self.dir / 'run', good.params, {})
    chex.assert_trees_all_equal(saved, good.params)
    # At most the update that was under way is added.
    self.assertBetween(len(rows.rows), 3, 4)
    self.assertEqual(rows.closed, 1)

  def test_ctrl_c_keeps_what_was_reached(self):
    def press(row):
      if row['update'] == 2:
        os.kill(os.getpid(), signal.SIGINT)

    rows = _Rows(press)
    result = _train(
      total_steps=300 * 50,
      logger=rows,
      run_dir=self.dir / 'run',
      eval_episodes=3,
    )
    self.assertTrue(result.interrupted)
    self.assertIsNone(result.evaluation)
    self.assertBetween(len(rows.rows), 2, 4)
    self.assertEqual(result.steps, 300 * len(rows.rows))
    self.assertEqual(result.learner_state.num_updates, len(rows.rows))
    self.assertEqual(rows.closed, 1)
    state = result.learner_state
    saved, _ = run_folder.load_weights(self.dir / 'run', state.params, {})
    chex.assert_trees_all_equal(saved, state.params)
    handler = signal.getsignal(signal.SIGINT)
    self.assertIs(handler, signal.default_int_handler)

  @pytest.mark.heavy
  def test_a_second_ctrl_c_raises(self):
    def press(row):
      for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)

    rows = _Rows(press)
    with self.assertRaises(KeyboardInterrupt):
      _train(logger=rows)
    self.assertEqual(rows.closed, 1)

  @parameterized.parameters(
    (dict(total_steps=0), 'total_steps'),
    (dict(total_steps=1.5), 'total_steps'),
    (dict(eval_episodes=-1), 'eval_episodes'),
    (dict(seed=2**40), 'seed'),
    (dict(env='cartpol'), "did you mean 'cartpole'"),
    (dict(env=wrappers.Vectorize(fakes.Episodes(), 2)), 'single environment'),
  )
  def test_wrong_arguments(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      _train(**kwargs)


class GraphTest(parameterized.TestCase):
  """Graphs in place of networks, and run folders that can be rebuilt."""

  @pytest.mark.heavy
  def test_a_run_of_a_graph_can_be_rebuilt(self):
    graph = builder.PopulationGraph()
    graph.add_input('sense', 4, input_from='x')
    graph.add_output('policy', 4)
    graph.add_output('value', 1)
    graph.connect('sense', 'policy', delay=2)
    graph.connect('sense', 'value')
    spec = graph.finalize()
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'run')
    result = _train(
      'delayed_recall', spec, run_dir=path, normalize=True, total_steps=300
    )
    for name in ('graph.json', 'graph.png'):
      self.assertGreater((path / name).stat().st_size, 0)
    description = run_folder.read_description(path)
    self.assertEqual(description.graph, spec)
    self.assertTrue(description.normalize)
    metadata = checkpoint.read_metadata(path / 'weights.npz')
    self.assertEqual(metadata['graph'], spec.digest())

    env, agent, params, statistics = run_folder.restore(path)
    state = result.learner_state
    chex.assert_trees_all_equal(params, state.params)
    chex.assert_trees_all_equal(statistics, state.statistics)
    self.assertEqual(env.action_spec().num_values, 4)
    self.assertNotEmpty(jax.tree.leaves(agent.initial_carry(2)))

  @parameterized.parameters('graph', 'mlp', 'gru')
  @pytest.mark.heavy
  def test_a_run_of_pqn_can_be_rebuilt(self, kind):
    graph = builder.PopulationGraph()
    graph.add_input('sense', 4, input_from='x')
    graph.add_output('q', 4)
    graph.connect('sense', 'q', delay=2)
    network = graph.finalize() if kind == 'graph' else kind
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'run')
    config = config_lib.PQNConfig(
      num_envs=4, num_steps=10, num_minibatches=2, num_epochs=1
    )
    result = _train(
      *('delayed_recall', network, config),
      total_steps=200,
      run_dir=path,
      normalize=True,
      eval_episodes=4,
    )
    epsilons = [row['epsilon'] for row in result.metrics]
    np.testing.assert_allclose(epsilons, [1.0, *[0.05] * 4], rtol=1e-6)
    for row in result.metrics:
      self.assertLess(row['value_deviation'], 1e-5)
    self.assertTrue((path / 'learning_curve.png').exists())
    self.assertEqual((path / 'graph.json').exists(), kind == 'graph')

    _, agent, params, statistics = run_folder.restore(path)
    state = result.learner_state
    chex.assert_trees_all_equal(params, state.params)
    chex.assert_trees_all_equal(statistics, state.statistics)
    carry = bool(jax.tree.leaves(agent.initial_carry(2)))
    self.assertEqual(carry, kind != 'mlp')

  def test_nothing_is_left_of_a_training_that_cannot_begin(self):
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'run')
    for env, network in (('cartpol', 'mlp'), ('cartpole', 'mpl')):
      with self.assertRaisesRegex(ValueError, 'did you mean'):
        _train(env, network, run_dir=path)
    self.assertFalse(path.exists())

  def test_a_run_made_by_hand_says_so(self):
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'run')
    description = run_folder.Description(
      environment=None,
      graph=None,
      normalize=False,
      config=_CONFIG,
      total_steps=1,
      seed=0,
    )
    run_folder.create(path)
    run_folder.write_description(path, description)
    self.assertEqual(run_folder.read_description(path), description)
    with self.assertRaisesRegex(ValueError, 'made by hand'):
      run_folder.restore(path)
    with self.assertRaisesRegex(FileNotFoundError, 'no run in'):
      run_folder.restore(path / 'nothing')
    (path / 'config.json').write_text('{"config": {}')
    with self.assertRaisesRegex(ValueError, 'damaged'):
      run_folder.restore(path)

  def test_a_missing_value_output_is_named(self):
    graph = builder.PopulationGraph()
    graph.add_input('sense', 4, input_from='x')
    graph.add_output('policy', 4)
    graph.connect('sense', 'policy')
    with self.assertRaisesRegex(ValueError, 'value'):
      _train('delayed_recall', graph.finalize())


if __name__ == '__main__':
  absltest.main()
