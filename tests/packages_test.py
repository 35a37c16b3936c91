"""Libraries that are not installed."""

import sys
from unittest import mock

from absl.testing import absltest, parameterized

from hkgraph import packages


class LoadTest(parameterized.TestCase):
  @parameterized.parameters('flax', 'nnx-ppo')
  def test_an_absent_package_is_told_with_its_extra(self, extra):
    with (
      mock.patch.dict(sys.modules, {'flax': None}),
      self.assertRaisesRegex(ImportError, rf"'hkgraph\[{extra}\]'"),
    ):
      packages.load('flax.linen', extra=extra)

  @parameterized.parameters((3, 11), (3, 12))
  def test_an_extra_that_this_python_cannot_install(self, *version):
    with (
      mock.patch.dict(sys.modules, {'navix': None}),
      mock.patch.object(sys, 'version_info', (*version, 0)),
      self.assertRaises(ImportError) as caught,
    ):
      packages.load('navix')
    needs_another = 'needs Python 3.12 or later, and this is 3.11'
    message = str(caught.exception)
    self.assertEqual(needs_another in message, version == (3, 11))
    self.assertIn("pip install 'hkgraph[navix]'", message)

  def test_what_an_installed_package_lacks_is_told_as_it_is(self):
    with self.assertRaisesRegex(ModuleNotFoundError, 'json.lacking'):
      packages.load('json.lacking')


if __name__ == '__main__':
  absltest.main()
