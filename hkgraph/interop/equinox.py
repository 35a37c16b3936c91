"""Equinox modules as Haiku modules, and networks as Equinox modules.

In both directions the library that a module comes from initialises it. What a
host does to its own layers afterwards does not reach a network of ours: the
`set_weight_bias` of Jaxnasium, for one, touches `eqx.nn.Linear` and
`eqx.nn.Conv` alone, so that the weights stay as `network.init` drew them.
"""

from collections.abc import Callable, Hashable, Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import packages, types
from hkgraph.graph import validate
from hkgraph.interop import equinox_host, foreign, hosting
from hkgraph.modules import encoding

eqx = packages.load('equinox')


def from_equinox(
  factory: Callable[..., Any],
  *,
  call: Callable[..., Any] | None = None,
  initial_carry: Callable[[Any, Any], Any] | None = None,
  axis_name: Hashable = 'batch',
  name: str | None = None,
) -> foreign.ForeignModule:
  """Makes a Haiku module of an Equinox module, inside of `hg.transform`.

  The module reads one element, as is the custom of Equinox, and is mapped over
  the batch.

  * Every inexact array is a Haiku parameter with its path as name, for instance
    `layers.0.weight`; the factory draws its initial value.
  * Other arrays, and an `eqx.nn.State`, are statistics. `eqx.nn.BatchNorm` runs
    as in inference in `apply` and `unroll`; it learns from the masked rows of
    `update_statistics`, all of these at once. They weigh the same if the mask
    leaves out none, or a divisor of what it leaves; else some count once more.
  * An `eqx.nn.GRUCell` or `LSTMCell` is recurrent, and so is a module with
    `initial_carry`: it is called as `module(carry, x) -> (carry, y)`, and its
    carry is reset where an episode begins.
  * Where `key` matters for the output (dropout), each element of the batch
    keeps a key in the carry, so that a replay of any part of the batch meets
    the same noise. Call `eqx.nn.inference_mode` in the factory for no dropout.

  Args:
    factory: `(key) -> module`, or `(in_features, *, key) -> module` where it
      has an argument of that name: it is given the input's last axis. It may
      give `(module, state)`, as `eqx.nn.make_with_state(Module)` does.
    call: `(module, x, key) -> y` in place of `module(x)` or `module(x,
      key=key)`. A state goes in after `x` and comes out after `y`; a carry
      goes in before `x` and comes out before `y`.
    initial_carry: `(module, x) -> carry` for one element's `x`.
    axis_name: Of the batch, as told to `eqx.nn.BatchNorm`.
    name: Name of the module.

  Returns:
    A module that maps `[B, ...]` or, in a sequence, `[T, B, ...]`.

  Raises:
    TypeError: If `factory` cannot be called; in a call, if it makes no module.
    ValueError: In a call, if the output size cannot be inferred, or a
      `BatchNorm` has another `axis_name`.
  """
  is_made = isinstance(factory, eqx.Module)
  if not callable(factory) or (
    is_made and not isinstance(factory, eqx.Partial)
  ):
    raise TypeError(f'`factory` must be a function of a key, got {factory!r}')
  host = equinox_host.EquinoxHost(factory, call, initial_carry, axis_name)
  return foreign.ForeignModule(host, name or 'equinox_module')


class EquinoxNetwork(eqx.Module):
  """A network that maps a vector to a vector, as an Equinox module.

  `EquinoxNetwork.factory(network)` is the `(in_features, *, key) -> module`
  that an agent of Jaxnasium takes as `body`. The parameters are leaves, which
  a host trains; `module.params` is what `network.apply` takes. Statistics, such
  as those of a `Normalizer`, are allowed, but stay frozen at what they are when
  the module is made, as a host has no call to update them; they are kept in
  bits, which no optimizer touches.
  """

  params: Any
  in_features: int = eqx.field(static=True)
  out_features: int = eqx.field(static=True)
  network: network_lib.Network = eqx.field(static=True)
  _bits: Any
  _dtypes: Any = eqx.field(static=True)

  def __init__(
    self,
    network: network_lib.Network,
    in_features: int,
    *,
    key: types.Array,
    params: Any = None,
    statistics: Any = None,
  ):
    """Creates the module; `network.init` draws the parameters.

    Args:
      network: From `[B, in_features]` to one array `[B, F]`, or to a dict of
        them, which are joined in the order of their keys. A graph that reads
        one key takes the vector.
      in_features: Size of the input.
      key: For the initial parameters.
      params: Trained ones to begin with.
      statistics: Trained ones, which replace those of a fresh network.

    Raises:
      TypeError: If `network` is no `Network`.
      ValueError: If the network has a carry, what is given are not its
        parameters or statistics, or the output size cannot be inferred.
    """
    if not isinstance(network, network_lib.Network):
      raise TypeError(
        '`network` must be a Network, such as `hg.transform` or '
        f'`hg.graph_network` gives, got {network!r}'
      )
    in_features = validate.integer('in_features', in_features, minimum=1)
    fresh, state = network.init(key, jnp.zeros((1, in_features)))
    _check_no_carry(state.carry)
    _check_like('params', params, fresh)
    _check_like('statistics', statistics, state.statistics)
    if statistics is not None:
      state = state.replace(statistics=statistics)
    self.network = network
    self.in_features = in_features
    self.params = fresh if params is None else params
    self._bits = jax.tree.map(_to_bits, state.statistics)
    self._dtypes = tuple(x.dtype for x in jax.tree.leaves(state.statistics))
    self.out_features = _out_features(self, key)

  @classmethod
  def factory(cls, network: network_lib.Network, **kwargs: Any) -> Any:
    """The function `(in_features, *, key) -> EquinoxNetwork` of a network."""
    return eqx.Partial(cls, network, **kwargs)

  @property
  def statistics(self) -> Any:
    """The statistics, as `network.apply` takes them."""
    leaves, treedef = jax.tree.flatten(self._bits)
    pairs = zip(leaves, self._dtypes, strict=True)
    return jax.tree.unflatten(treedef, [_of_bits(*pair) for pair in pairs])

  def __call__(self, x: types.Array, *, key: Any = None) -> types.Array:
    """Maps `[in_features]` to `[out_features]`.

    Args:
      x: The input.
      key: What `hk.next_rng_key` draws from, if the network does.

    Raises:
      ValueError: If `x` has another shape.
    """
    if jnp.shape(x) != (self.in_features,):
      raise ValueError(
        f'`x` must have shape ({self.in_features},), got {jnp.shape(x)}; map '
        'the module over a batch with `jax.vmap`'
      )
    return encoding.join(_outputs(self, x, key))[0]


def _outputs(module, x, key):
  state = types.NetworkState(carry={}, statistics=module.statistics)
  is_first = jnp.ones(1, bool)
  apply = module.network.apply
  remedy = (
    'call the body with `key=`, or, where the host gives none (as Jaxnasium), '
    'take a network without noise'
  )
  with hosting.telling_of_noise(remedy):
    return apply(module.params, state, key, x[None], is_first)[0]


def _check_no_carry(carry) -> None:
  leaves = jax.tree.leaves(carry)
  if leaves:
    names = ', '.join(carry)
    raise ValueError(
      f'the network has a carry of {len(leaves)} arrays (of {names}), and an '
      'Equinox body has no place for one: it is called with an input alone. '
      'Take a graph without delays and modules without memory or noise; or '
      'train this one with `hg.make_ppo`, or as `interop.nnx.NNXNetwork`'
    )


def _check_like(argument, given, fresh) -> None:
  if given is None:
    return
  shapes = [
    {
      jax.tree_util.keystr(path, simple=True, separator='.'): jnp.shape(x)
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for tree in (fresh, given)
  ]
  if shapes[0] != shapes[1]:
    raise ValueError(
      f'`{argument}` must be those of the network, of shapes {shapes[0]}, got '
      f'{shapes[1]}'
    )


def _out_features(module, key) -> int:
  x = jax.ShapeDtypeStruct((module.in_features,), jnp.result_type(float))
  y = jax.eval_shape(functools.partial(_outputs, module), x, key)
  leaves = list(y.values()) if isinstance(y, Mapping) else [y]
  shapes = [getattr(leaf, 'shape', ()) for leaf in leaves]
  if not leaves or any(len(shape) != 2 for shape in shapes):
    raise ValueError(
      'the output size of the network cannot be inferred: it must give one '
      f'array [B, F], or a dict of them, got {_describe(y)} for B = 1; the '
      'body ends before the heads, which the host adds'
    )
  return sum(shape[1] for shape in shapes)


def _describe(y) -> str:
  shapes = [f'{x.dtype}{list(x.shape)}' for x in jax.tree.leaves(y)]
  return f'a {type(y).__name__} of {", ".join(shapes) or "no array"}'


def _to_bits(x):
  """Numbers that no optimizer takes for weights."""
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return x
  return lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')


def _of_bits(bits, dtype):
  if not jnp.issubdtype(dtype, jnp.inexact):
    return bits
  return lax.bitcast_convert_type(bits, dtype)
