"""The command line: `hkgraph train`, `eval`, `show`, `export` and `imagine`.

JAX is imported when there is something to compute, so that help is fast.
"""

from collections.abc import Sequence
import pathlib
import re
import sys
import time
from typing import Any

import hkgraph
from hkgraph import arguments
from hkgraph.training import algorithms, tasks

_COMMANDS = {
  'train': 'NAME|--env ENV     train an agent, on a task or in an environment',
  'eval': 'RUN [options]       evaluate the agent of a run folder',
  'show': 'NAME|FILE|RUN       print a graph, and draw it with --output',
  'export': 'RUN FILE          write the policy to one file for JAX alone',
  'imagine': 'RUN [options]    draw what the world model of a run foresees',
}
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: The arguments; None takes those of the process.

  Returns:
    The exit code: 0; 1 if a training met numbers that are not finite; 2 for
    what the user can mend; 130 after Ctrl-C.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    return _run(argv)
  except arguments.UserError as error:
    print(f'hkgraph: {" ".join(str(error).split())}', file=sys.stderr)
    return _USAGE
  except FloatingPointError as error:
    print(f'hkgraph: {error}', file=sys.stderr)
    return _FAILED
  except KeyboardInterrupt:
    print('hkgraph: interrupted', file=sys.stderr)
    return _INTERRUPTED


def _run(argv: list[str]) -> int:
  command, *rest = argv or ['']
  if command in ('-h', '--help'):
    print(_help())
  elif command == '--version':
    print(f'hkgraph {hkgraph.__version__}')
  elif command == 'train':
    return _train(rest)
  elif command in _PARSED:
    options, run = _PARSED[command]
    return run(arguments.parse(options, rest, f'hkgraph {command}'))
  else:
    raise arguments.unknown('command', command, _COMMANDS)
  return 0


def _train(argv: list[str]) -> int:
  name = argv[0] if argv else ''
  algo, env = (arguments.peek(argv, option) for option in ('--algo', '--env'))
  if name in ('-h', '--help'):
    print(_train_help())
    return 0
  if algo is not None and algo not in algorithms.ALGORITHMS:
    raise arguments.unknown('algorithm', algo, algorithms.ALGORITHMS)
  if env is not None:
    return _train_environment(argv, algo or 'ppo')
  if name not in tasks.TASKS:
    raise arguments.unknown('task', name, tasks.TASKS, '; or --env ENV')
  for example in ('--network gru', '--normalize'):
    option = example.split()[0]
    if arguments.peek(argv, option) is not None:
      raise arguments.UserError(
        f'{option} goes only with --env, as in: '
        f'hkgraph train --env {name} {example}'
      )
  return _train_task(name, argv[1:], algo or 'ppo')


def _train_task(name: str, argv: list[str], algo: str) -> int:
  with arguments.told_in_a_line():
    task = tasks.find(name, algo)
  default = arguments.with_config(
    arguments.Train, task.config, algo=algo, total_steps=task.total_steps
  )
  options = arguments.parse(
    type(default), argv, f'hkgraph train {name}', default
  )
  with arguments.told_in_a_line(options):
    return _run_training(options, name, task.network(), task.normalize)


def _train_environment(argv: list[str], algo: str) -> int:
  default = arguments.with_config(
    arguments.TrainEnvironment,
    algorithms.ALGORITHMS[algo].config(),
    algo=algo,
  )
  options = arguments.parse(
    type(default), argv, 'hkgraph train --env ENV', default
  )
  with arguments.told_in_a_line(options, name='env'):
    return _run_training(
      options, options.env, options.network, options.normalize
    )


def _run_training(
  options: arguments.Train, env: str, network: Any, normalize: bool
) -> int:
  from hkgraph.training import loop

  stem = env if options.algo == 'ppo' else f'{env}-{options.algo}'
  result = loop.train(
    env,
    network,
    arguments.plain(options.config),
    total_steps=options.total_steps,
    seed=options.seed,
    run_dir=options.run_dir or _new_run_dir(stem, options.seed),
    eval_episodes=options.eval_episodes,
    normalize=normalize,
    progress=options.progress,
  )
  return _report(result)


def _eval(options: arguments.Eval) -> int:
  with arguments.told_in_a_line(options):
    import jax

    from hkgraph.training import evaluator, run_folder

    env, agent, params, statistics = run_folder.restore(options.run)
    evaluate = evaluator.make_evaluator(
      agent,
      env,
      episodes=options.episodes,
      deterministic=not options.sampled,
    )
    evaluation = evaluate(params, statistics, jax.random.key(options.seed))
  _print_evaluation(evaluation)
  return 0


def _show(options: arguments.Show) -> int:
  with arguments.told_in_a_line():
    spec = _find_graph(options.graph)
  if options.output:
    _check_folder(options.output)
    with arguments.told_in_a_line(options, path='output'):
      spec.draw(options.output)
  print(spec.summary())
  if options.output:
    print(f'\npicture: {options.output}')
  return 0


def _export(options: arguments.Export) -> int:
  with arguments.told_in_a_line():
    from hkgraph.training import export

    header = export.export_run(
      options.run, options.output, sampled=options.sampled
    )
  size = options.output.stat().st_size
  actions = 'sampled' if options.sampled else 'deterministic'
  print(f'policy       {options.output} ({size / 1000:.0f} kB, {actions})')
  print(f'runs on      {", ".join(header["platforms"])}, of any batch size')
  for kind in ('observation', 'action'):
    for path, array in header[kind].items():
      shape = ', '.join(['B', *map(str, array['shape'])])
      label = f'{path} ' if path else ''
      print(f'{kind:13}{label}{array["dtype"]}[{shape}]')
  return 0


def _check_folder(path: pathlib.Path) -> None:
  if not path.parent.is_dir():
    raise arguments.UserError(
      f'no folder {str(path.parent)!r} to write {path.name!r} in; make it first'
    )


def _imagine(options: arguments.Imagine) -> int:
  with arguments.told_in_a_line(options, num_context='context'):
    from hkgraph import plotting

    plotting.check_picture(options.output)
    import jax

    from hkgraph.training import imagination, run_folder

    env, agent, params, statistics = run_folder.restore(options.run)
    episode = imagination.imagine(
      agent,
      env,
      params,
      statistics,
      jax.random.key(options.seed),
      num_context=options.context,
      horizon=options.horizon,
      deterministic=not options.sampled,
    )
    plotting.imagination(episode).savefig(options.output)
  observed = episode.num_context
  print(f'picture     {options.output}')
  print(
    f'rows        {observed} observed, {episode.num_rows - observed} foreseen'
  )
  errors = episode.errors()
  width = max(map(len, ('mean error', *errors)))
  print(f'{"mean error":{width}}  {"observed":>10}  {"foreseen":>10}')
  for name, (before, after) in errors.items():
    print(f'{name:{width}}  {before:10.4g}  {after:10.4g}')
  return 0


def _find_graph(name: str) -> Any:
  if name in tasks.TASKS:
    return tasks.TASKS[name].network()
  path = pathlib.Path(name)
  if path.is_dir():
    path = path / 'graph.json'
    if not path.is_file():
      raise arguments.UserError(
        f'{name!r} holds no `graph.json`; a run folder of a graph does'
      )
  if not path.is_file():
    also = f'; or a file or a run folder, but there is no path {name!r}'
    raise arguments.unknown('graph', name, tasks.TASKS, also)
  from hkgraph.graph import spec

  return spec.GraphSpec.from_json(path.read_text())


def _report(result: Any) -> int:
  print(f'steps       {result.steps:,}')
  if result.evaluation:
    _print_evaluation(result.evaluation)
  print(f'run folder  {result.run_dir}')
  for picture in sorted(result.run_dir.glob('*.png')):
    print(f'picture     {picture}')
  if not result.interrupted:
    return 0
  print(
    f'interrupted; evaluate what was reached: hkgraph eval {result.run_dir}'
  )
  return _INTERRUPTED


def _print_evaluation(evaluation: Any) -> None:
  actions = 'deterministic' if evaluation.deterministic else 'sampled'
  print(
    f'evaluation  mean return {evaluation.mean:.2f} +- '
    f'{evaluation.std:.2f} ({len(evaluation.returns)} {actions} episodes)'
  )
  for key, mean in evaluation.mean_by_key.items():
    print(f'            {key} {mean:.2f}')


def _new_run_dir(name: str, seed: int) -> pathlib.Path:
  name = re.sub(r'[^\w.-]+', '-', name)
  stamp = time.strftime('%Y%m%d-%H%M%S')
  stem = f'{name}-seed{seed}-{stamp}'
  path = pathlib.Path('runs', stem)
  number = 2
  while path.exists():
    path = pathlib.Path('runs', f'{stem}-{number}')
    number += 1
  return path


def _help() -> str:
  lines = [f'  hkgraph {name} {text}' for name, text in _COMMANDS.items()]
  return '\n'.join(
    [
      'usage: hkgraph COMMAND ...',
      '',
      'Networks that are graphs of populations: train, evaluate, look at them.',
      '',
      *lines,
      '  hkgraph --version',
      '',
      '`--help` after any of these tells its options.',
    ]
  )


def _train_help() -> str:
  width = max(map(len, tasks.TASKS))
  *first, last = algorithms.ALGORITHMS
  return '\n'.join(
    [
      'usage: hkgraph train NAME [--algo ALGO] [options]',
      '       hkgraph train --env ENV [--algo ALGO] [--network KIND] [options]',
      '',
      'Trains an agent and evaluates it. Tasks:',
      '',
      *(f'  {t.name:{width}}  {t.summary}' for t in tasks.TASKS.values()),
      '',
      'ENV is any environment by name: one of these, or SUITE:NAME, such as',
      'navix:Navix-Empty-5x5-v0, of a suite that is installed.',
      f'ALGO is {", ".join(first)} or {last}.',
      '',
      'The options, and their values for a task: hkgraph train NAME --help,',
      'and for an environment: hkgraph train --env ENV --help',
    ]
  )


# How the commands are run that are parsed alike.
_PARSED = {
  'eval': (arguments.Eval, _eval),
  'show': (arguments.Show, _show),
  'export': (arguments.Export, _export),
  'imagine': (arguments.Imagine, _imagine),
}
