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


def _rows(count=200, keys=()):
  rows = []
  for i in range(count):
    row = {'steps': 100 * (i + 1), 'episodes': 1 + i % 3}
    row |= {f'episode_return/{k}': i * (n + 1) for n, k in enumerate(keys)}
    rows.append(row | {'episode_return': float(i)})
  return rows


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


if __name__ == '__main__':
  absltest.main()
