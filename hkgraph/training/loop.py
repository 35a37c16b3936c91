"""Trains an agent in environments that JAX can run."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
from typing import Any

import jax

from hkgraph.envs import protocol
from hkgraph.graph import spec as spec_lib
from hkgraph.learners import agent as agent_lib
from hkgraph.training import algorithms, evaluator, loggers, run_folder, setup


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """What a training leaves.

  Attributes:
    agent: The agent that was trained.
    learner_state: Its last good state.
    metrics: One row per update, as the loggers got it.
    steps: Environment steps that were made.
    evaluation: The final evaluation; None if there was none.
    interrupted: Whether Ctrl-C ended the training.
    run_dir: The run folder; None if there is none.
  """

  agent: agent_lib.Agent
  learner_state: agent_lib.LearnerState
  metrics: Sequence[Mapping[str, float]]
  steps: int
  evaluation: evaluator.Evaluation | None
  interrupted: bool
  run_dir: pathlib.Path | None


class NonFiniteError(FloatingPointError):
  """A training met, or made, numbers that are not finite.

  Attributes:
    result: The `TrainResult` with the last good state.
  """

  def __init__(self, message: str, result: TrainResult):
    super().__init__(message)
    self.result = result


def train(
  env: protocol.Environment | str,
  network: Any,
  config: setup.Config,
  *,
  total_steps: int,
  seed: int = 0,
  run_dir: str | os.PathLike[str] | None = None,
  eval_episodes: int = 100,
  normalize: bool = False,
  progress: bool | None = None,
  logger: loggers.Logger | None = None,
) -> TrainResult:
  """Trains an agent, saves it and evaluates it.

  Each update is one compiled call that acts and learns. There are as many
  updates as make up `total_steps`, the last one whole: 1000 steps at 300 per
  update are 1200. Ctrl-C ends the training after the update that runs; what
  was reached is saved and returned, without an evaluation. A second Ctrl-C
  raises `KeyboardInterrupt`.

  A run folder receives `config.json`, `metrics.jsonl`, `weights.npz`,
  `evaluation.json` and `learning_curve.png`, and `graph.json` and `graph.png`
  of a graph.

  Args:
    env: A single environment, or a name for `envs.make`.
    network: A network whose outputs the learner takes: `PolicyValue` for PPO,
      action values for PQN. Or a graph with the outputs that `policy_network`
      (and `value_KEY` for each key of a dict of rewards) or `q_network` ask for
      by default. Or the name of a usual network, one of
      `default_networks.KINDS`. For DreamerV3 the memory of its world model:
      'auto' for that of the paper, 'gru' for an `hk.GRU`, a graph, or what
      `make_dreamer` takes as `core`.
    config: Hyperparameters, a `PPOConfig`, `PQNConfig` or `DreamerConfig`, that
      say which learner it is; `total_updates` is set here.
    total_steps: Environment steps, all environments together; at least 1.
    seed: Decides everything that is random.
    run_dir: A folder that is empty or does not exist; None writes nothing.
    eval_episodes: Episodes of the deterministic evaluation; 0 for none.
    normalize: Whether the observations of a graph or a usual network are
      normalised.
    progress: Whether to show a bar; None shows it if rich is installed.
    logger: Gets one row of metrics per update; closed at the end.

  Returns:
    The result.

  Raises:
    FileExistsError: If `run_dir` is not empty.
    NonFiniteError: If an observation, a reward or the learner's state is not
      finite: a `FloatingPointError` that names what. The last good state is
      saved, and in its `result`.
  """
  algorithms.of(config)
  protocol.check_int('total_steps', total_steps)
  protocol.check_int('eval_episodes', eval_episodes, minimum=0)
  protocol.check_int('seed', seed, minimum=0)
  per_update = config.num_envs * config.num_steps
  num_updates = -(-total_steps // per_update)
  config = dataclasses.replace(config, total_updates=num_updates)
  description = run_folder.Description(
    environment=env if isinstance(env, str) else None,
    graph=network if isinstance(network, spec_lib.GraphSpec) else None,
    network=network if isinstance(network, str) else None,
    normalize=normalize,
    config=config,
    total_steps=total_steps,
    seed=seed,
  )
  if run_dir is not None:
    run_folder.check_free(run_dir)
  env, agent = setup.build(env, network, config, normalize=normalize)
  init_key, eval_key = jax.random.split(jax.random.key(seed))
  update, state = setup.make_update(agent, env, config, init_key)
  # Not before: a training that cannot begin leaves nothing.
  path = None if run_dir is None else run_folder.create(run_dir)
  if path:
    run_folder.write_description(path, description)
  sinks = _sinks(progress, logger, path, num_updates * per_update)
  with contextlib.ExitStack() as stack:
    for sink in sinks:
      stack.callback(sink.close)
    journal = loggers.Journal(sinks, per_update)
    interrupted = stack.enter_context(_catch_interrupt())
    learner_state = _run(update, state, num_updates, journal, interrupted)
  result = TrainResult(
    agent=agent,
    learner_state=learner_state,
    metrics=journal.rows,
    steps=len(journal.rows) * per_update,
    evaluation=None,
    interrupted=interrupted.is_set(),
    run_dir=path,
  )
  if path:
    _save(result, description)
  if journal.faults:
    raise NonFiniteError(_fault_message(journal, path), result)
  if eval_episodes and not result.interrupted:
    result = _evaluate(result, env, eval_key, eval_episodes)
  return result


def _run(
  update: setup.Update,
  state: Any,
  num_updates: int,
  journal: loggers.Journal,
  interrupted: threading.Event,
) -> agent_lib.LearnerState:
  """Updates; fetches the metrics of each update while the next one runs."""
  pending = None
  for _ in range(num_updates):
    state, metrics = update(state)
    if pending is not None:
      journal.write(pending)
    pending = metrics
    if interrupted.is_set() or journal.faults:
      break
  journal.write(pending)
  return state[0]


@contextlib.contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
  """Notes the first Ctrl-C, so that no update is cut in two."""
  event = threading.Event()
  default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
  if not default or threading.current_thread() is not threading.main_thread():
    yield event
    return

  def note(signum, frame):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    event.set()

  signal.signal(signal.SIGINT, note)
  try:
    yield event
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _sinks(
  progress: bool | None,
  logger: loggers.Logger | None,
  path: pathlib.Path | None,
  total_steps: int,
) -> list[loggers.Logger]:
  if progress is None:
    progress = loggers.can_show_progress()
  sinks = [] if logger is None else [logger]
  if progress:
    sinks.append(loggers.Progress(total_steps))
  if path:
    sinks.append(loggers.JsonLines(path / 'metrics.jsonl'))
  return sinks


def _save(result: TrainResult, description: run_folder.Description) -> None:
  graph = description.graph
  run_folder.save_weights(
    result.run_dir,
    result.learner_state.params,
    result.learner_state.statistics,
    {
      'graph': None if graph is None else graph.digest(),
      'steps': result.steps,
      'updates': int(result.learner_state.num_updates),
    },
  )
  run_folder.write_pictures(result.run_dir, description, result.metrics)


def _evaluate(
  result: TrainResult, env: protocol.Environment, key: jax.Array, episodes: int
) -> TrainResult:
  evaluate = evaluator.make_evaluator(result.agent, env, episodes=episodes)
  state = result.learner_state
  evaluation = evaluate(state.params, state.statistics, key)
  if result.run_dir:
    run_folder.write_evaluation(result.run_dir, evaluation)
  return dataclasses.replace(result, evaluation=evaluation)


def _fault_message(journal: loggers.Journal, path: pathlib.Path | None) -> str:
  saved = "in this error's `result`"
  if path:
    saved = f'saved in {str(path / "weights.npz")!r}'
  return (
    f'{", ".join(journal.faults)} held numbers that are not finite in update '
    f'{journal.fault_update}; the training stopped, and the last good state is '
    f'{saved}'
  )
