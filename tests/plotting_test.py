"""Tests of the pictures of trainings."""

import io
import json
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
from matplotlib import image
import numpy as np

from hkgraph import plotting
from hkgraph.training import imagination


def _rows(count=200, keys=()):
  rows = []
  for i in range(count):
    row = {'steps': 100 * (i + 1), 'episodes': 1 + i % 3}
    row |= {f'episode_return/{k}': i * (n + 1) for n, k in enumerate(keys)}
    rows.append(row | {'episode_return': float(i)})
  return rows


def _episode(num_rows=8, num_context=3, **observation):
  rng = np.random.default_rng(0)
  rewards = rng.normal(size=(2, num_rows))
  rewards[:, 0] = np.nan
  discounts = np.ones((2, num_rows))
  discounts[1] = 0.75
  return imagination.Imagination(
    num_context=num_context,
    observation=observation,
    imagined_observation={k: v + 0.5 for k, v in observation.items()},
    reward=rewards[0],
    imagined_reward=rewards[1],
    discount=discounts[0],
    imagined_discount=discounts[1],
  )


class SmoothTest(parameterized.TestCase):
  def test_weighs_by_episodes(self):
    # 80 rows: a window of two on both sides.
    values, weights = np.zeros(80), np.ones(80)
    values[40], weights[40] = 6.0, 3.0
    got = plotting.smooth(values, weights)
    expected = np.zeros(80)
    expected[38:43] = 6 * 3 / (4 + 3)
    np.testing.assert_allclose(got, expected, atol=1e-12)

  def test_ends_use_what_is_there(self):
    values = np.arange(80.0)
    got = plotting.smooth(values, np.ones(80))
    np.testing.assert_allclose(got[2:-2], values[2:-2])
    np.testing.assert_allclose(got[[0, 1, -1]], [1.0, 1.5, 78.0])

  @parameterized.parameters(1, 5, 39)
  def test_few_rows_are_left_alone(self, count):
    values = np.arange(count, dtype=float)
    got = plotting.smooth(values, np.ones(count))
    np.testing.assert_allclose(got, values)


class LearningCurveTest(parameterized.TestCase):
  def test_draws_what_was_measured_and_its_mean(self):
    rows = _rows()
    rows[7] = {'steps': 800, 'episodes': 0}
    axes = plotting.learning_curve(rows).axes[0]
    measured, mean, end = axes.lines
    kept = [row for row in rows if row['episodes']]
    np.testing.assert_array_equal(
      measured.get_xdata(), [row['steps'] for row in kept]
    )
    np.testing.assert_array_equal(
      measured.get_ydata(), [row['episode_return'] for row in kept]
    )
    expected = plotting.smooth(
      np.array([row['episode_return'] for row in kept]),
      np.array([row['episodes'] for row in kept]),
    )
    np.testing.assert_allclose(mean.get_ydata(), expected)
    np.testing.assert_allclose(end.get_xydata(), [[20000, expected[-1]]])

  def test_a_curve_for_each_key(self):
    axes = plotting.learning_curve(_rows(keys=('a', 'b'))).axes[0]
    self.assertLen(axes.lines, 6)
    np.testing.assert_array_equal(axes.lines[3].get_ydata(), 2 * np.arange(200))
    labels = [text.get_text().split()[0] for text in axes.texts]
    self.assertEqual(labels, ['a', 'b'])

  def test_labels_of_near_ends_do_not_overlap(self):
    rows = [
      row | {'episode_return/b': row['episode_return/a'] + 0.01}
      for row in _rows(keys=('a', 'b'))
    ]
    axes = plotting.learning_curve(rows).axes[0]
    low, high = sorted(text.xy[1] for text in axes.texts)
    bottom, top = axes.get_ylim()
    self.assertGreater((high - low) / (top - bottom), 0.05)

  def test_the_picture_needs_no_screen(self):
    with mock.patch.dict(sys.modules, {'matplotlib.pyplot': None}):
      figure = plotting.learning_curve(_rows(3), title='pole')
      data = io.BytesIO()
      figure.savefig(data, format='png')
    self.assertEqual(figure.axes[0].get_title(loc='left'), 'pole')
    data.seek(0)
    pixels = image.imread(data)[..., :3]
    self.assertGreater(pixels.std(), 0.01)

  def test_reads_files_and_run_folders(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = folder / 'metrics.jsonl'
    lines = [json.dumps(row) for row in _rows(4)]
    lines[1] = lines[1].replace('"episode_return": 1.0', '"loss": null')
    # The last line was cut off by a crash.
    path.write_text('\n'.join([*lines, '{"steps": 5']))
    rows = plotting.read_rows(folder)
    self.assertLen(rows, 4)
    self.assertTrue(np.isnan(rows[1]['loss']))
    self.assertEqual(rows, plotting.read_rows(str(path)))
    axes = plotting.learning_curve(path).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [0, 2, 3])

  def test_faults_are_told(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    with self.assertRaises(FileNotFoundError):
      plotting.learning_curve(folder)
    (folder / 'metrics.jsonl').write_text('{"steps": 1}\nnonsense\n{}\n')
    with self.assertRaisesRegex(ValueError, 'line 2 of .* is no JSON'):
      plotting.learning_curve(folder)
    with self.assertRaisesRegex(ValueError, 'no episode ended in the 1 rows'):
      plotting.learning_curve([{'steps': 3, 'episodes': 0}])
    with (
      mock.patch.dict(sys.modules, {'matplotlib': None}),
      self.assertRaisesRegex(ImportError, r'hkgraph\[train\]'),
    ):
      plotting.learning_curve(_rows(3))


class ImaginationTest(parameterized.TestCase):
  def test_lines_are_what_was_and_what_was_imagined(self):
    x = np.random.default_rng(1).normal(size=(8, 2))
    episode = _episode(observation=x)
    figure = plotting.imagination(episode, title='pole')
    expected = {
      'observation[0]': (x[:, 0], x[:, 0] + 0.5),
      'observation[1]': (x[:, 1], x[:, 1] + 0.5),
      'reward': (episode.reward, episode.imagined_reward),
      'continues': (episode.discount, episode.imagined_discount),
    }
    labels = [axes.get_ylabel() for axes in figure.axes]
    self.assertEqual(labels, list(expected))
    for axes in figure.axes:
      true, imagined, mark = axes.lines
      self.assertEqual(
        [true.get_linestyle(), imagined.get_linestyle()], ['-', '--']
      )
      pair = expected[axes.get_ylabel()]
      np.testing.assert_array_equal(true.get_ydata(), pair[0])
      np.testing.assert_array_equal(imagined.get_ydata(), pair[1])
      # Between the last row that was seen and the first that was not.
      np.testing.assert_array_equal(mark.get_xdata(), [2.5, 2.5])
    legend = [text.get_text() for text in figure.legends[0].texts]
    self.assertEqual(legend, ['true', 'imagined'])
    self.assertEqual(figure.get_suptitle(), 'pole')

  def test_of_many_numbers_those_that_vary_most(self):
    x = np.arange(8.0)[:, None] * np.array([0, 5, 1, 4, 3, 2.0])
    y = np.arange(8.0)[:, None] * np.array([2.5])
    figure = plotting.imagination(_episode(a=x, b=y))
    labels = [axes.get_ylabel() for axes in figure.axes]
    self.assertEqual(labels[:-2], ['a[1]', 'a[2]', 'a[3]', 'a[4]', 'a[5]', 'b'])

  def test_frames_span_the_brightness_that_was_observed(self):
    pixels = 255 * np.ones((8, 9, 12, 1))
    pixels[2, 3, 4] = 55
    episode = _episode(eye=pixels)
    episode.imagined_observation['eye'][2, 3, 4] = 155
    figure = plotting.imagination(episode)
    true, imagined = (axes.images[0].get_array() for axes in figure.axes[:2])
    self.assertEqual(true.shape, (9, 8 * 12, 3))
    expected = np.ones((9, 8 * 12, 3))
    expected[3, 2 * 12 + 4] = 0
    np.testing.assert_allclose(true, expected)
    expected[3, 2 * 12 + 4] = 0.5
    np.testing.assert_allclose(imagined, expected)
    labels = [axes.get_ylabel() for axes in figure.axes[:2]]
    self.assertEqual(labels, ['eye\ntrue', 'eye\nimagined'])

  @parameterized.parameters((24, 5), (25, 5), (60, 4), (61, 1), (49, 48))
  def test_frames_stand_at_their_rows(self, num_rows, num_context):
    pixels = np.zeros((num_rows, 8, 8, 1))
    pixels += np.arange(num_rows)[:, None, None, None]
    figure = plotting.imagination(_episode(num_rows, num_context, eye=pixels))
    drawn = figure.axes[0].images[0]
    low, high = drawn.get_extent()[:2]
    frames = drawn.get_array()[0, ::8, 0] * (num_rows - 1)
    width = (high - low) / len(frames)
    self.assertLessEqual(len(frames), 24)
    # The frame that begins at a row shows that row; none crosses the mark.
    np.testing.assert_allclose(
      frames, low + 0.5 + width * np.arange(len(frames))
    )
    self.assertAlmostEqual((num_context - 0.5 - low) % width, 0)
    self.assertLess(high, num_rows)

  def test_many_channels_get_colours(self):
    pixels = np.zeros((8, 8, 8, 4))
    pixels[:, 0, 0, 0] = pixels[:, 0, 1, 2] = 1
    figure = plotting.imagination(_episode(eye=pixels))
    drawn = figure.axes[0].images[0].get_array()
    self.assertGreater(np.abs(drawn[0, 0] - drawn[0, 1]).max(), 0.3)
    np.testing.assert_array_equal(drawn[1:], 0)

  def test_the_picture_needs_no_screen(self):
    with mock.patch.dict(sys.modules, {'matplotlib.pyplot': None}):
      figure = plotting.imagination(
        _episode(eye=np.ones((8, 8, 8, 3)), x_=np.ones((8, 1)))
      )
      data = io.BytesIO()
      figure.savefig(data, format='png')
    data.seek(0)
    self.assertGreater(image.imread(data)[..., :3].std(), 0.01)

  def test_pictures_are_checked_before_they_are_made(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    plotting.check_picture(folder / 'a.PNG')
    with self.assertRaisesRegex(ValueError, r'must end in \.png, .*a\.bmp'):
      plotting.check_picture(folder / 'a.bmp')
    with self.assertRaisesRegex(ValueError, 'must end in'):
      plotting.check_picture(folder / 'a')
    with self.assertRaisesRegex(FileNotFoundError, 'no folder .*missing'):
      plotting.check_picture(folder / 'missing' / 'a.png')
    (folder / 'b.png').mkdir()
    with self.assertRaisesRegex(IsADirectoryError, 'is a folder'):
      plotting.check_picture(folder / 'b.png')
    with (
      mock.patch.dict(sys.modules, {'matplotlib': None}),
      self.assertRaisesRegex(ImportError, r'hkgraph\[train\]'),
    ):
      plotting.check_picture(folder / 'a.png')


if __name__ == '__main__':
  absltest.main()
