"""The papers' results for a setting, printed beside a result of ours.

A module for each paper. Accuracies are in percent. Left out are values that the
papers only plot, and methods that the library lacks. `find` takes a run's
config; the other functions look up one number and return None if the paper
prints none.
"""

from collections.abc import Mapping
from typing import Any

from fedjax_het.reporting.paper_targets import (
  fedepth_tables,
  fedhe_text,
  fedin_tables,
)
from fedjax_het.reporting.paper_targets.fedepth_tables import fedepth
from fedjax_het.reporting.paper_targets.fedhe_text import (
  fedhe,
  fedhe_client,
  fedhe_family,
)
from fedjax_het.reporting.paper_targets.fedin_tables import (
  fedin_v1_table_2,
  fedin_v2_table_1,
  fedin_v2_table_4,
  fedin_v2_table_6,
)
from fedjax_het.reporting.paper_targets.target import Target

__all__ = [
    'Target',
    'fedepth',
    'fedhe',
    'fedhe_client',
    'fedhe_family',
    'fedin_v1_table_2',
    'fedin_v2_table_1',
    'fedin_v2_table_4',
    'fedin_v2_table_6',
    'find',
]


def find(config: Mapping[str, Any]) -> list[Target]:
  """The printed accuracies of a config's method on its data and split.

  Args:
    config: The config as nested dicts. Rounds, budgets of training and, for
      FedIN, models may differ from the paper's: each target states its own
      setting.

  Returns:
    The targets; [] if there are none, as with a server optimiser, since the
    papers' servers average.
  """
  algorithm = config['algorithm']
  if algorithm.get('server_optimizer', 'sgd') != 'sgd':
    return []
  if algorithm.get('server_momentum'):
    return []
  papers = (fedin_tables, fedhe_text, fedepth_tables)
  return [target for paper in papers for target in paper.find(config)]
