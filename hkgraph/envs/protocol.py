"""What an environment is, and the checks and rows that all of them share.

An environment is a pair of pure functions over a state that holds everything,
its random key included. Specs are those of `dm_env` (or dicts of them) and
describe one environment: no batch axis.
"""

import numbers
from typing import Any, Protocol

from dm_env import specs
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from hkgraph import types

Spec = Any  # A `specs.Array`, or a dict of them.


class Environment(Protocol):
  """One environment. Both functions can be jitted, vmapped and scanned.

  `reset` returns a `FIRST` row, with reward 0 and discount 1. `step` returns a
  `MID` or `LAST` row; on a state whose row was `LAST` its result is undefined.
  Both return states and rows of the same structure, shapes and dtypes.
  """

  def reset(self, key: jax.Array) -> tuple[Any, types.TimeStep]:
    """Opens an episode, from a typed key that is consumed."""

  def step(
    self, state: Any, action: types.ArrayTree
  ) -> tuple[Any, types.TimeStep]:
    """Makes one transition."""

  def observation_spec(self) -> Spec:
    """The observation of one row."""

  def action_spec(self) -> Spec:
    """The action of one transition."""

  def reward_spec(self) -> Spec:
    """The reward of one transition; a dict if there are several."""

  def discount_spec(self) -> specs.BoundedArray:
    """The discount of one transition, a scalar in [0, 1]."""


class BatchedEnvironment(Environment, Protocol):
  """`num_envs` environments that begin their next episode by themselves.

  Rows, and the leaves of the state, have the leading axis `B = num_envs`; the
  specs do not. The action at a `LAST` row is ignored and the row that follows
  it is `FIRST`.
  """

  @property
  def num_envs(self) -> int:
    """The batch size `B`."""


def discount_spec() -> specs.BoundedArray:
  """The spec of a discount: a float32 scalar in [0, 1]."""
  return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')


def zeros_like_spec(spec: Spec, batch: tuple[int, ...] = ()) -> types.ArrayTree:
  """Zeros of shape `[*batch, *spec.shape]` for every leaf of a spec."""
  return jax.tree.map(lambda s: jnp.zeros((*batch, *s.shape), s.dtype), spec)


def restart(reward_spec: Spec, observation: types.ArrayTree) -> types.TimeStep:
  """The `FIRST` row of an episode: reward 0, discount 1."""
  return types.TimeStep(
    step_type=jnp.int32(types.StepType.FIRST),
    reward=zeros_like_spec(reward_spec),
    discount=jnp.float32(1),
    observation=observation,
  )


def transition(
  reward: types.ArrayTree,
  observation: types.ArrayTree,
  terminated: jax.Array,
  truncated: jax.Array | bool = False,
) -> types.TimeStep:
  """The row after a transition: `LAST` if it ended the episode, else `MID`.

  Args:
    reward: Reward of the transition.
    observation: What is seen after it.
    terminated: Whether it terminated the episode, a bool scalar.
    truncated: Whether it is the last one that the episode is granted.

  Returns:
    A `LAST` row with discount 0 if it terminated; a `LAST` row with discount 1
    if it was only truncated; else a `MID` row with discount 1.
  """
  mid, last = types.StepType.MID, types.StepType.LAST
  over = jnp.logical_or(terminated, truncated)
  return types.TimeStep(
    step_type=jnp.where(over, jnp.int32(last), jnp.int32(mid)),
    reward=reward,
    discount=jnp.where(terminated, jnp.float32(0), jnp.float32(1)),
    observation=observation,
  )


def canonicalise(tree: types.ArrayTree) -> types.ArrayTree:
  """Makes every leaf an array whose dtype is not weak; keys stay as they are.

  A weakly typed leaf has another signature than the strong one that replaces
  it one step later, and would compile every caller twice.
  """

  def strengthen(leaf):
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return leaf
    return lax.convert_element_type(leaf, leaf.dtype)

  return jax.tree.map(strengthen, tree)


def cast_like(tree: types.ArrayTree, like: types.ArrayTree) -> types.ArrayTree:
  """Gives the leaves of `tree` the dtypes of `like`, and no weak ones.

  For suites in which a step returns other dtypes than a reset does.
  """

  def cast(leaf, like):
    same = jnp.result_type(leaf) == like.dtype
    return leaf if same else jnp.asarray(leaf).astype(like.dtype)

  return canonicalise(jax.tree.map(cast, tree, like))


def check_environment(env: Any) -> None:
  """Checks that one environment is what `Environment` asks for.

  Rows are looked at as they are traced: nothing is run. An environment on the
  host is taken at its word.

  Raises:
    TypeError: If it lacks a method, or `reset` or `step` does not return a
      state and a `TimeStep`.
    ValueError: If structure or shapes of observations or rewards are not those
      of its specs.
  """
  methods = ('reset', 'step', 'observation_spec', 'action_spec', 'reward_spec')
  methods = (*methods, 'discount_spec')
  lacking = [m for m in methods if not callable(getattr(env, m, None))]
  if lacking:
    raise TypeError(
      f'an environment has the methods {", ".join(methods)}, as '
      f'`hkgraph.envs.protocol.Environment` describes them; {env!r} lacks '
      f'{", ".join(lacking)} (`hkgraph.envs.make(name)` makes known ones)'
    )
  if hasattr(env, 'vectorize') or hasattr(env, 'num_envs'):
    return
  result = jax.eval_shape(env.reset, jax.random.key(0))
  _check_rows('reset', result, env)
  action = zeros_like_spec(env.action_spec())
  _check_rows('step', jax.eval_shape(env.step, result[0], action), env)


def _check_rows(method: str, result: Any, env: Any) -> None:
  is_pair = isinstance(result, tuple) and len(result) == 2
  if not (is_pair and isinstance(result[1], types.TimeStep)):
    raise TypeError(
      f'`{method}` of {env!r} must return its state and a `hkgraph.TimeStep`, '
      f'got {result!r}'
    )
  for name in ('observation', 'reward'):
    wanted, given = (
      {path: tuple(leaf.shape) for path, leaf in _leaves_by_path(tree).items()}
      for tree in (getattr(env, f'{name}_spec')(), getattr(result[1], name))
    )
    if wanted != given:
      raise ValueError(
        f'`{method}` of {env!r} gives {name}s of the shapes '
        f'{_by_name(name, given)}, but its `{name}_spec()` says '
        f'{_by_name(name, wanted)}; make them agree'
      )


def _by_name(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
  return ', '.join(f'{name}{path} {shape}' for path, shape in shapes.items())


def check_int(name: str, value: Any, minimum: int = 1) -> int:
  """Returns `value` if it is an integer from `minimum` to 2^31 - 1.

  Raises:
    ValueError: If it is anything else; a bool is no integer.
  """
  is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_int or not minimum <= value < 2**31:
    raise ValueError(
      f'`{name}` must be an integer from {minimum} to 2^31 - 1, got {value!r}'
    )
  return int(value)


def check_key(key: Any) -> None:
  """Raises `TypeError` unless `key` is one typed key of `jax.random.key`."""
  dtype = getattr(key, 'dtype', type(key))
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key) or key.shape:
    raise TypeError(
      '`key` must be a single typed key as made by `jax.random.key(seed)`, got '
      f'{getattr(dtype, "name", dtype)} of shape {jnp.shape(key)}'
    )


def check_action(
  spec: Spec, action: types.ArrayTree, num_envs: int
) -> types.ArrayTree:
  """Returns a batch of actions in the spec's dtypes, or says what is wrong.

  Only what is known without running anything is looked at: see
  `check_action_range` for the values.

  Args:
    spec: The action spec of one environment.
    action: Tree of the spec's structure; shapes `[num_envs, *spec.shape]`.
    num_envs: The batch size.

  Raises:
    ValueError: If structure or shapes differ from what the spec asks for.
    TypeError: If floats are given for integers or the reverse.
  """
  wanted, given = _leaves_by_path(spec), _leaves_by_path(action)
  if wanted.keys() != given.keys():
    raise ValueError(
      f'`action` must have the leaves {sorted(wanted)} of the action spec, got '
      f'{sorted(given)}'
    )
  for name, leaf in given.items():
    _check_leaf(f'action{name}', wanted[name], leaf, num_envs)
  return jax.tree.map(lambda s, a: jnp.asarray(a, s.dtype), spec, action)


def check_action_range(
  spec: Spec, action: types.ArrayTree, ignored: jax.Array
) -> None:
  """Raises `ValueError` if a value lies outside the bounds of the spec.

  Does nothing where values are unknown because a caller is being traced.

  Args:
    spec: The action spec of one environment.
    action: A batch of actions that passed `check_action`.
    ignored: Rows whose action has no meaning. Shape `[num_envs]`, bool.
  """
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(action)):
    return
  if isinstance(ignored, jax.core.Tracer):
    return
  live = ~np.asarray(ignored)
  given = _leaves_by_path(action)
  for name, leaf_spec in _leaves_by_path(spec).items():
    values = np.asarray(given[name])[live]
    if isinstance(leaf_spec, specs.BoundedArray):
      inside = (values >= leaf_spec.minimum) & (values <= leaf_spec.maximum)
      if not inside.all():
        raise ValueError(
          f'`action{name}` must lie between {leaf_spec.minimum} and '
          f'{leaf_spec.maximum}, got {values[~inside]}; clip it, or use a '
          'policy head with these bounds'
        )


def _leaves_by_path(tree: Any) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _check_leaf(name: str, spec: specs.Array, leaf: Any, num_envs: int):
  shape, dtype = (num_envs, *spec.shape), jnp.result_type(leaf)
  if jnp.shape(leaf) != shape:
    raise ValueError(
      f'`{name}` must have shape {shape}, one row for each of {num_envs} '
      f'environments, got {jnp.shape(leaf)}'
    )
  kinds = (jnp.integer, jnp.floating, jnp.bool_)
  if not any(
    jnp.issubdtype(dtype, k) and jnp.issubdtype(spec.dtype, k) for k in kinds
  ):
    raise TypeError(
      f'`{name}` must hold numbers of the kind of {spec.dtype}, got {dtype}'
    )
