"""FedIN v2's Table 4: averaging inside each architecture alone."""

from configs import fedavg, fedin, fedprox
from configs.tables import _papers, fedin_v2_table1
from fedjax_het.experiment import paper_targets
from fedjax_het.experiment.sweep_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(('fashion_mnist',))
METHODS = {
    'FedAvg': (fedavg.get_config, 'v2,architecture'),
    'FedProx': (fedprox.get_config, 'v2,architecture'),
    'FedIN': (fedin.get_config, 'v2,architecture'),
}


def get_table(scale: str = SCALES[0]) -> Table:
  """Three methods on Fashion-MNIST, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_table4 --data_dir=DIR`.

  Of the paper's rows the library lacks Scaffold, FedNova, MOON, InclusiveFL,
  FedGen, FedSelect and InCoAvg.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  return Table(
      title='FedIN v2, Table 4: averaging inside each architecture',
      setting=_papers.in_words(
          scale, fedin_v2_table1.SETTING, fedin_v2_table1.CPU
      ),
      rows=_papers.fedin_rows(METHODS, COLUMNS, scale),
      paper=_papers.fedin_paper(
          lambda method, _, iid: paper_targets.fedin_v2_table_4(method, iid),
          {label: label for label in METHODS},
          COLUMNS,
      ),
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
  )
