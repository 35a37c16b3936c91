"""Times the executor beside nnx-ppo's PopulationGraph, in one run.

  pip install -e '.[bench]' && python examples/benchmarks/executor.py

Prints, for each workload at B = 256 and T = 20 in float32: seconds to compile
and to run one step and the gradient of an unroll with resets, for both, and the
ratios; and the share of the rate of a big matrix product that ours reaches.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import hkgraph as hg
import timing
import workloads


def observations(workload, *lead):
  rng = np.random.default_rng(0)
  return {
    key: jnp.asarray(rng.standard_normal((*lead, size)), jnp.float32)
    for key, size in workload.inputs().items()
  }


def mean_square(outputs):
  return sum(jnp.mean(jnp.square(v)) for v in jax.tree.leaves(outputs))


def operations(workload, batch):
  """Floating-point operations of one step forward."""
  size = {p[0]: p[1] for p in workload.populations}
  weights = sum(size[s] * size[d] for s, d, _ in workload.connections)
  return 2 * batch * weights


def ours(workload, batch, steps, path='grouped', repeats=7):
  """Seconds by measurement."""
  spec = workloads.to_spec(workload)
  network = hg.transform(lambda x: hg.Graph(spec, path=path)(x))
  x = observations(workload, batch)
  x_t = observations(workload, steps, batch)
  params, state = network.init(jax.random.key(0), x)
  no = jnp.zeros(batch, bool)
  no_t = jnp.zeros((steps, batch), bool)

  def step(params, x, state):
    return network.apply(params, state, None, x, no)

  def forward(params, state, x_t, no_t):
    return network.unroll(params, state, None, x_t, no_t)[0]

  def loss(params, state, x_t, no_t):
    return mean_square(forward(params, state, x_t, no_t))

  args = params, state, x_t, no_t
  grad_compile, grad = timing.compile_seconds(jax.value_and_grad(loss), *args)
  _, unroll = timing.compile_seconds(forward, *args)
  step_compile, compiled = timing.compile_seconds(
    lambda p, x, carry: step(p, x, carry[1]),
    params,
    x,
    step(params, x, state),
    donate_argnums=2,
  )
  carry = jax.jit(step)(params, x, state)
  return {
    'step': timing.carried_seconds(compiled, (params, x), carry),
    'step compile': step_compile,
    'unroll': timing.run_seconds(unroll, *args, repeats=repeats),
    'gradient': timing.run_seconds(grad, *args, repeats=repeats),
    'gradient compile': grad_compile,
    'products': grad.as_text().count(' dot('),
  }


def theirs(workload, batch, steps, repeats=7):
  """The same of nnx-ppo."""
  from flax import nnx
  from nnx_ppo.networks.graph import PopulationGraph

  graph = workloads.to_peer(workload, PopulationGraph, nnx)
  graphdef, params, rest = nnx.split(graph, nnx.Param, ...)
  state = graph.initialize_state(batch)
  x = observations(workload, batch)
  x_t = observations(workload, steps, batch)
  done_t = jnp.zeros((steps, batch), bool)

  def step(params, x, state):
    out = nnx.merge(graphdef, params, rest)(state, x)
    return out.next_state, out.output

  def loss(params, state, x_t, done_t):
    def body(state, row):
      x, done = row
      state, out = step(params, x, state)
      state = jax.vmap(
        lambda d, s: jax.lax.cond(d, graph.reset_state, lambda x: x, s)
      )(done, state)
      return state, out

    _, out = jax.lax.scan(body, state, (x_t, done_t))
    return mean_square(out)

  args = params, state, x_t, done_t
  grad_compile, grad = timing.compile_seconds(jax.value_and_grad(loss), *args)
  step_compile, compiled = timing.compile_seconds(
    lambda p, x, carry: step(p, x, carry[0]),
    params,
    x,
    step(params, x, state),
    donate_argnums=2,
  )
  carry = jax.jit(step)(params, x, state)
  return {
    'step': timing.carried_seconds(compiled, (params, x), carry),
    'step compile': step_compile,
    'gradient': timing.run_seconds(grad, *args, repeats=repeats),
    'gradient compile': grad_compile,
  }


def row(*cells):
  print('| ' + ' | '.join(str(c) for c in cells) + ' |', flush=True)


def compare(name, batch, steps, peer):
  workload = workloads.WORKLOADS[name]()
  rate = timing.matmul_flops()
  mine = ours(workload, batch, steps)
  rate = (rate + timing.matmul_flops()) / 2
  flops = operations(workload, batch) * steps
  for what in ('step', 'gradient', 'step compile', 'gradient compile'):
    other = peer_seconds(peer, name, workload, batch, steps).get(what)
    unit, scale = ('s', 1) if 'compile' in what else ('ms', 1e3)
    ratio = f'{other / mine[what]:.1f}x' if other else '-'
    row(
      name,
      what,
      f'{mine[what] * scale:.2f} {unit}',
      f'{other * scale:.2f} {unit}' if other else '-',
      ratio,
    )
  share = flops / mine['unroll'] / rate, 3 * flops / mine['gradient'] / rate
  row(name, 'unroll', f'{mine["unroll"] * 1e3:.2f} ms', '-', '-')
  row(
    name,
    f'share of a big product ({rate / 1e9:.0f} GFLOP/s)',
    f'unroll {share[0]:.0%}, gradient {share[1]:.0%}',
    '-',
    '-',
  )


_PEER = {}


def peer_seconds(peer, name, workload, batch, steps):
  if not peer:
    return {}
  if name not in _PEER:
    _PEER[name] = theirs(workload, batch, steps)
  return _PEER[name]


def sizes(batch, steps):
  """`large(n)`: compile time and products should stand still, time grow."""
  row('large(n)', 'compile s', 'products', 'gradient ms', 'ms per population')
  for n in (64, 128, 256, 512, 1024):
    workload = workloads.large(n)
    mine = ours(workload, batch, steps, repeats=2)
    row(
      n,
      f'{mine["gradient compile"]:.2f}',
      mine['products'],
      f'{mine["gradient"] * 1e3:.0f}',
      f'{mine["gradient"] * 1e3 / n:.2f}',
    )


def delays(batch):
  """A step should cost the same whatever the longest delay."""
  row('longest delay', 'step ms')
  for delay in (8, 64):
    mine = ours(workloads.large(32, max_delay=delay), batch, 2)
    row(delay, f'{mine["step"] * 1e3:.2f}')


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('workloads', nargs='*', default=[*workloads.WORKLOADS])
  parser.add_argument('--batch', type=int, default=256)
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument('--no-peer', action='store_true')
  parser.add_argument('--sizes', action='store_true')
  parser.add_argument('--delays', action='store_true')
  args = parser.parse_args()
  if args.sizes:
    sizes(args.batch, args.steps)
  if args.delays:
    delays(args.batch)
  if args.sizes or args.delays:
    return
  row('workload', 'what', 'hkgraph', 'nnx-ppo', 'ratio')
  row('---', '---', '---', '---', '---')
  for name in args.workloads:
    compare(name, args.batch, args.steps, not args.no_peer)


if __name__ == '__main__':
  main()
