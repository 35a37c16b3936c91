"""One pass over a graph, block by block, for a step or a sequence alike."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.graph import looped, products, readers
from hkgraph.graph import schedule as schedule_lib
from hkgraph.graph import spec as spec_lib
from hkgraph.modules import history, stateful


class Execution:
  """What a pass needs, and its rules; the reader holds what it has found."""

  def __init__(
    self,
    spec: spec_lib.GraphSpec,
    reader: readers.Reader,
    inputs: Mapping[str, types.Array],
    weights_and_biases: tuple[looped.Arrays, looped.Arrays],
    populations: Mapping[str, Any],
    transforms: Mapping[schedule_lib.ConnectionKey, Any],
    dtype: Any,
  ):
    self.spec = spec
    self.reader = reader
    self.plan = reader.plan
    self.inputs = {k: x.astype(dtype) for k, x in inputs.items()}
    self.weights, self.biases = weights_and_biases
    self.populations = populations
    self.transforms = transforms
    self.dtype = dtype

  def blocks(self) -> None:
    """Runs the whole schedule."""
    in_sequence = len(self.reader.lead) == 2
    for number, block in enumerate(self.plan.blocks):
      if in_sequence and block.is_loop:
        run = self._walk_loop if block.is_custom else self._unroll_loop
        run(number, block)
        continue
      arrived = {} if block.is_loop else self._arriving(block)
      for g in block.groups:
        if self.plan.groups[g].module or block.is_custom:
          for name in self.plan.groups[g].names:
            self.walk(name)
        else:
          self.reader.put(g, self._activity(g, block, arrived))

  # Groups.

  def _activity(
    self,
    g: int,
    block: schedule_lib.Block,
    arrived: Mapping[int, types.Array],
  ) -> types.Array:
    """What a group gives, `[P, *lead, n]`, once all that it reads is there."""
    buckets = block.joined if block.is_loop else block.outer
    buckets = [b for b in buckets if b.group == g]
    x = self._drive(g, buckets, arrived)
    group = self.plan.groups[g]
    shape = (len(group.names), *self.reader.lead, group.size)
    bias = self._bias(g, buckets)
    bias = bias.reshape(shape[0], *(1 for _ in self.reader.lead), shape[-1])
    x = jnp.broadcast_to(bias, shape) if x is None else x + bias
    x = x if group.activation is None else group.activation(x)
    return x.astype(self.dtype)

  def _arriving(self, block: schedule_lib.Block) -> dict[int, types.Array]:
    """What each bucket from earlier blocks brings, by the bucket's id.

    Buckets that read the same (say, policy and value) are one product.
    """
    alike: dict[Any, list[schedule_lib.Bucket]] = {}
    for b in block.outer:
      sources = tuple((r.group, r.near, r.delay) for r in b.reads)
      alone = not sources or any(r.is_padded for r in b.reads)
      alike.setdefault(id(b) if alone else sources, []).append(b)
    arrived = {}
    for buckets in alike.values():
      if not buckets[0].reads:
        continue
      y = self._product(buckets)
      sizes = [self.plan.groups[b.group].size for b in buckets]
      parts = jax.lax.split(y, sizes, axis=-1) if len(sizes) > 1 else [y]
      arrived |= zip(map(id, buckets), parts, strict=True)
    return arrived

  def _drive(
    self,
    g: int,
    buckets: Iterable[schedule_lib.Bucket],
    arrived: Mapping[int, types.Array],
  ) -> types.Array | None:
    """The sum of what arrives over buckets, custom transforms and inputs."""
    names = self.plan.groups[g].names
    parts = [
      (b.members, arrived[id(b)] if id(b) in arrived else self._product([b]))
      for b in buckets
      if b.reads
    ]
    populations = [self.spec.population(name) for name in names]
    read = [i for i, p in enumerate(populations) if p.input_from is not None]
    if read:
      x = jnp.stack([self.inputs[populations[i].input_from] for i in read])
      parts.append((tuple(read), x))
    for i, name in enumerate(names):
      for c in self.spec.incoming(name):
        if c.transform is not None:
          parts.append(((i,), self._transmit(c)[None]))
    return self._add(len(names), parts)

  def _add(self, count, parts) -> types.Array | None:
    total = None
    order = sum((members for members, _ in parts), ())
    if len(parts) > 1 and order == tuple(range(count)):
      return jnp.concatenate([x for _, x in parts])
    for members, x in parts:
      if members != tuple(range(count)):
        zeros = jnp.zeros((count, *x.shape[1:]), x.dtype)
        total = zeros if total is None else total
        total = total.at[jnp.array(members)].add(x, unique_indices=True)
      else:
        total = x if total is None else total + x
    return total

  def _bias(self, g: int, buckets) -> types.Array:
    """Biases of all default connections into each member. Shape `[P, n]`."""
    group = self.plan.groups[g]
    total = jnp.zeros((len(group.names), group.size), self.dtype)
    for bucket in buckets:
      for reads in bucket.reads:
        b = products.rows_of(self.biases[reads.pack], reads)
        b = jnp.sum(b.reshape(len(bucket.members), -1, group.size), 1)
        total = total.at[jnp.array(bucket.members)].add(b)
    return total

  def _product(self, buckets: Sequence[schedule_lib.Bucket]) -> types.Array:
    """What arrives at the members of buckets that read the same.

    Returns:
      Shape `[m, *lead, n]`, where `n` adds up the sizes over the buckets.
    """
    bucket = buckets[0]
    (reads, *others) = bucket.reads
    if others and self._is_heavy(bucket):
      apart = [
        [
          dataclasses.replace(b, reads=(r,))
          for b, r in zip(buckets, alike, strict=True)
        ]
        for alike in zip(*(b.reads for b in buckets), strict=True)
      ]
      return functools.reduce(jnp.add, map(self._product, apart))
    stack = products.join(
      [products.bucket_weights(b, self.weights) for b in buckets], 2
    )
    if not others and _is_shared(reads):
      name = self.plan.groups[reads.group].names[reads.near[0][0]]
      x = self.reader.one(name, reads.delay[0][0])
      return self._multiply(x, stack)
    if not others and len(bucket.members) == 1 and not reads.is_padded:
      x = self._read_all(reads, whole=True)[0]
      w = stack.reshape(reads.fan_in, -1, stack.shape[-1])
      if w.shape[-1] < w.shape[-2]:
        # Few outputs: add up small products rather than copy the inputs.
        y = jnp.sum(self._multiply(x, w), 0)[None]
        return self.reader.trim(y)
    if not others and reads.fan_in == 1 and self._is_all(reads):
      x = self._read_all(reads, whole=True)[:, 0]
      return self.reader.trim(self._multiply(x, stack))
    turn = self._turn(bucket, stack)
    tables = self.reader.tables(bucket)

    def body(i, y):
      x = products.side_by_side(bucket, tables, self._read, i, turn)
      part = self._multiply(x, products.cut(stack, i, turn))
      return products.put(y, part, i, turn)

    shape = (len(bucket.members), *self.reader.lead, stack.shape[-1])
    y = jnp.zeros(shape, self.dtype)
    return products.repeat(body, len(bucket.members) // turn, y)

  def _multiply(self, x: types.Array, w: types.Array) -> types.Array:
    """`[q, *lead, k]`, or `[*lead, k]` for all, times `[q, k, j]`.

    A graph without loops keeps JAX's own derivative, in every mode.
    """
    lead = x.shape[-1 - len(self.reader.lead) : -1]
    if len(lead) == 1 or not any(b.is_loop for b in self.plan.blocks):
      if x.ndim > len(lead) + 1:
        return jnp.einsum('q...k,qkj->q...j', x, w)
      return jnp.moveaxis(jnp.einsum('...k,qkj->...qj', x, w), -2, 0)
    x = x.reshape(*x.shape[: x.ndim - 3], -1, x.shape[-1])
    y = products.member_products(x, w)
    return y.reshape(w.shape[0], *lead, w.shape[-1])

  def _is_heavy(self, bucket: schedule_lib.Bucket) -> bool:
    """Whether a step would rather add up products than join the weights."""
    if len(self.reader.lead) == 2:
      return False
    weights = (self.weights[reads.pack] for reads in bucket.reads)
    return sum(w.size * w.dtype.itemsize for w in weights) > products.SMALL

  def _turn(self, bucket, stack) -> int:
    """Members at a time; all in a sequence, whose derivative is JAX's own."""
    if len(self.reader.lead) == 2:
      return len(bucket.members)
    each = self.reader.lead[0] * stack.shape[1] * self.dtype.itemsize
    return products.turn_size(len(bucket.members), each)

  def _read(self, reads, rows):
    in_one_turn = len(rows['near']) == len(reads.near)
    if reads.fan_in == 1 and in_one_turn and self._is_all(reads):
      return self.reader.now(reads.group)
    return self.reader.side_by_side(reads, rows)

  def _is_all(self, reads: schedule_lib.Reads) -> bool:
    """Whether the members read a whole group, in its order and at once."""
    count = len(self.plan.groups[reads.group].names)
    in_order = sum(reads.near, ()) == tuple(range(count))
    return in_order and not any(map(any, reads.delay))

  def _read_all(
    self, reads: schedule_lib.Reads, whole: bool = False
  ) -> types.Array:
    """What all members read. Shape `[m, F, *lead, n]`.

    Args:
      reads: What they read.
      whole: Whether rows of the past may come first, for `trim` to drop.
    """
    if self._is_all(reads):
      x = (self.reader.rows if whole else self.reader.now)(reads.group)
      return x.reshape(len(reads.near), reads.fan_in, *x.shape[1:])
    rows = {
      'near': jnp.array(reads.near),
      'delay': jnp.array(reads.delay),
    }
    return self.reader.read(reads, rows)

  # Loops, in a sequence.

  def _unroll_loop(self, number: int, block: schedule_lib.Block) -> None:
    drives, biases, pasts = [], [], []
    arrived = self._arriving(block)
    for g in block.groups:
      outer = [b for b in block.outer if b.group == g]
      inner = [b for b in block.inner if b.group == g]
      drives.append(self._drive(g, outer, arrived))
      biases.append(self._bias(g, outer + inner))
      pasts.append(self.reader.past(g).astype(self.dtype))
    longest = max(block.groups, key=lambda g: self.plan.groups[g].length)
    lines = looped.unroll(
      self.plan,
      number,
      self.weights,
      biases,
      drives,
      pasts,
      self.reader.age(longest),
    )
    for g, line in zip(block.groups, lines, strict=True):
      self.reader.put_line(g, line)

  def _walk_loop(self, number: int, block: schedule_lib.Block) -> None:
    """A loop with custom parts: one scan, and in it connection by connection.

    What arrives from outside is worked out before, for all steps at once.
    """
    names = [n for g in block.groups for n in self.plan.groups[g].names]
    outside = {
      schedule_lib.key_of(c): self._transmit(c)
      for name in names
      for c in self.spec.incoming(name)
      if c.src not in names
    }
    kept = [readers.state_name(g) for g in block.groups]
    state = {k: v for k, v in self.reader.state.items() if k in kept}

    def step(state, x):
      inputs, arrived = x
      reader = readers.StepReader(self.plan, state, self.reader.lead[1])
      run = Execution(
        self.spec,
        reader,
        inputs,
        (self.weights, self.biases),
        self.populations,
        self.transforms,
        self.dtype,
      )
      for name in self.spec.order:
        if name in names:
          run.walk(name, arrived)
      activities = {name: reader.one(name, 0) for name in names}
      return reader.next_state(block.groups), activities

    def reset_and_step(state, x):
      is_first = stateful.current_rows().is_first
      state = {k: history.reset(h, is_first) for k, h in state.items()}
      return step(state, x)

    _, activities = stateful.scan_rows(
      reset_and_step, state, (self.inputs, outside)
    )
    for name in names:
      self.reader.put_one(name, activities[name])

  # Connection by connection.

  def walk(
    self,
    name: str,
    arrived: Mapping[schedule_lib.ConnectionKey, types.Array] | None = None,
  ) -> None:
    """Computes one population from what its connections bring.

    Args:
      name: The population.
      arrived: What some of the connections bring, if it is known already.
    """
    arrived = arrived or {}
    population = self.spec.population(name)
    arriving = []
    if population.input_from is not None:
      arriving.append(self.inputs[population.input_from])
    for c in self.spec.incoming(name):
      key = schedule_lib.key_of(c)
      arriving.append(arrived[key] if key in arrived else self._transmit(c))
    if not arriving:
      arriving.append(
        jnp.zeros((*self.reader.lead, population.size), self.dtype)
      )
    x = self.populations[name](arriving)
    check_activity(population, x, (*self.reader.lead, population.size))
    self.reader.put_one(name, x.astype(self.dtype))

  def _transmit(self, c: spec_lib.ConnectionSpec) -> types.Array:
    """What a connection brings. Shape `[*lead, n]`."""
    x = self.reader.one(c.src, c.delay)
    key = schedule_lib.key_of(c)
    if c.transform is None:
      pack, row = self.plan.row(key)
      w, b = self.weights[pack][row], self.biases[pack][row]
      return x @ w + jnp.broadcast_to(b, (*x.shape[:-1], b.shape[-1]))
    y = self.transforms[key](x)
    size = self.spec.population(c.dst).size
    if jnp.shape(y) != (*x.shape[:-1], size):
      raise ValueError(
        f'the transform of {c.src} -> {c.dst} must map {x.shape} to '
        f'{(*x.shape[:-1], size)}, got {jnp.shape(y)}; give it the output '
        f'size {size}'
      )
    return y.astype(self.dtype)


def check_activity(
  population: spec_lib.PopulationSpec, x: Any, shape: tuple[int, ...]
) -> None:
  """Checks what an activation or a custom population gave."""
  if jnp.shape(x) != shape:
    what = 'module' if population.module else 'activation'
    raise ValueError(
      f'the {what} of population {population.name!r} must keep the shape '
      f'{shape}, got {jnp.shape(x)}; give one that works on each neuron, or on '
      'the last axis'
    )


def _is_shared(reads: schedule_lib.Reads) -> bool:
  """Whether every member reads the same one thing."""
  sources = {
    (*near, *delay) for near, delay in zip(reads.near, reads.delay, strict=True)
  }
  return reads.fan_in == 1 and len(sources) == 1
