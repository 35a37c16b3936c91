"""A trained policy as one file that JAX alone can run.

The file is a zip: `policy.json` says what is in it, `initial` and `step` are
functions as `jax.export` writes them (StableHLO, weights included, for cpu,
cuda and tpu, of any batch size). It holds no pickle. To read it takes JAX and
`flatbuffers`, which `jax.export` asks for, and neither Haiku nor this package:

    import json
    import zipfile
    import jax
    from jax import export  # Needs `pip install flatbuffers`.

    with zipfile.ZipFile('policy.hkg') as file:
      header = json.loads(file.read('policy.json'))
      assert header['version'] == 1, 'made by a newer hkgraph'
      blobs = [bytearray(file.read(name)) for name in ('initial', 'step')]
    initial, step = (jax.jit(export.deserialize(b).call) for b in blobs)
    carry = initial(jax.numpy.arange(4, dtype='uint32'))  # Four seeds.

    # At each row; `is_first` says in which elements an episode begins:
    # action, carry = step(carry, observation, is_first)

The carry is a tuple of arrays, `[B, ...]` each, the random keys among them as
their raw data. Each batch element draws from a key of its own, so what it does
depends neither on the batch size nor on its neighbours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import hkgraph
from hkgraph import packages, types
from hkgraph.envs import protocol
from hkgraph.learners import agent as agent_lib
from hkgraph.training import algorithms, policy_file, run_folder

PLATFORMS = ('cpu', 'cuda', 'tpu')
_KNOWN_PLATFORMS = (*PLATFORMS, 'rocm')

Step = Callable[..., tuple[types.ArrayTree, types.ArrayTree]]
InitialCarry = Callable[[int, jax.Array], types.ArrayTree]


@dataclasses.dataclass(frozen=True)
class Policy:
  """What is in the file of a policy.

  Attributes:
    initial_carry: `seeds -> carry`, seeds of shape `[B]`, uint32.
    step: `(carry, observation, is_first) -> (action, carry)`, compiled:
      observation `[B, ...]`, is_first `[B]`, action `[B, ...]` in the units of
      the environment.
    header: `policy.json`: `observation` and `action` by path, and `carry`, with
      the shapes and dtypes of one batch element; `sampled`, `platforms`,
      `metadata`, and the versions of `jax` and `hkgraph` that wrote the file.
  """

  initial_carry: Callable[[jax.Array], tuple[jax.Array, ...]]
  step: Callable[..., tuple[types.ArrayTree, tuple[jax.Array, ...]]]
  header: Mapping[str, Any]


def export_policy(
  path: str | os.PathLike[str],
  step: Step,
  initial_carry: InitialCarry,
  params: types.ArrayTree,
  observation: types.ArrayTree,
  *,
  sampled: bool = False,
  platforms: tuple[str, ...] = PLATFORMS,
  metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Writes a policy, given as pure functions, to one file.

  Both functions are traced for a batch of one and mapped over the batch. The
  file appears under its name only when it is complete.

  Args:
    path: The file; its folder must exist, and it must not.
    step: `(params, carry, key, observation, is_first) -> (action, carry)` on
      one row: observation `[B, ...]`, is_first `[B]`, bool, and a typed key
      that is consumed. It resets the carry itself where `is_first` is set.
    initial_carry: `(batch_size, key) -> carry`, `[B, ...]` on every leaf.
    params: All that `step` reads besides: weights, statistics.
    observation: The shape and dtype of one observation, without a batch axis:
      a spec of `dm_env`, an array or `jax.ShapeDtypeStruct`, or a dict, list
      or tuple of them.
    sampled: What the header says of the actions; `step` decides.
    platforms: What the file runs on: some of cpu, cuda, tpu and rocm.
    metadata: Anything that JSON can hold, for the header.

  Returns:
    The header.

  Raises:
    FileExistsError: If there is something at `path`.
    FileNotFoundError: If there is no such folder.
    ImportError: If `flatbuffers` is not installed.
    TypeError: If the observation has leaves without shape and dtype.
    ValueError: If `platforms` are not of those; if a leaf of the carry or the
      action has no batch axis, `step` gives another carry than it takes, or
      the metadata is nothing that JSON can hold.
  """
  path = _check_free(path)
  packages.load('flatbuffers', extra='export')  # For `jax.export`.
  _check_platforms(platforms)
  _check_observation(observation)
  one = _OnePolicy(step, initial_carry, params)
  (batch,) = jax.export.symbolic_shape('batch')

  def batched(tree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), tree
    )

  seed = jax.ShapeDtypeStruct((), jnp.uint32)
  flag = jax.ShapeDtypeStruct((), jnp.bool_)
  shape = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), observation
  )
  carry = jax.eval_shape(one.initial, seed)
  one.check_step(shape)
  action, _ = jax.eval_shape(one.step, carry, shape, flag)
  with _without_source_paths():
    blobs = {
      'initial': _export(one.initial, platforms, batched(seed)),
      'step': _export(
        one.step, platforms, batched(carry), batched(shape), batched(flag)
      ),
    }
  header = {
    'sampled': bool(sampled),
    'platforms': list(platforms),
    'observation': _describe(shape),
    'action': _describe(action),
    'carry': list(_describe(carry).values()),
    'jax': jax.__version__,
    'hkgraph': hkgraph.__version__,
    'metadata': dict(metadata or {}),
  }
  return policy_file.write(path, header, blobs)


def export_agent(
  path: str | os.PathLike[str],
  agent: agent_lib.Agent,
  params: types.ArrayTree,
  statistics: types.ArrayTree,
  env: protocol.Environment,
  *,
  sampled: bool = False,
  metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Writes the policy of an agent, as `export_policy`.

  Args:
    path: The file.
    agent: An agent whose `init` has been called.
    params: Parameters of its network.
    statistics: Statistics of its network (a normalizer's).
    env: A single environment, of which the specs are read.
    sampled: Whether actions are samples of the policy instead of its mode.
    metadata: Anything that JSON can hold.

  Returns:
    The header.
  """

  def step(params, carry, key, observation, is_first):
    params, statistics = params
    first, mid = types.StepType.FIRST, types.StepType.MID
    timestep = types.TimeStep(
      step_type=jnp.where(is_first, jnp.int32(first), jnp.int32(mid)),
      reward=protocol.zeros_like_spec(env.reward_spec(), is_first.shape),
      discount=jnp.ones(is_first.shape, jnp.float32),
      observation=observation,
    )
    state = types.NetworkState(carry=carry, statistics=statistics)
    output, state = agent.act(
      params, state, key, timestep, deterministic=not sampled
    )
    return output.environment_action, state.carry

  return export_policy(
    path,
    step,
    agent.initial_carry,
    (params, statistics),
    env.observation_spec(),
    sampled=sampled,
    metadata=metadata,
  )


def export_run(
  run_dir: str | os.PathLike[str],
  path: str | os.PathLike[str],
  *,
  sampled: bool = False,
) -> dict[str, Any]:
  """Writes the policy that a run folder holds, as `export_policy`.

  Args:
    run_dir: A run folder of an environment by name, and a graph or a usual
      network.
    path: The file.
    sampled: Whether actions are samples of the policy instead of its mode.

  Returns:
    The header; its metadata are the environment, algorithm and seed.

  Raises:
    FileNotFoundError: If `run_dir` is no run folder, or holds no weights.
    ValueError: If it is damaged, or of an environment or a network that was
      made by hand.
  """
  path = _check_free(path)
  description = run_folder.read_description(run_dir)
  if not pathlib.Path(run_dir, 'weights.npz').is_file():
    raise FileNotFoundError(
      f'no weights in {str(run_dir)!r}: its training did not come to an end; '
      'train again, into another folder'
    )
  env, agent, params, statistics = run_folder.restore(run_dir)
  metadata = {
    'environment': description.environment,
    'algorithm': algorithms.of(description.config).name,
    'seed': description.seed,
  }
  return export_agent(
    path, agent, params, statistics, env, sampled=sampled, metadata=metadata
  )


def load_policy(path: str | os.PathLike[str]) -> Policy:
  """Reads the file of a policy; no code of the file's maker is imported.

  Args:
    path: What `export_policy` wrote.

  Returns:
    The policy.

  Raises:
    FileNotFoundError: If there is no such file.
    ImportError: If `flatbuffers` is not installed.
    IsADirectoryError: If it is a folder.
    ValueError: If the file is damaged, something else, or of a newer version,
      if this JAX cannot read what is in it, or if it is for other devices.
  """
  if pathlib.Path(path).is_dir():
    raise IsADirectoryError(
      f'{str(path)!r} is a folder, not the file of a policy; write one from a '
      f'run with: hkgraph export {path} policy.hkg'
    )
  header, blobs = policy_file.read(path)
  packages.load('flatbuffers', extra='export')  # For `jax.export`.
  exported = []
  try:
    for name in ('initial', 'step'):
      exported.append(jax.export.deserialize(bytearray(blobs[name])))
      exported[
        -1
      ].mlir_module()  # Else it would be read at the first call only.
  except Exception as error:
    raise ValueError(
      f'JAX {jax.__version__} cannot read {path}, which JAX {header["jax"]} '
      f'wrote ({error}); install that JAX, or one of the six months after it'
    ) from error
  _check_backend(path, exported[1].platforms)
  initial, step = (jax.jit(e.call) for e in exported)
  return Policy(initial_carry=initial, step=step, header=header)


class _OnePolicy:
  """A policy of one batch element: no batch axis, carry as a plain tuple."""

  def __init__(self, step: Step, initial_carry: InitialCarry, params: Any):
    self._step = step
    self._initial_carry = initial_carry
    self._params = params
    key = jax.random.key(0)
    carry = jax.eval_shape(lambda key: initial_carry(1, key), key)
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
      if leaf.shape[:1] != (1,):
        raise ValueError(
          'the carry must have the batch as leading axis on every leaf; for '
          f'batch size 1, carry{jax.tree_util.keystr(path)} has shape '
          f'{leaf.shape}'
        )
    self._carry = carry
    leaves, self._structure = jax.tree.flatten(carry)
    self._impls = [_key_impl(x.dtype) for x in [*leaves, key]]

  def check_step(self, observation):
    """Checks that the carry goes round, and that actions have the batch."""
    observation, is_first = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype),
      (observation, jax.ShapeDtypeStruct((), jnp.bool_)),
    )
    step = functools.partial(self._step, self._params)
    key = jax.random.key(0)
    action, carry = jax.eval_shape(
      step, self._carry, key, observation, is_first
    )
    given, wanted = (_describe(c) for c in (carry, self._carry))
    if given != wanted or jax.tree.structure(carry) != self._structure:
      raise ValueError(
        '`step` must give a carry like the one it takes, or a second step '
        f'cannot follow; for batch size 1 it takes {wanted} and gives {given}'
      )
    actions = jax.tree.leaves(action)
    if not actions or any(x.shape[:1] != (1,) for x in actions):
      raise ValueError(
        '`step` must give actions [B, ...]; for batch size 1 it gives '
        f'{_describe(action)}'
      )

  def initial(self, seed):
    key, carry_key = jax.random.split(jax.random.key(seed))
    return self._to_arrays(self._initial_carry(1, carry_key), key)

  def step(self, arrays, observation, is_first):
    carry, key = self._from_arrays(arrays)
    next_key, key = jax.random.split(key)
    observation, is_first = jax.tree.map(
      lambda x: x[None], (observation, is_first)
    )
    action, carry = self._step(self._params, carry, key, observation, is_first)
    action = jax.tree.map(lambda x: x[0], action)
    return action, self._to_arrays(carry, next_key)

  def _to_arrays(self, carry, key):
    leaves = [x[0] for x in jax.tree.leaves(carry)]
    return tuple(
      jax.random.key_data(x) if impl else x
      for x, impl in zip([*leaves, key], self._impls, strict=True)
    )

  def _from_arrays(self, arrays):
    *leaves, key = (
      jax.random.wrap_key_data(x, impl=impl) if impl else x
      for x, impl in zip(arrays, self._impls, strict=True)
    )
    leaves = [x[None] for x in leaves]
    return jax.tree.unflatten(self._structure, leaves), key


def _key_impl(dtype: Any) -> str | None:
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return None
  return str(jax.random.key_impl(jnp.empty((), dtype)))


def _export(function, platforms, *args) -> bytes:
  mapped = jax.jit(jax.vmap(function))
  return bytes(
    jax.export.export(mapped, platforms=platforms)(*args).serialize()
  )


@contextlib.contextmanager
def _without_source_paths() -> Iterator[None]:
  """Keeps paths of source files, which tell of a user's folders, out."""
  name = 'jax_traceback_in_locations_limit'
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _describe(tree: Any) -> dict[str, Any]:
  """Shapes and dtypes by path; the path of a bare array is empty."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): {
      'dtype': str(x.dtype),
      'shape': list(x.shape),
    }
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_free(path: str | os.PathLike[str]) -> pathlib.Path:
  path = pathlib.Path(path)
  if path.exists():
    raise FileExistsError(
      f'{str(path)!r} exists; give another name, or remove it first'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(
      f'{str(path)!r} cannot be written: there is no folder '
      f'{str(path.parent)!r}; make it first'
    )
  return path


def _check_platforms(platforms: Any) -> None:
  is_list = isinstance(platforms, tuple | list)
  if not is_list or not platforms or {*platforms} - {*_KNOWN_PLATFORMS}:
    raise ValueError(
      f'`platforms` must be a tuple of some of {_KNOWN_PLATFORMS}, got '
      f'{platforms!r}'
    )


def _check_backend(path: Any, platforms: Sequence[str]) -> None:
  backend = jax.default_backend()
  names = {'gpu': {'cuda', 'rocm'}}.get(backend, {backend})
  if names.isdisjoint(platforms):
    raise ValueError(
      f'{path} was exported for {", ".join(platforms)}, but here JAX runs on '
      f'{backend}; export it once more with `platforms=({backend!r},)`'
    )


def _check_observation(observation: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(observation):
    if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
      raise TypeError(
        '`observation` must be specs or arrays, such as '
        '`env.observation_spec()`, got '
        f'observation{jax.tree_util.keystr(path)} = {leaf!r}'
      )
