"""Tests of the built-in tasks: that their parts go together."""

import subprocess
import sys

from absl.testing import absltest, parameterized
import jax

from hkgraph import envs
from hkgraph.envs import wrappers
from hkgraph.training import setup, tasks


class TasksTest(parameterized.TestCase):
  @parameterized.parameters(
    *((name, 'ppo') for name in tasks.TASKS),
    ('cartpole', 'pqn'),
    ('delayed_recall', 'pqn'),
  )
  def test_parts_fit(self, name, algorithm):
    task = tasks.find(name, algorithm)
    self.assertEqual((task.name, task.algorithm), (name, algorithm))
    self.assertIn(name, envs.NAMES)
    env, agent = setup.build(
      name, task.network(), task.config, normalize=task.normalize
    )
    batched = wrappers.Vectorize(env, task.config.num_envs)

    def init(key):
      _, timestep = batched.reset(key)
      return agent.init(key, timestep)

    # All shapes are checked, and nothing is computed.
    jax.eval_shape(init, jax.random.key(0))

  def test_all_environments_have_a_task(self):
    self.assertEqual(sorted(tasks.TASKS), sorted(envs.NAMES))
    for name, task in tasks.TASKS.items():
      self.assertIs(tasks.find(name, 'ppo'), task)

  def test_a_task_without_the_algorithm(self):
    with self.assertRaisesRegex(ValueError, "'bodies'.* ppo only.*'pqn'"):
      tasks.find('bodies', 'pqn')

  def test_cartpole_is_the_tutorials_graph(self):
    spec = tasks.TASKS['cartpole'].network()
    self.assertEqual(
      {(c.src, c.dst, c.delay) for c in spec.connections},
      {
        ('state', 'hidden', 0),
        ('hidden', 'hidden', 1),
        ('hidden', 'policy', 0),
        ('hidden', 'value', 0),
      },
    )
    self.assertIs(spec.population('hidden').activation, jax.nn.swish)

  def test_recall_and_its_control_differ_in_the_delay_alone(self):
    spec, control = (tasks.delayed_recall_graph(delay) for delay in (8, 0))
    self.assertEqual(spec.num_parameters, control.num_parameters)
    self.assertEqual([c.delay for c in spec.connections if c.delay], [8])
    self.assertEqual([c.delay for c in control.connections if c.delay], [])

  @parameterized.parameters(2, 3)
  def test_bodies_hear_every_other_one_step_later(self, num_bodies):
    spec = tasks.bodies_graph(num_bodies)
    links = {(c.src, c.dst) for c in spec.connections if c.delay == 1}
    names = [f'hidden_{i}' for i in range(num_bodies)]
    self.assertEqual(links, {(a, b) for a in names for b in names if a != b})

  def test_listing_them_needs_no_jax(self):
    code = (
      'import sys; from hkgraph.training import tasks\n'
      "assert 'jax' not in sys.modules and len(tasks.TASKS) == 3"
    )
    subprocess.run([sys.executable, '-c', code], check=True)


if __name__ == '__main__':
  absltest.main()
