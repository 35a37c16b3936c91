"""Equinox modules as Haiku modules, and networks as Equinox modules.

In both directions the library that a module comes from initialises it. What a
host does to its own layers afterwards does not reach a network of ours: the
`set_weight_bias` of Jaxnasium, for one, touches `eqx.nn.Linear` and
`eqx.nn.Conv` alone, so that the weights stay as `network.init` drew them.
"""

from collections.abc import Callable, Hashable
import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.graph import validate
from hkgraph.interop import foreign, packages
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
    ValueError: In a call, if the output size cannot be inferred.
  """
  is_made = isinstance(factory, eqx.Module)
  if not callable(factory) or (
    is_made and not isinstance(factory, eqx.Partial)
  ):
    raise TypeError(f'`factory` must be a function of a key, got {factory!r}')
  host = _Host(factory, call, initial_carry, axis_name)
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
      ValueError: If the network has a carry, or the output size cannot be
        inferred.
    """
    if not isinstance(network, network_lib.Network):
      raise TypeError(
        '`network` must be a Network, such as `hg.transform` or '
        f'`hg.graph_network` gives, got {network!r}'
      )
    in_features = validate.integer('in_features', in_features, minimum=1)
    fresh, state = network.init(key, jnp.zeros((1, in_features)))
    _check_no_carry(state.carry)
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
    """
    return encoding.join(_outputs(self, x, key))[0]


def _outputs(module, x, key):
  state = types.NetworkState(carry={}, statistics=module.statistics)
  is_first = jnp.ones(1, bool)
  apply = module.network.apply
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


def _out_features(module, key) -> int:
  x = jax.ShapeDtypeStruct((module.in_features,), jnp.result_type(float))
  y = jax.eval_shape(functools.partial(_outputs, module), x, key)
  leaves = jax.tree.leaves(y)
  if not leaves or any(len(leaf.shape) != 2 for leaf in leaves):
    raise ValueError(
      'the output size of the network cannot be inferred: it must give one '
      f'array [B, F], or a dict of them, got {_describe(y)} for B = 1; the '
      'body ends before the heads, which the host adds'
    )
  return sum(leaf.shape[1] for leaf in leaves)


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


@dataclasses.dataclass(frozen=True)
class _Structure:
  """An Equinox module, and its state, without their arrays."""

  treedef: Any
  leaves: tuple[Any, ...]  # A name where there was an array.
  kinds: tuple[str, ...]
  has_state: bool
  is_recurrent: bool

  def tree(self, variables: foreign.Variables) -> Any:
    return jax.tree.unflatten(
      self.treedef,
      [
        leaf if kind == 'static' else getattr(variables, kind)[leaf]
        for leaf, kind in zip(self.leaves, self.kinds, strict=True)
      ],
    )


class _Host(foreign.Host):
  """An Equinox module as pure functions."""

  def __init__(self, factory, call, initial_carry, axis_name):
    self._factory = factory
    self._call = call
    self._initial_carry = initial_carry
    self._axis_name = axis_name
    name = getattr(factory, '__name__', None) or repr(factory)
    self.title = f'the Equinox module of {name}'

  def create(self, key, x):
    made = foreign.build(self._factory, x, 'key', key)
    pair = made if isinstance(made, tuple) else (made, None)
    if len(pair) != 2 or not callable(pair[0]):
      raise TypeError(
        '`factory` must make an eqx.Module, or a pair of one and an '
        f'eqx.nn.State, got {made!r}'
      )
    pair = _with_sane_averages(*pair)
    is_recurrent = self._initial_carry is not None or _is_cell(pair[0])
    return _take_apart(pair, is_recurrent)

  def initial_memory(self, structure, variables, x):
    if not structure.is_recurrent:
      return ()
    module, _ = structure.tree(variables)
    initial = self._initial_carry or _initial_of_cell
    return jax.vmap(lambda x: initial(module, x))(x)

  def call(self, structure, variables, memory, x, key, mask):
    module, state = structure.tree(variables)
    module = _with_inference(module, mask is None)
    run = self._runner(module)
    size = jax.tree.leaves(x)[0].shape[0]
    keys = jax.random.split(key, size)

    def one(memory, x, key, state):
      args = [memory] if structure.is_recurrent else []
      args += [x, state] if structure.has_state else [x]
      out = run(*args, key)
      out = out if len(args) > 1 else (out,)
      memory, out = (out[0], out[1:]) if structure.is_recurrent else ((), out)
      y, new = out if structure.has_state else (out[0], state)
      return memory, y, new

    memory, y, state = jax.vmap(
      one, (0, 0, 0, None), (0, 0, None), axis_name=self._axis_name
    )(memory, x, keys, state)
    variables, _ = _take_apart((module, state), structure.is_recurrent)
    return variables, memory, y

  def _runner(self, module):
    """`(*args, key) -> outputs`, as `args` are in `call`."""
    if self._call:
      return functools.partial(self._call, module)
    if _is_cell(module):
      return functools.partial(_run_cell, module)
    parameters = inspect.signature(module).parameters.values()
    takes_key = any(
      p.name == 'key' or p.kind == inspect.Parameter.VAR_KEYWORD
      for p in parameters
    )
    if takes_key:
      return lambda *args: module(*args[:-1], key=args[-1])
    return lambda *args: module(*args[:-1])


def _take_apart(pair, is_recurrent) -> tuple[foreign.Variables, _Structure]:
  """The arrays of a module and its state by name, and all the rest."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(pair)
  variables = {'params': {}, 'statistics': {}, 'static': {}}
  kept, kinds = [], []
  for path, leaf in leaves:
    kind = _kind(path, leaf)
    name = jax.tree_util.keystr(path[1:], simple=True, separator='.')
    name = f'state.{name}' if path[0].idx else name
    variables[kind][name] = leaf
    kept.append(leaf if kind == 'static' else name)
    kinds.append(kind)
  structure = _Structure(
    treedef=treedef,
    leaves=tuple(kept),
    kinds=tuple(kinds),
    has_state=pair[1] is not None,
    is_recurrent=is_recurrent,
  )
  return foreign.Variables(
    params=variables['params'], statistics=variables['statistics'], cache={}
  ), structure


def _kind(path, leaf) -> str:
  if not eqx.is_array(leaf):
    return 'static'
  trains = path[0].idx == 0 and eqx.is_inexact_array(leaf)
  return 'params' if trains else 'statistics'


def _with_inference(module, inference: bool):
  """Tells layers with a state, and no other ones, what they are run for."""

  def is_layer(node):
    return isinstance(node, eqx.nn.StatefulLayer) and hasattr(node, 'inference')

  def where(tree):
    nodes = jax.tree.leaves(tree, is_leaf=is_layer)
    return [node.inference for node in nodes if is_layer(node)]

  if not where(module):
    return module
  return eqx.tree_at(where, module, replace_fn=lambda _: inference)


def _with_sane_averages(module, state):
  """Lets an average that has seen nothing leave its input as it is."""

  def is_norm(node):
    return isinstance(node, eqx.nn.BatchNorm)

  for node in jax.tree.leaves(module, is_leaf=is_norm):
    # It begins as zeros, by which its inference would divide.
    if is_norm(node) and node.ema_state_index is not None:
      mean, variance = state.get(node.ema_state_index)
      averages = (jnp.zeros_like(mean), jnp.ones_like(variance))
      state = state.set(node.ema_state_index, averages)
  return module, state


def _is_cell(module) -> bool:
  return isinstance(module, eqx.nn.GRUCell | eqx.nn.LSTMCell)


def _initial_of_cell(cell, x):
  del x
  zeros = jnp.zeros(cell.hidden_size, cell.weight_hh.dtype)
  return (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros


def _run_cell(cell, memory, x, key):
  memory = cell(x, memory, key=key)
  y = memory[0] if isinstance(cell, eqx.nn.LSTMCell) else memory
  return memory, y
