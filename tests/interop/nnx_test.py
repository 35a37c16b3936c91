"""Networks of ours as NNX modules, and in nnx-ppo on the real package."""

import importlib.util
import pathlib

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# ruff: noqa: E402
nnx = pytest.importorskip('flax.nnx')

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.graph import builder, core
from hkgraph.interop import nnx as hgnnx
from hkgraph.modules import normalizer, samplers

NUM_ROWS, BATCH = 12, 4
ACTIONS = {
  'arm': specs.BoundedArray((2,), np.float32, -2.0, 1.0),
  'leg': specs.DiscreteArray(3),
}


class Noisy(core.Population):
  """A population whose activation is noisy."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self._noise = samplers.GaussianNoise(0.5)

  def __call__(self, inputs):
    return self._noise(super().__call__(inputs))


def make_spec(module=None):
  graph = builder.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_population('a', 5, activation='jax.nn.swish', module=module)
  graph.add_population('b', 4, activation='jax.numpy.tanh')
  graph.add_output('policy_arm', 4)
  graph.add_output('policy_leg', 3)
  graph.add_output('value', 1)
  graph.connect('eye', 'a', delay=2)
  graph.connect('eye', 'b')
  graph.connect('a', 'b', delay=1, reciprocal=True)
  graph.connect('b', 'policy_arm', delay=3)
  graph.connect('b', 'policy_leg')
  graph.connect('b', 'value')
  return graph.finalize()


def layer():
  return network_lib.graph_network(make_spec())


def policy(module=None):
  return network_lib.policy_network(make_spec(module), ACTIONS, normalize=True)


def noisy_policy():
  return policy(Noisy)


def remembering():
  """Statistics of something that hangs on the carry."""

  def fn(x):
    y = core.Graph(make_spec())(x)
    return normalizer.Normalizer()(y['policy_arm'])

  return network_lib.transform(fn)


def make(network, seed=0, **kwargs):
  x = {'x': jax.ShapeDtypeStruct((1, 3), jnp.float32)}
  return hgnnx.NNXNetwork(network, x, rngs=nnx.Rngs(seed), **kwargs)


def rows(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((NUM_ROWS, BATCH, 3)).astype(np.float32)
  is_first = rng.random((NUM_ROWS, BATCH)) < 0.2
  is_first[0] = True
  return {'x': jnp.asarray(3 * x + 1)}, jnp.asarray(is_first)


def select(condition, x, y):
  """As nnx-ppo does, element by element; keys too."""

  def where(x, y):
    shape = condition.shape + (1,) * (x.ndim - 1)
    return jnp.where(condition.reshape(shape), x, y)

  return jax.tree.map(where, x, y)


def run(module, inputs, is_first, extras=None):
  """Calls row by row, resetting before those that are first."""
  state, outputs = module.initialize_state(BATCH), []
  call = nnx.jit(lambda module, *args: module(*args))
  for t in range(NUM_ROWS):
    state = select(is_first[t], module.reset_state(state), state)
    row = jax.tree.map(lambda x: x[t], inputs)  # noqa: B023
    replay = jax.tree.map(lambda x: x[t], extras)  # noqa: B023
    outputs.append(call(module, state, row, replay))
    state = outputs[-1].next_state
  return jax.tree.map(lambda *x: jnp.stack(x), *outputs), state


class LayerTest(parameterized.TestCase):
  def test_calls_are_those_of_the_network(self):
    network = layer()
    module = make(network)
    inputs, is_first = rows()
    outputs, state = run(module, inputs, is_first)
    start = types.NetworkState(
      carry=network.initial_carry(BATCH), statistics={}
    )
    expected, after = network.unroll(
      module.params, start, None, inputs, is_first
    )
    chex.assert_trees_all_close(outputs.output, expected, atol=1e-6)
    chex.assert_shape(outputs.regularization_loss, (NUM_ROWS, BATCH))
    self.assertIsNone(outputs.rollout_extras)
    # Both go on alike.
    row = {'x': jnp.ones((BATCH, 3))}
    chex.assert_trees_all_close(
      module(state, row).output,
      network.apply(module.params, after, None, row, jnp.zeros(BATCH, bool))[0],
      atol=1e-6,
    )

  def test_one_param_for_each_leaf_under_its_name(self):
    module = make(layer())
    params, _ = layer().init(jax.random.key(0), {'x': jnp.zeros((1, 3))})
    leaves = nnx.to_flat_state(nnx.state(module, nnx.Param))
    names = {'.'.join(map(str, path)) for path, _ in leaves}
    expected = {
      f'weights.{module_name}.{name}'
      for module_name, bundle in params.items()
      for name in bundle
    }
    self.assertEqual(names, expected)
    chex.assert_trees_all_equal_shapes(module.params, params)

  def test_the_stream_of_params_seeds_the_weights(self):
    network = layer()
    key = nnx.Rngs(params=7).params()
    expected, _ = network.init(key, {'x': jnp.zeros((1, 3))})
    x = {'x': jnp.zeros((5, 3))}
    module = hgnnx.NNXNetwork(network, x, rngs=nnx.Rngs(0, params=7))
    chex.assert_trees_all_equal(module.params, expected)

  def test_gradients_are_those_of_the_parameters(self):
    network = layer()
    module = make(network)
    inputs = {'x': jnp.ones((BATCH, 3))}

    def loss(module):
      out = module(module.initialize_state(BATCH), inputs)
      return jnp.sum(jnp.square(out.output['value']))

    def expected(params):
      state = types.NetworkState(
        carry=network.initial_carry(BATCH), statistics={}
      )
      is_first = jnp.ones(BATCH, bool)
      outputs, _ = network.apply(params, state, None, inputs, is_first)
      return jnp.sum(jnp.square(outputs['value']))

    grads = nnx.grad(loss)(module)
    got = [g.get_value() for g in grads['weights'].values()]
    wanted = jax.tree.leaves(jax.grad(expected)(module.params))
    chex.assert_trees_all_close(got, wanted, atol=1e-5)
    self.assertGreater(max(np.abs(g).max() for g in got), 0)

  def test_an_optimizer_of_nnx_trains_it(self):
    module = make(layer())
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    def loss(module):
      state = module.initialize_state(1)
      for _ in range(4):
        out = module(state, {'x': jnp.ones((1, 3))})
        state = out.next_state
      return jnp.mean(jnp.square(out.output['policy_arm'] - 1.0))

    @nnx.jit
    def step(module, optimizer):
      value, grads = nnx.value_and_grad(loss)(module)
      optimizer.update(module, grads)
      return value

    losses = [float(step(module, optimizer)) for _ in range(60)]
    self.assertLess(losses[-1], 0.1 * losses[0])

  def test_weights_of_another_network_are_taken(self):
    network = policy()
    x = {'x': jnp.zeros((1, 3))}
    params, state = network.init(jax.random.key(5), x)
    module = make(network, params=params, statistics=state.statistics)
    chex.assert_trees_all_equal(module.params, params)
    chex.assert_trees_all_equal(module.statistics, state.statistics)

  def test_reset_of_single_elements_under_vmap(self):
    # As the loss of nnx-ppo does.
    module = make(layer())
    inputs, is_first = rows()
    state = module.initialize_state(BATCH)
    state = module(state, jax.tree.map(lambda x: x[0], inputs)).next_state
    done = jnp.arange(BATCH) % 2 == 0

    @jax.vmap
    def reset(done, state):
      return jax.lax.cond(done, module.reset_state, lambda x: x, state)

    chex.assert_trees_all_equal(
      reset(done, state), select(done, module.reset_state(state), state)
    )


class StatisticsTest(parameterized.TestCase):
  @parameterized.parameters(policy, remembering)
  def test_they_change_once_as_those_of_the_network(self, network):
    network = network()
    module = make(network)
    inputs, is_first = rows()
    before = module.statistics
    outputs, _ = run(module, inputs, is_first)
    chex.assert_trees_all_equal(module.statistics, before)
    start = types.NetworkState(
      carry=network.initial_carry(BATCH), statistics=before
    )
    expected = network.update_statistics(
      module.params, start, inputs, is_first, jnp.ones_like(is_first)
    )
    nnx.jit(lambda m, extras: m.update_statistics(extras))(
      module, outputs.rollout_extras
    )
    chex.assert_trees_all_close(
      module.statistics, expected.statistics, rtol=1e-5
    )
    difference = jax.tree.map(
      lambda x, y: np.abs(x - y).max(), module.statistics, before
    )
    self.assertGreater(min(jax.tree.leaves(difference)), 0)

  def test_they_are_no_parameters(self):
    module = make(policy())
    leaves = nnx.to_flat_state(nnx.state(module, hgnnx.Statistic))
    self.assertLen(list(leaves), 3)
    self.assertTrue(all('moments' in path for path, _ in leaves))

  def test_none_to_update(self):
    make(layer()).update_statistics(None)


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(policy, noisy_policy)
  def test_a_replay_meets_the_same_densities(self, network):
    module = make(network())
    inputs, is_first = rows()
    state = module.initialize_state(BATCH)
    outputs, _ = run(module, inputs, is_first)
    del state
    # Half of the batch, from its own first state.
    half = jnp.array([3, 1])
    extras = jax.tree.map(lambda x: x[:, half], outputs.rollout_extras)
    state = jax.tree.map(
      lambda x: x[0][half],
      {k: outputs.rollout_extras['row'][k] for k in ('carry', 'is_first')},
    )
    for t in range(NUM_ROWS):
      first = is_first[t, half]
      state = select(first, module.reset_state(state), state)
      row = {'x': inputs['x'][t, half]}
      replay = jax.tree.map(lambda x: x[t], extras)  # noqa: B023
      out = module(state, row, replay)
      state = out.next_state
      chex.assert_trees_all_close(
        (out.output.loglikelihoods, out.output.actions),
        jax.tree.map(
          lambda x: x[t, half],  # noqa: B023
          (outputs.output.loglikelihoods, outputs.output.actions),
        ),
        atol=1e-5,
      )

  def test_actions_are_those_of_the_environment(self):
    module = make(policy())
    inputs, is_first = rows()
    outputs, _ = run(module, inputs, is_first)
    arm = np.asarray(outputs.output.actions['arm'])
    self.assertEqual(arm.shape, (NUM_ROWS, BATCH, 2))
    self.assertLessEqual(arm.max(), 1.0)
    self.assertGreaterEqual(arm.min(), -2.0)
    self.assertGreater(np.std(arm), 0.05)
    self.assertEqual(outputs.output.actions['leg'].dtype, jnp.int32)
    self.assertEqual(outputs.output.value_estimates.shape, (NUM_ROWS, BATCH))

  def test_every_call_draws_anew_but_in_evaluation(self):
    module = make(policy())
    state, row = module.initialize_state(BATCH), {'x': jnp.ones((BATCH, 3))}

    def arm():
      return module(state, row).output.actions['arm']

    self.assertGreater(np.abs(arm() - arm()).max(), 0)
    module.eval()
    np.testing.assert_array_equal(arm(), arm())
    outputs, _ = module.network.apply(
      module.params,
      types.NetworkState(carry=state['carry'], statistics=module.statistics),
      None,
      row,
      state['is_first'],
    )
    head = outputs.policy['arm']
    np.testing.assert_allclose(arm(), head.to_environment(head.mode()))
    module.train()
    self.assertGreater(np.abs(arm() - arm()).max(), 0)

  def test_entropy_is_rewarded(self):
    module = make(policy(), entropy_cost=0.5)
    state, row = module.initialize_state(BATCH), {'x': jnp.ones((BATCH, 3))}
    out = module(state, row)
    entropy = sum(out.metrics['entropy'].values())
    np.testing.assert_allclose(
      out.regularization_loss, -0.5 * entropy, rtol=1e-6
    )

  def test_noise_goes_on_through_a_reset(self):
    module = make(noisy_policy())
    keys = [
      x
      for x in jax.tree.leaves(module.initialize_state(BATCH))
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    self.assertLen(keys, 1)
    other = jax.tree.leaves(module.initialize_state(BATCH))
    self.assertFalse(
      any(jnp.all(x == keys[0]) for x in other if x.dtype == keys[0].dtype)
    )


class WrongInputTest(parameterized.TestCase):
  def test_network_and_rngs(self):
    x = {'x': jnp.zeros((1, 3))}
    with self.assertRaisesRegex(TypeError, '`network` must be a Network'):
      hgnnx.NNXNetwork(make_spec(), x, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(TypeError, '`rngs` must be an nnx.Rngs'):
      hgnnx.NNXNetwork(layer(), x, rngs=jax.random.key(0))

  def make(self, fn, **kwargs):
    network = network_lib.transform(fn)
    x = jnp.zeros((4, 3))
    return hgnnx.NNXNetwork(network, x, rngs=nnx.Rngs(0), **kwargs)

  @parameterized.parameters(
    (lambda x: None, TypeError, 'a tree of them, got None'),
    (lambda x: jnp.sum(x), TypeError, 'an array .B, ....'),
    (lambda x: {'a': x.T}, ValueError, r"\{'a': \(3, 4\)\} for B = 4"),
    (
      lambda x: types.PolicyValue(policy=x, value=x[:, 0]),
      TypeError,
      '`policy` must be a distrax distribution',
    ),
  )
  def test_outputs_that_the_host_cannot_take(self, fn, error, message):
    with self.assertRaisesRegex(error, message):
      self.make(fn)

  def test_values_with_an_axis_too_many(self):
    def fn(x):
      import distrax

      return types.PolicyValue(policy=distrax.Categorical(x), value=x[:, :1])

    with self.assertRaisesRegex(ValueError, r'takes values \[B\].*\(4, 1\)'):
      self.make(fn)

  def test_entropy_of_what_is_no_policy(self):
    with self.assertRaisesRegex(ValueError, '`entropy_cost` is for a network'):
      self.make(lambda x: x, entropy_cost=0.1)

  def test_weights_of_another_network(self):
    params, _ = layer().init(jax.random.key(0), {'x': jnp.zeros((1, 3))})
    with self.assertRaisesRegex(ValueError, '`params` must be those of the'):
      self.make(lambda x: x, params=params)

  def test_a_state_from_elsewhere(self):
    module = make(layer())
    with self.assertRaisesRegex(TypeError, 'what `initialize_state'):
      module((), {'x': jnp.zeros((1, 3))})


class HostTest(parameterized.TestCase):
  """On nnx-ppo itself."""

  def setUp(self):
    super().setUp()
    pytest.importorskip('nnx_ppo')
    promotion = jax.numpy_rank_promotion('allow')
    self.enter_context(promotion)

  def test_it_is_a_stateful_module(self):
    from nnx_ppo.networks import types as host

    module = make(policy())
    self.assertIsInstance(module, host.StatefulModule)
    out = module(module.initialize_state(2), {'x': jnp.zeros((2, 3))})
    self.assertIsInstance(out, host.StatefulModuleOutput)
    self.assertIsInstance(out.output, host.PPONetworkOutput)

  def test_activations_are_recorded(self):
    from nnx_ppo.networks import recording

    module = make(layer())
    recorded = recording.with_recording(module)
    out = recorded(recorded.initialize_state(2), {'x': jnp.ones((2, 3))})
    chex.assert_trees_all_equal(
      recording.extract_activations(out.metrics), out.output
    )

  def test_a_layer_before_its_samplers(self):
    from nnx_ppo.algorithms import config, ppo
    from nnx_ppo.networks import adapter, containers, sampling_layers, utils

    def take(key):
      return [utils.Filter({key: key}), utils.Flattener()]

    example = load_example()
    rngs = nnx.Rngs(0)
    graph = builder.PopulationGraph()
    graph.add_input('eye', 3, input_from='cue')
    graph.add_output('policy', 2)
    graph.add_output('value', 1)
    graph.connect('eye', 'policy', delay=2)
    graph.connect('eye', 'value')
    body = hgnnx.NNXNetwork(
      network_lib.graph_network(graph.finalize()),
      {'cue': jnp.zeros((1, 3))},
      rngs=rngs,
    )
    sampler = sampling_layers.NormalTanhSampler(rngs, entropy_weight=1e-3)
    network = containers.Sequential(
      [
        body,
        adapter.PPOAdapter(
          action=containers.Sequential([*take('policy'), sampler]),
          value=containers.Sequential(take('value')),
        ),
      ]
    )

    class Env(example.RecallEnv):
      def step(self, state, action):
        return super().step(state, jnp.int32(action[0] > 0))

    before = jax.tree.map(np.asarray, body.params)
    result = ppo.train_ppo(
      Env(),
      network,
      config.TrainConfig(
        ppo=config.PPOConfig(n_envs=8, rollout_length=8, total_steps=128),
        eval=config.EvalConfig(n_envs=2, max_episode_length=6),
      ),
    )
    self.assertEqual(result.total_iterations, 2)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, body.params)
    self.assertGreater(min(jax.tree.leaves(moved)), 0)

  def test_train_ppo_learns_what_a_delay_is_needed_for(self):
    example = load_example()
    network = example.make_network(example.LAG)
    module = example.train(network, 30)
    share = example.evaluate(network, module.params, module.statistics)
    self.assertGreater(share, 0.9)  # One of three by chance.
    (moments,) = module.statistics['observations']['moments']
    self.assertEqual(moments.count, 30 * 32 * 24)
    np.testing.assert_allclose(moments.mean, 1 / 3, atol=0.02)

  def test_its_own_rollout_is_replayed_exactly(self):
    from nnx_ppo.algorithms import rollout

    example = load_example()
    module = make_for(example, example.make_network(2))
    env = example.RecallEnv()
    keys = jax.random.split(jax.random.key(0), 4)
    state = module.initialize_state(4)
    _, _, data = nnx.jit(rollout.unroll_env, static_argnums=(0, 4))(
      env,
      jax.vmap(env.reset)(keys),
      module,
      state,
      30,
      jax.random.key(1),
    )
    self.assertGreater(int(data.done.sum()), 4)
    for t in range(30):
      row = jax.tree.map(lambda x: x[t], (data.obs, data.rollout_extras))  # noqa: B023
      out = module(state, *row)
      np.testing.assert_allclose(
        out.output.loglikelihoods,
        data.network_output.loglikelihoods[t],
        atol=1e-5,
      )
      state = out.next_state
      state = select(data.done[t], module.reset_state(state), state)


def make_for(example, network):
  cue = {'cue': jnp.zeros((1, example.NUM_CUES))}
  return hgnnx.NNXNetwork(network, cue, rngs=nnx.Rngs(0))


def load_example():
  root = pathlib.Path(__file__).parents[2]
  path = root / 'examples' / 'interop' / 'nnx_ppo_training.py'
  spec = importlib.util.spec_from_file_location('nnx_ppo_training', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


if __name__ == '__main__':
  absltest.main()
