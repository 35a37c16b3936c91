"""DreamerV3 updates: what counts, what learns, and what is kept."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.envs import wrappers
from hkgraph.graph import builder
from hkgraph.learners import config as config_lib
from hkgraph.learners import dreamer, dreamer_loss
from hkgraph.losses import dreamer as losses
from hkgraph.modules import heads, leaky, rssm, world_model
from hkgraph.training import actor
from tests.learners import fakes

FIRST, MID, LAST = 0, 1, 2
CONFIG = dreamer.DreamerConfig(
  num_envs=2,
  num_steps=4,
  train_ratio=2,
  batch_size=3,
  sequence_length=4,
  burn_in=1,
  horizon=3,
  capacity=24,
  entropy_cost=0.0,
  unimix=0.0,
  free_nats=0.0,
  hidden_size=4,
  num_layers=1,
  recurrent_size=4,
  num_latents=2,
  num_classes=3,
  num_bins=5,
  num_channels=2,
)
OBSERVATION = specs.Array((), np.float32)
ACTION = specs.DiscreteArray(2)
ROWS, BATCH = CONFIG.replayed_rows, 2


def noisy(params, scale=0.5, seed=0):
  """Other parameters, none of them 0."""
  leaves, treedef = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return treedef.unflatten([
    x + scale * jnp.float32(rng.normal(size=x.shape)) for x in leaves
  ])  # fmt: skip


def decided(params):
  """Parameters by which latents are, in effect, the most likely ones."""

  def scale(path, x):
    name = jax.tree_util.keystr(path)
    is_logits = 'posterior_output' in name or 'prior_output' in name
    return x * 1e4 if is_logits else x

  return jax.tree_util.tree_map_with_path(scale, params)


def some(spec, *lead, seed=0):
  """Observations of a spec or a dict of them."""
  rng = np.random.default_rng(seed)

  def draw(spec):
    shape = (*lead, *spec.shape)
    if isinstance(spec, specs.DiscreteArray):
      return jnp.asarray(rng.integers(spec.num_values, size=shape), spec.dtype)
    if np.issubdtype(spec.dtype, np.floating):
      return jnp.asarray(rng.normal(size=shape), spec.dtype)
    return jnp.asarray(rng.integers(200, size=shape), spec.dtype)

  return jax.tree.map(draw, spec, is_leaf=lambda x: not isinstance(x, dict))


def timesteps(observation, step_type, reward=None, discount=None):
  step_type = jnp.asarray(step_type, jnp.int32)
  shape = step_type.shape
  return types.TimeStep(
    step_type=step_type,
    reward=jnp.zeros(shape) if reward is None else jnp.float32(reward),
    discount=jnp.ones(shape) if discount is None else jnp.float32(discount),
    observation=observation,
  )


class Trainer:
  """An agent in a fake environment, its functions compiled once."""

  def __init__(self, config=CONFIG):
    self.agent = dreamer.make_dreamer(OBSERVATION, ACTION, config)
    self.env = wrappers.Vectorize(fakes.Episodes(), config.num_envs)
    self.rollout = jax.jit(self._rollout)
    self.traces = 0

    def update(learner_state, trajectory):
      self.traces += 1
      return self.agent.update(learner_state, trajectory)

    self.update = jax.jit(update)
    _, timestep = self.env.reset(jax.random.key(0))
    self.state = self.agent.init(jax.random.key(1), timestep)
    self.history = [(self.state, None, None)]
    actor_state = actor.initial_actor_state(
      self.agent, self.env, jax.random.key(2)
    )
    state = self.state
    for _ in range(5):
      actor_state, trajectory = self.rollout(state, actor_state)
      state, metrics = self.update(state, trajectory)
      self.history.append((state, trajectory, metrics))

  def _rollout(self, learner_state, actor_state):
    actor_state, trajectory, _ = actor.rollout(
      self.agent, self.env, learner_state, actor_state, CONFIG.num_steps
    )
    return actor_state, trajectory


@functools.cache
def trainer():
  return Trainer()


class UpdateTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_waits_until_a_sequence_is_stored(self):
    # Five rows make a sequence, four are a trajectory.
    (start, _, _), (one, _, m1), (two, _, m2), *_ = trainer().history
    self.assertEqual(m1['gradient_steps'], 0)
    for name in ('params', 'opt_state', 'slow_critic', 'return_range'):
      chex.assert_trees_all_equal(getattr(start, name), getattr(one, name))
    self.assertEqual(m2['gradient_steps'], CONFIG.train_ratio)
    last, _, _ = trainer().history[-1]
    # An untrained critic and reward of 0 have nothing to tell the actor yet.
    for name, later in dict(world_model=two, critic=two, actor=last).items():
      moved = jax.tree.map(
        lambda x, y: jnp.abs(x - y).max(), one.params[name], later.params[name]
      )
      self.assertGreater(max(jax.tree.leaves(moved)), 0, name)

  @pytest.mark.heavy
  def test_each_update_counts(self):
    states, _, metrics = zip(*trainer().history, strict=True)
    self.assertEqual([int(s.num_updates) for s in states], [0, 1, 2, 3, 4, 5])
    keys = {tuple(np.ravel(jax.random.key_data(s.key))) for s in states}
    self.assertLen(keys, 6)
    for m in metrics[1:]:
      self.assertEqual(m['skipped'], 0)
      chex.assert_tree_all_finite(m)

  @pytest.mark.heavy
  def test_nothing_moves_once_a_schedule_has_ended(self):
    # The first update has too few rows; the next two make all of its steps.
    config = dataclasses.replace(CONFIG, schedule='linear', total_updates=2)
    states, *_ = zip(*Trainer(config).history, strict=True)
    params = [state.params for state in states]
    chex.assert_trees_all_equal(params[3], params[5])
    for name in params[0]:
      moved = jax.tree.map(
        lambda x, y: jnp.abs(x - y).max(), params[2][name], params[3][name]
      )
      self.assertGreater(max(jax.tree.leaves(moved)), 0, name)

  def test_the_replay_holds_every_row_once(self):
    _, *updates = trainer().history
    for i, (state, _, _) in enumerate(updates):
      replay = state.replay
      chunks = [t for _, t, _ in updates[: i + 1]]
      join = lambda *x: np.concatenate([y[:4] for y in x])  # noqa: E731
      timestep = jax.tree.map(join, *(t.timestep for t in chunks))
      rows = dreamer_loss.Row(
        observation=timestep.observation,
        action=join(*(t.action for t in chunks)),
        reward=timestep.reward,
        discount=timestep.discount,
        is_first=timestep.step_type == FIRST,
      )
      size = min(4 * (i + 1), 12)
      self.assertEqual(replay.size, size)
      self.assertEqual(replay.position, 4 * (i + 1) % 12)
      order = (np.arange(-size, 0) + int(replay.position)) % 12
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x, o=order: x[o], replay.rows),
        jax.tree.map(lambda x, n=size: x[-n:], rows),
      )

  def test_traces_once(self):
    self.assertEqual(trainer().traces, 1)
    self.assertEqual(trainer().update._cache_size(), 1)

  def test_the_slow_critic_moves_in_each_gradient_step(self):
    state, trajectory, _ = trainer().history[-1]
    critic = state.params['critic']
    away = jax.tree.map(lambda x: x + 1, critic)
    new, _ = trainer().update(state.replace(slow_critic=away), trajectory)
    # The critic itself moves by no more than its step size.
    left = (1 - CONFIG.slow_rate) ** CONFIG.train_ratio
    chex.assert_trees_all_close(
      new.slow_critic, jax.tree.map(lambda x: x + left, critic), atol=2e-4
    )

  def test_the_range_of_returns_is_tracked(self):
    weights = [float(s.return_range.weight) for s, _, _ in trainer().history]
    steps = np.array([0, 0, 2, 4, 6, 8])
    np.testing.assert_allclose(
      weights, 1 - (1 - CONFIG.return_rate) ** steps, rtol=1e-4
    )

  @pytest.mark.heavy
  def test_nothing_is_taken_from_an_update_that_meets_nan(self):
    """Nor does what is not finite spoil the updates to come."""
    state, trajectory, _ = trainer().history[-1]
    timestep = trajectory.timestep
    spoilt = trajectory.replace(
      timestep=timestep.replace(
        observation=timestep.observation.at[1, 1].set(jnp.nan)
      )
    )
    new, metrics = trainer().update(state, spoilt)
    self.assertEqual(metrics['skipped'], 1)
    self.assertEqual(metrics['nonfinite/observation'], 1)
    chex.assert_trees_all_equal(new.params, state.params)
    self.assertEqual(new.num_updates, state.num_updates)
    for _ in range(3):
      new, metrics = trainer().update(new, trajectory)
      self.assertEqual(metrics['skipped'], 0)
    self.assertEqual(new.num_updates, state.num_updates + 3)


def hand_made(seed=0):
  """Rows `[burn_in + T, B]`: an episode ends at row 2 of element 0."""
  rng = np.random.default_rng(seed)
  is_first = np.zeros((ROWS, BATCH), bool)
  is_first[3, 0] = is_first[1, 1] = True
  # Bins at symexp(-20, -10, 0, 10, 20): rewards that are bins.
  rewards = np.float32(np.expm1(10.0)) * rng.integers(-1, 2, (ROWS, BATCH))
  return dreamer_loss.Row(
    observation=jnp.float32(rng.normal(size=(ROWS, BATCH))),
    action=jnp.int32(rng.integers(2, size=(ROWS, BATCH))),
    reward=jnp.float32(rewards),
    discount=jnp.ones((ROWS, BATCH)).at[2, 0].set(0),
    is_first=jnp.asarray(is_first),
  )


@functools.cache
def _gradient():
  def loss(params, observation, slow_critic, rows, key):
    rows = rows.replace(observation=observation)
    return trainer().agent.loss(
      params, slow_critic, losses.init_range(), rows, key
    )

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def run_loss(rows, params=None, slow_critic=None):
  """Gradients of parameters and of observations, and metrics with the loss."""
  params = noisy(trainer().state.params) if params is None else params
  slow_critic = params['critic'] if slow_critic is None else slow_critic
  (loss, (_, metrics)), grads = _gradient()(
    params, rows.observation, slow_critic, rows, jax.random.key(7)
  )
  return *grads, metrics | {'loss': loss}


def constant_heads(*, reward=None, continues=None, critic=None):
  """Noisy parameters, but for heads that give the same logits everywhere."""
  params = noisy(trainer().state.params)

  def change(path, x):
    name = jax.tree_util.keystr(path)
    for key, logits in (
      ("reward/logits'", reward),
      ("continue_output'", continues),
      ("two_hot_head/logits'", critic),
    ):
      if key in name and logits is not None:
        return jnp.zeros_like(x) if x.ndim == 2 else jnp.float32(logits)
    return x

  return jax.tree_util.tree_map_with_path(change, params)


# All weight of the reward on the bin of symlog 10.
CERTAIN = np.array([-99.0, -99, -99, 99, -99])


def largest(tree):
  return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))


def log_softmax(x):
  return x - np.log(np.sum(np.exp(x)))


class ModelLossTest(parameterized.TestCase):
  def test_numbers_of_rewards_and_ends(self):
    """`LAST` rows count with reward and end, the way into `FIRST` does not."""
    rows = hand_made()
    logits, odds = np.array([0.3, -0.5, 1.0, 0.1, -1.2]), 0.7
    params = constant_heads(reward=logits, continues=[odds])
    _, _, metrics = run_loss(rows, params)
    counts = ~np.asarray(rows.is_first)[1:]
    self.assertEqual(counts.sum(), 6)
    bins = np.asarray(np.sign(rows.reward), int)[1:] + 2
    surprise = -log_softmax(logits)[bins]
    np.testing.assert_allclose(
      metrics['reward_loss'], surprise[counts].mean(), rtol=1e-5
    )
    goes_on = 1 / (1 + np.exp(-odds))
    # Of six transitions one terminates, that into row 2 of element 0.
    expected = -(5 * np.log(goes_on) + np.log(1 - goes_on)) / 6
    np.testing.assert_allclose(metrics['continue_loss'], expected, rtol=1e-5)

  def test_rewards_and_ends_of_first_rows_and_burn_in_are_nobodys(self):
    rows = hand_made()
    nobodys = rows.is_first | (jnp.arange(ROWS) == 0)[:, None]
    spoilt = rows.replace(
      reward=jnp.where(nobodys, jnp.nan, rows.reward),
      discount=jnp.where(nobodys, 0, rows.discount),
    )
    clean, dirty = run_loss(rows), run_loss(spoilt)
    chex.assert_tree_all_finite(clean[0])
    chex.assert_trees_all_equal(clean[0], dirty[0])
    chex.assert_trees_all_equal(clean[2], dirty[2])

  @parameterized.parameters('reward', 'discount')
  def test_of_a_last_row_they_count(self, name):
    rows = hand_made()
    x = getattr(rows, name)
    changed = rows.replace(**{name: x.at[2, 0].set(1 - x[2, 0])})
    one, two = run_loss(rows), run_loss(changed)
    name = {'reward': 'reward_loss', 'discount': 'continue_loss'}[name]
    self.assertNotEqual(one[2][name], two[2][name])
    self.assertNotEqual(one[2]['loss'], two[2]['loss'])

  def test_nothing_passes_a_first_row(self):
    """Row 1 of element 1 opens an episode: what was before is not known."""
    rows = hand_made()
    spoilt = rows.replace(
      observation=rows.observation.at[0, 1].set(1e3),
      action=rows.action.at[0, 1].set(1 - rows.action[0, 1]),
    )
    clean, dirty = run_loss(rows), run_loss(spoilt)
    chex.assert_trees_all_equal(clean[0], dirty[0])
    chex.assert_trees_all_equal(clean[2], dirty[2])

  @parameterized.parameters('observation', 'action')
  @pytest.mark.heavy
  def test_burn_in_warms_the_state(self, name):
    rows = hand_made()
    x = getattr(rows, name)
    # Far off, for another latent to be drawn.
    other = -1e3 * jnp.sign(x[0, 0]) if name == 'observation' else 1 - x[0, 0]
    warmer = rows.replace(**{name: x.at[0, 0].set(other)})
    one, two = run_loss(rows), run_loss(warmer)
    self.assertNotEqual(one[2]['loss'], two[2]['loss'])

  def test_the_action_of_the_last_row_leads_nowhere(self):
    rows = hand_made()
    other = rows.replace(action=rows.action.at[-1].set(1 - rows.action[-1]))
    one, two = run_loss(rows), run_loss(other)
    chex.assert_trees_all_equal(one[2], two[2])

  @pytest.mark.heavy
  def test_burn_in_has_no_gradient(self):
    _, gradient, _ = run_loss(hand_made())
    np.testing.assert_array_equal(gradient[0], 0)
    self.assertGreater(jnp.abs(gradient[1:]).min(), 0)

  def test_the_policy_does_not_teach_the_world(self):
    rows = hand_made()
    params = noisy(trainer().state.params)
    other = dict(noisy(params, seed=1), world_model=params['world_model'])
    one, two = run_loss(rows, params), run_loss(rows, other)
    chex.assert_trees_all_equal(one[0]['world_model'], two[0]['world_model'])
    self.assertNotEqual(one[2]['loss'], two[2]['loss'])
    self.assertEqual(one[2]['model_loss'], two[2]['model_loss'])
    self.assertGreater(largest(one[0]['world_model']), 0.01)


class BehaviourLossTest(parameterized.TestCase):
  def test_the_actor_learns_without_entropy(self):
    self.assertEqual(CONFIG.entropy_cost, 0)
    grads, _, metrics = run_loss(hand_made())
    self.assertGreater(largest(grads['actor']), 1e-4)
    self.assertGreater(metrics['advantage_magnitude'], 1e-4)

  def test_without_advantage_it_learns_nothing(self):
    params = constant_heads(reward=np.zeros(5), critic=np.zeros(5))
    grads, _, metrics = run_loss(hand_made(), params)
    self.assertEqual(metrics['advantage_magnitude'], 0)
    self.assertEqual(largest(grads['actor']), 0)

  def returns(self, continues, value=0.0):
    """Of a constant reward and value."""
    reward, gamma, lambda_ = np.expm1(10.0), CONFIG.discount, CONFIG.lambda_
    target = [value]
    for _ in range(CONFIG.horizon):
      bootstrap = (1 - lambda_) * value + lambda_ * target[0]
      target.insert(0, reward + gamma * continues * bootstrap)
    return np.array(target[:-1])

  def test_imagined_worlds_that_go_on(self):
    params = constant_heads(reward=CERTAIN, continues=[200], critic=np.zeros(5))
    _, _, metrics = run_loss(hand_made(), params)
    np.testing.assert_allclose(
      metrics['imagined_reward'], np.expm1(10.0), rtol=1e-5
    )
    self.assertEqual(metrics['imagined_continues'], 1)
    weight = CONFIG.discount ** np.arange(CONFIG.horizon)
    target = np.sum(weight * self.returns(1)) / np.sum(weight)
    np.testing.assert_allclose(metrics['target_mean'], target, rtol=1e-5)
    np.testing.assert_allclose(metrics['value_mean'], 0, atol=1e-4)
    # Seven of eight starts go on; two log-densities of five even bins.
    loss = 2 * np.log(5) * weight.mean() * 7 / 8
    np.testing.assert_allclose(metrics['critic_loss'], loss, rtol=1e-5)

  def test_a_terminal_at_the_first_imagined_step(self):
    """Only the row before it counts, and that with the reward alone."""
    params = constant_heads(
      reward=CERTAIN, continues=[-200], critic=np.zeros(5)
    )
    grads, _, metrics = run_loss(hand_made(), params)
    np.testing.assert_allclose(
      metrics['target_mean'], np.expm1(10.0), rtol=1e-5
    )
    loss = 2 * np.log(5) / CONFIG.horizon * 7 / 8
    np.testing.assert_allclose(metrics['critic_loss'], loss, rtol=1e-5)
    self.assertGreater(largest(grads['actor']), 1e-6)

  def test_what_follows_a_terminal_is_worth_nothing(self):
    values = [np.zeros(5), np.array([0.0, 0, 0, 0, 3])]
    means = []
    for critic in values:
      params = constant_heads(reward=CERTAIN, continues=[-200], critic=critic)
      means.append(run_loss(hand_made(), params)[2]['target_mean'])
    self.assertEqual(*means)

  def test_terminal_rows_are_no_start(self):
    rows = hand_made()
    ended = rows.replace(
      discount=jnp.zeros_like(rows.discount),
      is_first=jnp.zeros_like(rows.is_first),
    )
    grads, _, metrics = run_loss(ended)
    self.assertEqual(largest(grads['actor']), 0)
    self.assertEqual(largest(grads['critic']), 0)
    self.assertEqual(metrics['critic_loss'], 0)
    # Of truncated episodes they are.
    grads, _, _ = run_loss(rows.replace(discount=jnp.ones_like(rows.discount)))
    self.assertGreater(largest(grads['actor']), 1e-4)
    self.assertGreater(largest(grads['critic']), 1e-4)

  def test_the_slow_critic_pulls_the_critic_alone(self):
    params = noisy(trainer().state.params)
    slow = noisy(params['critic'], seed=3)
    one, two = (
      run_loss(hand_made(), params, critic)
      for critic in (params['critic'], slow)
    )
    for name in ('world_model', 'actor'):
      chex.assert_trees_all_equal(one[0][name], two[0][name])
    self.assertNotEqual(one[2]['critic_loss'], two[2]['critic_loss'])


class ActTest(parameterized.TestCase):
  """Acting in a loop is observing; latents do not depend on keys here."""

  def setUp(self):
    super().setUp()
    agent = trainer().agent
    self.act = jax.jit(functools.partial(agent.act, deterministic=True))
    self.params = decided(noisy(trainer().state.params))
    step_type = np.full((6, 3), MID)
    step_type[0] = step_type[2, 1] = step_type[4, 2] = FIRST
    step_type[1, 1] = LAST
    self.timestep = timesteps(some(OBSERVATION, 6, 3), step_type)

  def loop(self, timestep, batch_size):
    carry = trainer().agent.initial_carry(batch_size)
    state, outputs = types.NetworkState(carry=carry, statistics={}), []
    for t in range(6):
      row = jax.tree.map(lambda x, t=t: x[t], timestep)
      output, state = self.act(self.params, state, jax.random.key(t), row)
      outputs.append((output, state.carry))
    return jax.tree.map(lambda *x: jnp.stack(x), *outputs)

  @pytest.mark.heavy
  def test_elements_do_not_meet(self):
    output, carry = self.loop(self.timestep, 3)
    for b in range(3):
      row = jax.tree.map(lambda x, b=b: x[:, b : b + 1], self.timestep)
      chex.assert_trees_all_close(
        self.loop(row, 1),
        jax.tree.map(lambda x, b=b: x[:, b : b + 1], (output, carry)),
        rtol=1e-4,
        atol=1e-5,
      )
    self.assertGreater(np.ptp(output.value), 1e-3)

  def test_observing_the_sequence(self):
    output, carry = self.loop(self.timestep, 3)
    sizes = CONFIG.sizes

    def make():
      model = world_model.WorldModel(
        OBSERVATION,
        rssm.GatedCell(sizes.recurrent_size, sizes.hidden_size),
        num_latents=sizes.num_latents,
        num_classes=sizes.num_classes,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_bins=sizes.num_bins,
        unimix=CONFIG.unimix,
      )
      return model.observe, {'observe': model.observe}

    _, fns = network_lib.methods(make)
    encoded = heads.encode_action(ACTION, output.action)
    np.testing.assert_array_equal(carry['action'], encoded)
    # What comes before row 0 is not read.
    action_tm1 = jnp.concatenate([encoded[:1] + 9, encoded[:-1]])
    observed = jax.jit(fns['observe'])(
      self.params['world_model'],
      jax.tree.map(lambda x: x + 1, trainer().agent.initial_carry(3)['state']),
      self.timestep.observation,
      action_tm1,
      self.timestep.first(),
      jax.random.key(9),
    )
    state = carry['state']
    features = jnp.concatenate([state.core, state.latent], axis=-1)
    np.testing.assert_allclose(
      features, observed.features, rtol=1e-4, atol=1e-5
    )

  @pytest.mark.heavy
  def test_what_is_foreseen_of_rows_that_were_seen(self):
    """More context changes no row that both have seen, but later ones."""
    agent = trainer().agent
    timestep = self.timestep.replace(
      step_type=self.timestep.step_type.at[1:].set(MID)
    )
    action = jnp.asarray([[0, 1, 1]] * 6, jnp.int32)
    seen = [
      agent.foresee(
        self.params, timestep, action, jax.random.key(n), num_context=n
      )
      for n in (2, 6)
    ]
    chex.assert_trees_all_close(
      *(jax.tree.map(lambda x: x[:2], f) for f in seen), rtol=1e-4, atol=1e-5
    )
    few, all_ = seen
    self.assertGreater(jnp.abs(few.reward - all_.reward)[2:].max(), 1e-6)
    chex.assert_trees_all_equal(few.target, all_.target)
    np.testing.assert_array_equal(
      few.target['observation'][..., 0], timestep.observation
    )
    for name in ('reward', 'discount'):
      self.assertEqual(getattr(few, name).shape, (6, 3))

  def test_noise_comes_from_the_key(self):
    agent = trainer().agent
    row = timesteps(jnp.zeros(200), np.full(200, FIRST))
    state = types.NetworkState(carry=agent.initial_carry(200), statistics={})
    act = jax.jit(agent.act)
    params = noisy(trainer().state.params, 0.1)
    one, same, other = (
      act(params, state, jax.random.key(i), row)[0] for i in (0, 0, 1)
    )
    chex.assert_trees_all_equal(one, same)
    self.assertGreater(np.sum(one.action != other.action), 20)
    self.assertEqual(set(np.unique(one.action)), {0, 1})


def graph():
  graph = builder.PopulationGraph()
  graph.add_input('sense', 4, input_from='x')
  graph.add_population('a', 4, activation='jax.numpy.tanh')
  graph.add_output('out', 3)
  graph.connect('sense', 'a', delay=1)
  graph.connect('a', 'a', delay=3)
  graph.connect('a', 'out')
  return graph.finalize()


BODY = specs.BoundedArray((2,), np.float32, -2.0, 4.0)
SEVERAL = specs.BoundedArray((2,), np.int32, 0, (1, 2))
MANY = {
  'eye': specs.Array((8, 8, 1), np.uint8),
  'kind': specs.DiscreteArray(3, dtype=np.int32),
  'pose': specs.Array((2,), np.float32),
}
KINDS = {
  'dicts, graph, bfloat16': (
    MANY,
    {'arm': BODY, 'legs': SEVERAL, 'mouth': ACTION},
    graph(),
    dict(dtype='bfloat16'),
  ),
  'body, gru': (OBSERVATION, BODY, lambda: hk.GRU(3), {}),
  'several, lstm, bfloat16': (
    specs.DiscreteArray(3, dtype=np.int32),
    SEVERAL,
    lambda: hk.LSTM(3),
    dict(dtype='bfloat16', burn_in=0),
  ),
}


class KindsTest(parameterized.TestCase):
  @parameterized.parameters(*KINDS)
  @pytest.mark.heavy
  def test_acts_and_learns(self, name):
    observation_spec, action_spec, core, settings = KINDS[name]
    # One trajectory is enough for a gradient step.
    config = dataclasses.replace(
      CONFIG, num_steps=5, train_ratio=1, entropy_cost=1.0, **settings
    )
    agent = dreamer.make_dreamer(
      observation_spec, action_spec, config, core=core
    )
    timestep = timesteps(
      some(observation_spec, 6, 2),
      [[FIRST] * 2] + [[MID] * 2] * 5,
      reward=some(OBSERVATION, 6, 2),
    )
    row = jax.tree.map(lambda x: x[0], timestep)
    state = jax.jit(agent.init)(jax.random.key(0), row)
    carry = agent.initial_carry(2)
    act = jax.jit(agent.act)
    network_state = types.NetworkState(carry=carry, statistics={})
    outputs = []
    for t in range(6):
      row = jax.tree.map(lambda x, t=t: x[t], timestep)
      output, network_state = act(
        state.params, network_state, jax.random.key(t), row
      )
      outputs.append(output)
    chex.assert_trees_all_equal_shapes_and_dtypes(network_state.carry, carry)
    output = jax.tree.map(lambda *x: jnp.stack(x), *outputs)
    chex.assert_tree_all_finite(output)
    jax.tree.map(
      lambda s, a: [s.validate(x) for x in np.reshape(a, (-1, *s.shape))],
      action_spec,
      output.environment_action,
    )
    trajectory = types.Trajectory(
      timestep=timestep,
      action=jax.tree.map(lambda x: x[:5], output.action),
      log_prob=jax.tree.map(lambda x: x[:5], output.log_prob),
      value=output.value,
      carry=carry,
    )
    update = jax.jit(agent.update, donate_argnums=0)
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
      state, metrics = update(state, trajectory)
      self.assertEqual(metrics['gradient_steps'], 1)
      self.assertEqual(metrics['skipped'], 0)
      chex.assert_tree_all_finite(metrics)
    self.assertEqual(update._cache_size(), 1)
    for part, params in state.params.items():
      for x in jax.tree.leaves(params):
        self.assertEqual(x.dtype, jnp.float32)
      moved = jax.tree.map(
        lambda x, y: float(np.abs(x - y).max()), before[part], params
      )
      self.assertGreater(max(jax.tree.leaves(moved)), 0, part)
    stored = state.replay.rows.observation
    chex.assert_trees_all_equal_dtypes(stored, timestep.observation)


class DtypeTest(absltest.TestCase):
  def test_a_process_with_64_bits(self):
    with jax.enable_x64(True):
      spec = specs.Array((), np.float64)
      agent = dreamer.make_dreamer(spec, ACTION, CONFIG)
      row = timesteps(jnp.zeros(2, spec.dtype), [FIRST] * 2)
      carry = agent.initial_carry(2)
      state = jax.eval_shape(agent.init, jax.random.key(0), row)
      _, after = jax.eval_shape(
        agent.act,
        state.params,
        types.NetworkState(carry=carry, statistics={}),
        jax.random.key(0),
        row,
      )
    chex.assert_trees_all_equal_shapes_and_dtypes(after.carry, carry)
    for x in jax.tree.leaves((state.params, carry)):
      self.assertEqual(x.dtype, jnp.float32)


class WrongInputTest(parameterized.TestCase):
  def test_several_rewards(self):
    row = timesteps(jnp.zeros(2), [FIRST] * 2)
    row = row.replace(reward={'a': row.reward, 'b': row.reward})
    with self.assertRaisesRegex(
      ValueError, r"one reward.*\['a', 'b'\].*add them up.*PPO"
    ):
      trainer().agent.init(jax.random.key(0), row)

  @parameterized.parameters((2, 3), (2, 1))
  def test_a_reward_of_several_numbers(self, *shape):
    row = timesteps(jnp.zeros(2), [FIRST] * 2)
    row = row.replace(reward=jnp.zeros(shape))
    with self.assertRaisesRegex(ValueError, r'of shape \(2,\), got \(2, .\)'):
      trainer().agent.init(jax.random.key(0), row)

  def test_config_of_another_kind(self):
    for config in ({}, config_lib.PPOConfig()):
      with self.assertRaisesRegex(
        TypeError, '`config` must be a DreamerConfig, got'
      ):
        dreamer.make_dreamer(OBSERVATION, ACTION, config)

  @parameterized.parameters(64, 'gru')
  def test_no_core(self, core):
    with self.assertRaisesRegex(TypeError, '`core` must be'):
      dreamer.make_dreamer(OBSERVATION, ACTION, CONFIG, core=core)

  def test_a_function_with_arguments(self):
    with self.assertRaisesRegex(TypeError, '`core` must be.*without arguments'):
      dreamer.make_dreamer(
        OBSERVATION, ACTION, CONFIG, core=lambda size: hk.GRU(size)
      )

  def test_populations_that_keep_state(self):
    memory = builder.PopulationGraph()
    memory.add_input('sense', 2, input_from='x')
    memory.add_output('out', 3, module=leaky.Leaky())
    memory.connect('sense', 'out')
    with self.assertRaisesRegex(ValueError, 'GraphSpec.*as `Leaky`.*`delay`'):
      dreamer.make_dreamer(OBSERVATION, ACTION, CONFIG, core=memory.finalize())

  def test_an_initial_state_that_is_learned(self):
    class Core(hk.RNNCore):
      def initial_state(self, batch_size):
        h = hk.get_parameter('h', (3,), init=jnp.zeros)
        return jnp.broadcast_to(h, (batch_size, 3))

      def __call__(self, inputs, prev_state):
        return prev_state, prev_state

    with self.assertRaisesRegex(ValueError, '`core` must be constant.*core'):
      dreamer.make_dreamer(OBSERVATION, ACTION, CONFIG, core=lambda: Core())

  def test_a_function_that_makes_no_core(self):
    with self.assertRaisesRegex(TypeError, r'an hk.RNNCore.*got 5'):
      dreamer.make_dreamer(OBSERVATION, ACTION, CONFIG, core=lambda: 5)

  @parameterized.parameters(
    (specs.Array((2,), np.float32), 'declare bounds'),
    (specs.BoundedArray((2,), np.int32, 1, 3), 'count from 0'),
  )
  def test_actions_without_a_policy(self, spec, message):
    with self.assertRaisesRegex(ValueError, message):
      dreamer.make_dreamer(OBSERVATION, spec, CONFIG)

  def test_a_schedule_without_an_end(self):
    config = dataclasses.replace(CONFIG, schedule='linear')
    with self.assertRaisesRegex(ValueError, '`total_updates`, got None'):
      dreamer.make_dreamer(OBSERVATION, ACTION, config)

  def test_images_that_the_decoder_cannot_make(self):
    spec = {'eye': specs.Array((9, 12, 3), np.uint8)}
    with self.assertRaisesRegex(ValueError, '9 x 12 cannot be made.*10 x 12'):
      dreamer.make_dreamer(spec, ACTION, CONFIG)

  def test_trajectories_of_another_size(self):
    state, trajectory, _ = trainer().history[1]
    short = jax.tree.map(lambda x: x[:3], trajectory.timestep)
    with self.assertRaisesRegex(ValueError, r'4 \+ 1 rows of 2.*\(3, 2\)'):
      trainer().agent.update(state, trajectory.replace(timestep=short))

  @parameterized.parameters(0, 7)
  def test_context_that_there_is_not(self, num_context):
    with self.assertRaisesRegex(
      ValueError, f'between 1 and the 6.*{num_context}'
    ):
      trainer().agent.foresee(
        trainer().state.params,
        timesteps(jnp.zeros((6, 2)), np.full((6, 2), MID)),
        jnp.zeros((6, 2), jnp.int32),
        jax.random.key(0),
        num_context,
      )


if __name__ == '__main__':
  absltest.main()
