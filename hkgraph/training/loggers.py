"""Where the numbers of a training go while it runs."""

from collections.abc import Mapping, Sequence
import json
import math
import os
import time
from typing import Any, Protocol

import jax

Row = Mapping[str, float]
_FAULT = 'nonfinite/'  # Before the name of what a learner found at fault.


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


class Journal:
  """Turns the metrics of updates into rows, and hands them to loggers.

  Attributes:
    rows: All rows so far.
    faults: What held numbers that are not finite, the first time any did.
    fault_update: The update in which that was; None if there was none.
  """

  def __init__(self, loggers: Sequence[Logger], steps_per_update: int):
    """Begins at once, so that `seconds` count compiling too.

    Args:
      loggers: Get every row. They are not closed here.
      steps_per_update: Environment steps.
    """
    self.rows: list[Row] = []
    self.faults: list[str] = []
    self.fault_update: int | None = None
    self._loggers = loggers
    self._steps_per_update = steps_per_update
    self._begin = time.perf_counter()

  def write(self, metrics: Mapping[str, Any]) -> None:
    """Takes the metrics of the next update, and waits until they are there."""
    metrics = {k: v.item() for k, v in jax.device_get(metrics).items()}
    update = len(self.rows) + 1
    seconds = time.perf_counter() - self._begin
    row = {
      'update': update,
      'steps': update * self._steps_per_update,
      'seconds': seconds,
      'steps_per_second': self._speed(seconds),
    }
    row |= {k: v for k, v in metrics.items() if _says_something(k, metrics)}
    faults = [k.removeprefix(_FAULT) for k in row if k.startswith(_FAULT)]
    if faults and not self.faults:
      self.faults, self.fault_update = faults, update
    self.rows.append(row)
    for logger in self._loggers:
      logger.write(row)

  def _speed(self, seconds: float) -> float:
    """Steps per second since the first row, as compiling comes before it."""
    if not self.rows:
      return self._steps_per_update / seconds
    elapsed = seconds - self.rows[0]['seconds']
    return len(self.rows) * self._steps_per_update / elapsed


def _says_something(name: str, metrics: Mapping[str, float]) -> bool:
  if name.startswith('episode_'):
    return metrics.get('episodes', 0) > 0
  return not name.startswith(_FAULT) or metrics[name] > 0


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
