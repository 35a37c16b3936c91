"""Names of callables: which are public in JAX, and what they resolve to."""

from collections.abc import Callable
import functools
import importlib
from typing import Any

from hkgraph.graph import validate

# The first that knows a function names it. JAX is imported on the first use.
_MODULES = ('jax.numpy', 'jax.nn', 'jax.lax')


def resolve(activation: Any) -> Callable[..., Any] | None:
  """The callable that an `activation` argument stands for.

  Args:
    activation: None, a callable, or a public name such as `'jax.nn.swish'` or
      `'jax.numpy.tanh'`; nothing outside of `jax.numpy`, `jax.nn` and
      `jax.lax` has one.

  Raises:
    TypeError: If it is something else, or not hashable.
    ValueError: If nothing has that name.
  """
  if activation is None:
    return None
  if not isinstance(activation, str):
    wanted = "None, a callable or a name such as 'jax.nn.swish'"
    return validate.function('activation', activation, wanted)
  if activation not in _functions():
    raise ValueError(
      '`activation` must be the name of a function in jax.numpy, jax.nn or '
      f'jax.lax, got {activation!r}{_hint(activation)}'
    )
  return _functions()[activation]


def public_name(function: Any) -> str | None:
  """The name that `resolve` turns into this very function, if there is one.

  Of several names, the first of `jax.numpy`, `jax.nn` and `jax.lax` counts,
  and there the last in the alphabet (`swish` is also known as `silu`).
  """
  name = _names().get(id(function))
  return name if name and _functions()[name] is function else None


def qualified_name(function: Any) -> str:
  """The public name, or else where the callable was defined."""
  name = public_name(function)
  if name:
    return name
  if isinstance(function, functools.partial):
    return f'functools.partial({qualified_name(function.func)})'
  if not hasattr(function, '__qualname__'):
    function = type(function)
  return f'{function.__module__}.{function.__qualname__}'


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
  return {
    f'{module}.{name}': value
    for module in _MODULES
    for name, value in sorted(vars(importlib.import_module(module)).items())
    if not name.startswith('_')
    and callable(value)
    and not isinstance(value, type)
  }


@functools.cache
def _names() -> dict[int, str]:
  names = {}
  for module in reversed(_MODULES):
    for name, value in _functions().items():
      if name.rpartition('.')[0] == module:
        names[id(value)] = name
  return names


def _hint(name: str) -> str:
  last = name.rpartition('.')[2]
  same = [known for known in _functions() if known.endswith(f'.{last}')]
  if same:
    return f' (did you mean {same[0]!r}?)'
  return validate.did_you_mean(name, _functions())
