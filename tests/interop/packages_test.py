"""Libraries that are not installed."""

import sys
from unittest import mock

from absl.testing import absltest, parameterized

from hkgraph.interop import packages


class LoadTest(parameterized.TestCase):
  @parameterized.parameters('flax', 'nnx-ppo')
  def test_an_absent_package_is_told_with_its_extra(self, extra):
    with (
      mock.patch.dict(sys.modules, {'flax': None}),
      self.assertRaisesRegex(ImportError, rf"'hkgraph\[{extra}\]'"),
    ):
      packages.load('flax.linen', extra=extra)

  def test_what_an_installed_package_lacks_is_told_as_it_is(self):
    with self.assertRaisesRegex(ModuleNotFoundError, 'json.lacking'):
      packages.load('json.lacking')


if __name__ == '__main__':
  absltest.main()
