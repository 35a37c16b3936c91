"""Numbers of several heads: dicts with one entry per head.

A lone number stands for a single head everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
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
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(entries[k] for k in keys))
    leaves, structure = jax.tree.flatten(jax.vmap(fn)(*stacked))
    parts = zip(*(_unstack(leaf) for leaf in leaves), strict=True)
    results |= zip(keys, map(structure.unflatten, parts), strict=True)
  return {key: results[key] for key in entries}


def _alike(entries: Mapping[str, Any]) -> list[list[str]]:
  """Keys of entries that can be stacked, together."""
  kinds: list[tuple[Any, list[str]]] = []
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


def _unstack(x: types.Array) -> list[types.Array]:
  parts = jax.lax.split(x, [1] * x.shape[0], axis=0)
  return [jnp.squeeze(part, 0) for part in parts]


def total(tree: types.ArrayTree) -> types.Array:
  """Adds up the entries of a dict of arrays of one shape."""
  chex.assert_equal_shape(jax.tree.leaves(tree))
  return sum(jax.tree.leaves(tree))


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
