"""The recurrent state-space model: a deterministic part and latents.

Hafner et al., "Mastering Diverse Domains through World Models",
arXiv 2301.04104, section "World model learning":

  h_t = core(z_{t-1}, a_{t-1}, h_{t-1}),
  z_t ~ posterior(h_t, x_t) where x_t is observed, else z_t ~ prior(h_t).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import distrax
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import encoding, history, latents, perceptron, recurrent


@chex.dataclass(frozen=True, mappable_dataclass=False)
class RSSMState:
  """What the model remembers of each batch element.

  Attributes:
    core: The state of the deterministic part.
    latent: The latents, one-hot each.
  """

  core: types.ArrayTree  # [B, ...]
  latent: types.Array  # [B, S * K]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Observed:
  """A sequence as the model understood it.

  Attributes:
    features: What heads read: the deterministic part and the latents.
    posterior: Of the latents, knowing the row.
    prior: Of the latents, before the row was seen.
    state: After the last row.
    states: After each row, for a batch of all rows: row `t` of element `b` is
      element `t * B + b`.
  """

  features: types.Array  # [T, B, F]
  posterior: distrax.Categorical  # [T, B, S]
  prior: distrax.Categorical  # [T, B, S]
  state: RSSMState  # [B, ...]
  states: RSSMState  # [T * B, ...]


class GatedCell(hk.RNNCore):
  """The gated recurrence of DreamerV3, dense or block-diagonal.

    x = silu(norm(W x_t)),   r, c, u = norm(V [h_{t-1}, x])
    h_t = u' tanh(r' c) + (1 - u') h_{t-1},   r' = sigm(r), u' = sigm(u - 1)

  Of `num_blocks` blocks of units, each reads itself and all of `x` (paper,
  section "World model learning": a GRU with block-diagonal weights); the norm
  is a layer norm over all gates.
  """

  def __init__(
    self,
    size: int,
    hidden_size: int,
    *,
    num_blocks: int = 1,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      size: Number of units, a multiple of `num_blocks`.
      hidden_size: Size of `x`.
      num_blocks: 1 is dense.
      name: Name of the module.

    Raises:
      ValueError: if the units do not divide into the blocks.
    """
    super().__init__(name=name)
    (self._size,) = encoding.check_sizes('size', [size])
    (self._hidden_size,) = encoding.check_sizes('hidden_size', [hidden_size])
    (self._num_blocks,) = encoding.check_sizes('num_blocks', [num_blocks])
    if size % num_blocks:
      raise ValueError(
        f'`size` must be a multiple of `num_blocks`, got {size} units and '
        f'{num_blocks} blocks'
      )

  def initial_state(self, batch_size: int) -> types.Array:
    """Zeros `[B, size]`."""
    return jnp.zeros((batch_size, self._size))

  def __call__(
    self, inputs: types.Array, prev_state: types.Array
  ) -> tuple[types.Array, types.Array]:
    """Advances by one step.

    Args:
      inputs: Shape `[B, I]`.
      prev_state: Shape `[B, size]`.

    Returns:
      The units, `[B, size]`, twice.
    """
    blocks = self._num_blocks
    x = perceptron.Perceptron([self._hidden_size], name='input_layer')(inputs)
    h = prev_state.reshape(-1, blocks, self._size // blocks)
    x = jnp.broadcast_to(x[:, None], (x.shape[0], blocks, x.shape[1]))
    joined = jnp.concatenate([h.astype(x.dtype), x], axis=-1)
    shape = (blocks, joined.shape[-1], 3 * self._size // blocks)
    w = hk.get_parameter('w', shape, x.dtype, _fan_avg_of_blocks)
    gates = jnp.einsum('nbi,bio->nbo', joined, w)
    gates = perceptron.layer_norm(gates.reshape(x.shape[0], -1), 'gate_norm')
    gates = gates.reshape(x.shape[0], blocks, -1)
    reset, candidate, update = jnp.split(gates, 3, axis=-1)
    candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
    update = jax.nn.sigmoid(update - 1)
    h = update * candidate + (1 - update) * h
    h = h.astype(prev_state.dtype).reshape(prev_state.shape)
    return h, h


class ProjectedCore(hk.RNNCore):
  """A core whose inputs are learned of one array: one layer for each key.

  It lets a graph of populations read latents and action, whatever the sizes of
  its inputs; a dict of outputs is joined in the order of its keys.
  """

  def __init__(
    self, core: hk.RNNCore, sizes: Mapping[str, int], name: str | None = None
  ):
    """Creates the module.

    Args:
      core: Reads a dict of arrays.
      sizes: Of the core's inputs, by key.
      name: Name of the module.
    """
    super().__init__(name=name)
    self._core = core
    self._sizes = dict(sizes)

  def initial_state(self, batch_size: int) -> Any:
    """That of the core."""
    return self._core.initial_state(batch_size)

  def __call__(
    self, inputs: types.Array, prev_state: Any
  ) -> tuple[types.Array, Any]:
    """Advances the core by one step on inputs `[B, I]`."""
    layers = perceptron.Perceptron([sum(self._sizes.values())], name='inputs')
    parts, x, start = {}, layers(inputs), 0
    for key, size in self._sizes.items():
      parts[key] = x[:, start : start + size]
      start += size
    y, state = self._core(parts, prev_state)
    return encoding.join(y), state


class RSSM(hk.Module):
  """A core, and latents that it predicts."""

  def __init__(
    self,
    core: hk.RNNCore,
    *,
    num_latents: int,
    num_classes: int,
    hidden_size: int,
    unimix: float = 0.01,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      core: The deterministic part; reads latents and action side by side.
      num_latents: Categorical variables, `S`.
      num_classes: Classes of each, `K`.
      hidden_size: Of the one hidden layer of prior and posterior.
      unimix: Share of the uniform distribution in prior and posterior.
      name: Name of the module.
    """
    super().__init__(name=name)
    if not isinstance(core, hk.RNNCore):
      raise TypeError(
        f'`core` must be an hk.RNNCore, such as hk.GRU(64), got {core!r}'
      )
    self._core = core
    self._shape = (num_latents, num_classes)
    self._hidden_size = hidden_size
    self._unimix = unimix

  def initial(self, batch_size: int, dtype: Any = jnp.float32) -> RSSMState:
    """The state at the beginning of an episode: latents are zero."""
    core = self._core.initial_state(batch_size)
    cast = encoding.cast_floats
    zeros = jnp.zeros((batch_size, self._shape[0] * self._shape[1]), dtype)
    return RSSMState(core=cast(core, dtype), latent=zeros)

  def observe(
    self,
    state: RSSMState,
    embedding: types.Array,
    action_tm1: types.Array,
    is_first: types.Array,
    key: chex.PRNGKey,
  ) -> Observed:
    """Follows a sequence of observed rows.

    State and previous action are masked together where a row is first.

    Args:
      state: Before row 0.
      embedding: Of the observations. Shape `[T, B, E]`.
      action_tm1: The encoded action that led into each row, `[T, B, A]`;
        anything where the row is first.
      is_first: Rows that open an episode. Shape `[T, B]`, bool.
      key: Draws the latents. Consumed.

    Returns:
      Features, distributions and states.
    """
    num_rows, batch_size = is_first.shape
    initial = self.initial(batch_size, embedding.dtype)
    # What does not depend on the state is one product over all rows.
    seen = hk.Linear(self._hidden_size, name='posterior_input')(embedding)
    action_tm1 = jnp.where(is_first[..., None], 0, action_tm1)

    def step(state, row):
      seen, action_tm1, is_first, uniform = row
      state = recurrent.reset_state(is_first, state, initial)
      deter, core = self._advance(state, action_tm1)
      posterior = self._posterior(deter, seen)
      latent = latents.straight_through(posterior, uniform)
      state = RSSMState(core=core, latent=self._flat(latent, deter))
      return state, (deter, posterior.logits, _brief(state))

    # All at once: random bits in a loop are dear to compile and to draw.
    uniform = latents.uniform(key, (num_rows, batch_size, self._shape[0]))
    xs = (seen, action_tm1, is_first, uniform)
    last, (deter, logits, briefs) = hk.scan(step, state, xs)
    return Observed(
      features=jnp.concatenate([deter, briefs.latent], axis=-1),
      posterior=distrax.Categorical(logits=logits),
      prior=self.prior(deter),
      state=last,
      states=_of_rows(state, briefs, is_first),
    )

  def imagine(
    self,
    state: RSSMState,
    features: types.Array,
    act: Callable[[types.Array, Any], tuple[types.Array, Any]],
    inputs: Any,
    key: chex.PRNGKey,
  ) -> tuple[types.Array, Any]:
    """Goes on without observations: latents are drawn from the prior.

    Args:
      state: Where to start. Shape `[N, ...]`.
      features: Those of the start, `[N, F]`.
      act: `(features [N, F], input) -> (encoded action [N, A], aux)`.
      inputs: Tree of what `act` is given at each step. Shape `[H, ...]`.
      key: Draws the latents. Consumed.

    Returns:
      Features after each step, `[H, N, F]`, and what `act` gave beside the
      actions, stacked, `[H, ...]`.
    """

    def step(carry, row):
      (state, features), (x, uniform) = carry, row
      action, aux = act(features, x)
      deter, core = self._advance(state, action.astype(features.dtype))
      latent = latents.straight_through(self.prior(deter), uniform)
      latent = self._flat(latent, deter)
      new = jnp.concatenate([deter, latent], axis=-1)
      return (RSSMState(core=core, latent=latent), new), (new, aux)

    horizon = jax.tree.leaves(inputs)[0].shape[0]
    rows = (horizon, features.shape[0], self._shape[0])
    xs = (inputs, latents.uniform(key, rows))
    return hk.scan(step, (state, features), xs)[1]

  def prior(self, deter: types.Array) -> distrax.Categorical:
    """The latents as the deterministic part foresees them, `[..., S, K]`."""
    x = perceptron.Perceptron([self._hidden_size], name='prior_hidden')(deter)
    return self._categorical(x, 'prior_output')

  def _posterior(self, deter, seen):
    x = hk.Linear(self._hidden_size, with_bias=False, name='posterior_deter')
    x = perceptron.layer_norm(x(deter) + seen, 'posterior_norm')
    return self._categorical(jax.nn.silu(x), 'posterior_output')

  def _categorical(self, x, name):
    logits = hk.Linear(self._shape[0] * self._shape[1], name=name)(x)
    logits = logits.reshape(*x.shape[:-1], *self._shape)
    return latents.unimix_categorical(logits, self._unimix)

  def _advance(self, state, action_tm1):
    x = jnp.concatenate([state.latent, action_tm1], axis=-1)
    y, core = self._core(x, state.core)
    y = encoding.join(y)
    _check_step(state.core, core, y)
    return y.astype(x.dtype), core

  def _flat(self, latent, like):
    return latent.reshape(latent.shape[0], -1).astype(like.dtype)


def _check_step(before: Any, after: Any, y: types.Array) -> None:
  """Raises `ValueError` unless a core gives `[B, F]`, and its state's like."""
  if y.ndim != 2:
    raise ValueError(
      f'the output of `core` must be [B, F], or a dict of such, got {y.shape}; '
      'let it flatten what it gives'
    )
  before, after = (
    jax.tree.map(lambda x: f'{x.dtype}{list(x.shape)}', tree)
    for tree in (before, after)
  )
  if before != after:
    raise ValueError(
      '`core` must keep structure, shapes and dtypes of its state, which '
      f'`initial_state` makes {before}, got {after}'
    )


def _is_history(x: Any) -> bool:
  return isinstance(x, history.History)


def _brief(state: RSSMState) -> RSSMState:
  """The state without what the rows before it tell: histories lose theirs."""
  return jax.tree.map(
    lambda x: history.last(x) if _is_history(x) else x,
    state,
    is_leaf=_is_history,
  )


def _of_rows(
  before: RSSMState, briefs: RSSMState, is_first: types.Array
) -> RSSMState:
  """The states after each row, of what was new in each."""

  def expand(before, brief):
    if _is_history(before):
      return history.of_rows(before, brief, is_first)
    return lax.collapse(brief, 0, 2)

  return jax.tree.map(expand, before, briefs, is_leaf=_is_history)


def _fan_avg_of_blocks(shape: Sequence[int], dtype: Any) -> types.Array:
  """`fan_avg` weights of each block, `[blocks, in, out]`."""
  blocks = [perceptron.fan_avg(shape[1:], dtype) for _ in range(shape[0])]
  return jnp.stack(blocks)
