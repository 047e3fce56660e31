"""Does FedHe help wider nets? Up to the paper's width and images a client."""

from fedjax_het.configs.tables import fedhe_ablation

from fedjax_het.reporting.results_table import Table

# Width, images per client, rounds of 150 images a client, models.
COLUMNS = {
    'width 1/8': (0.125, 500, 500, 'homogeneous'),
    'width 1/4': (0.25, 500, 500, 'homogeneous'),
    'width 1/2': (0.5, 500, 500, 'homogeneous'),
    'width 1': (1.0, 500, 500, 'homogeneous'),
    'width 1/4 and 5000 images': (0.25, 5000, 2000, 'homogeneous'),
    'width 1 and 5000 images': (1.0, 5000, 2000, 'homogeneous'),
    'ten CNNs and width 1/2 and 5000 images': (0.5, 5000, 1000, ''),
}
ROWS = ('Private', 'FedHe')


def _cell(row: str, width: float, images: int, rounds: int, models: str):
  config = fedhe_ablation.cell(
      fedhe_ablation.METHODS[row], images, models=models
  )
  config.model.width = width
  config.num_rounds = rounds
  # Ten curve points at most: an evaluation takes as long as many rounds.
  config.eval_every = config.checkpoint_every = 50 if images == 500 else 200
  return config


def get_table() -> Table:
  """Two rows; seven columns, three with the paper's images; one seed.

  Run: `python -m launch.sweep --table=fedhe_width --data_dir=DIR`. The width
  1/8 is a column of `fedhe_ablation`.

  Returns:
    The table; the setting is ours.
  """
  return Table(
      title='FedHe and local training by the width of the model',
      setting=(
          'CIFAR-10, IID, ten clients of 500 images, model 9 of FedHe '
          'everywhere, three minibatches of 50 a visit, Adam 1e-3, kept '
          'between visits, 500 rounds: a client sees each image 150 times, as '
          'in the paper, which has 5,000 images a client and 5,000 rounds. '
          'Columns with 5,000 images have 2,000 rounds, in which each image '
          'is seen 60 times, and with ten CNNs, the paper\'s, 1,000 rounds: '
          '30 times. Dropout as in the paper. Four personal models are '
          'evaluated, of the ten CNNs all.'
      ),
      rows={
          row: {name: _cell(row, *values) for name, values in COLUMNS.items()}
          for row in ROWS
      },
      paper={},
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
  )
