"""Populations that leak: a first-order low-pass of what arrives."""

from collections.abc import Sequence
import dataclasses
import math
import numbers
from typing import Any

import haiku as hk
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import stateful


class LeakyPopulation(stateful.StatefulModule):
  """A leaky integrator for each neuron, then the activation.

  The equation is `tau dv/dt = (v_leak - v) + r I`, that of NIR's `LI`. It is
  solved exactly for an input that stands still during a step of length `dt`:

    v_t = v_leak + a (v_{t-1} - v_leak) + (1 - a) r I_t,   a = exp(-dt / tau)

  where `I_t` is the sum of what arrives at step `t`. An episode begins at
  `v = 0`. `log_tau`, `r` and `v_leak` are parameters, of shape `[size]`.
  """

  def __init__(
    self,
    size: int,
    activation: Any = None,
    *,
    tau: float = 10.0,
    dt: float = 1.0,
    r: float = 1.0,
    v_leak: float = 0.0,
    name: str | None = None,
  ):
    """Creates the module; `Leaky` makes it for a graph.

    Args:
      size: Number of neurons.
      activation: Applied to `v`; None is the identity.
      tau: Initial time constant, positive, in the unit of `dt`.
      dt: Length of a step, positive.
      r: Initial gain of the input.
      v_leak: Initial value of where `v` tends to without input.
      name: Name of the module.

    Raises:
      TypeError: If a constant is no number.
      ValueError: If `tau` or `dt` is not positive, or anything is not finite.
    """
    super().__init__(name=name)
    _check_constants(tau=tau, dt=dt, r=r, v_leak=v_leak)
    self.size = size
    self.activation = activation
    self._tau = tau
    self._dt = dt
    self._r = r
    self._v_leak = v_leak

  def initial_carry(self, x: types.Array) -> types.Array:
    """Zeros."""
    return jnp.zeros_like(x)

  def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
    keep, drive = self._coefficients(x)
    carry = keep * carry + drive
    return carry, carry

  def unroll(self, carry: Any, x: Any) -> tuple[Any, Any]:
    # What does not loop is worked out for all rows at once.
    keep, drive = self._coefficients(x)

    def step(v, drive):
      v = keep * self.reset(v, drive) + drive
      return v, v

    return stateful.scan_rows(step, carry, drive)

  def _coefficients(self, x):
    """`a`, of shape `[1, size]`, and what is added to `a v`, of that of `x`."""
    lead = (1,) * (x.ndim - 1)

    def parameter(name, value):
      initial = hk.initializers.Constant(value)
      return hk.get_parameter(name, (self.size,), x.dtype, initial)

    # Not `dt / tau`, whose gradient overflows where `tau` is tiny or infinite.
    log_tau = parameter('log_tau', math.log(self._tau))
    rate = self._dt * jnp.exp(-log_tau)
    r = parameter('r', self._r).reshape(*lead, -1)
    v_leak = parameter('v_leak', self._v_leak).reshape(*lead, -1)
    gain = -jnp.expm1(-rate).reshape(*lead, -1)
    return jnp.exp(-rate)[None], gain * (v_leak + r * x)

  def __call__(self, inputs: Sequence[types.Array]) -> types.Array:
    """Maps the list of inputs, each `[..., size]`, to the activation."""
    v = super().__call__(sum(inputs[1:], inputs[0]))
    return v if self.activation is None else self.activation(v)


@dataclasses.dataclass(frozen=True)
class Leaky:
  """Makes a `LeakyPopulation`: `add_population(..., module=Leaky(tau=20.0))`.

  Attributes:
    tau: Initial time constant, positive, in the unit of `dt`.
    dt: Length of a step, positive.
    r: Initial gain of the input.
    v_leak: Initial value of where the neurons tend to without input.

  Raises:
    TypeError: If anything is no number.
    ValueError: If `tau` or `dt` is not positive, or anything is not finite.
  """

  tau: float = 10.0
  dt: float = 1.0
  r: float = 1.0
  v_leak: float = 0.0

  def __post_init__(self):
    _check_constants(**dataclasses.asdict(self))

  def __call__(self, size: int, activation: Any, name: str) -> LeakyPopulation:
    return LeakyPopulation(
      size, activation, name=name, **dataclasses.asdict(self)
    )


def _check_constants(**constants: Any) -> None:
  for name, value in constants.items():
    is_number = isinstance(value, numbers.Real)
    if not is_number and getattr(value, 'ndim', None) != 0:
      raise TypeError(
        f'`{name}` must be a number, the same for all neurons, got {value!r}; '
        'neurons of their own come of training, or in the parameters'
      )
    must_be_positive = name in ('tau', 'dt')
    if not math.isfinite(value) or (must_be_positive and value <= 0):
      wanted = 'positive and finite' if must_be_positive else 'finite'
      raise ValueError(f'`{name}` must be {wanted}, got {value!r}')
