"""FedIN v2's Table 5a: a ResNet18 for every client, on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.configs import fedavg, fedin, fedprox
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(('cifar10',))
METHODS = {
    'FedAvg': (fedavg.get_config, 'v2,homogeneous'),
    'FedProx': (fedprox.get_config, 'v2,homogeneous'),
    'FedIN': (fedin.get_config, 'v2,homogeneous'),
}


def get_table(scale: str = SCALES[0]) -> Table:
  """Three methods, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_table5a --data_dir=DIR`.

  The paper's rows and numbers are missing from the available text, which only
  says that FedIN is above the baselines.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  full = fedin_v2_table1.SETTING.replace(
      'ResNet10, 14, 18, 22 and 26 (20 each)', 'ResNet18'
  ).replace(', and accuracies are averaged over the five models', '')
  return Table(
      title='FedIN v2, Table 5a: homogeneous models',
      setting=_papers.in_words(scale, full, fedin_v2_table1.CPU),
      rows=_papers.fedin_rows(METHODS, COLUMNS, scale),
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
  )
