"""The example in the manner of IMPALA learns, with either core."""

import importlib.util
import pathlib

from absl.testing import absltest, parameterized
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


def _load():
  spec = importlib.util.spec_from_file_location(
    'impala', EXAMPLES / 'impala.py'
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class ImpalaTest(parameterized.TestCase):
  def test_catch_is_an_environment_of_dm_env(self):
    env = _load().Catch(seed=0)
    for _ in range(20):
      timestep = env.step(0)  # The first one resets, as after `LAST`.
      self.assertTrue(timestep.first())
      board = env.observation_spec().validate(timestep.observation)
      ball = int(board[0].argmax())
      for row in range(1, 7):
        paddle = int(timestep.observation[-1].argmax())
        timestep = env.step(1 + (ball > paddle) - (ball < paddle))
        env.observation_spec().validate(timestep.observation)
        self.assertEqual(timestep.observation.sum(), 2 if row < 2 else 1)
      self.assertTrue(timestep.last())
      self.assertEqual((timestep.reward, timestep.discount), (1.0, 0.0))

  @pytest.mark.slow
  @parameterized.parameters('graph', 'lstm')
  @pytest.mark.heavy
  def test_learns(self, core):
    before, after = _load().train(core, 400)
    self.assertLess(before, 0)
    self.assertGreater(after, 0.9)


if __name__ == '__main__':
  absltest.main()
