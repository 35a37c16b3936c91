"""Pictures of trainings; needs matplotlib (extra `train`)."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import typing
from typing import Any

import numpy as np

if typing.TYPE_CHECKING:
  from hkgraph.training import imagination as imagination_lib

Rows = Sequence[Mapping[str, float]]

_COLORS = ('#2f6ea5', '#c8651b', '#3f8f5f', '#7b3fa1', '#b5367a', '#6f675a')
_INK = '#2b2b2b'
_FAINT = '#8a8a8a'
_GRID = '#e6e6e6'
_RETURN = 'episode_return'
_WIDTH, _MARGIN = 9.0, 1.6  # Of pictures of an episode, inches.
_MIN_ROWS = 12  # Their x-axis has room for so many rows, ...
_MAX_FRAMES = 24  # ... and they show so many images side by side, ...
_MAX_COMPONENTS = 6  # ... and so many numbers of an observation.


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


def imagination(
  episode: 'imagination_lib.Imagination', *, title: str | None = None
) -> Any:
  """Draws an episode as it was, and as a world model has it.

  Images are a row of frames that were observed, above one of the imagined
  frames; every k-th if there are many. Their brightness spans what was
  observed; channels other than one or three get a colour each. Of all vectors
  the six components are drawn that vary most. Below are reward and
  continuation of the transition into each row. A line marks the end of the
  rows that the model saw. Nothing is shown on a screen.

  Args:
    episode: What `training.imagination.imagine` returns.
    title: Heading; None leaves it out.

  Returns:
    A `matplotlib.figure.Figure`; `figure.savefig(path)` writes it.

  Raises:
    ImportError: If matplotlib is missing; it names the extra to install.
  """
  frames, curves = _frames(episode), _compared(episode)
  num_rows = max(episode.num_rows, _MIN_ROWS)
  stride = -(-episode.num_rows // _MAX_FRAMES)
  slot = (_WIDTH - _MARGIN) * stride / num_rows
  heights = [slot * x.shape[1] / x.shape[2] for _, x in frames]
  heights += [0.75] * len(curves)
  figure = _import_figure().Figure(
    (_WIDTH, sum(heights) + 0.1 * len(heights) + 1),
    dpi=150,
    layout='constrained',
  )
  panels = figure.subplots(
    len(heights), sharex=True, squeeze=False, height_ratios=heights
  )[:, 0]
  for axes, (label, pixels) in zip(panels, frames, strict=False):
    _style_panel(axes, label)
    _draw_frames(axes, pixels, stride, episode.num_context)
  for axes, (label, *pair) in zip(panels[len(frames) :], curves, strict=True):
    _style_panel(axes, label)
    _draw_pair(axes, *pair)
  _mark_context(panels, episode.num_context)
  figure.align_ylabels(panels)
  panels[-1].set_ylim(-0.1, 1.1)
  panels[-1].set_xlim(-0.5, num_rows - 0.5)
  panels[-1].set_xlabel('row of the episode', color=_INK, fontsize=10)
  figure.legend(
    handles=panels[-1].lines[:2],
    loc='outside upper right',
    ncols=2,
    frameon=False,
    fontsize=9,
    labelcolor=_INK,
  )
  if title:
    figure.suptitle(title, x=0.01, ha='left', color=_INK, fontsize=12)
  return figure


def check_picture(path: str | os.PathLike[str]) -> None:
  """Checks that a picture can be written, before anything is computed for it.

  Raises:
    ImportError: If matplotlib is missing.
    OSError: If there is no folder to write it in, or a folder in its place.
    ValueError: If the name's ending is that of no format.
  """
  path = pathlib.Path(path)
  formats = _import_figure().Figure().canvas.get_supported_filetypes()
  if path.suffix[1:].lower() not in formats:
    raise ValueError(
      f'the name of a picture must end in .png, .svg or .pdf, got {str(path)!r}'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(
      f'no folder {str(path.parent)!r} to write {path.name!r} in; make it first'
    )
  if path.is_dir():
    raise IsADirectoryError(
      f'{str(path)!r} is a folder; give the name of a file'
    )


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


def _import_figure() -> Any:
  try:
    from matplotlib import figure
  except ImportError as error:
    raise ImportError(
      "pictures need matplotlib: pip install 'hkgraph[train]'"
    ) from error
  return figure


def _make_axes(title: str | None) -> tuple[Any, Any]:
  figure = _import_figure().Figure((7.2, 4.2), dpi=150, layout='constrained')
  from matplotlib import ticker

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


def _frames(episode: Any) -> list[tuple[str, np.ndarray]]:
  """Label and pixels `[T, H, W, 3]` of each row of images."""
  frames = []
  for name, true in episode.observation.items():
    if true.ndim != 4:
      continue
    imagined = episode.imagined_observation[name]
    low, high = np.min(true), np.max(true)
    for kind, x in (('true', true), ('imagined', imagined)):
      x = np.clip((x - low) / max(high - low, 1e-6), 0, 1)
      frames.append((f'{name}\n{kind}', _to_colors(x)))
  return frames


def _to_colors(pixels: np.ndarray) -> np.ndarray:
  """RGB of `[..., C]`; the brightest of many channels gives its colour."""
  count = pixels.shape[-1]
  if count in (1, 3):
    return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))
  from matplotlib import colors

  hues = np.arange(count) / count
  palette = [colors.hsv_to_rgb((hue, 0.6, 1.0)) for hue in hues]
  return np.max(pixels[..., None] * np.array(palette), axis=-2)


def _compared(episode: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
  """Label, true and imagined values `[T]` of each curve."""
  components = []
  for name, true in episode.observation.items():
    if true.ndim != 2:
      continue
    imagined = episode.imagined_observation[name]
    for i in range(true.shape[1]):
      label = f'{name}[{i}]' if true.shape[1] > 1 else name
      components.append((label, true[:, i], imagined[:, i]))
  spread = [-np.std(true) for _, true, _ in components]
  chosen = sorted(np.argsort(spread, kind='stable')[:_MAX_COMPONENTS])
  return [
    *(components[i] for i in chosen),
    ('reward', episode.reward, episode.imagined_reward),
    ('continues', episode.discount, episode.imagined_discount),
  ]


def _style_panel(axes: Any, label: str) -> None:
  axes.spines[:].set_visible(False)
  axes.tick_params(length=0, colors=_FAINT, labelsize=8)
  axes.locator_params(axis='x', integer=True)
  axes.locator_params(axis='y', nbins=3)
  axes.set_ylabel(
    label,
    rotation=0,
    ha='right',
    va='center',
    color=_INK,
    fontsize=9,
    parse_math=False,
  )


def _draw_frames(
  axes: Any, pixels: np.ndarray, stride: int, num_context: int
) -> None:
  """Every frame is as wide as the rows that it stands for."""
  # The end of the context is where one frame ends.
  starts = range(num_context % stride, len(pixels) - stride + 1, stride)
  edges = np.array([*starts, starts[-1] + stride]) - 0.5
  axes.imshow(
    np.concatenate([pixels[i] for i in starts], axis=1),
    extent=(edges[0], edges[-1], 0, 1),
    aspect='auto',
    interpolation='nearest',
  )
  axes.vlines(edges[1:-1], 0, 1, color='white', linewidth=1.5)
  axes.set_yticks([])


def _draw_pair(axes: Any, true: np.ndarray, imagined: np.ndarray) -> None:
  axes.grid(axis='y', color=_GRID, linewidth=0.8)
  axes.set_axisbelow(True)
  for x, style, color, label in (
    (true, 'o-', _COLORS[0], 'true'),
    (imagined, 'o--', _COLORS[1], 'imagined'),
  ):
    axes.plot(x, style, color=color, linewidth=1.6, ms=2.5, label=label)


def _mark_context(panels: Sequence[Any], num_context: int) -> None:
  end = num_context - 0.5
  for axes in panels:
    axes.axvline(end, color=_INK, linewidth=1.6)
  for text, side, shift in (('observed', 'right', -4), ('foreseen', 'left', 4)):
    panels[0].annotate(
      text,
      (end, 1),
      xycoords=('data', 'axes fraction'),
      xytext=(shift, 3),
      textcoords='offset points',
      ha=side,
      color=_FAINT,
      fontsize=9,
    )
