"""Does FedHe help wider nets? 500 images a client, up to the paper's width."""

from fedjax_het.configs.tables import fedhe_ablation

from fedjax_het.reporting.results_table import Table

COLUMNS = {
    'width 1/8': 0.125,
    'width 1/4': 0.25,
    'width 1/2': 0.5,
    'width 1': 1.0,
}
ROWS = ('Private', 'FedHe')


def _cell(row: str, width: float):
  config = fedhe_ablation.cell(fedhe_ablation.METHODS[row], 500)
  config.model.width = width
  return config


def get_table() -> Table:
  """Two rows, four widths, one seed.

  Run: `python -m launch.sweep --table=fedhe_width --data_dir=DIR`. The width
  1/8 is a column of `fedhe_ablation`.

  Returns:
    The table; the setting is ours but for the paper's width, 1.
  """
  return Table(
      title='FedHe and local training by the width of the model',
      setting=(
          'CIFAR-10, IID, ten clients of 500 images, model 9 of FedHe '
          'everywhere, three minibatches of 50 a visit, Adam 1e-3, kept '
          'between visits, 500 rounds: a client sees each image 150 times, as '
          'in the paper, which has 5,000 images a client. Dropout as in the '
          'paper. Four personal models are evaluated.'
      ),
      rows={
          row: {name: _cell(row, width) for name, width in COLUMNS.items()}
          for row in ROWS
      },
      paper={},
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
  )
