"""PQN updates: their numbers, what they explore and what counts."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.envs import wrappers
from hkgraph.graph import builder, core
from hkgraph.learners import pqn
from hkgraph.modules import normalizer, samplers
from hkgraph.training import actor
from tests.learners import fakes

FIRST, MID, LAST = 0, 1, 2
CONFIG = pqn.PQNConfig(
  num_envs=4,
  num_steps=9,
  num_minibatches=2,
  num_epochs=2,
  total_updates=10,
  exploration_fraction=0.5,
)


def memoryless():
  return fakes.memoryless(fakes.action_values)


def recurrent():
  return fakes.recurrent(fakes.action_values)


class Noisy(core.Population):
  """A population whose activation is noisy."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self._noise = samplers.GaussianNoise(0.5)

  def __call__(self, inputs):
    return self._noise(super().__call__(inputs))


def graph_network():
  """Every kind of state there is: delays, loops, noise, statistics."""
  graph = builder.PopulationGraph()
  graph.add_input('eye', 1, input_from='x')
  graph.add_population('a', 6, activation='jax.nn.swish')
  graph.add_population('b', 5, activation='jax.numpy.tanh', module=Noisy)
  graph.add_output('q', 2)
  graph.connect('eye', 'a')
  graph.connect('eye', 'b', delay=2)
  graph.connect('a', 'b', delay=1, reciprocal=True)
  graph.connect('a', 'a', delay=3)
  graph.connect('b', 'q')
  spec = graph.finalize()

  def fn(x):
    return core.Graph(spec)({'x': normalizer.Normalizer()(x[..., None])})['q']

  return network_lib.transform(fn)


class Trainer:
  """An agent in `num_envs` of an environment, its functions compiled once."""

  def __init__(self, network, config):
    self.config = config
    self.agent = pqn.make_pqn(network, config)
    self.env = wrappers.Vectorize(fakes.Episodes(), config.num_envs)
    self.start = jax.jit(self._start)
    self.rollout = jax.jit(self._rollout)
    self.update = jax.jit(self.agent.update)

  def _start(self, key):
    learner_key, actor_key = jax.random.split(key)
    _, timestep = self.env.reset(actor_key)
    learner_state = self.agent.init(learner_key, timestep)
    return learner_state, actor.initial_actor_state(
      self.agent, self.env, actor_key
    )

  def _rollout(self, learner_state, actor_state):
    actor_state, trajectory, _ = actor.rollout(
      self.agent, self.env, learner_state, actor_state, self.config.num_steps
    )
    return actor_state, trajectory


@functools.cache
def trainer(network, **settings):
  return Trainer(network(), dataclasses.replace(CONFIG, **settings))


@functools.cache
def before_second_update(network):
  """A learner state after one update, and the next trajectory."""
  t = trainer(network)
  learner_state, actor_state = t.start(jax.random.key(0))
  actor_state, trajectory = t.rollout(learner_state, actor_state)
  learner_state, _ = t.update(learner_state, trajectory)
  _, trajectory = t.rollout(learner_state, actor_state)
  return learner_state, trajectory


def rows_at(x):
  """A row of a batch of observations, inside of episodes."""
  return types.TimeStep(
    step_type=jnp.full(len(x), MID, jnp.int32),
    reward=jnp.zeros(len(x)),
    discount=jnp.ones(len(x)),
    observation=jnp.float32(x),
  )


def case_b(x, action, value, step_type, reward, discount):
  def column(rows, dtype=np.float32):
    return np.asarray(rows, dtype)[:, None]

  return types.Trajectory(
    timestep=types.TimeStep(
      step_type=column(step_type, np.int32),
      reward=column(reward),
      discount=column(discount),
      observation=column(x),
    ),
    action=column(action, np.int32),
    log_prob=column(np.zeros(len(action))),
    value=column(value),
    carry={},
  )


class UpdateTest(chex.TestCase):
  """One update of `q = (v x, theta x)`, by hand, with the targets of case B."""

  config = pqn.PQNConfig(
    num_envs=1,
    num_steps=4,
    num_minibatches=1,
    num_epochs=1,
    discount=0.9,
    lambda_=0.5,
    learning_rate=0.01,
    max_grad_norm=None,
    optimizer='adam',
    total_updates=1,
  )

  @chex.variants(with_jit=True, without_jit=True)
  @pytest.mark.heavy
  def test_numbers(self):
    # Case B, truncated: row 2 is LAST, and what stands there does not count.
    x, action = np.array([1.0, -2.0, 50.0, 0.5]), np.array([0, 1, 1, 1])
    value, target = [10, 20, 50, 30, 40], np.array([31.15, 47, 39])
    trajectory = case_b(
      [*x, 7],
      action,
      value,
      [FIRST, MID, LAST, FIRST, MID],
      [0, 1, 2, 99, 3],
      [1, 1, 1, 1, 1],
    )
    agent = pqn.make_pqn(memoryless(), self.config)
    state = agent.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], trajectory.timestep)
    )
    new_state, metrics = self.variant(agent.update)(state, trajectory)

    valid = np.array([0, 1, 3])
    x, action = x[valid], action[valid]
    params = fakes.PARAMS
    q = np.where(action == 1, params['theta'], params['v']) * x
    greedy = np.maximum(params['theta'] * x, params['v'] * x)
    error = q - target
    gradient = {
      'theta': np.mean(error * x * (action == 1)),
      'v': np.mean(error * x * (action == 0)),
    }
    expected = {
      'loss': np.mean(error**2) / 2,
      'td_error': np.mean(np.abs(error)),
      'q_mean': np.mean(q),
      'explained_variance': 1 - np.var(error) / np.var(target),
      'value_deviation': np.max(np.abs(greedy - np.array([10, 20, 30]))),
      'grad_norm': np.hypot(gradient['theta'], gradient['v']),
      'epsilon': 1.0,
      'steps_applied': 1.0,
      'skipped': 0,
    }
    for name, number in expected.items():
      np.testing.assert_allclose(metrics[name], number, rtol=1e-5, err_msg=name)
    for name, g in gradient.items():
      # Adam's first step.
      np.testing.assert_allclose(
        new_state.params[name],
        params[name] - 0.01 * g / (abs(g) + 1e-8),
        rtol=1e-6,
      )
    self.assertEqual(new_state.num_updates, 1)

  def test_targets_are_made_once(self):
    """Two steps of gradient descent go to the targets of the first."""
    config = dataclasses.replace(self.config, num_epochs=2, num_steps=1)
    agent = pqn.make_pqn(memoryless(), config)
    # r + gamma V = 1 + .9 * 10: the stored value, whatever q is by now.
    trajectory = case_b([1, 1], [1], [0.3, 10], [0, 1], [0, 1], [1, 1])
    state = agent.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], trajectory.timestep)
    )
    new_state, metrics = jax.jit(agent.update)(state, trajectory)
    # With a gradient of one sign, Adam's first steps have about its rate.
    theta = fakes.PARAMS['theta'] + 0.01 * np.arange(3)
    np.testing.assert_allclose(new_state.params['theta'], theta[2], rtol=1e-4)
    np.testing.assert_allclose(
      metrics['loss'], np.mean((theta[:2] - 10) ** 2) / 2, rtol=1e-5
    )

  def test_four_rows_without_an_end(self):
    """Case J: nothing is NaN."""
    trajectory = case_b(
      np.ones(5), np.ones(4), np.ones(5), [MID] * 5, np.ones(5), np.ones(5)
    )
    agent = pqn.make_pqn(memoryless(), self.config)
    state = agent.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], trajectory.timestep)
    )
    state, metrics = jax.jit(agent.update)(state, trajectory)
    for name, number in metrics.items():
      self.assertTrue(np.isfinite(number), name)
    self.assertEqual(metrics['skipped'], 0)


class ExplorationTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 1.0), (1, 0.81), (3, 0.43), (5, 0.05), (9, 0.05), (None, 0.05)
  )
  def test_epsilon_falls_in_half_of_ten_updates(self, num_updates, epsilon):
    x = np.where(np.arange(20_000) % 2, 1, -1)
    agent = pqn.make_pqn(memoryless(), CONFIG)
    state = types.NetworkState(carry={}, statistics={})
    act = jax.jit(functools.partial(agent.act, num_updates=num_updates))
    output, _ = act(fakes.PARAMS, state, jax.random.key(3), rows_at(x))
    # Action 1 is worth .3 x and action 0 .2 x; half of the random actions are
    # greedy ones.
    greedy = output.action == (x > 0)
    share, deviation = 1 - epsilon / 2, np.sqrt(epsilon / 4 / len(x))
    np.testing.assert_allclose(np.mean(greedy), share, atol=5 * deviation)
    np.testing.assert_allclose(
      output.log_prob,
      np.log(np.where(greedy, share, epsilon / 2)),
      rtol=1e-4,
    )
    np.testing.assert_allclose(
      output.value, np.maximum(0.3 * x, 0.2 * x), rtol=1e-6
    )

  @pytest.mark.heavy
  def test_the_rollout_reads_the_number_of_updates(self):
    t = trainer(memoryless, epsilon_finish=0.0)
    learner_state, actor_state = t.start(jax.random.key(0))
    shares = []
    for num_updates in (0, 5):
      state = learner_state.replace(num_updates=jnp.int32(num_updates))
      _, trajectory = t.rollout(state, actor_state)
      greedy = trajectory.action == (trajectory.timestep.observation[:-1] > 0)
      shares.append(np.mean(greedy))
    self.assertLess(shares[0], 0.9)
    self.assertEqual(shares[1], 1)

  def test_constant_epsilon_needs_no_end(self):
    agent = pqn.make_pqn(
      memoryless(),
      dataclasses.replace(CONFIG, total_updates=None, epsilon_start=0.05),
    )
    state = types.NetworkState(carry={}, statistics={})
    output, _ = agent.act(
      *(fakes.PARAMS, state, jax.random.key(0), rows_at([1.0])),
      num_updates=jnp.int32(7),
    )
    self.assertEqual(output.action.shape, (1,))

  def test_deterministic_is_greedy_and_ties_go_to_the_first(self):
    agent = pqn.make_pqn(memoryless(), CONFIG)
    state = types.NetworkState(carry={}, statistics={})
    x = np.array([2.0, -1.0, 0.0, 1e-3])  # All values are 0 where x is.
    for num_updates in (0, None):
      output, _ = agent.act(
        *(fakes.PARAMS, state, jax.random.key(0), rows_at(x)),
        deterministic=True,
        num_updates=num_updates,
      )
      np.testing.assert_array_equal(output.action, [1, 0, 0, 1])

  @pytest.mark.heavy
  def test_greedy_ties_are_broken_at_random(self):
    agent = pqn.make_pqn(
      memoryless(), dataclasses.replace(CONFIG, epsilon_finish=0.0)
    )
    state = types.NetworkState(carry={}, statistics={})
    output, _ = agent.act(
      *(fakes.PARAMS, state, jax.random.key(0), rows_at(np.zeros(4000)))
    )
    self.assertBetween(np.mean(output.action), 0.46, 0.54)


class ReplayTest(parameterized.TestCase):
  """The loss sees each row as the actor saw it."""

  @parameterized.parameters(
    (recurrent, 1), (recurrent, 4), (graph_network, 2), (memoryless, 2)
  )
  @pytest.mark.heavy
  def test_values_are_those_of_the_actor(self, network, num_minibatches):
    rollout = trainer(network).rollout
    update = trainer(network, num_minibatches=num_minibatches).update
    learner_state, actor_state = trainer(network).start(jax.random.key(0))
    for _ in range(3):
      before = learner_state.params
      actor_state, trajectory = rollout(learner_state, actor_state)
      learner_state, metrics = update(learner_state, trajectory)
      self.assertTrue(jnp.any(trajectory.timestep.first()[1:]))
      self.assertLess(metrics['value_deviation'], 1e-5)
      self.assertEqual(metrics['skipped'], 0)
    self.assertFalse(jnp.all(trajectory.timestep.first()[0]))  # Mid-episode.
    moved = jax.tree.map(
      lambda x, y: jnp.max(jnp.abs(x - y)), before, learner_state.params
    )
    self.assertGreater(max(jax.tree.leaves(moved)), 1e-4)

  @parameterized.parameters('h', 'key')
  def test_wrong_carry_shows(self, name):
    state, trajectory = before_second_update(recurrent)
    carry = dict(
      trajectory.carry, **{name: jnp.roll(trajectory.carry[name], 1)}
    )
    _, metrics = trainer(recurrent).update(
      state, trajectory.replace(carry=carry)
    )
    self.assertGreater(metrics['value_deviation'], 1e-3)

  @pytest.mark.heavy
  def test_statistics_take_in_every_row_once(self):
    state, trajectory = before_second_update(recurrent)
    new_state, _ = trainer(recurrent).update(state, trajectory)
    rows = trajectory.timestep.observation[:-1]
    self.assertEqual(
      new_state.statistics['count'], state.statistics['count'] + rows.size
    )

  @parameterized.parameters(recurrent, memoryless)
  @pytest.mark.heavy
  def test_last_rows_do_not_count(self, network):
    state, trajectory = before_second_update(network)
    timestep = trajectory.timestep
    last, into_first = timestep.last()[:-1], timestep.first()[1:]
    self.assertTrue(jnp.any(last))

    def spoil(x, mask, garbage):
      return x.at[-len(mask) :].set(jnp.where(mask, garbage, x[-len(mask) :]))

    garbage = trajectory.replace(
      action=spoil(trajectory.action, last, 1 - trajectory.action),
      timestep=timestep.replace(
        reward=spoil(timestep.reward, into_first, jnp.nan),
        discount=spoil(timestep.discount, into_first, 0.0),
      ),
    )
    update = trainer(network).update
    clean, dirty = update(state, trajectory), update(state, garbage)
    self.assertEqual(clean[1]['skipped'], 0)
    chex.assert_trees_all_equal(clean[0].params, dirty[0].params)
    chex.assert_trees_all_equal(clean[1], dirty[1])


class BurnInTest(parameterized.TestCase):
  def update(self, **changes):
    """Parameters and metrics, with what changes in rows 0 to 3 or row 4."""
    state, trajectory = before_second_update(recurrent)
    timestep = trajectory.timestep
    return trainer(recurrent, burn_in=4).update(
      state,
      trajectory.replace(
        action=changes.get('action', trajectory.action),
        value=changes.get('value', trajectory.value),
        timestep=timestep.replace(
          reward=changes.get('reward', timestep.reward)
        ),
      ),
    )

  def test_what_was_done_and_got_in_these_rows_counts_in_nothing(self):
    _, trajectory = before_second_update(recurrent)
    clean = self.update()
    dirty = self.update(
      action=trajectory.action.at[:4].set(1 - trajectory.action[:4]),
      value=trajectory.value.at[:4].add(100),
      reward=trajectory.timestep.reward.at[:5].add(100),
    )
    chex.assert_trees_all_equal(clean[0].params, dirty[0].params)
    chex.assert_trees_all_equal(clean[1], dirty[1])

  @pytest.mark.heavy
  def test_the_next_row_counts(self):
    _, trajectory = before_second_update(recurrent)
    clean, dirty = (
      self.update(),
      self.update(action=trajectory.action.at[4].set(1 - trajectory.action[4])),
    )
    self.assertNotEqual(clean[1]['q_mean'], dirty[1]['q_mean'])

  def test_they_warm_the_carry(self):
    state, trajectory = before_second_update(recurrent)
    timestep = trajectory.timestep
    # An episode that runs from row 0 into the rows that count.
    step_type = timestep.step_type.at[:6].set(MID)
    trajectory = trajectory.replace(
      timestep=timestep.replace(step_type=step_type)
    )
    shifted = trajectory.replace(
      timestep=trajectory.timestep.replace(
        observation=timestep.observation.at[:4].add(1)
      )
    )
    update = trainer(recurrent, burn_in=4).update
    a, b = (update(state, t)[1]['q_mean'] for t in (trajectory, shifted))
    self.assertGreater(abs(a - b), 1e-2)

  def test_a_network_without_carry_has_nothing_to_warm(self):
    agent = pqn.make_pqn(memoryless(), dataclasses.replace(CONFIG, burn_in=2))
    with self.assertRaisesRegex(ValueError, '`burn_in` warms a carry.*got 2'):
      agent.init(jax.random.key(0), rows_at(np.ones(4)))


class HeadsTest(parameterized.TestCase):
  """Dicts of action values, with a reward for each or one for all."""

  def setUp(self):
    super().setUp()
    _, self.plain = before_second_update(memoryless)

  def agent(self, names):
    def outputs(params, x):
      return {n: fakes.action_values(params[n], x) for n in names}

    network = fakes.memoryless(outputs, {n: fakes.PARAMS for n in names})
    # A norm would couple the heads.
    return pqn.make_pqn(
      network, dataclasses.replace(CONFIG, max_grad_norm=None)
    )

  def run_update(self, names, reward):
    def spread(x):
      return dict.fromkeys(names, x)

    trajectory = self.plain.replace(
      timestep=self.plain.timestep.replace(reward=reward),
      action=spread(self.plain.action),
      log_prob=spread(self.plain.log_prob),
      value=spread(self.plain.value),
    )
    agent = self.agent(names)
    row = jax.tree.map(lambda x: x[0], trajectory.timestep)
    state = agent.init(jax.random.key(3), row)
    return jax.jit(agent.update)(state, trajectory)

  @pytest.mark.heavy
  def test_one_head_is_no_head(self):
    t = trainer(memoryless, max_grad_norm=None)
    row = jax.tree.map(lambda x: x[0], self.plain.timestep)
    state = t.agent.init(jax.random.key(3), row)
    expected, expected_metrics = t.update(state, self.plain)
    reward = self.plain.timestep.reward
    for given in (reward, {'a': reward}):
      actual, metrics = self.run_update('a', given)
      chex.assert_trees_all_close(
        actual.params['a'], expected.params, rtol=1e-6
      )
      np.testing.assert_allclose(
        metrics['loss'], expected_metrics['loss'], rtol=1e-6
      )

  @pytest.mark.heavy
  def test_each_head_learns_from_its_own_reward(self):
    reward = self.plain.timestep.reward
    one, _ = self.run_update('ab', {'a': reward, 'b': reward})
    two, _ = self.run_update('ab', {'a': reward, 'b': -3 * reward})
    chex.assert_trees_all_equal(one.params['a'], two.params['a'])
    self.assertNotEqual(one.params['b']['theta'], two.params['b']['theta'])

  @pytest.mark.heavy
  def test_a_shared_reward_is_the_reward_of_each(self):
    reward = self.plain.timestep.reward
    one, _ = self.run_update('ab', {'a': reward, 'b': reward})
    two, _ = self.run_update('ab', reward)
    chex.assert_trees_all_equal(one.params, two.params)

  @pytest.mark.heavy
  def test_acts_with_every_head(self):
    state = types.NetworkState(carry={}, statistics={})
    params = {'a': fakes.PARAMS, 'b': {'theta': -0.3, 'v': 0.2}}
    output, _ = self.agent('ab').act(
      *(params, state, jax.random.key(0), rows_at([1.0, -1.0])),
      deterministic=True,
    )
    np.testing.assert_array_equal(output.action['a'], [1, 0])
    np.testing.assert_array_equal(output.action['b'], [0, 1])
    np.testing.assert_allclose(output.value['b'], [0.2, 0.3], rtol=1e-6)


class TransformationsTest(parameterized.TestCase):
  @parameterized.parameters(memoryless, recurrent)
  @pytest.mark.heavy
  def test_compiles_once_and_may_be_donated(self, network):
    t = Trainer(network(), CONFIG)
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def train_step(learner_state, actor_state):
      actor_state, trajectory = t.rollout(learner_state, actor_state)
      learner_state, metrics = t.update(learner_state, trajectory)
      return learner_state, actor_state, metrics

    _, timestep = t.env.reset(jax.random.key(0))
    learner_state = t.agent.init(jax.random.key(1), timestep)
    actor_state = actor.initial_actor_state(t.agent, t.env, jax.random.key(2))
    epsilons = []
    for _ in range(3):
      learner_state, actor_state, metrics = train_step(
        learner_state, actor_state
      )
      epsilons.append(metrics['epsilon'])
    self.assertEqual(train_step._cache_size(), 1)
    self.assertEqual(learner_state.num_updates, 3)
    np.testing.assert_allclose(epsilons, [1.0, 0.81, 0.62], rtol=1e-6)

  def test_nothing_is_taken_from_an_update_that_meets_nan(self):
    state, trajectory = before_second_update(memoryless)
    timestep = trajectory.timestep
    spoilt = trajectory.replace(
      timestep=timestep.replace(
        observation=timestep.observation.at[3, 1].set(jnp.nan)
      )
    )
    new_state, metrics = trainer(memoryless).update(state, spoilt)
    self.assertEqual(metrics['skipped'], 1)
    chex.assert_trees_all_equal(new_state.params, state.params)
    self.assertEqual(new_state.num_updates, state.num_updates)


class OptimizerTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_another_one_steps_instead(self):
    state, trajectory = before_second_update(memoryless)
    optimizer = optax.set_to_zero()
    agent = pqn.make_pqn(memoryless(), CONFIG, optimizer=optimizer)
    state = agent.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], trajectory.timestep)
    ).replace(params=state.params)
    new, metrics = agent.update(state, trajectory)
    chex.assert_trees_all_equal(new.params, state.params)
    self.assertGreater(metrics['grad_norm'], 0)


class WrongInputTest(parameterized.TestCase):
  def init(self, outputs, reward=None):
    agent = pqn.make_pqn(fakes.memoryless(outputs), CONFIG)
    row = rows_at(np.zeros(4))
    if reward is not None:
      row = row.replace(reward=reward)
    return agent.init(jax.random.key(0), row)

  def test_outputs_of_ppo(self):
    with self.assertRaisesRegex(TypeError, 'got PolicyValue.*for PPO'):
      self.init(fakes.policy_value)

  @parameterized.parameters(
    (lambda params, x: x, r'\(4, A\).*got \(4,\)'),
    (lambda params, x: x[:, None, None], r'got \(4, 1, 1\)'),
    (lambda params, x: {'arm': x}, r"values\['arm'\].*got \(4,\)"),
  )
  def test_outputs_that_are_not_one_number_for_each_action(
    self, outputs, message
  ):
    with self.assertRaisesRegex(ValueError, message):
      self.init(outputs)

  def test_integers_for_values(self):
    with self.assertRaisesRegex(TypeError, 'must be floats, got int32'):
      self.init(lambda params, x: jnp.zeros((4, 2), jnp.int32))

  def test_rewards_of_other_keys(self):
    reward = {'a': jnp.zeros(4), 'b': jnp.zeros(4)}
    with self.assertRaisesRegex(ValueError, r"without keys.*\['a', 'b'\]"):
      self.init(fakes.action_values, reward)

  def test_network_or_config_of_another_kind(self):
    with self.assertRaisesRegex(TypeError, '`network` must be a Network.*None'):
      pqn.make_pqn(None, CONFIG)
    with self.assertRaisesRegex(TypeError, '`config` must be a PQNConfig.*{}'):
      pqn.make_pqn(memoryless(), {})
    with self.assertRaisesRegex(
      TypeError, '`optimizer` must be an optax.*got 1'
    ):
      pqn.make_pqn(memoryless(), CONFIG, optimizer=1)

  @parameterized.parameters(
    (dict(schedule='linear', epsilon_start=0.05), "`schedule='linear'`"),
    (dict(), 'epsilon goes from 1.0 to 0.05'),
  )
  def test_schedules_without_an_end(self, settings, message):
    with self.assertRaisesRegex(ValueError, f'{message}.*`total_updates`'):
      pqn.make_pqn(memoryless(), pqn.PQNConfig(**settings))


if __name__ == '__main__':
  absltest.main()
