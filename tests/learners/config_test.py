"""What a PPO config refuses, and what it says then."""

import math
import subprocess
import sys

from absl.testing import absltest, parameterized

from hkgraph.learners import config


class PPOConfigTest(parameterized.TestCase):
  def test_defaults_are_valid(self):
    config.PPOConfig()

  @parameterized.parameters(
    ('num_envs', 0),
    ('num_envs', 2.0),
    ('num_steps', -1),
    ('num_minibatches', True),
    ('num_epochs', 0),
    ('discount', 1.01),
    ('discount', -0.1),
    ('lambda_', 2),
    ('lambda_', math.nan),
    ('clip_epsilon', 0.0),
    ('value_cost', -1.0),
    ('entropy_cost', math.inf),
    ('learning_rate', 0.0),
    ('learning_rate', '1e-3'),
    ('max_grad_norm', 0.0),
    ('weight_decay', -1e-9),
    ('value_clip', -0.2),
    ('target_kl', 0.0),
    ('schedule', 'cosine'),
    ('advantage_mode', 'sum'),
    ('total_updates', -3),
    ('normalise_advantages', 'yes'),
    ('normalise_advantages', 1),
    ('advantage_weights', 3),
    ('advantage_weights', {}),
  )
  def test_value_out_of_range_names_field_and_value(self, name, value):
    with self.assertRaisesRegex(
      ValueError, f'`{name}` must be .*got {value!r}'
    ):
      config.PPOConfig(**{name: value})

  @parameterized.parameters(
    ('discount', 0), ('discount', 1.0), ('lambda_', 0.0), ('entropy_cost', 0)
  )
  def test_bounds_are_allowed(self, name, value):
    config.PPOConfig(**{name: value})

  @parameterized.parameters('1', math.nan, True)
  def test_weight_that_is_no_number(self, weight):
    with self.assertRaisesRegex(ValueError, r"`advantage_weights\['arm'\]`"):
      config.PPOConfig(advantage_weights={'arm': weight, 'leg': -1.0})

  def test_six_environments_and_four_minibatches(self):
    with self.assertRaisesRegex(ValueError, '6 environments and 4 minibatches'):
      config.PPOConfig(num_envs=6, num_minibatches=4)

  def test_a_linear_schedule_may_get_its_end_later(self):
    config.PPOConfig(schedule='linear')
    with self.assertRaisesRegex(ValueError, '`total_updates` must be'):
      config.PPOConfig(schedule='linear', total_updates=0)

  def test_weights_without_a_sum(self):
    with self.assertRaisesRegex(ValueError, 'advantage_weights'):
      config.PPOConfig(advantage_mode='per_head', advantage_weights={'a': 1.0})

  def test_is_read_without_jax(self):
    code = (
      'import sys; from hkgraph.learners import config; config.PPOConfig();'
      'sys.exit("jax" in sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


class PQNConfigTest(parameterized.TestCase):
  def test_defaults_are_valid(self):
    config.PQNConfig()

  @parameterized.parameters(
    ('num_envs', 0),
    ('num_steps', 2.0),
    ('num_minibatches', True),
    ('num_epochs', 0),
    ('discount', 1.01),
    ('lambda_', -0.1),
    ('learning_rate', 0.0),
    ('max_grad_norm', 0.0),
    ('schedule', 'cosine'),
    ('total_updates', -3),
    ('optimizer', 'sgd'),
    ('epsilon_start', 1.1),
    ('epsilon_finish', -0.1),
    ('epsilon_finish', math.nan),
    ('exploration_fraction', 0.0),
    ('exploration_fraction', 1.5),
    ('burn_in', -1),
    ('burn_in', True),
  )
  def test_value_out_of_range_names_field_and_value(self, name, value):
    with self.assertRaisesRegex(
      ValueError, f'`{name}` must be .*got {value!r}'
    ):
      config.PQNConfig(**{name: value})

  @parameterized.parameters(
    ('epsilon_start', 0), ('epsilon_finish', 1.0), ('exploration_fraction', 1)
  )
  def test_bounds_are_allowed(self, name, value):
    config.PQNConfig(**{name: value})

  def test_six_environments_and_four_minibatches(self):
    with self.assertRaisesRegex(ValueError, '6 environments and 4 minibatches'):
      config.PQNConfig(num_envs=6, num_minibatches=4)

  def test_burn_in_leaves_a_row(self):
    config.PQNConfig(num_steps=5, burn_in=4)
    with self.assertRaisesRegex(ValueError, '`burn_in` must be less.*5 and 5'):
      config.PQNConfig(num_steps=5, burn_in=5)


if __name__ == '__main__':
  absltest.main()
