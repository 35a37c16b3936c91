"""The built-in tasks: environment, graph and hyperparameters that go together.

A task is there once for each algorithm that can learn it.

Made without JAX: a command line that lists them stays fast.
"""

from collections.abc import Callable
import dataclasses
import functools
import typing

from hkgraph.learners import config as config_lib
from hkgraph.learners import dreamer_config
from hkgraph.training import algorithms

if typing.TYPE_CHECKING:
  from hkgraph.graph import spec as spec_lib


@dataclasses.dataclass(frozen=True)
class Task:
  """Something to train, as `train` takes it.

  Attributes:
    name: Of the task and of its environment.
    summary: What there is to learn, in a line.
    network: Makes the network: a graph, or a kind that the algorithm knows.
    config: Hyperparameters; their class is the algorithm.
    total_steps: Environment steps of a training.
    normalize: Whether observations are normalised.
  """

  name: str
  summary: str
  network: Callable[[], 'spec_lib.GraphSpec | str']
  config: (
    config_lib.PPOConfig | config_lib.PQNConfig | dreamer_config.DreamerConfig
  )
  total_steps: int
  normalize: bool = False

  @property
  def algorithm(self) -> str:
    """Name of the algorithm."""
    return algorithms.of(self.config).name


def cartpole_graph(hidden: int = 64) -> 'spec_lib.GraphSpec':
  """Input, a swish population with a delay-1 self-loop, two read-outs."""
  from hkgraph.graph import builder

  graph = builder.PopulationGraph()
  graph.add_input('state', 4, input_from='x')
  graph.add_population('hidden', hidden, activation='jax.nn.swish')
  graph.connect('state', 'hidden')
  graph.connect('hidden', 'hidden', delay=1)
  _add_read_outs(graph, 2)
  return graph.finalize()


def delayed_recall_graph(
  delay: int = 8, num_cues: int = 4, hidden: int = 32, *, q: bool = False
) -> 'spec_lib.GraphSpec':
  """A hidden population that sees the cue at once and after `delay` steps.

  With `delay=0` it has no memory: the control, of the same size. With `q`
  action values are read out, instead of policy and value.
  """
  from hkgraph.graph import builder

  graph = builder.PopulationGraph()
  graph.add_input('cue', num_cues, input_from='x')
  graph.add_population('hidden', hidden, activation='jax.nn.swish')
  graph.connect('cue', 'hidden')
  graph.connect('cue', 'hidden', delay=delay)
  _add_read_outs(graph, num_cues, q)
  return graph.finalize()


def bodies_graph(num_bodies: int = 3, hidden: int = 32) -> 'spec_lib.GraphSpec':
  """A controller per body; neighbours hear each other one step later."""
  from hkgraph.graph import builder

  graph = builder.PopulationGraph()
  for i in range(num_bodies):
    graph.add_input(f'sense_{i}', 6, input_from=f'body_{i}')
    graph.add_population(f'hidden_{i}', hidden, activation='jax.numpy.tanh')
    graph.add_output(f'policy_{i}', 4, output_to=f'policy_body_{i}')
    graph.add_output(f'value_{i}', 1, output_to=f'value_body_{i}')
    graph.connect(f'sense_{i}', f'hidden_{i}')
    graph.connect(f'hidden_{i}', f'policy_{i}')
    graph.connect(f'hidden_{i}', f'value_{i}')
  for i in range(num_bodies):
    for j in range(i):
      graph.connect(f'hidden_{j}', f'hidden_{i}', delay=1, reciprocal=True)
  return graph.finalize()


def _add_read_outs(graph, num_actions: int, q: bool = False) -> None:
  sizes = {'q': num_actions} if q else {'policy': num_actions, 'value': 1}
  for name, size in sizes.items():
    graph.add_output(name, size)
    graph.connect('hidden', name)


def _falling_to_zero(total_steps: int, config: type, **kwargs):
  """A configuration whose learning rate is 0 after `total_steps`."""
  per_update = kwargs['num_envs'] * kwargs['num_steps']
  total_updates = -(-total_steps // per_update)
  return config(schedule='linear', total_updates=total_updates, **kwargs)


_CARTPOLE = Task(
  name='cartpole',
  summary='Balance a pole on a cart; solved at a mean return of 475.',
  network=cartpole_graph,
  config=_falling_to_zero(
    500_000,
    config_lib.PPOConfig,
    num_envs=64,
    num_steps=128,
    num_minibatches=8,
    discount=0.99,
    value_cost=0.01,
    learning_rate=2.5e-3,
  ),
  total_steps=500_000,
  normalize=True,
)

_DELAYED_RECALL = Task(
  name='delayed_recall',
  summary='Name the cue that was shown eight steps ago; chance is 0.25.',
  network=delayed_recall_graph,
  config=_falling_to_zero(
    80_000,
    config_lib.PPOConfig,
    num_envs=32,
    num_steps=36,
    learning_rate=3e-3,
  ),
  total_steps=80_000,
)

_BODIES = Task(
  name='bodies',
  summary='Bodies with heads of their own find their places in a formation.',
  network=bodies_graph,
  config=_falling_to_zero(
    300_000,
    config_lib.PPOConfig,
    num_envs=32,
    num_steps=50,
    discount=0.9,
    value_cost=0.2,
    entropy_cost=0.003,
    learning_rate=2e-3,
    advantage_mode='per_head',
  ),
  total_steps=300_000,
  normalize=True,
)

_CARTPOLE_PQN = dataclasses.replace(
  _CARTPOLE,
  # Layer norm is what PQN rests on; a bare graph learns it less surely.
  network=lambda: 'mlp',
  config=_falling_to_zero(
    500_000,
    config_lib.PQNConfig,
    num_envs=32,
    num_steps=64,
    num_minibatches=16,
    num_epochs=4,
    learning_rate=5e-4,
    epsilon_finish=0.2,
  ),
  total_steps=500_000,
)

_DELAYED_RECALL_PQN = dataclasses.replace(
  _DELAYED_RECALL,
  network=functools.partial(delayed_recall_graph, q=True),
  config=_falling_to_zero(
    80_000,
    config_lib.PQNConfig,
    num_envs=32,
    num_steps=36,
    learning_rate=3e-3,
  ),
)

_CARTPOLE_DREAMER = dataclasses.replace(
  _CARTPOLE,
  network=lambda: 'auto',
  config=dreamer_config.DreamerConfig(
    num_envs=8,
    num_steps=32,
    train_ratio=32,
    batch_size=16,
    sequence_length=32,
    # Falls of long ago would make the range of the returns too wide.
    capacity=15_000,
    num_bins=63,
    critic_learning_rate=1e-3,
    entropy_cost=1e-4,
    reconstruction_cost=10.0,  # Cart and pole move by hundredths.
    # A row tells less than 1 nat: the prior must learn of that, too.
    free_nats=0.1,
    unimix=0.001,  # A latent drawn at random lets the pole fall.
  ),
  total_steps=50_000,
  normalize=False,
)

# What a name stands for unless an algorithm is named: PPO learns every task.
TASKS = {task.name: task for task in (_BODIES, _CARTPOLE, _DELAYED_RECALL)}
_OTHERS = (_CARTPOLE_PQN, _DELAYED_RECALL_PQN, _CARTPOLE_DREAMER)


def find(name: str, algorithm: str) -> Task:
  """Finds the task of a name for an algorithm.

  Raises:
    ValueError: If the task does not have the algorithm.
  """
  variants = [t for t in (*TASKS.values(), *_OTHERS) if t.name == name]
  for task in variants:
    if task.algorithm == algorithm:
      return task
  known = ', '.join(task.algorithm for task in variants)
  raise ValueError(
    f'the task {name!r} has hyperparameters for {known} only, got the '
    f'algorithm {algorithm!r}'
  )
