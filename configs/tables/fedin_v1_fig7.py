"""FedIN v1's Fig. 7: ablations on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v1_table2

from fedjax_het.configs import fedin
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
COLUMNS = {'cifar10 non-IID': ('cifar10', False)}
METHODS = {
    'FedIN': (fedin.get_config, 'v1'),
    'two sequential updates': (fedin.get_config, 'v1,wo_opt'),
    'no averaging': (fedin.get_config, 'v1,wo_aggregation'),
    'no IN training': (fedin.get_config, 'v1,wo_in'),
}


def get_table(scale: str = SCALES[0]) -> Table:
  """FedIN and its three ablations, three seeds.

  Run: `python -m launch.sweep --table=fedin_v1_fig7 --data_dir=DIR`.

  The paper draws curves. It says that FedIN is 1 to 2 points above two
  sequential updates, slightly above no averaging, and far above no IN training.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  rows = _papers.fedin_rows(METHODS, COLUMNS, scale)
  fedin_v1_table2.fit(rows, scale)
  return Table(
      title='FedIN v1, Fig. 7: ablations',
      setting=_papers.in_words(
          scale, fedin_v1_table2.SETTING, fedin_v1_table2.CPU
      ),
      rows=rows,
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='clients',
      notes={
          'no IN training': (
              'extractor and classifier are averaged, all else is local.'
          )
      },
  )
