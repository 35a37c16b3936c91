"""Pictures of trainings; needs matplotlib (extra `train`)."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
from typing import Any

import numpy as np

Rows = Sequence[Mapping[str, float]]

_COLORS = ('#2f6ea5', '#c8651b', '#3f8f5f', '#7b3fa1', '#b5367a', '#6f675a')
_INK = '#2b2b2b'
_FAINT = '#8a8a8a'
_GRID = '#e6e6e6'
_RETURN = 'episode_return'


def learning_curve(
  metrics: Rows | str | os.PathLike[str], *, title: str | None = None
) -> Any:
  """Draws the mean return of finished episodes against environment steps.

  The thin line is what was measured at each update; the thick one is its
  moving average, in which every episode weighs the same. A dict of rewards
  gives one curve per key. Nothing is shown on a screen.

  Args:
    metrics: Rows with `steps`, and with `episodes` and `episode_return` where
      episodes ended, as a training returns them; or a `metrics.jsonl`, or a
      run folder that holds one.
    title: Heading; None leaves it out.

  Returns:
    A `matplotlib.figure.Figure`; `figure.savefig(path)` writes it.

  Raises:
    FileNotFoundError: If there is no such file.
    ImportError: If matplotlib is missing; it names the extra to install.
    ValueError: If no row tells of a finished episode, or a line is no JSON.
  """
  if isinstance(metrics, str | os.PathLike):
    metrics = read_rows(metrics)
  rows = [row for row in metrics if _RETURN in row]
  if not rows:
    raise ValueError(
      f'no episode ended in the {len(metrics)} rows of metrics, so there is '
      'no return to draw; train for longer'
    )
  figure, axes = _make_axes(title)
  steps = np.array([row['steps'] for row in rows])
  weights = np.array([row['episodes'] for row in rows], float)
  curves = _curves(rows)
  ends = []
  for color, (name, values) in zip(_cycle(len(curves)), curves, strict=True):
    mean = smooth(values, weights)
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(steps, mean, color=color, linewidth=2.2)
    axes.plot(steps[-1], mean[-1], 'o', color=color, ms=5, clip_on=False)
    label = f'{name} {mean[-1]:.4g}'.strip().replace('-', '\u2212')
    ends.append((mean[-1], label, color))
  axes.set_xlim(0, steps[-1])
  _label_ends(axes, steps[-1], ends)
  return figure


def smooth(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Centred moving average, over about a twentieth of the rows.

  Args:
    values: Shape `[N]`.
    weights: Weight of each value, positive. Shape `[N]`.

  Returns:
    `sum(w v) / sum(w)` over the rows around each row; at the ends those on
    one side are missing. Shape `[N]`.
  """
  reach = len(values) // 40
  index = np.arange(len(values))
  low = np.maximum(index - reach, 0)
  high = np.minimum(index + reach + 1, len(values))
  total, weight = (
    np.concatenate([[0.0], np.cumsum(x)]) for x in (values * weights, weights)
  )
  return (total[high] - total[low]) / (weight[high] - weight[low])


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, float]]:
  """Reads a `metrics.jsonl`, or that of a run folder; `null` becomes NaN.

  A last line that a crash cut off is left out.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If another line is no JSON.
  """
  path = pathlib.Path(path)
  path = path / 'metrics.jsonl' if path.is_dir() else path
  lines = path.read_text(encoding='utf-8').splitlines()
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
    except ValueError as error:
      if number == len(lines):
        break
      raise ValueError(f'line {number} of {path} is no JSON: {error}') from None
    rows.append({k: np.nan if v is None else v for k, v in row.items()})
  return rows


def _curves(rows: Rows) -> list[tuple[str, np.ndarray]]:
  """Name and values of each curve: one per key of a dict, else one."""
  keys = [key for key in rows[0] if key.startswith(f'{_RETURN}/')]
  return [
    (key[len(_RETURN) + 1 :], np.array([row[key] for row in rows], float))
    for key in keys or [_RETURN]
  ]


def _cycle(count: int) -> list[str]:
  return [_COLORS[i % len(_COLORS)] for i in range(count)]


def _make_axes(title: str | None) -> tuple[Any, Any]:
  try:
    from matplotlib import figure as mpl_figure
    from matplotlib import ticker
  except ImportError as error:
    raise ImportError(
      "pictures need matplotlib: pip install 'hkgraph[train]'"
    ) from error
  figure = mpl_figure.Figure((7.2, 4.2), dpi=150, layout='constrained')
  axes = figure.add_subplot()
  axes.spines[['top', 'right', 'left']].set_visible(False)
  axes.spines['bottom'].set_color(_FAINT)
  axes.grid(axis='y', color=_GRID, linewidth=0.8)
  axes.set_axisbelow(True)
  axes.tick_params(length=0, colors=_FAINT, labelsize=9)
  axes.tick_params(axis='x', length=4, color=_FAINT)
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.set_xlabel('environment steps', color=_INK, fontsize=10)
  axes.set_ylabel('mean return of episodes', color=_INK, fontsize=10)
  if title:
    axes.set_title(title, loc='left', color=_INK, fontsize=12, pad=12)
  return figure, axes


def _label_ends(
  axes: Any, x: float, ends: Sequence[tuple[float, str, str]]
) -> None:
  """Writes beside the curves' ends, moved apart where they would overlap."""
  low, high = axes.get_ylim()
  gap = 0.055 * (high - low)
  last = -np.inf
  for value, text, color in sorted(ends):
    last = max(value, last + gap)
    axes.annotate(
      text,
      (x, last),
      xytext=(9, 0),
      textcoords='offset points',
      va='center',
      color=color,
      fontsize=10,
      fontweight='bold',
      annotation_clip=False,
      parse_math=False,
    )
