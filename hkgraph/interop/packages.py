"""Imports the libraries that adapters are for. Imports no JAX."""

import importlib
import types


def load(module: str, *, extra: str | None = None) -> types.ModuleType:
  """Imports a module of an optional package.

  Args:
    module: Its full name, such as `'flax.nnx'`.
    extra: The extra that installs it; None is the name of the package.

  Raises:
    ImportError: If the package is not installed; names the extra.
  """
  package = module.split('.')[0]
  try:
    importlib.import_module(package)
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name != package:
      raise
    extra = extra or package
    raise ImportError(
      f'this part of hkgraph needs the package {package}; install it with: '
      f"pip install 'hkgraph[{extra}]'",
      name=package,
    ) from error
