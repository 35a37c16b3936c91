"""The command line: `hkgraph train`, `eval`, `show`, `export` and `imagine`.

JAX is imported when there is something to compute, so that help is fast.
"""

from collections.abc import Collection, Iterator, Sequence
import contextlib
import dataclasses
import difflib
import io
import pathlib
import re
import sys
import time
from typing import Annotated, Any, Literal

import hkgraph
from hkgraph.training import algorithms, default_networks, tasks

_COMMANDS = {
  'train': 'NAME|--env ENV     train an agent, on a task or in an environment',
  'eval': 'RUN [options]       evaluate the agent of a run folder',
  'show': 'NAME|FILE|RUN       print a graph, and draw it with --output',
  'export': 'RUN FILE          write the policy to one file for JAX alone',
  'imagine': 'RUN [options]    draw what the world model of a run foresees',
}
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_SHOWN = {  # How help shows the values of these fields.
  'env': {'metavar': 'ENV', 'help_behavior_hint': '(required)'},
  'graph': {'metavar': 'NAME|FILE|RUN'},
  'output': {'metavar': 'FILE'},
  'run': {'metavar': 'RUN'},
  'run_dir': {'metavar': 'RUN'},
}
_HIDDEN = 'total_updates'  # A hyperparameter that is no option.
_UNRECOGNIZED = 'Unrecognized options: '


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
    algo: The learner, which decides what hyperparameters there are.
    seed: Decides everything that is random.
    run_dir: Folder for the results, new or empty; by default one in `runs`.
    eval_episodes: Episodes of the final evaluation; 0 for none.
    progress: Whether to show a progress bar.
  """

  config: Any
  total_steps: int = 500_000
  algo: Literal[*algorithms.ALGORITHMS] = 'ppo'
  seed: int = 0
  run_dir: pathlib.Path | None = None
  eval_episodes: int = 100
  progress: bool = True


@dataclasses.dataclass(frozen=True)
class TrainEnvironment(Train):
  """Options of `hkgraph train --env ENV`.

  Attributes:
    env: Name of the environment, such as cartpole or SUITE:NAME.
    network: By default, convolutions for images and else layers of neurons;
      gru and transformer remember.
    normalize: Whether observations are normalised.
  """

  env: str = ''
  network: Literal[*default_networks.KINDS] = 'auto'
  normalize: bool = False


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


@dataclasses.dataclass(frozen=True)
class Export:
  """Writes the policy of a run folder to one file that JAX alone can run.

  Attributes:
    run: The run folder.
    output: The file, such as policy.hkg; it must not exist.
    sampled: Whether actions are samples of the policy instead of its mode.
  """

  run: pathlib.Path
  output: pathlib.Path
  sampled: bool = False


@dataclasses.dataclass(frozen=True)
class Imagine:
  """Draws an episode beside what the world model of a DreamerV3 run foresees.

  Attributes:
    run: The run folder.
    output: The picture: `.png`, `.svg` or `.pdf`.
    context: Rows of the episode that the world model observes.
    horizon: Rows after these that it foresees from the actions alone; fewer if
      the episode ends.
    seed: Decides the episode, and what is imagined.
    sampled: Whether actions are samples of the policy instead of its mode.
  """

  run: pathlib.Path
  output: pathlib.Path = pathlib.Path('imagined.png')
  context: int = 5
  horizon: int = 15
  seed: int = 0
  sampled: bool = False


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
  elif command == 'export':
    return _export(_parse(Export, rest, 'hkgraph export'))
  elif command == 'imagine':
    return _imagine(_parse(Imagine, rest, 'hkgraph imagine'))
  else:
    raise _unknown('command', command, _COMMANDS)
  return 0


def _train(argv: list[str]) -> int:
  name = argv[0] if argv else ''
  algo, env = (_peek(argv, option) for option in ('--algo', '--env'))
  if name in ('-h', '--help'):
    print(_train_help())
    return 0
  if algo is not None and algo not in algorithms.ALGORITHMS:
    raise _unknown('algorithm', algo, algorithms.ALGORITHMS)
  if env is not None:
    return _train_environment(argv, algo or 'ppo')
  if name not in tasks.TASKS:
    raise _unknown('task', name, tasks.TASKS, '; or --env ENV')
  for example in ('--network gru', '--normalize'):
    option = example.split()[0]
    if _peek(argv, option) is not None:
      raise UserError(
        f'{option} goes only with --env, as in: '
        f'hkgraph train --env {name} {example}'
      )
  return _train_task(name, argv[1:], algo or 'ppo')


def _train_task(name: str, argv: list[str], algo: str) -> int:
  with _told_in_a_line():
    task = tasks.find(name, algo)
  default = _defaults(
    Train, task.config, algo=algo, total_steps=task.total_steps
  )
  options = _parse(type(default), argv, f'hkgraph train {name}', default)
  with _told_in_a_line(options):
    return _run_training(options, name, task.network(), task.normalize)


def _train_environment(argv: list[str], algo: str) -> int:
  default = _defaults(
    TrainEnvironment,
    algorithms.ALGORITHMS[algo].config(),
    algo=algo,
  )
  options = _parse(type(default), argv, 'hkgraph train --env ENV', default)
  with _told_in_a_line(options, name='env'):
    return _run_training(
      options, options.env, options.network, options.normalize
    )


def _run_training(
  options: Train, env: str, network: Any, normalize: bool
) -> int:
  from hkgraph.training import loop

  stem = env if options.algo == 'ppo' else f'{env}-{options.algo}'
  result = loop.train(
    env,
    network,
    _plain(options.config),
    total_steps=options.total_steps,
    seed=options.seed,
    run_dir=options.run_dir or _new_run_dir(stem, options.seed),
    eval_episodes=options.eval_episodes,
    normalize=normalize,
    progress=options.progress,
  )
  return _report(result)


def _peek(argv: list[str], option: str) -> str | None:
  """The value of an option that decides what the other options are."""
  for i, arg in enumerate(argv):
    name, equals, value = arg.partition('=')
    if name == option:
      return value if equals else ''.join(argv[i + 1 : i + 2])
  return None


def _defaults(options: type[Train], config: Any, **values: Any) -> Any:
  """The options with those of a config among them.

  `lambda` is spelled so, and what `train` sets by itself is no option.
  """
  tyro = _import_tyro()
  fields = _fields(config)
  told = {
    'lambda_': Annotated[float, tyro.conf.arg(name='lambda')],
    _HIDDEN: Annotated[int | None, tyro.conf.Suppress],
  }
  config_class = dataclasses.make_dataclass(
    type(config).__name__,
    [(name, kind, fields[name]) for name, kind in told.items()],
    bases=(type(config),),
    frozen=True,
  )
  whole = dataclasses.make_dataclass(
    options.__name__,
    [('config', config_class), *_shown(options)],
    bases=(options,),
    frozen=True,
  )
  return whole(config=config_class(**fields), **values)


def _plain(config: Any) -> Any:
  """The config of the learner in one that was made for options."""
  return type(config).__base__(**_fields(config))


def _fields(config: Any) -> dict[str, Any]:
  return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _shown(options: type) -> list[tuple[str, Any]]:
  """The fields of which help shows the values in words of its own."""
  tyro = _import_tyro()
  return [
    (f.name, Annotated[f.type, tyro.conf.arg(**_SHOWN[f.name])])
    for f in dataclasses.fields(options)
    if f.name in _SHOWN
  ]


def _eval(options: Eval) -> int:
  with _told_in_a_line(options):
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
    _check_folder(options.output)
    with _told_in_a_line(options, path='output'):
      spec.draw(options.output)
  print(spec.summary())
  if options.output:
    print(f'\npicture: {options.output}')
  return 0


def _export(options: Export) -> int:
  with _told_in_a_line():
    from hkgraph.training import export

    header = export.export_run(
      options.run, options.output, sampled=options.sampled
    )
  size = options.output.stat().st_size
  actions = 'sampled' if options.sampled else 'deterministic'
  print(f'policy       {options.output} ({size / 1000:.0f} kB, {actions})')
  print(f'runs on      {", ".join(header["platforms"])}, of any batch size')
  for kind in ('observation', 'action'):
    for path, array in header[kind].items():
      shape = ', '.join(['B', *map(str, array['shape'])])
      label = f'{path} ' if path else ''
      print(f'{kind:13}{label}{array["dtype"]}[{shape}]')
  return 0


def _check_folder(path: pathlib.Path) -> None:
  if not path.parent.is_dir():
    raise UserError(
      f'no folder {str(path.parent)!r} to write {path.name!r} in; make it first'
    )


def _imagine(options: Imagine) -> int:
  with _told_in_a_line(options, num_context='context'):
    from hkgraph import plotting

    plotting.check_picture(options.output)
    import jax

    from hkgraph.training import imagination, run_folder

    env, agent, params, statistics = run_folder.restore(options.run)
    episode = imagination.imagine(
      agent,
      env,
      params,
      statistics,
      jax.random.key(options.seed),
      num_context=options.context,
      horizon=options.horizon,
      deterministic=not options.sampled,
    )
    plotting.imagination(episode).savefig(options.output)
  observed = episode.num_context
  print(f'picture     {options.output}')
  print(
    f'rows        {observed} observed, {episode.num_rows - observed} foreseen'
  )
  errors = episode.errors()
  width = max(map(len, ('mean error', *errors)))
  print(f'{"mean error":{width}}  {"observed":>10}  {"foreseen":>10}')
  for name, (before, after) in errors.items():
    print(f'{name:{width}}  {before:10.4g}  {after:10.4g}')
  return 0


def _find_graph(name: str) -> Any:
  if name in tasks.TASKS:
    return tasks.TASKS[name].network()
  path = pathlib.Path(name)
  if path.is_dir():
    path = path / 'graph.json'
    if not path.is_file():
      raise UserError(
        f'{name!r} holds no `graph.json`; a run folder of a graph does'
      )
  if not path.is_file():
    also = f'; or a file or a run folder, but there is no path {name!r}'
    raise _unknown('graph', name, tasks.TASKS, also)
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
  name = re.sub(r'[^\w.-]+', '-', name)
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
  *first, last = algorithms.ALGORITHMS
  return '\n'.join(
    [
      'usage: hkgraph train NAME [--algo ALGO] [options]',
      '       hkgraph train --env ENV [--algo ALGO] [--network KIND] [options]',
      '',
      'Trains an agent and evaluates it. Tasks:',
      '',
      *(f'  {t.name:{width}}  {t.summary}' for t in tasks.TASKS.values()),
      '',
      'ENV is any environment by name: one of these, or SUITE:NAME, such as',
      'navix:Navix-Empty-5x5-v0, of a suite that is installed.',
      f'ALGO is {", ".join(first)} or {last}.',
      '',
      'The options, and their values for a task: hkgraph train NAME --help,',
      'and for an environment: hkgraph train --env ENV --help',
    ]
  )


def _parse(
  options: type, argv: list[str], prog: str, default: Any = None
) -> Any:
  """Parses into a dataclass; what tyro prints over an error is condensed."""
  tyro = _import_tyro()
  if default is None:
    options = dataclasses.make_dataclass(
      options.__name__,
      _shown(options),
      bases=(options,),
      namespace={'__doc__': options.__doc__},
      frozen=True,
    )
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
    message = _condense(complaint.getvalue(), options)
    raise UserError(message + hint) from None


def _import_tyro() -> Any:
  try:
    import tyro
  except ImportError:
    raise UserError(
      "the command line needs tyro: pip install 'hkgraph[train]'"
    ) from None
  return tyro


@contextlib.contextmanager
def _told_in_a_line(options: Any = None, **aliases: str) -> Iterator[None]:
  """Errors that are made for the user lose their traceback.

  Args:
    options: The options of the command, if their values are at fault.
    **aliases: Arguments of functions, and the options that give them.
  """
  try:
    yield
  except (ImportError, OSError, RuntimeError, ValueError) as error:
    text = str(error)
    if options is not None:
      text = _name_options(text, type(options), **aliases)
    raise UserError(text) from error


def _name_options(text: str, options: type, **aliases: str) -> str:
  """Writes `total_steps` as --total-steps, if a command has such an option."""
  known = _option_names(options)

  def write(match: re.Match[str]) -> str:
    name, value = match.groups()
    option = _spell(aliases.get(name, name))
    if option not in known:
      return match.group()
    return f'{option} {value}' if value else option

  return re.sub(r"`(\w+)(?:='(\w+)')?`", write, text)


def _option_names(options: type) -> list[str]:
  """The options of a command; fields without a default are positional."""
  names = []
  for field in dataclasses.fields(options):
    if dataclasses.is_dataclass(field.type):
      names += _option_names(field.type)
    elif field.default is not dataclasses.MISSING and field.name != _HIDDEN:
      names.append(_spell(field.name))
      if field.type is bool:
        names.append(_spell(f'no_{field.name}'))
  return names


def _unknown(
  kind: str, name: str, known: Collection[str], also: str = ''
) -> UserError:
  """An error that lists what is known, and what is allowed also."""
  given = f'unknown {kind} {name!r}' if name else f'no {kind} given'
  hint = _did_you_mean(difflib.get_close_matches(name, known))
  return UserError(f'{given}{hint} ({kind}s: {", ".join(sorted(known))}{also})')


def _condense(text: str, options: type) -> str:
  """The message in what tyro prints, with suggestions for unknown options."""
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
  message = ' '.join(paragraphs[0])
  if message.startswith(_UNRECOGNIZED):
    given = message.removeprefix(_UNRECOGNIZED).split(', ')
    return _unrecognized(given, _option_names(options))
  # A place that is no option of the user's is a name inside of the parser.
  message = re.sub(r'^Error parsing (?!--)\S+: ', '', message)
  return _name_options(message, options)


def _unrecognized(given: list[str], known: list[str]) -> str:
  wrong = [arg.partition('=')[0] for arg in given if arg.startswith('--')]
  if not wrong:
    return f'Unrecognized arguments: {", ".join(given)}'
  near = dict.fromkeys(option for arg in wrong for option in _near(arg, known))
  return f'{_UNRECOGNIZED}{", ".join(wrong)}{_did_you_mean(near)}'


def _near(option: str, known: list[str]) -> list[str]:
  """Options with these initials, such as --lr, or else the nearest one."""
  same = [name for name in known if _initials(name) == option[2:]]
  return same or difflib.get_close_matches(option, known, 1)


def _initials(option: str) -> str:
  return ''.join(word[0] for word in option[2:].split('-'))


def _did_you_mean(near: Collection[str]) -> str:
  return f'; did you mean {" or ".join(near)}?' if near else ''


def _spell(name: str) -> str:
  return '--' + name.rstrip('_').replace('_', '-')
