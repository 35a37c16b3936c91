"""Where the numbers of a training go while it runs."""

from collections.abc import Mapping
import json
import math
import os
from typing import Any, Protocol

Row = Mapping[str, float]


class Logger(Protocol):
  """Takes one row of metrics per update.

  Beside the metrics of learner and episodes, a row holds `update`, `steps`,
  `seconds` and `steps_per_second`. Metrics that say nothing are absent, such
  as the mean return where no episode ended.
  """

  def write(self, row: Row) -> None:
    """Takes the row of one update."""

  def close(self) -> None:
    """Called once, also when the training ends early."""


class JsonLines:
  """Writes each row as one line of strict JSON, and flushes it.

  What JSON has no number for (NaN, infinities) is written as `null`.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the file; what it held is lost."""
    self._file = open(path, 'w', encoding='utf-8')  # noqa: SIM115

  def write(self, row: Row) -> None:
    self._file.write(dumps(row) + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class Progress:
  """A bar in the terminal: mean return, steps per second, time left."""

  def __init__(self, total_steps: int, *, console: Any = None):
    """Starts the bar.

    Args:
      total_steps: Environment steps of the whole training.
      console: A `rich.console.Console`; None writes to standard error.

    Raises:
      ImportError: If rich is missing; it names the extra to install.
    """
    self._bar = _make_bar(console)
    self._task = self._bar.add_task('', total=total_steps, value='-', speed='-')
    self._bar.start()

  def write(self, row: Row) -> None:
    fields = {'speed': f'{row["steps_per_second"]:,.0f}'}
    if 'episode_return' in row:
      fields['value'] = f'{row["episode_return"]:.4g}'
    self._bar.update(self._task, completed=row['steps'], **fields)

  def close(self) -> None:
    self._bar.stop()


def can_show_progress() -> bool:
  """Whether the package that `Progress` needs is installed."""
  try:
    import rich.progress  # noqa: F401
  except ImportError:
    return False
  return True


def dumps(value: Any, *, indent: int | None = None) -> str:
  """Strict JSON: numbers that are not finite become `null`."""
  return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _make_bar(console: Any) -> Any:
  try:
    import rich.console
    import rich.progress as progress
  except ImportError as error:
    raise ImportError(
      "the progress bar needs rich: pip install 'hkgraph[train]', or turn it "
      'off with `progress=False`'
    ) from error
  return progress.Progress(
    progress.BarColumn(),
    progress.TaskProgressColumn(),
    progress.TextColumn('return [bold]{task.fields[value]}[/]'),
    progress.TextColumn('{task.fields[speed]} steps/s'),
    progress.TimeRemainingColumn(elapsed_when_finished=True),
    console=console or rich.console.Console(stderr=True),
  )
