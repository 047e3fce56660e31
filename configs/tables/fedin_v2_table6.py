"""FedIN v2's Table 6: 10 to 200 clients, on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.configs import fedavg, fedin, inclusivefl
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
CLIENTS = (10, 20, 50, 100, 200)
METHODS = {
    'FedAvg': (fedavg.get_config, 'v2'),
    'InclusiveFL': (inclusivefl.get_config, 'v2'),
    'FedIN': (fedin.get_config, 'v2'),
    # Ours: FedIN without one of its parts. Without both it is FedAvg.
    'FedIN w/o IN': (fedin.get_config, 'v2,wo_in'),
    'FedIN w/o Prox': (fedin.get_config, 'v2,wo_prox'),
}
COLUMNS = {
    f'{split} {number} clients': (split, number)
    for split in ('IID', 'non-IID')
    for number in CLIENTS
}


def _with_clients(config, number: int):
  """Sets the number of clients: a fifth per model, a tenth per round."""
  for name in config.groups:
    config.groups[name] = number // len(config.groups)
  config.cohort_size = number // 10
  return config


def _rows(scale: str):
  splits = _papers.fedin_columns(('cifar10',))
  rows = {label: {} for label in METHODS}
  for column, (split, number) in COLUMNS.items():
    one = {column: splits[f'cifar10 {split}']}
    for label, cells in _papers.fedin_rows(METHODS, one, scale).items():
      config = cells[column]
      if scale != 'quick':
        config = _with_clients(config, number)
      rows[label][column] = config
  return rows


def get_table(scale: str = SCALES[0]) -> Table:
  """Three methods by five numbers of clients and two splits, three seeds.

  The rows without a part of FedIN are ours.

  Run: `python -m launch.sweep --table=fedin_v2_table6 --data_dir=DIR`.

  A tenth of the clients takes part in a round, as in the rest of the paper.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  full = fedin_v2_table1.SETTING.replace(
      '100 clients of ResNet10, 14, 18, 22 and 26 (20 each), 10 a round',
      'ResNet10, 14, 18, 22 and 26 for a fifth of the clients each, a tenth of '
      'the clients a round',
  )
  return Table(
      title='FedIN v2, Table 6: numbers of clients',
      setting=_papers.in_words(
          scale,
          f'{full} The rows without a part of FedIN are not in the paper.',
          fedin_v2_table1.CPU,
      ),
      rows=_rows(scale),
      paper={
          label: {
              column: found
              for column, (split, number) in COLUMNS.items()
              if (found := paper_targets.fedin_v2_table_6(
                  label, number, split == 'IID'
              )) is not None
          }
          for label in METHODS
      },
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
  )
