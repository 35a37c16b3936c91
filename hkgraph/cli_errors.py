"""What the command line says of mistakes: one line, in terms of its options."""

from collections.abc import Collection, Iterator
import contextlib
import dataclasses
import difflib
import re
from typing import Any

HIDDEN = 'total_updates'  # A hyperparameter that is no option.
_UNRECOGNIZED = 'Unrecognized options: '


class UserError(Exception):
  """What the user can mend; told in one line, without a traceback."""


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
      text = name_options(text, type(options), **aliases)
    raise UserError(text) from error


def name_options(text: str, options: type, **aliases: str) -> str:
  """Writes `total_steps` as --total-steps, if a command has such an option."""
  known = option_names(options)

  def write(match: re.Match[str]) -> str:
    name, value = match.groups()
    option = _spell(aliases.get(name, name))
    if option not in known:
      return match.group()
    return f'{option} {value}' if value else option

  return re.sub(r"`(\w+)(?:='(\w+)')?`", write, text)


def option_names(options: type) -> list[str]:
  """The options of a command; fields without a default are positional."""
  names = []
  for field in dataclasses.fields(options):
    if dataclasses.is_dataclass(field.type):
      names += option_names(field.type)
    elif field.default is not dataclasses.MISSING and field.name != HIDDEN:
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


def condense(text: str, options: type) -> str:
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
    return _unrecognized(given, option_names(options))
  # A place that is no option of the user's is a name inside of the parser.
  message = re.sub(r'^Error parsing (?!--)\S+: ', '', message)
  return name_options(message, options)


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
