"""Client costs of the cells of a results table, traced without training."""

from collections.abc import Callable, Mapping
import json
import os
from typing import Any

from fedjax_het.engine.client_flops import client_flops
from fedjax_het.engine.client_memory import client_memory
from fedjax_het.experiment import facts
from fedjax_het.experiment.build import build
from fedjax_het.experiment.sweep_table import stored_cells
from fedjax_het.files import write_atomically
from fedjax_het.reporting.results_table import Table


def client_costs(config) -> dict[str, dict[str, float]]:
  """Peak memory and operations of a client's visit; nothing is compiled.

  Args:
    config: The config of a run.

  Returns:
    `client_memory`, {group: bytes}; and `client_flops`, {group: operations},
    unless the length of a loop depends on learned values.
  """
  experiment = build(config, check_memory=False)  # Nothing is run.
  visits = experiment.algorithm, experiment.federation, experiment.data
  costs = dict(client_memory=client_memory(*visits))
  flops = client_flops(*visits)
  return costs if flops is None else dict(costs, client_flops=flops)


def add_costs(
    table: Table,
    out: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> int:
  """Adds missing costs to stored cells, such as those of older versions.

  Nothing else in a cell changes. Its `costs_added` names the added entries and
  the versions that traced them.

  Args:
    table: The table; its stored cells of all seeds are read.
    out: Folder of the results.
    overrides: {dotted key: value} set in every config, such as `data_dir`.
    announce: Called with a line of text for each cell that is changed.

  Returns:
    How many cells were changed.

  Raises:
    FileNotFoundError: If there is no cell, or the data of one are missing.
    ValueError: As `sweep_table.read_cells`.
    OSError: If a cell cannot be written.
  """
  changed = 0
  for path, config, cell in stored_cells(table, out):
    if {'client_memory', 'client_flops'} <= cell.keys():
      continue
    config.update_from_flattened_dict(dict(overrides or {}))
    costs = client_costs(config)
    added = {name: costs[name] for name in costs if name not in cell}
    if not added:
      continue
    note = dict(entries=[*added], versions=facts.versions())
    cell = dict(cell, **added, costs_added=note)
    write_atomically(path, json.dumps(cell, indent=1))
    changed += 1
    announce(f'{path.name}: added {" and ".join(added)}')
  return changed
