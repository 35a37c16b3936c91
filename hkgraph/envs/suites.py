"""What the adapters of other packages share. Imports no JAX."""

from collections.abc import Iterable, Mapping
import difflib
from typing import Any

from dm_env import specs
import numpy as np


def check_name(what: str, name: Any, known: Iterable[str]) -> None:
  """Raises `ValueError`, with near names, unless `name` is one of `known`."""
  known = list(known)
  if name in known:
    return
  raise ValueError(f'{what} {name!r}; {near_names(str(name), known)}')


def near_names(name: str, known: Iterable[str], most: int = 5) -> str:
  """A question with the names near to `name`, or a list of all.

  Upper and lower case are the same, and a name that holds what was given is
  near, however long it is.
  """
  known = sorted(known)
  lower = {k.lower(): k for k in known}
  near = difflib.get_close_matches(name.lower(), lower, most, 0.6)
  holding = [k for k in lower if len(name) > 2 and name.lower() in k]
  near = list(dict.fromkeys([*near, *holding]))[:most]
  if near:
    return f'did you mean {" or ".join(repr(lower[k]) for k in near)}?'
  return f'there are {", ".join(map(repr, known))}'


def array_spec(
  shape: tuple[int, ...], dtype: Any, low: Any, high: Any, name: str
) -> specs.Array:
  """The spec of arrays between two bounds that broadcast to `shape`.

  Bounds that do not broadcast, or that the dtype cannot hold, say nothing of
  these arrays and are left out.
  """
  shape, dtype = tuple(shape), np.dtype(dtype)
  low, high = np.asarray(low), np.asarray(high)
  try:
    np.broadcast_to(low, shape), np.broadcast_to(high, shape)
  except ValueError:
    return specs.Array(shape, dtype, name)
  with np.errstate(over='ignore', invalid='ignore'):
    fits = (low.astype(dtype) <= low).all() & (high.astype(dtype) >= high).all()
  if dtype.kind != 'f' and not fits:
    return specs.Array(shape, dtype, name)
  return specs.BoundedArray(
    shape, dtype, low.astype(dtype), high.astype(dtype), name
  )


def map_spaces(function: Any, space: Any) -> Any:
  """`function` of a space; of each space in a dict of them, by key."""
  inner = getattr(space, 'spaces', None)
  if inner is None:
    return function(space)
  if not isinstance(inner, Mapping):
    raise ValueError(
      f'spaces must be arrays or dicts of them, got {type(space).__name__}'
    )
  return {key: map_spaces(function, value) for key, value in inner.items()}
