"""Networks that are graphs of populations.

Written once as data, compiled by Haiku into pure functions, trained by pure
learners. Names are imported when they are first asked for: rlax and distrax
take seconds, and a graph needs neither.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
  from hkgraph import envs as envs
  from hkgraph import interop as interop
  from hkgraph.graph.builder import PopulationGraph as PopulationGraph
  from hkgraph.graph.core import Connection as Connection
  from hkgraph.graph.core import Graph as Graph
  from hkgraph.graph.core import GraphCore as GraphCore
  from hkgraph.graph.core import Population as Population
  from hkgraph.graph.labels import by_connection as by_connection
  from hkgraph.graph.labels import connection_labels as connection_labels
  from hkgraph.graph.labels import freeze as freeze
  from hkgraph.graph.labels import masked_by_connection as masked_by_connection
  from hkgraph.graph.parameters import connection_params as connection_params
  from hkgraph.graph.parameters import (
    replace_connection_params as replace_connection_params,
  )
  from hkgraph.graph.spec import GraphSpec as GraphSpec
  from hkgraph.graph.validate import GraphError as GraphError
  from hkgraph.learners.agent import Agent as Agent
  from hkgraph.learners.config import PPOConfig as PPOConfig
  from hkgraph.learners.config import PQNConfig as PQNConfig
  from hkgraph.learners.dreamer import make_dreamer as make_dreamer
  from hkgraph.learners.dreamer_config import DreamerConfig as DreamerConfig
  from hkgraph.learners.ppo import make_ppo as make_ppo
  from hkgraph.learners.pqn import make_pqn as make_pqn
  from hkgraph.losses.dreamer import categorical_kl as categorical_kl
  from hkgraph.modules.decoders import Decoder as Decoder
  from hkgraph.modules.delay import Delay as Delay
  from hkgraph.modules.encoders import ConvEncoder as ConvEncoder
  from hkgraph.modules.encoders import MLPEncoder as MLPEncoder
  from hkgraph.modules.encoders import QConvEncoder as QConvEncoder
  from hkgraph.modules.encoders import QMLPEncoder as QMLPEncoder
  from hkgraph.modules.encoders import SymlogEncoder as SymlogEncoder
  from hkgraph.modules.encoding import Encoder as Encoder
  from hkgraph.modules.encoding import Remember as Remember
  from hkgraph.modules.heads import CategoricalHead as CategoricalHead
  from hkgraph.modules.heads import MultiCategoricalHead as MultiCategoricalHead
  from hkgraph.modules.heads import TanhNormalHead as TanhNormalHead
  from hkgraph.modules.heads import make_head as make_head
  from hkgraph.modules.latents import (
    straight_through_sample as straight_through_sample,
  )
  from hkgraph.modules.latents import unimix_categorical as unimix_categorical
  from hkgraph.modules.leaky import Leaky as Leaky
  from hkgraph.modules.normalizer import Moments as Moments
  from hkgraph.modules.normalizer import Normalizer as Normalizer
  from hkgraph.modules.recurrent import RecurrentEncoder as RecurrentEncoder
  from hkgraph.modules.routing import Concat as Concat
  from hkgraph.modules.routing import Filter as Filter
  from hkgraph.modules.routing import Map as Map
  from hkgraph.modules.routing import Merge as Merge
  from hkgraph.modules.routing import Parallel as Parallel
  from hkgraph.modules.routing import Scale as Scale
  from hkgraph.modules.routing import Split as Split
  from hkgraph.modules.rssm import RSSM as RSSM
  from hkgraph.modules.rssm import GatedCell as GatedCell
  from hkgraph.modules.samplers import GaussianNoise as GaussianNoise
  from hkgraph.modules.stateful import StatefulModule as StatefulModule
  from hkgraph.modules.stateful import batch_apply as batch_apply
  from hkgraph.modules.towers import ActorCritic as ActorCritic
  from hkgraph.modules.towers import QNetwork as QNetwork
  from hkgraph.modules.transformer import (
    TransformerEncoder as TransformerEncoder,
  )
  from hkgraph.modules.twohot import TwoHotHead as TwoHotHead
  from hkgraph.modules.world_model import WorldModel as WorldModel
  from hkgraph.network import Network as Network
  from hkgraph.network import graph_network as graph_network
  from hkgraph.network import policy_network as policy_network
  from hkgraph.network import q_network as q_network
  from hkgraph.network import transform as transform
  from hkgraph.training.export import export_policy as export_policy
  from hkgraph.training.export import load_policy as load_policy
  from hkgraph.training.loop import TrainResult as TrainResult
  from hkgraph.training.loop import train as train
  from hkgraph.types import NetworkState as NetworkState
  from hkgraph.types import PolicyValue as PolicyValue
  from hkgraph.types import TimeStep as TimeStep
  from hkgraph.types import Trajectory as Trajectory

__version__ = '0.1.0'

# Where each public name lives; the imports above, for type checkers, agree.
_HOMES = {
  'graph.builder': ('PopulationGraph',),
  'graph.core': ('Connection', 'Graph', 'GraphCore', 'Population'),
  'graph.labels': (
    'by_connection',
    'connection_labels',
    'freeze',
    'masked_by_connection',
  ),
  'graph.parameters': ('connection_params', 'replace_connection_params'),
  'graph.spec': ('GraphSpec',),
  'graph.validate': ('GraphError',),
  'learners.agent': ('Agent',),
  'learners.config': ('PPOConfig', 'PQNConfig'),
  'learners.dreamer': ('make_dreamer',),
  'learners.dreamer_config': ('DreamerConfig',),
  'learners.ppo': ('make_ppo',),
  'learners.pqn': ('make_pqn',),
  'losses.dreamer': ('categorical_kl',),
  'modules.decoders': ('Decoder',),
  'modules.delay': ('Delay',),
  'modules.encoders': (
    'ConvEncoder',
    'MLPEncoder',
    'QConvEncoder',
    'QMLPEncoder',
    'SymlogEncoder',
  ),
  'modules.encoding': ('Encoder', 'Remember'),
  'modules.heads': (
    'CategoricalHead',
    'MultiCategoricalHead',
    'TanhNormalHead',
    'make_head',
  ),
  'modules.latents': ('straight_through_sample', 'unimix_categorical'),
  'modules.leaky': ('Leaky',),
  'modules.normalizer': ('Moments', 'Normalizer'),
  'modules.recurrent': ('RecurrentEncoder',),
  'modules.routing': (
    'Concat',
    'Filter',
    'Map',
    'Merge',
    'Parallel',
    'Scale',
    'Split',
  ),
  'modules.rssm': ('GatedCell', 'RSSM'),
  'modules.samplers': ('GaussianNoise',),
  'modules.stateful': ('StatefulModule', 'batch_apply'),
  'modules.towers': ('ActorCritic', 'QNetwork'),
  'modules.transformer': ('TransformerEncoder',),
  'modules.twohot': ('TwoHotHead',),
  'modules.world_model': ('WorldModel',),
  'network': (
    'Network',
    'graph_network',
    'policy_network',
    'q_network',
    'transform',
  ),
  'training.export': ('export_policy', 'load_policy'),
  'training.loop': ('TrainResult', 'train'),
  'types': ('NetworkState', 'PolicyValue', 'TimeStep', 'Trajectory'),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

_PACKAGES = ('envs', 'interop')

__all__ = sorted([*_HOME, *_PACKAGES])  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
  if name in _PACKAGES:
    return importlib.import_module(f'hkgraph.{name}')
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  home = importlib.import_module(f'hkgraph.{_HOME[name]}')
  value = globals()[name] = getattr(home, name)
  return value


def __dir__() -> list[str]:
  return [*globals(), *__all__]
