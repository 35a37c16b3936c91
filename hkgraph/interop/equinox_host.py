"""Equinox modules as pure functions of their variables."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import packages
from hkgraph.interop import hosting

eqx = packages.load('equinox')


@dataclasses.dataclass(frozen=True)
class _Structure:
  """An Equinox module, and its state, without their arrays."""

  treedef: Any
  leaves: tuple[Any, ...]  # A name where there was an array.
  kinds: tuple[str, ...]
  has_state: bool
  is_recurrent: bool

  def tree(self, variables: hosting.Variables) -> Any:
    return jax.tree.unflatten(
      self.treedef,
      [
        leaf if kind == 'static' else getattr(variables, kind)[leaf]
        for leaf, kind in zip(self.leaves, self.kinds, strict=True)
      ],
    )


class EquinoxHost(hosting.Host):
  """An Equinox module as pure functions."""

  def __init__(self, factory, call, initial_carry, axis_name):
    self._factory = factory
    self._call = call
    self._initial_carry = initial_carry
    self._axis_name = axis_name
    name = getattr(factory, '__name__', None) or repr(factory)
    self.title = f'the Equinox module of {name}'

  def create(self, key, x):
    made = hosting.build(self._factory, x, 'key', key)
    pair = made if isinstance(made, tuple) else (made, None)
    if len(pair) != 2 or not callable(pair[0]):
      raise TypeError(
        '`factory` must make an eqx.Module, or a pair of one and an '
        f'eqx.nn.State, got {made!r}'
      )
    self._check_axis(pair[0])
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

  def _check_axis(self, module):
    # Else it would be told only when the averages are to be learned.
    other = []
    for node in _norms(module):
      names = node.axis_name
      names = names if isinstance(names, list | tuple) else [names]
      other += [name for name in names if name != self._axis_name]
    if other:
      raise ValueError(
        f'a BatchNorm of {self.title} averages over the axis {other[0]!r}, but '
        f'the batch is {self._axis_name!r}; give `axis_name={other[0]!r}`'
      )

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


def _take_apart(pair, is_recurrent) -> tuple[hosting.Variables, _Structure]:
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
  return hosting.Variables(
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


def _norms(module) -> list[Any]:
  def is_norm(node):
    return isinstance(node, eqx.nn.BatchNorm)

  leaves = jax.tree.leaves(module, is_leaf=is_norm)
  return [node for node in leaves if is_norm(node)]


def _with_sane_averages(module, state):
  """Lets an average that has seen nothing leave its input as it is."""
  for node in _norms(module):
    # It begins as zeros, by which its inference would divide.
    if node.ema_state_index is not None and state is not None:
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
