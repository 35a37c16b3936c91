"""Run folders that somebody has been at."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from hkgraph.learners import config
from hkgraph.training import run_folder, tasks


class DamageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name)
    self.description = description = run_folder.Description(
      environment='cartpole',
      graph=tasks.TASKS['cartpole'].network(),
      normalize=True,
      config=config.PPOConfig(),
      total_steps=64,
      seed=3,
    )
    run_folder.write_description(self.path, description)
    self.assertEqual(run_folder.read_description(self.path), description)

  @parameterized.parameters(
    ('graph.json', b''),
    ('graph.json', b'{}'),
    ('graph.json', b'\xff\xfe'),
    ('config.json', b''),
    ('config.json', b'null'),
    ('config.json', b'\xff\xfe'),
  )
  def test_the_damaged_file_is_named(self, name, data):
    (self.path / name).write_bytes(data)
    with self.assertRaisesRegex(ValueError, f'{name} is damaged'):
      run_folder.read_description(self.path)

  def test_environment_that_is_no_name(self):
    file = self.path / 'config.json'
    document = json.loads(file.read_text()) | {'environment': 3}
    file.write_text(json.dumps(document))
    with self.assertRaisesRegex(ValueError, '`environment` must be a name'):
      run_folder.read_description(self.path)

  def test_folders_of_the_first_version_are_of_ppo(self):
    file = self.path / 'config.json'
    document = json.loads(file.read_text())
    self.assertEqual(document.pop('algorithm'), 'ppo')
    self.assertIsNone(document.pop('network'))
    file.write_text(json.dumps(document))
    self.assertEqual(run_folder.read_description(self.path), self.description)

  def test_a_training_that_did_not_come_to_an_end(self):
    with self.assertRaisesRegex(
      FileNotFoundError, 'no weights in.*train again'
    ):
      run_folder.restore(self.path)

  @parameterized.parameters(('algorithm', 'sarsa'), ('network', 3))
  def test_what_nobody_wrote(self, name, value):
    file = self.path / 'config.json'
    document = json.loads(file.read_text()) | {name: value}
    file.write_text(json.dumps(document))
    with self.assertRaisesRegex(ValueError, f'is damaged.*{value}'):
      run_folder.read_description(self.path)


class DescriptionTest(absltest.TestCase):
  def test_algorithm_and_usual_network_come_back(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    path = pathlib.Path(folder.name)
    description = run_folder.Description(
      environment='cartpole',
      graph=None,
      normalize=False,
      config=config.PQNConfig(num_envs=8),
      total_steps=64,
      seed=3,
      network='gru',
    )
    run_folder.write_description(path, description)
    self.assertEqual(run_folder.read_description(path), description)


if __name__ == '__main__':
  absltest.main()
