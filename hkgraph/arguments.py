"""The options of the command line: how they are parsed, and told of.

They are fields of dataclasses, which tyro reads; what it or a library says of
a wrong value is told in one line, in the words of the command line.
"""

from collections.abc import Collection, Iterator
import contextlib
import dataclasses
import difflib
import io
import pathlib
import re
from typing import Annotated, Any, Literal

from hkgraph import packages
from hkgraph.training import algorithms, default_networks

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


def with_config(options: type[Train], config: Any, **values: Any) -> Any:
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


def plain(config: Any) -> Any:
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


def peek(argv: list[str], option: str) -> str | None:
  """The value of an option that decides what the other options are."""
  for i, arg in enumerate(argv):
    name, equals, value = arg.partition('=')
    if name == option:
      return value if equals else ''.join(argv[i + 1 : i + 2])
  return None


def parse(
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
  with told_in_a_line():
    return packages.load('tyro', extra='train')


@contextlib.contextmanager
def told_in_a_line(options: Any = None, **aliases: str) -> Iterator[None]:
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


def unknown(
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
