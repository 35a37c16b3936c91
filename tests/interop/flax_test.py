"""Flax modules inside of ours, and ours as Linen modules."""

from absl.testing import absltest, parameterized
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.interop import foreign
from hkgraph.training import loop
from tests.interop import foreign_cases as cases
from tests.modules import agreement

pytest.importorskip('flax')

from flax import linen, nnx  # noqa: E402

from hkgraph.interop import flax as hgflax  # noqa: E402


class _Trained(linen.Module):
  """Has an argument of its own."""

  @linen.compact
  def __call__(self, x, train):
    return linen.Dropout(0.5, deterministic=not train)(linen.Dense(3)(x))


class NNXBody(nnx.Module):
  """Linear layers, with batch norm and dropout between them."""

  def __init__(self, in_features, out_features=3, *, rngs):
    self.layers = nnx.List(
      [
        nnx.Linear(in_features, 16, rngs=rngs),
        nnx.Linear(16, out_features, rngs=rngs),
      ]
    )
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.dropout = nnx.Dropout(0.3, rngs=rngs)

  def __call__(self, x):
    x = self.dropout(nnx.relu(self.norm(self.layers[0](x))))
    return self.layers[1](x)


class NNXEverything(nnx.Module):
  """Memory, batch norm and dropout at once."""

  def __init__(self, rngs):
    self.cell = nnx.GRUCell(1, 8, rngs=rngs)
    self.body = NNXBody(8, rngs=rngs)

  def initialize_carry(self, input_shape, rngs):
    return self.cell.initialize_carry(input_shape, rngs=rngs)

  def __call__(self, carry, x):
    carry, x = self.cell(carry, x)
    return carry, self.body(x)


class NNXCounter(nnx.Module):
  """Adds how often it was called in the episode."""

  def __init__(self, rngs):
    self.count = nnx.Cache(jnp.zeros(()))

  def __call__(self, x):
    self.count[...] += 1
    return x + jnp.broadcast_to(self.count[...], x.shape)


class LinenBody(linen.Module):
  out_features: int = 3

  @linen.compact
  def __call__(self, x, train=False):
    x = linen.Dense(16)(x)
    x = linen.BatchNorm(use_running_average=not train)(x)
    x = linen.Dropout(0.3, deterministic=not train)(linen.relu(x))
    return linen.Dense(self.out_features)(x)


class LinenEverything(linen.Module):
  @linen.compact
  def __call__(self, carry, x):
    carry, x = linen.GRUCell(8)(carry, x)
    return carry, LinenBody()(x, train=True)

  @linen.nowrap
  def initialize_carry(self, rng, input_shape):
    return linen.GRUCell(8, parent=None).initialize_carry(rng, input_shape)


class LinenCounter(linen.Module):
  @linen.compact
  def __call__(self, x):
    count = self.variable('cache', 'count', jnp.zeros, ())
    if not self.is_initializing():
      count.value += 1
    return x + jnp.broadcast_to(count.value, x.shape)


def _nnx(factory, **kwargs):
  return lambda: hgflax.from_nnx(factory, **kwargs)


def _linen(module, **kwargs):
  return lambda: hgflax.from_linen(module, **kwargs)


def _training(module, x):
  return module(x, train=True)


def _conv(rngs):
  return nnx.Sequential(
    nnx.Conv(1, 2, (3, 3), rngs=rngs), lambda x: x.reshape(x.shape[0], -1)
  )


class _FlatConv(linen.Module):
  @linen.compact
  def __call__(self, x):
    return linen.Conv(2, (3, 3))(x).reshape(x.shape[0], -1)


_BODIES = {
  'nnx': _nnx(NNXBody),
  'linen': _linen(LinenBody(), call=_training),
}
_EVERYTHING = {
  'nnx': _nnx(NNXEverything),
  'linen': _linen(LinenEverything()),
}
_NORMS = {
  'nnx': (
    _nnx(lambda rngs: nnx.BatchNorm(5, momentum=0.9, rngs=rngs)),
    lambda s: [s['nnx_module']['statistics'][k] for k in ('mean', 'var')],
  ),
  'linen': (
    _linen(linen.BatchNorm(momentum=0.9)),
    lambda s: [
      s['linen_module']['statistics'][f'batch_stats.{k}']
      for k in ('mean', 'var')
    ],
  ),
}


class InsideTest(parameterized.TestCase):
  """NNX and Linen modules in functions for `hg.transform`."""

  def test_parameters_are_leaves_by_name(self):
    x, _ = agreement.rows((4,))
    for make, module, names in (
      (_BODIES['nnx'], 'nnx_module', ('layers.0', 'layers.1', 'norm')),
      (_BODIES['linen'], 'linen_module', ('Dense_0', 'Dense_1', 'BatchNorm_0')),
    ):
      _, params, state = cases.start(make, x)
      first, second, norm = names
      self.assertEqual(
        jax.tree.map(jnp.shape, params),
        {
          module: {
            f'{first}.kernel': (4, 16),
            f'{first}.bias': (16,),
            f'{second}.kernel': (16, 3),
            f'{second}.bias': (3,),
            f'{norm}.scale': (16,),
            f'{norm}.bias': (16,),
          }
        },
      )
      self.assertEqual(
        jax.tree.map(jnp.shape, state.carry),
        {
          f'{module}/carry': {'carry': {'kept': {}, 'key': (3,), 'count': (3,)}}
        },
      )

  def test_the_library_initialises_its_modules(self):
    x, _ = agreement.rows((400,))
    for make in (
      _nnx(lambda rngs: nnx.Linear(400, 300, rngs=rngs)),
      _linen(linen.Dense(300)),
    ):
      _, params, _ = cases.start(make, x)
      (leaves,) = params.values()
      # Flax's lecun-normal, where Haiku's own would be a truncated normal too.
      np.testing.assert_allclose(np.std(leaves['kernel']), 0.05, rtol=0.02)
      np.testing.assert_array_equal(leaves['bias'], np.zeros(300))

  def test_outputs_are_those_of_the_formula(self):
    x, is_first = agreement.rows((4,))
    for make, names in (
      (
        _nnx(
          lambda in_features, rngs: nnx.Sequential(
            nnx.Linear(in_features, 8, rngs=rngs),
            nnx.relu,
            nnx.Linear(8, 2, rngs=rngs),
          )
        ),
        ('layers.0', 'layers.2'),
      ),
      (
        _linen(linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(2)])),
        ('layers_0', 'layers_2'),
      ),
    ):
      y, params, end = agreement.check(cases.network(make), x, is_first)
      self.assertEmpty(jax.tree.leaves(end))  # No state, so rows stand alone.
      (leaves,) = params.values()
      np.testing.assert_allclose(
        y, cases.mlp(leaves, x, names), rtol=1e-5, atol=1e-5
      )

  @parameterized.parameters(_nnx(_conv), _linen(_FlatConv()))
  def test_images(self, make):
    x, is_first = agreement.rows((5, 5, 1))
    y, _, _ = agreement.check(cases.network(make), x, is_first)
    self.assertEqual(y.shape, (7, 3, 50))

  @parameterized.parameters(*_BODIES, *(f'{k} everything' for k in _EVERYTHING))
  def test_stepped_as_unrolled(self, kind):
    kind, *everything = kind.split()
    make = _EVERYTHING[kind] if everything else _BODIES[kind]
    x, is_first = agreement.rows((1,))
    _, end = cases.check_stepped_as_unrolled(cases.network(make), x, is_first)
    self.assertLen(jax.tree.leaves(end.statistics), 2)

  def test_recurrent_cells_are_reset(self):
    x, is_first = agreement.rows((4,))
    for make, module, cell in (
      (
        _nnx(lambda rngs: nnx.GRUCell(4, 5, rngs=rngs)),
        nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)),
        None,
      ),
      (_linen(linen.GRUCell(5)), None, linen.GRUCell(5)),
    ):
      y, params, _ = agreement.check(cases.network(make), x, is_first)
      net, _, state = cases.start(make, x)
      y, _ = net.unroll(params, state, None, x, is_first)
      (leaves,) = params.values()
      nested = {}
      for name, leaf in leaves.items():
        layer, kind = name.split('.')
        nested.setdefault(layer, {})[kind] = leaf
      if module is not None:
        nnx.update(module, nested)
        step = module
      else:

        def step(carry, row, cell=cell, nested=nested):
          return cell.apply({'params': nested}, carry, row)

      expected = cases.recurrent_reference(step, jnp.zeros((3, 5)), x, is_first)
      np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

  def test_carry_of_your_own(self):
    def call(module, carry, x):
      y = carry + module(x)
      return y, y

    make = _nnx(
      lambda rngs: nnx.Linear(4, 4, rngs=rngs),
      call=call,
      initial_carry=lambda module, x: jnp.full_like(x, 10),
    )
    x, is_first = agreement.rows((4,))
    y, params, _ = agreement.check(cases.network(make), x, is_first)
    net, _, state = cases.start(make, x)
    y, _ = net.unroll(params, state, None, x, is_first)
    (leaves,) = params.values()
    z = x @ leaves['kernel']
    total = np.full((3, 4), 10, np.float32)
    for t in range(len(x)):
      total = np.where(is_first[t][:, None], 10, total) + z[t]
      np.testing.assert_allclose(y[t], total, rtol=1e-4, atol=1e-4)

  @parameterized.parameters(_nnx(NNXCounter), _linen(LinenCounter()))
  def test_a_cache_belongs_to_its_element(self, make):
    x, is_first = agreement.rows((2,))
    is_first[0] = [True, False, True]
    agreement.check(cases.network(make), x, is_first)
    net, params, state = cases.start(make, x)
    y, _ = jax.jit(net.unroll)(params, state, None, x, is_first)
    count = np.zeros(3)
    for t in range(len(x)):
      count = np.where(is_first[t], 0, count) + 1
      np.testing.assert_allclose(
        y[t] - x[t], np.stack([count] * 2, -1), atol=1e-5
      )

  @parameterized.parameters(
    _nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
    _linen(linen.Dropout(0.5, deterministic=False)),
  )
  def test_any_part_of_the_batch_replays_its_noise(self, make):
    cases.check_noise(make)

  @parameterized.parameters(
    _nnx(lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs)),
    _linen(linen.Dropout(0.5, deterministic=True)),
  )
  def test_noise_that_is_off_costs_no_carry(self, make):
    cases.check_no_carry(make)

  @parameterized.parameters(*_BODIES)
  def test_seeds_and_gradients(self, kind):
    cases.check_seeds_and_gradients(_BODIES[kind])

  @parameterized.parameters(*_NORMS)
  def test_batch_norm_learns_only_from_masked_rows(self, kind):
    cases.check_statistics(*_NORMS[kind])

  @parameterized.product(kind=list(_EVERYTHING), num_minibatches=[1, 2, 4])
  def test_ratio_is_one(self, kind, num_minibatches):
    cases.check_ratio(_EVERYTHING[kind], num_minibatches)

  def test_transform_and_population_of_a_graph(self):
    graph = hg.PopulationGraph()
    graph.add_input('eye', 3, input_from='x')
    graph.add_population(
      'arm',
      5,
      activation='jax.numpy.tanh',
      module=foreign.population(
        lambda size: hgflax.from_nnx(
          lambda rngs: nnx.GRUCell(size, size, rngs=rngs)
        )
      ),
    )
    graph.add_output('limb', 2)
    graph.connect(
      'eye', 'arm', transform=_linen(LinenBody(5), call=_training), delay=1
    )
    graph.connect('arm', 'arm', delay=1)
    graph.connect('arm', 'limb')
    network = hg.graph_network(graph.finalize())
    x, is_first = agreement.rows((3,))
    params, end = cases.check_stepped_as_unrolled(network, {'x': x}, is_first)
    names = [name for name in params if 'linen_module' in name]
    self.assertLen(names, 1)
    self.assertIn('eye', names[0])
    self.assertNotEmpty(jax.tree.leaves(end.statistics))

  def test_actor_critic_of_bodies(self):
    env = hg.envs.make('cartpole')
    network = hg.transform(
      lambda obs: hg.ActorCritic(
        env.action_spec(),
        hgflax.from_nnx(lambda rngs: NNXBody(4, 8, rngs=rngs)),
        hgflax.from_linen(LinenBody(8)),
      )(obs)
    )
    x, is_first = agreement.rows((4,))
    params, state = network.init(jax.random.key(0), x[0])
    outputs, _ = network.unroll(params, state, None, x, is_first)
    self.assertEqual(outputs.value.shape, (7, 3))
    self.assertEqual(outputs.policy.logits.shape, (7, 3, 2))

  def test_stateless_modules_serve_any_haiku_function(self):
    module = _linen(linen.Dense(2))
    forward = hk.transform(lambda x: module()(x))
    x = np.ones((3, 4), np.float32)
    params = forward.init(jax.random.key(0), x)
    y = forward.apply(params, None, x)
    np.testing.assert_allclose(
      y, x @ params['linen_module']['kernel'], rtol=1e-5
    )

  @parameterized.named_parameters(
    ('scalar', _nnx(lambda rngs: nnx.Sequential(jnp.sum)), 'leading axis'),
    ('nothing', _linen(linen.Sequential([lambda x: None])), 'leading axis'),
    (
      'data',
      _nnx(lambda rngs: nnx.Sequential(lambda x: x[x[:, 0] > 0])),
      'NonConcreteBoolean',
    ),
    ('shape', _nnx(lambda rngs: nnx.Linear(7, 2, rngs=rngs)), 'float32.2, 4'),
    ('arguments', _linen(_Trained()), "alone failed .*'train'.* say by `call`"),
    ('kind', _linen(linen.Embed(4, 3)), 'module for inputs of these shapes'),
  )
  def test_output_size_that_cannot_be_inferred(self, make, message):
    with self.assertRaisesRegex(
      ValueError, '(?s)output size of the .*' + message
    ):
      cases.start(make, agreement.rows((4,))[0])

  def test_factories_that_fail(self):
    with self.assertRaisesRegex(
      ValueError,
      '(?s)`factory`, called with in_features, rngs alone, failed .*_features',
    ):
      cases.start(_nnx(nnx.Linear), agreement.rows((4,))[0])

  def test_wrong_arguments(self):
    with self.assertRaisesRegex(TypeError, '`factory` must be a function of'):
      hgflax.from_nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with self.assertRaisesRegex(TypeError, 'an NNX module is given by a fac'):
      hgflax.from_linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    x, _ = agreement.rows((4,))
    with self.assertRaisesRegex(TypeError, 'must make an nnx.Module, got 3'):
      cases.start(_nnx(lambda rngs: 3), x)
    with self.assertRaisesRegex(TypeError, 'in_features.* reads one array'):
      cases.start(_nnx(NNXBody), [{'a': x[0]}])
    with self.assertRaisesRegex(TypeError, '`make` must be a function of a s'):
      foreign.population(3)

  def test_axes_in_front_are_those_of_the_rows(self):
    x, is_first = agreement.rows((4,))
    dense = _linen(linen.Dense(2))
    network = hg.transform(lambda x: hk.BatchApply(dense())(x))
    params, state = cases.start(dense, x)[1:]
    with self.assertRaisesRegex(ValueError, 'without `hk.BatchApply`'):
      network.unroll(params, state, None, x, is_first)
    with self.assertRaisesRegex(ValueError, 'arrays with .B, ...., got'):
      hk.transform(lambda x: dense()(x)).init(jax.random.key(0), 1.0)

  def test_memory_keeps_its_shape(self):
    make = _nnx(
      lambda rngs: nnx.Linear(4, 2, rngs=rngs),
      call=lambda module, carry, x: (module(x), x),
      initial_carry=lambda module, x: x,
    )
    with self.assertRaisesRegex(ValueError, 'keep the shapes and dtypes'):
      cases.start(make, agreement.rows((4,))[0])

  def test_memory_belongs_to_elements(self):
    make = _nnx(
      lambda rngs: nnx.Linear(4, 4, rngs=rngs),
      call=lambda module, carry, x: (carry, x),
      initial_carry=lambda module, x: jnp.zeros(4),
    )
    with self.assertRaisesRegex(ValueError, r'got the shapes \[\(4,\)\] for B'):
      cases.start(make, agreement.rows((4,))[0])

  def test_sequences_within_a_row(self):
    for make in (
      _nnx(lambda rngs: nnx.RNN(nnx.GRUCell(4, 5, rngs=rngs))),
      _linen(linen.RNN(linen.GRUCell(5))),
    ):
      x, is_first = agreement.rows((2, 4))
      agreement.check(cases.network(make), x, is_first)
      # Here the rows would be time.
      with self.assertRaisesRegex(ValueError, 'give the GRUCell without RNN'):
        cases.start(make, x[:, :, 0])
    make = _linen(linen.RNN(linen.GRUCell(5), time_major=True))
    with self.assertRaisesRegex(ValueError, 'and time_major, where the rows'):
      cases.start(make, x)

  def test_parameters_that_are_no_numbers_to_train(self):
    class Shift(nnx.Module):
      def __init__(self, rngs):
        self.by = nnx.Param(jnp.arange(4))

      def __call__(self, x):
        return x + self.by[...][None]

    with self.assertRaisesRegex(TypeError, "of Shift .* {'by': 'int32'}"):
      cases.start(_nnx(Shift), agreement.rows((4,))[0])

  def test_a_cache_beside_batch_norm(self):
    def factory(rngs):
      return nnx.Sequential(NNXCounter(rngs), nnx.BatchNorm(4, rngs=rngs))

    with self.assertRaisesRegex(ValueError, 'cannot be learned together'):
      cases.start(_nnx(factory), agreement.rows((4,))[0])


def _graph():
  graph = hg.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_population('arm', 5, activation='jax.numpy.tanh')
  graph.add_output('limb', 2)
  graph.connect('eye', 'arm', delay=2)
  graph.connect('arm', 'arm', delay=1)
  graph.connect('arm', 'limb')
  return graph.finalize()


def _stateful():
  spec = _graph()
  return hg.transform(
    lambda x: hg.Graph(spec)({'x': hg.GaussianNoise()(hg.Normalizer()(x))})
  )


class ToLinenTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x, self.is_first = agreement.rows((3,))
    self.network = _stateful()
    self.module = hgflax.to_linen(self.network)
    self.variables = self.module.init(jax.random.key(0), self.x[0])

  def test_collections(self):
    self.assertSameElements(self.variables, ('params', 'statistics', 'carry'))
    params, state = self.network.init(jax.random.key(0), self.x[0])
    self.assertEqual(
      jax.tree.map(jnp.shape, dict(self.variables['params'])),
      jax.tree.map(jnp.shape, dict(params)),
    )
    fresh = self.network.initial_carry(3)
    self.assertEqual(
      jax.tree.structure(dict(self.variables['carry'])),
      jax.tree.structure(dict(fresh)),
    )
    del state

  def test_outputs_and_carry_are_the_networks(self):
    state = hg.NetworkState(
      carry=self.variables['carry'], statistics=self.variables['statistics']
    )
    expected, end = self.network.unroll(
      self.variables['params'], state, None, self.x, self.is_first
    )
    unrolled, new = jax.jit(
      lambda v, x, f: self.module.apply(
        v, x, f, method='unroll', mutable=['carry']
      )
    )(self.variables, self.x, self.is_first)
    np.testing.assert_allclose(
      unrolled['limb'], expected['limb'], rtol=1e-5, atol=1e-5
    )
    step = jax.jit(lambda v, x, f: self.module.apply(v, x, f, mutable='carry'))
    variables = dict(self.variables)
    for t in range(len(self.x)):
      y, new = step(variables, self.x[t], self.is_first[t])
      variables |= new
      np.testing.assert_allclose(
        y['limb'], expected['limb'][t], rtol=1e-5, atol=1e-5
      )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
      cases.without_keys(dict(variables['carry'])),
      cases.without_keys(dict(end.carry)),
    )

  def test_statistics_change_only_when_told(self):
    mask = np.ones(self.is_first.shape, bool)
    _, new = self.module.apply(
      self.variables,
      self.x,
      self.is_first,
      mask,
      method='update_statistics',
      mutable=['statistics'],
    )
    (moments,) = new['statistics']['normalizer']['moments']
    rows = self.x.reshape(-1, 3)
    np.testing.assert_allclose(moments.mean, rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-4)

  def test_a_carry_that_would_be_forgotten(self):
    with self.assertRaisesRegex(ValueError, "has carry.*mutable=\\['carry'\\]"):
      self.module.apply(self.variables, self.x[0])
    with self.assertRaisesRegex(ValueError, 'has statistics.*mutable'):
      mask = np.ones(self.is_first.shape, bool)
      self.module.apply(
        self.variables,
        self.x,
        self.is_first,
        mask,
        method='update_statistics',
      )

  def test_inside_of_a_linen_module(self):
    network = hg.transform(lambda x: hk.nets.MLP([8, 2])(x))

    class Outer(linen.Module):
      @linen.compact
      def __call__(self, x):
        return linen.Dense(1)(hgflax.to_linen(network, name='inner')(x))

    variables = Outer().init(jax.random.key(0), self.x[0])
    self.assertSameElements(variables, ('params',))
    gradient = jax.grad(
      lambda v: jnp.sum(jnp.square(Outer().apply(v, self.x[0])))
    )(variables)
    inner = gradient['params']['inner']
    self.assertEqual(inner['mlp/~/linear_0']['w'].shape, (3, 8))
    for leaf in jax.tree.leaves(inner):
      self.assertTrue(np.any(leaf))

  def test_there_and_back(self):
    """A network as a Linen module as a network: outputs are the same."""
    back = cases.network(
      lambda: hgflax.from_linen(
        hgflax.to_linen(hg.transform(lambda x: hk.nets.MLP([8, 2])(x)))
      )
    )
    y, params, _ = agreement.check(back, self.x, self.is_first)
    (leaves,) = params.values()
    names = ('mlp/~/linear_0', 'mlp/~/linear_1')
    leaves = {
      k.replace('.b', '.bias') if k.endswith('.b') else k: v
      for k, v in leaves.items()
    }
    np.testing.assert_allclose(
      y, cases.mlp(leaves, self.x, names, 'w'), rtol=1e-5, atol=1e-5
    )

  def test_noise_without_its_stream(self):
    module = hgflax.to_linen(
      hg.transform(lambda x: x + jax.random.uniform(hk.next_rng_key(), (3, 1)))
    )
    key, x = jax.random.key(0), jnp.ones((3, 2))
    variables = module.init(key, x)
    module.apply(variables, x, rngs={'noise': key})
    with self.assertRaisesRegex(ValueError, r"give `rngs={'noise': key}`"):
      module.apply(variables, x, rngs={'dropout': key})

  def test_inputs_without_a_batch(self):
    module = hgflax.to_linen(hg.transform(lambda x: x))
    with self.assertRaisesRegex(ValueError, 'the inputs hold no array'):
      module.init(jax.random.key(0), {})
    with self.assertRaisesRegex(ValueError, r'share leading axes \[B, ...\]'):
      module.init(jax.random.key(0), 1.0)

  def test_no_network(self):
    with self.assertRaisesRegex(TypeError, '`network` must be a Network'):
      hgflax.to_linen(linen.Dense(3))


@pytest.mark.slow
class TrainingTest(parameterized.TestCase):
  @parameterized.parameters(*_BODIES)
  def test_ours_trains_a_body(self, kind):
    env = hg.envs.make('cartpole')
    bodies = {
      'nnx': _nnx(lambda rngs: NNXBody(4, 64, rngs=rngs)),
      'linen': _linen(LinenBody(64), call=_training),
    }
    network = hg.transform(
      lambda obs: hg.ActorCritic(
        env.action_spec(), bodies[kind](), hg.MLPEncoder()
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
