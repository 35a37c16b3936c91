"""Environments in pure JAX, by name.

Every name is a module of this package with a function `make(**kwargs)` that
returns one unbatched environment; nothing else is imported before it is asked
for. An adapter is such a module too, and takes the part of a name that follows
its own and a colon.
"""

import difflib
import importlib
from typing import Any

NAMES = ('bodies', 'cartpole', 'delayed_recall')


def make(name: str, **kwargs: Any) -> Any:
  """Makes a built-in environment, with its usual time limit.

  Args:
    name: One of `NAMES`.
    **kwargs: For the `make` of the module of that name. `cartpole`:
      `max_steps=500`; `delayed_recall`: `delay=8`, `num_cues=4`; `bodies`:
      `num_bodies=3`, `shared_weight=0.5`, `max_steps=50`.

  Returns:
    A `protocol.Environment`; `wrappers.Vectorize` makes a batch of it.

  Raises:
    ValueError: If there is no such environment.
  """
  if name not in NAMES:
    near = difflib.get_close_matches(str(name), NAMES)
    hint = f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
    raise ValueError(
      f'`name` must be one of {", ".join(map(repr, NAMES))}, got {name!r}{hint}'
    )
  return importlib.import_module(f'{__name__}.{name}').make(**kwargs)
