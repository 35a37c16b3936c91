"""Case D for the module, against a list that remembers everything."""

from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.modules import delay as delay_lib
from hkgraph.modules import history


def _reference(x, is_first, delay, initial, lines=None):
  """`lines[b]` lists the values of the running episode."""
  lines = lines or [[] for _ in range(x.shape[1])]
  y = np.empty_like(x)
  for t in range(x.shape[0]):
    for b in range(x.shape[1]):
      if is_first[t, b]:
        lines[b] = []
      known = len(lines[b]) >= delay
      y[t, b] = (lines[b] + [x[t, b]])[-1 - delay] if known else initial
      lines[b].append(x[t, b])
  return y, lines


class DelayTest(parameterized.TestCase):
  @hypothesis.settings(max_examples=8)
  @hypothesis.given(
    delay=st.integers(0, 6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    rate=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
  )
  @pytest.mark.heavy
  def test_any_cut_into_sequences(self, delay, lengths, rate, seed):
    network = network_lib.transform(lambda x: delay_lib.Delay(delay, 7)(x))
    rng = np.random.default_rng(seed)
    _, state = network.init(jax.random.key(0), jnp.zeros((2, 3), jnp.int32))
    lines = None
    for length in lengths:
      x = rng.integers(10, 99, (length, 2, 3)).astype(np.int32)
      is_first = rng.random((length, 2)) < rate
      expected, lines = _reference(x, is_first, delay, 7, lines)
      y, unrolled = network.unroll({}, state, None, x, is_first)
      np.testing.assert_array_equal(y, expected)
      for t in range(length):
        y, state = network.apply({}, state, None, x[t], is_first[t])
        np.testing.assert_array_equal(y, expected[t])
      state = unrolled  # Goes on from the sequence's carry.

  def test_trees_and_dtypes(self):
    tree = {
      'f': jnp.ones((2, 3), jnp.bfloat16),
      'i': jnp.full((2,), 3, jnp.uint8),
      'b': jnp.ones((2, 1), bool),
    }
    network = network_lib.transform(lambda x: delay_lib.Delay(1)(x))
    _, state = network.init(jax.random.key(0), tree)
    first = jnp.zeros(2, bool)
    y, state = network.apply({}, state, None, tree, first)
    jax.tree.map(lambda y, x: self.assertEqual(y.dtype, x.dtype), y, tree)
    jax.tree.map(lambda y: self.assertFalse(np.any(y != 0)), y)
    y, _ = network.apply({}, state, None, tree, first)
    jax.tree.map(np.testing.assert_array_equal, y, tree)

  def test_initial_value_may_be_a_tree(self):
    initial = {'a': np.array([1.0, 2.0]), 'b': 5}
    network = network_lib.transform(lambda x: delay_lib.Delay(2, initial)(x))
    x = {'a': jnp.zeros((3, 2)), 'b': jnp.zeros((3,))}
    _, state = network.init(jax.random.key(0), x)
    y, _ = network.apply({}, state, None, x, jnp.zeros(3, bool))
    np.testing.assert_array_equal(y['a'], [[1, 2]] * 3)
    np.testing.assert_array_equal(y['b'], [5, 5, 5])

  @parameterized.parameters(-1, 1.5, True, '2')
  def test_wrong_delay(self, delay):
    network = network_lib.transform(lambda x: delay_lib.Delay(delay)(x))
    with self.assertRaisesRegex(ValueError, 'non-negative integer, got'):
      network.init(jax.random.key(0), jnp.zeros((1, 1)))


class HistoryTest(parameterized.TestCase):
  def test_age_and_position_never_overflow(self):
    h = history.empty(jnp.zeros((1, 1)), 3)
    for i in range(20):
      h = history.write(h, jnp.full((1, 1), i, jnp.float32))
      self.assertEqual(int(h.age[0]), min(i + 1, 3))
      self.assertLess(int(h.position[0]), 3)
      for delay in range(1, min(i + 1, 3) + 1):
        got = history.read(h, delay, jnp.zeros(()))
        self.assertEqual(float(got[0, 0]), i + 1 - delay)

  def test_a_sequence_leaves_what_its_rows_would(self):
    h = history.write(history.empty(jnp.zeros((2, 1)), 3), jnp.ones((2, 1)))
    x = np.arange(10, 20, dtype=np.float32).reshape(5, 2, 1)
    is_first = np.zeros((5, 2), bool)
    is_first[3, 1] = True
    line = jnp.concatenate([history.past(h), x])
    extended = history.extend(h, line[-3:], is_first)
    for row, first in zip(x, is_first, strict=True):
      h = history.write(history.reset(h, first), row)
    jax.tree.map(np.testing.assert_array_equal, extended, h)

  def test_histories_of_different_ages_stack(self):
    young = history.empty(jnp.zeros((1, 1)), 4)
    old = young
    for i in range(6):
      old = history.write(old, jnp.full((1, 1), i, jnp.float32))
    young = history.write(young, jnp.full((1, 1), 9.0))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), old, young)
    both = history.write(both, jnp.full((2, 1), 50.0))
    got = [history.read(both, d, jnp.full((), -1.0))[:, 0] for d in (1, 2, 3)]
    np.testing.assert_array_equal(got, [[50, 50], [5, 9], [4, -1]])

  def test_age_of_rows(self):
    is_first = np.array([[0, 1], [0, 0], [1, 0], [0, 0]], bool)
    h = history.empty(jnp.zeros((2, 1)), 3).replace(age=jnp.array([3, 3]))
    age = history.age_of_rows(h, is_first)
    np.testing.assert_array_equal(age, [[3, 0], [4, 1], [0, 2], [1, 3]])


if __name__ == '__main__':
  absltest.main()
