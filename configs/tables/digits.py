"""Every method's default experiment, on the embedded digits."""

import importlib

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.reporting.results_table import Table


def get_table() -> Table:
  """All methods of the package, three seeds.

  Run: `python -m launch.sweep --table=digits --out=DIR`; no data are needed,
  and a cell takes half a minute to five minutes on a CPU core.

  Returns:
    The table, whose rows are the methods' configs without variants.
  """
  return Table(
      title='All methods on the digits',
      setting=(
          'Ten clients of three small ResNets on the digits, Dirichlet 0.5, '
          '20 rounds of 2 epochs: the default of every method '
          '(`configs/METHOD.py` without variants). Besides, each client is '
          'tested on test examples in the proportions of its own classes.'
      ),
      rows={name: _default(name) for name in ALGORITHMS},
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
  )


def _default(method: str):
  """A method's config without variants, with the personalised evaluation."""
  name = f'fedjax_het.configs.{method}'
  config = importlib.import_module(name).get_config()
  config.personal_test = True
  return config
