from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hkgraph import network as network_lib
from hkgraph.graph import builder, core, labels, parameters


class Gain(core.Population):
  """A population with a parameter of its own."""

  def __call__(self, inputs):
    gain = hk.get_parameter('gain', (), init=jnp.ones)
    return gain * super().__call__(inputs)


def make_spec():
  graph = builder.PopulationGraph()
  graph.add_input('eye', 4, input_from='x')
  # The second name begins as the scope of the first one's module does.
  graph.add_population('h', 4, module=Gain)
  graph.add_population('h_population', 4, module=Gain)
  graph.add_output('policy', 4)
  graph.add_output('value', 1)
  graph.connect('eye', 'h')
  graph.connect('eye', 'h_population')
  graph.connect('h', 'policy')
  graph.connect('h', 'policy', delay=2)
  graph.connect('h', 'policy', delay=3)
  graph.connect('h_population', 'policy')
  graph.connect('h', 'h', delay=1)
  graph.connect('h', 'value')
  graph.connect('eye', 'policy', transform=lambda: hk.nets.MLP([3, 4]))
  return graph.finalize()


SPEC = make_spec()
CORE = 'graph/~/core'


def make_params():
  """Parameters of a whole network, other leaves beside the graph's."""
  action = specs.BoundedArray((2,), np.float32, -1, 1)
  network = network_lib.policy_network(SPEC, action)
  params, _ = network.init(jax.random.key(0), {'x': jnp.zeros((1, 4))})
  params = params | {'other': {'w': jnp.ones((3,))}}
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [
    jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)
  ]
  return structure.unflatten(leaves)


def grads_like(params, seed):
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return structure.unflatten(
    [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
  )


def train(optimizer, params, num_steps=4):
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for seed in range(num_steps):
    params, state = step(params, state, grads_like(params, seed))
  return params


def table_of(params):
  return parameters.connection_params(SPEC, params)


class LabelsTest(parameterized.TestCase):
  def test_longer_names_have_the_last_word(self):
    named = {
      'policy': 'p',
      ('h', 'policy'): 'hp',
      ('h', 'policy', 1): 'hp1',
      'h': 'h',
    }
    self.assertEqual(
      labels.connection_labels(SPEC, named, default='d'),
      {
        ('eye', 'h', 0): 'h',
        ('eye', 'h_population', 0): 'd',
        ('eye', 'policy', 0): 'p',
        ('h', 'h', 0): 'h',
        ('h', 'policy', 0): 'hp',
        ('h', 'policy', 1): 'hp1',
        ('h', 'policy', 2): 'hp',
        ('h', 'value', 0): 'd',
        ('h_population', 'policy', 0): 'p',
      },
    )

  @pytest.mark.heavy
  def test_labels_fit_the_table_of_connections_in_optax(self):
    table = table_of(make_params())
    tree = labels.connection_labels(
      SPEC, {('h', 'policy', 1): 'slow'}, default='fast'
    )
    optimizer = optax.multi_transform(
      {'slow': optax.sgd(0.1), 'fast': optax.sgd(1.0)}, tree
    )
    ones = jax.tree.map(jnp.ones_like, table)
    updates, _ = optimizer.update(ones, optimizer.init(table))
    for key, weights in updates.items():
      rate = 0.1 if key == ('h', 'policy', 1) else 1.0
      np.testing.assert_allclose(
        weights['b' if 'b' in weights else 'mlp/~/linear_0/b'], -rate
      )


class ByConnectionTest(parameterized.TestCase):
  def test_weights_that_share_an_array_have_rates_of_their_own(self):
    params = make_params()
    # That is what makes it hard: these are rows of one array.
    packs = {shape for shape in jax.tree.map(jnp.shape, params[CORE]).values()}
    self.assertIn((3, 4, 4), packs)
    rates = {'none': 0.0, 'slow': 0.25, 'fast': 2.0}
    optimizer = labels.by_connection(
      SPEC,
      {label: optax.sgd(rate) for label, rate in rates.items()},
      {('h', 'policy', 1): 'slow', ('h', 'policy'): 'none', 'h': 'slow'},
      default='fast',
    )
    grads = grads_like(params, 7)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    rate_of = {
      ('h', 'policy', 0): 0.0,
      ('h', 'policy', 1): 0.25,
      ('h', 'policy', 2): 0.0,
      ('eye', 'h', 0): 0.25,
      ('h', 'h', 0): 0.25,
    }
    before, after = table_of(grads), table_of(updates)
    for key, weights in before.items():
      rate = rate_of.get(tuple(key), 2.0)
      for name, value in weights.items():
        np.testing.assert_allclose(after[key][name], -rate * value, rtol=1e-6)
    # The population's own module goes with it; its namesake's does not.
    for module, rate in (
      (f'{CORE}/~/h_population', 0.25),
      (f'{CORE}/~/h_population_population', 2.0),
      ('other', 2.0),
    ):
      for name, value in grads[module].items():
        np.testing.assert_allclose(updates[module][name], -rate * value)

  @parameterized.parameters(
    (('h', 'policy', 1),), (('eye', 'policy', 0),), (('eye', 'h', 0),)
  )
  @pytest.mark.heavy
  def test_a_frozen_edge_does_not_move_and_all_else_does(self, edge):
    params = make_params()
    # Momentum, decay, noise: all that moves weights without a gradient.
    inner = optax.chain(
      optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.3)
    )
    trained = train(labels.freeze(SPEC, inner, [edge]), params)
    before, after = table_of(params), table_of(trained)
    for key in before:
      for name in before[key]:
        difference = np.abs(before[key][name] - after[key][name])
        if key == edge:
          self.assertEqual(difference.max(), 0)
        else:
          self.assertGreater(difference.min(), 0)
    self.assertGreater(
      np.abs(params['other']['w'] - trained['other']['w']).min(), 0
    )

  @pytest.mark.heavy
  def test_a_frozen_edge_ignores_gradients_that_are_not_finite(self):
    params = make_params()
    optimizer = labels.freeze(SPEC, optax.adam(0.1), ['policy'])
    grads = jax.tree.map(lambda x: x * jnp.nan, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = table_of(optax.apply_updates(params, updates))
    chex.assert_trees_all_equal(
      new['h', 'policy', 1], table_of(params)['h', 'policy', 1]
    )

  def test_one_label_for_all_changes_nothing(self):
    params = make_params()
    plain = train(optax.adam(0.1), params)
    cut = train(
      labels.by_connection(SPEC, {'all': optax.adam(0.1)}, {}, default='all'),
      params,
    )
    chex.assert_trees_all_equal(plain, cut)

  def test_cutting_changes_nothing_where_transformations_are_the_same(self):
    params = make_params()
    adam = optax.adam(0.1)
    cut = labels.by_connection(
      SPEC,
      {'a': adam, 'b': optax.flatten(adam)},
      {('h', 'policy', 1): 'a', 'h': 'a', ('h', 'value'): 'a'},
      default='b',
    )
    chex.assert_trees_all_close(
      train(cut, params), train(adam, params), atol=1e-6
    )

  def test_flatten_around_a_transformation_without_parameters(self):
    params = make_params()
    flat = optax.flatten(optax.adam(0.1))
    everything = {
      p.name: 'frozen' for p in SPEC.populations if p.kind != 'input'
    }
    optimizer = labels.by_connection(
      SPEC,
      {'frozen': optax.set_to_zero(), 'trained': flat, 'unused': flat},
      everything,
      default='trained',
    )
    trained = train(optimizer, params)
    chex.assert_trees_all_equal(table_of(trained), table_of(params))
    self.assertGreater(
      np.abs(trained['other']['w'] - params['other']['w']).max(), 0
    )

  def test_masked_leaves_the_rest_as_it_comes(self):
    params = make_params()
    optimizer = optax.chain(
      labels.masked_by_connection(
        SPEC, optax.add_decayed_weights(0.5), [('h', 'policy', 0)]
      ),
      optax.scale(-1.0),
    )
    grads = grads_like(params, 3)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    old, grad, new = table_of(params), table_of(grads), table_of(updates)
    for key in old:
      decay = 0.5 if key == ('h', 'policy', 0) else 0.0
      for name in old[key]:
        np.testing.assert_allclose(
          new[key][name],
          -(grad[key][name] + decay * old[key][name]),
          rtol=1e-5,
        )

  def test_inside_of_a_partition_by_module(self):
    params = make_params()
    tree = {m: 'other' if m == 'other' else 'graph' for m in params}
    optimizer = optax.multi_transform(
      {
        'graph': labels.freeze(SPEC, optax.sgd(1.0), [('h', 'policy', 0)]),
        'other': optax.sgd(3.0),
      },
      tree,
    )
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    np.testing.assert_array_equal(updates['other']['w'], -3)
    table = table_of(updates)
    np.testing.assert_array_equal(table['h', 'policy', 0]['w'], 0)
    np.testing.assert_array_equal(table['h', 'policy', 1]['w'], -1)

  def test_schedules_and_hyperparameters_of_each_label(self):
    params = make_params()
    optimizer = labels.by_connection(
      SPEC,
      {
        'a': optax.inject_hyperparams(optax.sgd)(0.5),
        'b': optax.sgd(optax.linear_schedule(1.0, 0.0, 2)),
      },
      {('h', 'policy', 1): 'a'},
      default='b',
    )
    state = optimizer.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    seen = []
    for _ in range(3):
      updates, state = optimizer.update(ones, state, params)
      table = table_of(updates)
      seen.append([-float(table['h', 'policy', i]['b'][0]) for i in (0, 1)])
    np.testing.assert_allclose(seen, [[1.0, 0.5], [0.5, 0.5], [0.0, 0.5]])
    self.assertAlmostEqual(
      float(optax.tree_utils.tree_get(state, 'learning_rate')), 0.5
    )

  def test_one_of_two_graphs(self):
    params = make_params()
    twin = {k.replace('graph/', 'twin/', 1): v for k, v in params.items()}
    both = {**params, **twin}
    args = SPEC, optax.sgd(1.0), [('h', 'policy')]
    with self.assertRaisesRegex(ValueError, 'give `module` to choose one'):
      labels.freeze(*args).init(both)
    optimizer = labels.freeze(*args, module='twin/~/core')
    ones = jax.tree.map(jnp.ones_like, both)
    updates, _ = optimizer.update(ones, optimizer.init(both))
    for module, moved in (('graph/~/core', -1), ('twin/~/core', 0)):
      table = parameters.connection_params(SPEC, updates, module=module)
      np.testing.assert_array_equal(table['h', 'policy', 0]['w'], moved)


class ErrorsTest(parameterized.TestCase):
  def test_all_unknown_names_are_told_with_near_ones(self):
    with self.assertRaises(ValueError) as caught:
      labels.freeze(
        SPEC,
        optax.sgd(1.0),
        [
          'polcy',
          ('h', 'polcy'),
          ('h', 'policy', 3),
          ('policy', 'eye', 0),
          'eye',
          'value',
        ],
      )
    self.assertEqual(
      str(caught.exception).split('; '),
      [
        "'polcy' is no population of this graph (did you mean 'policy'?)",
        "('h', 'polcy') names no connection (did you mean 'h -> policy' or "
        "'eye -> policy' or 'h_population -> policy'?)",
        "('h', 'policy', 3) names no connection: h -> policy has the indices "
        '0 to 2',
        "('policy', 'eye', 0) names no connection (did you mean 'eye -> "
        "policy'?)",
        "'eye' stands for the connections that feed it, but has none",
        "name what it feeds: ('eye', 'h')",
      ],
    )

  @parameterized.parameters(
    (('a', 'b', 'c'),), ((1, 2),), (3,), (('h', 'policy', True),), (('h',),)
  )
  def test_what_is_no_name(self, name):
    with self.assertRaisesRegex(TypeError, 'a name must be that of a popul'):
      labels.connection_labels(SPEC, {name: 'a'}, default='b')

  @parameterized.parameters(('policy',), (('h', 'policy'),), (None,))
  def test_names_must_be_a_list(self, names):
    with self.assertRaisesRegex(TypeError, 'must be a list of populations'):
      labels.freeze(SPEC, optax.sgd(1.0), names)

  def test_a_name_that_was_read_from_json(self):
    with self.assertRaisesRegex(TypeError, r"write \('h', 'policy'\)"):
      labels.freeze(SPEC, optax.sgd(1.0), [['h', 'policy']])

  def test_labels_need_transformations(self):
    make = labels.by_connection
    with self.assertRaisesRegex(ValueError, r"'slwo' \(did you mean 'slow'\?"):
      make(SPEC, {'slow': optax.sgd(1.0)}, {'h': 'slwo'}, default='slow')
    with self.assertRaisesRegex(ValueError, "no entry for the label 'rest'"):
      make(SPEC, {'slow': optax.sgd(1.0)}, {'h': 'slow'}, default='rest')
    with self.assertRaisesRegex(TypeError, r"`transforms\['slow'\]` must be"):
      make(SPEC, {'slow': 1e-3}, {}, default='slow')
    for transforms in (None, [optax.sgd(1.0)]):
      with self.assertRaisesRegex(TypeError, '`transforms` must be a dict'):
        make(SPEC, transforms, {}, default='slow')
    with self.assertRaisesRegex(TypeError, '`label` must be a string'):
      make(SPEC, {'slow': optax.sgd(1.0)}, {'h': 1}, default='slow')

  def test_what_is_no_graph_and_what_are_no_parameters(self):
    with self.assertRaisesRegex(TypeError, 'must be a GraphSpec'):
      labels.freeze(builder.PopulationGraph(), optax.sgd(1.0), [])
    flat = optax.flatten(labels.freeze(SPEC, optax.sgd(1.0), ['h']))
    with self.assertRaisesRegex(TypeError, 'put `optax.flatten` inside'):
      flat.init(make_params())
    with self.assertRaisesRegex(ValueError, 'no module of the parameters fit'):
      labels.freeze(SPEC, optax.sgd(1.0), ['h']).init({'a': {'w': jnp.ones(3)}})


if __name__ == '__main__':
  absltest.main()
