"""What the package shows, what importing it costs, and who may import whom."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

import hkgraph

ROOT = pathlib.Path(hkgraph.__file__).parent

PUBLIC = """
  ActorCritic Agent CategoricalHead Concat Connection ConvEncoder Decoder
  Delay DreamerConfig Encoder Filter GatedCell GaussianNoise Graph GraphCore
  GraphError GraphSpec Leaky MLPEncoder Map Merge Moments MultiCategoricalHead
  Network NetworkState Normalizer PPOConfig PQNConfig Parallel PolicyValue
  Population PopulationGraph QConvEncoder QMLPEncoder QNetwork RSSM
  RecurrentEncoder Remember Scale Split StatefulModule SymlogEncoder
  TanhNormalHead TimeStep TrainResult Trajectory TransformerEncoder TwoHotHead
  WorldModel batch_apply by_connection categorical_kl connection_labels
  connection_params envs export_policy freeze graph_network interop
  load_policy make_dreamer make_head make_ppo make_pqn masked_by_connection
  policy_network q_network replace_connection_params straight_through_sample
  train transform unimix_categorical
""".split()

# From low to high; equals do not import each other, but within one package.
_RANKS = (
  ('types',),
  ('trees', 'packages'),
  (
    'graph.spec graph.builder graph.validate graph.schedule graph.activations '
    'graph.drawing graph.layout graph.routes graph.text modules losses data '
    'envs'
  ).split(),
  [
    f'graph.{x}'
    for x in (
      'core execution labels looped parameters products readers'
    ).split()
  ],
  ('network',),
  ('learners', 'training.actor'),
  ('training', 'interop'),
  ('plotting', 'arguments'),
  ('cli',),
)
# Jax-free data, or pictures, that may be read from where it is made use of.
_EXCEPTIONS = {('training.run_folder', 'plotting')}


def _package(module):
  return module.split('.')[0]


def _rank(module):
  for rank, names in enumerate(_RANKS):
    if module in names:
      return rank
  for rank, names in enumerate(_RANKS):
    if _package(module) in names:
      return rank
  raise AssertionError(f'{module} has no rank')


def _imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      parts = node.module.split('.')
      if parts[0] == 'hkgraph':
        for alias in node.names:
          full = [*parts[1:], alias.name]
          target = ROOT.joinpath(*full)
          is_module = target.with_suffix('.py').exists() or target.is_dir()
          yield '.'.join(full if is_module else full[:-1])


class PackageTest(parameterized.TestCase):
  def test_public_names_are_pinned_and_sorted(self):
    self.assertEqual(hkgraph.__all__, sorted(PUBLIC))
    for name in PUBLIC:
      self.assertIsNotNone(getattr(hkgraph, name))
      self.assertIn(name, dir(hkgraph))
    with self.assertRaisesRegex(AttributeError, 'no attribute .nothing.'):
      _ = hkgraph.nothing

  def test_type_checkers_see_the_same_names(self):
    tree = ast.parse((ROOT / '__init__.py').read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {a.name: n.module for n in block.body for a in n.names}
    del names['envs'], names['interop']
    expected = {k: f'hkgraph.{v}' for k, v in hkgraph._HOME.items()}
    self.assertEqual(names, expected)

  @parameterized.parameters(
    (
      'import hkgraph',
      'jax haiku matplotlib orbax flax equinox gymnax brax wandb rlax tyro',
    ),
    (
      'import hkgraph; hkgraph.PopulationGraph; hkgraph.graph_network; '
      'hkgraph.transform',
      'rlax distrax matplotlib orbax flax tyro rich',
    ),
    ('import hkgraph.cli', 'jax haiku distrax rlax matplotlib'),
  )
  def test_imports_are_lazy(self, code, forbidden):
    # Haiku itself imports what it finds of Flax.
    before = '' if 'haiku' in forbidden else 'import haiku; '
    found = f'[m for m in {forbidden.split()!r} if m in new]'
    code = (
      f'import sys; {before}before = set(sys.modules); {code}; '
      f'new = set(sys.modules) - before; print({found})'
    )
    done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True
    )
    self.assertEqual(done.stdout.strip(), '[]')

  def test_import_ranks(self):
    wrong = []
    for path in sorted(ROOT.rglob('*.py')):
      module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
      if module == '__init__':
        continue
      module = module.removesuffix('.__init__')
      for other in _imports(path):
        same_package = _package(module) == _package(other)
        low, high = _rank(other), _rank(module)
        allowed = low < high or (low == high and same_package)
        if not allowed and (module, other) not in _EXCEPTIONS:
          wrong.append((module, other))
    self.assertEmpty(wrong)


if __name__ == '__main__':
  absltest.main()
