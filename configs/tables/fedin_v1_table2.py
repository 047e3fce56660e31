"""FedIN v1's Table II: models A to E on two data sets and two splits."""

from configs import fedavg, fedgkt, fedin, heterofl
from configs.tables import _papers
from fedjax_het.experiment import paper_targets
from fedjax_het.experiment.sweep_table import Table

SCALES = _papers.SCALES
COLUMNS = _papers.fedin_columns(('cifar10', 'fashion_mnist'))
METHODS = {
    'FedIN': (fedin.get_config, 'v1'),
    'FedAvg': (fedavg.get_config, 'v1'),
    'FedGKT-server': (fedgkt.get_config, 'v1'),
    'HeteroFL': (heterofl.get_config, 'v1'),
}
SETTING = (
    '10 clients of models A (2), B (1), C (2), D (2) and E (3), all of them '
    'every round, 200 rounds of 5 local epochs (Fashion-MNIST: 1), Adam 1e-3 '
    'and 1e-4 from round 25 (60) on, batch 64, of which the paper says '
    'nothing; non-IID is Dirichlet 0.5 over clients.'
)
CPU = 'Here with widths an eighth and 10 rounds of one epoch.'


def shorten(config):
  """Less than `cpu`: all clients take part, on maps of 16 x 16 and more."""
  config.model.width = 0.125
  config.num_rounds = 10
  config.local.epochs = 1
  config.eval_every = 2
  if config.algorithm.name == 'fedgkt':
    config.algorithm.server_epochs = 2


def get_table(scale: str = SCALES[0]) -> Table:
  """All of the paper's rows on its four columns, three seeds.

  Run: `python -m launch.sweep --table=fedin_v1_table2 --data_dir=DIR`.

  FedGKT-clients are the clients' own nets of the runs of FedGKT-server, as mean
  over clients. The paper has one run a cell.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  rows = _papers.fedin_rows(METHODS, COLUMNS, scale)
  if scale == 'cpu':
    for cells in rows.values():
      for config in cells.values():
        shorten(config)
  labels = (*METHODS, 'FedGKT-clients')
  return Table(
      title='FedIN v1, Table II',
      setting=_papers.in_words(
          scale,
          f'{SETTING} FedGKT: 10 epochs on the server a round. HeteroFL: model '
          'A at the widths of fix_a4-b2-c2-d1-e1.',
          f'{CPU} FedGKT: 2 epochs on the server.',
      ),
      rows=rows,
      paper=_papers.fedin_paper(
          paper_targets.fedin_v1_table_2,
          {label: label for label in labels},
          COLUMNS,
      ),
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      views={'FedGKT-clients': ('FedGKT-server', 'clients')},
  )
