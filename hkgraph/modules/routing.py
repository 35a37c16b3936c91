"""Moving dicts of arrays about: between observations, modules and heads.

Each piece is a callable for `hk.Sequential`, has no parameters of its own, and
works on the last axis, so that `[B, ...]` and `[T, B, ...]` are the same to it.
To flatten the last `n` axes there is `hk.Flatten(preserve_dims=-n)`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dm_env import specs
import jax.numpy as jnp
import numpy as np

from hkgraph import types


class Filter:
  """Keeps some keys of a dict."""

  def __init__(self, *keys: str):
    """Makes a filter that keeps `keys`, in this order."""
    self._keys = keys

  def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sub-dict; raises a ValueError if a key is missing."""
    _check_has(inputs, self._keys, 'Filter')
    return {key: inputs[key] for key in self._keys}


class Map:
  """Applies a module to each entry of a dict."""

  def __init__(self, modules: Mapping[str, Callable] | Callable):
    """Makes a map.

    Args:
      modules: One callable per key of the inputs, or one that serves them all
        (with the same parameters).
    """
    self._modules = modules

  def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs by key; raises a ValueError if keys differ."""
    if not isinstance(self._modules, Mapping):
      _check_has(inputs, (), 'Map')
      return {key: self._modules(x) for key, x in inputs.items()}
    _check_has(inputs, self._modules, 'Map')
    if len(inputs) > len(self._modules):
      raise ValueError(
        f'`Map` has modules for {sorted(self._modules)}, got inputs '
        f'{sorted(inputs)}; drop the others with `Filter`.'
      )
    return {key: module(inputs[key]) for key, module in self._modules.items()}


class Parallel:
  """Applies several modules to the same inputs."""

  def __init__(self, modules: Mapping[str, Callable]):
    """Makes a fan-out to `modules`, by the keys of the outputs."""
    self._modules = dict(modules)

  def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns each module's output for these arguments, by key."""
    return {key: fn(*args, **kwargs) for key, fn in self._modules.items()}


class Concat:
  """Joins the entries of a dict along the last axis."""

  def __init__(self, keys: Sequence[str] | None = None):
    """Makes a join of `keys` in this order; of all, sorted, if None."""
    self._keys = keys

  def __call__(self, inputs: Mapping[str, types.Array]) -> types.Array:
    """Joins arrays `[..., n_key]` to one `[..., sum of n_key]`.

    Args:
      inputs: Arrays that agree in all axes but the last.

    Returns:
      An array.

    Raises:
      ValueError: If a key is missing, or the other axes do not agree.
    """
    keys = sorted(inputs) if self._keys is None else self._keys
    _check_has(inputs, keys, 'Concat')
    shapes = {key: jnp.shape(inputs[key]) for key in keys}
    leading = {shape[:-1] for shape in shapes.values()}
    if len(leading) != 1 or () in shapes.values():
      raise ValueError(
        '`Concat` needs one or more arrays that agree in all axes but the '
        f'last, got {shapes}.'
      )
    return jnp.concatenate([inputs[key] for key in keys], axis=-1)


class Merge:
  """Makes one dict of several."""

  def __call__(
    self, inputs: Mapping[str, Mapping[str, Any]] | Iterable[Mapping[str, Any]]
  ) -> dict[str, Any]:
    """Merges the entries of a sequence of dicts, or of a dict of dicts.

    Args:
      inputs: Dicts without a common key.

    Returns:
      A dict.

    Raises:
      ValueError: If a key occurs twice.
    """
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    merged = {}
    for part in parts:
      if clashing := sorted(merged.keys() & part.keys()):
        raise ValueError(f'`Merge` got more than one entry for {clashing}.')
      merged |= part
    return merged


class Split:
  """Cuts the last axis of an array."""

  def __init__(self, sizes: Sequence[int] | Mapping[str, int]):
    """Makes a split into pieces of `sizes`, in order; a dict names them."""
    self._sizes = sizes

  def __call__(
    self, inputs: types.Array
  ) -> list[types.Array] | dict[str, types.Array]:
    """Cuts an array `[..., sum of sizes]`.

    Args:
      inputs: Shape `[..., sum of sizes]`.

    Returns:
      Arrays `[..., size]`, in a list, or in a dict if the sizes are one.

    Raises:
      ValueError: If the sizes do not add up to the last axis.
    """
    named = isinstance(self._sizes, Mapping)
    sizes = list(self._sizes.values() if named else self._sizes)
    if not inputs.ndim or inputs.shape[-1] != sum(sizes):
      raise ValueError(
        f'`Split` into {self._sizes} needs inputs [..., {sum(sizes)}], got '
        f'{list(inputs.shape)}.'
      )
    pieces = jnp.split(inputs, np.cumsum(sizes)[:-1], axis=-1)
    return dict(zip(self._sizes, pieces, strict=True)) if named else pieces


class Scale:
  """Computes `factor * x + offset`, in floats."""

  def __init__(
    self,
    factor: float | Sequence[float] | np.ndarray = 1.0,
    offset: float | Sequence[float] | np.ndarray = 0.0,
  ):
    """Makes a fixed affine map.

    Args:
      factor: A number, or an array for the last axes of the inputs.
      offset: A number, or an array for the last axes of the inputs.
    """
    self._factor = np.asarray(factor)
    self._offset = np.asarray(offset)

  @classmethod
  def from_spec(cls, spec: specs.BoundedArray) -> 'Scale':
    """Maps the bounds of a spec to -1 and 1.

    Args:
      spec: A `BoundedArray` with finite bounds.

    Returns:
      A `Scale`.

    Raises:
      ValueError: If there are no finite bounds.
    """
    low = np.asarray(getattr(spec, 'minimum', -np.inf), float)
    high = np.asarray(getattr(spec, 'maximum', np.inf), float)
    # Environments write 'unbounded' as infinity, or as the largest float32.
    bounded = high - low < np.finfo(np.float32).max
    if not (np.all(bounded) and np.all(low < high)):
      raise ValueError(
        f'`Scale.from_spec` needs bounds, each maximum above its minimum, got '
        f'{spec}; use `Scale(factor, offset)`.'
      )
    return cls(2 / (high - low), -(high + low) / (high - low))

  def __call__(self, inputs: types.Array) -> types.Array:
    """Scales an array; integers become floats."""
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
      inputs = inputs.astype(float)
    return self._like(self._factor, inputs) * inputs + self._like(
      self._offset, inputs
    )

  def _like(self, x: np.ndarray, inputs: types.Array) -> types.Array:
    if x.ndim > inputs.ndim or x.shape != inputs.shape[inputs.ndim - x.ndim :]:
      raise ValueError(
        f'`Scale` by {list(x.shape)} needs inputs that end in these axes, got '
        f'{list(inputs.shape)}.'
      )
    return jnp.broadcast_to(jnp.asarray(x, inputs.dtype), inputs.shape)


def _check_has(inputs: Any, keys: Iterable[str], name: str) -> None:
  if not isinstance(inputs, Mapping):
    raise ValueError(f'`{name}` needs a dict, got {type(inputs).__name__}.')
  if missing := [key for key in keys if key not in inputs]:
    raise ValueError(
      f'`{name}` misses the keys {missing}; the inputs have {sorted(inputs)}.'
    )
