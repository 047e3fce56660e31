"""Every method on the digits by the clock of a mixed fleet."""

import importlib

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.reporting.results_table import Table

CLOCKS = ('synchronous', 'async')


def get_table() -> Table:
  """All methods under two clocks, three seeds.

  Run: `python -m launch.sweep --table=digits_clock --out=DIR`; no data are
  needed, and a cell takes half a minute to five minutes on a CPU core. Accuracy
  by virtual time is in times.png.

  Returns:
    The table, whose rows are the methods' configs with two variants.
  """
  return Table(
      title='All methods on the digits by the clock',
      setting=(
          'The default experiment of every method (`configs/METHOD.py`): ten '
          'clients on the digits, Dirichlet 0.5, on five fast, three medium '
          'and two slow devices (20, 8 and 2 GFLOP/s, up 20, 10 and 1 Mbit/s, '
          'down four times that; the slow ones pause and lose a twentieth of '
          'their visits), which is assumed. The groups with the most '
          'operations of a visit have the fastest devices. A visit takes the '
          'time of all operations of its method and of its messages. '
          'Synchronous: 20 rounds of ten that wait for the slowest; async: '
          '200 uploads, every device at its own pace. FedAT has these clocks '
          'here, not that of its tiers. What the server computes, and what '
          'clients compute before round 1, takes no time.'
      ),
      rows={
          name: {mode: _cell(name, mode) for mode in CLOCKS}
          for name in ALGORITHMS
      },
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
      columns=CLOCKS,
  )


def _cell(method: str, mode: str):
  name = f'fedjax_het.configs.{method}'
  return importlib.import_module(name).get_config(f'{mode},flops')
