"""The code of the README and of the page on the schedule runs."""

import pathlib
import re

from absl.testing import absltest, parameterized
import pytest

README = pathlib.Path(__file__).parents[1] / 'README.md'
SCHEDULE = README.parent / 'examples' / 'schedule.md'


def _blocks(page):
  return re.findall(r'```python\n(.*?)```', page.read_text('utf-8'), re.DOTALL)


BLOCKS = _blocks(README)


class ReadmeTest(parameterized.TestCase):
  def test_there_is_code(self):
    self.assertLen(BLOCKS, 7)

  @parameterized.parameters(range(len(BLOCKS)))
  @pytest.mark.heavy
  def test_block_runs(self, number):
    names = {'__name__': 'readme'}
    exec(compile(BLOCKS[number], f'README block {number}', 'exec'), names)
    self.assertIn('hg', names)

  def test_custom_module_is_short(self):
    text = BLOCKS[1]
    body = text[text.index('class ') : text.index('\n\n\nnetwork')]
    self.assertLess(len(body.splitlines()), 25)


class ScheduleTest(absltest.TestCase):
  @pytest.mark.heavy
  def test_page_runs_and_shows_what_it_prints(self):
    names = {'__name__': 'page'}
    for number, text in enumerate(_blocks(SCHEDULE)):
      exec(compile(text, f'schedule.md block {number}', 'exec'), names)
    shown = names['spec'].schedule().describe()
    self.assertIn(f'```text\n{shown}\n```', SCHEDULE.read_text('utf-8'))


if __name__ == '__main__':
  absltest.main()
