"""Tests for `hkgraph.envs`: names, and what all environments share."""

import functools
import importlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import envs, packages, types
from hkgraph.envs import protocol, wrappers


def _random_actions(spec, key, batch):
  """Uniform actions within bounds."""

  def draw(leaf, key):
    shape = (*batch, *leaf.shape)
    if isinstance(leaf, specs.DiscreteArray):
      return jax.random.randint(key, shape, 0, leaf.num_values, leaf.dtype)
    return jax.random.uniform(
      key, shape, leaf.dtype, float(leaf.minimum), float(leaf.maximum)
    )

  leaves, treedef = jax.tree.flatten(spec)
  keys = list(jax.random.split(key, len(leaves)))
  return treedef.unflatten(map(draw, leaves, keys))


def _assert_conforms(spec, tree):
  checked = jax.tree.map(lambda s, x: s.validate(np.asarray(x)), spec, tree)
  assert jax.tree.structure(checked) == jax.tree.structure(spec)


class MakeTest(parameterized.TestCase):
  def test_unknown_name_is_answered_with_near_ones_and_all(self):
    with self.assertRaisesRegex(
      ValueError,
      "one of 'bodies', 'cartpole', 'delayed_recall', got 'cartpol'; did you "
      "mean 'cartpole'",
    ):
      envs.make('cartpol')

  @parameterized.parameters('zzz', '', None, 'wrappers', 3)
  def test_other_things_are_no_names(self, name):
    with self.assertRaisesRegex(ValueError, "'delayed_recall', got"):
      envs.make(name)

  @parameterized.parameters(
    ('gymnas:CartPole-v1', "suite, one of 'gymnasium', .*mean .*'gymnasium'"),
    ('cartpole:v1', "must begin with a suite, one of 'gymnasium', 'gymnax'"),
    ('gymnax', "as in 'gymnax:CartPole-v1'"),
    ('zzz', "Others begin with a suite, as in 'gymnax:CartPole-v1'"),
  )
  def test_suites_are_told_of(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      envs.make(name)

  @parameterized.parameters(*envs.SUITES)
  def test_missing_package_is_answered_with_the_extra(self, suite):
    absent = mock.patch.dict(sys.modules, {suite: None})
    message = rf"pip install 'hkgraph\[{suite}\]'"
    with absent, self.assertRaisesRegex(ImportError, message):
      envs.make(f'{suite}:Some-v0')

  @parameterized.parameters(*envs.SUITES)
  def test_adapters_are_imported_without_their_packages(self, suite):
    code = f'import sys; from hkgraph.envs import {suite}; '
    code += f'assert {suite!r} not in sys.modules; assert {suite}.make'
    subprocess.run([sys.executable, '-c', code], check=True)

  def test_fault_within_a_package_is_not_taken_for_its_absence(self):
    fault = ModuleNotFoundError("No module named 'flax'", name='flax')
    broken = mock.patch.object(importlib, 'import_module', side_effect=fault)
    with broken, self.assertRaisesRegex(ImportError, "^No module named 'flax'"):
      packages.load('gymnax')

  def test_settings_are_passed_on(self):
    env = envs.make('delayed_recall', delay=2, num_cues=7)
    self.assertEqual(env.action_spec().num_values, 7)
    self.assertLen(envs.make('bodies', num_bodies=5).action_spec(), 5)
    with self.assertRaisesRegex(TypeError, 'colour'):
      envs.make('cartpole', colour='red')

  @parameterized.parameters(
    ('cartpole', {'max_steps': 3}, 3),
    ('bodies', {'max_steps': 4}, 4),
    ('bodies', {}, 50),
    ('delayed_recall', {}, 9),
  )
  def test_length_of_an_episode(self, name, kwargs, length):
    env = envs.make(name, **kwargs)
    action = protocol.zeros_like_spec(env.action_spec())
    step = jax.jit(env.step)
    state, row = env.reset(jax.random.key(0))
    for t in range(length):
      self.assertFalse(row.last(), t)
      state, row = step(state, action)
    self.assertTrue(row.last())

  def test_names_can_be_listed_without_loading_jax(self):
    code = 'import sys; from hkgraph import envs; assert envs.NAMES; '
    code += "assert 'jax' not in sys.modules; envs.make('bodies'); "
    code += "assert not {'rlax', 'distrax', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, '-c', code], check=True)


@functools.cache
def _batch(name, num_envs=1):
  env = wrappers.Vectorize(envs.make(name), num_envs)
  return wrappers.EpisodeStatistics(env)


@functools.cache
def _sixteen_first_moments(name):
  return jax.jit(_batch(name, 16).reset)(jax.random.key(0))


def _run(name, key):
  """The moments 1 to 25 of one environment under random actions."""
  env = _batch(name)
  actions = _random_actions(env.action_spec(), jax.random.key(1), (25, 1))

  def body(state, action):
    moment = env.step(state, action)
    return moment[0], moment[1]

  return jax.lax.scan(body, env.reset(key)[0], actions)[1]


_jitted_run = jax.jit(_run, static_argnums=0)


@parameterized.parameters(*envs.NAMES)
class ContractTest(parameterized.TestCase):
  """What the protocol promises, for each built-in environment."""

  def _assert_conforms(self, env, row):
    _assert_conforms(env.observation_spec(), row.observation)
    _assert_conforms(env.reward_spec(), row.reward)
    _assert_conforms(env.discount_spec(), row.discount)
    self.assertEqual(row.step_type.dtype, jnp.int32)
    if row.first():
      self.assertEqual({float(r) for r in jax.tree.leaves(row.reward)}, {0})
    if not row.last():
      self.assertEqual(row.discount, 1)

  def test_rows_of_one_environment_conform_to_its_specs(self, name):
    env = envs.make(name)
    self.assertFalse(hasattr(env, 'num_envs'))
    state, row = jax.jit(env.reset)(jax.random.key(0))
    self.assertEqual(row.step_type, types.StepType.FIRST)
    self._assert_conforms(env, row)
    action = protocol.zeros_like_spec(env.action_spec())
    _, row = jax.jit(env.step)(state, action)
    self.assertEqual(row.step_type, types.StepType.MID)
    self._assert_conforms(env, row)

  def test_rows_of_a_batch_conform_to_the_specs(self, name):
    rows = jax.device_get(_jitted_run(name, jax.random.key(0)))
    for t in range(25):
      row = jax.tree.map(lambda x, t=t: x[t, 0], rows)
      self._assert_conforms(_batch(name), row)

  def test_every_step_compiles_once(self, name):
    chex.clear_trace_counter()
    env = _batch(name, 16)
    step = jax.jit(chex.assert_max_traces(env.step, n=1))
    moment = first = _sixteen_first_moments(name)
    action = protocol.zeros_like_spec(env.action_spec(), (16,))
    for _ in range(12):
      moment = step(moment[0], action)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, moment)

  def test_same_key_same_rows(self, name):
    once, again, other = (
      _jitted_run(name, jax.random.key(k)) for k in (0, 0, 1)
    )
    chex.assert_trees_all_equal(once, again)
    with self.assertRaises(AssertionError):
      chex.assert_trees_all_equal(once.observation, other.observation)

  def test_environments_of_a_batch_differ(self, name):
    _, row = _sixteen_first_moments(name)
    leaf = np.asarray(jax.tree.leaves(row.observation)[0])
    # There are only four cues; sixteen that agree are as good as impossible.
    least = 3 if name == 'delayed_recall' else 16
    self.assertGreaterEqual(len(np.unique(leaf, axis=0)), least)

  def test_vmap_over_seeds_equals_the_single_runs(self, name):
    keys = jax.random.split(jax.random.key(7), 3)
    many = jax.jit(jax.vmap(functools.partial(_run, name)))(keys)
    for i in range(3):
      rows = jax.tree.map(lambda x, i=i: x[i], many)
      one = _jitted_run(name, keys[i])
      chex.assert_trees_all_close(rows, one, rtol=1e-5, atol=1e-6)

  def test_no_tracer_leaks(self, name):
    with jax.checking_leaks():
      jax.make_jaxpr(functools.partial(_run, name))(jax.random.key(0))


if __name__ == '__main__':
  absltest.main()
