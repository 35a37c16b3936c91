"""Imports packages that only parts of hkgraph need. Imports no JAX."""

import importlib
import sys
import types

# Extras that install nothing on older Pythons.
_PYTHONS = {'navix': (3, 12), 'nnx-ppo': (3, 12)}


def load(module: str, *, extra: str | None = None) -> types.ModuleType:
  """Imports a module of an optional package.

  Args:
    module: Its full name, such as `'flax.nnx'`.
    extra: The extra that installs it; None is the name of the package.

  Raises:
    ImportError: If the package is not installed; names the extra, and the
      Python that it needs if this one is older.
  """
  package = module.split('.')[0]
  try:
    importlib.import_module(package)
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name != package:
      raise
    extra = extra or package
    remedy = f"install it with: pip install 'hkgraph[{extra}]'"
    needed, given = _PYTHONS.get(extra, (3, 11)), sys.version_info[:2]
    if given < needed:
      needed, given = ('.'.join(map(str, v)) for v in (needed, given))
      remedy = (
        f'it needs Python {needed} or later, and this is {given}: make an '
        f"environment of that, and there: pip install 'hkgraph[{extra}]'"
      )
    raise ImportError(
      f'this part of hkgraph needs the package {package}; {remedy}',
      name=package,
    ) from error
