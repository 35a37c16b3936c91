"""Tests of policy heads."""

from absl.testing import absltest, parameterized
import chex
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkgraph.modules import distributions, heads, routing

LOW, HIGH = (-2.0, 0.0), (4.0, 1.0)
BODY = specs.BoundedArray((2,), np.float32, LOW, HIGH)
DISCRETE = specs.DiscreteArray(5)
SEVERAL = specs.BoundedArray((3,), np.int32, 0, (2, 0, 3))


def run(fn, *args):
  """Makes a module's parameters and output."""
  transformed = hk.without_apply_rng(hk.transform(fn))
  params = transformed.init(jax.random.key(0), *args)
  return params, transformed.apply(params, *args)


def inside(fn):
  """Runs `fn` where modules may be made."""
  hk.transform(lambda: fn() and None).init(jax.random.key(0))


class HeadsTest(chex.TestCase):
  @parameterized.parameters((), (4,), (3, 4))
  def test_categorical(self, *leading):
    logits = jnp.float32(np.random.default_rng(0).normal(size=(*leading, 3)))
    params, policy = run(lambda x: heads.CategoricalHead(3)(x), logits)
    self.assertEmpty(params)
    action = jnp.full(leading, 2, jnp.int32)
    np.testing.assert_allclose(
      policy.log_prob(action),
      jax.nn.log_softmax(logits)[..., 2],
      rtol=1e-5,
    )

  def test_multi_categorical(self):
    logits = jnp.float32(np.random.default_rng(0).normal(size=(4, 5)))

    def head(x):
      return heads.MultiCategoricalHead([2, 3])(x)

    params, policy = run(head, logits)
    self.assertEmpty(params)
    action = jnp.tile(jnp.asarray([[1, 2]]), (4, 1))
    np.testing.assert_allclose(
      policy.log_prob(action),
      jax.nn.log_softmax(logits[:, :2])[:, 1]
      + jax.nn.log_softmax(logits[:, 2:])[:, 2],
      rtol=1e-5,
    )

  def test_tanh_normal_with_predicted_scale(self):
    inputs = jnp.asarray([[0.1, 0.2, -1.0, 3.0], [0.3, 0.4, 0.0, -100.0]])

    def head(x):
      return heads.TanhNormalHead(LOW, HIGH, min_scale=0.01)(x)

    params, policy = run(head, inputs)
    self.assertEmpty(params)
    np.testing.assert_allclose(policy.loc, inputs[:, :2])
    np.testing.assert_allclose(
      policy.scale, np.log1p(np.exp(inputs[:, 2:])) + 0.01, rtol=1e-5
    )
    np.testing.assert_allclose(
      policy.to_environment(jnp.zeros((2, 2))), [[1.0, 0.5]] * 2
    )

  @parameterized.parameters((4,), (3, 4))
  @pytest.mark.heavy
  def test_tanh_normal_with_independent_scale(self, *leading):
    def log_prob(x):
      head = heads.TanhNormalHead(
        LOW, HIGH, scale='independent', min_scale=1e-6
      )
      return head(x).log_prob(jnp.full((*leading, 2), 2.0))

    transformed = hk.without_apply_rng(hk.transform(log_prob))
    loc = jnp.zeros((*leading, 2))
    params = transformed.init(jax.random.key(0), loc)
    chex.assert_trees_all_equal(
      params, {'tanh_normal_head': {'raw_scale': jnp.zeros(2)}}
    )
    # At log(e - 1) the softplus is 1: twice a standard normal at 2, squashed.
    raw = jnp.full((2,), np.log(np.e - 1))
    params = {'tanh_normal_head': {'raw_scale': raw}}
    squashed = -0.918939 - 2 - np.log(1 - np.tanh(2) ** 2)
    np.testing.assert_allclose(
      transformed.apply(params, loc),
      np.full(leading, 2 * squashed - np.log(3) - np.log(0.5)),
      rtol=1e-4,
    )
    # Every row pulls by u^2 - 1, through the softplus' slope 1 - 1 / e.
    grads = jax.grad(lambda p: transformed.apply(p, loc).sum())(params)
    np.testing.assert_allclose(
      grads['tanh_normal_head']['raw_scale'],
      [3 * (1 - np.exp(-1)) * np.prod(leading)] * 2,
      rtol=1e-4,
    )

  @parameterized.parameters('predicted', 'independent')
  def test_scale_stays_above_its_minimum(self, scale):
    def head(x):
      return heads.TanhNormalHead(LOW, HIGH, scale=scale, min_scale=0.1)(x)

    transformed = hk.without_apply_rng(hk.transform(head))
    inputs = jnp.full((1, 4 if scale == 'predicted' else 2), -1e4)
    params = transformed.init(jax.random.key(0), inputs)
    params = jax.tree.map(lambda x: x - 1e4, params)
    policy = transformed.apply(params, inputs)
    np.testing.assert_allclose(policy.scale, 0.1)
    chex.assert_tree_all_finite(policy.entropy())

  @parameterized.named_parameters(
    ('categorical', lambda: heads.CategoricalHead(3), 3),
    ('several', lambda: heads.MultiCategoricalHead([3, 4]), 7),
    ('predicted', lambda: heads.TanhNormalHead(LOW, HIGH), 4),
    (
      'independent',
      lambda: heads.TanhNormalHead(LOW, HIGH, scale='independent'),
      2,
    ),
  )
  def test_names_the_width_it_wants(self, make, wanted):
    def wrong():
      head = make()
      self.assertEqual(head.input_size, wanted)
      with self.assertRaisesRegex(
        ValueError, rf'{head.name}.*\[\.\.\., {wanted}\], got \[2, 9\]'
      ):
        head(jnp.zeros((2, 9)))

    inside(wrong)

  @parameterized.named_parameters(
    ('no_action', lambda: heads.CategoricalHead(0), r'at least 1.*\[0\]'),
    ('no_choice', lambda: heads.MultiCategoricalHead([]), r'at least 1.*\[\]'),
    (
      'swapped',
      lambda: heads.TanhNormalHead(HIGH, LOW),
      r'`low` less than.*\[4\.0, 1\.0\]',
    ),
    (
      'infinite',
      lambda: heads.TanhNormalHead((0.0,), (np.inf,)),
      'must be finite.*inf',
    ),
    (
      'lengths',
      lambda: heads.TanhNormalHead((0.0,), (1.0, 1.0)),
      r'\(1,\) and \(2,\)',
    ),
    (
      'scale',
      lambda: heads.TanhNormalHead(LOW, HIGH, scale='learned'),
      "independent.*predicted.*'learned'",
    ),
    (
      'min_scale',
      lambda: heads.TanhNormalHead(LOW, HIGH, min_scale=0.0),
      'must be positive, got 0.0',
    ),
  )
  def test_refuses(self, make, message):
    def wrong():
      with self.assertRaisesRegex(ValueError, message):
        make()

    inside(wrong)


class MakeHeadTest(chex.TestCase):
  @parameterized.named_parameters(
    ('discrete', DISCRETE, heads.CategoricalHead, 5),
    (
      'bounded_integer',
      specs.BoundedArray((), np.int64, 0, 4),
      heads.CategoricalHead,
      5,
    ),
    ('several', SEVERAL, heads.MultiCategoricalHead, 8),
    (
      'alike',
      specs.BoundedArray((3,), np.int32, 0, 1),
      heads.MultiCategoricalHead,
      6,
    ),
    ('body', BODY, heads.TanhNormalHead, 4),
  )
  def test_of_a_spec(self, spec, cls, size):
    self.assertEqual(heads.input_size(spec), size)

    def make():
      head = heads.make_head(spec)
      self.assertIsInstance(head, cls)
      self.assertEqual(head.input_size, size)

    inside(make)

  @parameterized.product(
    spec=[DISCRETE, SEVERAL, BODY],
    leading=[(4,), (3, 4)],
    scale=['predicted', 'independent'],
  )
  @pytest.mark.heavy
  def test_actions_conform_to_the_spec(self, spec, leading, scale):
    size = heads.input_size(spec, scale=scale)
    inputs = 3 * np.random.default_rng(0).normal(size=(*leading, size))

    def head(x):
      return heads.make_head(spec, scale=scale)(x)

    _, policy = run(head, jnp.float32(inputs))
    action = distributions.sample(policy, jax.random.key(0))
    action = distributions.to_environment(policy, action)
    for row in np.asarray(action).reshape(-1, *spec.shape):
      spec.validate(row)

  @pytest.mark.heavy
  def test_of_a_dict_is_a_dict(self):
    # Haiku would number two modules `leg_1` after a `leg`.
    spec = {'leg': BODY, 'leg_1': BODY, 'leg_2': BODY, 'mouth': DISCRETE}
    sizes = heads.input_size(spec, scale='independent')
    self.assertEqual(sizes, {'leg': 2, 'leg_1': 2, 'leg_2': 2, 'mouth': 5})
    inputs = {key: jnp.zeros((4, size)) for key, size in sizes.items()}

    def policy_of(inputs):
      head = heads.make_head(spec, scale='independent', min_scale=0.5)
      self.assertEqual({k: h.input_size for k, h in head.items()}, sizes)
      return routing.Map(head)(inputs)

    params, policy = run(policy_of, inputs)
    self.assertSameElements(params, ['leg_head', 'leg_1_head', 'leg_2_head'])
    action = distributions.sample(policy, jax.random.key(0))
    chex.assert_trees_all_equal_shapes(
      distributions.log_prob(policy, action),
      dict.fromkeys(spec, jnp.zeros(4)),
    )
    np.testing.assert_allclose(
      policy['leg'].scale, np.full((4, 2), np.log(2) + 0.5), rtol=1e-5
    )

  def test_order_of_a_dict_does_not_matter(self):
    spec = {'b': BODY, 'a': BODY}
    inputs = {'a': jnp.ones((1, 2)), 'b': jnp.zeros((1, 2))}

    def policy_of(inputs, spec):
      return routing.Map(heads.make_head(spec, scale='independent'))(inputs)

    chex.assert_trees_all_equal(
      run(lambda x: policy_of(x, spec), inputs),
      run(lambda x: policy_of(x, dict(reversed(spec.items()))), inputs),
    )

  @parameterized.named_parameters(
    ('unbounded', specs.Array((2,), np.float32), 'declare bounds'),
    (
      'infinite',
      specs.BoundedArray((1,), np.float32, -np.inf, 1.0),
      'must be finite',
    ),
    ('scalar', specs.BoundedArray((), np.float32, 0, 1), 'one axis'),
    ('matrix', specs.BoundedArray((2, 2), np.float32, 0, 1), 'one axis'),
    ('integers', specs.Array((2,), np.int32), 'BoundedArray'),
    ('table', specs.BoundedArray((2, 2), np.int32, 0, 1), 'one axis'),
    ('from_1', specs.BoundedArray((2,), np.int32, 1, 3), 'count from 0'),
    ('bool', specs.Array((2,), bool), 'integers or floats'),
    ('tuple', (DISCRETE, DISCRETE), 'or a dict of them, got .Discrete'),
    ('nothing', None, 'or a dict of them, got None'),
    ('nested', {'a': {'b': DISCRETE}}, r"\['b'\] inside of a dict"),
  )
  def test_refuses(self, spec, message):
    with self.assertRaisesRegex(ValueError, message):
      heads.input_size(spec)

    def wrong():
      with self.assertRaisesRegex(ValueError, message):
        heads.make_head(spec)

    inside(wrong)


class EncodeActionTest(parameterized.TestCase):
  """Actions as inputs of networks, by hand."""

  def test_one_choice(self):
    encoded = heads.encode_action(DISCRETE, jnp.asarray([[0, 4], [2, 1]]))
    np.testing.assert_array_equal(encoded, np.eye(5)[[[0, 4], [2, 1]]])
    self.assertEqual(heads.encoded_size(DISCRETE), 5)

  def test_several_choices_side_by_side(self):
    # 3, 1 and 4 actions.
    encoded = heads.encode_action(SEVERAL, jnp.asarray([[2, 0, 1], [0, 0, 3]]))
    np.testing.assert_array_equal(
      encoded, [[0, 0, 1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0, 1]]
    )
    self.assertEqual(heads.encoded_size(SEVERAL), 8)

  def test_bounded_numbers_are_squashed(self):
    action = jnp.asarray([[0.5, -40.0], [-1.0, 3.0]])
    np.testing.assert_allclose(
      heads.encode_action(BODY, action), np.tanh(action), rtol=1e-6
    )
    # Not as many as the head reads, which are means and scales.
    self.assertEqual(heads.encoded_size(BODY), 2)

  def test_a_dict_in_the_order_of_its_keys(self):
    spec = {'mouth': DISCRETE, 'arm': BODY}
    encoded = heads.encode_action(
      spec, {'mouth': jnp.asarray([3]), 'arm': jnp.asarray([[0.0, 1.0]])}
    )
    np.testing.assert_allclose(
      encoded, [[0, np.tanh(1), 0, 0, 0, 1, 0]], rtol=1e-6
    )
    self.assertEqual(heads.encoded_size(spec), 7)

  @parameterized.parameters(DISCRETE, SEVERAL, BODY)
  @pytest.mark.heavy
  def test_reads_what_policies_draw(self, spec):
    size = heads.input_size(spec)
    for lead in ((), (4,), (3, 4)):
      _, policy = run(
        lambda x: heads.make_head(spec)(x), jnp.zeros((*lead, size))
      )
      action = distributions.sample(policy, jax.random.key(0))
      encoded = heads.encode_action(spec, action)
      self.assertEqual(encoded.shape, (*lead, heads.encoded_size(spec)))

  @parameterized.named_parameters(
    ('unbounded', specs.Array((2,), np.float32), 'declare bounds'),
    ('from_1', specs.BoundedArray((2,), np.int32, 1, 3), 'count from 0'),
    ('nested', {'a': {'b': DISCRETE}}, r"\['b'\] inside of a dict"),
  )
  def test_refuses(self, spec, message):
    with self.assertRaisesRegex(ValueError, message):
      heads.encoded_size(spec)


if __name__ == '__main__':
  absltest.main()
