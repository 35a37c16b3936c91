"""Tests of evaluation: which episodes count, and what acts in them."""

from absl.testing import absltest, parameterized
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol, wrappers
from hkgraph.learners import agent as agent_lib
from hkgraph.training import evaluator


class _Episodes:
  """One or nine transitions, by chance; the reward is the action."""

  lengths = (1, 9)

  def __init__(self, keys=None):
    self._keys = keys

  def reset(self, key):
    short, long = self.lengths
    length = jnp.where(jax.random.bits(key) % 2 == 0, short, long)
    state = {'left': length, 'length': length}
    return state, protocol.restart(self.reward_spec(), self._observe(state))

  def step(self, state, action):
    state = dict(state, left=state['left'] - 1)
    reward = action
    if self._keys:
      reward = {k: action * (i + 1) for i, k in enumerate(self._keys)}
    return state, protocol.transition(
      reward, self._observe(state), state['left'] == 0
    )

  def _observe(self, state):
    return state['length'].astype(jnp.float32)

  def observation_spec(self):
    return specs.Array((), np.float32)

  def action_spec(self):
    return specs.Array((), np.float32)

  def reward_spec(self):
    spec = specs.Array((), np.float32)
    return dict.fromkeys(self._keys, spec) if self._keys else spec

  def discount_spec(self):
    return protocol.discount_spec()


class _Endless(_Episodes):
  lengths = (3, 2**30)


def _act(params, state, key, timestep, *, deterministic=False):
  """Acts by `bias + rows seen in the episode`, plus noise in a sample."""
  seen = jnp.where(timestep.first(), 0, state.carry)
  action = params['bias'] + state.statistics + seen
  if not deterministic:
    action += jax.random.normal(key, action.shape)
  output = agent_lib.ActorOutput(
    action=action,
    environment_action=action,
    log_prob=action,
    value=action,
  )
  carry = seen + 1
  return output, types.NetworkState(carry=carry, statistics=state.statistics)


_AGENT = agent_lib.Agent(
  init=None,
  initial_carry=lambda batch_size, key=None: jnp.full(batch_size, 100.0),
  act=_act,
  update=None,
)
_PARAMS = {'bias': jnp.float32(0.5)}
_STATISTICS = jnp.float32(0.25)
_KEY = jax.random.key(4)


def _evaluate(env, **kwargs):
  evaluate = evaluator.make_evaluator(_AGENT, env, **kwargs)
  return evaluate(_PARAMS, _STATISTICS, _KEY)


def _first_lengths(env, batch_size, quota):
  """Lengths of the first `quota` episodes of each environment."""
  # The evaluator splits its key in three and resets from the first.
  envs = wrappers.Vectorize(env, batch_size)
  state, _ = jax.jit(envs.reset)(jax.random.split(_KEY, 3)[0])
  step = jax.jit(envs.step)
  found = [[] for _ in range(batch_size)]
  count = np.zeros(batch_size, int)
  while min(map(len, found)) < quota:
    state, timestep = step(state, jnp.zeros(batch_size))
    count = np.where(timestep.first(), 0, count + 1)
    for i in np.flatnonzero(timestep.last()):
      found[i].append(int(count[i]))
  return [lengths[:quota] for lengths in found]


class EvaluatorTest(parameterized.TestCase):
  @parameterized.parameters((12, None, 1), (12, 4, 3), (3, 8, 1))
  def test_counts_the_first_episodes_of_every_environment(
    self, episodes, batch_size, quota
  ):
    evaluation = _evaluate(
      _Episodes(), episodes=episodes, batch_size=batch_size
    )
    expected = _first_lengths(
      _Episodes(), min(batch_size or episodes, episodes), quota
    )
    np.testing.assert_array_equal(evaluation.lengths, np.ravel(expected))

  def test_a_remainder_goes_to_the_first_environments(self):
    evaluation = _evaluate(_Episodes(), episodes=7, batch_size=3)
    a, b, c = _first_lengths(_Episodes(), 3, 3)
    np.testing.assert_array_equal(evaluation.lengths, a + b[:2] + c[:2])

  def test_short_episodes_are_not_preferred(self):
    # Two of three hundred environments at most are still out by chance.
    evaluation = _evaluate(_Episodes(), episodes=300)
    share = np.mean(evaluation.lengths == 1)
    self.assertBetween(share, 0.5 - 4 * 0.029, 0.5 + 4 * 0.029)

  def test_returns_come_from_carry_parameters_and_statistics(self):
    evaluation = _evaluate(_Episodes(), episodes=20, batch_size=5)
    # Action t of an episode is 0.75 + t: the carry of 100 was reset.
    n = evaluation.lengths
    np.testing.assert_allclose(evaluation.returns, 0.75 * n + n * (n - 1) / 2)
    self.assertAlmostEqual(evaluation.mean, evaluation.returns.mean(), 4)
    self.assertAlmostEqual(evaluation.std, evaluation.returns.std(), 4)
    self.assertEqual(evaluation.returns_by_key, {})

  def test_rewards_by_key(self):
    evaluation = _evaluate(_Episodes(('a', 'b')), episodes=6)
    n = evaluation.lengths
    expected = 0.75 * n + n * (n - 1) / 2
    by_key = evaluation.returns_by_key
    np.testing.assert_allclose(by_key['a'], expected)
    np.testing.assert_allclose(by_key['b'], 2 * expected)
    np.testing.assert_allclose(evaluation.returns, 3 * expected)
    self.assertAlmostEqual(
      evaluation.mean_by_key['b'], 2 * expected.mean(), places=4
    )

  def test_samples_are_drawn_when_asked_for(self):
    mode = _evaluate(_Episodes(), episodes=8)
    sampled = _evaluate(_Episodes(), episodes=8, deterministic=False)
    np.testing.assert_array_equal(mode.lengths, sampled.lengths)
    self.assertTrue((mode.returns != sampled.returns).all())
    self.assertTrue(mode.deterministic)
    self.assertFalse(sampled.deterministic)

  def test_one_compilation_serves_other_weights(self):
    evaluate = evaluator.make_evaluator(_AGENT, _Episodes(), episodes=4)
    first = evaluate(_PARAMS, _STATISTICS, _KEY)
    with jax.no_tracing():
      second = evaluate({'bias': jnp.float32(1.5)}, _STATISTICS, _KEY)
    np.testing.assert_allclose(second.returns, first.returns + first.lengths)

  def test_gives_up_on_episodes_that_do_not_end(self):
    with self.assertRaisesRegex(RuntimeError, 'of 6 episodes.*`TimeLimit`'):
      _evaluate(_Endless(), episodes=6, max_steps=50)
    # What ends within the limit is evaluated.
    limited = wrappers.TimeLimit(_Endless(), 50)
    evaluation = _evaluate(limited, episodes=6, max_steps=50)
    self.assertContainsSubset(evaluation.lengths, (3, 50))

  @parameterized.parameters(
    dict(episodes=0), dict(episodes=2, batch_size=0), dict(max_steps=0)
  )
  def test_counts_are_checked(self, **kwargs):
    with self.assertRaisesRegex(ValueError, 'integer from 1'):
      evaluator.make_evaluator(_AGENT, _Episodes(), **kwargs)

  def test_to_dict_holds_everything(self):
    evaluation = evaluator.Evaluation(
      returns=np.array([3.0, 5.0]),
      lengths=np.array([1, 4]),
      returns_by_key={'a': np.array([1.0, 2.0]), 'b': np.array([2.0, 3.0])},
      deterministic=False,
    )
    self.assertEqual(
      evaluation.to_dict(),
      {
        'episodes': 2,
        'deterministic': False,
        'mean_return': 4.0,
        'std_return': 1.0,
        'mean_length': 2.5,
        'mean_return_by_key': {'a': 1.5, 'b': 2.5},
        'returns': [3.0, 5.0],
        'lengths': [1, 4],
        'returns_by_key': {'a': [1.0, 2.0], 'b': [2.0, 3.0]},
      },
    )


if __name__ == '__main__':
  absltest.main()
