"""Tests of the command line."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

import hkgraph
from hkgraph import arguments, cli
from hkgraph.training import loggers, tasks


def _run(*argv):
  """Exit code and what is printed on standard output and error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      code = cli.main([str(arg) for arg in argv])
    except SystemExit as end:
      code = end.code or 0
  return code, out.getvalue(), err.getvalue()


_SMALL = ('--num-envs', 4, '--num-steps', 10, '--num-minibatches', 2)
_SMALL += ('--num-epochs', 1, '--total-steps', 100, '--eval-episodes', 6)
_SMALL += ('--no-progress',)


class HelpTest(parameterized.TestCase):
  @parameterized.parameters(
    ('--help', 'hkgraph train NAME'),
    ('-h', 'hkgraph show'),
    ('train --help', 'delayed_recall'),
    ('train cartpole --help', '--learning-rate'),
    ('train --env cartpole --help', '--clip-epsilon'),
    ('train --env pgx:x --algo=pqn --help', '--epsilon-finish'),
    ('eval --help', '--episodes'),
    ('show --help', '--output'),
    ('export --help', '--sampled'),
    ('imagine --help', '--horizon'),
    ('--version', hkgraph.__version__),
  )
  def test_help_needs_no_jax(self, argv, expected):
    code = (
      'import sys\n'
      'from hkgraph import cli\n'
      'try:\n'
      f'  code = cli.main({argv.split()!r})\n'
      'except SystemExit as end:\n'
      '  code = end.code\n'
      'assert not code, code\n'
      "slow = {'jax', 'haiku', 'rlax', 'distrax', 'matplotlib'}\n"
      'assert not slow & set(sys.modules), slow & set(sys.modules)\n'
    )
    done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn(expected, done.stdout)

  def test_options_show_the_values_of_the_task(self):
    for name, task in tasks.TASKS.items():
      _, out, _ = _run('train', name, '--help')
      text = ' '.join(out.replace('\u2502', ' ').split())
      self.assertIn(f'(default: {task.total_steps})', text)
      self.assertIn(f'(default: {task.config.learning_rate})', text)

  def test_options_are_those_of_the_algorithm(self):
    ppo, pqn = (
      _run('train', 'cartpole', *algo, '--help')[1]
      for algo in ((), ('--algo', 'pqn'))
    )
    self.assertIn('--clip-epsilon', ppo)
    self.assertNotIn('--clip-epsilon', pqn)
    self.assertIn('--exploration-fraction', pqn)
    for out in (ppo, pqn):
      self.assertIn('--lambda ', out)
      self.assertNotIn('--total-updates', out)

  @parameterized.parameters(
    ('export', 'usage: hkgraph export [-h] RUN FILE ['),
    ('show', 'usage: hkgraph show [-h] NAME|FILE|RUN [--output FILE]'),
    ('eval', 'usage: hkgraph eval [-h] RUN ['),
    ('train --env x', 'SUITE:NAME. (required)'),
    ('train --env x', '--env ENV '),
    ('train', 'ALGO is ppo, pqn or dreamer.'),
  )
  def test_values_have_names(self, argv, expected):
    _, out, _ = _run(*argv.split(), '--help')
    self.assertIn(expected, ' '.join(out.replace('\u2502', ' ').split()))

  def test_commands_are_described(self):
    for command in ('show', 'imagine'):
      options = getattr(arguments, command.capitalize())
      summary = options.__doc__.splitlines()[0]
      self.assertIn(summary, _run(command, '--help')[1])


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', 'no command given'),
    ('trian cartpole', "unknown command 'trian'; did you mean train?"),
    ('train', 'no task given'),
    ('train', 'delayed_recall; or --env ENV)'),
    ('train cartpol', "unknown task 'cartpol'; did you mean cartpole?"),
    ('train --seed 1 cartpole', "unknown task '--seed'"),
    ('train cartpole --algo pq', "unknown algorithm 'pq'; did you mean pqn?"),
    ('train cartpole --algo', 'no algorithm given'),
    ('train bodies --algo pqn', "'bodies' has hyperparameters for ppo only"),
    ('train cartpole --algo pqn --clip-epsilon 1', '--clip-epsilon'),
    ('train --env', "'--env'"),
    ('train --env cartpol --no-progress', "did you mean 'cartpole'"),
    ('train --env cartpol --no-progress', 'hkgraph: --env must be one of'),
    ('train --env cartpole --network conv', ' --network conv takes one'),
    ('train cartpole --env cartpole', 'Unrecognized arguments: cartpole ('),
    ('train cartpole --network gru', '--network goes only with --env'),
    ('train cartpole --normalize', '--normalize goes only with --env'),
    ('train --env cartpole --network cnn', 'cnn'),
    ('train --env bodies --algo pqn --no-progress', 'use PPO'),
    ('train cartpole --total-updates 3', '--total-updates'),
    ('train cartpole --num-envs six', '--num-envs'),
    ('train cartpole --num-evs 6', 'did you mean --num-envs? ('),
    ('train cartpole --lr=0.1', 's: --lr; did you mean --learning-rate? ('),
    ('eval {dir} --epis 3 --x', 's: --epis, --x; did you mean --episodes? ('),
    ('train cartpole --no-progres', 'did you mean --no-progress? ('),
    ('train cartpole --num-envs 7 --num-minibatches 2', '7 environments and 2'),
    ('train cartpole --learning-rate -1', ': --learning-rate must be'),
    (
      'train cartpole --total-steps 0 --run-dir {dir}/a',
      ': --total-steps must',
    ),
    ('train cartpole --run-dir {dir}', 'is not empty'),
    ('train cartpole --run-dir {dir}', 'give another --run-dir, or'),
    ('train cartpole --lambda 3', ': --lambda must be'),
    ('eval', 'run folder'),
    ('eval {dir}', 'no run in'),
    ('eval {dir}/missing', 'no run in'),
    ('imagine', 'run folder'),
    ('imagine {dir}', 'no run in'),
    ('imagine {dir} --output {dir}/a.bmp', 'must end in .png'),
    ('imagine {dir} --output {dir}/missing/a.png', 'no folder'),
    ('show cartpol', "unknown graph 'cartpol'; did you mean cartpole?"),
    ('show nope', "or a file or a run folder, but there is no path 'nope'"),
    ('show {dir}', 'holds no `graph.json`'),
    ('show {dir}/broken.json', 'JSON'),
    ('show cartpole --output {dir}/graph.bmp', ': --output must end in one of'),
    ('show cartpole --output {dir}/missing/a.png', ': no folder'),
    ('export {dir}', 'such as policy.hkg'),
    ('export {dir} {dir}/policy.hkg', 'no run in'),
    ('export {dir} {dir}/broken.json', 'exists; give another name'),
    ('export {dir} {dir}/missing/policy.hkg', 'there is no folder'),
  )
  def test_users_get_one_line(self, argv, expected):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (folder / 'broken.json').write_text('{')
    argv = argv.format(dir=folder).split()
    code, out, err = _run(*argv)
    self.assertEqual(code, 2)
    self.assertEqual(out, '')
    self.assertRegex(err, r'\Ahkgraph: [^\n]+\n\Z')
    self.assertIn(expected, err)
    self.assertNotIn('dummy', err)

  def test_without_tyro(self):
    with mock.patch.dict(sys.modules, {'tyro': None}):
      code, _, err = _run('train', 'cartpole')
    self.assertEqual(code, 2)
    self.assertIn("pip install 'hkgraph[train]'", err)

  def test_numbers_that_are_not_finite_are_no_mistake_of_the_user(self):
    error = FloatingPointError('observation/x held numbers')
    with mock.patch.object(cli, '_train', side_effect=error):
      code, _, err = _run('train', 'cartpole')
    self.assertEqual(code, 1)
    self.assertEqual(err, 'hkgraph: observation/x held numbers\n')

  @parameterized.parameters('utf-8', 'ascii')
  def test_any_terminal_gets_the_same_line(self, encoding):
    done = subprocess.run(
      [sys.executable, '-c', 'import hkgraph.cli as c; exit(c.main())']
      + 'train cartpole --num-evs 6'.split(),
      capture_output=True,
      text=True,
      env=os.environ | {'PYTHONIOENCODING': encoding},
    )
    self.assertEqual(done.returncode, 2)
    self.assertEqual(
      done.stderr,
      'hkgraph: Unrecognized options: --num-evs; did you mean --num-envs? '
      '(see hkgraph train cartpole --help)\n',
    )


class ShowTest(absltest.TestCase):
  def test_tasks_and_files(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    spec = tasks.TASKS['bodies'].network()
    code, out, _ = _run('show', 'bodies')
    self.assertEqual((code, out), (0, spec.summary() + '\n'))
    (folder / 'graph.json').write_text(spec.to_json())
    self.assertEqual(_run('show', folder)[1], out)
    picture, source = folder / 'graph.png', folder / 'graph.dot'
    code, text, _ = _run('show', folder / 'graph.json', '--output', picture)
    self.assertEqual(text, f'{out}\npicture: {picture}\n')
    self.assertEqual(picture.read_bytes()[1:4], b'PNG')
    _run('show', 'bodies', '--output', source)
    self.assertEqual(source.read_text(), spec.draw().source)


@pytest.mark.heavy
class ImagineTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.dir = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.run_dir = cls.dir / 'run'
    sizes = {'hidden': 8, 'recurrent': 8}
    counts = {'layers': 1, 'latents': 2, 'classes': 3, 'bins': 11}
    counts |= {'envs': 2, 'steps': 6}
    small = {f'--{name}-size': x for name, x in sizes.items()}
    small |= {f'--num-{name}': x for name, x in counts.items()}
    small |= {'--train-ratio': 1, '--batch-size': 2, '--sequence-length': 4}
    small |= {'--burn-in': 0, '--horizon': 2, '--capacity': 100}
    code, _, err = _run(
      *('train', '--env', 'delayed_recall', '--algo', 'dreamer'),
      *(arg for option in small.items() for arg in option),
      *('--total-steps', 24, '--eval-episodes', 0, '--no-progress'),
      *('--run-dir', cls.run_dir),
    )
    assert code == 0, err

  def _fails(self, expected, *argv):
    code, out, err = _run('imagine', *argv)
    self.assertEqual((code, out), (2, ''))
    self.assertRegex(err, rf'\Ahkgraph: [^\n]*{expected}[^\n]*\n\Z')

  @pytest.mark.heavy
  def test_draws_an_episode_and_tells_the_errors(self):
    picture = self.dir / 'episode.png'
    argv = ('imagine', self.run_dir, '--output', picture, '--context', 3)
    code, out, err = _run(*argv, '--horizon', 4)
    self.assertEqual((code, err), (0, ''))
    self.assertEqual(picture.read_bytes()[1:4], b'PNG')
    lines = [line.split() for line in out.splitlines()]
    self.assertEqual(lines[0], ['picture', str(picture)])
    self.assertEqual(lines[1], 'rows 3 observed, 4 foreseen'.split())
    self.assertEqual(lines[2], 'mean error observed foreseen'.split())
    names = [line[0] for line in lines[3:]]
    self.assertEqual(names, ['observation', 'reward', 'continues'])
    for _, *errors in lines[3:]:
      self.assertTrue(all(0 <= float(error) < 10 for error in errors))
    self.assertEqual(_run(*argv, '--horizon', 4)[1], out)
    self.assertNotEqual(_run(*argv, '--horizon', 4, '--seed', 1)[1], out)

  @pytest.mark.heavy
  def test_stops_at_the_end_of_the_episode(self):
    with contextlib.chdir(self.dir):
      code, out, _ = _run('imagine', self.run_dir, '--sampled')
      self.assertTrue(pathlib.Path('imagined.png').exists())
    self.assertEqual(code, 0)
    # The cue, eight rows of delay and the answer's verdict.
    self.assertRegex(out, r'rows +5 observed, 5 foreseen\n')

  @pytest.mark.heavy
  def test_a_context_without_an_end(self):
    argv = (self.run_dir, '--output', self.dir / 'no.png')
    self._fails('a context of at most 9 rows', *argv, '--context', 10)
    self._fails('--context', *argv, '--context', 0)
    self._fails('--horizon', *argv, '--horizon', 0)
    self.assertFalse((self.dir / 'no.png').exists())

  def test_runs_without_weights_or_a_world_model(self):
    bare, plain = self.dir / 'bare', self.dir / 'plain'
    bare.mkdir()
    config = (self.run_dir / 'config.json').read_text()
    (bare / 'config.json').write_text(config)
    self._fails('no weights', bare, '--output', self.dir / 'no.png')
    code, _, err = _run(
      *('train', 'delayed_recall', *_SMALL, '--eval-episodes', 0),
      *('--run-dir', plain),
    )
    self.assertEqual(code, 0, err)
    self._fails('no world model.*DreamerV3', plain)


class TrainTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    # Also where the tests run in the background of a shell, which ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, handler)

  @pytest.mark.heavy
  def test_train_eval_and_show_one_run(self):
    run = self.dir / 'run'
    code, out, err = _run(
      'train', 'delayed_recall', *_SMALL, '--run-dir', run, '--seed', 3
    )
    self.assertEqual((code, err), (0, ''))
    # 100 steps at 40 per update are 120.
    self.assertRegex(out, r'steps +120\n')
    evaluation = json.loads((run / 'evaluation.json').read_text())
    self.assertEqual(evaluation['episodes'], 6)
    mean, std = evaluation['mean_return'], evaluation['std_return']
    self.assertIn(f'mean return {mean:.2f} +- {std:.2f}', out)
    for path in (run, run / 'graph.png', run / 'learning_curve.png'):
      self.assertTrue(path.exists())
      self.assertIn(f' {path}\n', out)
    config = json.loads((run / 'config.json').read_text())
    self.assertEqual(config['seed'], 3)
    self.assertEqual(config['config']['num_envs'], 4)

    code, out, err = _run('eval', run, '--episodes', 5)
    self.assertEqual((code, err), (0, ''))
    self.assertIn('(5 deterministic episodes)', out)
    self.assertEqual(_run('eval', run, '--episodes', 5)[1], out)

    code, out, _ = _run('show', run)
    spec = tasks.TASKS['delayed_recall'].network()
    self.assertEqual((code, out), (0, spec.summary() + '\n'))

    policy = self.dir / 'policy.hkg'
    code, out, err = _run('export', run, policy, '--sampled')
    self.assertEqual((code, err), (0, ''))
    self.assertRegex(out, rf'\Apolicy +{policy} \(\d+ kB, sampled\)\n')
    self.assertRegex(out, r'observation +float32\[B, 4\]\naction +int32\[B\]\n')
    self.assertTrue(policy.exists())

    weights = (run / 'weights.npz').read_bytes()
    (run / 'weights.npz').write_bytes(weights[:100])
    code, _, err = _run('eval', run)
    self.assertEqual(code, 2)
    self.assertRegex(err, r'\A[^\n]*weights.npz is damaged[^\n]*\n\Z')
    (run / 'weights.npz').unlink()
    code, _, err = _run('export', run, self.dir / 'other.hkg')
    self.assertEqual(code, 2)
    self.assertRegex(err, r'\Ahkgraph: no weights in [^\n]*\n\Z')

  @pytest.mark.heavy
  def test_an_environment_by_its_name(self):
    run = self.dir / 'run'
    code, out, err = _run(
      *('train', '--env', 'delayed_recall', '--algo', 'pqn', *_SMALL),
      *('--lambda', 0.5, '--network', 'gru', '--run-dir', run),
    )
    self.assertEqual((code, err), (0, ''))
    self.assertIn(f'picture     {run / "learning_curve.png"}', out)
    config = json.loads((run / 'config.json').read_text())
    self.assertEqual((config['algorithm'], config['network']), ('pqn', 'gru'))
    self.assertEqual(config['config']['lambda_'], 0.5)
    code, out, err = _run('eval', run, '--episodes', 5, '--sampled')
    self.assertEqual((code, err), (0, ''))
    self.assertIn('(5 sampled episodes)', out)

  @pytest.mark.heavy
  def test_a_task_with_another_algorithm(self):
    run = self.dir / 'run'
    code, out, err = _run(
      *('train', 'delayed_recall', '--algo', 'pqn', *_SMALL),
      *('--run-dir', run),
    )
    self.assertEqual((code, err), (0, ''))
    spec = tasks.find('delayed_recall', 'pqn').network()
    self.assertEqual(_run('show', run)[1], spec.summary() + '\n')

  @pytest.mark.heavy
  def test_ctrl_c_ends_with_130_and_says_how_to_go_on(self):
    def press(logger, row):
      if row['update'] == 1:
        os.kill(os.getpid(), signal.SIGINT)

    run = self.dir / 'run'
    with mock.patch.object(loggers.JsonLines, 'write', press):
      code, out, _ = _run(
        *('train', 'delayed_recall', *_SMALL),
        *('--total-steps', 40_000, '--run-dir', run),
      )
    self.assertEqual(code, 130)
    self.assertIn(f'hkgraph eval {run}', out)
    self.assertTrue((run / 'weights.npz').exists())

  def test_run_folders_get_names_of_their_own(self):
    with contextlib.chdir(self.dir):
      first = cli._new_run_dir('cartpole', 4)
      first.mkdir(parents=True)
      with mock.patch.object(cli.time, 'strftime', return_value='now'):
        a = cli._new_run_dir('cartpole', 4)
        a.mkdir()
        b = cli._new_run_dir('cartpole', 4)
      suite = cli._new_run_dir('navix:Navix/Empty-v0', 0)
    self.assertRegex(str(suite), r'runs/navix-Navix-Empty-v0-seed0-')
    self.assertRegex(str(first), r'runs/cartpole-seed4-\d{8}-\d{6}$')
    self.assertEqual(a.name, 'cartpole-seed4-now')
    self.assertEqual(b.name, 'cartpole-seed4-now-2')


if __name__ == '__main__':
  absltest.main()
