"""The recurrent state-space model: one suite that all cores pass."""

import functools

from absl.testing import absltest, parameterized
import chex
import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph import network as network_lib
from hkgraph.graph import builder, core
from hkgraph.modules import history, rssm

T, B, E, A, S, K = 6, 2, 3, 2, 2, 3
LATENT = S * K


def graph():
  """Two inputs, two outputs, delays of 1 and 3, a loop."""
  graph = builder.PopulationGraph()
  graph.add_input('eye', 3, input_from='x')
  graph.add_input('ear', 2, input_from='y')
  graph.add_population('a', 4, activation='jax.numpy.tanh')
  graph.add_output('b', 2)
  graph.add_output('c', 3)
  graph.connect('eye', 'a', delay=1)
  graph.connect('ear', 'a')
  graph.connect('a', 'a', delay=3)
  graph.connect('a', 'b', delay=3)
  graph.connect('a', 'c')
  return graph.finalize()


def graph_core():
  spec = graph()
  return rssm.ProjectedCore(core.GraphCore(spec), spec.input_sizes)


CORES = {
  'gated': lambda: rssm.GatedCell(6, 4),
  'blocks': lambda: rssm.GatedCell(6, 4, num_blocks=2),
  'gru': lambda: hk.GRU(5),
  'graph': graph_core,
}


def make(core, *, unimix=0.0):
  def fns():
    model = rssm.RSSM(
      core(), num_latents=S, num_classes=K, hidden_size=4, unimix=unimix
    )

    def everything(embedding, action_tm1, is_first, key):
      state = model.initial(embedding.shape[1])
      return model.observe(state, embedding, action_tm1, is_first, key)

    def follow(state, features, action, key):
      act = lambda features, action: (action, features)  # noqa: E731
      return model.imagine(state, features, act, action, key)

    return everything, {
      'initial': model.initial,
      'observe': model.observe,
      'follow': follow,
      'prior': model.prior,
    }

  return network_lib.methods(fns)


def data(seed=0):
  rng = np.random.default_rng(seed)
  embedding = jnp.float32(rng.normal(size=(T, B, E)))
  action_tm1 = jnp.float32(rng.normal(size=(T, B, A)))
  is_first = np.zeros((T, B), bool)
  is_first[0, 0] = is_first[3, 1] = True
  return embedding, action_tm1, jnp.asarray(is_first)


class Model:
  """A model whose latents are, in effect, the most likely ones.

  So its states do not depend on keys: every key below is another one.
  """

  def __init__(self, core):
    init, fns = make(core)
    rows = data()
    params = jax.jit(init)(jax.random.key(0), *rows, jax.random.key(1))
    self.params = jax.tree_util.tree_map_with_path(self._decide, params)
    self.initial = functools.partial(fns['initial'], {})
    self.apply = jax.jit(fns['observe'])
    self.follow = functools.partial(jax.jit(fns['follow']), self.params)
    self.prior = functools.partial(fns['prior'], self.params)
    # Somewhere within an episode.
    self.state = self.observe(
      self.initial(B), *data(1)[:2], data()[2], seed=5
    ).state
    self.observed = self.observe(self.state, *rows)

  def observe(self, state, *rows, seed=2):
    return self.apply(self.params, state, *rows, jax.random.key(seed))

  def _decide(self, path, x):
    name = jax.tree_util.keystr(path)
    is_logits = 'posterior_output' in name or 'prior_output' in name
    return x * (1e4 if is_logits else 2)


@functools.cache
def model_of(name):
  return Model(CORES[name])


def comparable(state):
  """Histories in the order of time, wherever their rings begin."""
  is_history = lambda x: isinstance(x, history.History)  # noqa: E731
  return jax.tree.map(
    lambda x: (history.past(x), x.age) if is_history(x) else x,
    state,
    is_leaf=is_history,
  )


def rows_of(states, rows):
  """Of states `[T * B, ...]`, those after some rows, still one batch."""
  index = (np.asarray(rows)[:, None] * B + np.arange(B)).ravel()
  return jax.tree.map(lambda x: x[index], states)


def seen(observed):
  """Features and logits, these before they were made large."""
  logits = (observed.posterior.logits, observed.prior.logits)
  return observed.features, *(x / 1e4 for x in logits)


def assert_close(actual, expected):
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@parameterized.parameters(*CORES)
class CoresTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_row_by_row(self, name):
    model = model_of(name)
    observed, state = model.observed, model.state
    for t in range(T):
      row = jax.tree.map(lambda x, t=t: x[t : t + 1], data())
      alone = model.observe(state, *row, seed=10 + t)
      for actual, expected in zip(seen(alone), seen(observed), strict=True):
        assert_close(actual[0], expected[t])
      state = alone.state
      after = rows_of(observed.states, [t])
      assert_close(comparable(after), comparable(state))
      assert_close(comparable(alone.states), comparable(state))
    assert_close(observed.state, state)

  @pytest.mark.heavy
  def test_in_two_pieces(self, name):
    model, half = model_of(name), T // 2
    one, two = (
      jax.tree.map(lambda x, cut=cut: x[cut], data())
      for cut in (slice(half), slice(half, T))
    )
    one = model.observe(model.state, *one, seed=3)
    two = model.observe(one.state, *two, seed=4)
    features = jnp.concatenate([one.features, two.features])
    assert_close(features, model.observed.features)
    assert_close(two.state, model.observed.state)
    states = rows_of(model.observed.states, range(half, T))
    assert_close(comparable(two.states), comparable(states))

  def test_latents_are_one_hot_and_vary(self, name):
    latent = model_of(name).observed.features[..., -LATENT:]
    latent = np.asarray(latent).reshape(T, B, S, K)
    np.testing.assert_array_equal(latent.sum(-1), 1)
    self.assertEqual(set(np.unique(latent)), {0, 1})
    self.assertGreater(np.ptp(latent, axis=0).max(), 0)

  @pytest.mark.heavy
  def test_nothing_passes_a_first_row(self, name):
    model = model_of(name)
    embedding, action_tm1, is_first = data()
    dirty = jax.tree.map(
      lambda x: x + 3 if x.dtype == jnp.float32 else x, model.state
    )
    dirty = model.observe(
      dirty,
      embedding.at[:3, 1].add(7),
      action_tm1.at[:4, 1].add(50).at[0, 0].set(jnp.nan),
      is_first,
    )
    clean = model.observed
    # Element 0 begins at row 0, element 1 at row 3.
    for b, start in ((0, 0), (1, 3)):
      cut = lambda x, b=b, start=start: x[start:, b]  # noqa: E731
      chex.assert_trees_all_equal(
        *(jax.tree.map(cut, seen(o)) for o in (clean, dirty))
      )
    self.assertGreater(
      jnp.abs(clean.features[:3, 1] - dirty.features[:3, 1]).max(), 0.01
    )
    # Whatever is left of it in the states, nothing reads it.
    action, key = jnp.ones((2, T * B, A)), jax.random.key(6)
    flat = clean.features.reshape(T * B, -1)
    known = np.array([0, 2, 4, 6, 8, 10, 7, 9, 11])
    features, _ = zip(
      *(model.follow(o.states, flat, action, key) for o in (clean, dirty)),
      strict=True,
    )
    assert_close(features[0][:, known], features[1][:, known])

  @pytest.mark.heavy
  def test_no_gradient_passes_a_first_row(self, name):
    model = model_of(name)
    embedding, action_tm1, is_first = data()

    @jax.jit
    def gradient(scale, embedding, action_tm1):
      def loss(params, scale, embedding, action_tm1):
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        state = jax.tree.map(
          lambda x: scale * x if is_float(x) else x, model.state
        )
        features = model.apply(
          *(params, state, embedding, action_tm1, is_first, jax.random.key(2))
        ).features
        # Element 0 from row 0, element 1 from row 3.
        one, two = features[:, 0], features[3:, 1]
        return jnp.sum(jnp.sin(one)) + jnp.sum(jnp.sin(two))

      return jax.grad(loss, argnums=(0, 1, 2, 3))(
        model.params, scale, embedding, action_tm1
      )

    params, *inputs = gradient(1.0, embedding, action_tm1)
    self.assertEqual(inputs[0], 0)
    np.testing.assert_array_equal(inputs[1][:3, 1], 0)
    np.testing.assert_array_equal(inputs[2][:4, 1], 0)
    np.testing.assert_array_equal(inputs[2][0, 0], 0)
    self.assertGreater(jnp.abs(inputs[2][1:, 0]).max(), 0)
    # The rows before are not in the gradient of the weights either.
    dirty, *_ = gradient(
      2.0, embedding.at[:3, 1].add(7), action_tm1.at[:4, 1].add(50)
    )
    chex.assert_trees_all_equal(params, dirty)

  @pytest.mark.heavy
  def test_imagination_goes_on_as_observing_would(self, name):
    model, observed = model_of(name), model_of(name).observed
    _, action_tm1, is_first = data()
    start = observed.features.reshape(T * B, -1)
    # After row t: the actions into rows t + 1 and t + 2.
    action = jnp.stack([
      jnp.roll(action_tm1, -shift, axis=0).reshape(T * B, A)
      for shift in (1, 2)
    ])  # fmt: skip
    features, seen = model.follow(
      observed.states, start, action, jax.random.key(7)
    )
    # What `act` is given.
    np.testing.assert_array_equal(seen, [start, *features[:-1]])
    deter = features[0].reshape(T, B, -1)[:-1, :, :-LATENT]
    goes_on = ~is_first[1:]
    self.assertEqual(np.sum(goes_on), 9)
    assert_close(deter[goes_on], observed.features[1:, :, :-LATENT][goes_on])
    # The latents are the most likely ones of the prior.
    prior = model.prior(features[..., :-LATENT])
    latent = features[..., -LATENT:].reshape(2, T * B, S, K)
    np.testing.assert_array_equal(
      jnp.argmax(latent, -1), jnp.argmax(prior.logits, -1)
    )


class LatentsTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_uniform_share_of_prior_and_posterior(self):
    init, fns = make(CORES['gated'], unimix=0.3)
    rows = data()
    params = init(jax.random.key(0), *rows, jax.random.key(1))
    params = jax.tree.map(lambda x: x * 1e4, params)
    state = fns['initial']({}, B)
    observed = fns['observe'](params, state, *rows, jax.random.key(2))
    for latents in (observed.prior, observed.posterior):
      self.assertEqual(latents.batch_shape, (T, B, S))
      # Where nothing is known the logits are 0, else they are huge.
      np.testing.assert_allclose(latents.probs.min(), 0.1, rtol=1e-4)
      np.testing.assert_allclose(latents.probs.max(), 0.8, rtol=1e-3)

  @pytest.mark.heavy
  def test_latents_are_drawn_by_the_key(self):
    init, fns = make(CORES['gated'], unimix=0.5)
    rows = data()
    params = init(jax.random.key(0), *rows, jax.random.key(1))
    observe = functools.partial(
      fns['observe'], params, fns['initial']({}, B), *rows
    )
    one, same, other = (observe(jax.random.key(i)).features for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    self.assertGreater(jnp.abs(one - other).max(), 0.5)

  def test_embedding_teaches_by_the_latents_alone(self):
    """The deterministic part of a row has not seen the row."""
    model = model_of('gated')
    embedding, action_tm1, is_first = data()
    other = model.observe(
      model.state, embedding.at[4].add(9), action_tm1, is_first
    )
    clean = model.observed
    np.testing.assert_array_equal(clean.prior.logits[4], other.prior.logits[4])
    self.assertGreater(
      jnp.abs(clean.posterior.logits - other.posterior.logits)[4].max(), 1
    )
    self.assertGreater(
      jnp.abs(clean.features - other.features)[5, :, :-LATENT].max(), 0.01
    )


class GatedCellTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3)
  @pytest.mark.heavy
  def test_against_numpy(self, num_blocks):
    size, hidden, num_inputs, batch = 6, 4, 3, 2
    cell = hk.without_apply_rng(
      hk.transform(
        lambda x, h: rssm.GatedCell(size, hidden, num_blocks=num_blocks)(x, h)
      )
    )
    x, h = np.zeros((batch, num_inputs)), np.zeros((batch, size))
    shapes = cell.init(jax.random.key(0), jnp.float32(x), jnp.float32(h))
    apply = jax.jit(cell.apply)
    block = size // num_blocks
    self.assertEqual(
      shapes['gated_cell']['w'].shape, (num_blocks, block + hidden, 3 * block)
    )

    def norm(x, params):
      mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
      x = (x - mean) / np.sqrt(var + 1e-3)
      return x * params['scale'] + params['offset']

    def sigm(x):
      return 1 / (1 + np.exp(-x))

    def expected(params, x, h):
      layer = 'gated_cell/input_layer/'
      x = norm(x @ params[f'{layer}linear']['w'], params[f'{layer}layer_norm'])
      x = x * sigm(x)
      gates = []
      for n in range(num_blocks):
        own = h[:, n * block : (n + 1) * block]
        joined = np.concatenate([own, x], axis=1)
        gates.append(joined @ params['gated_cell']['w'][n])
      gates = norm(
        np.concatenate(gates, axis=1), params['gated_cell/gate_norm']
      )
      new = []
      for n in range(num_blocks):
        own = h[:, n * block : (n + 1) * block]
        r, c, u = np.split(
          gates[:, 3 * n * block : 3 * (n + 1) * block], 3, axis=1
        )
        u = sigm(u - 1)
        new.append(u * np.tanh(sigm(r) * c) + (1 - u) * own)
      return np.concatenate(new, axis=1)

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(seed=st.integers(0, 2**16))
    def check(seed):
      rng = np.random.default_rng(seed)
      params = jax.tree.map(lambda p: rng.normal(size=p.shape), shapes)
      x, h = rng.normal(size=(batch, num_inputs)), rng.normal(size=h0.shape)
      y, state = apply(*jax.tree.map(jnp.float32, (params, x, h)))
      np.testing.assert_allclose(
        y, expected(params, x, h), rtol=1e-4, atol=1e-5
      )
      np.testing.assert_array_equal(y, state)

    h0 = h
    check()

  @parameterized.parameters(
    (dict(size=6, hidden_size=4, num_blocks=4), 'multiple.*6 units and 4'),
    (dict(size=0, hidden_size=4), r'`size` must be positive.*\[0\]'),
    (dict(size=6, hidden_size=-1), '`hidden_size` must be positive'),
    (dict(size=6, hidden_size=4, num_blocks=0), '`num_blocks` must be'),
  )
  def test_wrong_sizes(self, arguments, message):
    def wrong():
      with self.assertRaisesRegex(ValueError, message):
        rssm.GatedCell(**arguments)

    hk.transform(wrong).init(jax.random.key(0))


class Swap(hk.RNNCore):
  """Gives back its inputs under other names."""

  def __call__(self, inputs, prev_state):
    return {'b': inputs['x'], 'a': inputs['y']}, prev_state + 1

  def initial_state(self, batch_size):
    return jnp.zeros((batch_size, 1))


class ProjectedCoreTest(parameterized.TestCase):
  @pytest.mark.heavy
  def test_each_input_is_read_once_and_outputs_are_joined(self):
    projected = hk.without_apply_rng(
      hk.transform(
        lambda x: rssm.ProjectedCore(Swap(), {'x': 2, 'y': 3})(
          x, jnp.zeros((4, 1))
        )
      )
    )
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 3)))
    params = projected.init(jax.random.key(0), x)
    y, state = projected.apply(params, x)
    h = x @ params['projected_core/inputs/linear']['w']
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(
      h.var(-1, keepdims=True) + 1e-3
    )
    h = jax.nn.silu(h)
    np.testing.assert_allclose(
      y, jnp.concatenate([h[:, 2:], h[:, :2]], axis=1), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(state, 1)


class WrongInputTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda x, h: (x, h[:1]), r'makes float32\[2, 3\].*got .*32\[1, 3\]'),
    (lambda x, h: (x, {'h': h}), r"structure.*got {'h': 'float32\[2, 3\]'}"),
    (lambda x, h: (x, h.astype(jnp.int32)), r'dtypes.*got int32\[2, 3\]'),
    (lambda x, h: (x[:, None], h), r'must be \[B, F\].*got \(2, 1,'),
    (lambda x, h: (x[:, 0], h), r'must be \[B, F\].*got \(2,\)'),
  )
  def test_steps_that_are_none(self, step, message):
    class Core(hk.RNNCore):
      def initial_state(self, batch_size):
        return jnp.zeros((batch_size, 3))

      def __call__(self, inputs, prev_state):
        return step(inputs, prev_state)

    with self.assertRaisesRegex(ValueError, message):
      init, _ = make(Core)
      init(jax.random.key(0), *data(), jax.random.key(1))

  @parameterized.parameters((lambda: 64,), (lambda: hk.Linear(3),))
  def test_no_core(self, core):
    with self.assertRaisesRegex(
      TypeError, r'`core` must be.*hk.GRU\(64\), got'
    ):
      init, _ = make(core)
      init(jax.random.key(0), *data(), jax.random.key(1))


if __name__ == '__main__':
  absltest.main()
