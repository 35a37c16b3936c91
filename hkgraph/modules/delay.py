"""A delay line for anything that a module can pass on."""

from typing import Any

import jax
import jax.numpy as jnp

from hkgraph.modules import history, stateful


class Delay(stateful.StatefulModule):
  """Gives at each row what it was given `delay` rows earlier in the episode.

  Before that it gives `initial_value`. Any tree of arrays of any dtype may
  pass. Sequences are shifted, not scanned.
  """

  def __init__(
    self, delay: int, initial_value: Any = 0, name: str | None = None
  ):
    """Creates the module.

    Args:
      delay: Rows, at least 0.
      initial_value: A number, or a tree like one input without its batch axis.
      name: Name of the module.

    Raises:
      ValueError: if `delay` is no non-negative integer.
    """
    super().__init__(name=name)
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
      raise ValueError(f'`delay` must be a non-negative integer, got {delay!r}')
    self.delay = delay
    self.initial_value = initial_value

  def _initial(self, x: Any) -> Any:
    """The initial value as a tree like one step `x`."""
    value = self.initial_value
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
      value = jax.tree.map(lambda x: self.initial_value, x)
    return jax.tree.map(
      lambda x, v: jnp.broadcast_to(jnp.asarray(v, x.dtype), x.shape), x, value
    )

  def initial_carry(self, x: Any) -> history.History:
    return history.empty(x, max(1, self.delay))

  def reset(self, carry: history.History, x: Any) -> history.History:
    del x
    return history.reset(carry, stateful.current_rows().is_first)

  def step(self, carry: history.History, x: Any) -> tuple[Any, Any]:
    y = history.read(carry, self.delay, self._initial(x))
    return history.write(carry, x), y

  def unroll(self, carry: history.History, x: Any) -> tuple[Any, Any]:
    is_first = stateful.current_rows().is_first
    age = history.age_of_rows(carry, is_first)
    line = jax.tree.map(
      lambda past, x: jnp.concatenate([past, x]), history.past(carry), x
    )
    first = jax.tree.map(lambda x: x[0], x)

    def shift(line, initial):
      known = jnp.reshape(age >= self.delay, age.shape + (1,) * (line.ndim - 2))
      return jnp.where(known, line[: -self.delay], initial[None])

    y = jax.tree.map(shift, line, self._initial(first))
    last = jax.tree.map(lambda line: line[-self.delay :], line)
    return history.extend(carry, last, is_first), y

  def __call__(self, x: Any) -> Any:
    return super().__call__(x) if self.delay else x
