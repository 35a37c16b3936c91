"""What a DreamerV3 config refuses, and what it says then."""

import dataclasses
import math
import subprocess
import sys

from absl.testing import absltest, parameterized

from hkgraph.learners import dreamer_config

DreamerConfig = dreamer_config.DreamerConfig


class DreamerConfigTest(parameterized.TestCase):
  def test_defaults_are_valid(self):
    DreamerConfig()

  @parameterized.parameters(
    ('num_envs', 0),
    ('num_steps', 2.0),
    ('train_ratio', 0),
    ('batch_size', True),
    ('sequence_length', 1),
    ('burn_in', -1),
    ('burn_in', 1.5),
    ('horizon', 0),
    ('capacity', 0),
    ('total_updates', -3),
    ('schedule', 'cosine'),
    ('discount', 1.01),
    ('lambda_', -0.1),
    ('learning_rate', 0.0),
    ('actor_learning_rate', -1e-3),
    ('critic_learning_rate', '1e-3'),
    ('max_grad_norm', 0.0),
    ('entropy_cost', -1e-9),
    ('free_nats', -1.0),
    ('dynamics_cost', math.inf),
    ('representation_cost', math.nan),
    ('reconstruction_cost', -1.0),
    ('slow_cost', -0.5),
    ('unimix', -0.01),
    ('unimix', 1.5),
    ('return_rate', 0.0),
    ('slow_rate', 1.1),
    ('slow_rate', 0),
    ('dtype', 'float16'),
    ('hidden_size', 0),
    ('num_layers', -1),
    ('num_latents', 2.5),
    ('num_classes', False),
    ('num_channels', 0),
  )
  def test_value_out_of_range_names_field_and_value(self, name, value):
    with self.assertRaisesRegex(
      ValueError, f'`{name}` must be .*got {value!r}'
    ):
      DreamerConfig(**{name: value})

  @parameterized.parameters(
    ('burn_in', 0),
    ('sequence_length', 2),
    ('discount', 1),
    ('lambda_', 0.0),
    ('max_grad_norm', None),
    ('entropy_cost', 0),
    ('unimix', 0),
    ('return_rate', 1),
    ('slow_rate', 1.0),
    ('dtype', 'bfloat16'),
    ('num_bins', 2),
  )
  def test_bounds_are_allowed(self, name, value):
    self.assertEqual(getattr(DreamerConfig(**{name: value}), name), value)

  def test_latents_that_are_all_uniform(self):
    with self.assertRaisesRegex(ValueError, '`unimix` must be less than 1'):
      DreamerConfig(unimix=1.0)

  def test_one_bin(self):
    with self.assertRaisesRegex(ValueError, '`num_bins` must be at least 2'):
      DreamerConfig(num_bins=1)

  @parameterized.parameters(
    ('micros', "got 'micros'; did you mean 'micro'?"),
    ('12M', "got '12M'; did you mean '12m'?"),
    ('huge', "got 'huge'$"),
    (None, 'got None'),
  )
  def test_unknown_size(self, size, message):
    with self.assertRaises(ValueError) as context:
      DreamerConfig(size=size)
    text = str(context.exception)
    self.assertStartsWith(
      text, "`size` must be one of 'nano', 'micro', '1m', '12m', got"
    )
    self.assertRegex(text, message.replace('?', r'\?$'))

  def test_fields_override_the_preset(self):
    config = DreamerConfig(size='12m', num_latents=5, num_blocks=4)
    self.assertEqual(
      config.sizes,
      dataclasses.replace(
        dreamer_config.SIZES['12m'], num_latents=5, num_blocks=4
      ),
    )
    self.assertEqual(config.sizes.recurrent_size, 2048)

  def test_what_is_too_small_or_no_name(self):
    with self.assertRaisesRegex(ValueError, 'integer of at least 2, got 1'):
      DreamerConfig(sequence_length=1)
    with self.assertRaisesRegex(ValueError, "`size` must be one of 'nano'"):
      DreamerConfig(size=['nano'])

  def test_blocks_that_do_not_divide_the_units(self):
    with self.assertRaisesRegex(ValueError, '128 units and 3 blocks'):
      DreamerConfig(num_blocks=3)

  def test_sequences_longer_than_what_is_stored(self):
    sizes = dict(num_envs=4, burn_in=2, sequence_length=8, batch_size=1)
    self.assertEqual(DreamerConfig(capacity=40, **sizes).replayed_rows, 10)
    with self.assertRaisesRegex(
      ValueError,
      r'2 \+ 8 rows .*longer than the 9 rows .*4 environments.*least 40 frames',
    ):
      DreamerConfig(capacity=39, **sizes)
    # What is advised holds a batch, too: 6 x 10 rows in whole rows of 4.
    sizes['batch_size'] = 7
    with self.assertRaisesRegex(ValueError, 'at least 72 frames'):
      DreamerConfig(capacity=39, **sizes)
    DreamerConfig(capacity=72, **sizes)
    with self.assertRaisesRegex(ValueError, '70 frames, or 72 of 4 env.* 71'):
      DreamerConfig(capacity=71, **sizes)

  def test_capacity_of_less_than_a_batch(self):
    sizes = dict(num_envs=1, burn_in=2, sequence_length=8, batch_size=3)
    DreamerConfig(capacity=30, **sizes)
    with self.assertRaisesRegex(ValueError, '3 x 10 = 30 frames, .*got 29'):
      DreamerConfig(capacity=29, **sizes)

  def test_is_read_without_jax(self):
    code = (
      'import sys; from hkgraph.learners import dreamer_config as d;'
      'd.DreamerConfig(); sys.exit("jax" in sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


if __name__ == '__main__':
  absltest.main()
