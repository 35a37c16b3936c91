"""Policies as files, read without Haiku and this package."""

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from unittest import mock
import zipfile

from absl.testing import absltest, parameterized
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.learners import dreamer_config
from hkgraph.training import checkpoint, export, run_folder, setup, tasks

pytest.importorskip('flatbuffers')

README = pathlib.Path(__file__).parents[2] / 'README.md'
B, T = 3, 12
IS_FIRST = np.zeros((T, B), bool)
IS_FIRST[0] = True
IS_FIRST[4, 1] = IS_FIRST[7] = True


def _reader():
  """The reader that the page shows, up to what is left to the user."""
  text = export.__doc__
  start, end = text.index('    import json'), text.index('    # At each row')
  return textwrap.dedent(text[start:end])


@pytest.mark.heavy
class ReadInAnotherProcessTest(parameterized.TestCase):
  """All runs are exported, then played by one process that has JAX alone."""

  # Environment, network, hyperparameters and whether actions are sampled.
  cases = {
    'bodies': ('bodies', tasks.bodies_graph(), hg.PPOConfig(), False),
    'gru-sampled': ('cartpole', 'gru', hg.PPOConfig(), True),
    'pqn-sampled': (
      'delayed_recall',
      tasks.delayed_recall_graph(q=True),
      hg.PQNConfig(total_updates=10, epsilon_finish=0.5),
      True,
    ),
  }
  script = """
    import os, pickle, sys
    import numpy as np
    absent = 'hkgraph haiku distrax rlax optax chex flax tensorflow_probability'
    sys.modules.update(dict.fromkeys(absent.split()))
    reader, *folders = sys.argv[1:]
    for folder in folders:
      os.chdir(folder)
      import jax
      def fail(*args, **kwargs):
        raise AssertionError('something was unpickled')
      pickle.loads = pickle.load = pickle.Unpickler = fail
      names = {}
      exec(reader.replace('arange(4', 'arange(3'), names)
      np.savez('carry.npz', *names['carry'])
      with np.load('rows.npz') as rows:
        rows = dict(rows)
      is_first = rows.pop('is_first')
      actions = []
      for t, first in enumerate(is_first):
        observation = {k: v[t] for k, v in rows.items()}
        observation = observation.get('', observation)
        action, carry = names['step'](names['carry'], observation, first)
        names['carry'] = carry
        actions.append(action if isinstance(action, dict) else {'': action})
      np.savez(
        'actions.npz',
        **{k: np.stack([a[k] for a in actions]) for k in actions[0]},
      )
    assert not set(absent.split()) & {k for k, v in sys.modules.items() if v}
  """

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.dir = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.live = {}
    for name, (env, network, config, sampled) in cls.cases.items():
      folder = run_folder.create(cls.dir / name)
      cls.live[name] = _write_run(folder / 'run', env, network, config)
      export.export_run(folder / 'run', folder / 'policy.hkg', sampled=sampled)
      rows = cls.live[name].observations
      rows = rows if isinstance(rows, dict) else {'': rows}
      np.savez(folder / 'rows.npz', is_first=IS_FIRST, **rows)
    done = subprocess.run(
      [sys.executable, '-c', textwrap.dedent(cls.script), _reader()]
      + [str(cls.dir / name) for name in cls.cases],
      capture_output=True,
      text=True,
      env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
      cwd=cls.dir,
    )
    if done.returncode:
      raise AssertionError(done.stderr)

  @parameterized.parameters(*cases)
  def test_equals_the_live_agent(self, name):
    sampled = self.cases[name][-1]
    wanted = self.live[name].play(sampled)
    wanted = wanted if isinstance(wanted, dict) else {'': wanted}
    with np.load(self.dir / name / 'actions.npz') as actions:
      self.assertEqual(set(actions), set(wanted))
      for key, action in wanted.items():
        np.testing.assert_allclose(actions[key], action, rtol=1e-5, atol=1e-6)
        self.assertEqual(actions[key].dtype, action.dtype)
        self.assertGreater(np.std(action), 0)

  def test_bounded_actions_are_in_the_units_of_the_environment(self):
    env = hg.envs.make('bodies')
    with np.load(self.dir / 'bodies' / 'actions.npz') as actions:
      for key, spec in env.action_spec().items():
        self.assertTrue((np.abs(actions[key]) <= spec.maximum).all())

  def test_header(self):
    policy = export.load_policy(self.dir / 'bodies' / 'policy.hkg')
    header = policy.header
    self.assertEqual(header['platforms'], ['cpu', 'cuda', 'tpu'])
    self.assertFalse(header['sampled'])
    self.assertEqual(
      header['observation'],
      {f'body_{i}': {'dtype': 'float32', 'shape': [6]} for i in range(3)},
    )
    self.assertEqual(
      header['metadata'],
      {'environment': 'bodies', 'algorithm': 'ppo', 'seed': 7},
    )
    with np.load(self.dir / 'bodies' / 'carry.npz') as carry:
      shapes = [[B, *x['shape']] for x in header['carry']]
      self.assertEqual([list(carry[k].shape) for k in carry], shapes)

  def test_files_tell_nothing_of_the_machine_that_wrote_them(self):
    for name in self.cases:
      with zipfile.ZipFile(self.dir / name / 'policy.hkg') as file:
        names = file.namelist()
        self.assertEqual(names, ['policy.json', 'initial', 'step'])
        blob = b''.join(map(file.read, names))
      self.assertNotIn(b'.py', blob)
      self.assertNotIn(str(README.parent).encode(), blob)

  def test_the_convenience_reads_the_same(self):
    folder = self.dir / 'pqn-sampled'
    policy = export.load_policy(folder / 'policy.hkg')
    carry = policy.initial_carry(np.arange(B, dtype=np.uint32))
    rows = self.live['pqn-sampled'].observations
    with np.load(folder / 'actions.npz') as actions:
      for t in range(T):
        action, carry = policy.step(carry, rows[t], IS_FIRST[t])
        np.testing.assert_array_equal(action, actions[''][t])

  def test_reader_is_ten_lines_and_shown(self):
    self.assertLen([*filter(None, _reader().splitlines())], 10)
    text = README.read_text('utf-8')
    self.assertIn(_reader().strip(), text)


class _Live:
  """An agent with weights, and rows for it to see."""

  def __init__(self, env, agent, params, statistics):
    self.env, self.agent = env, agent
    self.weights = params, statistics
    self._act = jax.jit(agent.act, static_argnames='deterministic')
    rng = np.random.default_rng(0)
    self.observations = jax.tree.map(
      lambda s: rng.standard_normal((T, B, *s.shape)).astype(s.dtype),
      env.observation_spec(),
    )

  def play(self, sampled):
    """Actions `[T, B, ...]`: those of the whole batch, or one by one."""
    if not sampled:
      carry = self.agent.initial_carry(B)
      return self._run(
        carry, jax.random.key(9), slice(None), deterministic=True
      )
    elements = []
    for b in range(B):
      key, carry_key = jax.random.split(jax.random.key(b))
      carry = self.agent.initial_carry(1, carry_key)
      elements.append(self._run(carry, key, slice(b, b + 1)))
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *elements)

  def _run(self, carry, key, part, **kwargs):
    params, statistics = self.weights
    actions = []
    rows = [
      jax.tree.map(lambda x, t=t: x[t, part], self.observations)
      for t in range(T)
    ]
    for t in range(T):
      key, now = jax.random.split(key)
      is_first = jnp.asarray(IS_FIRST[t, part])
      timestep = hg.TimeStep(
        step_type=jnp.where(is_first, 0, 1),
        reward=jnp.zeros(is_first.shape),
        discount=jnp.ones(is_first.shape),
        observation=rows[t],
      )
      state = hg.NetworkState(carry=carry, statistics=statistics)
      output, state = self._act(params, state, now, timestep, **kwargs)
      carry = state.carry
      actions.append(output.environment_action)
    return jax.tree.map(lambda *x: np.stack(x), *actions)


def _make(env, network, config, normalize=True):
  """An agent whose weights and statistics are not those of a beginner."""
  env, agent = setup.build(env, network, config, normalize=normalize)

  @jax.jit
  def init(key):
    _, timestep = jax.vmap(env.reset)(jax.random.split(key, 2))
    return agent.init(key, timestep)

  start = init(jax.random.key(1))
  params = jax.tree.map(lambda x: 2 * x + 0.1, start.params)
  statistics = jax.tree.map(lambda x: x + 1, start.statistics)
  return _Live(env, agent, params, statistics)


def _write_run(path, env, network, config):
  live = _make(env, network, config)
  folder = run_folder.create(path)
  description = run_folder.Description(
    environment=env,
    graph=None if isinstance(network, str) else network,
    network=network if isinstance(network, str) else None,
    normalize=True,
    config=config,
    total_steps=1,
    seed=7,
  )
  run_folder.write_description(folder, description)
  run_folder.save_weights(folder, *live.weights, {})
  return live


def _sum_of_episode(params, carry, key, observation, is_first):
  """Cases C: `h = (0 if first else h) + w x`."""
  del key
  carry = jnp.where(is_first, 0, carry) + params['w'] * observation['x']
  return (carry, {'twice': 2 * carry}), carry


def _zeros(batch_size, key):
  del key
  return jnp.zeros(batch_size)


SCALAR = {'x': jax.ShapeDtypeStruct((), jnp.float32)}


class PureFunctionsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.path = self.dir / 'policy.hkg'

  def _export(self, step=_sum_of_episode, initial=_zeros, **kwargs):
    params = {'w': jnp.float32(1)}
    return export.export_policy(
      self.path, step, initial, params, SCALAR, **kwargs
    )

  @parameterized.parameters(1, 4, 7)
  def test_sums_start_anew_with_each_episode(self, batch_size):
    self._export()
    policy = export.load_policy(self.path)
    carry = policy.initial_carry(np.zeros(batch_size, np.uint32))
    x = {'x': np.ones(batch_size, np.float32)}
    sums = []
    for is_first in (True, False, True, False):
      first = np.full(batch_size, is_first)
      (action, more), carry = policy.step(carry, x, first)
      np.testing.assert_array_equal(more['twice'], 2 * action)
      sums.append(action)
    expected = np.tile([1.0, 2.0, 1.0, 2.0], (batch_size, 1))
    np.testing.assert_array_equal(np.stack(sums, 1), expected)

  @pytest.mark.heavy
  def test_elements_have_keys_of_their_own(self):
    def step(params, carry, key, observation, is_first):
      del params, observation, is_first
      drawn = jax.random.normal(key, carry['noise'].shape)
      noise = jax.vmap(jax.random.split)(carry['noise'])
      return (
        (drawn, jax.vmap(jax.random.normal)(noise[:, 1])),
        {'noise': noise[:, 0]},
      )

    def initial(batch_size, key):
      return {'noise': jax.random.split(key, batch_size)}

    self._export(step, initial, sampled=True)
    policy = export.load_policy(self.path)
    self.assertTrue(policy.header['sampled'])
    wanted = []
    for seed in (5, 6, 5):
      key, carry_key = jax.random.split(jax.random.key(seed))
      carry = initial(1, carry_key)
      for _ in range(3):
        key, now = jax.random.split(key)
        action, carry = step(None, carry, now, None, None)
      wanted.append(jax.tree.map(lambda x: x[0], action))
    carry = policy.initial_carry(np.array([5, 6, 5], np.uint32))
    for _ in range(3):
      action, carry = policy.step(
        carry, {'x': np.zeros(3, np.float32)}, np.zeros(3, bool)
      )
    for got, *want in zip(action, *wanted, strict=True):
      np.testing.assert_allclose(got, np.stack(want), rtol=1e-6)
      self.assertEqual(got[0], got[2])
      self.assertNotEqual(got[0], got[1])

  @pytest.mark.heavy
  def test_an_agent_of_any_network(self):
    spec = hg.envs.make('delayed_recall').action_spec()

    def noisy(x):
      x = hg.GaussianNoise(0.5)(hg.Normalizer()(x))
      encoder = hg.RecurrentEncoder(hk.LSTM(8))
      return hg.ActorCritic(spec, encoder)(x)

    live = _make('delayed_recall', hg.transform(noisy), hg.PPOConfig())
    export.export_agent(
      self.path, live.agent, *live.weights, live.env, sampled=True
    )
    policy = export.load_policy(self.path)
    carry = policy.initial_carry(np.arange(B, dtype=np.uint32))
    wanted = live.play(True)
    for t in range(T):
      action, carry = policy.step(carry, live.observations[t], IS_FIRST[t])
      np.testing.assert_array_equal(action, wanted[t])

  @pytest.mark.heavy
  def test_an_agent_that_keeps_its_last_action(self):
    config = dreamer_config.DreamerConfig(
      size='micro', hidden_size=8, recurrent_size=8, num_latents=2, num_envs=2
    )
    live = _make('delayed_recall', 'auto', config, normalize=False)
    export.export_agent(
      self.path, live.agent, *live.weights, live.env, sampled=True
    )
    policy = export.load_policy(self.path)
    carry = policy.initial_carry(np.arange(B, dtype=np.uint32))
    wanted = live.play(True)
    for t in range(T):
      action, carry = policy.step(carry, live.observations[t], IS_FIRST[t])
      np.testing.assert_array_equal(action, wanted[t])

  def test_equal_policies_are_equal_files(self):
    self._export()
    first = self.path.read_bytes()
    self.path.unlink()
    self._export()
    self.assertEqual(first, self.path.read_bytes())

  def test_platforms(self):
    header = self._export(platforms=('cpu',), metadata={'by': 'me'})
    self.assertEqual(header, export.load_policy(self.path).header)
    self.assertEqual(header['platforms'], ['cpu'])
    self.assertEqual(header['metadata'], {'by': 'me'})

  # What is refused.

  def test_what_exists_is_kept(self):
    self.path.write_text('mine')
    with self.assertRaisesRegex(FileExistsError, 'exists; give another name'):
      self._export()
    self.assertEqual(self.path.read_text(), 'mine')

  def test_nothing_is_half_written(self):
    with (
      mock.patch.object(os, 'replace', side_effect=OSError('disk full')),
      self.assertRaisesRegex(OSError, 'disk full'),
    ):
      self._export()
    self.assertEmpty(list(self.dir.iterdir()))

  @parameterized.parameters(
    (dict(metadata={'x': object()}), 'must be JSON'),
    (dict(metadata={'x': float('nan')}), 'must be JSON'),
    (dict(initial=lambda b, k: {'h': jnp.zeros(3)}), r"carry\['h'\] has shape"),
    (dict(platforms='cpu'), "must be a tuple of .*'cuda'.*, got 'cpu'"),
    (dict(platforms=('gpu',)), r"must be a tuple of .*, got \('gpu',\)"),
    (dict(platforms=()), 'must be a tuple of'),
  )
  def test_wrong_arguments(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      self._export(**kwargs)
    self.assertEmpty(list(self.dir.iterdir()))

  @parameterized.parameters(
    (lambda x: (x, x.astype(jnp.int32)), '(?s)carry like the one .*int32'),
    (lambda x: (x, {'h': x}), 'carry like the one it takes'),
    (lambda x: (jnp.sum(x), x), r'give actions \[B, ...\]'),
    (lambda x: ((), x), r'give actions \[B, ...\]'),
  )
  def test_steps_that_no_second_step_can_follow(self, step, message):
    with self.assertRaisesRegex(ValueError, message):
      export.export_policy(
        self.path,
        lambda params, carry, key, observation, is_first: step(carry),
        lambda batch_size, key: jnp.zeros((batch_size, 2)),
        None,
        jnp.zeros(3),
      )
    self.assertEmpty(list(self.dir.iterdir()))

  def test_an_observation_without_shape(self):
    with self.assertRaisesRegex(TypeError, r"observation\['x'\] = 3.0"):
      export.export_policy(
        self.path,
        lambda params, carry, key, observation, is_first: (observation, carry),
        lambda batch_size, key: (),
        None,
        {'x': 3.0},
      )

  def test_a_folder_is_no_policy(self):
    with self.assertRaisesRegex(
      IsADirectoryError, 'is a folder, .* hkgraph ex'
    ):
      export.load_policy(self.dir)

  def test_without_a_folder(self):
    self.path = self.dir / 'missing' / 'policy.hkg'
    with self.assertRaisesRegex(FileNotFoundError, 'there is no folder'):
      self._export()

  def test_without_flatbuffers(self):
    with (
      mock.patch.dict(sys.modules, {'flatbuffers': None}),
      self.assertRaisesRegex(ImportError, r'hkgraph\[export\]'),
    ):
      self._export()

  def test_run_without_weights(self):
    run = self.dir / 'run'
    _write_run(run, 'cartpole', 'mlp', hg.PPOConfig())
    (run / 'weights.npz').unlink()
    with self.assertRaisesRegex(FileNotFoundError, 'no weights in'):
      export.export_run(run, self.path)
    with self.assertRaisesRegex(FileNotFoundError, 'no run in'):
      export.export_run(self.dir, self.path)
    self.assertFalse(self.path.exists())


class DamagedFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.path = self.dir / 'policy.hkg'
    export.export_policy(self.path, _sum_of_episode, _zeros, {'w': 1.0}, SCALAR)

  def _rewrite(self, header=None, **blobs):
    with zipfile.ZipFile(self.path) as file:
      entries = {name: file.read(name) for name in file.namelist()}
    document = json.loads(entries['policy.json']) | (header or {})
    entries |= {'policy.json': json.dumps(document), **blobs}
    with zipfile.ZipFile(self.path, 'w') as file:
      for name, data in entries.items():
        file.writestr(name, data)

  def _assert_refused(self, message):
    with self.assertRaisesRegex(ValueError, message):
      export.load_policy(self.path)

  def test_newer(self):
    self._rewrite({'version': 2})
    self._assert_refused('has version 2, but this hkgraph reads version 1')
    os_dir = os.getcwd()
    self.addCleanup(os.chdir, os_dir)
    os.chdir(self.dir)
    with self.assertRaisesRegex(AssertionError, 'newer hkgraph'):
      exec(_reader(), {})

  @parameterized.parameters(0, 0.1, 0.5, 0.9, 0.999)
  @pytest.mark.heavy
  def test_truncated(self, share):
    data = self.path.read_bytes()
    self.path.write_bytes(data[: int(share * len(data))])
    self._assert_refused('damaged or no file of `hkgraph export`')

  def test_one_bit(self):
    data = bytearray(self.path.read_bytes())
    data[len(data) // 2] ^= 1
    self.path.write_bytes(data)
    self._assert_refused('damaged or no file of `hkgraph export`')

  def test_another_function_in_place_of_one(self):
    with zipfile.ZipFile(self.path) as file:
      initial = file.read('initial')
    self._rewrite(step=initial)
    self._assert_refused("the checksum of 'step' differs")

  def test_something_else(self):
    for other in (b'{}', b'\x80\x04K\x01.'):
      self.path.write_bytes(other)
      self._assert_refused('damaged or no file of `hkgraph export`')
    checkpoint.save(self.path, {'x': jnp.ones(2)})
    self._assert_refused('damaged or no file of `hkgraph export`')
    with self.assertRaises(FileNotFoundError):
      export.load_policy(self.dir / 'missing.hkg')

  def test_what_this_jax_cannot_read(self):
    with mock.patch.object(
      jax.export, 'deserialize', side_effect=ValueError('version 99')
    ):
      self._assert_refused(r'cannot read .* \(version 99\)')

  def test_functions_that_this_jax_or_machine_cannot_run(self):
    with zipfile.ZipFile(self.path) as file:
      step = jax.export.deserialize(bytearray(file.read('step')))
      sums = json.loads(file.read('policy.json'))['sha256']
    module = bytearray(step.mlir_module_serialized)
    module[4] = 0x99  # The version of its bytecode.
    for changes, message in (
      ({'mlir_module_serialized': bytes(module)}, 'cannot read .*install that'),
      ({'platforms': ('tpu',)}, r"exported for tpu, .* on cpu.*=\('cpu',\)"),
    ):
      blob = bytes(dataclasses.replace(step, **changes).serialize())
      checksum = hashlib.sha256(blob).hexdigest()
      self._rewrite({'sha256': sums | {'step': checksum}}, step=blob)
      self._assert_refused('(?s)' + message)


if __name__ == '__main__':
  absltest.main()
