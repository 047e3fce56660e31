"""The pictures of a results table, with a panel for each column."""

from collections.abc import Callable, Sequence
import itertools
import pathlib
from typing import Any

import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.reporting.looks import method_looks
from fedjax_het.reporting.paper_targets.target import models
from fedjax_het.reporting.report_pictures import CLIENT_BYTES, NO_PICTURES
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.setting import named
from fedjax_het.reporting.summary import in_common_rounds, num_clients
from fedjax_het.reporting.table_cells import Cells, cells_of

# {picture: the entries of a cell that it needs}.
COSTS = {
    'bytes': ('bytes_up', 'bytes_down'),
    'memory': ('client_memory',),
    'flops': ('client_flops',),
}
_LAST = 'Test accuracy, last round'


def draw(
    table: Table,
    cells: Cells,
    folder: pathlib.Path,
    formats: Sequence[str] = (),
) -> str:
  """Draws accuracy by round, by model, and against costs.

  Args:
    table: The table.
    cells: Its results, at least one.
    folder: Where the pictures are written.
    formats: Additional formats; 'pdf' and 'svg' apply to pictures.

  Returns:
    The section of table.md that shows them.

  Raises:
    OSError: If they cannot be written.
  """
  splits = {c: _splits(table, c) for c in table.columns}
  looks = method_looks(_methods(table), _first_panels(splits))
  shared = dict(looks=looks, percent=True)
  drawings: list[tuple[str, str, Callable[[Any, pathlib.Path], Any], Any]] = [
      (
          'curves', 'Accuracy by round',
          lambda panels, path: pictures.draw_curves(
              panels, path, 'Mean test accuracy', **shared
          ),
          _panels(table, cells, splits, curves_of),
      ),
      (
          'times', 'Accuracy by virtual time',
          lambda panels, path: pictures.draw_curves(
              panels, path, 'Mean test accuracy', xlabel='Virtual time, s',
              **shared,
          ),
          # A panel with a single curve compares nothing.
          {
              title: curves
              for title, curves in _panels(
                  table, cells, splits, times_of
              ).items()
              if len(curves) > 1
          },
      ),
      (
          'models', 'Accuracy of every model',
          lambda panels, path: pictures.draw_dots(
              panels, path, _LAST, **shared
          ),
          _panels(table, cells, splits, _chosen_models),
      ),
      (
          'bytes', 'Accuracy against bytes sent',
          lambda panels, path: pictures.draw_trade_off(
              panels, path, CLIENT_BYTES, _LAST, **shared
          ),
          _panels(table, cells, splits, bytes_of),
      ),
      (
          'memory', 'Accuracy against the memory of a client',
          lambda panels, path: pictures.draw_trade_off(
              panels, path, 'Peak memory of a client (line: by group)', _LAST,
              **shared,
          ),
          _panels(table, cells, splits, memory_of),
      ),
      (
          'flops', 'Accuracy against the operations of a visit',
          lambda panels, path: pictures.draw_trade_off(
              panels, path, 'Operations of a visit (line: by group)', _LAST,
              unit='FLOP', **shared,
          ),
          _panels(table, cells, splits, flops_of),
      ),
  ]  # fmt: skip
  if table.axis[1]:
    drawings.insert(0, (
        'sweep', f'Accuracy by {table.axis[0].lower()}',
        lambda panels, path: pictures.draw_curves(
            panels, path, _LAST,
            xlabel=table.axis[0], marks=[*table.axis[1].values()], **shared
        ),
        sweep_panel(table, cells),
    ))  # fmt: skip
  shown = []
  try:
    for name, title, drawing, panels in drawings:
      lacks = _lacks(table, cells, name)
      if panels:
        for ending in ('png', *(f for f in ('pdf', 'svg') if f in formats)):
          drawing(panels, folder / f'{name}.{ending}')
        shown.append(f'![{title}]({name}.png)' + (lacks and f'\n\n{lacks}'))
      elif lacks:
        shown.append(f'No picture of {name}: {lacks}')
  except ImportError:  # No matplotlib.
    shown = [NO_PICTURES]
  return '## Pictures\n\n' + '\n\n'.join(shown) + '\n'


def _methods(table: Table) -> dict[str, str]:
  """{label: name of its method}, of all rows and views."""
  found = {}
  for label in table.labels:
    configs = (table.config(label, column) for column in table.columns)
    found[label] = next(c for c in configs if c is not None).algorithm.name
  return found


def _first_panels(splits: dict[str, dict[str, str]]) -> dict[str, str]:
  """{label: its panel in the first column that has the row}."""
  found = {}
  for panels in splits.values():
    found = panels | found
  return found


def _splits(table: Table, column: str) -> dict[str, str]:
  """{label: the parts of its setting in which rows of a column differ}.

  The parts are the data set, its partition, and whether there is one model.
  """
  found = {}
  for label in table.labels:
    config = table.config(label, column)
    if config is not None:
      split = {k: v for k, v in config.partition.items() if k != 'seed'}
      nets = models(config.to_dict())
      which = 'one model' if len(nets) == 1 else 'different models'
      found[label] = (config.dataset, named(split).strip(), which)
  differ = [len(set(part)) > 1 for part in zip(*found.values(), strict=True)]
  return {
      label: ', '.join(itertools.compress(parts, differ))
      for label, parts in found.items()
  }


def _panels(table: Table, cells: Cells, splits, of_column) -> dict[str, Any]:
  """{title: {label: series}}, a panel for each column and split."""
  panels: dict[str, dict[str, Any]] = {}
  for column in table.columns:
    for label, series in of_column(table, cells, column).items():
      title = ', '.join(filter(None, (column, splits[column][label])))
      panels.setdefault(title, {})[label] = series
  return panels


def curves_of(table: Table, cells: Cells, column: str) -> dict[str, Any]:
  """{label: (rounds [R], accuracies [S, R])} of a column."""
  curves = {}
  for label in table.labels:
    mine = cells_of(table, cells, label, column)
    if mine:
      curves[label] = _in_common_rounds(mine, 'accuracy')
  return curves


def times_of(table: Table, cells: Cells, column: str) -> dict[str, Any]:
  """{label: (mean seconds [R] of the virtual clock, accuracies [S, R])}."""
  curves = {}
  for label in table.rows:
    mine = [
        cell
        for cell in cells_of(table, cells, label, column)
        if 'virtual_times' in cell
    ]
    if mine:
      times = _in_common_rounds(mine, 'virtual_times')[1].mean(axis=0)
      curves[label] = times.tolist(), _in_common_rounds(mine, 'accuracy')[1]
  return curves


def _in_common_rounds(cells: Cells, entry: str) -> tuple[list[int], np.ndarray]:
  """The rounds R that all cells evaluated, and an entry of each, [S, R]."""
  return in_common_rounds(
      [cell['rounds'] for cell in cells], [cell[entry] for cell in cells]
  )


def sweep_of(table: Table, cells: Cells) -> dict[str, Any]:
  """{label: (numbers [X], last accuracies [S, X])} over a table's axis.

  Numbers ascend. Columns without a result are left out. A curve has the seeds
  of all its columns, or where there is none, the means of the columns.
  """
  found = {}
  columns = sorted(table.axis[1].items(), key=lambda item: item[1])
  for label in table.labels:
    points = {
        number: {cell['seed']: cell['last'] for cell in mine}
        for column, number in columns
        if (mine := cells_of(table, cells, label, column))
    }
    if points:
      seeds = set.intersection(*({*one} for one in points.values()))
      values = [
          [one[s] for s in sorted(seeds)]
          or [np.mean(np.array([*one.values()], float))]
          for one in points.values()
      ]
      found[label] = [*points], np.array(values, float).T
  return found


def sweep_panel(table: Table, cells: Cells) -> dict[str, Any]:
  """The panel of a sweep; its title says which row, if only one has results."""
  found = sweep_of(table, cells)
  alone = len(found) == 1 < len(table.labels)
  return {next(iter(found)) if alone else '': found}


def models_of(
    table: Table, cells: Cells, column: str
) -> dict[str, dict[str, list[float]]]:
  """{label: {group: [S] means of its models}}; {} without families."""
  found = {}
  for label in table.rows if table.families else ():
    mine = [
        cell['models']
        for cell in cells_of(table, cells, label, column)
        if 'models' in cell
    ]
    if mine:
      found[label] = {
          group: [np.mean(models[group]) for models in mine]
          for group in mine[0]
      }
  return found


def _chosen_models(table: Table, cells: Cells, column: str):
  found = models_of(table, cells, column)
  return {name: found[name] for name in table.bars or found if name in found}


def _lacks(table: Table, cells: Cells, name: str) -> str:
  """Why a picture of costs lacks rows; '' if there is nothing to compare.

  Args:
    table: The table.
    cells: Its results.
    name: Name of the picture.

  Returns:
    A sentence on the entries that stored cells of older versions lack.
  """
  numbers = COSTS.get(name, ())
  run = [
      cell
      for column in table.columns
      for label in table.rows
      for cell in cells_of(table, cells, label, column)
  ]
  lack = sum(any(number not in cell for number in numbers) for cell in run)
  if not lack or len(table.rows) < 2:
    return ''
  return f'{lack} of {len(run)} stored cells lack {" and ".join(numbers)}.'


def bytes_of(table: Table, cells: Cells, column: str) -> dict[str, Any]:
  """{label: (bytes of a client, both ways [S], last accuracies [S])}.

  The bytes are those of the whole run, the mean over clients.
  """
  return _costs(
      table, cells, column, (*COSTS['bytes'], 'config'),
      lambda up, down, config: (up + down) / num_clients(config),
  )  # fmt: skip


def memory_of(table: Table, cells: Cells, column: str) -> dict[str, Any]:
  """{label: (peak bytes of a client [S, groups], last accuracies [S])}."""
  return _costs(
      table, cells, column, COSTS['memory'], lambda m: [*m.values()]
  )


def flops_of(table: Table, cells: Cells, column: str) -> dict[str, Any]:
  """{label: (operations of a visit [S, groups], last accuracies [S])}."""
  return _costs(
      table, cells, column, COSTS['flops'], lambda f: [*f.values()]
  )


def _costs(table, cells, column, names, cost) -> dict[str, Any]:
  """Costs and accuracies of rows; {} if fewer than two rows have them.

  A cell of an older version without the cost counts for the accuracy, as in the
  table.
  """
  found = {}
  for label in table.rows:  # Views show the same runs, so they are left out.
    mine = [
        cell
        for cell in cells_of(table, cells, label, column)
        if cell['last'] is not None
    ]
    costs = [
        cost(*(cell[name] for name in names))
        for cell in mine
        if all(name in cell for name in names)
    ]
    if costs:
      found[label] = costs, [cell['last'] for cell in mine]
  return found if len(found) > 1 else {}
