"""A module of another library as a Haiku module: what is kept where.

Its trainable leaves are Haiku parameters, one for each leaf. What it knows of
its data (running averages) is statistics: frozen in `apply` and `unroll`. What
it remembers of an element of the batch, and a key for the noise of each, is
carry.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import core
from hkgraph.interop import hosting
from hkgraph.modules import stateful


class ForeignModule(hk.Module):
  """A module of another library, to be called as any Haiku module is.

  Maps `[B, ...]` or, in a sequence, `[T, B, ...]`. It is an encoder or body as
  it is, a connection's transform by a factory (`transform=lambda: ...`), and a
  population by `population`.
  """

  def __init__(self, host: hosting.Host, name: str | None = None):
    super().__init__(name=name)
    self._host = host

  def __call__(self, x: Any) -> Any:
    """Maps a tree of arrays `[B, ...]` or `[T, B, ...]` to outputs.

    Raises:
      ValueError: If the axes in front are not those of the rows, or the output
        size cannot be inferred.
      TypeError: If there are parameters that no gradient can train.
    """
    rows = _rows()
    is_sequence = rows is not None and rows.is_sequence
    _check_lead(self.name, x, rows)
    row = jax.tree.map(lambda x: x[0], x) if is_sequence else x
    shapes, structure = hosting.inspect_host(self._host, row)
    _check_trainable(self._host.title, shapes.params)
    variables, latest = self._variables(shapes, row)
    initial = self._initial(structure, variables, shapes, row)
    draws = hosting.check_and_probe(
      self._host, structure, variables, initial, row
    )
    run = functools.partial(_run, self._host, structure, variables)
    if draws or jax.tree.leaves(initial):
      y, before = Carry(run, initial, draws)(x)
    else:
      y = _flat(lambda x: run({}, None, x)[1], 1 + is_sequence)(x)
      before = {}
    if latest and not shapes.cache and rows.frozen is not None:
      new = variables.replace(statistics=latest)
      self._learn(structure, new, before, x, rows.mask)
    return y

  @hk.transparent
  def _variables(self, shapes, row):
    """Variables of this pass, and the statistics to be updated."""

    @functools.cache
    def fresh():
      return self._host.create(hk.next_rng_key(), row)[0]

    def parameter(name, like):
      def init(shape, dtype):
        return jnp.asarray(fresh().params[name], dtype)

      return hk.get_parameter(name, like.shape, like.dtype, init)

    params = {name: parameter(name, x) for name, x in shapes.params.items()}
    frozen = latest = {}
    if shapes.statistics:
      statistics = _strong(fresh().statistics) if hk.running_init() else None
      frozen, latest = stateful.get_statistics('statistics', statistics)
    return hosting.Variables(params=params, statistics=frozen, cache={}), latest

  @hk.transparent
  def _initial(self, structure, variables, shapes, row):
    """What is remembered at the beginning of an episode, `[B, ...]`."""
    initial, cache = {}, {}
    if shapes.cache:
      cache = self._host.create(jax.random.key(0), row)[0].cache
      size = jax.tree.leaves(row)[0].shape[0]
      initial['cache'] = jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), cache
      )
    variables = variables.replace(cache=cache)
    memory = self._host.initial_memory(structure, variables, row)
    if jax.tree.leaves(memory):
      _check_memory(self._host.title, memory, row)
      initial['memory'] = memory
    return _strong(initial)

  @hk.transparent
  def _learn(self, structure, variables, before, x, mask):
    """Takes the rows under the mask into the statistics, all at once."""
    before, x = _merge_rows((before, x), mask.ndim)
    mask = mask.reshape(-1)
    # Rows under the mask first, then again in place of the others: these leave
    # no trace, even in a layer that knows no mask.
    count, row = jnp.sum(mask), jnp.arange(mask.size)
    order = jnp.argsort(~mask, stable=True)
    taken = order[row % jnp.maximum(count, 1)]
    memory, x = jax.tree.map(lambda x: x[taken], (before.get('memory', ()), x))
    key = before['keys'][0] if 'keys' in before else jax.random.key(0)
    once = row < count
    new, _, _ = self._host.call(structure, variables, memory, x, key, once)
    statistics = jax.tree.map(
      lambda new, old: jnp.where(count > 0, new, old).astype(old.dtype),
      new.statistics,
      variables.statistics,
    )
    stateful.set_statistics('statistics', statistics)


class Carry(stateful.StatefulModule):
  """What a foreign module remembers, and a key for the noise of each element.

  Noise `n` of an element is drawn from its key folded with `n`, as in
  `GaussianNoise`: replayed from a stored carry, any part of the batch meets the
  same noise, and fresh episodes have fresh noise.
  """

  def __init__(self, run: Callable[..., Any], initial: Any, draws: bool):
    """Creates the module.

    Args:
      run: `(kept, keys or None, x) -> (kept, y)` on `[N, ...]`.
      initial: What is kept, at the beginning of an episode. `[B, ...]`.
      draws: Whether there is noise.
    """
    super().__init__(name='carry')
    self._run = run
    self._initial = initial
    self._draws = draws

  def initial_carry(self, x: Any) -> Any:
    if not self._draws:
      return {'kept': self._initial}
    size = stateful.current_rows().batch_size
    return {
      'kept': self._initial,
      'key': stateful.initial_keys(size),
      'count': jnp.zeros(size, jnp.uint32),
    }

  def reset(self, carry: Any, x: Any) -> Any:
    is_first = stateful.current_rows().is_first
    kept = stateful.reset_carry(is_first, carry['kept'], self._initial)
    return dict(carry, kept=kept)

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    keys = _keys(carry['key'], carry['count']) if self._draws else None
    kept, y = self._run(carry['kept'], keys, x)
    before = self._before(carry['kept'], keys)
    return dict(self._advance(carry, 1), kept=kept), (y, before)

  def unroll(self, carry: Any, x: Any) -> tuple[Any, Any]:
    if self._initial:
      return super().unroll(carry, x)
    num_rows = jax.tree.leaves(x)[0].shape[0]
    row = jnp.arange(num_rows, dtype=jnp.uint32)[:, None]
    keys = jax.vmap(_keys, (None, 0))(carry['key'], carry['count'][None] + row)
    y = _flat(lambda args: self._run({}, *args)[1], 2)((keys, x))
    return self._advance(carry, num_rows), (y, self._before({}, keys))

  def _advance(self, carry, num_rows):
    if not self._draws:
      return carry
    # Wraps around after 2**32 rows.
    return dict(carry, count=carry['count'] + jnp.uint32(num_rows))

  def _before(self, kept, keys):
    """What the rows were run with, if statistics are to be learned of it."""
    if stateful.current_rows().frozen is None:
      return {}
    return kept if keys is None else dict(kept, keys=keys)


def population(make: Callable[[int], Callable[[Any], Any]]) -> Any:
  """Makes a kind of population that passes its input through any module.

  `graph.add_population('arm', 8, module=population(make))` then integrates what
  arrives, runs the module on it, and applies the activation.

  Args:
    make: `size -> module`, which maps `[..., size]` to `[..., size]`: foreign,
      a `StatefulModule`, or any Haiku module.

  Returns:
    A subclass of `hg.Population`, to be given as `module`.
  """
  if not callable(make):
    raise TypeError(f'`make` must be a function of a size, got {make!r}')

  class ForeignPopulation(core.Population):
    """A population whose rule is that of a module."""

    def __init__(self, size: int, activation: Any = None, name: Any = None):
      super().__init__(size=size, activation=activation, name=name)
      self.body = make(size)

    def __call__(self, inputs: Sequence[types.Array]) -> types.Array:
      x = self.body(self.integrate(inputs))
      return x if self.activation is None else self.activation(x)

  return ForeignPopulation


def _rows() -> stateful.Rows | None:
  """The rows of the pass; None outside of `hkgraph.transform`."""
  try:
    return stateful.current_rows()
  except ValueError:  # Whoever keeps state asks again, and tells.
    return None


def _check_lead(name: str, x: Any, rows: stateful.Rows | None) -> None:
  lead = (-1,) if rows is None else rows.is_first.shape
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]
  is_right = [s[: len(lead)] == lead or (rows is None and s) for s in shapes]
  if not shapes or not all(is_right):
    wanted = '[B, ...]' if rows is None else f'{[*lead]} of the rows in front'
    raise ValueError(
      f'`{name}` needs arrays with {wanted}, got {shapes}; it takes sequences '
      'as they are, without `hk.BatchApply`'
    )


def _check_trainable(title: str, params: dict[str, Any]) -> None:
  wrong = {
    name: str(x.dtype)
    for name, x in params.items()
    if not jnp.issubdtype(x.dtype, jnp.inexact)
  }
  if wrong:
    raise TypeError(
      f'{title} has parameters that no gradient can train, {wrong}; keep them '
      'as a constant or as another kind of variable'
    )


def _check_memory(title: str, memory: Any, row: Any) -> None:
  size = jax.tree.leaves(row)[0].shape[0]
  shapes = [jnp.shape(x) for x in jax.tree.leaves(memory)]
  if any(shape[:1] != (size,) for shape in shapes):
    raise ValueError(
      f'the carry of {title} must be [B, ...] on every leaf at the beginning, '
      f'got the shapes {shapes} for B = {size}'
    )


def _keys(key: chex.PRNGKey, count: types.Array) -> chex.PRNGKey:
  return jax.vmap(jax.random.fold_in)(key, count)


def _flat(fn: Callable[[Any], Any], num_axes: int) -> Callable[[Any], Any]:
  """Makes `fn` of `[N, ...]` take one leading axis or two."""
  if num_axes == 1:
    return fn

  def apply(x):
    lead = jax.tree.leaves(x)[0].shape[:2]
    y = fn(_merge_rows(x, 2))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), y)

  return apply


def _strong(tree: Any) -> Any:
  """The tree without weak types, for which a caller would compile twice."""

  def strong(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else x.astype(x.dtype)

  return jax.tree.map(strong, jax.tree.map(jnp.asarray, tree))


def _merge_rows(tree: Any, num_axes: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[num_axes:]), tree)


def _run(host, structure, variables, kept, keys, x):
  """Runs `N` rows; one by one where noise or a cache is the row's own."""
  memory, cache = kept.get('memory', ()), kept.get('cache', {})
  if keys is None and not cache:
    key = jax.random.key(0)
    _, memory, y = host.call(structure, variables, memory, x, key, None)
    return ({'memory': memory} if 'memory' in kept else {}), y
  if keys is None:
    keys = jax.random.split(jax.random.key(0), jax.tree.leaves(x)[0].shape[0])

  def one(memory, cache, key, x):
    memory, x = jax.tree.map(lambda x: x[None], (memory, x))
    new, memory, y = host.call(
      structure, variables.replace(cache=cache), memory, x, key, None
    )
    return jax.tree.map(lambda x: x[0], (memory, y)), new.cache

  (memory, y), cache = jax.vmap(one)(memory, cache, keys, x)
  new = {'memory': memory, 'cache': cache}
  return {name: new[name] for name in kept}, y
