"""Numbers of several heads: dicts with one entry per head.

A lone number stands for a single head everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import types


def check_same_keys(**trees: Any) -> None:
  """Checks that the arguments are dicts of the same keys, or none is a dict.

  Args:
    **trees: What to compare, by the names to use in the error.

  Raises:
    ValueError: Names both arguments and their keys.
  """

  def describe(tree):
    return f'keys {sorted(tree)}' if isinstance(tree, Mapping) else 'no keys'

  (name, first), *others = trees.items()
  for other_name, other in others:
    if describe(first) != describe(other):
      raise ValueError(
        f'`{name}` has {describe(first)} but `{other_name}` has '
        f'{describe(other)}; they must be the same.'
      )


def map_heads(fn: Callable[..., Any], **trees: Any) -> Any:
  """Applies `fn` to the entries of dicts of the same keys, or to no dicts.

  Entries of like structure, shapes and dtypes are stacked and `fn` is vmapped
  over them: a program of many heads is no longer than that of one.

  Args:
    fn: Takes one entry of every tree, in the order given: arrays, or trees of
      them, a distribution say.
    **trees: Dicts of the same keys, or none is a dict.

  Returns:
    A dict of what `fn` returned, or just that.

  Raises:
    ValueError: If keys differ.
  """
  check_same_keys(**trees)
  first, *_ = trees.values()
  if not isinstance(first, Mapping):
    return fn(*trees.values())
  entries = {k: tuple(t[k] for t in trees.values()) for k in sorted(first)}
  results = {}
  for keys in _alike(entries):
    if len(keys) == 1:
      results[keys[0]] = fn(*entries[keys[0]])
      continue
    stacked = jax.tree.map(lambda *x: stack(x), *(entries[k] for k in keys))
    leaves, structure = jax.tree.flatten(jax.vmap(fn)(*stacked))
    parts = zip(*(unstack(leaf) for leaf in leaves), strict=True)
    results |= zip(keys, map(structure.unflatten, parts), strict=True)
  return {key: results[key] for key in entries}


def unzip(tree: Any) -> tuple[Any, ...]:
  """From a dict of tuples to a tuple of dicts; a lone tuple stays."""
  if not isinstance(tree, Mapping):
    return tree
  columns = zip(*tree.values(), strict=True)
  return tuple(dict(zip(tree, column, strict=True)) for column in columns)


def pack(
  tree: types.ArrayTree,
) -> tuple[list[types.Array], Callable[[list[types.Array]], types.ArrayTree]]:
  """Stacks the leaves of like shape and dtype.

  Args:
    tree: Arrays.

  Returns:
    An array of each kind, the leaves along axis 0, and a function that makes
    the tree of such arrays; their other axes may have become others.
  """
  leaves, structure = jax.tree.flatten(tree)
  kinds = _alike(dict(enumerate(leaves)))

  def unpack(arrays):
    parts = {}
    for places, array in zip(kinds, arrays, strict=True):
      parts |= zip(places, unstack(array), strict=True)
    return structure.unflatten([parts[i] for i in range(len(leaves))])

  return [stack([leaves[i] for i in places]) for places in kinds], unpack


def scan(
  step: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  xs: Any,
  last: Callable[[Any], Any],
) -> tuple[Any, Any]:
  """As `lax.scan`, but outputs of like shape and dtype are written as one.

  Args:
    step: `(carry, x) -> (carry, y)`.
    carry: What the first step is given.
    xs: Tree of what each step is given. Shape `[T, ...]`.
    last: `carry -> y`, one more output, of the carry that the last step left;
      alike in structure, shapes and dtypes.

  Returns:
    The last carry, and the outputs `[T + 1, ...]`.
  """

  def packed_step(carry, x):
    carry, y = step(carry, x)
    return carry, pack(y)[0]

  carry, ys = lax.scan(packed_step, carry, xs)
  end, unpack = pack(last(carry))
  # To the front with them: leaves that lie together stack for nothing.
  return carry, unpack(
    [
      jnp.concatenate([jnp.moveaxis(y, 1, 0), x[:, None]], axis=1)
      for y, x in zip(ys, end, strict=True)
    ]
  )


def _alike(entries: Mapping[Any, Any]) -> list[list[Any]]:
  """Keys of entries that can be stacked, together."""
  kinds: list[tuple[Any, list[Any]]] = []
  for key, entry in entries.items():
    leaves, structure = jax.tree.flatten(entry)
    kind = (
      structure,
      [(x.shape, x.dtype) if isinstance(x, jax.Array) else key for x in leaves],
    )
    # Compared, not hashed: the structure of a distribution has no hash.
    keys = next((keys for other, keys in kinds if other == kind), None)
    if keys is None:
      kinds.append((kind, [key]))
    else:
      keys.append(key)
  return [keys for _, keys in kinds]


def stack(xs: Sequence[types.Array]) -> types.Array:
  """Stacks arrays along a new axis 0; its derivative is `unstack`."""
  return lax.optimization_barrier(jnp.stack(xs))


def unstack(x: types.Array) -> list[types.Array]:
  """Cuts an array along axis 0.

  Behind a barrier: else XLA computes each part in a kernel of its own, with all
  that leads to it.
  """
  parts = lax.split(lax.optimization_barrier(x), [1] * x.shape[0], axis=0)
  return [jnp.squeeze(part, 0) for part in parts]


def total(tree: types.ArrayTree) -> types.Array:
  """Adds up the entries of a dict of arrays of one shape."""
  leaves = jax.tree.leaves(tree)
  chex.assert_equal_shape(leaves)
  return jnp.sum(jnp.stack(leaves), 0)


def report(
  name: str, tree: types.ArrayTree, reduce: Callable[..., types.Array]
) -> types.Metrics:
  """Names a number of all heads together, and of each if there are several.

  Args:
    name: Of the metric.
    tree: A scalar, or a dict of them.
    reduce: Makes one scalar of a vector of them, as `jnp.sum` does.

  Returns:
    `{name: reduced}`, for a dict also `{name/key: entry}`.
  """
  metrics = {name: reduce(jnp.stack(jax.tree.leaves(tree)))}
  if isinstance(tree, Mapping):
    metrics |= {f'{name}/{key}': x for key, x in tree.items()}
  return metrics
