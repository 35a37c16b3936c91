"""Networks and an environment that are small enough to check by hand."""

from dm_env import specs
import jax
import jax.numpy as jnp
import numpy as np

from hkgraph import network as network_lib
from hkgraph import types
from hkgraph.envs import protocol
from hkgraph.modules import distributions

PARAMS = {'theta': 0.3, 'v': 0.2}


def policy_value(params, x):
  """Logits `(0, theta x)` and value `v x`."""
  logits = jnp.stack([jnp.zeros_like(x), params['theta'] * x], axis=-1)
  return types.PolicyValue(
    policy=distributions.categorical(logits), value=params['v'] * x
  )


def action_values(params, x):
  """Values `(v x, theta x)` of two actions."""
  return jnp.stack([params['v'] * x, params['theta'] * x], axis=-1)


def heads(params, x):
  """A `policy_value` of its own for each key of the parameters."""
  outputs = {name: policy_value(params[name], x) for name in params}
  return types.PolicyValue(
    policy={name: output.policy for name, output in outputs.items()},
    value={name: output.value for name, output in outputs.items()},
  )


def memoryless(outputs=policy_value, params=None) -> network_lib.Network:
  """`outputs(params, x)` of an observation `x`: no carry, no statistics."""

  def init(key, inputs):
    del key, inputs
    state = types.NetworkState(carry={}, statistics={})
    return jax.tree.map(jnp.float32, params or PARAMS), state

  def apply(params, state, key, inputs, is_first):
    del key, is_first
    return outputs(params, inputs), state

  return network_lib.Network(
    init=init,
    apply=apply,
    unroll=apply,
    initial_carry=lambda batch_size, key=None: {},
    update_statistics=lambda params, state, inputs, is_first, mask: state,
  )


def recurrent(outputs=policy_value) -> network_lib.Network:
  """`outputs(params, y)` of the sum `h = (0 if first else h) + x`.

  `y` is `h`, less a mean, plus noise of the carry.
  """

  def initial_carry(batch_size, key=None):
    key = jax.random.key(0) if key is None else key
    return {
      'h': jnp.zeros(batch_size),
      'key': jax.random.split(key, batch_size),
    }

  def init(key, inputs):
    state = types.NetworkState(
      carry=initial_carry(inputs.shape[0], key),
      statistics={'count': jnp.int32(0), 'total': jnp.float32(0)},
    )
    return jax.tree.map(jnp.float32, PARAMS), state

  def apply(params, state, key, inputs, is_first):
    del key
    carry, statistics = state.carry, state.statistics
    h = jnp.where(is_first, 0, carry['h']) + inputs
    keys = jax.vmap(jax.random.split)(carry['key'])
    noise = jax.vmap(jax.random.normal)(keys[:, 0])
    mean = statistics['total'] / jnp.maximum(statistics['count'], 1)
    y = outputs(params, h - mean + noise)
    return y, state.replace(carry={'h': h, 'key': keys[:, 1]})

  def unroll(params, state, key, inputs, is_first):
    def step(state, row):
      outputs, state = apply(params, state, key, *row)
      return state, outputs

    state, outputs = jax.lax.scan(step, state, (inputs, is_first))
    return outputs, state

  def update_statistics(params, state, inputs, is_first, mask):
    del params, is_first
    old = state.statistics
    return state.replace(
      statistics={
        'count': old['count'] + jnp.sum(mask, dtype=jnp.int32),
        'total': old['total'] + jnp.sum(jnp.where(mask, inputs, 0)),
      }
    )

  return network_lib.Network(
    init=init,
    apply=apply,
    unroll=unroll,
    initial_carry=initial_carry,
    update_statistics=update_statistics,
  )


class Episodes:
  """Normal observations, reward `x` for action 1, two to five transitions.

  Episodes of an even length terminate, the others are cut.
  """

  def reset(self, key):
    key, length_key, x_key = jax.random.split(key, 3)
    length = jax.random.randint(length_key, (), 2, 6)
    state = {'key': key, 'left': length, 'length': length}
    state['x'] = jax.random.normal(x_key)
    return state, protocol.restart(self.reward_spec(), state['x'])

  def step(self, state, action):
    key, x_key = jax.random.split(state['key'])
    x, left = jax.random.normal(x_key), state['left'] - 1
    last = left == 0
    timestep = types.TimeStep(
      step_type=jnp.where(last, types.StepType.LAST, types.StepType.MID).astype(
        jnp.int32
      ),
      reward=state['x'] * action,
      discount=jnp.where(last & (state['length'] % 2 == 0), 0.0, 1.0),
      observation=x,
    )
    return dict(state, key=key, left=left, x=x), timestep

  def observation_spec(self):
    return specs.Array((), np.float32)

  def action_spec(self):
    return specs.DiscreteArray(2)

  def reward_spec(self):
    return specs.Array((), np.float32)

  def discount_spec(self):
    return protocol.discount_spec()
