"""Tests for `hkgraph.envs.protocol`."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types
from hkgraph.envs import protocol

_DISCRETE = specs.DiscreteArray(3)
_BOX = specs.BoundedArray((2,), np.float32, [-1.0, 0.0], [1.0, 2.0])
_LIVE = np.zeros(4, bool)


class _Faulty:
  """An environment whose rows can be other than its specs say."""

  def __init__(self, observation=(2,), reward=()):
    self._shapes = observation, reward

  def reset(self, key):
    del key
    row = protocol.restart(self.reward_spec(), {'me': jnp.zeros(2)})
    return jnp.zeros(()), row

  def step(self, state, action):
    del action
    observation, reward = map(jnp.zeros, self._shapes)
    return state, protocol.transition(reward, {'me': observation}, False)

  def observation_spec(self):
    return {'me': specs.Array((2,), np.float32)}

  def action_spec(self):
    return _BOX

  def reward_spec(self):
    return specs.Array((), np.float32)

  def discount_spec(self):
    return protocol.discount_spec()


class CheckEnvironmentTest(parameterized.TestCase):
  def test_what_agrees(self):
    protocol.check_environment(_Faulty())

  @parameterized.parameters(
    ({'reward': (1,)}, r'`step` .*rewards of the shapes reward \(1,\), but'),
    (
      {'observation': (3,)},
      r"observation\['me'\] \(3,\), but its `obs.*\(2,\)",
    ),
  )
  def test_rows_that_are_not_as_the_specs_say(self, shapes, message):
    with self.assertRaisesRegex(ValueError, message):
      protocol.check_environment(_Faulty(**shapes))

  def test_what_is_no_environment(self):
    with self.assertRaisesRegex(TypeError, 'lacks reset, step, observation_sp'):
      protocol.check_environment(object())
    env = _Faulty()
    env.reset = lambda key: key
    with self.assertRaisesRegex(TypeError, '`reset` .* must return its state'):
      protocol.check_environment(env)


class RowsTest(chex.TestCase):
  def test_restart_is_a_first_row_with_reward_0_and_discount_1(self):
    spec = {'a': specs.Array((), np.float32), 'b': specs.Array((), np.int32)}
    row = protocol.restart(spec, jnp.ones(3))
    self.assertEqual(row.step_type, types.StepType.FIRST)
    self.assertEqual(row.discount, 1)
    chex.assert_trees_all_equal(
      row.reward, {'a': jnp.float32(0), 'b': jnp.int32(0)}
    )
    chex.assert_trees_all_equal_dtypes(
      row.reward, {'a': jnp.float32(0), 'b': jnp.int32(0)}
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    (True, types.StepType.LAST, 0), (False, types.StepType.MID, 1)
  )
  def test_transition(self, terminated, step_type, discount):
    row = self.variant(protocol.transition)(
      jnp.float32(7), jnp.ones(3), terminated
    )
    self.assertEqual(row.step_type, step_type)
    self.assertEqual(row.discount, discount)
    self.assertEqual(row.reward, 7)
    self.assertFalse(row.discount.weak_type or row.step_type.weak_type)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    (False, False, types.StepType.MID, 1),
    (False, True, types.StepType.LAST, 1),
    (True, False, types.StepType.LAST, 0),
    (True, True, types.StepType.LAST, 0),
  )
  def test_transition_that_truncates(self, over, cut, step_type, discount):
    row = self.variant(protocol.transition)(
      jnp.float32(7), jnp.ones(3), over, cut
    )
    self.assertEqual(row.step_type, step_type)
    self.assertEqual(row.discount, discount)

  def test_zeros_like_spec(self):
    zeros = protocol.zeros_like_spec({'d': _DISCRETE, 'b': _BOX}, (5, 4))
    expected = {
      'd': jnp.zeros((5, 4), jnp.int32), 'b': jnp.zeros((5, 4, 2), jnp.float32)
    }  # fmt: skip
    chex.assert_trees_all_equal(zeros, expected)
    chex.assert_trees_all_equal_dtypes(zeros, expected)


class CanonicaliseTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_no_leaf_is_weak_and_no_value_or_dtype_changes(self):
    key = jax.random.key(3)
    tree = {
      'scalar': 1.5,
      'weak': jnp.asarray(2.0),
      'int': 7,
      'half': jnp.ones(2, jnp.bfloat16),
      'numpy': np.ones(2, np.int8),
      'bool': True,
      'keys': jax.random.split(key, 2),
    }
    out = self.variant(protocol.canonicalise)(tree)
    self.assertEqual(
      {k: v.dtype for k, v in out.items()},
      {
        'scalar': jnp.float32,
        'weak': jnp.float32,
        'int': jnp.int32,
        'half': jnp.bfloat16,
        'numpy': jnp.int8,
        'bool': jnp.bool_,
        'keys': key.dtype,
      },
    )
    keys = out.pop('keys')
    self.assertFalse(any(v.weak_type for v in out.values()))
    self.assertEqual(out['scalar'], 1.5)
    np.testing.assert_array_equal(
      jax.random.key_data(keys), jax.random.key_data(tree['keys'])
    )

  def test_a_weak_reset_does_not_compile_the_step_twice(self):
    def reset():
      return jnp.asarray(0.0)

    step = jax.jit(lambda x: x + jnp.float32(1))
    step(step(reset()))
    self.assertEqual(step._cache_size(), 2)  # So the guard below guards.
    step = jax.jit(lambda x: protocol.canonicalise(x + jnp.float32(1)))
    step(step(protocol.canonicalise(reset())))
    self.assertEqual(step._cache_size(), 1)

  @chex.variants(with_jit=True, without_jit=True)
  def test_cast_like_gives_the_dtypes_of_another_tree(self):
    key = jax.random.key(0)
    tree = {'a': 1.0, 'b': np.ones(2, np.int32), 'k': key, 'c': jnp.ones(3)}
    like = {
      'a': jnp.int32(0), 'b': jnp.zeros(2, bool), 'k': key, 'c': jnp.zeros(3)
    }  # fmt: skip
    out = self.variant(protocol.cast_like)(tree, like)
    self.assertEqual(
      jax.tree.map(lambda x: x.dtype, out),
      jax.tree.map(lambda x: x.dtype, like),
    )
    self.assertEqual(out['a'], 1)
    self.assertFalse(out['c'].weak_type)


class CheckTest(chex.TestCase):
  @parameterized.parameters(0, -1, 1.0, True, '3', None, 2**31)
  def test_what_is_no_positive_integer(self, value):
    with self.assertRaisesRegex(ValueError, '`size` must be an integer from 1'):
      protocol.check_int('size', value)

  @parameterized.parameters(1, np.int64(5), 2**31 - 1)
  def test_what_is_one(self, value):
    self.assertEqual(protocol.check_int('size', value), value)
    self.assertIs(type(protocol.check_int('size', value)), int)

  def test_only_single_typed_keys_are_keys(self):
    protocol.check_key(jax.random.key(0))
    for bad in (
      jax.random.PRNGKey(0), jax.random.split(jax.random.key(0)), 0
    ):  # fmt: skip
      with self.assertRaisesRegex(TypeError, 'jax.random.key'):
        protocol.check_key(bad)

  def test_action_takes_the_dtype_of_the_spec(self):
    action = {'d': np.array([0, 1, 2, 0], np.int8), 'b': np.zeros((4, 2))}
    out = protocol.check_action({'d': _DISCRETE, 'b': _BOX}, action, 4)
    self.assertEqual(out['d'].dtype, jnp.int32)
    self.assertEqual(out['b'].dtype, jnp.float32)
    np.testing.assert_array_equal(out['d'], action['d'])

  @parameterized.parameters(
    (_DISCRETE, np.zeros(3, np.int32), ValueError, r'`action`.*\(4,\).*\(3,\)'),
    (_DISCRETE, np.zeros((4, 1), np.int32), ValueError, r'\(4, 1\)'),
    (_BOX, np.zeros(4, np.float32), ValueError, r'shape \(4, 2\)'),
    (_DISCRETE, np.zeros(4, np.float32), TypeError, 'int32, got float32'),
    (_DISCRETE, np.zeros(4, bool), TypeError, 'int32, got bool'),
    (_BOX, np.zeros((4, 2), np.int32), TypeError, 'float32, got int32'),
    ({'a': _BOX}, np.zeros((4, 2)), ValueError, r"\[\"\['a'\]\"\]"),
    (
      {'a': _DISCRETE},
      {'a': np.zeros(5, np.int32)},
      ValueError,
      r"`action\['a'\]`",
    ),
    (
      {'a': _DISCRETE},
      {'a': np.zeros(4, np.int32), 'b': np.zeros(4)},
      ValueError,
      r"\['b'\]",
    ),
  )
  def test_wrong_actions(self, spec, action, error, message):
    with self.assertRaisesRegex(error, message):
      protocol.check_action(spec, action, 4)
    with self.assertRaisesRegex(error, message):
      jax.jit(lambda a: protocol.check_action(spec, a, 4))(action)

  @parameterized.parameters(
    (_DISCRETE, [0, 1, 3, 0], r'between 0 and 2, got \[3\]'),
    (_DISCRETE, [0, -1, 2, 0], r'got \[-1\]'),
    (_BOX, [[0.0, 1.0], [0.0, -0.5], [0.0, 0.0], [1.0, 2.0]], r'got \[-0.5\]'),
    (_BOX, [[np.nan, 1.0], [0.0, 0.5], [0.0, 0.0], [1.0, 2.0]], r'got \[nan\]'),
  )
  def test_values_out_of_range(self, spec, action, message):
    action = np.array(action, spec.dtype)
    with self.assertRaisesRegex(ValueError, message):
      protocol.check_action_range(spec, action, _LIVE)
    jax.jit(lambda a: protocol.check_action_range(spec, a, _LIVE))(action)

  def test_values_of_ignored_rows_are_not_looked_at(self):
    action = np.array([0, 99, 2, 1], np.int32)
    protocol.check_action_range(
      _DISCRETE, action, np.array([False, True, False, False])
    )
    protocol.check_action_range(specs.Array((), np.int32), action, _LIVE)


if __name__ == '__main__':
  absltest.main()
