"""Tests of what takes the metrics of a training."""

import io
import json
import math
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import rich.console

from hkgraph.training import loggers


class _List:
  def __init__(self):
    self.rows = []

  def write(self, row):
    self.rows.append(row)

  def close(self):
    pass


def _no_constant(name):
  raise AssertionError(f'{name} is no JSON')


class JsonLinesTest(absltest.TestCase):
  def test_every_row_is_a_strict_line_at_once(self):
    path = pathlib.Path(
      self.enterContext(tempfile.TemporaryDirectory()), 'metrics.jsonl'
    )
    logger = loggers.JsonLines(path)
    logger.write({'update': 1, 'loss': 0.5})
    # Read before it is closed: the row has been flushed.
    self.assertEqual(path.read_text(), '{"update": 1, "loss": 0.5}\n')
    logger.write({'update': 2, 'loss': math.nan, 'kl': -math.inf})
    logger.close()
    lines = path.read_text().splitlines()
    self.assertEqual(
      json.loads(lines[1], parse_constant=_no_constant),
      {'update': 2, 'loss': None, 'kl': None},
    )

  def test_dumps_goes_into_lists_and_dicts(self):
    text = loggers.dumps({'a': [1.5, math.nan, (math.inf, {'b': -math.inf})]})
    self.assertEqual(text, '{"a": [1.5, null, [null, {"b": null}]]}')


class JournalTest(parameterized.TestCase):
  def test_rows_count_updates_and_steps(self):
    sink = _List()
    journal = loggers.Journal([sink], steps_per_update=300)
    for i in range(4):
      journal.write({'loss': jnp.float32(i)})
    self.assertEqual([r['update'] for r in sink.rows], [1, 2, 3, 4])
    self.assertEqual([r['steps'] for r in sink.rows], [300, 600, 900, 1200])
    self.assertEqual([r['loss'] for r in sink.rows], [0.0, 1.0, 2.0, 3.0])
    self.assertEqual(journal.rows, sink.rows)
    seconds = [r['seconds'] for r in sink.rows]
    self.assertEqual(seconds, sorted(seconds))

  def test_speed_leaves_out_what_came_before_the_first_row(self):
    # The first update takes 10 s with its compilation, the others 2 s.
    clock = [0.0, 10.0, 12.0, 14.0]
    with mock.patch.object(loggers.time, 'perf_counter', side_effect=clock):
      journal = loggers.Journal([], steps_per_update=300)
      for _ in range(3):
        journal.write({})
    speeds = [row['steps_per_second'] for row in journal.rows]
    self.assertEqual(speeds, [300 / 10, 300 / 2, 600 / 4])

  def test_no_episode_no_mean(self):
    journal = loggers.Journal([], steps_per_update=1)
    metrics = {
      'episode_return': jnp.float32(0),
      'episode_return/a': jnp.float32(0),
      'episode_length': jnp.float32(0),
    }
    journal.write(metrics | {'episodes': jnp.int32(0)})
    journal.write(metrics | {'episodes': jnp.int32(2)})
    self.assertEqual(journal.rows[0]['episodes'], 0)
    self.assertNoCommonElements(journal.rows[0], metrics)
    self.assertContainsSubset(metrics, journal.rows[1])

  def test_the_first_faults_are_kept(self):
    journal = loggers.Journal([], steps_per_update=1)
    names = ('nonfinite/observation/x', 'nonfinite/params')
    for counts in [(0, 0), (2, 0), (0, 1)]:
      journal.write(dict(zip(names, map(jnp.int32, counts), strict=True)))
    self.assertEqual(journal.faults, ['observation/x'])
    self.assertEqual(journal.fault_update, 2)
    self.assertNoCommonElements(journal.rows[0], names)
    self.assertEqual(journal.rows[1]['nonfinite/observation/x'], 2)

  def assertNoCommonElements(self, row, names):
    self.assertFalse(set(row) & set(names))


class ProgressTest(absltest.TestCase):
  def test_shows_return_speed_and_share(self):
    text = io.StringIO()
    console = rich.console.Console(file=text, force_terminal=True, width=100)
    bar = loggers.Progress(1000, console=console)
    row = {'steps': 250, 'steps_per_second': 12345.6, 'episode_return': 81.25}
    bar.write(row)
    # Where no episode ended, the last return stays.
    bar.write({'steps': 500, 'steps_per_second': 12345.6})
    bar.close()
    for part in ('50%', '81.25', '12,346 steps/s'):
      self.assertIn(part, text.getvalue())

  def test_says_which_extra_is_missing(self):
    self.assertTrue(loggers.can_show_progress())
    hidden = dict.fromkeys(['rich', 'rich.console', 'rich.progress'])
    with mock.patch.dict(sys.modules, hidden):
      self.assertFalse(loggers.can_show_progress())
      with self.assertRaisesRegex(ImportError, r'hkgraph\[train\]'):
        loggers.Progress(10)


if __name__ == '__main__':
  absltest.main()
