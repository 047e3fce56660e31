"""FedIN v2's Table 4: averaging only inside each architecture."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.configs import (
  fedavg,
  fedgen,
  fedin,
  fednova,
  fedprox,
  fedselect,
  inclusivefl,
  incoavg,
  moon,
  scaffold,
)
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(('fashion_mnist',))


def _by_size(get_config):
  """Weights clients of one architecture by their examples (Eq. 21)."""
  return _papers.with_options(get_config, weights='data')


METHODS = {
    'FedAvg': (_by_size(fedavg.get_config), 'v2,architecture'),
    'FedProx': (_by_size(fedprox.get_config), 'v2,architecture'),
    # The means of SCAFFOLD and FedSelect over clients have no weights.
    'SCAFFOLD': (scaffold.get_config, 'v2,architecture'),
    'FedNova': (_by_size(fednova.get_config), 'v2,architecture'),
    'FedGen': (_by_size(fedgen.get_config), 'v2,architecture'),
    'InclusiveFL': (_by_size(inclusivefl.get_config), 'v2,architecture'),
    'MOON': (_by_size(moon.get_config), 'v2,architecture'),
    'InCoAvg': (_by_size(incoavg.get_config), 'v2,architecture'),
    'FedSelect': (fedselect.get_config, 'v2,architecture'),
    'FedIN': (_by_size(fedin.get_config), 'v2,architecture'),
}
SETTING = (
    f'{fedin_v2_table1.SETTING} Weights are averaged inside each architecture, '
    'clients by their number of examples (Eq. 21 of the paper; elsewhere it '
    'has plain means, Eq. 19), except for SCAFFOLD and FedSelect, which have '
    'plain means.'
)


def get_table(scale: str = SCALES[0]) -> Table:
  """The methods on Fashion-MNIST, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_table4 --data_dir=DIR`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  return Table(
      title='FedIN v2, Table 4: averaging inside each architecture',
      setting=_papers.in_words(scale, SETTING, fedin_v2_table1.CPU),
      rows=_papers.fedin_rows(METHODS, COLUMNS, scale),
      paper=_papers.fedin_paper(
          lambda method, _, iid: paper_targets.fedin_v2_table_4(method, iid),
          {label: label for label in METHODS},
          COLUMNS,
      ),
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
  )
