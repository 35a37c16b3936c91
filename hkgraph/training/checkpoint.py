"""Trees of arrays in one file that runs no code when it is read.

The file is an uncompressed `.npz`: one entry per leaf, named by its path, and
an entry `manifest.json` with the dtypes and whatever the caller adds. It holds
no pickle, so a file from a stranger is as safe as a picture.
"""

from collections.abc import Mapping
import io
import json
import os
import pathlib
from typing import Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import types

_FORMAT = 'hkgraph.checkpoint'
_VERSION = 1
_MANIFEST = 'manifest.json'
_KEY = 'key/'  # Before the name of a key's implementation.


def save(
  path: str | os.PathLike[str],
  tree: types.ArrayTree,
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Writes a tree of arrays.

  The file appears under its name only when it is complete: an interrupted
  `save` leaves what was there before.

  Args:
    path: The file; its folder must exist.
    tree: Arrays of any dtype of JAX, typed keys and Python numbers.
    metadata: Anything that JSON can hold, returned by `load`.

  Raises:
    ValueError: If two leaves have the same path, or a leaf is no array.
  """
  path = pathlib.Path(path)
  leaves = _named_leaves(tree)
  manifest = {
    'format': _FORMAT,
    'version': _VERSION,
    'leaves': {name: _describe(leaf) for name, leaf in leaves.items()},
    'metadata': dict(metadata or {}),
  }
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w') as archive:
    archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
    for name, leaf in leaves.items():
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as entry:
        np.lib.format.write_array(entry, _to_numpy(leaf), allow_pickle=False)
  write_atomically(path, buffer.getvalue())


def load(
  path: str | os.PathLike[str], like: types.ArrayTree
) -> tuple[types.ArrayTree, dict[str, Any]]:
  """Reads a tree of arrays into the structure of another.

  Args:
    path: What `save` wrote.
    like: A tree of the wanted structure; of its leaves (arrays, typed keys or
      `jax.ShapeDtypeStruct`) only shapes and dtypes matter.

  Returns:
    The tree, and the metadata.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If the file is damaged or was not written by `save`, or if
      structure, shapes or dtypes differ from `like`; it lists what differs.
  """
  manifest, arrays = _read(pathlib.Path(path), arrays=True)
  stored = manifest['leaves']
  wanted = {k: _describe(v) for k, v in _named_leaves(like).items()}
  differences = _differences(stored, wanted)
  if differences:
    raise ValueError(
      f'{path} does not fit the tree that is asked for:\n  * '
      + '\n  * '.join(differences)
    )
  leaves = [_from_numpy(arrays[k], wanted[k]) for k in wanted]
  return jax.tree.unflatten(jax.tree.structure(like), leaves), manifest[
    'metadata'
  ]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The metadata alone; raises as `load` does."""
  return _read(pathlib.Path(path), arrays=False)[0]['metadata']


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes a file that is either complete or not there."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _named_leaves(tree: Any) -> dict[str, Any]:
  leaves = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator='/') or 'value'
    if name in leaves:
      raise ValueError(
        f'two leaves have the path {name!r}; rename a key that holds a `/`'
      )
    leaves[name] = leaf
  return leaves


def _is_key(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> dict[str, Any]:
  """Shape and dtype of a leaf; those of a key are its implementation's."""
  if not hasattr(leaf, 'dtype'):
    leaf = np.asarray(leaf)
  if _is_key(leaf.dtype):
    dtype = f'{_KEY}{jax.random.key_impl(jnp.empty((), leaf.dtype))}'
  elif jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_:
    dtype = str(leaf.dtype)
  else:
    raise ValueError(f'a leaf must be an array of numbers, got {leaf!r}')
  return {'dtype': dtype, 'shape': list(leaf.shape)}


def _to_numpy(leaf: Any) -> np.ndarray:
  if hasattr(leaf, 'dtype') and _is_key(leaf.dtype):
    leaf = jax.random.key_data(leaf)
  array = np.asarray(leaf)
  # NumPy writes the dtypes that JAX adds (bfloat16, ...) as nameless bytes.
  return array.view(f'u{array.itemsize}') if array.dtype.kind == 'V' else array


def _from_numpy(array: np.ndarray, described: dict[str, Any]) -> jax.Array:
  name = described['dtype']
  if name.startswith(_KEY):
    return jax.random.wrap_key_data(array, impl=name.removeprefix(_KEY))
  return jnp.asarray(array.view(jnp.dtype(name)))


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
  missing = [f'{k} is missing in the file' for k in wanted if k not in stored]
  surplus = [f'{k} is in the file only' for k in stored if k not in wanted]
  unequal = [
    f'{k} is {_form(stored[k])} in the file, but {_form(wanted[k])} is asked '
    'for'
    for k in wanted
    if k in stored and stored[k] != wanted[k]
  ]
  return [*missing, *surplus, *unequal]


def _form(described: dict[str, Any]) -> str:
  return f'{described["dtype"]}{described["shape"]}'


def _read(
  path: pathlib.Path, *, arrays: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  data = path.read_bytes()
  try:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      manifest = json.loads(archive.read(_MANIFEST))
      names = manifest['leaves'] if arrays else ()
      # `read` checks an entry's sum before NumPy sees a byte of it.
      return _check_manifest(path, manifest), {
        name: np.lib.format.read_array(
          io.BytesIO(archive.read(f'{name}.npy')), allow_pickle=False
        )
        for name in names
      }
  except _UnknownVersion:
    raise
  except Exception as error:
    raise ValueError(
      f'{path} is damaged or no file of `checkpoint.save` ({error}); write it '
      'again'
    ) from error


class _UnknownVersion(ValueError):
  pass


def _check_manifest(path: pathlib.Path, manifest: Any) -> dict[str, Any]:
  if manifest['format'] != _FORMAT:
    raise ValueError(f'its format is {manifest["format"]!r}')
  if manifest['version'] != _VERSION:
    raise _UnknownVersion(
      f'{path} has version {manifest["version"]}, but this hkgraph reads '
      f'version {_VERSION}; install the hkgraph that wrote it'
    )
  return manifest
