"""Where activities are kept during a pass, and how delayed ones are read.

A pass is one step `[B, ...]` or a sequence `[T, B, ...]`. Groups are arrays
with the population in front: `[P, B, n]` or `[P, T, B, n]`.
"""

import abc
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import trees, types
from hkgraph.graph import products
from hkgraph.graph import schedule as schedule_lib
from hkgraph.modules import history

State = dict[str, history.History]


def state_name(group: int) -> str:
  return f'group_{group}'


class Reader(abc.ABC):
  """The activities of a pass as far as it has come.

  Attributes:
    lead: Leading axes of a population's activity: `(B,)` or `(T, B)`.
  """

  lead: tuple[int, ...]

  def __init__(self, plan: schedule_lib.Schedule, state: State):
    self.plan = plan
    self.state = state
    self._arrays: dict[int, types.Array] = {}
    self._single: dict[str, types.Array] = {}
    self._parts: dict[int, list[types.Array]] = {}

  def put(self, group: int, array: types.Array) -> None:
    """Keeps the activities of a group. Shape `[P, *lead, n]`."""
    self._arrays[group] = array

  def put_one(self, name: str, x: types.Array) -> None:
    """Keeps the activity of one population. Shape `[*lead, n]`."""
    self._single[name] = x
    group, _ = self.plan.position(name)
    names = self.plan.groups[group].names
    if all(name in self._single for name in names):
      self.put(group, jnp.stack([self._single[name] for name in names]))

  def now(self, group: int) -> types.Array:
    """The activities of a group. Shape `[P, *lead, n]`."""
    return self._arrays[group]

  def one(self, name: str, delay: int) -> types.Array:
    """What a population gave `delay` steps ago. Shape `[*lead, n]`."""
    group, i = self.plan.position(name)
    if delay:
      return self._delayed_one(group, i, delay)
    return self._single[name] if name in self._single else self.now(group)[i]

  def rows(self, group: int) -> types.Array:
    """As `now`, but rows of the past may come first: `trim` drops them."""
    return self.now(group)

  def trim(self, y: types.Array) -> types.Array:
    """Drops what was made from the rows of the past, along axis 1."""
    return y

  def each(self, name: str) -> types.Array:
    """As `one` without delay, for callers that ask for all of a group."""
    group, i = self.plan.position(name)
    if group not in self._parts:
      self._parts[group] = trees.unstack(self.now(group))
    return self._parts[group][i]

  def read(
    self, reads: schedule_lib.Reads, rows: dict[str, types.Array]
  ) -> types.Array:
    """What several members read: tables `[q, F]` to `[q, F, *lead, n]`."""
    delays = {d for row in reads.delay for d in row}
    if delays == {0}:
      return (
        self.now(reads.group).at[rows['near']].get(mode='promise_in_bounds')
      )
    late = self._delayed(reads.group, rows['near'], rows['delay'])
    if 0 not in delays:
      return late
    now = self.now(reads.group).at[rows['near']].get(mode='promise_in_bounds')
    at_once = rows['delay'] == 0
    shape = at_once.shape + (1,) * (now.ndim - at_once.ndim)
    return jnp.where(at_once.reshape(shape), now, late)

  def tables(self, bucket: schedule_lib.Bucket) -> list[products.Rows]:
    """From where a bucket reads, for `side_by_side`. Shape `[m, F, ...]`."""
    return products.tables_of(bucket)

  def side_by_side(
    self, reads: schedule_lib.Reads, rows: products.Rows
  ) -> types.Array:
    """What several members read: rows `[q, F]` to `[q, *lead, F * n]`."""
    return products.by_columns(lambda rows: self.read(reads, rows), rows)

  @abc.abstractmethod
  def _delayed_one(self, group: int, i: int, delay: int) -> types.Array:
    """As `one`, for a positive delay."""

  @abc.abstractmethod
  def _delayed(
    self, group: int, near: types.Array, delay: types.Array
  ) -> types.Array:
    """As `read`; what it gives for delay 0 is not used."""

  def next_state(self, groups: Iterable[int] | None = None) -> State:
    """The histories after the pass, of some groups or of all."""
    groups = range(len(self.plan.groups)) if groups is None else groups
    return {
      state_name(g): self._next(g) for g in groups if self.plan.groups[g].length
    }

  @abc.abstractmethod
  def _next(self, group: int) -> history.History:
    """The history of one group after the pass."""


class StepReader(Reader):
  """Reads rings that nobody copies."""

  def __init__(
    self, plan: schedule_lib.Schedule, state: State, batch_size: int
  ):
    super().__init__(plan, state)
    self.lead = (batch_size,)

  def tables(self, bucket):
    """Adds where in a ring each element finds what it reads. `[m, B, F]`."""
    tables = super().tables(bucket)
    for reads, table in zip(bucket.reads, tables, strict=True):
      group = self.plan.groups[reads.group]
      if group.length > 1 and any(map(any, reads.delay)):
        past = self.state[state_name(reads.group)]
        delay = table['delay'][:, None]
        slot = jnp.mod(past.position[None, :, None] - delay, group.length)
        place = slot * len(group.names) + table['near'][:, None]
        known = past.age[None, :, None] >= delay
        # Once for all; fused, both would be worked out for every number read.
        place, known = lax.optimization_barrier((place, known))
        table |= {'place': place, 'known': known}
    return tables

  def side_by_side(self, reads, rows):
    if 'place' not in rows:
      return super().side_by_side(reads, rows)
    values = self.state[state_name(reads.group)].values
    ring = values.reshape(self.lead[0], -1, values.shape[-1])

    def take(x, rows):
      return x.at[rows].get(mode='promise_in_bounds')

    x = jax.vmap(take, (0, 1), 1)(ring, rows['place'])  # [q, B, F, n]
    x = jnp.where(rows['known'][..., None], x, 0)
    if 0 in sum(reads.delay, ()):
      now = jax.vmap(take, (1, None), 1)(self.now(reads.group), rows['near'])
      x = jnp.where((rows['delay'] == 0)[:, None, :, None], now, x)
    return x.reshape(*x.shape[:2], -1)

  def _delayed_one(self, group, i, delay):
    near, delay = jnp.array([[i]]), jnp.array([[delay]])
    return self._delayed(group, near, delay)[0, 0]

  def _delayed(self, group, near, delay):
    past = self.state[state_name(group)]
    if self.plan.groups[group].length == 1:
      # A ring of one slot: what every element wrote last is in plain sight.
      known = past.age[:, None, None] >= 1
      x = jnp.where(known, past.values[:, 0], 0)
      x = x.at[:, near].get(mode='promise_in_bounds')
      return jnp.moveaxis(x, 0, 2)
    batch = jnp.arange(self.lead[0])
    near, delay = near[..., None], delay[..., None]
    slot = past.position[None, None] - delay
    slot = jnp.mod(slot, past.values.shape[1])
    x = past.values.at[batch[None, None], slot, near].get(
      mode='promise_in_bounds'
    )
    return jnp.where((past.age[None, None] >= delay)[..., None], x, 0)

  def _next(self, group):
    past = self.state[state_name(group)]
    return history.write(past, jnp.swapaxes(self.now(group), 0, 1))


class SequenceReader(Reader):
  """Reads shifted sequences, cut where an episode begins."""

  def __init__(
    self,
    plan: schedule_lib.Schedule,
    state: State,
    is_first: types.Array,
  ):
    super().__init__(plan, state)
    self.lead = is_first.shape
    self._is_first = is_first
    self._lines: dict[int, types.Array] = {}

  def age(self, group: int) -> types.Array:
    """Rows of the same episode before each row. Shape `[T, B]`."""
    return history.age_of_rows(self.state[state_name(group)], self._is_first)

  def past(self, group: int) -> types.Array:
    """The steps before, oldest first. Shape `[P, L, B, n]`; L may be 0."""
    length = self.plan.groups[group].length
    if not length:
      names, size = (
        self.plan.groups[group].names,
        self.plan.groups[group].size,
      )
      return jnp.zeros((len(names), 0, self.lead[1], size))
    past = history.past(self.state[state_name(group)])
    return jnp.transpose(past, (2, 0, 1, 3))

  def put(self, group, array):
    super().put(group, array)
    if self.plan.groups[group].length:
      past = self.past(group).astype(array.dtype)
      self._lines[group] = jnp.concatenate([past, array], 1)

  def put_line(self, group: int, line: types.Array) -> None:
    """Keeps the past and the activities of a group. `[P, L + T, B, n]`."""
    self._lines[group] = line
    if not self.plan.groups[group].length:
      super().put(group, line)

  def now(self, group):
    if group not in self._arrays:
      self._arrays[group] = self.trim(self._lines[group])
    return self._arrays[group]

  def rows(self, group):
    return self._lines.get(group, self._arrays.get(group))

  def trim(self, y):
    first = y.shape[1] - self.lead[0]
    return y[:, first:] if first else y

  def _delayed_one(self, group, i, delay):
    start = self.plan.groups[group].length - delay
    x = self._lines[group][i, start : start + self.lead[0]]
    return jnp.where((self.age(group) >= delay)[..., None], x, 0)

  def _delayed(self, group, near, delay):
    line = self._lines[group]
    shape = (1, self.lead[0], *line.shape[2:])

    def one(near, start) -> Any:
      return lax.dynamic_slice(line, (near, start, 0, 0), shape)[0]

    start = self.plan.groups[group].length - delay
    x = jax.vmap(jax.vmap(one))(near, start)
    known = self.age(group)[None, None] >= delay[..., None, None]
    return jnp.where(known[..., None], x, 0)

  def _next(self, group):
    length = self.plan.groups[group].length
    last = jnp.transpose(self._lines[group][:, -length:], (1, 2, 0, 3))
    past = self.state[state_name(group)]
    return history.extend(past, last, self._is_first)
