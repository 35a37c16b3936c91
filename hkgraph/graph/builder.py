"""Declares a graph, call by call."""

from collections.abc import Callable
import dataclasses
from typing import Any

from hkgraph.graph import spec, validate


class PopulationGraph:
  """A graph of populations in the making.

  Names and numbers are checked where they are given; what needs the whole
  graph is checked by `finalize`. A call that raises leaves the graph as it
  was. Populations may be declared after the connections that name them, in any
  order; the order has no effect on the result.

  >>> graph = PopulationGraph()
  >>> graph.add_input('eye', 8, input_from='pixels')
  >>> graph.add_population('brain', 32, activation='jax.nn.swish')
  >>> graph.add_output('arm', 2)
  >>> graph.connect('eye', 'brain')
  >>> graph.connect('brain', 'brain', delay=1)
  >>> graph.connect('brain', 'arm')
  >>> graph.finalize().order
  ('eye', 'brain', 'arm')
  """

  def __init__(self):
    self._populations: dict[str, spec.PopulationSpec] = {}
    self._connections: list[spec.ConnectionSpec] = []

  def add_population(
    self,
    name: str,
    size: int,
    *,
    activation: Callable[..., Any] | str | None = None,
    module: Callable[..., Any] | None = None,
  ) -> None:
    """Declares a population that only other populations see.

    Args:
      name: An identifier, not used by another population.
      size: Number of neurons, at least 1.
      activation: Applied once to the sum of what arrives, `[..., size]` to the
        same shape: a callable or a public name such as `'jax.nn.swish'` or
        `'jax.numpy.tanh'`. None is the identity.
      module: A subclass of `hg.Population` to use in its place; it is called
        as `module(size=..., activation=..., name=...)`.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If it is of a wrong value.
    """
    self._add(name, size, activation=activation, module=module)

  def add_input(
    self,
    name: str,
    size: int,
    *,
    input_from: str,
    activation: Callable[..., Any] | str | None = None,
    module: Callable[..., Any] | None = None,
  ) -> None:
    """Declares a population to whose input an observation is added.

    Args:
      name: As for `add_population`.
      size: Size of the observation, `[..., size]`.
      input_from: Key of the observation; several inputs may read one.
      activation: As for `add_population`.
      module: As for `add_population`.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If it is of a wrong value.
    """
    validate.text('input_from', input_from)
    self._add(
      name, size, activation=activation, input_from=input_from, module=module
    )

  def add_output(
    self,
    name: str,
    size: int,
    *,
    output_to: str | None = None,
    activation: Callable[..., Any] | str | None = None,
    module: Callable[..., Any] | None = None,
  ) -> None:
    """Declares a population that is found in the outputs of the network.

    Args:
      name: As for `add_population`.
      size: As for `add_population`.
      output_to: Key in the outputs, not used by another one; None is `name`.
      activation: As for `add_population`.
      module: As for `add_population`.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If it is of a wrong value.
    """
    key = name if output_to is None else validate.text('output_to', output_to)
    self._add(name, size, activation=activation, output_to=key, module=module)

  def connect(
    self,
    src: str,
    dst: str,
    *,
    transform: Callable[[], Any] | None = None,
    delay: int = 0,
    reciprocal: bool = False,
  ) -> None:
    """Declares a connection; there may be several between two populations.

    Args:
      src: Name of the population that is read.
      dst: Name of the population that is fed.
      transform: Zero-argument factory of a Haiku module, or a subclass of
        `hg.Connection`, that maps `[..., size of src]` to `[..., size of dst]`.
        None is `x @ w + b`.
      delay: How many steps ago the source is read (zeros before the episode
        began). Without a delay it is read in this step, so every cycle needs
        one somewhere.
      reciprocal: Whether to make a second, independent connection from `dst`
        to `src` in the same way.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If it is of a wrong value.
    """
    there = spec.ConnectionSpec(src, dst, delay, transform)
    back = dataclasses.replace(there, src=dst, dst=src)
    if not isinstance(reciprocal, bool):
      raise TypeError(f'`reciprocal` must be a bool, got {reciprocal!r}')
    if reciprocal and src == dst:
      raise ValueError(
        f'`reciprocal` needs two populations, got {src!r} twice; call '
        f'connect({src!r}, {src!r}, delay={delay or 1}) once per connection'
      )
    self._connections += [there, back] if reciprocal else [there]

  @property
  def populations(self) -> tuple[spec.PopulationSpec, ...]:
    """Those declared so far, in the order of the calls."""
    return tuple(self._populations.values())

  @property
  def connections(self) -> tuple[spec.ConnectionSpec, ...]:
    """Those declared so far, in the order of the calls; not yet counted."""
    return tuple(self._connections)

  def finalize(self) -> spec.GraphSpec:
    """The graph as it now stands, frozen; later calls do not change it.

    Raises:
      GraphError: A `ValueError` that tells all faults of the graph together:
        unknown populations, cycles without delay, outputs that share a key or
        are not connected, inputs of unlike sizes that read one key, no output.
    """
    return spec.GraphSpec(self.populations, self.connections)

  def _add(self, name: str, size: int, **fields):
    population = spec.PopulationSpec(name, size, **fields)
    if name in self._populations:
      declared = validate.call(self._populations[name])
      raise ValueError(
        f'`name` {name!r} is taken by {declared}; give this population '
        f'another, for instance {self._free(name)!r}'
      )
    self._populations[name] = population

  def _free(self, name: str) -> str:
    numbers = range(2, len(self._populations) + 3)
    names = (f'{name}_{number}' for number in numbers)
    return next(n for n in names if n not in self._populations)
