"""An actor-learner in the manner of IMPALA, with a graph where an LSTM was.

Espeholt et al. (2018, "IMPALA: Scalable Distributed Deep-RL with Importance
Weighted Actor-Learner Architectures"): the actor follows parameters that are
some updates old, and V-trace corrects the learner's targets for it. All of it
is plain Haiku and rlax: the core is reset by `hk.ResetCore` and unrolled by
`hk.dynamic_unroll`, and `hg.GraphCore` fits in as any `hk.RNNCore` does;
`--core lstm` puts an `hk.LSTM` there, and no other line changes.
"""

import argparse
import functools
from typing import Any, NamedTuple

import distrax
import dm_env
from dm_env import specs
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

import hkgraph as hg

NUM_ENVS, NUM_STEPS = 32, 24
DISCOUNT, LAG = 0.99, 4  # The actor takes over parameters every LAG updates.


class Catch(dm_env.Environment):
  """A ball falls; the paddle moves left, stays or moves right to catch it.

  The ball is shown in its first `visible` rows only: a policy without memory
  cannot know where it went.
  """

  def __init__(self, seed: int, rows: int = 7, columns: int = 5, visible=2):
    self._random = np.random.default_rng(seed)
    self._shape = rows, columns
    self._visible = visible
    self._ball, self._paddle, self._done = [0, 0], 0, True

  def reset(self) -> dm_env.TimeStep:
    columns = self._shape[1]
    self._ball = [0, int(self._random.integers(columns))]
    self._paddle = columns // 2
    self._done = False
    return dm_env.restart(self._board())

  def step(self, action: int) -> dm_env.TimeStep:
    if self._done:
      return self.reset()
    self._ball[0] += 1
    self._paddle = int(
      np.clip(self._paddle + action - 1, 0, self._shape[1] - 1)
    )
    self._done = self._ball[0] == self._shape[0] - 1
    if not self._done:
      return dm_env.transition(0.0, self._board())
    caught = self._ball[1] == self._paddle
    return dm_env.termination(1.0 if caught else -1.0, self._board())

  def observation_spec(self) -> specs.Array:
    return specs.BoundedArray(self._shape, np.float32, 0.0, 1.0, 'board')

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(3, name='action')

  def _board(self):
    board = np.zeros(self._shape, np.float32)
    board[-1, self._paddle] = 1
    if self._ball[0] < self._visible:
      board[tuple(self._ball)] = 1
    return board


def make_core(kind: str) -> hk.RNNCore:
  if kind == 'lstm':
    return hk.LSTM(32)
  graph = hg.PopulationGraph()
  graph.add_input('eye', 32, input_from='x')
  graph.add_population('fast', 32, activation='jax.nn.swish')
  graph.add_population('slow', 32, activation='jax.numpy.tanh')
  graph.add_output('read', 32, activation='jax.nn.swish')
  graph.connect('eye', 'fast')
  graph.connect('fast', 'slow')
  graph.connect('slow', 'slow', delay=1)
  graph.connect('slow', 'fast', delay=1)
  graph.connect('fast', 'read')
  graph.connect('slow', 'read')
  return hg.GraphCore(graph.finalize())


class Net(hk.Module):
  """Torso, core, policy logits and value."""

  def __init__(self, core: str, num_actions: int):
    super().__init__()
    self._torso = hk.Sequential([hk.Flatten(), hk.nets.MLP([32, 32])])
    self._core = hk.ResetCore(make_core(core))
    self._policy, self._value = hk.Linear(num_actions), hk.Linear(1)

  def initial_state(self, batch_size: int) -> Any:
    return self._core.initial_state(batch_size)

  def unroll(self, rows: 'Row', state: Any) -> Any:
    """Logits `[T, B, A]` and values `[T, B]` of rows, and the state after."""
    x = hk.BatchApply(self._torso)(rows.observation)
    y, state = hk.dynamic_unroll(self._core, (x, rows.is_first), state)
    y = jnp.concatenate(jax.tree.leaves(y), axis=-1)  # A graph gives a dict.
    return self._policy(y), jnp.squeeze(self._value(y), -1), state


class Row(NamedTuple):
  """What `B` environments show; `T` of them are stacked to `[T, B, ...]`."""

  observation: Any
  reward: Any
  discount: Any
  is_first: Any
  is_last: Any


class Rollout(NamedTuple):
  """`T` actions between `T + 1` rows, and the core's state before the first."""

  rows: Row
  action: Any
  logits: Any
  state: Any


def make_functions(core: str):
  """`init`, `initial_state`, `act` and `unroll`, pure."""
  num_actions = Catch(0).action_spec().num_values
  unroll = hk.without_apply_rng(
    hk.transform(lambda *args: Net(core, num_actions).unroll(*args))
  )
  initial_state = hk.without_apply_rng(
    hk.transform(lambda size: Net(core, num_actions).initial_state(size))
  )

  @jax.jit
  def act(params, key, row, state):
    row = jax.tree.map(lambda x: x[None], row)
    logits, _, state = unroll.apply(params, row, state)
    return jax.random.categorical(key, logits[0]), logits[0], state

  return unroll, lambda size: initial_state.apply({}, size), act


class Actor:
  """Steps environments with whatever parameters it is given."""

  def __init__(self, act, state, seed: int):
    self._act = act
    self._state = state
    self._key = jax.random.key(seed)
    self._envs = [Catch(seed + 1000 * i) for i in range(NUM_ENVS)]
    self.row = _row([env.reset() for env in self._envs])

  def run(self, params) -> Rollout:
    start, rows, taken = self._state, [self.row], []
    for _ in range(NUM_STEPS):
      self._key, key = jax.random.split(self._key)
      action, logits, self._state = self._act(
        params, key, self.row, self._state
      )
      action = np.asarray(action)
      pairs = zip(self._envs, action.tolist(), strict=True)
      self.row = _row([env.step(a) for env, a in pairs])
      rows.append(self.row)
      taken.append((action, np.asarray(logits)))
    rows = Row(*(np.stack(x) for x in zip(*rows, strict=True)))
    return Rollout(rows, *map(np.stack, zip(*taken, strict=True)), start)


def _row(timesteps) -> Row:
  # Nothing is to be learned from the way from `LAST` to `FIRST`.
  return Row(
    observation=np.stack([t.observation for t in timesteps]),
    reward=np.array([t.reward or 0.0 for t in timesteps], np.float32),
    discount=np.array([t.discount or 0.0 for t in timesteps], np.float32),
    is_first=np.array([t.first() for t in timesteps]),
    is_last=np.array([t.last() for t in timesteps]),
  )


def make_update(unroll, optimizer):
  @functools.partial(jax.vmap, in_axes=1)
  def losses(logits, value, behaviour, action, reward, discount, weight):
    """The loss of one environment, `[T]` rows or `[T + 1]` of them."""
    policy = distrax.Categorical(logits)
    rho = distrax.importance_sampling_ratios(
      policy, distrax.Categorical(behaviour), action
    )
    vtrace = rlax.vtrace_td_error_and_advantage(
      value[:-1], value[1:], reward, discount, rho
    )
    advantage = jax.lax.stop_gradient(vtrace.pg_advantage)
    policy_loss = -jnp.mean(weight * advantage * policy.log_prob(action))
    value_loss = jnp.mean(weight * jnp.square(vtrace.errors))
    entropy = jnp.mean(weight * policy.entropy())
    return policy_loss + 0.25 * value_loss - 0.01 * entropy

  def loss(params, rollout: Rollout):
    rows = rollout.rows
    logits, value, _ = unroll.apply(params, rows, rollout.state)
    return jnp.mean(
      losses(
        logits[:-1],
        value,
        rollout.logits,
        rollout.action,
        rows.reward[1:],
        DISCOUNT * rows.discount[1:],
        1.0 - rows.is_last[:-1],
      )
    )

  @jax.jit
  def update(params, opt_state, rollout):
    gradient = jax.grad(loss)(params, rollout)
    changes, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, changes), opt_state

  return update


def mean_return(rollouts) -> float:
  """Mean return of the episodes that ended; only their last reward counts."""
  rows = [r.rows for r in rollouts]
  ended = sum(r.is_last[1:].sum() for r in rows)
  return float(sum(r.reward[1:].sum() for r in rows) / ended)


def train(core: str, num_updates: int, seed: int = 0) -> tuple[float, float]:
  """Mean returns of the policy before and after."""
  unroll, initial_state, act = make_functions(core)
  state = initial_state(NUM_ENVS)
  actor = Actor(act, state, seed)
  row = jax.tree.map(lambda x: x[None], actor.row)
  params = jax.jit(unroll.init)(jax.random.key(seed), row, state)
  before = mean_return([actor.run(params) for _ in range(4)])

  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
  update = make_update(unroll, optimizer)
  opt_state = optimizer.init(params)
  actors_params = params
  for i in range(num_updates):
    if i % LAG == 0:
      actors_params = params
    rollout = actor.run(actors_params)
    params, opt_state = update(params, opt_state, rollout)
    if i % 50 == 0:
      print(f'update {i}: return {mean_return([rollout]):.2f}')
  return before, mean_return([actor.run(params) for _ in range(4)])


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--core', choices=['graph', 'lstm'], default='graph')
  parser.add_argument('--quick', action='store_true', help='few updates')
  args = parser.parse_args()
  before, after = train(args.core, 5 if args.quick else 400)
  print(f'mean return before: {before:.2f}, after: {after:.2f} (the best is 1)')


if __name__ == '__main__':
  main()
