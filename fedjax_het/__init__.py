"""Federated learning with clients of different models, in JAX and Flax.

Names are imported when they are first used, so that a program can answer Ctrl-C
and typing errors before JAX is imported, which takes seconds.
"""

from etils import epy as _epy

__version__ = '0.1.0'

with _epy.lazy_api_imports(globals()):
  from fedjax_het import (  # noqa: F401
      aggregation,
      algorithms,
      analysis,
      data,
      depthwise,
      engine,
      experiment,
      kernels,
      models,
      privacy,
      reporting,
  )
  from fedjax_het.algorithms import ALGORITHMS
  from fedjax_het.data.federated import FederatedData, federate
  from fedjax_het.data.partition import PARTITIONS, partition
  from fedjax_het.data.preprocess import make_preprocess
  from fedjax_het.data.sources import DATASETS, load
  from fedjax_het.engine.evaluate import make_evaluate
  from fedjax_het.engine.mapping import Backend, map_clients
  from fedjax_het.engine.projection import (
      gradient_divergence_projection,
      project_gradient,
  )
  from fedjax_het.engine.reports import RoundReport
  from fedjax_het.engine.rounds import (
      State,
      init_state,
      make_round,
      make_rounds,
  )
  from fedjax_het.engine.streaming import (
      init_streamed_state,
      make_streamed_round,
  )
  from fedjax_het.engine.types import (
      FederatedAlgorithm,
      Federation,
      Group,
      LocalTraining,
      Maybe,
      Received,
      Uplink,
      Visit,
  )
  from fedjax_het.experiment import load_run, run
  from fedjax_het.experiment.callbacks import (
      CSV,
      BestCheckpoint,
      Callback,
      CallbackError,
      CustomMetrics,
      EarlyStopping,
      MLflow,
      Profile,
      TensorBoard,
      WandB,
  )
  from fedjax_het.experiment.config import default_config
  from fedjax_het.models import MODELS, Block, BlockModel, Variables, create

__all__ = [
    'ALGORITHMS',
    'CSV',
    'DATASETS',
    'MODELS',
    'PARTITIONS',
    'Backend',
    'BestCheckpoint',
    'Block',
    'BlockModel',
    'Callback',
    'CallbackError',
    'CustomMetrics',
    'EarlyStopping',
    'FederatedAlgorithm',
    'FederatedData',
    'Federation',
    'Group',
    'LocalTraining',
    'MLflow',
    'Maybe',
    'Profile',
    'Received',
    'RoundReport',
    'State',
    'TensorBoard',
    'Uplink',
    'Variables',
    'Visit',
    'WandB',
    'create',
    'default_config',
    'federate',
    'gradient_divergence_projection',
    'init_state',
    'init_streamed_state',
    'load',
    'load_run',
    'make_evaluate',
    'make_preprocess',
    'make_round',
    'make_rounds',
    'make_streamed_round',
    'map_clients',
    'partition',
    'project_gradient',
    'run',
]
