"""The folder that a training leaves: everything to look at it and rebuild it.

config.json         environment, algorithm, hyperparameters, seed, versions
graph.json, .png    the wiring, and its picture
metrics.jsonl       one row per update
learning_curve.png
weights.npz         parameters and statistics
evaluation.json     the final evaluation
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax

import hkgraph
from hkgraph import types
from hkgraph.envs import protocol, wrappers
from hkgraph.graph import spec as spec_lib
from hkgraph.learners import agent as agent_lib
from hkgraph.training import (
  actor,
  algorithms,
  checkpoint,
  evaluator,
  loggers,
  setup,
)

_PACKAGES = ('jax', 'dm-haiku', 'optax', 'rlax', 'distrax')


@dataclasses.dataclass(frozen=True)
class Description:
  """What was trained, as `config.json` and `graph.json` hold it.

  Attributes:
    environment: Name of the environment; None if it was made by hand.
    graph: The graph; None if the network is another one, or if the graph holds
      functions without a public name.
    normalize: Whether the observations are normalised.
    config: Hyperparameters; their class is the algorithm.
    total_steps: Environment steps that were asked for.
    seed: Of the training.
    network: Name of a usual network, one of `default_networks.KINDS`; None if
      the network is another one.
  """

  environment: str | None
  graph: spec_lib.GraphSpec | None
  normalize: bool
  config: setup.Config
  total_steps: int
  seed: int
  network: str | None = None


def check_free(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns a path at which a run folder can be made.

  Raises:
    FileExistsError: If there is a file, or a folder that holds anything.
  """
  path = pathlib.Path(path)
  if path.exists() and not (path.is_dir() and not any(path.iterdir())):
    raise FileExistsError(
      f'run folder {str(path)!r} exists and is not empty; give another '
      '`run_dir`, or remove it first'
    )
  return path


def create(path: str | os.PathLike[str]) -> pathlib.Path:
  """Makes the folder, and all folders above it; raises as `check_free`."""
  path = check_free(path)
  path.mkdir(parents=True, exist_ok=True)
  return path


def write_description(path: pathlib.Path, description: Description) -> None:
  """Writes `config.json`, and `graph.json` if the graph can be written."""
  if description.graph is not None:
    # JSON has no name for a function that is not public.
    with contextlib.suppress(ValueError):
      (path / 'graph.json').write_text(description.graph.to_json())
  document = {
    'environment': description.environment,
    'network': description.network,
    'normalize': description.normalize,
    'total_steps': description.total_steps,
    'seed': description.seed,
    'algorithm': algorithms.of(description.config).name,
    'config': dataclasses.asdict(description.config),
    'versions': _versions(),
  }
  text = loggers.dumps(document, indent=2)
  (path / 'config.json').write_text(text + '\n')


def read_description(path: str | os.PathLike[str]) -> Description:
  """Reads what `write_description` wrote.

  Raises:
    FileNotFoundError: If `path` is no run folder.
    ValueError: If a file in it is damaged.
  """
  path = pathlib.Path(path)
  file = path / 'config.json'
  if not file.is_file():
    raise FileNotFoundError(
      f'no run in {str(path)!r}: a run folder holds `config.json`, as '
      '`hkgraph train` writes it'
    )
  graph = _read_graph(path / 'graph.json')
  try:
    document = json.loads(file.read_text())
    # Folders of version 0.1.0 are all of PPO, and of no usual network.
    document = {'algorithm': 'ppo', 'network': None} | document
    for name in ('environment', 'network'):
      if not isinstance(document[name], str | None):
        raise ValueError(f'`{name}` must be a name, got {document[name]!r}')
    algorithm = algorithms.ALGORITHMS[document['algorithm']]
    return Description(
      environment=document['environment'],
      graph=graph,
      normalize=document['normalize'],
      config=algorithm.config(**document['config']),
      total_steps=document['total_steps'],
      seed=document['seed'],
      network=document['network'],
    )
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{file} is damaged: {error!r}') from error


def _read_graph(file: pathlib.Path) -> spec_lib.GraphSpec | None:
  if not file.is_file():
    return None
  try:
    return spec_lib.GraphSpec.from_json(file.read_text())
  except ValueError as error:
    raise ValueError(f'{file} is damaged: {error!r}') from error


def save_weights(
  path: pathlib.Path,
  params: types.ArrayTree,
  statistics: types.ArrayTree,
  metadata: Mapping[str, Any],
) -> None:
  """Writes `weights.npz`."""
  tree = {'params': params, 'statistics': statistics}
  checkpoint.save(path / 'weights.npz', tree, metadata)


def load_weights(
  path: str | os.PathLike[str],
  params: types.ArrayTree,
  statistics: types.ArrayTree,
) -> tuple[types.ArrayTree, types.ArrayTree]:
  """Reads `weights.npz` into the structure of what is given."""
  like = {'params': params, 'statistics': statistics}
  tree, _ = checkpoint.load(pathlib.Path(path) / 'weights.npz', like)
  return tree['params'], tree['statistics']


def write_evaluation(
  path: pathlib.Path, evaluation: evaluator.Evaluation
) -> None:
  """Writes `evaluation.json`."""
  text = loggers.dumps(evaluation.to_dict())
  (path / 'evaluation.json').write_text(text + '\n')


def write_pictures(
  path: pathlib.Path,
  description: Description,
  metrics: Sequence[Mapping[str, float]],
) -> None:
  """Draws graph and learning curve; does nothing without matplotlib."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    return
  from hkgraph import plotting

  if description.graph is not None:
    description.graph.draw(path / 'graph.png')
  if any('episode_return' in row for row in metrics):
    title = description.environment
    figure = plotting.learning_curve(metrics, title=title)
    figure.savefig(path / 'learning_curve.png')


def restore(
  run_dir: str | os.PathLike[str],
) -> tuple[protocol.Environment, agent_lib.Agent, Any, Any]:
  """Rebuilds what a run folder describes.

  Args:
    run_dir: A run folder of an environment by name, and a graph or a usual
      network.

  Returns:
    Environment, agent, parameters and statistics.

  Raises:
    FileNotFoundError: If `run_dir` is no run folder, or holds no weights.
    ValueError: If a file is damaged or does not fit the others, or if
      environment or network were made by hand.
  """
  description = read_description(run_dir)
  network = description.graph or description.network
  if description.environment is None or network is None:
    raise ValueError(
      f'{str(run_dir)!r} cannot be rebuilt: its environment or network was '
      'made by hand; make them and the agent again, and give the params and '
      'statistics of its `init` to '
      '`hkgraph.training.run_folder.load_weights(run_dir, params, statistics)`'
    )
  if not pathlib.Path(run_dir, 'weights.npz').is_file():
    raise FileNotFoundError(
      f'no weights in {str(run_dir)!r}: its training did not come to an end; '
      'train again, into another folder'
    )
  env, agent = setup.build(
    description.environment,
    network,
    description.config,
    normalize=description.normalize,
  )
  rows = actor.example_rows(wrappers.vectorize(env, 1))
  like = jax.eval_shape(agent.init, jax.random.key(0), rows)
  weights = load_weights(run_dir, like.params, like.statistics)
  return env, agent, *weights


def _versions() -> dict[str, str]:
  others = {name: importlib.metadata.version(name) for name in _PACKAGES}
  python = platform.python_version()
  return {'hkgraph': hkgraph.__version__, 'python': python} | others
