"""The semantics of design section 3, slow and obvious, in NumPy."""

import numpy as np


def run(spec, table, inputs, is_first, *, transforms=None, episodes=None):
  """Walks a graph neuron group by neuron group, step by step.

  Args:
    spec: The graph; activations are called on NumPy arrays.
    table: `{(src, dst, index): {'w', 'b'}}`.
    inputs: `{key: [T, B, size]}`.
    is_first: `[T, B]`.
    transforms: `{(src, dst, index): function of [size]}` for custom ones.
    episodes: What `run` returned as such, to go on from there.

  Returns:
    `{key: [T, B, size]}`, and for each batch element the activities of the
    rows of its present episode, as a list of `{name: [size]}`.
  """
  num_rows, batch_size = np.shape(is_first)
  episodes = [list(e) for e in episodes or [[]] * batch_size]
  outputs = {
    p.output_to: np.zeros((num_rows, batch_size, p.size)) for p in spec.outputs
  }
  for t in range(num_rows):
    for b in range(batch_size):
      if is_first[t][b]:
        episodes[b] = []
      row = {key: np.asarray(x[t][b], float) for key, x in inputs.items()}
      activity = _step(spec, table, transforms or {}, row, episodes[b])
      episodes[b].append(activity)
      for p in spec.outputs:
        outputs[p.output_to][t, b] = activity[p.name]
  return outputs, episodes


def _step(spec, table, transforms, row, past):
  activity = {}
  waiting = [p.name for p in spec.populations]
  while waiting:
    for name in list(waiting):
      connections = [c for c in spec.connections if c.dst == name]
      if any(c.delay == 0 and c.src in waiting for c in connections):
        continue
      population = next(p for p in spec.populations if p.name == name)
      x = np.zeros(population.size)
      if population.input_from is not None:
        x = x + row[population.input_from]
      for c in connections:
        x = x + _arrives(c, table, transforms, activity, past, spec)
      if population.activation is not None:
        x = np.asarray(population.activation(x.astype(np.float32)), float)
      activity[name] = x
      waiting.remove(name)
  return activity


def _arrives(c, table, transforms, activity, past, spec):
  if c.delay == 0:
    source = activity[c.src]
  elif c.delay <= len(past):
    source = past[-c.delay][c.src]
  else:
    size = next(p.size for p in spec.populations if p.name == c.src)
    source = np.zeros(size)
  key = (c.src, c.dst, c.index)
  if c.transform is not None:
    return np.asarray(transforms[key](source), float)
  return source @ np.asarray(table[key]['w'], float) + np.asarray(
    table[key]['b'], float
  )
