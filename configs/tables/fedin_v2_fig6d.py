"""FedIN v2's Fig. 6d: numbers of feature pairs, on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
PAIRS = (8, 16, 32, 64, 128)
COLUMNS = {f'{number} pairs': number for number in PAIRS}


def _with_pairs(config, number: int):
  """Sets the number of pairs up and down; each local step takes one batch."""
  config = config.copy_and_resolve_references()
  config.algorithm.num_pairs = number
  # All numbers share one split; every client has examples for the largest.
  config.partition.min_size = max(PAIRS)
  return config


def get_table(scale: str = SCALES[0]) -> Table:
  """FedIN by five numbers of pairs, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_fig6d --data_dir=DIR`.

  The paper draws a figure and prints no accuracies; the numbers of pairs are
  ours. It says that more pairs hardly help.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  fedin = fedin_v2_table1.get_table(scale).rows['FedIN']['cifar10 non-IID']
  return Table(
      title='FedIN v2, Fig. 6d: numbers of pairs',
      setting=_papers.in_words(
          scale,
          f'{fedin_v2_table1.SETTING} Every client holds at least {max(PAIRS)} '
          'images.',
          fedin_v2_table1.CPU,
      ),
      rows={
          'FedIN': {
              column: _with_pairs(fedin, number)
              for column, number in COLUMNS.items()
          }
      },
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
      axis=('Number of pairs', COLUMNS),
  )
