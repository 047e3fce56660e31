"""FedHe's Fig. 7: each of its ten clients, on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedhe_fig8

from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
# {column: row of Fig. 8}: class means as in the paper, and as in its code.
COLUMNS = {'Eq. 8': 'FedHe', 'as coded': 'FedHe as coded'}


def get_table(scale: str = SCALES[0]) -> Table:
  """FedHe's mean and its clients 0 to 9.

  Run: `python -m launch.sweep --table=fedhe_fig7 --data_dir=DIR`.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, with curves; the paper states the last values in its text.
  """
  cells = {
      column: fedhe_fig8.config_of(method, scale)
      for column, method in COLUMNS.items()
  }
  clients = {
      f'client {k}': fedhe_fig8.groups_of(cells['Eq. 8'], [k])
      for k in range(fedhe_fig8.NUM_CLIENTS)
  }
  return Table(
      title="FedHe's Fig. 7: every client, CIFAR-10",
      setting=_papers.in_words(scale, fedhe_fig8.FULL, fedhe_fig8.CPU),
      rows={'FedHe': cells},
      paper={
          label: {'Eq. 8': paper_targets.fedhe_client(k)}
          for k, label in enumerate(clients)
      },
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      views={label: ('FedHe', groups) for label, groups in clients.items()},
  )
