"""PPO updates: their numbers, what they ignore, and what they keep."""

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
from hkgraph.envs import protocol, wrappers
from hkgraph.graph import builder, core
from hkgraph.learners import ppo
from hkgraph.modules import distributions, normalizer, samplers
from hkgraph.training import actor
from tests.learners import fakes

FIRST, MID, LAST = 0, 1, 2
CONFIG = ppo.PPOConfig(num_envs=4, num_steps=9, num_minibatches=2, num_epochs=2)


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
  graph.add_output('policy', 2)
  graph.add_output('value', 1)
  graph.connect('eye', 'a')
  graph.connect('eye', 'b', delay=2)
  graph.connect('a', 'b', delay=1, reciprocal=True)
  graph.connect('a', 'a', delay=3)
  graph.connect('b', 'policy')
  graph.connect('a', 'value')
  spec = graph.finalize()

  def fn(x):
    y = core.Graph(spec)({'x': normalizer.Normalizer()(x[..., None])})
    return types.PolicyValue(
      policy=distributions.categorical(y['policy']), value=y['value'][..., 0]
    )

  return network_lib.transform(fn)


class Trainer:
  """An agent in `num_envs` of an environment, its functions compiled once."""

  def __init__(self, network, config, env=None):
    self.config = config
    self.agent = ppo.make_ppo(network, config)
    self.env = wrappers.Vectorize(env or fakes.Episodes(), config.num_envs)
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


def case_a(ratio, x, action):
  """The rows of case A; the actor's densities are those of `ratio`."""
  z = fakes.PARAMS['theta'] * x
  log_prob = np.where(action == 1, z, 0) - np.logaddexp(0, z) - np.log(ratio)

  def column(rows, dtype=np.float32):
    return np.asarray(rows, dtype)[:, None]

  return types.Trajectory(
    timestep=types.TimeStep(
      step_type=column([FIRST, MID, MID, LAST, FIRST, MID], np.int32),
      reward=column([0, 1, 1, 1, 99, 1]),
      discount=column([1, 1, 1, 0, 1, 1]),
      observation=column([*x, 7]),
    ),
    action=column(action, np.int32),
    log_prob=column(log_prob),
    value=column([0.5, 0.6, 0.7, 1.0, 0.8, 2.0]),
    carry={},
  )


def advance(rollout, update, learner_state, actor_state):
  actor_state, trajectory = rollout(learner_state, actor_state)
  learner_state, _ = update(learner_state, trajectory)
  return learner_state, actor_state


def stack(trees):
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def without_keys(tree):
  """The tree with the data of typed keys in their place."""
  return jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )


class UpdateTest(chex.TestCase):
  """One update of `logits = (0, theta x)`, `value = v x`, by hand."""

  def setUp(self):
    super().setUp()
    # The row at index 3 is LAST: what stands there must not matter.
    self.x = np.array([1.0, -2.0, 0.5, 50.0, 1.5])
    self.action = np.array([1, 0, 1, 1, 0])
    self.ratio = np.array([1.0, 1.1, 0.7, 1e3, 1.5])
    self.config = ppo.PPOConfig(
      num_envs=1,
      num_steps=5,
      num_minibatches=1,
      num_epochs=1,
      discount=0.9,
      lambda_=0.8,
      clip_epsilon=0.2,
      value_cost=0.7,
      entropy_cost=0.1,
      learning_rate=0.01,
      max_grad_norm=None,
      normalise_advantages=False,
    )

  @chex.variants(with_jit=True, without_jit=True)
  @pytest.mark.heavy
  def test_numbers(self):
    agent = ppo.make_ppo(fakes.memoryless(), self.config)
    trajectory = case_a(self.ratio, self.x, self.action)
    row = jax.tree.map(lambda x: x[0], trajectory.timestep)
    state = agent.init(jax.random.key(0), row)
    new_state, metrics = self.variant(agent.update)(state, trajectory)

    valid = np.array([0, 1, 2, 4])
    x, action, ratio = (a[valid] for a in (self.x, self.action, self.ratio))
    advantage = np.array([1.93712, 1.246, 0.3, 2.0])
    target = advantage + np.array([0.5, 0.6, 0.7, 0.8])
    theta, v = fakes.PARAMS['theta'], fakes.PARAMS['v']
    p = 1 / (1 + np.exp(-theta * x))
    # All advantages are positive, so only ratios above 1.2 are clipped.
    surrogate = np.minimum(ratio, 1.2) * advantage
    score = (action - p) * x
    slope = np.where(ratio < 1.2, ratio * advantage * score, 0)
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    entropy_slope = -theta * x * p * (1 - p) * x
    error = v * x - target
    gradient = {
      'theta': -np.mean(slope) - 0.1 * np.mean(entropy_slope),
      'v': 0.7 * np.mean(error * x),
    }

    expected = {
      'policy_loss': -np.mean(surrogate),
      'value_loss': np.mean(error**2) / 2,
      'entropy': np.mean(entropy),
      'loss': -np.mean(surrogate)
      + 0.35 * np.mean(error**2)
      - 0.1 * np.mean(entropy),
      'approx_kl': np.mean(ratio - 1 - np.log(ratio)),
      'clip_fraction': 0.5,
      'ratio_deviation': 0.5,
      'grad_norm': np.hypot(gradient['theta'], gradient['v']),
      'steps_applied': 1.0,
      'skipped': 0,
    }
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for name, g in gradient.items():
      # Adam's first step, with `eps = 1e-5`.
      np.testing.assert_allclose(
        new_state.params[name],
        fakes.PARAMS[name] - 0.01 * g / (abs(g) + 1e-5),
        rtol=1e-6,
      )
    self.assertEqual(new_state.num_updates, 1)

  def test_normalised_advantages_and_clipped_values(self):
    config = dataclasses.replace(
      self.config, normalise_advantages=True, value_clip=0.1
    )
    agent = ppo.make_ppo(fakes.memoryless(), config)
    trajectory = case_a(np.ones(5), self.x, self.action)
    row = jax.tree.map(lambda x: x[0], trajectory.timestep)
    state = agent.init(jax.random.key(0), row)
    _, metrics = jax.jit(agent.update)(state, trajectory)
    # Ratios are 1, so the surrogate is the mean of the advantages: 0.
    np.testing.assert_allclose(metrics['policy_loss'], 0, atol=1e-6)
    old = np.array([0.5, 0.6, 0.7, 0.8])
    target = old + np.array([1.93712, 1.246, 0.3, 2.0])
    value = fakes.PARAMS['v'] * self.x[np.array([0, 1, 2, 4])]
    clipped = old + np.clip(value - old, -0.1, 0.1)
    errors = np.maximum((value - target) ** 2, (clipped - target) ** 2)
    np.testing.assert_allclose(
      metrics['value_loss'], np.mean(errors) / 2, rtol=1e-5
    )


class ReplayTest(parameterized.TestCase):
  """The loss sees each row as the actor saw it."""

  @parameterized.parameters(
    (fakes.recurrent, 1),
    (fakes.recurrent, 2),
    (fakes.recurrent, 4),
    (graph_network, 2),
    (fakes.memoryless, 2),
  )
  @pytest.mark.heavy
  def test_ratio_is_one_before_the_first_step(self, network, num_minibatches):
    rollout = trainer(network).rollout
    update = trainer(network, num_minibatches=num_minibatches).update
    learner_state, actor_state = trainer(network).start(jax.random.key(0))
    for _ in range(3):
      actor_state, trajectory = rollout(learner_state, actor_state)
      learner_state, metrics = update(learner_state, trajectory)
      self.assertTrue(jnp.any(trajectory.timestep.first()[1:]))
      self.assertLess(metrics['ratio_deviation'], 1e-5)
      self.assertGreater(metrics['approx_kl'], 1e-9)  # It moved afterwards.
    self.assertFalse(jnp.all(trajectory.timestep.first()[0]))  # Mid-episode.

  @parameterized.parameters('h', 'key')
  def test_wrong_carry_shows(self, name):
    state, trajectory = before_second_update(fakes.recurrent)
    carry = dict(
      trajectory.carry, **{name: jnp.roll(trajectory.carry[name], 1)}
    )
    update = trainer(fakes.recurrent).update
    _, metrics = update(state, trajectory.replace(carry=carry))
    self.assertGreater(metrics['ratio_deviation'], 1e-3)

  def test_wrong_statistics_show(self):
    state, trajectory = before_second_update(fakes.recurrent)
    statistics = dict(state.statistics, total=state.statistics['total'] + 50)
    update = trainer(fakes.recurrent).update
    _, metrics = update(state.replace(statistics=statistics), trajectory)
    self.assertGreater(metrics['ratio_deviation'], 1e-3)

  def test_statistics_take_in_every_row_once(self):
    state, trajectory = before_second_update(fakes.recurrent)
    new_state, _ = trainer(fakes.recurrent).update(state, trajectory)
    rows = trajectory.timestep.observation[:-1]
    self.assertEqual(
      new_state.statistics['count'], state.statistics['count'] + rows.size
    )
    np.testing.assert_allclose(
      new_state.statistics['total'],
      state.statistics['total'] + np.sum(rows),
      rtol=1e-5,
    )

  @parameterized.parameters(fakes.recurrent, fakes.memoryless)
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
      log_prob=spoil(trajectory.log_prob, last, -1e4),
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

  @pytest.mark.heavy
  def test_next_update_has_another_key(self):
    state, trajectory = before_second_update(fakes.recurrent)
    new_state, _ = trainer(fakes.recurrent).update(state, trajectory)
    self.assertFalse(jnp.all(new_state.key == state.key))

  def test_valid_rows_count(self):
    state, trajectory = before_second_update(fakes.recurrent)
    t, b = np.argwhere(~np.asarray(trajectory.timestep.last()[:-1]))[0]
    flipped = trajectory.action.at[t, b].set(1 - trajectory.action[t, b])
    update = trainer(fakes.recurrent).update
    clean, _ = update(state, trajectory)
    dirty, _ = update(state, trajectory.replace(action=flipped))
    self.assertNotEqual(clean.params['theta'], dirty.params['theta'])


class HeadsTest(parameterized.TestCase):
  """Dicts of rewards, values and policies."""

  def setUp(self):
    super().setUp()
    _, self.plain = before_second_update(fakes.memoryless)

  def init(self, agent, trajectory):
    row = jax.tree.map(lambda x: x[0], trajectory.timestep)
    return agent.init(jax.random.key(3), row)

  def agent_of(self, names, **settings):
    """An agent with a head for each name; a norm would couple the heads."""
    network = fakes.memoryless(fakes.heads, {n: fakes.PARAMS for n in names})
    config = dataclasses.replace(CONFIG, max_grad_norm=None, **settings)
    return ppo.make_ppo(network, config)

  def as_dict(self, **reward):
    """The trajectory, seen by one head for each reward."""

    def spread(x):
      return dict.fromkeys(reward, x)

    return self.plain.replace(
      timestep=self.plain.timestep.replace(reward=reward),
      action=spread(self.plain.action),
      log_prob=spread(self.plain.log_prob),
      value=spread(self.plain.value),
    )

  @parameterized.parameters('combined', 'per_head')
  @pytest.mark.heavy
  def test_one_head_is_no_head(self, advantage_mode):
    t = trainer(fakes.memoryless, max_grad_norm=None)
    expected, expected_metrics = t.update(
      self.init(t.agent, self.plain), self.plain
    )
    agent = self.agent_of('a', advantage_mode=advantage_mode)
    trajectory = self.as_dict(a=self.plain.timestep.reward)
    actual, metrics = jax.jit(agent.update)(
      self.init(agent, trajectory), trajectory
    )
    chex.assert_trees_all_close(actual.params['a'], expected.params, rtol=1e-6)
    for name in ('loss', 'ratio_deviation', 'approx_kl', 'grad_norm'):
      np.testing.assert_allclose(
        metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6
      )

  @parameterized.named_parameters(
    ('per_head', dict(advantage_mode='per_head'), False),
    ('combined', dict(advantage_mode='combined'), True),
    ('weight_0', dict(advantage_weights={'a': 1.0, 'b': 0.0}), False),
  )
  @pytest.mark.heavy
  def test_whether_a_reward_drives_the_other_head(self, settings, drives):
    agent = self.agent_of('ab', **settings)
    update, reward = jax.jit(agent.update), self.plain.timestep.reward
    trajectory = self.as_dict(a=reward, b=reward)
    state = self.init(agent, trajectory)
    one, _ = update(state, trajectory)
    two, _ = update(state, self.as_dict(a=reward, b=-3 * reward))
    theta = one.params['a']['theta'], two.params['a']['theta']
    self.assertEqual(theta[0] != theta[1], drives)
    self.assertEqual(one.params['a']['v'], two.params['a']['v'])
    self.assertNotEqual(one.params['b']['v'], two.params['b']['v'])


class StopTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_target_kl_stops_all_further_steps(self):
    state, trajectory = before_second_update(fakes.memoryless)
    t = trainer(fakes.memoryless, target_kl=1e-12, learning_rate=0.1)
    stopped, metrics = t.update(state, trajectory)
    # The first minibatch's ratio is 1; the second one sees what it did.
    self.assertEqual(metrics['steps_applied'], 1 / 4)
    self.assertGreater(metrics['approx_kl'], 1e-9)
    # One step of Adam, in its second update, is not much longer than its rate.
    step = np.abs(stopped.params['theta'] - state.params['theta'])
    self.assertBetween(step, 1e-4, 0.12)
    self.assertEqual(stopped.num_updates, 2)

  def test_target_kl_out_of_reach_changes_nothing(self):
    state, trajectory = before_second_update(fakes.memoryless)
    free = trainer(fakes.memoryless).update(state, trajectory)
    patient = trainer(fakes.memoryless, target_kl=1e9)
    patient = patient.update(state, trajectory)
    chex.assert_trees_all_close(free[0].params, patient[0].params, rtol=1e-6)
    self.assertEqual(free[1]['steps_applied'], 1)


class NonFiniteTest(parameterized.TestCase):
  """An update that meets NaN changes nothing and says where it was."""

  def setUp(self):
    super().setUp()
    _, trajectory = before_second_update(fakes.memoryless)
    x = trajectory.timestep.observation
    self.trajectory = trajectory.replace(
      timestep=trajectory.timestep.replace(
        observation={'x': x, 'goal': jnp.zeros((*x.shape, 2))}
      )
    )
    self.trainer = trainer(self.network)
    row = jax.tree.map(lambda x: x[0], self.trajectory.timestep)
    self.state = self.trainer.agent.init(jax.random.key(0), row)

  @staticmethod
  def network():
    return fakes.memoryless(
      lambda params, x: fakes.policy_value(params, x['x'] + x['goal'][..., 0])
    )

  def poison(self, **leaves):
    return self.trajectory.replace(
      timestep=self.trajectory.timestep.replace(**leaves)
    )

  def assert_unchanged(self, state):
    chex.assert_trees_all_equal(without_keys(state), without_keys(self.state))

  @parameterized.parameters((0, jnp.nan), (3, jnp.inf), (-1, jnp.nan))
  def test_observation_is_named(self, row, value):
    observation = dict(self.trajectory.timestep.observation)
    observation['goal'] = observation['goal'].at[row, 1, :].set(value)
    trajectory = self.poison(observation=observation)
    state, metrics = self.trainer.update(self.state, trajectory)
    self.assert_unchanged(state)
    self.assertEqual(metrics['skipped'], 1)
    self.assertEqual(metrics['nonfinite/observation/goal'], 2)
    self.assertEqual(metrics['nonfinite/observation/x'], 0)

  def test_reward_is_named(self):
    timestep = self.trajectory.timestep
    t, b = np.argwhere(np.asarray(timestep.mid()))[-1]
    trajectory = self.poison(reward=timestep.reward.at[t, b].set(jnp.nan))
    state, metrics = self.trainer.update(self.state, trajectory)
    self.assert_unchanged(state)
    self.assertEqual(metrics['nonfinite/reward'], 1)
    self.assertEqual(metrics['nonfinite/observation/goal'], 0)

  def test_params_that_run_away_are_not_taken(self):
    update = trainer(fakes.memoryless, learning_rate=3e38).update
    x = self.trajectory.timestep.observation['x']
    state, metrics = update(self.state, self.poison(observation=x))
    self.assert_unchanged(state)
    self.assertEqual(metrics['skipped'], 1)
    self.assertGreater(metrics['nonfinite/params'], 0)
    self.assertEqual(metrics['nonfinite/observation'], 0)

  def test_finite_update_is_taken(self):
    state, metrics = self.trainer.update(self.state, self.trajectory)
    self.assertEqual(metrics['skipped'], 0)
    self.assertEqual(state.num_updates, 1)
    self.assertNotEqual(state.params['theta'], self.state.params['theta'])


class TransformationsTest(parameterized.TestCase):
  @parameterized.parameters(fakes.recurrent, graph_network)
  @pytest.mark.heavy
  def test_four_seeds_at_once_are_four_single_ones(self, network):
    t = trainer(network)
    keys = jax.random.split(jax.random.key(1), 4)
    single = [t.start(key) for key in keys]
    together = stack(single)
    rollout, update = (jax.jit(jax.vmap(f)) for f in (t.rollout, t.update))
    for _ in range(2):
      single = [advance(t.rollout, t.update, *states) for states in single]
      together = advance(rollout, update, *together)
    chex.assert_trees_all_close(
      without_keys(together), without_keys(stack(single)), rtol=1e-5, atol=1e-5
    )

  @parameterized.parameters((fakes.memoryless, None), (fakes.recurrent, 0.01))
  @pytest.mark.heavy
  def test_compiles_once_and_may_be_donated(self, network, target_kl):
    config = dataclasses.replace(CONFIG, target_kl=target_kl)
    t = Trainer(network(), config)
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
    for _ in range(3):
      learner_state, actor_state, _ = train_step(learner_state, actor_state)
    self.assertEqual(train_step._cache_size(), 1)
    self.assertEqual(learner_state.num_updates, 3)

  @pytest.mark.heavy
  def test_one_environment(self):
    t = trainer(fakes.recurrent, num_envs=1, num_minibatches=1)
    learner_state, actor_state = t.start(jax.random.key(0))
    _, trajectory = t.rollout(learner_state, actor_state)
    _, metrics = t.update(learner_state, trajectory)
    self.assertLess(metrics['ratio_deviation'], 1e-5)
    self.assertEqual(metrics['skipped'], 0)

  def test_acts_at_another_batch_size_and_greedily(self):
    t = trainer(fakes.recurrent)
    learner_state, _ = t.start(jax.random.key(0))
    x = jnp.array([3.0, -3.0, 2.0, -2.0, 1.0, -1.0, 0.5])
    timestep = types.TimeStep(
      step_type=jnp.zeros(7, jnp.int32),
      reward=jnp.zeros(7),
      discount=jnp.ones(7),
      observation=100 * x,  # Above the noise.
    )
    state = types.NetworkState(
      carry=t.agent.initial_carry(7), statistics=learner_state.statistics
    )
    act = jax.jit(functools.partial(t.agent.act, deterministic=True))
    output, _ = act(learner_state.params, state, jax.random.key(1), timestep)
    np.testing.assert_array_equal(output.action, x > 0)


class Bandit:
  """Shows 1 or -1; one for the action 1 or 0 that goes with it."""

  def reset(self, key):
    x = jax.random.rademacher(key, (), jnp.float32)
    return x, protocol.restart(fakes.Episodes().reward_spec(), x)

  def step(self, x, action):
    reward = (action == (x > 0)).astype(jnp.float32)
    return x, protocol.transition(reward, jnp.zeros_like(x), jnp.bool_(True))

  def __getattr__(self, name):
    return getattr(fakes.Episodes(), name)


class LearningTest(absltest.TestCase):
  @pytest.mark.heavy
  def test_bandit(self):
    config = ppo.PPOConfig(num_envs=16, num_steps=16, learning_rate=0.03)
    network = fakes.memoryless(params={'theta': -1.0, 'v': 0.0})
    t, shares = Trainer(network, config, Bandit()), []
    learner_state, actor_state = t.start(jax.random.key(0))
    for _ in range(25):
      actor_state, trajectory = t.rollout(learner_state, actor_state)
      learner_state, _ = t.update(learner_state, trajectory)
      timestep = trajectory.timestep
      shares.append(jnp.mean(timestep.reward, where=timestep.last()))
    self.assertLess(shares[0], 0.4)
    self.assertGreater(np.mean(shares[-5:]), 0.9)


class OptimizerTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_another_one_steps_instead(self):
    state, trajectory = before_second_update(fakes.memoryless)
    optimizer = optax.set_to_zero()
    agent = ppo.make_ppo(fakes.memoryless(), CONFIG, optimizer=optimizer)
    state = agent.init(
      jax.random.key(0), jax.tree.map(lambda x: x[0], trajectory.timestep)
    ).replace(params=state.params)
    new, metrics = agent.update(state, trajectory)
    chex.assert_trees_all_equal(new.params, state.params)
    self.assertGreater(metrics['grad_norm'], 0)


class WrongInputTest(parameterized.TestCase):
  def init(self, outputs, reward=None, **settings):
    config = dataclasses.replace(CONFIG, **settings)
    agent = ppo.make_ppo(fakes.memoryless(outputs), config)
    zeros = jnp.zeros(4)
    timestep = types.TimeStep(
      step_type=jnp.zeros(4, jnp.int32),
      reward=zeros if reward is None else reward,
      discount=jnp.ones(4),
      observation=zeros,
    )
    return agent.init(jax.random.key(0), timestep)

  def test_outputs_of_a_graph(self):
    with self.assertRaisesRegex(TypeError, 'PolicyValue.*got dict'):
      self.init(lambda params, x: {'policy': x, 'value': x})

  def test_logits_for_a_policy(self):
    def outputs(params, x):
      return types.PolicyValue(policy=x, value=x)

    with self.assertRaisesRegex(TypeError, 'distrax distribution.*head'):
      self.init(outputs)

  def test_value_with_an_axis_too_many(self):
    def outputs(params, x):
      output = fakes.policy_value(params, x)
      return output.replace(value=output.value[:, None])

    with self.assertRaisesRegex(ValueError, r'shape \(4,\).*got \(4, 1\)'):
      self.init(outputs)

  def test_rewards_without_values(self):
    reward = {'a': jnp.zeros(4), 'b': jnp.zeros(4)}
    with self.assertRaisesRegex(ValueError, r"without keys.*\['a', 'b'\]"):
      self.init(fakes.policy_value, reward)

  def test_one_policy_for_several_advantages(self):
    def outputs(params, x):
      output = fakes.policy_value(params, x)
      return output.replace(value={'a': output.value})

    with self.assertRaisesRegex(ValueError, "'combined'"):
      self.init(outputs, {'a': jnp.zeros(4)}, advantage_mode='per_head')

  def test_weights_of_other_keys(self):
    with self.assertRaisesRegex(ValueError, r"\['c'\].*without keys"):
      self.init(fakes.policy_value, advantage_weights={'c': 1.0})

  def test_network_or_config_of_another_kind(self):
    with self.assertRaisesRegex(TypeError, '`network` must be a Network.*None'):
      ppo.make_ppo(None, CONFIG)
    with self.assertRaisesRegex(TypeError, '`config` must be a PPOConfig.*{}'):
      ppo.make_ppo(fakes.memoryless(), {})
    with self.assertRaisesRegex(
      TypeError, '`optimizer` must be an optax.*got 1'
    ):
      ppo.make_ppo(fakes.memoryless(), CONFIG, optimizer=1)

  def test_trajectory_of_other_sizes(self):
    state, trajectory = before_second_update(fakes.memoryless)
    short = jax.tree.map(lambda x: x[1:], trajectory)
    with self.assertRaisesRegex(ValueError, r'9 \+ 1 rows of 4.*\(9, 4\)'):
      trainer(fakes.memoryless).agent.update(state, short)


if __name__ == '__main__':
  absltest.main()
