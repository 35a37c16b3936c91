"""The README's code runs, in the order in which it is read."""

import pathlib
import re

from absl.testing import absltest, parameterized

README = pathlib.Path(__file__).parents[1] / 'README.md'
BLOCKS = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)


class ReadmeTest(parameterized.TestCase):
  def test_there_is_code(self):
    self.assertLen(BLOCKS, 3)

  @parameterized.parameters(range(len(BLOCKS)))
  def test_block_runs(self, number):
    names = {'__name__': 'readme'}
    exec(compile(BLOCKS[number], f'README block {number}', 'exec'), names)
    self.assertIn('hg', names)

  def test_custom_module_is_short(self):
    text = BLOCKS[1]
    body = text[text.index('class ') : text.index('\n\n\nnetwork')]
    self.assertLess(len(body.splitlines()), 25)


if __name__ == '__main__':
  absltest.main()
