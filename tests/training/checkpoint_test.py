"""Tests of the weight files."""

import io
import json
import os
import pathlib
import tempfile
import zipfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import types
from hkgraph.training import checkpoint


def _tree():
  return {
    'params': {'graph/~/core': {'w': jnp.arange(6.0).reshape(2, 3)}},
    'statistics': types.NetworkState(carry=(), statistics=[jnp.uint32(2**31)]),
  }


class CheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(
      self.enterContext(tempfile.TemporaryDirectory()), 'weights.npz'
    )

  @parameterized.parameters(
    'float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'int4', 'int8', 'int32',
    'uint32', 'bool', 'complex64',
  )  # fmt: skip
  def test_dtypes_survive(self, dtype):
    values = jnp.array([0, 1, 3, -2]).astype(dtype)
    checkpoint.save(self.path, {'x': values})
    got, _ = checkpoint.load(self.path, {'x': values})
    self.assertEqual(got['x'].dtype, values.dtype)
    np.testing.assert_array_equal(np.asarray(got['x']), np.asarray(values))

  @parameterized.parameters('threefry2x32', 'rbg', 'unsafe_rbg')
  def test_keys_draw_the_same_numbers(self, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    checkpoint.save(self.path, keys)
    got, _ = checkpoint.load(self.path, jax.eval_shape(lambda: keys))
    self.assertEqual(got.dtype, keys.dtype)
    draw = jax.vmap(jax.random.normal)
    np.testing.assert_array_equal(draw(got), draw(keys))

  def test_structure_values_and_metadata_survive(self):
    tree = _tree()
    checkpoint.save(self.path, tree, {'steps': 3, 'digest': 'ab'})
    got, metadata = checkpoint.load(self.path, jax.eval_shape(lambda: tree))
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(tree))
    jax.tree.map(np.testing.assert_array_equal, got, tree)
    self.assertEqual(metadata, {'steps': 3, 'digest': 'ab'})
    self.assertEqual(checkpoint.read_metadata(self.path), metadata)

  def test_scalars_and_empty_arrays_survive(self):
    tree = [3, 2.5, True, jnp.zeros((0, 3)), jnp.float32(1)]
    checkpoint.save(self.path, tree)
    got, _ = checkpoint.load(self.path, tree)
    self.assertEqual([x.shape for x in got], [(), (), (), (0, 3), ()])
    self.assertEqual([x.tolist() for x in got], [3, 2.5, True, [], 1])

  def test_numpy_reads_the_file_without_pickle(self):
    tree = _tree()
    checkpoint.save(self.path, tree)
    with np.load(self.path, allow_pickle=False) as file:
      np.testing.assert_array_equal(
        file['params/graph/~/core/w'], tree['params']['graph/~/core']['w']
      )

  def test_pickles_are_neither_written_nor_read(self):
    with self.assertRaisesRegex(ValueError, 'array of numbers'):
      checkpoint.save(self.path, {'x': np.array([object()])})
    self.assertFalse(self.path.exists())
    checkpoint.save(self.path, {'x': np.zeros(2)})
    evil = io.BytesIO()
    np.lib.format.write_array(evil, np.array([{}], object), allow_pickle=True)
    self._rewrite({'x.npy': evil.getvalue()})
    with self.assertRaisesRegex(ValueError, 'damaged'):
      checkpoint.load(self.path, {'x': np.zeros(2)})

  def test_tells_all_differences(self):
    checkpoint.save(
      self.path, {'a': jnp.zeros(2), 'b': jnp.zeros(3), 'c': jnp.zeros(4)}
    )
    like = {
      'a': jnp.zeros((2, 1)),
      'b': jnp.zeros(3, jnp.int32),
      'd': jnp.zeros(1),
    }
    with self.assertRaises(ValueError) as caught:
      checkpoint.load(self.path, like)
    for text in (
      'a is float32[2] in the file, but float32[2, 1] is asked for',
      'b is float32[3] in the file, but int32[3] is asked for',
      'c is in the file only',
      'd is missing in the file',
    ):
      self.assertIn(text, str(caught.exception))

  def test_a_key_of_another_implementation_is_a_difference(self):
    checkpoint.save(self.path, jax.random.key(0, impl='rbg'))
    with self.assertRaisesRegex(ValueError, 'rbg.*threefry2x32'):
      checkpoint.load(self.path, jax.random.key(0, impl='threefry2x32'))

  def test_leaves_of_one_path_are_refused(self):
    x = jnp.zeros(1)
    with self.assertRaisesRegex(ValueError, "'a/b/c'"):
      checkpoint.save(self.path, {'a/b': {'c': x}, 'a': {'b/c': x}})

  def test_every_truncation_is_noticed(self):
    checkpoint.save(self.path, _tree())
    data = self.path.read_bytes()
    for length in range(0, len(data), 7):
      self.path.write_bytes(data[:length])
      with self.assertRaisesRegex(ValueError, 'damaged'):
        checkpoint.load(self.path, _tree())

  @pytest.mark.heavy
  def test_no_flipped_bit_changes_a_value_in_silence(self):
    checkpoint.save(self.path, _tree())
    data = bytearray(self.path.read_bytes())
    noticed = 0
    for position in range(len(data)):
      data[position] ^= 0x10
      self.path.write_bytes(data)
      data[position] ^= 0x10
      try:
        got, _ = checkpoint.load(self.path, _tree())
      except ValueError:
        noticed += 1
      else:
        jax.tree.map(np.testing.assert_array_equal, got, _tree())
    self.assertGreater(noticed, len(data) // 2)

  def test_other_files_and_versions(self):
    with self.assertRaises(FileNotFoundError):
      checkpoint.load(self.path, _tree())
    np.savez(self.path, x=np.zeros(2))
    with self.assertRaisesRegex(ValueError, 'no file of `checkpoint.save`'):
      checkpoint.load(self.path, _tree())
    checkpoint.save(self.path, _tree())
    with zipfile.ZipFile(self.path) as archive:
      manifest = json.loads(archive.read('manifest.json'))
    manifest['version'] = 99
    self._rewrite({'manifest.json': json.dumps(manifest)})
    with self.assertRaisesRegex(ValueError, 'has version 99'):
      checkpoint.load(self.path, _tree())

  def test_a_failed_save_leaves_the_old_file(self):
    checkpoint.save(self.path, {'x': 1})
    replace = os.replace
    os.replace = _fail
    try:
      with self.assertRaises(OSError):
        checkpoint.save(self.path, {'x': 2})
    finally:
      os.replace = replace
    self.assertEqual(checkpoint.load(self.path, {'x': 0})[0]['x'], 1)
    self.assertEqual(list(self.path.parent.iterdir()), [self.path])
    checkpoint.save(self.path, {'x': 2})
    self.assertEqual(checkpoint.load(self.path, {'x': 0})[0]['x'], 2)

  def _rewrite(self, entries):
    """Replaces entries of the archive, with right sums."""
    with zipfile.ZipFile(self.path) as archive:
      old = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(self.path, 'w') as archive:
      for name, data in (old | entries).items():
        archive.writestr(name, data)


def _fail(src, dst):
  raise OSError('disk full')


if __name__ == '__main__':
  absltest.main()
