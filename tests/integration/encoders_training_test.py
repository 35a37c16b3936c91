"""What encoders that remember are good for, beside one that does not."""

from absl.testing import absltest, parameterized
import pytest

from hkgraph import envs
from hkgraph import network as network_lib
from hkgraph.learners import config as config_lib
from hkgraph.modules import encoders, towers, transformer
from hkgraph.training import loop

# The cue is the seventh frame from the end when the answer is due.
_DELAY, _CONTEXT = 6, 8
_STEPS = 120_000
_CONFIGS = {
  'ppo': config_lib.PPOConfig(
    num_envs=32, num_steps=32, learning_rate=1e-3, schedule='linear'
  ),
  'pqn': config_lib.PQNConfig(
    num_envs=32,
    num_steps=32,
    num_minibatches=8,
    learning_rate=5e-4,
    schedule='linear',
  ),
}


def _window():
  return transformer.TransformerEncoder(
    encoders.MLPEncoder((32,)), hidden_size=32, context=_CONTEXT
  )


def _train(algorithm, make_encoder):
  env = envs.make('delayed_recall', delay=_DELAY)
  tower = {'ppo': towers.ActorCritic, 'pqn': towers.QNetwork}[algorithm]
  network = network_lib.transform(
    lambda obs: tower(env.action_spec(), make_encoder())(obs)
  )
  return loop.train(
    env,
    network,
    _CONFIGS[algorithm],
    total_steps=_STEPS,
    eval_episodes=1000,
    progress=False,
  ).evaluation


@pytest.mark.slow
class EncodersTrainingTest(parameterized.TestCase):
  @parameterized.parameters('ppo', 'pqn')
  def test_a_window_of_frames_recalls_the_cue(self, algorithm):
    evaluation = _train(algorithm, _window)
    self.assertLen(evaluation.returns, 1000)
    self.assertGreaterEqual(evaluation.mean, 0.95)

  @parameterized.parameters('ppo', 'pqn')
  def test_one_frame_does_not(self, algorithm):
    evaluation = _train(algorithm, encoders.MLPEncoder)
    # One of four cues; the standard deviation of the mean is 0.014.
    self.assertBetween(evaluation.mean, 0.25 - 4 * 0.014, 0.25 + 4 * 0.014)


if __name__ == '__main__':
  absltest.main()
