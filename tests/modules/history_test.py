"""Histories after every row of a sequence, against writing row by row."""

from absl.testing import absltest
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import history

write = jax.jit(history.write)
of_rows = jax.jit(history.of_rows)
last = jax.jit(history.last)


def value(rng, *shape):
  """A tree of two leaves of different shapes and dtypes."""
  return {
    'x': jnp.float32(rng.normal(size=(*shape, 2))),
    'n': jnp.int32(rng.integers(100, size=shape)),
  }


class LastTest(absltest.TestCase):
  def test_is_what_was_written_last_wherever_the_ring_stands(self):
    rng = np.random.default_rng(0)
    h = history.empty(value(rng, 3), 3)
    for _ in range(5):
      new = value(rng, 3)
      h = write(h, new)
      chex.assert_trees_all_equal(last(h), new)
    # Of an older episode, too.
    h = history.reset(h, jnp.ones(3, bool))
    chex.assert_trees_all_equal(last(h), new)

  def test_positions_may_differ(self):
    rng = np.random.default_rng(0)
    one, two = (history.empty(value(rng, 1), 2) for _ in range(2))
    values = [value(rng, 1) for _ in range(4)]
    for new in values[:3]:
      one = write(one, new)
    two = write(two, values[3])
    join = lambda *x: jnp.concatenate(x)  # noqa: E731
    chex.assert_trees_all_equal(
      last(jax.tree.map(join, one, two)),
      jax.tree.map(join, values[2], values[3]),
    )


class OfRowsTest(absltest.TestCase):
  # Few shapes, as each compiles.
  @hypothesis.given(
    sizes=st.sampled_from([(1, 1, 1), (5, 2, 3), (2, 3, 4), (4, 1, 2)]),
    written=st.integers(0, 6),
    rate=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
  )
  @pytest.mark.heavy
  def test_against_writing_row_by_row(self, sizes, written, rate, seed):
    num_rows, batch_size, length = sizes
    rng = np.random.default_rng(seed)
    h = history.empty(value(rng, batch_size), length)
    for _ in range(written):
      h = history.reset(h, jnp.asarray(rng.random(batch_size) < rate))
      h = write(h, value(rng, batch_size))
    values = value(rng, num_rows, batch_size)
    is_first = jnp.asarray(rng.random((num_rows, batch_size)) < rate)
    rows = of_rows(h, values, is_first)
    chex.assert_trees_all_equal_dtypes(rows, h)
    past = history.past(rows)
    for t in range(num_rows):
      h = history.reset(h, is_first[t])
      h = write(h, jax.tree.map(lambda x, t=t: x[t], values))
      of_row = slice(t * batch_size, (t + 1) * batch_size)
      np.testing.assert_array_equal(rows.age[of_row], h.age)
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x, s=of_row: x[:, s], past), history.past(h)
      )

  @pytest.mark.heavy
  def test_what_is_read_and_written_next(self):
    """Numbers: 1..4 are written, an episode begins at 3, delays 1 and 2."""
    x = jnp.arange(1.0, 5).reshape(4, 1)
    is_first = jnp.asarray([[True], [False], [True], [False]])
    h = history.write(history.empty(x[0], 2), jnp.float32([9]))
    rows = history.of_rows(h, x, is_first)
    zero = jnp.zeros(())
    np.testing.assert_array_equal(history.read(rows, 1, zero), [1, 2, 3, 4])
    np.testing.assert_array_equal(history.read(rows, 2, zero), [0, 1, 0, 3])
    rows = history.write(rows, jnp.full(4, 7.0))
    np.testing.assert_array_equal(history.read(rows, 1, zero), [7, 7, 7, 7])
    np.testing.assert_array_equal(history.read(rows, 2, zero), [1, 2, 3, 4])

  def test_a_new_one_can_be_given_away(self):
    h = history.empty(jnp.ones((3, 2)), 4)
    h = jax.jit(history.write, donate_argnums=0)(h, jnp.ones((3, 2)))
    np.testing.assert_array_equal(h.age, [1, 1, 1])


if __name__ == '__main__':
  absltest.main()
