"""Heads and towers of learners' networks."""

from absl.testing import absltest, parameterized
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.modules import encoders, recurrent, towers, transformer
from tests.modules import agreement

DISCRETE = specs.DiscreteArray(3)
BODIES = {
  'arm': specs.BoundedArray((2,), np.float32, -1, 1),
  'leg': specs.DiscreteArray(3),
}


def _mlp():
  return encoders.MLPEncoder((8,))


def _gru():
  return recurrent.RecurrentEncoder(hk.GRU(4), _mlp())


def _lstm():
  return recurrent.RecurrentEncoder(hk.LSTM(4))


def _window():
  return transformer.TransformerEncoder(_mlp(), 8, 2, 1, 3)


def _graph():
  graph = hg.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_output('a', 4, activation=jnp.tanh)
  graph.add_output('b', 2)
  graph.connect('eye', 'a', delay=2)
  graph.connect('a', 'b')
  return hg.Graph(graph.finalize())


def _actor_critic(*args, **kwargs):
  """Keyword `towers` makes the encoders, inside of the transform."""

  def fn(x):
    make = kwargs.get('towers', (_mlp, _mlp))
    options = {k: v for k, v in kwargs.items() if k != 'towers'}
    out = towers.ActorCritic(*args, *(m() for m in make), **options)(x)
    return {'policy': out.policy, 'value': out.value}

  return hg.transform(fn)


def _assert_orthogonal(w, scale):
  gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
  eye = scale**2 * np.eye(len(gram))
  np.testing.assert_allclose(gram, eye, atol=1e-4 * scale**2)


class ActorCriticTest(parameterized.TestCase):
  @parameterized.parameters(
    ((_mlp, _mlp), 0),
    ((_mlp,), 0),
    ((_gru, _gru), 2),
    ((_gru,), 1),
    ((_window, _window), 2),
    ((_graph, _graph), 2),
    ((_graph, _mlp), 1),
  )
  @pytest.mark.heavy
  def test_apply_and_unroll_agree(self, make, num_carries):
    network = _actor_critic(DISCRETE, towers=make)
    x, is_first = agreement.rows((3,))
    out, params, end = agreement.check(network, x, is_first)
    self.assertEqual(out['policy'].logits.shape, (7, 3, 3))
    self.assertEqual(out['value'].shape, (7, 3))
    kept = [name for name in end.carry if jax.tree.leaves(end.carry[name])]
    self.assertLen(kept, num_carries)
    _assert_orthogonal(params['actor_critic/policy_head']['w'], 0.01)
    _assert_orthogonal(params['actor_critic/value_head']['w'], 1)
    for head in ('policy_head', 'value_head'):
      np.testing.assert_array_equal(params[f'actor_critic/{head}']['b'], 0)

  @pytest.mark.heavy
  def test_towers_are_apart_or_shared(self):
    x = np.ones((2, 3), np.float32)
    for make, layers in (((_mlp, _mlp), 2), ((_mlp,), 1)):
      network = _actor_critic(DISCRETE, towers=make)
      params, state = network.init(jax.random.key(0), x)
      names = [name for name in params if name.startswith('mlp_encoder')]
      self.assertLen(names, layers)

      def value(params, network=network, state=state):
        first = np.ones(2, bool)
        return jnp.sum(network.apply(params, state, None, x, first)[0]['value'])

      slopes = jax.grad(value)(params)
      moved = [n for n in names if np.any(slopes[n]['w'])]
      self.assertLen(moved, 1)
      self.assertFalse(np.any(slopes['actor_critic/policy_head']['w']))

  @pytest.mark.heavy
  def test_one_encoder_given_twice_is_shared(self):
    def fn(x):
      encoder = _gru()
      return towers.ActorCritic(DISCRETE, encoder, encoder)(x).value

    agreement.check(hg.transform(fn), *agreement.rows((3,)))

  @pytest.mark.heavy
  def test_dicts_of_heads(self):
    keys = ('leg', 'arm')
    network = _actor_critic(BODIES, reward_keys=keys, scale='independent')
    out, params, _ = agreement.check(network, *agreement.rows((3,)))
    self.assertEqual(out['policy']['arm'].loc.shape, (7, 3, 2))
    self.assertEqual(out['policy']['leg'].logits.shape, (7, 3, 3))
    shapes = jax.tree.map(jnp.shape, out['value'])
    self.assertEqual(shapes, {'arm': (7, 3), 'leg': (7, 3)})
    self.assertGreater(
      np.abs(out['value']['arm'] - out['value']['leg']).max(), 0
    )
    # One product for all heads.
    self.assertEqual(params['actor_critic/policy_head']['w'].shape, (8, 5))
    self.assertEqual(params['actor_critic/value_head']['w'].shape, (8, 2))

  @parameterized.parameters(
    ((_gru, _lstm), 'policy tower .RecurrentEncoder. has the carry .*core'),
    ((_gru, _mlp), r'value tower \(MLPEncoder\) has no carry'),
    ((_mlp, _window), r'policy tower \(MLPEncoder\) has no carry, the value '),
  )
  def test_unlike_carries(self, make, message):
    network = _actor_critic(DISCRETE, towers=make)
    with self.assertRaisesRegex(ValueError, message):
      network.init(jax.random.key(0), jnp.ones((2, 3)))

  @parameterized.parameters(
    (dict(reward_keys='arm'), TypeError, 'a sequence of keys'),
    (dict(reward_keys=()), ValueError, 'at least one'),
    (dict(reward_keys=('a', 'a')), ValueError, 'distinct'),
    (dict(towers=(lambda: 3,)), TypeError, 'got 3'),
    (dict(reward_keys=3), TypeError, 'a sequence of keys'),
    (
      dict(towers=(lambda: encoders.MLPEncoder,)),
      TypeError,
      r'write `MLPEncoder\(',
    ),
    (dict(towers=(lambda: hk.GRU(8),)), TypeError, 'RecurrentEncoder'),
  )
  def test_errors(self, wrong, error, message):
    network = _actor_critic(DISCRETE, **wrong)
    with self.assertRaisesRegex(error, message):
      network.init(jax.random.key(0), jnp.ones((2, 3)))


class QNetworkTest(parameterized.TestCase):
  @parameterized.parameters(_mlp, _gru, _graph, lambda: hk.Linear(5))
  def test_apply_and_unroll_agree(self, make):
    network = hg.transform(lambda x: towers.QNetwork(DISCRETE, make())(x))
    y, params, _ = agreement.check(network, *agreement.rows((3,)))
    self.assertEqual(y.shape, (7, 3, 3))
    _assert_orthogonal(params['q_network/q_head']['w'], 1)
    np.testing.assert_array_equal(params['q_network/q_head']['b'], 0)

  @pytest.mark.heavy
  def test_images(self):
    network = hg.transform(
      lambda x: towers.QNetwork(DISCRETE, encoders.QConvEncoder())(x)
    )
    x = np.ones((2, 10, 10, 4), bool)
    params, state = network.init(jax.random.key(0), x)
    y, _ = network.apply(params, state, None, x, np.ones(2, bool))
    self.assertEqual(y.shape, (2, 3))

  def test_dicts(self):
    spec = {'b': DISCRETE, 'a': specs.DiscreteArray(2)}
    network = hg.transform(lambda x: towers.QNetwork(spec, lambda x: x)(x))
    x, is_first = agreement.rows((4,))
    y, params, _ = agreement.check(network, x, is_first)
    w = params['q_network/q_head']['w']
    np.testing.assert_allclose(y['a'], x @ w[:, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y['b'], x @ w[:, 2:], rtol=1e-4, atol=1e-5)

  @parameterized.parameters(
    (BODIES, 'discrete learner.*continuous .*PPO'),
    (BODIES['arm'], 'discrete learner.*continuous .*PPO'),
    (specs.BoundedArray((2,), np.int32, 0, 3), 'key of its own'),
    (specs.BoundedArray((), np.int32, 1, 3), 'count from 0'),
    ({'a': {'b': DISCRETE}}, 'a dict of them'),
    (5, 'need a `DiscreteArray`'),
  )
  def test_other_actions(self, spec, message):
    with self.assertRaisesRegex(ValueError, message):
      towers.num_actions(spec)


if __name__ == '__main__':
  absltest.main()
