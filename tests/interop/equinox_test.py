"""Equinox modules inside of ours, and ours in Jaxnasium's agents."""

import functools

from absl.testing import absltest, parameterized
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hkgraph as hg
from hkgraph.interop import foreign
from hkgraph.modules import distributions
from hkgraph.training import loop
from tests.interop import foreign_cases as cases
from tests.modules import agreement

eqx = pytest.importorskip('equinox')

from hkgraph.interop import equinox as hgeqx  # noqa: E402


class Body(eqx.Module):
  """Linear layers, with batch norm and dropout between them."""

  layers: list
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout
  out_features: int

  def __init__(self, in_features, out_features=3, *, key):
    keys = jax.random.split(key)
    self.layers = [
      eqx.nn.Linear(in_features, 16, key=keys[0]),
      eqx.nn.Linear(16, out_features, key=keys[1]),
    ]
    self.norm = eqx.nn.BatchNorm(16, 'batch', mode='ema')
    self.dropout = eqx.nn.Dropout(0.3)
    self.out_features = out_features

  def __call__(self, x, state, *, key):
    x, state = self.norm(self.layers[0](x), state)
    x = self.dropout(jax.nn.relu(x), key=key)
    return self.layers[1](x), state


class Everything(eqx.Module):
  """Memory, batch norm and dropout at once."""

  cell: eqx.nn.GRUCell
  body: Body

  def __init__(self, key):
    keys = jax.random.split(key)
    self.cell = eqx.nn.GRUCell(1, 8, key=keys[0])
    self.body = Body(8, key=keys[1])

  def __call__(self, carry, x, state, *, key):
    carry = self.cell(x, carry)
    y, state = self.body(carry, state, key=key)
    return carry, y, state


class Linear(eqx.nn.Linear):
  def __init__(self, in_features, size, *, key):
    super().__init__(in_features, size, key=key)


def _from(factory, **kwargs):
  return lambda: hgeqx.from_equinox(factory, **kwargs)


def _body(in_features, key):
  return eqx.nn.make_with_state(Body)(in_features, key=key)


_BODY = _from(_body)
_EVERYTHING = _from(
  eqx.nn.make_with_state(Everything),
  initial_carry=lambda module, x: jnp.zeros(8),
)
_DIVIDING = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 0]], bool)


def _norm(**kwargs):
  return _from(
    lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(5, 'batch', **kwargs)
  )


def _averages(statistics):
  leaves = statistics['equinox_module']['statistics']
  return leaves['state.1.0'], leaves['state.1.1']


class InsideTest(parameterized.TestCase):
  """Equinox modules in functions for `hg.transform`."""

  def test_parameters_are_leaves_by_name(self):
    x, _ = agreement.rows((4,))
    _, params, state = cases.start(_BODY, x)
    self.assertEqual(
      jax.tree.map(jnp.shape, params['equinox_module']),
      {
        'layers.0.weight': (16, 4),
        'layers.0.bias': (16,),
        'layers.1.weight': (3, 16),
        'layers.1.bias': (3,),
        'norm.weight': (16,),
        'norm.bias': (16,),
      },
    )
    self.assertLen(jax.tree.leaves(state.statistics), 3)
    self.assertLen(jax.tree.leaves(state.carry), 2)

  def test_outputs_are_those_of_the_formula(self):
    make = _from(functools.partial(eqx.nn.MLP, 4, 2, 8, 1))
    x, is_first = agreement.rows((4,))
    y, params, end = agreement.check(cases.network(make), x, is_first)
    self.assertEmpty(jax.tree.leaves(end))  # No state, so rows stand alone.
    (leaves,) = params.values()
    expected = cases.mlp(
      leaves, x, ('layers.0', 'layers.1'), 'weight', transpose=True
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    # Equinox's own draw: uniform, up to one over the root of the inputs.
    self.assertLessEqual(np.max(np.abs(leaves['layers.0.bias'])), 0.5)
    self.assertTrue(np.all(leaves['layers.0.bias']))

  @parameterized.parameters(_BODY, _EVERYTHING)
  def test_stepped_as_unrolled(self, make):
    x, is_first = agreement.rows((1,))
    cases.check_stepped_as_unrolled(cases.network(make), x, is_first)

  @parameterized.parameters(eqx.nn.GRUCell, eqx.nn.LSTMCell)
  @pytest.mark.heavy
  def test_recurrent_cells_are_reset(self, kind):
    make = _from(lambda in_features, key: kind(in_features, 5, key=key))
    x, is_first = agreement.rows((4,))
    agreement.check(cases.network(make), x, is_first)
    net, params, state = cases.start(make, x)
    y, _ = net.unroll(params, state, None, x, is_first)
    (leaves,) = params.values()
    cell = kind(4, 5, key=jax.random.key(0))
    cell = eqx.tree_at(
      lambda c: [getattr(c, name) for name in sorted(leaves)],
      cell,
      [leaves[name] for name in sorted(leaves)],
    )

    def step(carry, row):
      carry = jax.vmap(cell)(row, carry)
      return carry, carry[0] if kind is eqx.nn.LSTMCell else carry

    zeros = jnp.zeros((3, 5))
    initial = (zeros, zeros) if kind is eqx.nn.LSTMCell else zeros
    expected = cases.recurrent_reference(step, initial, x, is_first)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

  @pytest.mark.heavy
  def test_any_part_of_the_batch_replays_its_noise(self):
    cases.check_noise(_from(lambda key: eqx.nn.Dropout(0.5)))

  def test_noise_that_is_off_costs_no_carry(self):
    cases.check_no_carry(_from(lambda key: eqx.nn.Dropout(0.5, inference=True)))

  @pytest.mark.heavy
  def test_seeds_and_gradients(self):
    cases.check_seeds_and_gradients(_BODY)

  @parameterized.parameters((_DIVIDING,), (np.ones((4, 3), bool),))
  def test_batch_norm_learns_only_from_masked_rows(self, mask):
    # Equinox takes the first averages as they are: no momentum yet.
    cases.check_statistics(_norm(mode='ema'), _averages, momentum=0, mask=mask)

  def test_batch_norm_has_momentum_later(self):
    x, _ = cases.batch_norm_rows()
    mask, is_first = np.ones((4, 3), bool), np.zeros((4, 3), bool)
    net, params, state = cases.start(_norm(mode='ema', momentum=0.9), x)
    state = net.update_statistics(params, state, x, is_first, mask)
    state = net.update_statistics(params, state, 2 * x, is_first, mask)
    mean, variance = _averages(state.statistics)
    rows = x.reshape(-1, 5)
    np.testing.assert_allclose(mean, 1.1 * rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(variance, 1.3 * rows.var(0), rtol=1e-4)

  @parameterized.parameters(1, 2, 4)
  @pytest.mark.heavy
  def test_ratio_is_one(self, num_minibatches):
    cases.check_ratio(_EVERYTHING, num_minibatches)

  @pytest.mark.heavy
  def test_transform_and_population_of_a_graph(self):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    graph.add_population(
      'arm',
      5,
      module=foreign.population(
        lambda size: hgeqx.from_equinox(
          lambda key: eqx.nn.GRUCell(size, size, key=key)
        )
      ),
    )
    graph.add_output('limb', 2)
    graph.connect(
      'eye',
      'arm',
      transform=_from(lambda key: eqx.nn.Linear(3, 5, key=key)),
      delay=1,
    )
    graph.connect('arm', 'arm', delay=1)
    graph.connect('arm', 'limb')
    network = hg.graph_network(graph.finalize())
    x, is_first = agreement.rows((3,))
    agreement.check(network, {'x': x}, is_first)

  def test_arrays_that_are_not_weights_stay(self):
    class Shift(eqx.Module):
      by: jax.Array

      def __call__(self, x):
        return x + self.by

    x, is_first = agreement.rows((2,))
    make = _from(lambda key: Shift(jnp.array([1, 2])))
    y, params, end = agreement.check(cases.network(make), x, is_first)
    self.assertEmpty(params)
    np.testing.assert_allclose(y, x + np.array([[[1.0, 2.0]]]), rtol=1e-6)
    self.assertLen(jax.tree.leaves(end.statistics), 1)

  def test_output_size_that_cannot_be_inferred(self):
    x, _ = agreement.rows((4,))
    make = _from(lambda key: eqx.nn.Linear(7, 2, key=key))
    with self.assertRaisesRegex(ValueError, '(?s)output size of the Equinox'):
      cases.start(make, x)
    make = _from(lambda key: eqx.nn.Lambda(lambda x: None))
    with self.assertRaisesRegex(ValueError, 'leading axis'):
      cases.start(make, x)

  def test_batch_norm_over_another_axis(self):
    x, is_first = agreement.rows((5,))

    def make(axis, **kwargs):
      return _from(
        lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(
          5, axis, mode='ema'
        ),
        **kwargs,
      )

    with self.assertRaisesRegex(ValueError, "'rows', but .* `axis_name='r"):
      cases.start(make(['rows']), x)
    net, params, state = cases.start(make('rows', axis_name='rows'), x)
    net.update_statistics(params, state, x, is_first, ~is_first)

  def test_batch_norm_without_its_state(self):
    make = _from(lambda key: eqx.nn.BatchNorm(4, 'batch', mode='ema'))
    with self.assertRaisesRegex(ValueError, "argument: 'state'"):
      cases.start(make, agreement.rows((4,))[0])

  @pytest.mark.heavy
  def test_partials(self):
    x, _ = agreement.rows((4,))
    for partial in (functools.partial, eqx.Partial):
      make = _from(partial(eqx.nn.MLP, out_size=2, width_size=8, depth=1))
      with self.assertRaisesRegex(ValueError, 'in_size.*give a function'):
        cases.start(make, x)
      make = _from(partial(eqx.nn.GRUCell, 4, hidden_size=6))
      net, params, state = cases.start(make, x)
      y, _ = net.apply(params, state, None, x[0], np.ones(3, bool))
      self.assertEqual(y.shape, (3, 6))
      make = _from(partial(Linear, size=6))
      net, params, state = cases.start(make, x)
      y, _ = net.apply(params, state, None, x[0], np.ones(3, bool))
      self.assertEqual(y.shape, (3, 6))

  def test_wrong_arguments(self):
    with self.assertRaisesRegex(TypeError, '`factory` must be a function of'):
      hgeqx.from_equinox(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    with self.assertRaisesRegex(TypeError, 'must make an eqx.Module, or a pai'):
      cases.start(_from(lambda key: 3), agreement.rows((4,))[0])


def _graph(delay=0):
  graph = hg.PopulationGraph()
  graph.add_input('eye', 4, input_from='x')
  graph.add_population('left', 32, activation='jax.numpy.tanh')
  graph.add_population('right', 32, activation='jax.numpy.tanh')
  graph.add_output('limb', 32, activation='jax.numpy.tanh')
  graph.connect('eye', 'left', delay=delay)
  graph.connect('eye', 'right')
  graph.connect('left', 'limb')
  graph.connect('right', 'limb')
  return graph.finalize()


class OutsideTest(parameterized.TestCase):
  """Networks as Equinox modules."""

  def test_sizes_and_outputs(self):
    network = hg.graph_network(_graph())
    body = hgeqx.EquinoxNetwork.factory(network)(4, key=jax.random.key(0))
    self.assertEqual((body.in_features, body.out_features), (4, 32))
    x = jax.random.normal(jax.random.key(1), (5, 4))
    _, state = network.init(jax.random.key(0), x)
    expected, _ = network.apply(body.params, state, None, x, jnp.ones(5, bool))
    y = eqx.filter_jit(lambda body, x: jax.vmap(body)(x))(body, x)
    np.testing.assert_allclose(y, expected['limb'], rtol=1e-5, atol=1e-6)

  def test_trained_parameters_go_both_ways(self):
    network = hg.transform(lambda x: hk.Linear(2)(x))
    first = hgeqx.EquinoxNetwork(network, 3, key=jax.random.key(0))
    second = hgeqx.EquinoxNetwork(
      network, 3, key=jax.random.key(1), params=first.params
    )
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(first(x), second(x))

  @pytest.mark.heavy
  def test_statistics_stay_frozen(self):
    network = hg.transform(lambda x: hk.Linear(2)(hg.Normalizer()(x)))
    x = np.random.default_rng(0).normal(5, 2, (6, 8, 3)).astype(np.float32)
    params, state = network.init(jax.random.key(0), x[0])
    false = np.zeros((6, 8), bool)
    state = network.update_statistics(params, state, x, false, ~false)
    body = hgeqx.EquinoxNetwork(
      network,
      3,
      key=jax.random.key(0),
      params=params,
      statistics=state.statistics,
    )
    expected, _ = network.apply(params, state, None, x[0], false[0])
    np.testing.assert_allclose(jax.vmap(body)(x[0]), expected, rtol=1e-5)

    optimizer = optax.adamw(0.1, weight_decay=0.5)
    weights = eqx.filter(body, eqx.is_inexact_array)
    self.assertLen(jax.tree.leaves(weights), 2)
    gradient = eqx.filter_grad(lambda body: jnp.sum(jax.vmap(body)(x[0])))(body)
    updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    trained = eqx.apply_updates(body, updates)
    self.assertTrue(
      np.any(trained.params['linear']['w'] != params['linear']['w'])
    )
    jax.tree.map(
      np.testing.assert_array_equal, trained.statistics, state.statistics
    )

  @pytest.mark.heavy
  def test_a_carry_has_no_place(self):
    for network in (
      hg.graph_network(_graph(delay=1)),
      hg.transform(lambda x: hg.GaussianNoise()(x)),
    ):
      with self.assertRaisesRegex(ValueError, 'has a carry of .* no place'):
        hgeqx.EquinoxNetwork.factory(network)(4, key=jax.random.key(0))

  @parameterized.parameters(
    lambda x: hg.PolicyValue(policy=distributions.categorical(x), value=x),
    lambda x: x[..., 0],
    lambda x: {},
  )
  def test_output_size_that_cannot_be_inferred(self, fn):
    with self.assertRaisesRegex(ValueError, 'output size of the network canno'):
      hgeqx.EquinoxNetwork(hg.transform(fn), 4, key=jax.random.key(0))

  def test_noise_without_a_key(self):
    network = hg.transform(
      lambda x: x + jax.random.normal(hk.next_rng_key(), x.shape)
    )
    body = hgeqx.EquinoxNetwork(network, 4, key=jax.random.key(0))
    self.assertEqual(body(jnp.ones(4), key=jax.random.key(1)).shape, (4,))
    with self.assertRaisesRegex(ValueError, 'draws random numbers: call the b'):
      body(jnp.ones(4))

  def test_wrong_arguments(self):
    with self.assertRaisesRegex(TypeError, '`network` must be a Network'):
      hgeqx.EquinoxNetwork(lambda x: x, 4, key=jax.random.key(0))
    network = hg.transform(lambda x: hk.Linear(2)(hg.Normalizer()(x)))
    make = functools.partial(
      hgeqx.EquinoxNetwork, network, 4, key=jax.random.key(0)
    )
    _, state = network.init(jax.random.key(0), jnp.ones((1, 1)))
    for argument, given in (
      ('params', {}),
      ('params', {'linear': {'w': jnp.ones((5, 2)), 'b': jnp.ones(2)}}),
      ('statistics', state.statistics),
      ('statistics', {}),
    ):
      with self.assertRaisesRegex(ValueError, f'`{argument}` must be those of'):
        make(**{argument: given})
    with self.assertRaisesRegex(ValueError, r'shape \(4,\), .* `jax.vmap`'):
      make()(jnp.ones((3, 4)))
    network = hg.transform(lambda x: x)
    with self.assertRaisesRegex(TypeError, '`in_features` must be a positive'):
      hgeqx.EquinoxNetwork(network, (4,), key=jax.random.key(0))


def _train_in_jaxnasium(network, total_timesteps):
  jym = pytest.importorskip('jaxnasium')
  algorithms = pytest.importorskip('jaxnasium.algorithms')
  body = hgeqx.EquinoxNetwork.factory(network)
  ppo = algorithms.PPO(
    total_timesteps=total_timesteps,
    actor_kwargs={'body': body},
    critic_kwargs={'body': body},
    log_function=None,
  )
  env = jym.make('CartPole-v1')
  with jax.numpy_rank_promotion('allow'):  # Jaxnasium relies on it.
    before = ppo.init_agent(jax.random.key(0), env)
    agent, _ = ppo.train(jax.random.key(0), env)
    returns = ppo.evaluate(jax.random.key(1), agent, env)
  return before, agent, np.mean(returns)


def _flax_network():
  linen = pytest.importorskip('flax.linen')
  from hkgraph.interop import flax as hgflax

  body = linen.Sequential([linen.Dense(64), linen.tanh, linen.Dense(64)])
  return hg.transform(lambda x: jnp.tanh(hgflax.from_linen(body)(x)))


class JaxnasiumTest(parameterized.TestCase):
  def test_few_steps(self):
    network = hg.graph_network(_graph())
    before, agent, _ = _train_in_jaxnasium(network, 2 * 128 * 6)
    self.assertEqual(agent.actor.body.out_features, 32)
    weights = agent.actor.body.params
    moved = jax.tree.map(
      lambda a, b: np.any(a != b), weights, before.actor.body.params
    )
    self.assertTrue(any(jax.tree.leaves(moved)))


@pytest.mark.slow
class JaxnasiumLearnsTest(parameterized.TestCase):
  @parameterized.parameters('flax', 'graph')
  def test_its_ppo_learns_cartpole(self, kind):
    networks = {
      'flax': _flax_network,
      'graph': lambda: hg.graph_network(_graph()),
    }
    _, _, mean = _train_in_jaxnasium(networks[kind](), 150_000)
    self.assertGreater(mean, 150)


@pytest.mark.slow
class TrainingTest(absltest.TestCase):
  def test_ours_trains_a_body(self):
    env = hg.envs.make('cartpole')
    network = hg.transform(
      lambda obs: hg.ActorCritic(
        env.action_spec(),
        hgeqx.from_equinox(
          lambda key: eqx.nn.make_with_state(Body)(4, 64, key=key)
        ),
        hg.MLPEncoder(),
      )(obs)
    )
    result = loop.train(
      env,
      network,
      hg.PPOConfig(num_envs=8, num_steps=128, learning_rate=1e-3),
      total_steps=100_000,
      eval_episodes=20,
      progress=False,
    )
    self.assertGreater(result.evaluation.mean, 150)


if __name__ == '__main__':
  absltest.main()
