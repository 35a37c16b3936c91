"""Networks of other libraries inside ours, and ours inside theirs.

Each module adapts one library, which is imported when the module is first asked
for: `hg.interop.flax`, `equinox`, `nnx`, `nnx_ppo` and `nir`.
"""

import importlib
import typing

_ADAPTERS = ('equinox', 'flax', 'nir', 'nnx', 'nnx_ppo')


def __getattr__(name: str) -> typing.Any:
  if name not in _ADAPTERS:
    raise AttributeError(
      f'module {__name__!r} has no attribute {name!r}; it has '
      f'{", ".join(_ADAPTERS)}'
    )
  return importlib.import_module(f'{__name__}.{name}')


def __dir__() -> list[str]:
  return [*globals(), *_ADAPTERS]
