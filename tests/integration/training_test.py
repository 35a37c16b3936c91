"""Full trainings of the built-in tasks, from their seeds to their figures."""

import pathlib
import re
import subprocess
import sys

from absl.testing import absltest, parameterized
import jax
import pytest

from hkgraph.training import evaluator, loop, setup, tasks

_ROOT = pathlib.Path(__file__).parents[2]


def _train(name, graph=None, algorithm='ppo', **kwargs):
  task = tasks.find(name, algorithm)
  return loop.train(
    name,
    task.network() if graph is None else graph,
    task.config,
    total_steps=task.total_steps,
    normalize=task.normalize,
    progress=False,
    **kwargs,
  )


@pytest.mark.slow
class TrainingTest(parameterized.TestCase):
  @parameterized.product(algorithm=('ppo', 'pqn'), seed=list(range(5)))
  def test_cartpole_is_solved(self, algorithm, seed):
    evaluation = _train('cartpole', None, algorithm, seed=seed).evaluation
    self.assertLen(evaluation.returns, 100)
    self.assertGreaterEqual(evaluation.mean, 475)

  @parameterized.parameters(0, 1)
  def test_a_world_model_balances_the_pole(self, seed):
    evaluation = _train('cartpole', None, 'dreamer', seed=seed).evaluation
    self.assertLen(evaluation.returns, 100)
    self.assertGreaterEqual(evaluation.mean, 400)

  def test_a_world_model_recalls_by_a_graph(self):
    command = [sys.executable, 'examples/dreamer_memory.py', '--only', 'graph']
    result = subprocess.run(
      command, check=True, capture_output=True, text=True, cwd=_ROOT
    )
    share = int(re.fullmatch(r'graph: (\d+)% right', result.stdout.strip())[1])
    self.assertGreaterEqual(share, 95)

  @parameterized.parameters('ppo', 'pqn')
  def test_a_delay_path_recalls_the_cue(self, algorithm):
    evaluation = _train(
      'delayed_recall', None, algorithm, eval_episodes=1000
    ).evaluation
    self.assertGreaterEqual(evaluation.mean, 0.95)

  def test_without_delays_and_loops_recall_stays_at_chance(self):
    graph = tasks.delayed_recall_graph(delay=0)
    evaluation = _train('delayed_recall', graph, eval_episodes=1000).evaluation
    # One of four cues; the standard deviation of the mean is 0.014.
    self.assertBetween(evaluation.mean, 0.25 - 4 * 0.014, 0.25 + 4 * 0.014)

  def test_every_body_gets_clearly_better(self):
    trained = _train('bodies', eval_episodes=200).evaluation
    task = tasks.TASKS['bodies']
    env, agent = setup.build(
      'bodies', task.network(), task.config, normalize=task.normalize
    )
    # The state that the training began with.
    init_key, eval_key = jax.random.split(jax.random.key(0))
    _, (start, _) = setup.make_update(agent, env, task.config, init_key)
    evaluate = evaluator.make_evaluator(agent, env, episodes=200)
    before = evaluate(start.params, start.statistics, eval_key)
    for key, mean in trained.mean_by_key.items():
      # Returns are negative distances: a third of what they were.
      self.assertGreater(mean, before.mean_by_key[key] / 3)


if __name__ == '__main__':
  absltest.main()
