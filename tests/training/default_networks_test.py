"""The usual networks, for every kind of observation."""

import subprocess
import sys

from absl.testing import absltest, parameterized
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.training import default_networks

VECTOR = specs.BoundedArray((5,), np.float32, -1.0, 1.0)
GRID = specs.BoundedArray((5, 5, 3), np.uint8, 0, 10)
MINATAR = specs.BoundedArray((10, 10, 4), bool, False, True)
IMAGE = specs.BoundedArray((64, 64, 3), np.uint8, 0, 255)
DICT = {'eye': GRID, 'joint': specs.Array((), np.float32)}


class _Env:
  """Nothing but specs."""

  def __init__(self, observation, action=None, reward=None):
    self._observation = observation
    self._action = action or specs.DiscreteArray(3)
    self._reward = reward or specs.Array((), np.float32)

  def observation_spec(self):
    return self._observation

  def action_spec(self):
    return self._action

  def reward_spec(self):
    return self._reward


def _observe(spec, leading):
  return jax.tree.map(lambda s: jnp.zeros((*leading, *s.shape), s.dtype), spec)


def _run(kind, env, discrete, **kwargs):
  """Modules with parameters, and outputs of a row and of a sequence."""
  network = default_networks.make(kind, env, discrete, **kwargs)

  def run(key):
    spec = env.observation_spec()
    params, state = network.init(key, _observe(spec, (2,)))
    is_first = jnp.zeros((4, 2), bool)
    row, _ = network.apply(
      params, state, None, _observe(spec, (2,)), is_first[0]
    )
    rows, _ = network.unroll(
      params, state, None, _observe(spec, (4, 2)), is_first
    )
    return params, row, rows, state.carry

  return jax.eval_shape(run, jax.random.key(0))


class DefaultNetworksTest(parameterized.TestCase):
  @parameterized.product(
    kind=('auto', 'mlp', 'gru', 'transformer'),
    spec=(VECTOR, GRID, MINATAR, IMAGE, DICT, specs.DiscreteArray(7)),
  )
  def test_action_values(self, kind, spec):
    params, row, rows, carry = _run(kind, _Env(spec), True)
    self.assertEqual(row.shape, (2, 3))
    self.assertEqual(rows.shape, (4, 2, 3))
    remembers = kind in ('gru', 'transformer')
    self.assertEqual(bool(jax.tree.leaves(carry)), remembers)
    looks = spec in (MINATAR, IMAGE) and kind != 'mlp'
    self.assertEqual(any('conv' in name for name in params), looks)

  @parameterized.product(
    kind=('auto', 'gru', 'transformer'), spec=(VECTOR, MINATAR)
  )
  def test_policy_and_value(self, kind, spec):
    _, row, rows, _ = _run(kind, _Env(spec), False, normalize=spec is VECTOR)
    self.assertIsInstance(row, types.PolicyValue)
    self.assertEqual((row.value.shape, rows.value.shape), ((2,), (4, 2)))

  def test_heads(self):
    action = {'a': specs.DiscreteArray(2), 'b': specs.DiscreteArray(3)}
    reward = dict.fromkeys('xy', specs.Array((), np.float32))
    env = _Env(VECTOR, action, reward)
    _, row, _, _ = _run('mlp', env, False)
    self.assertEqual(
      (sorted(row.policy), sorted(row.value)), (['a', 'b'], ['x', 'y'])
    )
    _, row, _, _ = _run('mlp', env, True)
    self.assertEqual(
      {k: v.shape for k, v in row.items()}, {'a': (2, 2), 'b': (2, 3)}
    )

  def test_numbers_that_are_names_are_one_hot(self):
    env = _Env(specs.DiscreteArray(7))
    params, *_ = _run('mlp', env, True)
    first = [x for x in jax.tree.leaves(params) if x.shape == (7, 128)]
    self.assertLen(first, 1)

  def test_normalised_observations_are_statistics(self):
    network = default_networks.make('mlp', _Env(GRID), True, normalize=True)
    _, state = jax.eval_shape(
      network.init, jax.random.key(0), _observe(GRID, (2,))
    )
    self.assertNotEmpty(jax.tree.leaves(state.statistics))

  @parameterized.parameters(
    ('con', VECTOR, "one of 'auto'.*got 'con'; did you mean 'conv'"),
    ('conv', VECTOR, r"one image \[H, W, C\].*'mlp'"),
    ('conv', DICT, r"one image \[H, W, C\].*'mlp'"),
  )
  def test_wrong_kind(self, kind, spec, message):
    with self.assertRaisesRegex(ValueError, message):
      default_networks.make(kind, _Env(spec), True)

  def test_listing_them_needs_no_jax(self):
    code = (
      'import sys; from hkgraph.training import algorithms, default_networks\n'
      "assert 'jax' not in sys.modules and default_networks.KINDS"
    )
    subprocess.run([sys.executable, '-c', code], check=True)


if __name__ == '__main__':
  absltest.main()
