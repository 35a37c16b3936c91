"""Tests of replay: against an obvious ring in NumPy."""

import functools

from absl.testing import absltest, parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import types
from hkgraph.data import replay

add = jax.jit(replay.add)
sample = jax.jit(replay.sample, static_argnums=(2, 3))

# Few sizes, for each compiles anew; all orders of them.
SIZES = {
  'num_rows': st.sampled_from((1, 3, 5)),
  'batch': st.sampled_from((1, 2)),
  'chunks': st.lists(st.sampled_from((1, 2, 4, 11)), max_size=6),
}


def numbered(start, num_rows, batch):
  """Rows that tell where they come from: `100 t + b`, in several dtypes."""
  t, b = np.mgrid[start : start + num_rows, :batch]
  where = 100 * t + b
  return {
    'where': jnp.asarray(where, jnp.int32),
    'image': jnp.asarray(where[..., None, None] % 251, jnp.uint8),
    'reward': jnp.asarray(where, jnp.float32),
    'flag': jnp.asarray(where % 2 == 1),
  }


def row_like(batch):
  return jax.tree.map(lambda x: x[0], numbered(0, 1, batch))


def filled(capacity, batch, *chunks):
  """A replay to which as many rows as `chunks` say were added."""
  stored = replay.empty(row_like(batch), capacity * batch)
  start = 0
  for num_rows in chunks:
    stored = add(stored, numbered(start, num_rows, batch))
    start += num_rows
  return stored


class AddTest(chex.TestCase):
  @hypothesis.given(**SIZES)
  @pytest.mark.heavy
  def test_agrees_with_a_ring_in_numpy(self, num_rows, batch, chunks):
    stored = replay.empty(row_like(batch), num_rows * batch)
    ring = jax.tree.map(lambda x: np.array(x), stored.rows)
    start = 0
    for chunk in chunks:
      rows = numbered(start, chunk, batch)
      stored = add(stored, rows)
      for t in range(chunk):
        for name, x in rows.items():
          ring[name][(start + t) % num_rows] = x[t]
      start += chunk
    chex.assert_trees_all_equal(stored.rows, ring)
    self.assertEqual(stored.position, start % num_rows)
    self.assertEqual(stored.size, min(start, num_rows))
    chex.assert_trees_all_equal_dtypes(stored.rows, row_like(batch))
    chex.assert_type([stored.position, stored.size], jnp.int32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_takes_any_tree_of_rows(self):
    row = types.TimeStep(
      step_type=jnp.zeros((2,), jnp.int32),
      reward={'a': jnp.zeros((2,))},
      discount=jnp.ones((2,)),
      observation=(jnp.zeros((2, 3), jnp.bfloat16), None),
    )
    rows = jax.tree.map(lambda x: jnp.stack([x, x + 1, x + 2]), row)
    stored = self.variant(replay.add)(replay.empty(row, 4), rows)
    expected = jax.tree.map(lambda x: x[jnp.asarray([2, 1])], rows)
    chex.assert_trees_all_equal(stored.rows, expected)

  @parameterized.parameters('float32', 'int32', 'uint8', 'bool')
  def test_is_in_place_when_donated(self, dtype):
    num_rows, batch, width, new = 500, 2, 50, 8
    row = jax.ShapeDtypeStruct((batch, width), dtype)
    stored = jax.eval_shape(lambda: replay.empty(row, num_rows * batch))
    rows = jax.ShapeDtypeStruct((new, batch, width), dtype)
    in_place = jax.jit(replay.add, donate_argnums=0)
    memory = in_place.lower(stored, rows).compile().memory_analysis()
    ring = num_rows * batch * width * jnp.dtype(dtype).itemsize
    self.assertGreaterEqual(memory.alias_size_in_bytes, ring)
    self.assertLess(memory.temp_size_in_bytes, ring // 10)

  def test_donated_memory_is_the_memory_returned(self):
    stored = filled(50, 2, 3)
    before = stored.rows['reward'].unsafe_buffer_pointer()
    after = jax.jit(replay.add, donate_argnums=0)(stored, numbered(3, 4, 2))
    self.assertEqual(after.rows['reward'].unsafe_buffer_pointer(), before)
    np.testing.assert_array_equal(after.rows['where'][:7, 0] // 100, range(7))

  def test_compiles_once(self):
    write = jax.jit(chex.assert_max_traces(replay.add, 1))
    draw = jax.jit(
      chex.assert_max_traces(
        lambda stored, key: replay.sample(stored, key, 3, 2), 1
      )
    )
    stored = replay.empty(row_like(2), 10)
    for start in range(0, 21, 3):
      stored = write(stored, numbered(start, 3, 2))
      draw(stored, jax.random.key(start))

  def test_the_position_never_overflows(self):
    stored = filled(2**10, 1)
    # As after 2^40 rows; only the remainder is kept.
    stored = stored.replace(
      position=jnp.int32(2**10 - 1), size=jnp.int32(2**10)
    )
    stored = add(stored, numbered(7, 2, 1))
    self.assertEqual(stored.position, 1)
    self.assertEqual(stored.size, 2**10)
    self.assertEqual(stored.rows['where'][-1, 0], 700)
    self.assertEqual(stored.rows['where'][0, 0], 800)

  @parameterized.named_parameters(
    ('dtype', lambda x: x.astype(jnp.float32), r'int32.*\[T, 2\].*float32'),
    ('batch', lambda x: x[:, :1], r'\[T, 2\].*\[3, 1\]'),
  )
  def test_refuses_rows_of_another_kind(self, change, message):
    rows = numbered(0, 3, 2)
    rows['where'] = change(rows['where'])
    with self.assertRaisesRegex(ValueError, message):
      replay.add(filled(4, 2), rows)

  def test_refuses_another_structure_and_other_lengths(self):
    rows = numbered(0, 3, 2)
    with self.assertRaises(AssertionError):
      replay.add(filled(4, 2), {'where': rows['where']})
    with self.assertRaises(AssertionError):
      replay.add(filled(4, 2), rows | {'where': rows['where'][:2]})


class EmptyTest(chex.TestCase):
  @parameterized.parameters((6, 2), (8, 2), (9, 3))
  def test_holds_whole_rows_of_as_many_frames(self, capacity, num_rows):
    row = jax.ShapeDtypeStruct((3, 5), jnp.uint8)
    stored = replay.empty({'x': row}, capacity)
    chex.assert_shape(stored.rows['x'], (num_rows, 3, 5))
    chex.assert_type(stored.rows['x'], jnp.uint8)
    self.assertEqual(stored.size, 0)

  @parameterized.parameters(2, 0, -3)
  def test_refuses_less_than_a_row(self, capacity):
    message = rf'at least 3.*3 environments.*got {capacity}'
    with self.assertRaisesRegex(ValueError, message):
      replay.empty(jnp.zeros((3,)), capacity)

  @parameterized.parameters(
    ({},), ([jnp.zeros(2), jnp.zeros(3)],), (jnp.zeros(()),)
  )
  def test_refuses_leaves_that_do_not_agree(self, row):
    with self.assertRaisesRegex(ValueError, 'agree in a leading axis'):
      replay.empty(row, 100)


class SampleTest(chex.TestCase):
  @hypothesis.settings(max_examples=15)
  @hypothesis.given(data=st.data(), seed=st.integers(0, 2**31), **SIZES)
  @pytest.mark.heavy
  def test_sequences_are_consecutive_and_stored(
    self, data, seed, num_rows, batch, chunks
  ):
    stored = filled(num_rows, batch, 1, *chunks)
    total = 1 + sum(chunks)
    size = min(total, num_rows)
    length = data.draw(st.sampled_from(sorted({1, size})))
    drawn = sample(stored, jax.random.key(seed), 5, length)
    where = np.asarray(drawn['where'])
    self.assertEqual(where.shape, (length, 5))
    start = where[0] // 100
    # None is older than the oldest row or newer than the newest.
    self.assertTrue(np.all(start >= total - size))
    self.assertTrue(np.all(start + length <= total))
    self.assertTrue(np.all(where[0] % 100 < batch))
    # Of one environment, one after the other, and all leaves alike.
    steps = 100 * np.arange(length)[:, None]
    np.testing.assert_array_equal(where, where[:1] + steps)
    np.testing.assert_array_equal(drawn['reward'], where)
    np.testing.assert_array_equal(drawn['image'][..., 0, 0], where % 251)
    np.testing.assert_array_equal(drawn['flag'], where % 2 == 1)
    chex.assert_trees_all_equal_dtypes(drawn, stored.rows)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters((4,), (5, 7))
  def test_starts_and_environments_are_uniform(self, *chunks):
    num_rows, batch, length, count = 7, 3, 3, 30_000
    stored = filled(num_rows, batch, *chunks)
    stored = stored.replace(rows={'where': stored.rows['where']})
    draw = functools.partial(replay.sample, batch_size=count, length=length)
    where = np.asarray(self.variant(draw)(stored, jax.random.key(0))['where'])
    total, size = sum(chunks), min(sum(chunks), num_rows)
    starts, environments = np.divmod(where[0], 100)
    cells = np.zeros((size - length + 1, batch))
    np.add.at(cells, (starts - (total - size), environments), 1)
    expected = count / cells.size
    # Chi-square has mean k - 1 and variance 2 (k - 1) for k cells.
    chi_square = np.sum((cells - expected) ** 2 / expected)
    freedom = cells.size - 1
    self.assertLess(chi_square, freedom + 5 * np.sqrt(2 * freedom))

  def test_each_key_draws_anew(self):
    stored = filled(50, 4, 50)
    one, same, other = (
      sample(stored, jax.random.key(seed), 64, 2)['where'] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    self.assertGreater(np.mean(one != other), 0.9)
    # The environment says nothing about the start.
    start, environment = np.divmod(
      np.asarray(sample(stored, jax.random.key(0), 5000, 2)['where'][0]), 100
    )
    self.assertLess(abs(np.corrcoef(start, environment)[0, 1]), 0.06)

  def test_can_be_drawn_in_a_scan_beside_adding(self):
    def step(stored, key):
      stored = replay.add(stored, numbered(0, 2, 2))
      drawn = replay.sample(stored, key, 3, 2)
      return stored, (replay.can_sample(stored, 5), drawn['where'])

    keys = jax.random.split(jax.random.key(0), 4)
    _, (enough, where) = jax.jit(
      lambda keys: jax.lax.scan(step, filled(8, 2), keys)
    )(keys)
    np.testing.assert_array_equal(enough, [False, False, True, True])
    chex.assert_shape(where, (4, 2, 3))

  @chex.variants(with_jit=True, without_jit=True)
  def test_can_sample_as_many_rows_as_are_stored(self):
    stored = filled(8, 2, 3)
    for length, expected in ((1, True), (3, True), (4, False)):
      fn = self.variant(functools.partial(replay.can_sample, length=length))
      self.assertEqual(fn(stored), expected)

  def test_refuses_longer_sequences_than_fit(self):
    stored = filled(4, 2, 6)
    for length in (5, 0):
      with self.assertRaisesRegex(ValueError, rf'in 1\.\.4.*{length}.*capac'):
        sample(stored, jax.random.key(0), 3, length)

  def test_refuses_longer_sequences_than_are_stored(self):
    with self.assertRaisesRegex(ValueError, 'is 3, but only 2 rows.*`add`'):
      replay.sample(filled(4, 2, 2), jax.random.key(0), 3, 3)

  def test_reads_without_a_copy_of_the_ring(self):
    num_rows, batch, width = 500, 2, 50
    row = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    stored = jax.eval_shape(lambda: replay.empty(row, num_rows * batch))
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = sample.lower(stored, key, 4, 3).compile()
    ring = num_rows * batch * width * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary, ring // 10)


if __name__ == '__main__':
  absltest.main()
