"""FedIN v2's Table 5b: ablations on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.configs import fedavg, fedin
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(('cifar10',))
METHODS = {
    'FedAvg': (fedavg.get_config, 'v2'),
    'FedIN w/o IN': (fedin.get_config, 'v2,wo_in'),
    'FedIN w/o Prox': (fedin.get_config, 'v2,wo_prox'),
    'FedIN w/o Opt': (fedin.get_config, 'v2,wo_opt'),
    'FedIN': (fedin.get_config, 'v2'),
}


def get_table(scale: str = SCALES[0]) -> Table:
  """Five methods, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_table5b --data_dir=DIR`.

  The paper's numbers are missing from the available text. It says that FedIN is
  more accurate and faster than without Opt, and that without Prox it becomes
  unstable after round 200 and ends near FedAvg.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  return Table(
      title='FedIN v2, Table 5b: ablations',
      setting=_papers.in_words(
          scale, fedin_v2_table1.SETTING, fedin_v2_table1.CPU
      ),
      rows=_papers.fedin_rows(METHODS, COLUMNS, scale),
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
  )
