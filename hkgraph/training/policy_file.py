"""The file of an exported policy: a header in JSON, and functions, in a zip."""

from collections.abc import Mapping
import hashlib
import io
import json
import os
import pathlib
from typing import Any
import zipfile

from hkgraph.training import checkpoint

_FORMAT = 'hkgraph.policy'
_VERSION = 1
_HEADER = 'policy.json'


def write(
  path: str | os.PathLike[str],
  header: Mapping[str, Any],
  blobs: Mapping[str, bytes],
) -> dict[str, Any]:
  """Writes a file that is either complete or not there.

  Args:
    path: The file.
    header: Anything that JSON can hold.
    blobs: The functions by name.

  Returns:
    The header with format, version and checksums.

  Raises:
    ValueError: If JSON cannot hold the header.
  """
  sums = {
    name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()
  }
  header = {'format': _FORMAT, 'version': _VERSION, 'sha256': sums, **header}
  try:
    text = json.dumps(header, indent=1, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f'`metadata` must be JSON: {error}') from error
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w') as archive:
    for name, data in {_HEADER: text, **blobs}.items():
      # An entry made so has a fixed date: equal policies are equal files.
      archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
  checkpoint.write_atomically(path, buffer.getvalue())
  return json.loads(text)


def read(
  path: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, bytes]]:
  """Reads header and functions, once version and checksums are right.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it is damaged, something else, or of another version.
  """
  data = pathlib.Path(path).read_bytes()
  try:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      header = json.loads(archive.read(_HEADER))
      _check_version(path, header)
      return header, {
        name: _checked(name, archive.read(name), checksum)
        for name, checksum in header['sha256'].items()
      }
  except _UnknownVersion:
    raise
  except Exception as error:
    raise ValueError(
      f'{path} is damaged or no file of `hkgraph export` ({error}); write it '
      'again'
    ) from error


class _UnknownVersion(ValueError):
  pass


def _check_version(path: Any, header: Any) -> None:
  if header['format'] != _FORMAT:
    raise ValueError(f'its format is {header["format"]!r}')
  if header['version'] != _VERSION:
    raise _UnknownVersion(
      f'{path} has version {header["version"]}, but this hkgraph reads version '
      f'{_VERSION}; install the hkgraph that wrote it'
      + (f', {header["hkgraph"]}' if 'hkgraph' in header else '')
    )


def _checked(name: str, blob: bytes, checksum: str) -> bytes:
  if hashlib.sha256(blob).hexdigest() != checksum:
    raise ValueError(f'the checksum of {name!r} differs')
  return blob
