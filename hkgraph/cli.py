"""The command line: `hkgraph train`, `hkgraph eval`, `hkgraph show`.

JAX is imported when there is something to compute, so that help is fast.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import difflib
import io
import pathlib
import re
import sys
import time
from typing import Any

import hkgraph
from hkgraph.learners import config as config_lib
from hkgraph.training import tasks

_COMMANDS = {
  'train': 'NAME [options]     train an agent on a built-in task',
  'eval': 'RUN [options]       evaluate the agent of a run folder',
  'show': 'NAME|FILE|RUN       print a graph, and draw it with --output',
}
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


class UserError(Exception):
  """What the user can mend; told in one line, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: The arguments; None takes those of the process.

  Returns:
    The exit code: 0; 1 if a training met numbers that are not finite; 2 for
    what the user can mend; 130 after Ctrl-C.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    return _run(argv)
  except UserError as error:
    print(f'hkgraph: {" ".join(str(error).split())}', file=sys.stderr)
    return _USAGE
  except FloatingPointError as error:
    print(f'hkgraph: {error}', file=sys.stderr)
    return _FAILED
  except KeyboardInterrupt:
    print('hkgraph: interrupted', file=sys.stderr)
    return _INTERRUPTED


@dataclasses.dataclass(frozen=True)
class Train:
  """Options of `hkgraph train NAME`.

  Attributes:
    config: Hyperparameters.
    total_steps: Environment steps, all environments together.
    seed: Decides everything that is random.
    run_dir: Folder for the results, new or empty; by default one in `runs`.
    eval_episodes: Episodes of the final evaluation; 0 for none.
    progress: Whether to show a progress bar.
  """

  config: config_lib.PPOConfig
  total_steps: int
  seed: int = 0
  run_dir: pathlib.Path | None = None
  eval_episodes: int = 100
  progress: bool = True


@dataclasses.dataclass(frozen=True)
class Eval:
  """Evaluates the agent of a run folder.

  Attributes:
    run: The run folder.
    episodes: How many episodes.
    seed: Decides where episodes begin, and samples.
    sampled: Whether actions are samples of the policy instead of its mode.
  """

  run: pathlib.Path
  episodes: int = 100
  seed: int = 0
  sampled: bool = False


@dataclasses.dataclass(frozen=True)
class Show:
  """Prints the table of a graph, and draws it.

  Attributes:
    graph: Name of a task, a JSON file of a graph, or a run folder.
    output: Where to draw it: `.png`, `.svg`, `.pdf`, `.dot` or `.gv`.
  """

  graph: str
  output: pathlib.Path | None = None


def _run(argv: list[str]) -> int:
  command, *rest = argv or ['']
  if command in ('-h', '--help'):
    print(_help())
  elif command == '--version':
    print(f'hkgraph {hkgraph.__version__}')
  elif command == 'train':
    return _train(rest)
  elif command == 'eval':
    return _eval(_parse(Eval, rest, 'hkgraph eval'))
  elif command == 'show':
    return _show(_parse(Show, rest, 'hkgraph show'))
  else:
    raise _unknown('command', command, _COMMANDS)
  return 0


def _train(argv: list[str]) -> int:
  name, *rest = argv or ['']
  if name in ('-h', '--help'):
    print(_train_help())
    return 0
  if name not in tasks.TASKS:
    raise _unknown('task', name, tasks.TASKS)
  task = tasks.TASKS[name]
  default = Train(config=task.config, total_steps=task.total_steps)
  options = _parse(Train, rest, f'hkgraph train {name}', default)
  with _told_in_a_line():
    from hkgraph.training import loop

    result = loop.train(
      name,
      task.graph(),
      options.config,
      total_steps=options.total_steps,
      seed=options.seed,
      run_dir=options.run_dir or _new_run_dir(name, options.seed),
      eval_episodes=options.eval_episodes,
      normalize=task.normalize,
      progress=options.progress,
    )
  return _report(result)


def _eval(options: Eval) -> int:
  with _told_in_a_line():
    import jax

    from hkgraph.training import evaluator, run_folder

    env, agent, params, statistics = run_folder.restore(options.run)
    evaluate = evaluator.make_evaluator(
      agent,
      env,
      episodes=options.episodes,
      deterministic=not options.sampled,
    )
    evaluation = evaluate(params, statistics, jax.random.key(options.seed))
  _print_evaluation(evaluation)
  return 0


def _show(options: Show) -> int:
  with _told_in_a_line():
    spec = _find_graph(options.graph)
    if options.output:
      spec.draw(options.output)
  print(spec.summary())
  if options.output:
    print(f'\npicture: {options.output}')
  return 0


def _find_graph(name: str) -> Any:
  if name in tasks.TASKS:
    return tasks.TASKS[name].graph()
  path = pathlib.Path(name)
  if path.is_dir():
    path = path / 'graph.json'
    if not path.is_file():
      raise UserError(
        f'{name!r} holds no `graph.json`; a run folder of a graph does'
      )
  if not path.is_file():
    raise _unknown('graph', name, tasks.TASKS)
  from hkgraph.graph import spec

  return spec.GraphSpec.from_json(path.read_text())


def _report(result: Any) -> int:
  print(f'steps       {result.steps:,}')
  if result.evaluation:
    _print_evaluation(result.evaluation)
  print(f'run folder  {result.run_dir}')
  for picture in sorted(result.run_dir.glob('*.png')):
    print(f'picture     {picture}')
  if not result.interrupted:
    return 0
  print(
    f'interrupted; evaluate what was reached: hkgraph eval {result.run_dir}'
  )
  return _INTERRUPTED


def _print_evaluation(evaluation: Any) -> None:
  actions = 'deterministic' if evaluation.deterministic else 'sampled'
  print(
    f'evaluation  mean return {evaluation.mean:.2f} +- '
    f'{evaluation.std:.2f} ({len(evaluation.returns)} {actions} episodes)'
  )
  for key, mean in evaluation.mean_by_key.items():
    print(f'            {key} {mean:.2f}')


def _new_run_dir(name: str, seed: int) -> pathlib.Path:
  stamp = time.strftime('%Y%m%d-%H%M%S')
  stem = f'{name}-seed{seed}-{stamp}'
  path = pathlib.Path('runs', stem)
  number = 2
  while path.exists():
    path = pathlib.Path('runs', f'{stem}-{number}')
    number += 1
  return path


def _help() -> str:
  lines = [f'  hkgraph {name} {text}' for name, text in _COMMANDS.items()]
  return '\n'.join(
    [
      'usage: hkgraph COMMAND ...',
      '',
      'Networks that are graphs of populations: train, evaluate, look at them.',
      '',
      *lines,
      '  hkgraph --version',
      '',
      '`--help` after any of these tells its options.',
    ]
  )


def _train_help() -> str:
  width = max(map(len, tasks.TASKS))
  return '\n'.join(
    [
      'usage: hkgraph train NAME [options]',
      '',
      'Trains an agent and evaluates it. Tasks:',
      '',
      *(f'  {t.name:{width}}  {t.summary}' for t in tasks.TASKS.values()),
      '',
      'The options, and their values for a task: hkgraph train NAME --help',
    ]
  )


def _parse(
  options: type, argv: list[str], prog: str, default: Any = None
) -> Any:
  """Parses into a dataclass; what tyro prints over an error is condensed."""
  try:
    import tyro
  except ImportError:
    raise UserError(
      "the command line needs tyro: pip install 'hkgraph[train]'"
    ) from None
  complaint = io.StringIO()
  config = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs)
  try:
    with contextlib.redirect_stderr(complaint):
      return tyro.cli(
        options, prog=prog, args=argv, default=default, config=config
      )
  except SystemExit as end:
    if not end.code:
      raise
    hint = f' (see {prog} --help)'
    raise UserError(_condense(complaint.getvalue()) + hint) from None


def _condense(text: str) -> str:
  """The message in what tyro prints, and the first suggestion in it."""
  # Paragraphs between rules, with a heading inside or in place of a frame.
  lines = [line.strip(' \u2502') for line in text.splitlines()]
  lines = [line for line in lines if line and line[0] not in '\u256d\u2570']
  paragraphs = [[]]
  for line in lines:
    if set(line) <= set('-\u2500'):
      paragraphs.append([])
    else:
      paragraphs[-1].append(line)
  if '\u256d' not in text and len(paragraphs) > 1:
    del paragraphs[0]
  # A place that is no option of the user's is a name inside of the parser.
  message = ' '.join(paragraphs[0])
  message = re.sub(r'^Error parsing (?!--)\S+: ', '', message)
  rest = [line for paragraph in paragraphs[1:] for line in paragraph]
  near = [line.split()[0] for line in rest if line.startswith('--')]
  if near and 'Perhaps you meant' in text:
    message += f'; did you mean {near[0]}'
  return message


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
  """Errors that are made for the user lose their traceback."""
  try:
    yield
  except (ImportError, OSError, RuntimeError, ValueError) as error:
    raise UserError(str(error)) from error


def _unknown(kind: str, name: str, known: Any) -> UserError:
  given = f'unknown {kind} {name!r}' if name else f'no {kind} given'
  near = difflib.get_close_matches(name, known)
  hint = f'; did you mean {" or ".join(near)}?' if near else ''
  return UserError(f'{given}{hint} ({kind}s: {", ".join(sorted(known))})')
