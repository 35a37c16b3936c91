"""Environments by name: those built in, and those of other packages.

A built-in name is a module of this package with a function `make(**kwargs)`
that returns one unbatched environment. The name of another package, a suite,
and the suite's own name of an environment, with a colon between them, are
understood by the module of the suite's name. Nothing else is imported before
it is asked for.
"""

import importlib
from typing import Any

NAMES = ('bodies', 'cartpole', 'delayed_recall')
SUITES = ('gymnasium', 'gymnax', 'navix', 'pgx')


def make(name: str, **kwargs: Any) -> Any:
  """Makes an environment, with its usual time limit.

  Args:
    name: One of `NAMES`, or the name of a suite in `SUITES` and of an
      environment in it: `'gymnasium:CartPole-v1'`, `'gymnax:CartPole-v1'`,
      `'navix:Navix-Empty-5x5-v0'`, `'pgx:minatar-breakout'`.
    **kwargs: For the `make` of the module of that name. `cartpole`:
      `max_steps=500`; `delayed_recall`: `delay=8`, `num_cues=4`; `bodies`:
      `num_bodies=3`, `shared_weight=0.5`, `max_steps=50`; every suite:
      `max_steps=None`, where None is the environment's own limit.

  Returns:
    A `protocol.Environment`; `wrappers.vectorize` makes a batch of it.

  Raises:
    ValueError: If there is no such environment.
    ImportError: If the package of a suite is not installed.
  """
  suite, colon, rest = str(name).partition(':')
  if colon and suite in SUITES:
    return importlib.import_module(f'{__name__}.{suite}').make(rest, **kwargs)
  if name not in NAMES:
    raise ValueError(_unknown(name, suite if colon else None))
  return importlib.import_module(f'{__name__}.{name}').make(**kwargs)


def _unknown(name: Any, suite: str | None) -> str:
  from hkgraph.envs import suites

  if suite is not None:
    return (
      f'`name` must begin with a suite, one of {", ".join(map(repr, SUITES))}, '
      f'got {name!r}; {suites.near_names(suite, SUITES)}'
    )
  names = ', '.join(map(repr, NAMES))
  if name in SUITES:
    hint = f'name one of the suite {name!r}, as in {_EXAMPLES[name]!r}'
  else:
    near = suites.near_names(str(name), NAMES)
    hint = near if near.startswith('did') else ''
    hint += f'{" " if hint else ""}Others begin with a suite, as in '
    hint += repr(_EXAMPLES['gymnax'])
  return f'`name` must be one of {names}, got {name!r}; {hint}'


_EXAMPLES = {
  'gymnasium': 'gymnasium:CartPole-v1',
  'gymnax': 'gymnax:CartPole-v1',
  'navix': 'navix:Navix-Empty-5x5-v0',
  'pgx': 'pgx:minatar-breakout',
}
