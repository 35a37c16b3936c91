"""Attention over the last frames, in one computation for a whole sequence."""

from collections.abc import Callable
import math
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from hkgraph import types
from hkgraph.modules import encoding, stateful

_BLOCK = 64


class TransformerEncoder(encoding.Encoder):
  """Pre-layer-norm blocks over a window of the last `context` frames.

  The carry holds the frames as they came (uint8 stays uint8), oldest first;
  at the first row of an episode all of them become the current frame. So
  features are a function of parameters and frames alone: nothing kept goes
  stale as parameters change.

  Token `t` is the frame encoder's view of frame `t`. A block adds to it

    sum_j softmax_j(q_t . (k_{t-j} + p_j) / sqrt(d)) v_{t-j},  j = 0..reach,

  with `q, k, v` linear in the layer norm of the tokens and `p` a learned table
  of positions (relative positions on keys: Shaw et al., arXiv 1803.02155, eq.
  2), then a two-layer perceptron of the layer norm of the sum. The `reach` of
  the blocks add up to `context - 1`: one block attends to the whole window,
  several share it out, as stacked convolutions do their receptive field, and
  the last token has seen all of the window and nothing else. Tokens then
  depend on no window's edge, windows share them, and a sequence is one masked
  computation on `T + context - 1` tokens: `apply` and `unroll` are the same
  function, and neither frames nor tokens are copied per window. Before the
  episode there are copies of its first frame, whose tokens equal the first
  token: its position score is the log-sum-exp of all places that they hold.
  """

  def __init__(
    self,
    frame_encoder: Callable[..., Any],
    hidden_size: int = 64,
    num_heads: int = 4,
    num_layers: int = 1,
    context: int = 8,
    *,
    name: str | None = None,
  ):
    """Creates the module.

    Args:
      frame_encoder: From a frame to `hidden_size` features, the same for all
        frames: an `Encoder` without carry, or a function or module that maps
        `[N, *frame]` to `[N, hidden_size]` and keeps no state.
      hidden_size: Number of features, a multiple of `num_heads`.
      num_heads: Of each block's attention.
      num_layers: Number of blocks.
      context: Frames that the features depend on, at least 1.
      name: Name of the module.

    Raises:
      ValueError: if a size is not as above.
      TypeError: if `frame_encoder` cannot be called.
    """
    super().__init__(name=name)
    for key, size in (
      ('hidden_size', hidden_size),
      ('num_heads', num_heads),
      ('num_layers', num_layers),
      ('context', context),
    ):
      if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f'`{key}` must be a positive integer, got {size!r}')
    if hidden_size % num_heads:
      raise ValueError(
        f'`hidden_size` must be a multiple of `num_heads`, got {hidden_size} '
        f'and {num_heads}'
      )
    if not callable(frame_encoder):
      raise TypeError(
        '`frame_encoder` must be an Encoder, or a module or function from '
        f'frames to features, got {frame_encoder!r}'
      )
    self.frame_encoder = frame_encoder
    self.hidden_size = hidden_size
    self.num_heads = num_heads
    self.context = context
    share, rest = divmod(context - 1, num_layers)
    self.reaches = [share + (layer < rest) for layer in range(num_layers)]

  def initial_carry(self, obs_shape: Any, dtype: Any) -> types.Array:
    """A window of zeros. Shape `[B, context, *frame]`."""
    if isinstance(obs_shape, dict):
      encoding.check_rows(self, obs_shape, None)
    batch_size, *frame = obs_shape
    return jnp.zeros((batch_size, self.context, *frame), dtype)

  def __call__(
    self, carry: types.Array, obs: types.Array, is_first: types.Array
  ) -> tuple[types.Array, types.Array]:
    obs = encoding.check_rows(self, obs, is_first)
    is_sequence = jnp.ndim(is_first) == 2
    rows = obs if is_sequence else obs[None]
    first = is_first if is_sequence else is_first[None]
    self._check_window(carry, rows)
    line = jnp.concatenate([jnp.swapaxes(carry, 0, 1)[1:], rows])
    age = _age(first, self.context)
    x = self._tokens(line)
    for reach in self.reaches:
      x = _Block(self.num_heads, reach, name='block')(x, age)
    x = encoding.layer_norm(x)
    carry = _refilled(line[-self.context :], age[-1])
    return carry, x if is_sequence else x[0]

  @hk.transparent
  def _tokens(self, line: types.Array) -> types.Array:
    encoder = self.frame_encoder
    if isinstance(encoder, encoding.Encoder):
      memory = encoder.initial_carry(line.shape[1:], line.dtype)
      remembers = bool(jax.tree.leaves(memory))
    else:
      remembers = isinstance(encoder, stateful.StatefulModule)
    if remembers:
      raise ValueError(
        f'the frame encoder of `{self.name}` must not remember: a window '
        'shows it the same frame in several places; give it to a '
        'RecurrentEncoder, or put it before this module'
      )
    if isinstance(encoder, encoding.Encoder):
      x = encoder((), line, jnp.zeros(line.shape[:2], bool))[1]
    else:
      x = encoding.by_frame(encoder, line, 2)
    if x.shape != (*line.shape[:2], self.hidden_size):
      raise ValueError(
        f'the frame encoder of `{self.name}` must give `hidden_size` = '
        f'{self.hidden_size} features for each frame, got shape '
        f'{list(x.shape[2:])}; let its last layer have that size'
      )
    return x

  def _check_window(self, carry: Any, rows: types.Array) -> None:
    shape = (rows.shape[1], self.context, *rows.shape[2:])
    given = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), carry)
    if given != (shape, rows.dtype):
      raise ValueError(
        f'`{self.name}` needs a carry of shape {shape} and dtype {rows.dtype} '
        f'for these observations, got {given}; `initial_carry` makes one'
      )


class _Block(hk.Module):
  """Attention to the last tokens, then a perceptron for each of them."""

  def __init__(self, num_heads: int, reach: int, name: str | None = None):
    super().__init__(name=name)
    self.num_heads = num_heads
    self.reach = reach

  def __call__(self, x: types.Array, age: types.Array) -> types.Array:
    """Maps tokens `[N + reach, B, H]` to the last `N` of the next layer.

    Args:
      x: Tokens in order of time.
      age: Rows of the same episode before each token; the last `N` count.
    """
    size, num_rows = x.shape[-1], x.shape[0] - self.reach
    y = encoding.layer_norm(x, name='attention_norm')
    q = hk.Linear(size, name='query')(y[self.reach :])
    k, v = jnp.split(hk.Linear(2 * size, name='key_value')(y), 2, axis=-1)
    table = hk.get_parameter(
      'positions',
      (self.reach + 1, size),
      x.dtype,
      hk.initializers.TruncatedNormal(1.0),
    )
    q, k, v, table = (self._heads(y) for y in (q, k, v, table))
    y = window_attention(q, k, v, table, age[age.shape[0] - num_rows :])
    y = hk.Linear(size, name='attended')(jnp.reshape(y, (*y.shape[:-2], size)))
    x = x[self.reach :] + y
    y = encoding.layer_norm(x, name='perceptron_norm')
    y = jax.nn.gelu(hk.Linear(4 * size, name='hidden')(y))
    return x + hk.Linear(size, name='output')(y)

  def _heads(self, x):
    return jnp.reshape(x, (*x.shape[:-1], self.num_heads, -1))


def window_attention(
  q: types.Array,
  k: types.Array,
  v: types.Array,
  positions: types.Array,
  age: types.Array,
) -> types.Array:
  """Each row attends to itself and the `reach` rows before it.

  Rows before an episode count as copies of its first row. Long sequences are
  cut into blocks of queries, so that memory grows with `T * reach`, not `T^2`.

  Args:
    q: Queries. Shape `[T, B, heads, d]`.
    k: Keys of the rows, preceded by `reach` earlier ones. Shape
      `[reach + T, B, heads, d]`.
    v: Values, shape of `k`.
    positions: Added to the keys, by the number of rows between key and query.
      Shape `[reach + 1, heads, d]`.
    age: Rows of the same episode before each. Shape `[T, B]`, int32.

  Returns:
    Shape of `q`.
  """
  reach, num_rows = positions.shape[0] - 1, q.shape[0]
  block = min(num_rows, max(reach, _BLOCK))
  num_blocks = -(-num_rows // block)
  q = _pad(q / math.sqrt(q.shape[-1]), num_blocks * block)
  q = jnp.reshape(q, (num_blocks, block, *q.shape[1:]))
  age = jnp.reshape(_pad(age, num_blocks * block), (num_blocks, block, -1))
  k, v = (_overlapping(x, num_blocks, block, reach) for x in (k, v))
  places = jnp.einsum('nqbhd,jhd->nbhqj', q, positions[::-1])
  places = _fold(places, jnp.swapaxes(age, 1, 2)[:, :, None, :, None])
  scores = jnp.einsum('nqbhd,nkbhd->nbhqk', q, k) + _skew(places)
  y = jnp.einsum('nbhqk,nkbhd->nqbhd', jax.nn.softmax(scores), v)
  return jnp.reshape(y, (num_blocks * block, *y.shape[2:]))[:num_rows]


def _age(is_first: types.Array, unknown: int) -> types.Array:
  """Rows of the same episode before each; at least `unknown` if it is older.

  The `unknown - 1` rows of the window before the sequence come first.
  """
  row = jnp.arange(is_first.shape[0], dtype=jnp.int32)[:, None]
  row = jnp.broadcast_to(row, is_first.shape)
  began = jax.lax.cummax(jnp.where(is_first, row, -unknown), axis=0)
  before = jnp.full((unknown - 1, is_first.shape[1]), unknown, jnp.int32)
  return jnp.concatenate([before, row - began])


def _refilled(frames: types.Array, age: types.Array) -> types.Array:
  """The window `[B, C, ...]` of the last frames `[C, B, ...]`."""
  place = jnp.arange(frames.shape[0])[None]
  begin = (frames.shape[0] - 1 - age)[:, None]
  return jax.vmap(lambda f, i: f[i], (1, 0))(frames, jnp.maximum(place, begin))


def _fold(places: types.Array, age: types.Array) -> types.Array:
  """Gives the scores of places before the episode to its first row."""
  reach = places.shape[-1] - 1
  offset = jnp.reshape(jnp.arange(reach, -1, -1), (1, 1, 1, 1, -1))
  edge = jnp.minimum(age, reach)
  folded = jax.nn.logsumexp(
    places, axis=-1, keepdims=True, where=offset >= edge
  )
  folded = jnp.where(offset == edge, folded, -jnp.inf)
  return jnp.where(offset < edge, places, folded)


def _skew(places: types.Array) -> types.Array:
  """From `[..., q, place]` to `[..., q, key]`: key = q + place, else -inf."""
  *lead, rows, width = places.shape
  pad = [(0, 0)] * (places.ndim - 1) + [(0, rows)]
  x = jnp.pad(places, pad, constant_values=-jnp.inf)
  x = jnp.reshape(x, (*lead, rows * (rows + width)))[..., :-rows]
  return jnp.reshape(x, (*lead, rows, rows + width - 1))


def _pad(x: types.Array, length: int) -> types.Array:
  return jnp.pad(x, [(0, length - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _overlapping(
  x: types.Array, num_blocks: int, block: int, reach: int
) -> types.Array:
  """Cuts into blocks of `block + reach` rows, one for every `block`."""
  if num_blocks == 1:
    return x[None]
  x = _pad(x, (num_blocks + 1) * block)
  x = jnp.reshape(x, (num_blocks + 1, block, *x.shape[1:]))
  return jnp.concatenate([x[:-1], x[1:, :reach]], axis=1)
