"""The grouped path against the general one: values, states, gradients."""

import contextlib
from unittest import mock

from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hkgraph as hg
from hkgraph.graph import products, schedule
from tests.graph import random_graphs


def _network(spec, path, dtype=jnp.float32):
  return hg.transform(lambda x: hg.Graph(spec, path=path, dtype=dtype)(x))


def _results(spec, path, num_rows, is_first, seed, dtype=jnp.float32):
  """Outputs, histories in order of time, and all gradients."""
  network = _network(spec, path, dtype)
  batch_size = is_first.shape[1]
  inputs = random_graphs.inputs_of(spec, (num_rows, batch_size), seed)
  row = jax.tree.map(lambda x: x[0], inputs)
  params, state = network.init(jax.random.key(seed), row)
  # Small weights, so that no loop runs away; biases too.
  params = jax.tree.map(lambda x: x * 0.4 + jnp.full((), 0.1, x.dtype), params)
  # A carry in the middle of an episode.
  _, state = jax.jit(network.unroll)(params, state, None, inputs, is_first)

  def loss(params, values, inputs):
    carry = _with_values(state.carry, values)
    outputs, after = network.unroll(
      params, state.replace(carry=carry), None, inputs, is_first
    )
    leaves = jax.tree.leaves((outputs, _values(after.carry)))
    total = sum(jnp.mean(jnp.sin(x.astype(jnp.float32))) for x in leaves)
    return total, (outputs, after)

  arguments = params, _values(state.carry), inputs
  grads, (outputs, after) = jax.jit(
    jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
  )(*arguments)
  return outputs, after, grads


def _values(carry):
  return {
    module: {group: h.values for group, h in bundle['carry'].items()}
    for module, bundle in carry.items()
  }


def _with_values(carry, values):
  return {
    module: {
      'carry': {
        group: h.replace(values=values[module][group])
        for group, h in bundle['carry'].items()
      }
    }
    for module, bundle in carry.items()
  }


def _assert_close(got, wanted, tolerance):
  def check(path, a, b):
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    scale = max(1.0, np.abs(b).max(initial=0))
    np.testing.assert_allclose(
      a / scale, b / scale, atol=tolerance, err_msg=str(path)
    )

  jax.tree_util.tree_map_with_path(check, got, wanted)


@contextlib.contextmanager
def _limits(cache, small, buckets):
  """The limits of the executor; plans made under others are forgotten."""
  schedule.make.cache_clear()
  with (
    mock.patch.multiple(products, CACHE=cache, SMALL=small),
    mock.patch.object(schedule, 'MAX_BUCKETS', buckets),
  ):
    yield
  schedule.make.cache_clear()


class PathsTest(parameterized.TestCase):
  @hypothesis.settings(max_examples=5)
  @hypothesis.given(
    data=st.data(), seed=st.integers(0, 2**16), small=st.booleans()
  )
  @pytest.mark.heavy
  def test_random_graphs(self, data, seed, small):
    spec = data.draw(random_graphs.specs(max_delay=4))
    is_first = data.draw(random_graphs.boundaries(6, 2))
    # With tiny limits every product is made member by member, and members of
    # any fan-in are padded to share one.
    with _limits(1, 1, 1) if small else _limits(2**19, 2**22, 4):
      wanted = _results(spec, 'general', 6, is_first, seed)
      got = _results(spec, 'grouped', 6, is_first, seed)
    _assert_close(got, wanted, 1e-5)

  @hypothesis.settings(max_examples=2)
  @hypothesis.given(data=st.data(), seed=st.integers(0, 2**16))
  @pytest.mark.heavy
  def test_random_graphs_in_bfloat16(self, data, seed):
    spec = data.draw(random_graphs.specs(max_delay=3))
    is_first = data.draw(random_graphs.boundaries(5, 2))
    paths = (
      _results(spec, path, 5, is_first, seed, jnp.bfloat16)
      for path in ('general', 'grouped')
    )
    wanted, got = paths
    dtypes = {x.dtype for x in jax.tree.leaves((got[0], _values(got[1].carry)))}
    self.assertEqual(dtypes, {jnp.dtype(jnp.bfloat16)})
    _assert_close(got, wanted, 0.1)

  @pytest.mark.heavy
  def test_members_of_one_bucket_that_read_unlike_groups(self):
    # With a single bucket the first member has padding where others read.
    graph = hg.PopulationGraph()
    graph.add_input('x', 2, input_from='x')
    for name in ('a', 'b', 'c'):
      graph.add_population(name, 2, activation=jnp.tanh)
    graph.add_population('wide', 3, activation=jnp.tanh)
    graph.add_output('y', 1)
    graph.connect('x', 'a')
    graph.connect('a', 'b', delay=1, reciprocal=True)
    graph.connect('b', 'c', delay=2, reciprocal=True)
    graph.connect('wide', 'b', delay=1, reciprocal=True)
    graph.connect('wide', 'c', delay=1)
    graph.connect('c', 'y')
    spec = graph.finalize()
    is_first = np.random.default_rng(0).random((6, 2)) < 0.2
    with _limits(2**19, 2**22, 1):
      reads = [r for b in spec.schedule().blocks[1].inner for r in b.reads]
      self.assertTrue(any(r.rows[0][0] < 0 for r in reads))
      wanted = _results(spec, 'general', 6, is_first, 0)
      got = _results(spec, 'grouped', 6, is_first, 0)
    _assert_close(got, wanted, 1e-5)


if __name__ == '__main__':
  absltest.main()
